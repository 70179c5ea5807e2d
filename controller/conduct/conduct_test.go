package conduct_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// home is one router with its session.
type home struct {
	id      string
	f       *fixture
	session *fleet.Session
	woken   chan struct{}
	stop    context.CancelFunc
	done    chan struct{}

	mu   sync.Mutex
	runs *plan.Link // guarded by mu
	told int        // guarded by mu: pushes of another link than before
}

// fixture is a controller with routers that answer at once.
type fixture struct {
	t       *testing.T
	kv      *storetest.KV
	store   *store.Store
	hub     *fleet.Hub
	conduct *conduct.Conductor
	homes   map[string]*home
	refuses func(id string, l *plan.Link) bool
	slow    func(id string, l *plan.Link) bool

	mu   sync.Mutex
	most map[engine.BitsPerSecond]int // guarded by mu: routers that had a rate at once
}

func (h *home) Woken() {
	select {
	case h.woken <- struct{}{}:
	default:
	}
}

func (*home) Ended(error) {}

func newFixture(t *testing.T, n int) *fixture {
	t.Helper()
	f := &fixture{t: t, kv: storetest.NewKV(), hub: fleet.NewHub(), homes: map[string]*home{}, most: map[engine.BitsPerSecond]int{}}
	f.store = storetest.Start(t, f.kv, store.Config{}, func(c store.Change) {
		f.conduct.Changed(c)
		f.store.View(func(st *store.State) {
			for id := range st.Affected(c) {
				f.hub.Wake(id)
			}
		})
	})
	f.conduct = conduct.New(f.store, f.hub, conduct.Alone{}, hclog.NewNullLogger())
	_, err := f.store.PutPlan(t.Context(), storetest.Plan("gold", 100, 10), 0)
	f.check(err)
	var subs []store.SubscriberWrite
	for i := range n {
		subs = append(subs, store.SubscriberWrite{Subscriber: plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold", Labels: map[string]string{"site": fmt.Sprint("s", i%4)}}})
	}
	_, err = f.store.WriteSubscribers(t.Context(), subs)
	f.check(err)
	for i := range n {
		id := fmt.Sprint("r", i)
		_, err := f.store.PutRouter(t.Context(), plan.Router{ID: id, Subscriber: fmt.Sprint(i)}, 0)
		f.check(err)
		f.homes[id] = &home{id: id, f: f, woken: make(chan struct{}, 1)}
	}
	for _, h := range f.homes {
		h.connect()
	}
	t.Cleanup(func() {
		for _, h := range f.homes {
			h.leave()
		}
	})
	return f
}

func (f *fixture) check(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) desired(id string) (d plan.Desired) {
	f.store.View(func(st *store.State) { d, _ = resolve.Router(st, id, time.Now(), nil) })
	return d
}

func (h *home) connect() {
	ctx, stop := context.WithCancel(context.Background())
	h.stop, h.done = stop, make(chan struct{})
	h.session = h.f.hub.Open(h.id, fleet.Hello{BootID: "b", Model: "c7"}, "", time.Now(), h)
	h.Woken()
	go h.run(ctx)
}

func (h *home) leave() {
	if h.stop == nil {
		return
	}
	h.stop()
	<-h.done
	h.session.Close(time.Now())
	h.stop = nil
}

// run takes what is pushed, answers it, and reports every 10 s.
func (h *home) run(ctx context.Context) {
	defer close(h.done)
	report := time.NewTicker(10 * time.Second)
	defer report.Stop()
	wait := time.NewTimer(time.Hour)
	for {
		p, ok, again := h.session.Next(time.Now(), h.f.desired(h.id))
		if ok {
			h.answer(p)
			continue
		}
		if again <= 0 {
			again = time.Hour
		}
		wait.Reset(again)
		select {
		case <-h.woken:
		case <-wait.C:
		case <-report.C:
			h.report()
		case <-ctx.Done():
			return
		}
	}
}

// habits returns what routers refuse, and under what they are slow.
func (f *fixture) habits() (refuses, slow func(string, *plan.Link) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refuses, f.slow
}

func (h *home) answer(p fleet.Push) {
	d := p.Desired
	if refuses, _ := h.f.habits(); refuses != nil && refuses(h.id, d.Link) {
		h.session.Status(time.Now(), p.Nonce, plan.Status{Outcome: plan.OutcomeRejected, Error: "can't"})
		return
	}
	h.mu.Lock()
	if h.runs == nil || *h.runs != *d.Link {
		h.told++
	}
	h.runs = d.Link
	h.mu.Unlock()
	h.session.Status(time.Now(), p.Nonce, plan.Status{Outcome: plan.OutcomeApplied, Applied: d.Revision, AppliedHash: d.Hash, EffectiveHash: d.EffectiveHash(), Effective: d.Link})
	h.f.count()
}

func (h *home) link() plan.Link {
	h.mu.Lock()
	defer h.mu.Unlock()
	return *h.runs
}

func (h *home) times() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.told
}

// count notes how many routers have which rate.
func (f *fixture) count() {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := map[engine.BitsPerSecond]int{}
	for _, h := range f.homes {
		h.mu.Lock()
		if h.runs != nil {
			now[h.runs.Down.Rate]++
		}
		h.mu.Unlock()
	}
	for rate, n := range now {
		f.most[rate] = max(f.most[rate], n)
	}
}

// report counts ten seconds of traffic, slow or not.
func (h *home) report() {
	h.mu.Lock()
	link := h.runs
	h.mu.Unlock()
	if link == nil {
		return
	}
	bucket := uint8(40)
	if _, slow := h.f.habits(); slow != nil && slow(h.id, link) {
		bucket = 60
	}
	var d [2]rollup.Delta
	d[0].Packets, d[0].Bytes, d[0].N = 1000, 1_000_000, 1
	d[0].Tins[0].Sojourn = []rollup.Bucket{{Index: bucket, Count: 1000}}
	stats := engine.Stats{Config: link.Down}
	h.f.conduct.Counted(h.id, &telemetry.Counted{Span: 10 * time.Second, CPU: time.Second, Directions: &d, Stats: [2]*engine.Stats{&stats, nil}})
}

// lead makes this controller lead until the test ends, and returns how to stop
// it before.
func (f *fixture) lead() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- lead.New(f.kv, lead.Config{}).Run(ctx, conduct.Work, f.conduct.Run) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(stop)
	return stop
}

