package fleet_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store/etcdtest"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// network is where the nodes of a cluster are: each in a namespace, or all on
// this machine's loopback, where nothing can be cut off.
type network struct {
	base  int                // second byte of the addresses on the loopback
	core  *testnet.Namespace // nil: loopback
	nodes map[string]*testnet.Namespace
}

// ip returns the address of a node.
func (n *network) ip(kind, i int) string {
	if n.core == nil {
		return fmt.Sprintf("127.%d.%d.%d", n.base, kind, i)
	}
	return fmt.Sprintf("10.77.%d.%d", kind, i)
}

// process is one member of etcd or one controller.
type process struct {
	name, ip string
	part     part
	net      *network
	log      *os.File
	cmd      *exec.Cmd
	done     chan struct{}

	mu     sync.Mutex
	faulty bool // guarded by mu; killed, stopped or cut off
}

func (p *process) start(t *testing.T) {
	t.Helper()
	text, err := json.Marshal(p.part)
	if err != nil {
		t.Fatal(err)
	}
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), partEnv+"="+string(text))
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	start := p.cmd.Start
	if ns := p.net.nodes[p.name]; ns != nil {
		start = func() error { return ns.Start(p.cmd) }
	}
	if err := start(); err != nil {
		t.Fatalf("start %s: %v", p.name, err)
	}
	done := make(chan struct{})
	p.done = done
	go func(cmd *exec.Cmd) {
		_ = cmd.Wait() // how it ends is the test's doing
		close(done)
	}(p.cmd)
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) end() {
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

func (p *process) isFaulty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.faulty
}

func (p *process) setFaulty(is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faulty = is
}

// cluster is members of etcd and controllers.
type cluster struct {
	t           *testing.T
	net         *network
	authority   *identity.Authority
	etcd        []*process
	controllers []*process
	operators   []*grpc.ClientConn // of the controllers
	endpoints   []string
	dir         string // of the controller with an embedded etcd
	roots       *x509.CertPool
	judge       tls.Certificate // of the operator that the test is
}

// newCluster starts processes. Without members of etcd the controller, which is
// the only one, has it inside. change may
// change what controllers do.
func newCluster(t *testing.T, net *network, members, controllers int, change func(*controllerPart)) *cluster {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "cff") //nolint:usetesting // short: the embedded etcd has a socket in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &cluster{t: t, net: net}
	if c.authority, err = identity.Open(dir, time.Now()); err != nil {
		t.Fatal(err)
	}
	c.roots = x509.NewCertPool()
	c.roots.AppendCertsFromPEM(c.authority.CertificatePEM())
	pem, err := c.authority.Operator("judge", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if c.judge, err = tls.X509KeyPair(pem, pem); err != nil {
		t.Fatal(err)
	}
	peers := map[string]string{}
	for i := range members {
		peers[fmt.Sprintf("etcd-%d", i+1)] = net.ip(1, i+1)
		c.endpoints = append(c.endpoints, etcdtest.Endpoint(net.ip(1, i+1)))
	}
	for i := range members {
		name := fmt.Sprintf("etcd-%d", i+1)
		c.etcd = append(c.etcd, c.process(dir, name, peers[name], part{Etcd: &etcdtest.Member{Dir: filepath.Join(dir, name), Name: name, Cluster: peers}}))
	}
	for i := range controllers {
		name := fmt.Sprintf("controller-%d", i+1)
		cp := &controllerPart{Name: name, Dir: filepath.Join(dir, name), IP: net.ip(2, i+1), Endpoints: c.endpoints, CA: dir}
		if change != nil {
			change(cp)
		}
		c.controllers = append(c.controllers, c.process(dir, name, cp.IP, part{Controller: cp}))
	}
	if members == 0 {
		c.endpoints = []string{"unix://" + filepath.Join(dir, "controller-1", "etcd", "client.sock")}
		c.dir = filepath.Join(dir, "controller-1")
	}
	for _, p := range c.controllers {
		c.operators = append(c.operators, c.dial(p.ip+":8444"))
	}
	return c
}

func (c *cluster) process(dir, name, ip string, what part) *process {
	c.t.Helper()
	log, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		c.t.Fatal(err)
	}
	p := &process{name: name, ip: ip, part: what, net: c.net, log: log}
	p.start(c.t)
	c.t.Cleanup(func() {
		p.end()
		_ = log.Close()
		if text, err := os.ReadFile(log.Name()); err == nil && c.t.Failed() {
			c.t.Logf("%s said:\n%s", name, text[max(0, len(text)-3000):])
		}
	})
	return p
}

// dial returns a connection of an operator.
func (c *cluster) dial(address string) *grpc.ClientConn {
	c.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: c.roots, ServerName: identity.ServerName, Certificates: []tls.Certificate{c.judge}, MinVersion: tls.VersionTLS13,
		})),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: time.Second}))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// namespaces returns a network with a namespace for each node of a cluster. The
// caller must be in the core's namespace to reach them.
func namespaces(core *testnet.Namespace, prefix string, members, controllers int) (*network, func() error, error) {
	n := &network{core: core, nodes: map[string]*testnet.Namespace{}}
	closeAll := func() error {
		var errs []error
		for _, ns := range n.nodes {
			errs = append(errs, ns.Close())
		}
		return errors.Join(errs...)
	}
	var ports []string
	add := func(kind, i int, name string) error {
		ns, err := testnet.New(prefix + name)
		if err != nil {
			return err
		}
		n.nodes[name] = ns
		port := fmt.Sprintf("p%d-%d", kind, i)
		ports = append(ports, port)
		if err := testnet.Veth(core, port, ns, "eth0"); err != nil {
			return err
		}
		return ns.Addr("eth0", n.ip(kind, i)+"/16")
	}
	for i := range members {
		if err := add(1, i+1, fmt.Sprintf("etcd-%d", i+1)); err != nil {
			return n, closeAll, err
		}
	}
	for i := range controllers {
		if err := add(2, i+1, fmt.Sprintf("controller-%d", i+1)); err != nil {
			return n, closeAll, err
		}
	}
	if err := core.Bridge("br0", ports...); err != nil {
		return n, closeAll, err
	}
	return n, closeAll, core.Addr("br0", "10.77.0.1/16")
}

// cut takes a node's cable out, or puts it back.
func (n *network) cut(p *process, is bool) error {
	port := ""
	var kind, i int
	if _, err := fmt.Sscanf(p.ip, "10.77.%d.%d", &kind, &i); err != nil {
		return err
	}
	port = fmt.Sprintf("p%d-%d", kind, i)
	if is {
		return n.core.Down(port)
	}
	return n.core.Up(port)
}

// wait polls until ok or ctx ends.
func wait(ctx context.Context, ok func() bool) bool {
	for !ok() {
		select {
		case <-ctx.Done():
			return ok()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return true
}
