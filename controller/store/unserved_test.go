package store_test

import (
	"testing"
	"testing/synctest"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Subscribers without a router and routers without a subscriber are counted,
// whatever comes and goes.
func TestFleet021_UnservedAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := storetest.Start(t, storetest.NewKV(), store.Config{})
		want := func(what string, subscribers, routers int) {
			t.Helper()
			synctest.Wait()
			s.View(func(st *store.State) {
				if gotS, gotR := st.Unserved(); gotS != subscribers || gotR != routers {
					t.Errorf("%s: %d subscribers and %d routers, want %d and %d", what, gotS, gotR, subscribers, routers)
				}
			})
		}
		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		router := func(id, subscriber string) {
			t.Helper()
			_, err := s.PutRouter(t.Context(), plan.Router{ID: id, Subscriber: subscriber}, store.Any)
			check(err)
		}
		want("empty", 0, 0)
		fill(t, s, 5) // with a router each
		want("all are served", 0, 0)
		_, err := s.PutSubscriber(t.Context(), plan.Subscriber{ID: "new", Plan: "p1"}, 0)
		check(err)
		want("one is new", 1, 0)
		router("spare", "")
		want("a spare router", 1, 1)
		router("r0", "1") // two for one, and none for 0
		want("moved", 2, 1)
		router("spare", "new")
		want("put to use", 1, 0)
		check(s.DeleteRouter(t.Context(), "r1", store.Any))
		want("one of two is gone", 1, 0)
		check(s.DeleteRouter(t.Context(), "r0", store.Any))
		want("both are gone", 2, 0)
	})
}
