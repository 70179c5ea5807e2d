package controller_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller"
	"github.com/cakefleet/cakefleet/controller/controllertest"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a controller with its own etcd, on ports of the loopback.
type running struct {
	*controllertest.Running
	t   *testing.T
	dir string
}

// config is one with every door.
func config(dir string) controller.Config {
	c := controllertest.Config(dir)
	c.ListenHTTP, c.ListenAdmin = "127.0.0.1:0", "127.0.0.1:0"
	return c
}

// start runs a controller on a data directory until stop, or the test, ends.
func start(t *testing.T, dir string, change ...func(*controller.Config)) *running {
	t.Helper()
	c := config(dir)
	c.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: testWriter{t}})
	for _, fn := range change {
		fn(&c)
	}
	return &running{controllertest.Start(t, c), t, dir}
}

// testWriter shows the log of a test that fails.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

// enroll trades a token for a certificate.
func (r *running) enroll(token string) tls.Certificate {
	r.t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := pb.NewEnrollmentServiceClient(r.Dial(r.t, r.Agents)).Enroll(r.t.Context(), &pb.EnrollRequest{Token: token, Csr: csr})
	if err != nil {
		r.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{resp.GetCertificate()}, PrivateKey: key}
}

// session opens one and returns what comes.
func (r *running) session(cert tls.Certificate, hello *pb.Hello) (pb.SessionService_ConnectClient, func() *pb.Desired) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	r.t.Cleanup(cancel)
	stream, err := pb.NewSessionServiceClient(r.Dial(r.t, r.Agents, cert)).Connect(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := stream.Send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: hello}}); err != nil {
		r.t.Fatal(err)
	}
	return stream, func() *pb.Desired {
		r.t.Helper()
		for {
			m, err := stream.Recv()
			if err != nil {
				r.t.Fatal(err)
			}
			if m.GetDesired() != nil {
				return m.GetDesired()
			}
		}
	}
}

func answer(t *testing.T, stream pb.SessionService_ConnectClient, s *pb.Status) {
	t.Helper()
	if err := stream.Send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: s}}); err != nil {
		t.Fatal(err)
	}
}

func applied(d *pb.Desired) *pb.Status {
	return &pb.Status{
		Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedRevision: d.GetRevision(),
		AppliedHash: d.GetHash(), EffectiveHash: d.GetHash(), Effective: d.GetLink(),
	}
}

// waitSync waits until operators see home-1 in a state.
func waitSync(t *testing.T, ops *grpc.ClientConn, want pb.SyncState) *pb.Router {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		resp, err := pb.NewRouterServiceClient(ops).GetRouter(t.Context(), &pb.GetRouterRequest{Id: "home-1"})
		if err != nil {
			t.Fatal(err)
		}
		got := resp.GetRouter().GetSession().GetSync()
		if got == want {
			return resp.GetRouter()
		}
		if time.Now().After(end) {
			t.Fatalf("home-1 is %v, want %v", got, want)
		}
	}
}

