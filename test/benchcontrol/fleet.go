package main

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const planName = "gold"

// siteSize is how many routers a site has. The history keeps 63 series of each
// site, so that small ones cost more.
const siteSize = 50

// provision writes a fleet of n routers into a data directory.
func provision(ctx context.Context, dir string, n int) error {
	if _, err := identity.Open(dir, time.Now()); err != nil {
		return err
	}
	st, err := store.OpenEtcd(ctx, store.Config{DataDir: dir})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running errgroup.Group
	running.Go(func() error { return st.Run(ctx) })
	err = fill(ctx, st, n)
	cancel()
	if errRun := running.Wait(); err == nil {
		err = errRun
	}
	if errClose := st.Close(); err == nil {
		err = errClose
	}
	return err
}

func fill(ctx context.Context, st *store.Store, n int) error {
	if _, err := st.PutPlan(ctx, plan.Plan{Name: planName, Link: linkOf(0)}, store.Any); err != nil {
		return err
	}
	writes := make([]store.SubscriberWrite, n)
	for i := range writes {
		writes[i] = store.SubscriberWrite{Subscriber: plan.Subscriber{
			ID: strconv.Itoa(4_700_000 + i), Plan: planName, Labels: map[string]string{"site": fmt.Sprintf("site-%03d", i/siteSize)},
		}}
	}
	if _, err := st.WriteSubscribers(ctx, writes); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(128)
	for i := range n {
		g.Go(func() error {
			id := routerID(i)
			key, err := identity.KeyOf(keyOf(id).Public().(ed25519.PublicKey))
			if err != nil {
				return err
			}
			_, err = st.PutRouter(ctx, plan.Router{ID: id, Subscriber: strconv.Itoa(4_700_000 + i), Key: key}, store.Any)
			return err
		})
	}
	return g.Wait()
}

// linkOf is the plan's link after i changes.
func linkOf(i int) plan.Link {
	l := plan.DefaultLink()
	l.Down.Rate, l.Up.Rate = 115e6+engine.BitsPerSecond(i)*1e6, 12e6
	return l
}

// controller is a running one.
type controller struct {
	cmd       *exec.Cmd
	agents    string
	operators string
	admin     string
}

var welcome = regexp.MustCompile(`agents connect to (\S+), operators to (\S+)`)

