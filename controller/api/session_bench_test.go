package api_test

import (
	"cmp"
	"crypto/ed25519"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// benchFleet is a store of n routers with one plan each of two, and sessions of
// some of them.
type benchFleet struct {
	store    *store.Store
	sessions *api.SessionService
	key      ed25519.PrivateKey // of all routers
	open     []door.Session     // one for each router; empty: none is connected
	pushed   chan *pb.Desired   // of all sessions
	next     int                // change
	again    time.Time          // when the next router may be changed again
}

func newBenchFleet(b testing.TB, n int) *benchFleet {
	b.Helper()
	s, err := store.New(b.Context(), storetest.NewKV(), store.Config{})
	noError(b, err)
	return newBenchFleetOn(b, s, n)
}

// newBenchFleetOn is newBenchFleet on a store that does not run yet.
func newBenchFleetOn(b testing.TB, s *store.Store, n int) *benchFleet {
	b.Helper()
	f := &benchFleet{store: s}
	storetest.Run(b, s, func(c store.Change) { f.sessions.Changed(c) })
	f.sessions = api.NewSessionService(f.store, fleet.NewHub(), telemetry.New(telemetry.Config{Interval: interval}), api.SessionConfig{Interval: interval}, hclog.NewNullLogger())
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		b.Fatal(err)
	}
	f.key = key
	known, err := identity.KeyOf(key.Public().(ed25519.PublicKey))
	if err != nil {
		b.Fatal(err)
	}
	for name, rate := range map[string]engine.BitsPerSecond{"gold": 20e6, "silver": 30e6} {
		if _, err := f.store.PutPlan(b.Context(), plan.Plan{Name: name, Link: link(rate)}, store.Any); err != nil {
			b.Fatal(err)
		}
	}
	writes := make([]store.SubscriberWrite, n)
	for i := range writes {
		writes[i] = store.SubscriberWrite{Subscriber: plan.Subscriber{ID: fmt.Sprintf("s%06d", i), Plan: "gold"}}
	}
	if _, err := f.store.WriteSubscribers(b.Context(), writes); err != nil {
		b.Fatal(err)
	}
	var g errgroup.Group
	g.SetLimit(256)
	for i := range n {
		g.Go(func() error {
			_, err := f.store.PutRouter(b.Context(), plan.Router{ID: fmt.Sprintf("r%06d", i), Subscriber: fmt.Sprintf("s%06d", i), Key: known}, store.Any)
			return err
		})
	}
	noError(b, g.Wait())
	return f
}

// told is a stream that says when it is sent a desired state.
type told struct{ desired chan *pb.Desired }

func (told) Ready() bool { return true }

func (s told) Send(m proto.Message) error {
	if d := m.(*pb.ConnectResponse).GetDesired(); d != nil {
		s.desired <- d
	}
	return nil
}

func (told) End(error) {}

// connect opens a session of every router, each of which runs what it should.
func (f *benchFleet) connect(b testing.TB, n int) {
	b.Helper()
	f.pushed = make(chan *pb.Desired, 1)
	f.open = make([]door.Session, n)
	for i := range f.open {
		id := fmt.Sprintf("r%06d", i)
		session, err := f.sessions.Begin(peerContext(b, f.key, id), told{f.pushed})
		noError(b, err)
		f.say(b, session, hello(id))
		f.say(b, session, applied(<-f.pushed))
		f.open[i] = session
	}
	b.Cleanup(f.close)
}

func (f *benchFleet) close() {
	for _, session := range f.open {
		session.Closed()
	}
	f.open = nil
	f.sessions.Wait()
}

// cost is what some changes cost, summed up.
type cost struct {
	changes        int
	cpu            time.Duration
	objects, bytes uint64 // allocated
}

// Of each round of BenchmarkOneChange, and between two changes of one router:
// those that come in a row are held up.
const (
	changesPerRound = 500
	changeAgain     = 1100 * time.Millisecond
)

