package fleet_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
	"github.com/cakefleet/cakefleet/test/fleet/model"
)

// load is a fleet at work on a cluster, and its history.
type load struct {
	*cluster
	store  *store.Store // of the harness, for what no API tells
	fleet  *simagent.Fleet
	agents map[string]*simagent.Agent
	plant  func(l *load, a *simagent.Agent, p simagent.Push, s plan.Status) (plan.Status, bool) // a fault of agents; nil: none

	began   time.Time
	stop    context.CancelFunc
	running sync.WaitGroup

	mu       sync.Mutex
	random   *mrand.Rand // guarded by mu
	history  model.History
	at       map[string]string       // controller of each agent's session; guarded by mu
	dialled  map[string]string       // where each agent went last; guarded by mu
	sessions map[string]int          // guarded by mu
	runs     map[string]plan.Desired // guarded by mu
	previous map[string]plan.Desired // what ran before; guarded by mu
	rate     uint64                  // of the newest write; guarded by mu
}

// newLoad makes plans, subscribers, routers and agents, and connects them.
func newLoad(t *testing.T, c *cluster, seed uint64, plans, routers int) *load {
	t.Helper()
	l := &load{
		cluster: c, began: time.Now(), random: mrand.New(mrand.NewPCG(seed, 1)), rate: 10_000_000,
		agents: map[string]*simagent.Agent{}, at: map[string]string{}, dialled: map[string]string{}, sessions: map[string]int{}, runs: map[string]plan.Desired{}, previous: map[string]plan.Desired{},
	}
	l.history.PlanOf = map[string]string{}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	if l.store, err = store.OpenEtcd(ctx, store.Config{Endpoints: c.endpoints}); err != nil {
		t.Fatal(err)
	}
	ctx, l.stop = context.WithCancel(context.WithoutCancel(t.Context()))
	l.running.Go(func() { _ = l.store.Run(ctx) })
	hash, err := identity.KeyOf(c.judge.Leaf.PublicKey.(ed25519.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	_, err = l.store.CreateOperator(ctx, store.Operator{Name: "judge", Role: identity.Admin, Credentials: []store.Credential{
		{ID: "judge", Hash: hash, Role: identity.Admin, Created: time.Now(), Expires: time.Now().Add(24 * time.Hour)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, conn := range c.operators {
		up := func() bool {
			_, err := pb.NewPlanServiceClient(conn).ListPlans(ctx, &pb.ListPlansRequest{})
			select {
			case <-c.controllers[i].done:
				t.Fatalf("%s has ended", c.controllers[i].name)
			default:
			}
			return err == nil
		}
		if !wait(ctx, up) {
			t.Fatalf("%s does not answer", c.controllers[i].name)
		}
	}
	for i := range plans {
		l.mustWrite(ctx, fmt.Sprintf("plan-%d", i), c.operators[0], 0)
	}
	l.fleet = &simagent.Fleet{TLS: &tls.Config{RootCAs: c.roots, MinVersion: tls.VersionTLS13}, Version: "v1", Model: "simulated", ReportEvery: -1}
	l.fleet.Address = l.address
	l.fleet.Hooks = simagent.Hooks{Apply: l.apply, Began: l.beganSession, Ended: func(a *simagent.Agent, _ error, _ time.Duration) {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.at, a.RouterID)
	}}
	for i := range routers {
		l.join(ctx, fmt.Sprintf("r%03d", i), fmt.Sprintf("plan-%d", i%plans))
	}
	for _, a := range l.agents {
		l.running.Go(func() { a.Run(ctx) })
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.running.Wait()
	_ = l.store.Close() // the test has ended
}

// join makes a router that may come in.
func (l *load) join(ctx context.Context, id, planName string) {
	l.t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		l.t.Fatal(err)
	}
	cert, err := l.authority.SignRouter(pub, id, time.Now())
	if err != nil {
		l.t.Fatal(err)
	}
	k, err := identity.KeyOf(pub)
	if err != nil {
		l.t.Fatal(err)
	}
	if _, err := l.store.PutSubscriber(ctx, plan.Subscriber{ID: id, Plan: planName}, 0); err != nil {
		l.t.Fatal(err)
	}
	if _, err := l.store.PutRouter(ctx, plan.Router{ID: id, Subscriber: id, Key: k}, 0); err != nil {
		l.t.Fatal(err)
	}
	l.history.PlanOf[id] = planName
	l.agents[id] = l.fleet.New(id, "boot-"+id, tls.Certificate{Certificate: [][]byte{cert}, PrivateKey: key})
}

// note adds to the history. mu is held.
func (l *load) noteLocked(e model.Event) {
	e.Time = time.Since(l.began)
	l.history.Events = append(l.history.Events, e)
}

// address sends an agent to a controller that has not failed.
func (l *load) address(a *simagent.Agent) (string, net.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		p := l.controllers[l.random.IntN(len(l.controllers))]
		if !p.isFaulty() {
			l.dialled[a.RouterID] = p.name
			return p.ip + ":8443", nil
		}
	}
}

func (l *load) beganSession(a *simagent.Agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions[a.RouterID]++
	l.at[a.RouterID] = l.dialled[a.RouterID]
	l.noteLocked(model.Event{Kind: model.Began, Router: a.RouterID, Session: l.sessions[a.RouterID], At: l.at[a.RouterID]})
}

// apply is an agent that reads a push.
func (l *load) apply(a *simagent.Agent, p simagent.Push) (plan.Status, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	session := l.sessions[a.RouterID]
	l.noteLocked(model.Event{Kind: model.Pushed, Router: a.RouterID, Session: session, Nonce: p.Nonce, Revision: int64(p.Desired.Revision), Hash: p.Desired.Hash})
	s, ok := p.Applied(), true
	if l.plant != nil {
		s, ok = l.plant(l, a, p, s)
	}
	if s.AppliedHash != l.runs[a.RouterID].Hash {
		l.noteLocked(model.Event{Kind: model.Applied, Router: a.RouterID, Revision: int64(s.Applied), Hash: s.AppliedHash})
		l.previous[a.RouterID] = l.runs[a.RouterID]
	}
	l.runs[a.RouterID] = plan.Desired{Revision: s.Applied, Hash: s.AppliedHash, Link: s.Effective}
	if ok {
		l.noteLocked(model.Event{Kind: model.Answered, Router: a.RouterID, Session: session, Nonce: p.Nonce})
	}
	return s, ok
}

// before returns what an agent ran before what it runs. mu is held.
func (l *load) before(id string) plan.Desired { return l.previous[id] }

// write changes a plan through a controller. down is its rate; 0: a new one.
func (l *load) write(ctx context.Context, name string, conn *grpc.ClientConn, down uint64) (confirmed bool) {
	l.mu.Lock()
	l.rate += 1000
	if down == 0 {
		down = l.rate
	}
	l.mu.Unlock()
	link := plan.DefaultLink()
	link.Down.Rate, link.Up.Rate = engine.BitsPerSecond(down), engine.BitsPerSecond(down/10)
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	resp, err := pb.NewPlanServiceClient(conn).UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: &pb.Plan{Name: name, Link: wire.FromLink(&link)}, AllowMissing: true})
	e := model.Event{Kind: model.Wrote, Plan: name, Revision: resp.GetPlan().GetRevision(), Hash: link.Hash()}
	if err != nil {
		e.Kind = model.MaybeWrote
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noteLocked(e)
	return err == nil
}

// mustWrite is write until it is confirmed.
func (l *load) mustWrite(ctx context.Context, name string, conn *grpc.ClientConn, down uint64) {
	l.t.Helper()
	if !wait(ctx, func() bool { return l.write(ctx, name, conn, down) }) {
		l.t.Fatalf("%s can't be written", name)
	}
}

// count returns how often something has happened so far.
func (l *load) count(kind model.Kind) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.history.Events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// healthy returns a connection to a controller that has not failed, or to any if
// all have.
func (l *load) healthy() (*process, *grpc.ClientConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.random.IntN(len(l.controllers))
	for range l.controllers { // each once: on a slow machine all may be on their way up
		if !l.controllers[i].isFaulty() {
			break
		}
		i = (i + 1) % len(l.controllers)
	}
	return l.controllers[i], l.operators[i]
}

// work changes plans and looks at routers until ctx ends.
func (l *load) work(ctx context.Context, plans int) {
	for ctx.Err() == nil {
		l.mu.Lock()
		name := fmt.Sprintf("plan-%d", l.random.IntN(plans))
		l.mu.Unlock()
		_, conn := l.healthy()
		l.write(ctx, name, conn, 0)
		l.look(ctx)
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// look notes what a controller says of all routers.
func (l *load) look(ctx context.Context) {
	p, conn := l.healthy()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	resp, err := pb.NewRouterServiceClient(conn).ListRouters(ctx, &pb.ListRoutersRequest{})
	if err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range resp.GetRouters() {
		if r.GetSession().GetSync() == pb.SyncState_SYNC_STATE_IN_SYNC {
			l.noteLocked(model.Event{Kind: model.Showed, Router: r.GetId(), At: p.name, Revision: r.GetReported().GetAppliedRevision(), Hash: r.GetReported().GetAppliedHash()})
		}
	}
}

// failed notes that a controller has failed, and lets its agents find out.
func (l *load) failed(p *process, after time.Duration) {
	l.mu.Lock()
	var there []string
	for id, at := range l.at {
		if at == p.name {
			there = append(there, id)
		}
	}
	l.noteLocked(model.Event{Kind: model.Failed, At: p.name, Routers: there})
	l.mu.Unlock()
	l.running.Go(func() {
		time.Sleep(after)
		for _, id := range there {
			l.mu.Lock()
			still := l.at[id] == p.name
			l.mu.Unlock()
			if still {
				l.agents[id].Break()
			}
		}
	})
}

// finish waits until all is as it was written last, for some time, and returns
// the history so far.
func (l *load) finish(limit time.Duration) model.History {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), limit)
	defer cancel()
	wait(ctx, l.settled)
	led := l.steps()
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.history
	h.Events = slices.Concat(h.Events, led)
	return h
}

// settled brings the end of the history up to date and tells whether all is
// well.
func (l *load) settled() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &l.history
	h.Plans, h.Runs, h.Shown = map[string]model.State{}, map[string]model.State{}, map[string]map[string]string{}
	for i, conn := range l.operators {
		call, cancel := context.WithTimeout(l.t.Context(), 3*time.Second)
		if i == 0 {
			// What etcd has, not what a controller has seen.
			for name := range l.planNames() {
				if all, err := l.store.PlanHistory(call, name); err == nil {
					h.Plans[name] = model.State{Revision: int64(all[0].Revision), Hash: all[0].Link.Hash()}
				}
			}
		}
		shown := map[string]string{}
		h.Shown[l.controllers[i].name] = shown
		resp, err := pb.NewRouterServiceClient(conn).ListRouters(call, &pb.ListRoutersRequest{})
		cancel()
		if err != nil {
			continue
		}
		for _, r := range resp.GetRouters() {
			shown[r.GetId()] = strings.ToLower(r.GetSession().GetSync().String())
			if r.GetSession().GetSync() == pb.SyncState_SYNC_STATE_IN_SYNC {
				shown[r.GetId()] = "in sync"
			}
		}
	}
	for id := range l.agents {
		h.Runs[id] = model.State{Revision: int64(l.runs[id].Revision), Hash: l.runs[id].Hash}
	}
	return len(model.Judge(model.History{PlanOf: h.PlanOf, Plans: h.Plans, Runs: h.Runs, Shown: h.Shown})) == 0
}

func (l *load) planNames() map[string]bool {
	names := map[string]bool{}
	for _, name := range l.history.PlanOf {
		names[name] = true
	}
	return names
}

// steps returns the led work that was done so far.
func (l *load) steps() (done []model.Event) {
	l.t.Helper()
	kv, err := l.store.Leases()
	if err != nil {
		l.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	var items []store.Item
	// etcd may be without a leader for a moment.
	if !wait(ctx, func() bool { items, _, err = kv.List(ctx, stepsKey); return err == nil }) {
		l.t.Fatal(err)
	}
	for _, it := range items {
		e := model.Event{Time: time.Since(l.began), Kind: model.Led, By: string(it.Value)}
		if _, err := fmt.Sscanf(strings.TrimPrefix(it.Key, stepsKey), "%d/", &e.Step); err != nil {
			l.t.Fatal(err)
		}
		done = append(done, e)
	}
	return done
}

// ledByTwo reports whether two did the same step.
func (l *load) ledByTwo() bool {
	l.t.Helper()
	return slices.ContainsFunc(model.Judge(model.History{Events: l.steps()}), func(v model.Violation) bool { return v.Rule == "led by two" })
}
