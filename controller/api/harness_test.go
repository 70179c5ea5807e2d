package api_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const interval = 7 * time.Second

// fixture is both doors of a controller on a store in memory.
type fixture struct {
	t         *testing.T
	store     *store.Store
	authority *identity.Authority
	sessions  *api.SessionService
	routers   *api.RouterService
	telemetry *api.TelemetryService
	admin     func(*lead.Members) *api.AdminService
	rollouts  *api.RolloutService // of one among several

	rolloutsOf func(conduct.Others) *api.RolloutService

	log  *logBuffer
	keys map[string]ed25519.PrivateKey // of routers

	door      *door.Server
	agents    listener
	operators *bufconn.Listener
}

// listener is a door that tests connect to.
type listener interface {
	DialContext(ctx context.Context) (net.Conn, error)
}

// tcp is a door on the loopback.
type tcp struct{ address string }

func (l tcp) DialContext(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", l.address)
}

// logBuffer keeps what is logged.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newFixtureThat(t, api.SessionConfig{Interval: interval})
}

// newFixtureThat is newFixture with sessions kept in another way.
func newFixtureThat(t *testing.T, sessions api.SessionConfig) *fixture {
	t.Helper()
	return newFixtureOn(t, storetest.NewKV(), t.TempDir(), sessions)
}

// newFixtureOn is a controller among several: they share the KV and the folder
// of the authority.
func newFixtureOn(t *testing.T, kv store.KV, dir string, sessions api.SessionConfig) *fixture {
	t.Helper()
	f := &fixture{t: t, log: &logBuffer{}, keys: map[string]ed25519.PrivateKey{}}
	logger := hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: f.log})
	f.store = storetest.Start(t, kv, store.Config{}, func(c store.Change) { f.sessions.Changed(c) })
	var err error
	if f.authority, err = identity.Open(dir, time.Now()); err != nil {
		t.Fatal(err)
	}
	hub, table := fleet.NewHub(), telemetry.New(telemetry.Config{Interval: interval})
	f.sessions = api.NewSessionService(f.store, hub, table, sessions, logger)
	f.rolloutsOf = func(others conduct.Others) *api.RolloutService {
		return api.NewRolloutService(f.store, hub, conduct.New(f.store, hub, others, logger))
	}

	agentsTLS, err := f.authority.AgentsTLS()
	if err != nil {
		t.Fatal(err)
	}
	operatorsTLS, err := f.authority.OperatorsTLS()
	if err != nil {
		t.Fatal(err)
	}
	f.door = door.New(door.Config{
		TLS: agentsTLS, Method: api.SessionMethod, Open: f.sessions.OpenSession, Unary: api.AgentsDoor(logger), Logger: logger,
	})
	enrollment := api.NewEnrollmentService(f.store, f.authority, logger)
	api.RegisterAgents(f.door, enrollment)
	f.agents = f.serveAgents()
	f.routers, f.telemetry = api.NewRouterService(f.store, hub), api.NewTelemetryService(f.store, hub, table, nil)
	f.admin = func(m *lead.Members) *api.AdminService { return api.NewAdminService(f.store, hub, m) }
	f.operators = f.serve(operatorsTLS, api.OperatorsDoor(access.New(f.store), api.DefaultViewerLabels, logger), func(s *grpc.Server) {
		pb.RegisterPlanServiceServer(s, api.NewPlanService(f.store))
		pb.RegisterRouterServiceServer(s, f.routers)
		pb.RegisterTelemetryServiceServer(s, f.telemetry)
		pb.RegisterTokenServiceServer(s, api.NewTokenService(f.store, f.authority))
		pb.RegisterJoinServiceServer(s, api.NewJoinService(f.store, enrollment))
		pb.RegisterSubscriberServiceServer(s, panicking{})
	})
	return f
}

// panicking is a service with a fault.
type panicking struct {
	pb.UnimplementedSubscriberServiceServer
}

func (panicking) GetSubscriber(context.Context, *pb.GetSubscriberRequest) (*pb.GetSubscriberResponse, error) {
	panic("secret detail")
}

func (f *fixture) serveAgents() listener {
	f.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.door.Serve(l); err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(func() {
		f.door.Stop()
		wg.Wait()
		f.sessions.Wait()
	})
	return tcp{l.Addr().String()}
}

func (f *fixture) serve(t *tls.Config, door []grpc.ServerOption, register func(*grpc.Server)) *bufconn.Listener {
	l := bufconn.Listen(1 << 20)
	s := grpc.NewServer(append(door, grpc.Creds(credentials.NewTLS(t)), grpc.WaitForHandlers(true))...)
	register(s)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // a test may end before this begins
			f.t.Error(err)
		}
	})
	f.t.Cleanup(func() {
		s.Stop()
		wg.Wait()
	})
	return l
}

