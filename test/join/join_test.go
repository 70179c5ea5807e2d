// Package join tests how routers come into a fleet, stay in it and are put out
// of it: a whole controller with its etcd, and whole agents on a data plane
// without packets, over real mTLS.
package join

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	agentidentity "github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/controller/controllertest"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

// isp is a controller with an operator.
type isp struct {
	t       *testing.T
	dir     string
	address string // of the agents' door
	log     *logBuffer
	ready   *controllertest.Running
	stop    func()

	routers pb.RouterServiceClient
	tokens  pb.TokenServiceClient
	joins   pb.JoinServiceClient
}

func newISP(t *testing.T) *isp {
	t.Helper()
	p := &isp{t: t, dir: t.TempDir(), log: &logBuffer{}, address: "127.0.0.1:0"}
	r, err := p.run(false)
	if err != nil {
		t.Fatal(err)
	}
	p.operate(r)
	return p
}

// run runs a controller on the folder until stop, or the test, ends.
func (p *isp) run(replaceAuthority bool) (*controllertest.Running, error) {
	p.t.Helper()
	cfg := controllertest.Config(p.dir)
	cfg.ListenAgents = p.address
	cfg.History.Retention = 0
	cfg.ReplaceAuthority = replaceAuthority
	cfg.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: p.log})
	r, err := controllertest.Run(cfg)
	if err != nil {
		return nil, err
	}
	p.address, p.ready = r.Agents.String(), r
	p.stop = sync.OnceFunc(func() {
		if err := r.Stop(); err != nil {
			p.t.Errorf("controller: %v", err)
		}
	})
	p.t.Cleanup(p.stop)
	return r, nil
}

// connect connects an operator.
func (p *isp) connect(r *controllertest.Running) *grpc.ClientConn {
	p.t.Helper()
	conn := r.Operate(p.t)
	p.routers, p.tokens, p.joins = pb.NewRouterServiceClient(conn), pb.NewTokenServiceClient(conn), pb.NewJoinServiceClient(conn)
	return conn
}

// operate connects an operator and makes a plan with a subscriber.
func (p *isp) operate(r *controllertest.Running) {
	conn := p.connect(r)
	l := plan.DefaultLink()
	l.Down.Rate, l.Up.Rate = 20e6, 2e6
	if _, err := pb.NewPlanServiceClient(conn).CreatePlan(p.t.Context(), &pb.CreatePlanRequest{Plan: &pb.Plan{Name: "gold", Link: wire.FromLink(&l)}}); err != nil {
		p.t.Fatal(err)
	}
	if _, err := pb.NewSubscriberServiceClient(conn).CreateSubscriber(p.t.Context(), &pb.CreateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "10001", Plan: "gold"}}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *isp) token(router string) string {
	p.t.Helper()
	resp, err := p.tokens.CreateToken(p.t.Context(), &pb.CreateTokenRequest{RouterId: router, Subscriber: "10001"})
	if err != nil {
		p.t.Fatal(err)
	}
	return resp.GetSecret()
}

func (p *isp) router(id string) *pb.Router {
	p.t.Helper()
	resp, err := p.routers.GetRouter(p.t.Context(), &pb.GetRouterRequest{Id: id})
	if err != nil {
		p.t.Fatal(err)
	}
	return resp.GetRouter()
}

