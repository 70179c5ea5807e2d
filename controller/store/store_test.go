package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestFake(t *testing.T) {
	storetest.Suite(t, func(t *testing.T, onChange ...func(store.Change)) *store.Store {
		return storetest.NewFake(t, onChange...)
	})
}

// A watch that loses a deletion or a write is repaired by the periodic
// compare, within its interval, and those who listen are told.
func TestFleet065_LostEventIsRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		var told []store.Change
		a := storetest.Start(t, kv, store.Config{})
		b := storetest.Start(t, kv, store.Config{CompareInterval: time.Minute}, func(c store.Change) { told = append(told, c) })
		put(t, a, "gold")
		put(t, a, "iron")
		synctest.Wait()
		told = nil
		// The watches of both don't see what follows; a has its writes from
		// its own compare much later.
		kv.Lose(func(store.Item) bool { return true })
		if _, err := a.DeletePlan(t.Context(), "gold", "", store.Any); err != nil {
			t.Fatal(err)
		}
		iron := put(t, a, "iron")
		synctest.Wait()
		if !hasPlan(b, "gold") {
			t.Fatal("the event was not lost")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if hasPlan(b, "gold") {
			t.Error("the deletion is not repaired")
		}
		if len(told) != 2 || told[0].ID != "iron" || told[0].Revision != iron.Revision || told[1].ID != "gold" || !told[1].Deleted {
			t.Errorf("told %+v", told)
		}
	})
}

// heldKV holds back what its watch sees until gate is closed, and then gives it
// piece by piece.
type heldKV struct {
	*storetest.KV
	gate chan struct{}
}

func (h heldKV) Watch(ctx context.Context, prefix string, after int64, seen func(store.Batch)) error {
	return h.KV.Watch(ctx, prefix, after, func(b store.Batch) {
		<-h.gate
		for _, it := range b.Items {
			seen(store.Batch{Items: []store.Item{it}, Revision: it.Revision})
		}
		seen(store.Batch{Revision: b.Revision})
	})
}

// A compare may be ahead of the watch: what the watch then brings is old and
// must not come back to life.
func TestCompareAheadOfWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		a := storetest.Start(t, kv, store.Config{})
		put(t, a, "iron")
		gate := make(chan struct{})
		var told []string
		b := storetest.Start(t, heldKV{kv, gate}, store.Config{CompareInterval: time.Minute}, func(c store.Change) {
			told = append(told, fmt.Sprintf("%s %t", c.ID, c.Deleted))
		})
		put(t, a, "gold")
		for _, name := range []string{"gold", "iron"} {
			if _, err := a.DeletePlan(t.Context(), name, "", store.Any); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if hasPlan(b, "gold") || hasPlan(b, "iron") || b.Revision() != a.Revision() {
			t.Errorf("after the compare: revision %d, want %d", b.Revision(), a.Revision())
		}
		close(gate)
		synctest.Wait()
		if len(told) != 1 || told[0] != "iron true" {
			t.Errorf("told %q, want only that iron is gone", told)
		}
	})
}

// While etcd is down the state stays, writes fail at once and say that it is
// unknown what became of them; afterwards all is caught up.
func TestKVDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		a, b := storetest.Start(t, kv, store.Config{}), storetest.Start(t, kv, store.Config{})
		p := put(t, a, "gold")
		synctest.Wait()
		kv.SetDown(store.ErrUnavailable)
		time.Sleep(time.Hour)
		if _, err := a.PutPlan(t.Context(), p, store.Any); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("got %v, want that the store can't be reached", err)
		}
		if !hasPlan(b, "gold") {
			t.Error("the state is lost")
		}
		kv.SetDown(nil)
		put(t, a, "iron")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if !hasPlan(b, "iron") {
			t.Error("b has not caught up within 10 s")
		}
	})
}

// A write returns when the caller's context ends, even if nobody runs the
// store.
func TestWriteWithoutRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := store.New(t.Context(), storetest.NewKV(), store.Config{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := s.PutPlan(ctx, storetest.Plan("gold", 1, 1), 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the deadline", err)
		}
		go func() {
			time.Sleep(time.Second)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
		if _, err := s.PutPlan(t.Context(), storetest.Plan("iron", 1, 1), 0); !errors.Is(err, store.ErrClosed) {
			t.Errorf("got %v, want that the store is closed", err)
		}
	})
}