// startController starts the program and waits until its doors are open.
func startController(ctx context.Context, binary string, args ...string) (*controller, error) {
	admin, err := freeAddress()
	if err != nil {
		return nil, err
	}
	cmd := command(ctx, binary, append([]string{
		"--listen-agents", "127.0.0.1:0", "--listen-operators", "127.0.0.1:0", "--listen-http", "", "--listen-admin", admin, "--log-level", "warn",
	}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if m := welcome.FindStringSubmatch(lines.Text()); m != nil {
			go func() { // until the program ends
				for lines.Scan() {
				}
			}()
			return &controller{cmd, m[1], m[2], admin}, nil
		}
	}
	return nil, fmt.Errorf("the controller did not start: %w", cmd.Wait())
}

func (c *controller) stop() {
	_ = c.cmd.Process.Signal(os.Interrupt) // it may have ended
	_ = c.cmd.Wait()                       // how does not matter
}

// benchFleet measures controllers and their agents.
func benchFleet(ctx context.Context, o options) (p pushed, err error) {
	binary := o.program
	if binary == "" {
		if binary, err = o.build(ctx, "github.com/cakefleet/cakefleet/cmd/cakefleet-controller"); err != nil {
			return p, err
		}
	}
	from, count := o.groups()

	empty, err := emptyController(ctx, binary, filepath.Join(o.dir, "empty"))
	if err != nil {
		return p, err
	}
	dir := filepath.Join(o.dir, "fleet")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return p, err
	}
	began := time.Now()
	if err := provision(ctx, dir, o.n); err != nil {
		return p, err
	}
	fmt.Printf("# %d routers stored in %v\n", o.n, time.Since(began).Round(time.Second))
	var all crowd
	defer func() { all.stop() }()
	var pids []int
	var started []*controller
	for i := range from {
		args := []string{"--data-dir", dir}
		if i > 0 { // the first one's etcd serves all
			args = []string{
				"--data-dir", filepath.Join(o.dir, fmt.Sprintf("more-%d", i)), "--etcd-endpoints", "unix://" + filepath.Join(dir, "etcd", "client.sock"),
				"--ca-cert", filepath.Join(dir, "ca.pem"), "--ca-key", filepath.Join(dir, "ca.key"),
			}
		}
		if o.rate > 0 {
			args = append(args, "--admit-rate", fmt.Sprint(o.rate/float64(len(from))))
		}
		c, err := startController(ctx, binary, args...)
		if err != nil {
			return p, err
		}
		defer c.stop()
		started = append(started, c)
		pids = append(pids, c.cmd.Process.Pid)
		kid, err := startChild(ctx, "agents", "--dir", dir, "--address", c.agents,
			"--from", strconv.Itoa(from[i]), "--count", strconv.Itoa(count[i]), "--source", strconv.Itoa(1+i))
		if err != nil {
			return p, err
		}
		all = append(all, kid)
	}
	memory := func() float64 { // of all agents
		u, err := used(pids...)
		if err != nil {
			return 0
		}
		return float64(u.resident) - float64(len(pids))*empty
	}
	// The agents come in two halves: of the second what each takes is told from
	// what is taken once, such as the history of all sites.
	var connectCPU, took time.Duration
	var taken [2]float64
	for i, word := range []string{"half", "rest"} {
		n := o.half()
		if word == "rest" {
			n = o.n
		}
		before, err := used(pids...)
		if err != nil {
			return p, err
		}
		began := time.Now()
		if _, err := all.ask(word); err != nil {
			return p, err
		}
		if err := all.until(ctx, "all agents in sync", 10*time.Minute, func(a answer) bool { return a.Connected >= n && a.Answered >= n }); err != nil {
			return p, err
		}
		took += time.Since(began)
		after, err := used(pids...)
		if err != nil {
			return p, err
		}
		connectCPU += after.cpu - before.cpu
		if err := all.until(ctx, "reports of all agents", 5*time.Minute, func(a answer) bool { return a.Reported >= n }); err != nil {
			return p, err
		}
		if err := remembered(ctx, started); err != nil {
			return p, err
		}
		taken[i] = memory()
	}
	if _, err := all.ask("quiet"); err != nil {
		return p, err
	}
	time.Sleep(2 * time.Second)
	connectUS := float64(connectCPU.Microseconds()) / float64(o.n)
	marginal := (taken[1] - taken[0]) / float64(o.n-o.half())
	o.print("control-connect-cpu", connectUS, "us-per-agent")
	o.print("control-connect-rate", float64(o.n)/took.Seconds(), "agents-per-second")
	o.print("control-memory-connected", taken[1]/float64(o.n), "bytes-per-agent")
	o.print("control-memory-marginal", marginal, "bytes-per-agent")
	o.print("control-memory-fixed", taken[1]-marginal*float64(o.n), "bytes")

	ops, err := operator(dir, started[0].operators)
	if err != nil {
		return p, err
	}
	defer func() { _ = ops.Close() }() // nothing is under way
	plans := pb.NewPlanServiceClient(ops)
	p, err = rounds(ctx, o, all, pids, func(i int) error {
		l := linkOf(i + 1)
		_, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: &pb.Plan{Name: planName, Link: wire.FromLink(&l)}})
		return err
	})
	if err != nil {
		return p, err
	}
	p.memory, p.handshakeUS = memory()/float64(o.n), connectUS
	o.print("control-memory", p.memory, "bytes-per-agent")
	o.print("control-memory-process", empty, "bytes")
	o.print("control-push-cpu", p.cpu, "us-per-agent")
	o.print("control-push-p50", p.p50.Seconds()*1e3, "ms")
	o.print("control-push-p99", p.p99.Seconds()*1e3, "ms")
	o.print("control-push-last", p.last.Seconds()*1e3, "ms")
	if o.storm {
		err = storm(ctx, o, all, started, pids, memory)
	}
	return p, err
}