// start starts a rollout of plan gold to 200 Mbit/s.
func (f *fixture) start(id string, change func(*rollout.Spec)) rollout.Rollout {
	f.t.Helper()
	s := rollout.Spec{
		ID: id, Selector: rollout.Selector{Plan: "gold"}, Whole: true, Waves: rollout.DefaultWaves(), Soak: 10 * time.Minute, AnswerTime: time.Minute,
		MinSamples: 100, Author: "alice",
	}
	f.check(s.Set.Parse("down.rate", "200mbit"))
	for _, text := range []string{"nack < 5%", "p99_sojourn < 1.2x control"} {
		g, err := rollout.ParseGate(text)
		f.check(err)
		s.Gates = append(s.Gates, g)
	}
	var seen plan.Revision
	var targets []rollout.Target
	f.store.View(func(st *store.State) {
		seen = st.Revision()
		p, _ := st.Plan("gold")
		s.Base = p.Revision
		if change != nil {
			change(&s)
		}
		var err error
		targets, err = conduct.Targets(st, f.hub, s.Selector, "site")
		f.check(err)
	})
	places, err := s.Freeze(targets, 42)
	f.check(err)
	s.Selector.Routers = nil
	r, err := f.store.StartRollout(f.t.Context(), rollout.Rollout{Spec: s, State: rollout.State{Phase: rollout.Waiting}}, places, seen)
	f.check(err)
	return r
}