// What a newer controller wrote is read as far as it is understood; what is
// not understood leaves the last readable record in force.
func TestRecordsOfOtherVersions(t *testing.T) {
	kv := storetest.NewKV()
	var log strings.Builder
	s := storetest.Start(t, kv, store.Config{Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	write := func(key, value string) {
		t.Helper()
		res, err := kv.Txn(t.Context(), nil, []store.Op{{Key: store.Prefix + key, Value: []byte(value)}})
		if err != nil {
			t.Fatal(err)
		}
		until(t, "the write is seen", func() bool { return s.Revision() >= plan.Revision(res.Revision) })
	}
	rate := func() engine.BitsPerSecond {
		var p plan.Plan
		s.View(func(st *store.State) { p, _ = st.Plan("gold") })
		return p.Link.Down.Rate
	}
	write("plans/gold", `{"schema":1,"colour":"red","down":{"rate_bps":5000000,"shine":9},"up":{}}`)
	var got plan.Plan
	s.View(func(st *store.State) { got, _ = st.Plan("gold") })
	want := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	want.Down.Rate = 5_000_000
	if got.Link != want {
		t.Errorf("a record with unknown and without known fields is %+v", got.Link)
	}
	for i, value := range []string{
		`{"schema":2,"down":{"rate_bps":1},"up":{}}`,
		`{"down":{"rate_bps":1},"up":{}}`,
		`{"schema":1,"down":{"rate_bps":1,"tins":"diffserv16"},"up":{}}`,
		`{"schema":1,"down":{"rate_bps":-1},"up":{}}`,
		`{"schema":1,"down":null,"up":{}}`,
		`not JSON`,
		``,
	} {
		write("plans/gold", value)
		if rate() != 5_000_000 {
			t.Errorf("%s: rate became %d", value, rate())
		}
		if n := strings.Count(log.String(), "record can't be read"); n != i+1 {
			t.Errorf("%s: %d records are reported, want %d", value, n, i+1)
		}
	}
	write("plans/gold", `{"schema":1,"down":{"rate_bps":7000000},"up":{}}`)
	if rate() != 7_000_000 {
		t.Errorf("rate is %d after the record was mended", rate())
	}
	write("rollouts/1", `{}`)
	write("plans/", `{}`)
	if _, err := s.PutPlan(t.Context(), got, store.Any); err != nil {
		t.Error(err)
	}
}

// Someone removes records with etcdctl, in any order: the indexes still say
// which routers are concerned.
func TestRecordsRemovedByHand(t *testing.T) {
	kv := storetest.NewKV()
	s := storetest.Start(t, kv, store.Config{})
	put(t, s, "gold")
	if _, err := s.PutSubscriber(t.Context(), plan.Subscriber{ID: "1", Plan: "gold"}, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutRouter(t.Context(), plan.Router{ID: "r", Subscriber: "1"}, 0); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		key, value    string
		plan, routers int // routers that the plan and the subscriber reach
	}{
		{"plans/gold", "", 1, 1},
		{"subscribers/1", "", 0, 1},
		{"routers/r", "", 0, 0},
		{"routers/r", `{"schema":1,"subscriber":"1"}`, 0, 1},
		{"subscribers/1", `{"schema":1,"plan":"gold"}`, 1, 1},
	} {
		op := store.Op{Key: store.Prefix + step.key}
		if step.value != "" {
			op.Value = []byte(step.value)
		}
		res, err := kv.Txn(t.Context(), nil, []store.Op{op})
		if err != nil {
			t.Fatal(err)
		}
		until(t, "the change is seen", func() bool { return s.Revision() >= plan.Revision(res.Revision) })
		s.View(func(st *store.State) {
			byPlan, bySubscriber := 0, 0
			for range st.Affected(store.Change{Kind: store.KindPlan, ID: "gold"}) {
				byPlan++
			}
			for range st.Affected(store.Change{Kind: store.KindSubscriber, ID: "1"}) {
				bySubscriber++
			}
			if byPlan != step.plan || bySubscriber != step.routers || st.CountRouters("gold") != step.plan {
				t.Errorf("after %s=%s: plan reaches %d, subscriber %d, want %d and %d", step.key, step.value, byPlan, bySubscriber, step.plan, step.routers)
			}
		})
	}
}

// One change is one write, and what it makes the store do doesn't grow with
// the fleet.
func TestFleet080_OneChangeIsOneWrite(t *testing.T) {
	for _, fleet := range []int{10, 2000} {
		synctest.Test(t, func(t *testing.T) {
			kv := storetest.NewKV()
			changes := 0
			s := storetest.Start(t, kv, store.Config{}, func(store.Change) { changes++ })
			fill(t, s, fleet)
			synctest.Wait()
			writesBefore, changesBefore := kv.Txns(), changes
			put(t, s, "p0")
			synctest.Wait()
			reached := 0
			s.View(func(st *store.State) {
				for range st.Affected(store.Change{Kind: store.KindPlan, ID: "p0"}) {
					reached++
				}
			})
			if kv.Txns() != writesBefore+1 || changes != changesBefore+1 || reached != 1 {
				t.Errorf("fleet of %d: %d writes and %d changes reach %d routers, want 1 each", fleet, kv.Txns()-writesBefore, changes-changesBefore, reached)
			}
		})
	}
}

// fill stores n subscribers with a router each: the first has plan p0, all
// others p1.
func fill(t testing.TB, s *store.Store, n int) {
	t.Helper()
	for _, name := range []string{"p0", "p1"} {
		if _, err := s.PutPlan(t.Context(), storetest.Plan(name, 1, 1), store.Any); err != nil {
			t.Fatal(err)
		}
	}
	ws := make([]store.SubscriberWrite, n)
	for i := range ws {
		ws[i].Subscriber = plan.Subscriber{ID: fmt.Sprint(i), Plan: "p1"}
	}
	ws[0].Subscriber.Plan = "p0"
	if _, err := s.WriteSubscribers(t.Context(), ws); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if _, err := s.PutRouter(t.Context(), plan.Router{ID: fmt.Sprintf("r%d", i), Subscriber: fmt.Sprint(i)}, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkPlanChange is one plan change that reaches one router, from the
// write to the routers concerned, in fleets of several sizes.
func BenchmarkPlanChange(b *testing.B) {
	for _, fleet := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("fleet=%d", fleet), func(b *testing.B) {
			s := storetest.NewFake(b)
			fill(b, s, fleet)
			p := storetest.Plan("p0", 1, 1)
			reached := 0
			for b.Loop() {
				p.Link.Down.Rate++
				if _, err := s.PutPlan(b.Context(), p, store.Any); err != nil {
					b.Fatal(err)
				}
				s.View(func(st *store.State) {
					for range st.Affected(store.Change{Kind: store.KindPlan, ID: "p0"}) {
						reached++
					}
				})
			}
			if reached == 0 {
				b.Fatal("no router is reached")
			}
		})
	}
}