// dial connects to a door with a certificate; nil: without one.
func (f *fixture) dial(l listener, cert *tls.Certificate) *grpc.ClientConn {
	f.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(f.authority.CertificatePEM())
	c := &tls.Config{RootCAs: roots, ServerName: identity.ServerName}
	if cert != nil {
		c.Certificates = []tls.Certificate{*cert}
	}
	conn, err := grpc.NewClient("passthrough:controller",
		grpc.WithTransportCredentials(credentials.NewTLS(c)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// key returns the key of a router, the same every time.
func (f *fixture) key(id string) (ed25519.PrivateKey, plan.Key) {
	f.t.Helper()
	if f.keys[id] == nil {
		f.keys[id] = newKey(f.t)
	}
	known, err := identity.KeyOf(f.keys[id].Public().(ed25519.PublicKey))
	if err != nil {
		f.t.Fatal(err)
	}
	return f.keys[id], known
}

func (f *fixture) routerCert(id string) *tls.Certificate {
	f.t.Helper()
	key, _ := f.key(id)
	der, err := f.authority.SignRouter(key.Public().(ed25519.PublicKey), id, time.Now())
	if err != nil {
		f.t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (f *fixture) operatorCert() *tls.Certificate {
	f.t.Helper()
	text, err := f.authority.Operator("admin", time.Now())
	if err != nil {
		f.t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.store.EnsureAdmin(f.t.Context(), "admin", api.OperatorCertificate(pair.Leaf, "", time.Now()), true); err != nil {
		f.t.Fatal(err)
	}
	return &pair
}

func link(rate engine.BitsPerSecond) plan.Link {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = rate, rate/10
	return l
}

// setPlan stores a plan and returns its link.
func (f *fixture) setPlan(name string, rate engine.BitsPerSecond) plan.Link {
	f.t.Helper()
	l := link(rate)
	if _, err := f.store.PutPlan(f.t.Context(), plan.Plan{Name: name, Link: l}, store.Any); err != nil {
		f.t.Fatal(err)
	}
	return l
}

// setRouter stores a router that serves a subscriber with a plan.
func (f *fixture) setRouter(id, planName string) {
	f.t.Helper()
	if _, err := f.store.PutSubscriber(f.t.Context(), plan.Subscriber{ID: "sub-" + id, Plan: planName}, store.Any); err != nil {
		f.t.Fatal(err)
	}
	_, key := f.key(id)
	if _, err := f.store.PutRouter(f.t.Context(), plan.Router{ID: id, Subscriber: "sub-" + id, Key: key}, store.Any); err != nil {
		f.t.Fatal(err)
	}
}

// agent is a session that a test drives by hand.
type agent struct {
	t      *testing.T
	id     string
	stream pb.SessionService_ConnectClient
}

// connect opens a session and says hello.
func (f *fixture) connect(id string, hello *pb.Hello) *agent {
	f.t.Helper()
	a := f.stream(id, f.dial(f.agents, f.routerCert(id)))
	hello.RouterId, hello.BootId = id, "boot-1"
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: hello}})
	m, err := a.stream.Recv()
	if err != nil {
		f.t.Fatal(err)
	}
	if got := m.GetSettings().GetReportInterval().AsDuration(); got != interval {
		f.t.Fatalf("first message is %v, want settings", m)
	}
	return a
}

func (f *fixture) stream(id string, conn *grpc.ClientConn) *agent {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 2*time.Minute)
	f.t.Cleanup(cancel)
	stream, err := pb.NewSessionServiceClient(conn).Connect(ctx)
	if err != nil {
		f.t.Fatal(err)
	}
	return &agent{t: f.t, id: id, stream: stream}
}

func (a *agent) send(m *pb.ConnectRequest) {
	a.t.Helper()
	if err := a.stream.Send(m); err != nil {
		a.t.Fatal(err)
	}
}

// desired returns the next message, which must be a desired state.
func (a *agent) desired() *pb.Desired {
	a.t.Helper()
	m, err := a.stream.Recv()
	if err != nil {
		a.t.Fatal(err)
	}
	if m.GetDesired() == nil {
		a.t.Fatalf("received %v, want a desired state", m)
	}
	return m.GetDesired()
}

// apply answers that d runs.
func (a *agent) apply(d *pb.Desired) {
	a.t.Helper()
	a.status(&pb.Status{
		Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedRevision: d.GetRevision(),
		AppliedHash: d.GetHash(), EffectiveHash: d.GetHash(), Effective: d.GetLink(),
	})
}

func (a *agent) status(s *pb.Status) {
	a.t.Helper()
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: s}})
}

func (a *agent) report(r *pb.Report) {
	a.t.Helper()
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Report{Report: r}})
}

// ends returns the code that the session ends with.
func (a *agent) ends() codes.Code {
	a.t.Helper()
	for {
		_, err := a.stream.Recv()
		if errors.Is(err, io.EOF) {
			return codes.OK
		}
		if err != nil {
			return status.Code(err)
		}
	}
}

// eventually waits until a condition holds that a message on its way makes
// true.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// router returns a router as operators see it.
func (f *fixture) router(conn *grpc.ClientConn, id string) *pb.Router {
	f.t.Helper()
	resp, err := pb.NewRouterServiceClient(conn).GetRouter(f.t.Context(), &pb.GetRouterRequest{Id: id})
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.GetRouter()
}

// waitSync waits until operators see home-1 in a state.
func (f *fixture) waitSync(conn *grpc.ClientConn, want pb.SyncState) *pb.Router {
	f.t.Helper()
	var r *pb.Router
	eventually(f.t, "home-1 is "+want.String(), func() bool {
		r = f.router(conn, "home-1")
		return r.GetSession().GetSync() == want
	})
	return r
}
