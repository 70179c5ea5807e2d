package store_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestLeasesOfFake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { storetest.Leases(t, storetest.NewKV()) })
}

func TestLeasesOfEtcd(t *testing.T) {
	s, _ := startEtcd(t)
	kv, err := s.Leases()
	if err != nil {
		t.Fatal(err)
	}
	storetest.Leases(t, kv)
}

// A write with a fence does what it would do without, as long as it holds.
func TestFence(t *testing.T) {
	s, _ := startEtcd(t)
	gold := put(t, s, "gold")
	kv, err := s.Leases()
	if err != nil {
		t.Fatal(err)
	}
	res, err := kv.Txn(t.Context(), nil, []store.Op{{Key: store.Prefix + "leader/x", Value: []byte("a")}})
	if err != nil {
		t.Fatal(err)
	}
	ctx := store.WithFence(t.Context(), store.Compare{Key: store.Prefix + "leader/x", Relation: store.Equal, Revision: res.Revision})
	next, err := s.PutPlan(ctx, gold, gold.Revision)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutPlan(ctx, gold, gold.Revision); !errors.Is(err, store.ErrConflict) {
		t.Errorf("an old revision gives %v", err)
	}
	// As many subscribers as one transaction takes, and many more.
	for _, n := range []int{63, 64, 1000} {
		if _, err := s.WriteSubscribers(ctx, subscribers(n, n)); err != nil {
			t.Errorf("%d subscribers: %v", n, err)
		}
	}
	if _, err := kv.Txn(t.Context(), nil, []store.Op{{Key: store.Prefix + "leader/x", Value: []byte("b")}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutPlan(ctx, next, next.Revision); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a broken fence gives %v", err)
	}
	if _, err := s.WriteSubscribers(ctx, subscribers(2000, 2000)); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a broken fence of an import gives %v", err)
	}
	if err := s.DeleteSubscriber(ctx, "63-0", store.Any); !errors.Is(err, store.ErrFenced) {
		t.Errorf("a broken fence of a deletion gives %v", err)
	}
}

// subscribers returns n new subscribers of plan gold whose ids begin with a number.
func subscribers(first, n int) []store.SubscriberWrite {
	ws := make([]store.SubscriberWrite, n)
	for i := range ws {
		ws[i].Subscriber = plan.Subscriber{ID: fmt.Sprintf("%d-%d", first, i), Plan: "gold"}
	}
	return ws
}