func setGold(t *testing.T, ops *grpc.ClientConn, rate engine.BitsPerSecond) *pb.Plan {
	t.Helper()
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = rate, rate/10
	resp, err := pb.NewPlanServiceClient(ops).UpdatePlan(t.Context(), &pb.UpdatePlanRequest{
		Plan: &pb.Plan{Name: "gold", Link: wire.FromLink(&l)}, AllowMissing: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetPlan()
}

// TestFirstLight goes the whole way of an operator and a router on the real
// parts: a plan, a subscriber, a token, a certificate, a session, a change, a
// refusal, a restart of the controller.
func TestFirstLight(t *testing.T) {
	dir := t.TempDir()
	r := start(t, dir)
	if !r.NewFile || r.Credentials != filepath.Join(dir, "operator.pem") {
		t.Errorf("first start: %+v", r.Ready)
	}
	ops := r.Operate(t)
	setGold(t, ops, 20e6)
	if _, err := pb.NewSubscriberServiceClient(ops).CreateSubscriber(t.Context(), &pb.CreateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "4711", Plan: "gold"}}); err != nil {
		t.Fatal(err)
	}
	tokens := pb.NewTokenServiceClient(ops)
	var secrets []string
	for _, id := range []string{"home-1", "home-2"} {
		resp, err := tokens.CreateToken(t.Context(), &pb.CreateTokenRequest{RouterId: id, Subscriber: "4711"})
		if err != nil {
			t.Fatal(err)
		}
		secrets = append(secrets, resp.GetSecret())
	}
	cert := r.enroll(secrets[0])
	stream, desired := r.session(cert, &pb.Hello{RouterId: "home-1", BootId: "b"})
	d := desired()
	if d.GetLink().GetDown().GetRateBps() != 20e6 {
		t.Fatalf("desired %v", d)
	}
	answer(t, stream, applied(d))
	waitSync(t, ops, pb.SyncState_SYNC_STATE_IN_SYNC)

	// Each change of the plan is one revision of etcd, pushed by itself. A
	// controller that has just started may write something else in between.
	for try := 1; ; try++ {
		first := setGold(t, ops, 30e6)
		d = desired()
		answer(t, stream, applied(d))
		waitSync(t, ops, pb.SyncState_SYNC_STATE_IN_SYNC)
		second := setGold(t, ops, 40e6)
		d = desired()
		if d.GetRevision() != second.GetRevision() || d.GetLink().GetDown().GetRateBps() != 40e6 {
			t.Errorf("pushed %v", d)
		}
		answer(t, stream, applied(d))
		waitSync(t, ops, pb.SyncState_SYNC_STATE_IN_SYNC)
		if second.GetRevision() == first.GetRevision()+1 {
			break
		}
		if try == 5 {
			t.Errorf("a change takes etcd from revision %d to %d", first.GetRevision(), second.GetRevision())
			break
		}
	}
	running := d

	setGold(t, ops, 10e9)
	d = desired()
	refusal := applied(running)
	refusal.Nonce, refusal.Outcome, refusal.Error = d.GetNonce(), pb.Outcome_OUTCOME_REJECTED, "down.rate: too much"
	answer(t, stream, refusal)
	if got := waitSync(t, ops, pb.SyncState_SYNC_STATE_REJECTED); got.GetReported().GetError() != "down.rate: too much" {
		t.Errorf("shown reason: %v", got.GetReported())
	}
	setGold(t, ops, 40e6)
	waitSync(t, ops, pb.SyncState_SYNC_STATE_IN_SYNC)

	// The controller goes, with a live session, and comes back.
	if err := r.Stop(); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the session ended with %v", err)
	}
	r = start(t, dir)
	if r.NewFile {
		t.Error("credentials were written again")
	}
	ops = r.Operate(t)
	waitSync(t, ops, pb.SyncState_SYNC_STATE_OFFLINE)
	got, err := pb.NewPlanServiceClient(ops).GetPlan(t.Context(), &pb.GetPlanRequest{Name: "gold"})
	if err != nil || got.GetPlan().GetLink().GetDown().GetRateBps() != 40e6 || got.GetPlan().GetRouters() != 1 {
		t.Errorf("plan after the restart: %v, %v", got, err)
	}
	// What it runs is what it should: nothing is sent until that changes.
	_, desired = r.session(cert, &pb.Hello{RouterId: "home-1", BootId: "b", AppliedRevision: running.GetRevision(), AppliedHash: running.GetHash(), EffectiveHash: running.GetHash()})
	waitSync(t, ops, pb.SyncState_SYNC_STATE_IN_SYNC)
	// The token that was not used is good, the other is not.
	_, other := r.session(r.enroll(secrets[1]), &pb.Hello{RouterId: "home-2", BootId: "b"})
	if d := other(); d.GetHash() != running.GetHash() {
		t.Errorf("second router is sent %v", d)
	}
	_, err = pb.NewEnrollmentServiceClient(r.Dial(r.t, r.Agents)).Enroll(t.Context(), &pb.EnrollRequest{Token: secrets[0]})
	if status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.Unauthenticated {
		t.Errorf("used token: %v", err)
	}
	setGold(t, ops, 50e6)
	for _, next := range []func() *pb.Desired{desired, other} {
		if d := next(); d.GetLink().GetDown().GetRateBps() != 50e6 {
			t.Errorf("pushed %v", d)
		}
	}
}