func (f *fixture) rollout(id string) (r rollout.Rollout) {
	f.store.View(func(st *store.State) {
		if l, ok := st.Rollout(id); ok {
			r = l.Rollout
		}
	})
	return r
}

// until waits for a phase.
func (f *fixture) until(id string, p rollout.Phase) rollout.Rollout {
	f.t.Helper()
	for range 1000 {
		r := f.rollout(id)
		if r.Phase == p {
			synctest.Wait()
			return r
		}
		if r.Phase.Final() {
			f.t.Fatalf("rollout is %v: %s; want %v", r.Phase, r.Reason, p)
		}
		time.Sleep(10 * time.Second)
	}
	f.t.Fatalf("rollout is still %v after hours, step %d", f.rollout(id).Phase, f.rollout(id).Opened)
	return rollout.Rollout{}
}

func (f *fixture) rates() map[engine.BitsPerSecond]int {
	n := map[engine.BitsPerSecond]int{}
	for _, h := range f.homes {
		h.mu.Lock()
		n[h.runs.Down.Rate]++
		h.mu.Unlock()
	}
	return n
}

const old, new = 100_000_000, 200_000_000

// A good change goes through its waves and becomes the plan. Its steps are as
// many writes as they are, whatever the number of routers.
func TestGoodChange(t *testing.T) {
	for _, n := range []int{20, 200} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, n)
			f.lead()
			time.Sleep(time.Minute)
			before := f.store.Revision()
			began := time.Now()
			f.start("faster", nil)
			r := f.until("faster", rollout.Completed)
			took := time.Since(began)
			if rates := f.rates(); rates[new] != n {
				t.Errorf("routers run %v", rates)
			}
			if !r.Settled || r.Places != "" || took < 40*time.Minute || took > 45*time.Minute {
				t.Errorf("took %v, settled %t, places %q", took, r.Settled, r.Places)
			}
			var p plan.Plan
			f.store.View(func(st *store.State) { p, _ = st.Plan("gold") })
			if p.Link.Down.Rate != new || p.Author != "alice" {
				t.Errorf("the plan has %v by %s", p.Link.Down.Rate, p.Author)
			}
			if len(r.Verdicts) != 8 || slices.ContainsFunc(r.Verdicts, func(v rollout.Verdict) bool { return v.Result != rollout.Pass }) {
				t.Errorf("verdicts: %+v", r.Verdicts)
			}
			// A lease is renewed without a revision.
			if writes := f.store.Revision() - before; writes > 20 {
				t.Errorf("%d writes for %d routers", writes, n)
			}
			for _, h := range f.homes {
				if told := h.times(); told != 2 {
					t.Errorf("router %s was told %d times", h.id, told)
				}
			}
		})
	}
}

// What routers refuse stops in the first wave and is taken back; what they had
// before is what they have again, whoever gave it to them.
func TestBadChange(t *testing.T) {
	for _, c := range []struct {
		name string
		bad  func(*fixture)
		why  string
	}{
		{"refused", func(f *fixture) {
			f.refuses = func(_ string, l *plan.Link) bool { return l.Down.Rate == new }
		}, "nack 100% is not < 5%"},
		{"slow", func(f *fixture) {
			f.slow = func(_ string, l *plan.Link) bool { return l.Down.Rate == new }
		}, "is not <"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, 100)
				f.mu.Lock()
				c.bad(f)
				f.mu.Unlock()
				f.lead()
				override := plan.Settings{}
				f.check(override.Parse("up.rate", "3mbit"))
				for i := range 100 {
					var sub plan.Subscriber
					f.store.View(func(st *store.State) { sub, _ = st.Subscriber(fmt.Sprint(i)) })
					_, err := f.store.PutSubscriber(t.Context(), sub.WithLayers(plan.Layers{Override: override}), sub.Revision)
					f.check(err)
				}
				time.Sleep(time.Minute)
				had := map[string]plan.Link{}
				for id, h := range f.homes {
					had[id] = h.link()
				}
				f.start("bad", func(s *rollout.Spec) { s.OnFailure = rollout.RollbackOnFailure })
				r := f.until("bad", rollout.RolledBack)
				if !strings.Contains(r.Reason, c.why) || r.Opened != 0 || r.Touched != 1 {
					t.Errorf("rolled back %d of %d: %s", r.Opened, r.Touched, r.Reason)
				}
				f.mu.Lock()
				most := f.most[new]
				f.mu.Unlock()
				if most > 1 {
					t.Errorf("%d routers had it, the first wave has 1", most)
				}
				has := map[string]plan.Link{}
				for id, h := range f.homes {
					has[id] = h.link()
				}
				if !maps.Equal(had, has) {
					t.Error("not every router has what it had")
				}
				again := r.Spec
				if !rollout.Held(&again, &r) {
					t.Error("it could be rolled out again at once")
				}
				f.check(again.Set.Parse("down.rate", "150mbit"))
				if rollout.Held(&again, &r) {
					t.Error("it is held after it was edited")
				}
			})
		})
	}
}

