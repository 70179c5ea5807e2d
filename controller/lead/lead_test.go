package lead_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stand runs an election for "work" until the returned function is called.
func stand(t *testing.T, kv store.Leaser, name string, do func(context.Context, store.Compare) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := lead.New(kv, lead.Config{Name: name}).Run(ctx, "work", do); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

func TestOneLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		var leading atomic.Int32
		work := func(ctx context.Context, _ store.Compare) error {
			if n := leading.Add(1); n != 1 {
				t.Errorf("%d lead at once", n)
			}
			defer leading.Add(-1)
			<-ctx.Done()
			return nil
		}
		var stops []func()
		for _, name := range []string{"a", "b", "c"} {
			stops = append(stops, stand(t, kv, name, work))
		}
		synctest.Wait()
		for _, stop := range stops {
			if leading.Load() != 1 {
				t.Fatalf("%d lead", leading.Load())
			}
			stop()
			time.Sleep(time.Second)
		}
		if name, err := lead.New(kv, lead.Config{}).Leader(t.Context(), "work"); err != nil || name != "" {
			t.Errorf("%q leads after all have stopped, error %v", name, err)
		}
	})
}

// A leader that is stopped for twice its lease does not know it when it goes
// on: its context has not ended, yet nothing it writes is stored.
func TestFleet068_StalledLeaderIsFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		s := storetest.Start(t, kv, store.Config{})
		stalled, resume := make(chan struct{}), make(chan struct{})
		wrote := make(chan error, 3)
		stopA := stand(t, kv, "a", func(ctx context.Context, fence store.Compare) error {
			if _, err := s.PutPlan(ctx, storetest.Plan("gold", 1, 1), 0); err != nil {
				t.Error(err)
			}
			close(stalled)
			<-resume
			if ctx.Err() != nil {
				t.Error("the leader knows that it is none, so that this test proves nothing")
			}
			_, err := s.PutPlan(ctx, storetest.Plan("gold", 3, 3), store.Any)
			wrote <- err
			_, err = s.WriteSubscribers(ctx, many(300))
			wrote <- err
			res, err := kv.Txn(ctx, []store.Compare{fence}, []store.Op{{Key: store.Prefix + "x", Value: []byte("x")}})
			if res.OK {
				t.Error("a write with the fence was done")
			}
			wrote <- err
			return nil
		})
		<-stalled
		kv.EndLeases()
		led := make(chan struct{})
		stopB := stand(t, kv, "b", func(ctx context.Context, _ store.Compare) error {
			if _, err := s.PutPlan(ctx, storetest.Plan("gold", 2, 2), store.Any); err != nil {
				t.Error(err)
			}
			close(led)
			<-ctx.Done()
			return nil
		})
		<-led
		close(resume)
		for range 2 {
			if err := <-wrote; !errors.Is(err, store.ErrFenced) {
				t.Errorf("a stalled leader's write gives %v", err)
			}
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		s.View(func(st *store.State) {
			if p, _ := st.Plan("gold"); p.Link.Down.Rate != 2_000_000 {
				t.Errorf("plan has %v", p.Link.Down.Rate)
			}
			if _, subs, _ := st.Len(); subs != 0 {
				t.Errorf("%d subscribers", subs)
			}
		})
		stopA()
		stopB()
	})
}

func many(n int) (ws []store.SubscriberWrite) {
	for i := range n {
		w := store.SubscriberWrite{}
		w.Subscriber.ID, w.Subscriber.Plan = "s"+strings.Repeat("x", i%50)+string(rune('a'+i/50)), "gold"
		ws = append(ws, w)
	}
	return ws
}

// Without the store nobody can renew: the leader is told before another one
// can lead.
func TestLostLeaderIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		began := time.Now()
		ended := make(chan error, 1)
		stop := stand(t, kv, "a", func(ctx context.Context, _ store.Compare) error {
			<-ctx.Done()
			select {
			case ended <- context.Cause(ctx):
			default:
			}
			return nil
		})
		synctest.Wait()
		kv.SetDown(store.ErrUnavailable)
		if err := <-ended; !errors.Is(err, lead.ErrLost) {
			t.Errorf("ended with %v", err)
		}
		if took := time.Since(began); took > lead.DefaultTTL {
			t.Errorf("told after %v", took)
		}
		kv.SetDown(nil)
		stop()
	})
}

// A key that an operator has deleted by hand ends the term.
func TestDeletedByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		terms := make(chan struct{}, 10)
		stop := stand(t, kv, "a", func(ctx context.Context, _ store.Compare) error {
			terms <- struct{}{}
			<-ctx.Done()
			return nil
		})
		<-terms
		if _, err := kv.Txn(t.Context(), nil, []store.Op{{Key: store.Prefix + "leader/work"}}); err != nil {
			t.Fatal(err)
		}
		<-terms
		stop()
	})
}

// Work that fails is tried again, ever more slowly, perhaps by another one.
func TestFailingWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		var tries atomic.Int32
		stop := stand(t, kv, "a", func(context.Context, store.Compare) error {
			tries.Add(1)
			return errors.New("broken")
		})
		time.Sleep(time.Minute)
		stop()
		if n := tries.Load(); n < 5 || n > 30 {
			t.Errorf("%d tries in a minute", n)
		}
	})
}

func TestMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		var all []*lead.Members
		var stops []func()
		for _, id := range []string{"b", "a"} {
			m := lead.NewMembers(kv, lead.Member{ID: id, Address: id + ":8443"}, 0, nil)
			ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
			done := make(chan error, 1)
			go func() { done <- m.Run(ctx) }()
			all = append(all, m)
			stops = append(stops, func() {
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		}
		ids := func(all []lead.Member) (ids string) {
			for _, m := range all {
				ids += m.ID + "@" + m.Address + " "
			}
			return ids
		}
		time.Sleep(time.Second)
		for _, m := range all {
			if got := ids(m.All()); got != "a@a:8443 b@b:8443 " {
				t.Errorf("%s sees %q", m.Self().ID, got)
			}
		}
		if got := ids(all[0].Others()); got != "a@a:8443 " {
			t.Errorf("others of b are %q", got)
		}
		// Both come back after their leases are gone.
		kv.EndLeases()
		time.Sleep(2 * lead.DefaultTTL)
		if got := ids(all[0].All()); got != "a@a:8443 b@b:8443 " {
			t.Errorf("after the loss b sees %q", got)
		}
		stops[1]()
		time.Sleep(time.Second)
		if got := ids(all[0].All()); got != "b@b:8443 " {
			t.Errorf("after a has stopped b sees %q", got)
		}
		stops[0]()
	})
}