func TestRunSaysWhatIsWrong(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	used := start(t, t.TempDir())
	for name, c := range map[string]struct {
		change func(*controller.Config)
		want   string
	}{
		"no data directory":        {func(c *controller.Config) { c.DataDir = "" }, "data directory is missing"},
		"data directory is taken":  {func(c *controller.Config) { c.DataDir = used.dir }, "another controller uses it"},
		"data directory is a file": {func(c *controller.Config) { c.DataDir = file }, "data directory"},
		"agents' port":             {func(c *controller.Config) { c.ListenAgents = taken.Addr().String() }, "listen for agents: "},
		"operators' port":          {func(c *controller.Config) { c.ListenOperators = taken.Addr().String() }, "listen for operators: "},
		"no port":                  {func(c *controller.Config) { c.ListenAgents = "localhost" }, "missing port"},
		"half an authority":        {func(c *controller.Config) { c.CACert = "x" }, "given together"},
		"no such authority":        {func(c *controller.Config) { c.CACert, c.CAKey = "/nowhere/a", "/nowhere/b" }, "authority certificate: open /nowhere/a"},
		"etcd without endpoints":   {func(c *controller.Config) { c.EtcdCACert = "x" }, "none is given"},
		"half an etcd identity":    {func(c *controller.Config) { c.EtcdCert = "x" }, "given together"},
		"no such etcd authority": {func(c *controller.Config) {
			c.EtcdEndpoints, c.EtcdCACert = []string{"https://127.0.0.1:1"}, "/nowhere/a"
		}, "etcd authority: open /nowhere/a"},
		// A second controller that was started on the fleet's etcd and made an
		// authority of its own would refuse all routers of the first.
		"another authority": {func(c *controller.Config) {
			c.EtcdEndpoints, c.ListenPeers = []string{"unix://" + filepath.Join(used.dir, "etcd", "client.sock")}, "127.0.0.1:0"
		}, "the store is of a fleet with another authority: pin "},
		"report interval": {func(c *controller.Config) { c.ReportInterval = time.Millisecond }, "report interval 1ms: must be"},
	} {
		t.Run(name, func(t *testing.T) {
			config := config(t.TempDir())
			config.ListenPeers = "127.0.0.1:0"
			config.Ready = func(controller.Ready) { t.Error("it runs") }
			c.change(&config)
			ctl, err := controller.New(config)
			if err == nil {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err = ctl.Run(ctx)
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want it to say %q", err, c.want)
			}
		})
	}
}

// TestGivenAuthority: the authority of the files signs, and none is made.
func TestGivenAuthority(t *testing.T) {
	given := t.TempDir()
	authority, err := identity.Open(given, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, t.TempDir(), func(c *controller.Config) {
		c.CACert, c.CAKey = filepath.Join(given, "ca.pem"), filepath.Join(given, "ca.key")
	})
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.CertificatePEM())
	conn, err := tls.Dial("tcp", r.Agents.String(), &tls.Config{RootCAs: roots, ServerName: identity.ServerName})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	// A router that has only the pin finds the authority in the chain.
	chain := conn.ConnectionState().PeerCertificates
	if sha256.Sum256(chain[len(chain)-1].RawSubjectPublicKeyInfo) != authority.Pin() {
		t.Error("the last certificate of the chain is not the authority's")
	}
	if _, err := os.Stat(filepath.Join(r.dir, "ca.key")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an authority was made: %v", err)
	}
}