// A router that is away does not hold up the others, and gets the newest when it
// returns.
func TestFleet034_OfflineRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 20)
		f.lead()
		time.Sleep(time.Minute)
		f.homes["r7"].leave()
		f.homes["r8"].leave()
		f.start("faster", nil)
		time.Sleep(15 * time.Minute)
		f.homes["r8"].connect()
		f.until("faster", rollout.Completed)
		if rates := f.rates(); rates[old] != 1 || rates[new] != 19 {
			t.Errorf("routers run %v", rates)
		}
		f.homes["r7"].connect()
		time.Sleep(time.Second)
		synctest.Wait()
		if rates := f.rates(); rates[new] != 20 {
			t.Errorf("after its return: %v", rates)
		}
	})
}

// Without data nothing proceeds: it pauses, and promote and abort both work
// from there.
func TestFleet084_NoData(t *testing.T) {
	for _, c := range []rollout.Command{rollout.Promote, rollout.Abort} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, 20)
			f.lead()
			time.Sleep(time.Minute)
			f.start("dark", func(s *rollout.Spec) { s.MinSamples = 1 << 40 })
			r := f.until("dark", rollout.Paused)
			if !strings.HasPrefix(r.Reason, "inconclusive") || r.Opened != 1 {
				t.Errorf("paused with %d steps: %s", r.Opened, r.Reason)
			}
			next, effect, err := rollout.Do(r, c, "bob", time.Now())
			f.check(err)
			_, err = f.store.PutRollout(t.Context(), next, r.Revision, effect)
			f.check(err)
			if c == rollout.Promote {
				if r = f.until("dark", rollout.Paused); r.Opened != 2 {
					t.Errorf("promoted and paused again with %d steps", r.Opened)
				}
				return
			}
			if r = f.until("dark", rollout.Aborted); r.Opened != 1 {
				t.Errorf("aborted with %d steps", r.Opened)
			}
			if rates := f.rates(); rates[new] != 1 {
				t.Errorf("aborted, routers run %v", rates)
			}
		})
	}
}

// A plan that an operator changes overtakes the rollout at once.
func TestHotFix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 20)
		f.lead()
		time.Sleep(time.Minute)
		f.start("faster", nil)
		time.Sleep(time.Minute)
		_, err := f.store.PutPlan(t.Context(), storetest.Plan("gold", 70, 7), store.Any)
		f.check(err)
		time.Sleep(time.Second)
		if rates := f.rates(); rates[70_000_000] != 20 {
			t.Errorf("after the hot fix: %v", rates)
		}
		if r := f.until("faster", rollout.Overtaken); !strings.Contains(r.Reason, "changed by somebody else") {
			t.Errorf("overtaken: %s", r.Reason)
		}
	})
}