// inSync waits until a router runs what it should.
func (p *isp) inSync(id string) {
	p.t.Helper()
	eventually(p.t, id+" is in sync", func() bool {
		resp, err := p.routers.GetRouter(p.t.Context(), &pb.GetRouterRequest{Id: id}) // which may not have joined yet
		return err == nil && resp.GetRouter().GetSession().GetSync() == pb.SyncState_SYNC_STATE_IN_SYNC
	})
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// box is a router with its flash.
type box struct {
	t     *testing.T
	p     *isp
	dir   string
	token string
	pin   string
	plane *dataplanetest.Fake
	log   *logBuffer
	mu    sync.Mutex // guards token
	stop  func()
}

func (p *isp) box() *box { return &box{t: p.t, p: p, dir: p.t.TempDir(), log: &logBuffer{}} }

// start gives the box power.
func (b *box) start() {
	b.t.Helper()
	b.plane = &dataplanetest.Fake{}
	a, err := agent.New(agent.Config{
		Controller: b.p.address, StateDir: b.dir, Version: "test", Model: "box", Serial: "SN1", Pin: b.pin, Dataplane: b.plane,
		Token: func() (string, error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.token, nil
		},
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: b.log}),
	})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	b.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("agent: %v", err)
		}
	})
	b.t.Cleanup(b.stop)
}

func (b *box) setToken(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.token = text
}

// shapes says that the box shapes with the plan's rate, and has never stopped.
func (b *box) shapes() {
	b.t.Helper()
	h := b.plane.History()
	if len(h) == 0 || h[len(h)-1].Down.Rate != engine.BitsPerSecond(20e6) || b.plane.Clears() != 0 {
		b.t.Errorf("applied %d times, cleared %d times", len(h), b.plane.Clears())
	}
}

func (b *box) logs(text string) {
	b.t.Helper()
	eventually(b.t, "log of the agent has "+text, func() bool { return strings.Contains(b.log.String(), text) })
}