// change changes the subscribers of some routers one after another, each when
// the change before has been answered. times are until the push.
func (f *benchFleet) change(b testing.TB) (c cost, times []time.Duration) {
	b.Helper()
	n := len(f.open)
	time.Sleep(time.Until(f.again))
	plans := [2]string{"silver", "gold"}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu := cpuTime(b, syscall.RUSAGE_SELF)
	for range changesPerRound {
		// A prime number apart: neighbours in the store are in the same cache lines.
		i := f.next * 7919 % n
		turn := f.next / n % 2
		f.next++
		began := time.Now()
		_, err := f.store.PutSubscriber(b.Context(), plan.Subscriber{ID: fmt.Sprintf("s%06d", i), Plan: plans[turn]}, store.Any)
		noError(b, err)
		d := <-f.pushed
		times = append(times, time.Since(began))
		f.say(b, f.open[i], applied(d))
	}
	c = cost{changes: changesPerRound, cpu: cpuTime(b, syscall.RUSAGE_SELF) - cpu}
	runtime.ReadMemStats(&after)
	c.objects, c.bytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	if f.next%n < changesPerRound { // the first ones come again
		f.again = time.Now().Add(changeAgain)
	}
	return c, times
}

// rusageThread is for the calling thread, which package syscall has no name for.
const rusageThread = 1