// Two leaders in turn, the first of them stopped for twice its lease in the
// middle of its work: what it writes then is refused, and every router is told
// once.
func TestFleet068_LeaderStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 50)
		time.Sleep(time.Minute)
		f.start("faster", nil)
		// It leads, looks, and is stopped before it writes.
		stale := make(chan error, 1)
		resume := make(chan struct{})
		ctx, stop := context.WithCancel(context.Background())
		led := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			done <- lead.New(f.kv, lead.Config{}).Run(ctx, conduct.Work, func(ctx context.Context, _ store.Compare) error {
				var l *rollout.Live
				f.store.View(func(st *store.State) { l, _ = st.Rollout("faster") })
				next, _, effect, _ := rollout.Next(l.Rollout, rollout.Input{Now: time.Now(), Plan: l.Base, Report: &rollout.Report{}})
				close(led)
				<-resume
				_, err := f.store.PutRollout(ctx, next, l.Revision, effect)
				stale <- err
				return nil
			})
		}()
		<-led
		f.kv.EndLeases()
		f.lead()
		time.Sleep(20 * time.Second)
		stop()
		close(resume)
		if err := <-stale; !errors.Is(err, store.ErrFenced) {
			t.Errorf("the stopped leader's write gives %v", err)
		}
		f.check(<-done)
		f.until("faster", rollout.Completed)
		for _, h := range f.homes {
			if told := h.times(); told != 2 {
				t.Errorf("router %s was told %d times", h.id, told)
			}
		}
	})
}

// No more than N routers of one site are asked at once.
func TestPerSite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 40)
		f.lead()
		time.Sleep(time.Minute)
		r := f.start("gentle", func(s *rollout.Spec) { s.PerSite, s.Waves = 2, []rollout.Size{{Percent: 100}} })
		if len(r.Steps) != 5 {
			t.Errorf("10 routers of each of 4 sites are in %d steps", len(r.Steps))
		}
		f.until("gentle", rollout.Completed)
	})
}

// A rollout that ended a year ago is removed, and no router is told of it.
func TestOldRollouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 20)
		f.lead()
		time.Sleep(time.Minute)
		f.start("good", nil)
		f.until("good", rollout.Completed)
		f.mu.Lock()
		f.refuses = func(_ string, l *plan.Link) bool { return l.Up.Rate == 7_000_000 }
		f.mu.Unlock()
		f.start("bad", func(s *rollout.Spec) {
			s.OnFailure, s.Set = rollout.RollbackOnFailure, plan.Settings{}
			f.check(s.Set.Parse("up.rate", "7mbit"))
		})
		bad := f.until("bad", rollout.RolledBack)
		f.start("some", func(s *rollout.Spec) {
			s.Selector = rollout.Selector{Labels: map[string]string{"site": "s1"}}
			s.Base, s.Whole, s.Gates = 0, false, nil
		})
		f.until("some", rollout.Completed)
		// ended sets back when a rollout ended.
		ended := func(id string, ago time.Duration) {
			r := f.rollout(id)
			r.Finished = time.Now().Add(-ago)
			_, err := f.store.PutRollout(t.Context(), r, r.Revision, false)
			f.check(err)
		}
		count := func() (n int) {
			for _, id := range []string{"good", "bad", "some"} {
				if f.rollout(id).ID != "" {
					n++
				}
			}
			return n
		}
		told := f.homes["r7"].times()
		ended("bad", rollout.KeepTargets-time.Minute)
		time.Sleep(15 * time.Minute)
		if r := f.rollout("bad"); bad.Places == "" || r.Places != "" || r.Phase != rollout.RolledBack || count() != 3 {
			t.Errorf("after a week there are %d, and targets of the bad one are %q, before %q", count(), r.Places, bad.Places)
		}
		for _, id := range []string{"good", "bad", "some"} {
			ended(id, rollout.KeepFor+time.Minute)
		}
		time.Sleep(15 * time.Minute)
		if f.rollout("some").ID == "" || count() != 1 {
			t.Errorf("after a year there are %d, want the one that routers still have", count())
		}
		if n := f.homes["r7"].times(); n != told {
			t.Errorf("a router was told %d times of it", n-told)
		}
	})
}