// emptyController returns what a controller takes without a fleet, bytes. It is
// one that was started before, as the fleet's is: the file of the store inside
// has its first 16 MiB then, all of which etcd maps.
func emptyController(ctx context.Context, binary, dir string) (float64, error) {
	var u usage
	for range 2 {
		c, err := startController(ctx, binary, "--data-dir", dir)
		if err != nil {
			return 0, err
		}
		time.Sleep(2 * time.Second)
		u, err = used(c.cmd.Process.Pid)
		c.stop()
		if err != nil {
			return 0, err
		}
	}
	return float64(u.resident), nil
}

// remembered waits until the histories have all that there is now: routers'
// own series are written with every other step.
func remembered(ctx context.Context, started []*controller) error {
	const steps = `cakefleet_history_steps_total{result="written"}`
	for _, c := range started {
		was, err := c.metric(ctx, steps)
		if err != nil {
			return err
		}
		for is := was; is < was+2; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second):
			}
			if is, err = c.metric(ctx, steps); err != nil {
				return err
			}
		}
	}
	return nil
}

// metric returns one of the controller's.
func (c *controller) metric(ctx context.Context, name string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.admin+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("the controller has no %s", name)
}

// offer adds up what all controllers would have let in until now.
func offer(ctx context.Context, started []*controller) (sum float64, err error) {
	for _, c := range started {
		// How many it would have let in until now if always one had waited.
		n, err := c.metric(ctx, "cakefleet_agent_admit_offered_total")
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// storm breaks all connections at once.
func storm(ctx context.Context, o options, all crowd, started []*controller, pids []int, memory func() float64) error {
	memoryBefore := memory()
	if _, err := all.ask("take"); err != nil {
		return err
	}
	before, err := used(pids...)
	if err != nil {
		return err
	}
	letIn, err := offer(ctx, started)
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := all.ask("break"); err != nil {
		return err
	}
	back := func(a answer) bool { return a.Connected >= o.n }
	if err := all.until(ctx, "all agents back", 15*time.Minute, back); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := used(pids...)
	if err != nil {
		return err
	}
	until, err := offer(ctx, started)
	if err != nil {
		return err
	}
	// The admission's own drain time is that at the rates at which the doors did
	// admit: they go down when the CPU, which the agents here share, does not
	// keep up. Each door has its own total of them.
	rate := (until - letIn) / time.Since(began).Seconds()
	drain := float64(o.n) / rate
	cpu := (after.cpu - before.cpu).Seconds()
	// What was garbage is given back with the next collections, of which there is
	// one in two minutes at least.
	ratio, given := 0.0, time.Now()
	for ratio = memory() / memoryBefore; ratio > 1.2 && time.Since(given) < 150*time.Second; ratio = memory() / memoryBefore {
		time.Sleep(2 * time.Second)
	}
	o.print("control-storm-time", took.Seconds(), "s")
	o.print("control-storm-admit-rate", rate, "agents-per-second")
	o.print("control-storm-time-vs-drain", took.Seconds()/drain, "ratio")
	o.print("control-storm-cpu", cpu/took.Seconds(), "cores")
	o.print("control-storm-cpu-per-agent", cpu*1e6/float64(o.n), "us-per-agent")
	o.print("control-storm-memory-vs-before", ratio, "ratio")
	o.print("control-storm-memory-after", time.Since(given).Seconds(), "s")
	return nil
}

// operator connects with the credentials that the first start wrote.
func operator(dir, address string) (*grpc.ClientConn, error) {
	file := filepath.Join(dir, "operator.pem")
	pair, err := tls.LoadX509KeyPair(file, file)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	return grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		RootCAs: roots, ServerName: identity.ServerName, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13,
	})))
}