// cpuTime is what has been used of CPU.
func cpuTime(b testing.TB, who int) time.Duration {
	b.Helper()
	var u syscall.Rusage
	noError(b, syscall.Getrusage(who, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// collection returns what one garbage collection takes of CPU, and how much
// lives after it.
func collection(b *testing.B) (cpu time.Duration, live uint64) {
	b.Helper()
	runtime.GC()
	began := cpuTime(b, syscall.RUSAGE_SELF)
	runtime.GC()
	cpu = cpuTime(b, syscall.RUSAGE_SELF) - began
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return cpu, m.HeapAlloc
}

// BenchmarkOneChange is what the change of one subscriber costs a controller,
// from the call that stores it to the push to its router and the answer, in a
// fleet of 100 000 and in one of 1 000, all of them connected. The store is
// real and its etcd is not: OneChangeEtcd has it in the process, which is the
// whole way of a change.
//
// What is done is the same in both, to the object that is allocated. Without
// etcd it takes 23 us for the small one, all of which is in the caches of the
// CPU, and 11 us more for the large one, whose records are not; with etcd a
// change takes 1.5 ms, of which that is nothing.
//
// Garbage is collected between the rounds, and counted apart: a collection
// costs as much as lives, but is due when as much as lives was allocated, so
// that each byte that is allocated costs what a byte that lives costs to mark.
func BenchmarkOneChange(b *testing.B) {
	oneChange(b, 100_000, func() (*store.Store, error) { return store.New(b.Context(), storetest.NewKV(), store.Config{}) })
}

func BenchmarkOneChangeEtcd(b *testing.B) {
	oneChange(b, 100_000, func() (*store.Store, error) { return store.OpenEtcd(b.Context(), store.Config{DataDir: b.TempDir()}) })
}

// oneChange compares a fleet of many with one of 1 000.
func oneChange(b *testing.B, many int, open func() (*store.Store, error)) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	sizes := []int{1_000, many}
	var fleets []*benchFleet
	var mark []float64 // ns of CPU to collect a byte that lives
	var cpuAlready time.Duration
	var liveAlready uint64
	for _, n := range sizes {
		s, err := open()
		noError(b, err)
		f := newBenchFleetOn(b, s, n)
		f.connect(b, n)
		cpu, live := collection(b)
		mark = append(mark, float64(cpu-cpuAlready)/float64(live-liveAlready))
		cpuAlready, liveAlready = cpu, live
		fleets = append(fleets, f)
	}
	type figures struct{ latency, cpu, collection, bytes, objects []float64 }
	all := make([]figures, len(sizes))
	for b.Loop() {
		for k, f := range fleets {
			runtime.GC()
			c, times := f.change(b)
			slices.Sort(times)
			each := func(sum float64) float64 { return sum / float64(c.changes) }
			a := &all[k]
			a.latency = append(a.latency, float64(times[len(times)/2])/1e3)
			a.cpu = append(a.cpu, each(float64(c.cpu)/1e3))
			a.collection = append(a.collection, each(float64(c.bytes)*mark[k]/1e3))
			a.bytes = append(a.bytes, each(float64(c.bytes)))
			a.objects = append(a.objects, each(float64(c.objects)))
		}
	}
	for _, m := range []struct {
		name, unit string
		of         func(*figures) []float64
	}{
		{"cpu", "us", func(a *figures) []float64 { return a.cpu }},
		{"collection", "us", func(a *figures) []float64 { return a.collection }},
		{"latency", "us", func(a *figures) []float64 { return a.latency }},
		{"allocated", "bytes", func(a *figures) []float64 { return a.bytes }},
		{"allocated-objects", "objects", func(a *figures) []float64 { return a.objects }},
	} {
		small, large := median(m.of(&all[0])), median(m.of(&all[1]))
		b.ReportMetric(small, m.unit+":"+m.name+"-1k")
		size := fmt.Sprintf("%dk", many/1000)
		b.ReportMetric(large, m.unit+":"+m.name+"-"+size)
		b.ReportMetric(large/small, "ratio:"+m.name+"-"+size+"-vs-1k")
	}
}

func median[T cmp.Ordered](v []T) T {
	slices.Sort(v)
	return v[len(v)/2]
}

func (f *benchFleet) say(b testing.TB, s door.Session, m *pb.ConnectRequest) {
	b.Helper()
	raw, err := proto.Marshal(m)
	noError(b, err)
	noError(b, s.Receive(raw))
}

// BenchmarkResolve100k is what it takes to find the desired states of 100 000
// routers after their plan has changed, in the real state: CPU time of the one
// thread that does it. A schedule that is for the plan, and a rollout that
// is half open for it, make each of them a link of its own.
func BenchmarkResolve100k(b *testing.B) {
	const n = 100_000
	f := newBenchFleet(b, n)
	link, now := link(20e6), time.Now()
	resolveAll := func(b *testing.B) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var hashes resolve.Hashes
		var spent []time.Duration
		for b.Loop() {
			link.Down.Rate++
			_, err := f.store.PutPlan(b.Context(), plan.Plan{Name: "gold", Link: link}, store.Any)
			noError(b, err)
			runtime.GC() // of what others have left
			reached := 0
			began := cpuTime(b, rusageThread)
			f.store.View(func(st *store.State) {
				for id := range st.Affected(store.Change{Kind: store.KindPlan, ID: "gold"}) {
					if d, ok := resolve.Router(st, id, now, &hashes); ok && d.Link != nil {
						reached++
					}
				}
			})
			spent = append(spent, cpuTime(b, rusageThread)-began)
			if reached != n {
				b.Fatalf("%d routers are reached", reached)
			}
		}
		b.ReportMetric(float64(median(spent))/1e6, "ms:cpu")
	}
	b.Run("plain", resolveAll)
	_, err := f.store.PutSchedule(b.Context(), schedule.Schedule{
		ID: "always", Target: schedule.Target{Plan: "gold"}, Set: fields(b, "up.rate", "5mbit"), Zone: "UTC",
		Windows: []schedule.Window{{Days: schedule.Weekdays | schedule.Weekend, From: 0, To: 1440}},
	}, 0)
	noError(b, err)
	b.Run("schedule", resolveAll)
	r := rollout.Rollout{Spec: rollout.Spec{
		ID: "half", Selector: rollout.Selector{Plan: "gold"}, Set: fields(b, "down.rate", "25mbit"),
		Waves: []rollout.Size{{Percent: 50}, {Percent: 100}}, Soak: time.Minute, AnswerTime: time.Minute,
	}}
	var targets []rollout.Target
	f.store.View(func(st *store.State) {
		for r := range st.Routers("") {
			targets = append(targets, rollout.Target{Router: r.ID})
		}
	})
	places, err := r.Freeze(targets, 1)
	noError(b, err)
	r, err = f.store.StartRollout(b.Context(), r, places, f.store.Revision())
	noError(b, err)
	r.Opened, r.Touched = 1, 1
	_, err = f.store.PutRollout(b.Context(), r, r.Revision, true)
	noError(b, err)
	b.Run("schedule-and-rollout", resolveAll)
}

func fields(b *testing.B, field, value string) (set plan.Settings) {
	b.Helper()
	noError(b, set.Parse(field, value))
	return set
}