// TestFleet055 leaves a router without power until its certificate has ended.
// It shapes at once, says what is wrong, and comes back by itself, with the key
// that it had, without a token.
func TestFleet055_ExpiredCertificateComesBack(t *testing.T) {
	p := newISP(t)
	b := p.box()
	b.token = p.token("home-1")
	b.start()
	p.inSync("home-1")
	b.stop()
	b.token = ""

	id, err := agentidentity.Load(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := identity.Open(p.dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	long := time.Now().Add(-200 * 24 * time.Hour)
	der, err := authority.SignRouter(id.Key.Public().(ed25519.PublicKey), "home-1", long)
	if err != nil {
		t.Fatal(err)
	}
	if id.Leaf, err = x509.ParseCertificate(der); err != nil || id.Leaf.NotAfter.After(time.Now()) {
		t.Fatal(err)
	}
	if err := id.Save(b.dir); err != nil {
		t.Fatal(err)
	}
	b.start()
	eventually(t, "shaping before the controller", func() bool { return len(b.plane.History()) > 0 })
	b.logs("the certificate has ended")
	p.inSync("home-1")
	b.shapes()
	now, err := agentidentity.Load(b.dir)
	if err != nil || !now.Key.Equal(id.Key) || time.Until(now.Leaf.NotAfter) < 89*24*time.Hour {
		t.Errorf("identity until %v, %v", now.Leaf.NotAfter, err)
	}

	// The same without the router: it has been removed meanwhile, and waits.
	b.stop()
	if err := id.Save(b.dir); err != nil {
		t.Fatal(err)
	}
	if _, err := p.routers.DeleteRouter(t.Context(), &pb.DeleteRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	b.start()
	b.logs("waits for an operator")
	eventually(t, "shaping though removed", func() bool { return len(b.plane.History()) > 0 })
	b.shapes()
}

// TestFleet056 restarts a router with the token that it has used in its
// configuration: the certificate wins, and nothing is deleted.
func TestFleet056_StaleTokenAndValidCertificate(t *testing.T) {
	p := newISP(t)
	b := p.box()
	b.token = p.token("home-1")
	b.start()
	p.inSync("home-1")
	b.stop()
	before, err := os.ReadFile(filepath.Join(b.dir, "identity.pem"))
	if err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{b.token, "rubbish", "cf1.a.b.c"} {
		b.token = token
		b.start()
		p.inSync("home-1")
		b.shapes()
		b.stop()
		if after, err := os.ReadFile(filepath.Join(b.dir, "identity.pem")); err != nil || !bytes.Equal(before, after) {
			t.Errorf("token %.7q: the identity is another one, %v", token, err)
		}
	}
}

// TestFleet057 revokes a router that runs: its session ends, it is told why and
// goes on shaping. With a new token it makes a new key and is in again, without
// a restart.
func TestFleet057_RevokedAndBack(t *testing.T) {
	p := newISP(t)
	b := p.box()
	b.token = p.token("home-1")
	b.start()
	p.inSync("home-1")
	key := p.router("home-1").GetFingerprint()
	if _, err := p.routers.RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1", Reason: "stolen from the van"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session ends", func() bool { return !p.router("home-1").GetSession().GetConnected() })
	b.logs("stolen from the van")
	b.shapes()
	b.stop() // who is refused asks again after a minute; a restart is sooner
	b.setToken(p.token("home-1"))
	b.start()
	p.inSync("home-1")
	b.shapes()
	if r := p.router("home-1"); r.GetFingerprint() == key || r.GetRevocation() != nil {
		t.Errorf("router %v", r)
	}
	// What it was before the new identity is there in case this one is damaged.
	if err := os.WriteFile(filepath.Join(b.dir, "identity.pem"), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if old, err := agentidentity.Load(b.dir); err != nil || old.Damage == nil || old.RouterID != "home-1" {
		t.Errorf("after damage: %+v, %v", old, err)
	}
}

// TestFleet058 rehearses the end of the fleet's authority, by the runbook in
// the help of cakefleet-controller: with an authority that has ended a controller
// does not start, with another one only if that is meant, and then every router
// joins it by a join token or an approval that reaches it without a visit. It
// shapes all the time, and keeps its old identity until it has the new one.
func TestFleet058_AuthorityReplaced(t *testing.T) {
	p := newISP(t)
	b := p.box()
	b.token = p.token("home-1")
	b.start()
	p.inSync("home-1")
	p.stop()

	files := []string{filepath.Join(p.dir, "ca.pem"), filepath.Join(p.dir, "ca.key")}
	for _, file := range files {
		if err := os.Rename(file, file+".good"); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Now().AddDate(-31, 0, 0)
	if _, err := identity.Open(p.dir, long); err != nil { // one that was made 31 years ago
		t.Fatal(err)
	}
	if _, err := p.run(false); err == nil || !strings.Contains(err.Error(), "ca.pem: ended at ") || !strings.Contains(err.Error(), "--replace-authority") {
		t.Fatalf("with an authority that has ended: %v", err)
	}
	for _, file := range files {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.run(false); err == nil || !strings.Contains(err.Error(), "is of a fleet with another authority") || !strings.Contains(err.Error(), "--replace-authority") {
		t.Fatalf("with another authority: %v", err)
	}
	r, err := p.run(true)
	if err != nil {
		t.Fatal(err)
	}
	p.connect(r)
	b.logs("the controller shows another authority than the router's")
	b.shapes()
	before, err := agentidentity.Load(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	if s := p.router("home-1").GetSession(); s.GetConnected() {
		t.Error("a router of the old authority is let in")
	}

	b.stop() // it looks at its token again after a minute; a restart is sooner
	b.setToken(p.token("home-1"))
	b.start()
	p.inSync("home-1")
	b.shapes()
	after, err := agentidentity.Load(b.dir)
	if err != nil || after.Authorities[0].Equal(before.Authorities[0]) || after.RouterID != "home-1" {
		t.Errorf("the identity is %+v (%v)", after, err)
	}
	p.stop()
	if _, err := p.run(false); err != nil { // it is the fleet's now
		t.Error(err)
	}
	b.shapes()
}

// An agent that knows only the fleet's pin waits, is approved, and joins. With
// the pin of another fleet it says nothing to this one.
func TestApproval(t *testing.T) {
	p := newISP(t)
	authority, err := p.joins.GetAuthority(t.Context(), &pb.GetAuthorityRequest{})
	if err != nil {
		t.Fatal(err)
	}
	lost := p.box()
	lost.pin = base64.RawURLEncoding.EncodeToString(make([]byte, 32))
	lost.start()
	lost.logs("authority that the router was told to trust")
	lost.stop()

	b := p.box()
	b.pin = authority.GetPin()
	b.start()
	b.logs("waits for an operator: cakefleetctl router approve")
	list, err := p.joins.ListPending(t.Context(), &pb.ListPendingRequest{})
	if err != nil || len(list.GetPending()) != 1 || list.GetPending()[0].GetSerial() != "SN1" || list.GetPending()[0].GetModel() != "box" {
		t.Fatalf("%v, %v", list, err)
	}
	fingerprint := list.GetPending()[0].GetFingerprint()
	key, err := agentidentity.OwnKey(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	if own, err := agentidentity.Fingerprint(key); err != nil || own != fingerprint {
		t.Errorf("the router says %s, %v; the operator sees %s", own, err, fingerprint)
	}
	if _, err := p.joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: fingerprint[:8], RouterId: "home-1", Subscriber: "10001"}); err != nil {
		t.Fatal(err)
	}
	b.stop() // it would ask again within a minute; a restart is sooner
	b.start()
	p.inSync("home-1")
	b.shapes()
}

// TestFleet048 copies the flash of a router to a second one. Both live; they
// are put in quarantine and go on shaping. A token for the right one ends it.
func TestFleet048_ClonedFlash(t *testing.T) {
	p := newISP(t)
	b, clone := p.box(), p.box()
	b.token = p.token("home-1")
	b.start()
	p.inSync("home-1")
	b.stop()
	if err := os.CopyFS(clone.dir, os.DirFS(b.dir)); err != nil {
		t.Fatal(err)
	}
	b.token = ""
	b.start()
	clone.start()
	eventually(t, "quarantine", func() bool { return p.router("home-1").GetQuarantine() != nil })
	b.logs("two devices have its key")
	clone.logs("two devices have its key")
	b.shapes()
	clone.shapes()
	r := p.router("home-1")
	if d := r.GetQuarantine().GetDevices(); len(d) != 2 || d[0].GetBootId() == d[1].GetBootId() || d[0].GetAddress() == d[1].GetAddress() {
		t.Errorf("devices %v", d)
	}
	eventually(t, "nobody is connected", func() bool { return !p.router("home-1").GetSession().GetConnected() })
	b.stop()
	b.setToken(p.token("home-1"))
	b.start()
	p.inSync("home-1")
	if p.router("home-1").GetQuarantine() != nil {
		t.Error("still in quarantine with a key of its own")
	}
}

// Whatever happens to a router, the log of its agent, at the most talkative
// level, has no secret of it.
func TestAgentLogsNothingSecret(t *testing.T) {
	p := newISP(t)
	b := p.box()
	b.token = p.token("home-1")
	secret := strings.Split(b.token, ".")[2]
	b.start()
	p.inSync("home-1")
	if _, err := p.routers.RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1", Reason: "for the log"}); err != nil {
		t.Fatal(err)
	}
	b.logs("for the log")
	b.stop()
	text, err := os.ReadFile(filepath.Join(b.dir, "identity.pem"))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := base64.RawURLEncoding.DecodeString(secret)
	if err != nil {
		t.Fatal(err)
	}
	needles := map[string][]byte{"secret": raw}
	for n, rest := 0, text; ; n++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		needles[block.Type+string(rune('0'+n))] = block.Bytes[len(block.Bytes)-32:]
	}
	for whose, log := range map[string]string{"agent": b.log.String(), "controller": p.log.String()} {
		for name, raw := range needles {
			for _, spelling := range []string{string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw[:30]), base64.RawURLEncoding.EncodeToString(raw[:30])} {
				if strings.Contains(log, spelling) {
					t.Errorf("the %s is in the log of the %s", name, whose)
				}
			}
		}
	}
}
