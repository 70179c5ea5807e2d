package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// What a token and an announcement bind is what the router gets, and what they
// leave open stays.
func joinBinds(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	tok := token("t", "r1", "1")
	tok.Labels = map[string]string{"site": "north"}
	ok(t, s.PutToken(ctx, tok))
	r := must(s.UseToken(ctx, "t", tok.SecretHash, plan.Key{1}, "SN-1", now))
	if r.Labels["site"] != "north" || r.Serial != "SN-1" || r.Subscriber != "1" {
		t.Errorf("token gave %+v", r)
	}

	must(s.PutSerial(ctx, store.Serial{Serial: "SN-2", Router: "r2", Subscriber: "1", Labels: map[string]string{"batch": "7"}, Key: plan.Key{2}}))
	_, err := s.PutSerial(ctx, store.Serial{Serial: "SN-3", Router: "r3", Subscriber: "nobody"})
	is(t, err, store.ErrDangling)
	_, err = s.PutSerial(ctx, store.Serial{Serial: "SN 3", Router: "r3"})
	is(t, err, store.ErrInvalid)
	var x store.Serial
	s.View(func(st *store.State) { x, _ = st.Serial("SN-2") })
	if x.Key != (plan.Key{2}) || x.Router != "r2" || x.Labels["batch"] != "7" {
		t.Errorf("stored %+v", x)
	}
	admission := store.Admission{Serial: "SN-2", Router: plan.Router{ID: "r2", Subscriber: "1", Serial: "SN-2", Key: plan.Key{2}}}
	must(s.Admit(ctx, admission))
	_, err = s.Admit(ctx, admission)
	is(t, err, store.ErrNotFound) // an announcement is good once, as a token
	is(t, s.DeleteSerial(ctx, "SN-2"), store.ErrNotFound)

	// Another key takes the place only if that was said.
	other := store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{3}}}
	_, err = s.Admit(ctx, other)
	is(t, err, store.ErrExists)
	other.Replace = true
	r = must(s.Admit(ctx, other))
	if diff := cmp.Diff(map[string]string{"site": "north"}, r.Labels); diff != "" || r.Subscriber != "1" || r.Serial != "SN-1" {
		t.Errorf("replaced: %+v", r)
	}
	s.View(func(st *store.State) {
		if got, _ := st.RouterOfKey(plan.Key{3}); got.ID != "r1" {
			t.Errorf("key 3 is %q", got.ID)
		}
		if got, known := st.RouterOfKey(plan.Key{1}); known {
			t.Errorf("the key that was replaced is %q", got.ID)
		}
	})
}

// A device that joins as another router is no longer the first one.
func oneKeyIsOneRouter(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{1}}}))
	must(s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r2", Key: plan.Key{1}}}))
	s.View(func(st *store.State) {
		old, _ := st.Router("r1")
		if got, _ := st.RouterOfKey(plan.Key{1}); got.ID != "r2" || old.Key != (plan.Key{}) {
			t.Errorf("key is of %q, r1 has %v", got.ID, old.Key)
		}
	})
	ok(t, s.DeleteRouter(ctx, "r2", store.Any))
	s.View(func(st *store.State) {
		if got, known := st.RouterOfKey(plan.Key{1}); known {
			t.Errorf("key of a deleted router is of %q", got.ID)
		}
	})
}

func revokedKeyNeverJoins(t *testing.T, s *store.Store) {
	ctx := t.Context()
	_, err := s.Revoke(ctx, "r1", "eve", "stolen")
	is(t, err, store.ErrNotFound)
	must(s.PutRouter(ctx, plan.Router{ID: "r1"}, 0))
	_, err = s.Revoke(ctx, "r1", "eve", "stolen")
	is(t, err, store.ErrInvalid) // there is no key
	must(s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{1}}}))
	unused := token("t", "r1", "")
	ok(t, s.PutToken(ctx, unused))
	must(s.Revoke(ctx, "r1", "eve", "stolen"))
	s.View(func(st *store.State) {
		v, revoked := st.Revocation(plan.Key{1})
		if !revoked || v.Router != "r1" || v.Operator != "eve" || v.Reason != "stolen" || v.Time.IsZero() {
			t.Errorf("revocation %+v, %t", v, revoked)
		}
		if _, there := st.Token("t"); there {
			t.Error("a token of the revoked router is still good")
		}
		if got := slices.Collect(st.Affected(store.Change{Kind: store.KindRevocation, ID: plan.Key{1}.String()})); len(got) != 1 || got[0] != "r1" {
			t.Errorf("revocation reaches %v", got)
		}
	})
	tok := token("t2", "r1", "")
	ok(t, s.PutToken(ctx, tok))
	ok(t, s.DeleteRouter(ctx, "r1", store.Any))
	_, err = s.UseToken(ctx, "t2", tok.SecretHash, plan.Key{1}, "", now)
	is(t, err, store.ErrRevoked)
	_, err = s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r9", Key: plan.Key{1}}})
	is(t, err, store.ErrRevoked)
	s.View(func(st *store.State) {
		if _, there := st.Token("t2"); !there {
			t.Error("a revoked key used the token up")
		}
	})
	ok(t, s.Readmit(ctx, plan.Key{1}))
	is(t, s.Readmit(ctx, plan.Key{1}), store.ErrNotFound)
	must(s.UseToken(ctx, "t2", tok.SecretHash, plan.Key{1}, "", now))
}

// Ten admissions of one router by ten keys: without Replace one of them counts.
func admissionsRace(t *testing.T, s *store.Store) {
	var wg sync.WaitGroup
	errs := make([]error, 10)
	for i := range errs {
		wg.Go(func() {
			_, errs[i] = s.Admit(t.Context(), store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{byte(i + 1)}}})
		})
	}
	wg.Wait()
	won := 0
	for i, err := range errs {
		switch {
		case err == nil:
			won++
			s.View(func(st *store.State) {
				if r, _ := st.Router("r1"); r.Key != (plan.Key{byte(i + 1)}) {
					t.Errorf("winner %d, stored %v", i, r.Key)
				}
			})
		case !errors.Is(err, store.ErrExists):
			t.Error(err)
		}
	}
	if won != 1 {
		t.Errorf("%d won", won)
	}
}

func quarantine(t *testing.T, s *store.Store) {
	ctx := t.Context()
	q := plan.Quarantine{Since: now.UTC(), Devices: []plan.Device{{Address: "192.0.2.1:9", BootID: "a", Model: "x"}, {Address: "192.0.2.2:9", BootID: "b"}}}
	_, err := s.Quarantine(ctx, "r1", plan.Key{1}, q)
	is(t, err, store.ErrNotFound)
	must(s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{1}}}))
	for i, want := range []struct {
		key  plan.Key
		done bool
	}{{plan.Key{2}, false}, {plan.Key{1}, true}, {plan.Key{1}, false}} {
		if done, err := s.Quarantine(ctx, "r1", want.key, q); done != want.done || err != nil {
			t.Errorf("%d: %t, %v", i, done, err)
		}
	}
	s.View(func(st *store.State) {
		r, _ := st.Router("r1")
		if diff := cmp.Diff(&q, r.Quarantine); diff != "" {
			t.Errorf("stored (-want +got):\n%s", diff)
		}
	})
	for i, want := range []bool{true, false} {
		if done, err := s.Release(ctx, "r1"); done != want || err != nil {
			t.Errorf("release %d: %t, %v", i, done, err)
		}
	}
	must(s.Quarantine(ctx, "r1", plan.Key{1}, q))
	// A new key is a new device.
	must(s.Admit(ctx, store.Admission{Router: plan.Router{ID: "r1", Key: plan.Key{2}}, Replace: true}))
	s.View(func(st *store.State) {
		if r, _ := st.Router("r1"); r.Quarantine != nil {
			t.Errorf("still in quarantine: %+v", r.Quarantine)
		}
	})
}

// Announcing a thousand routers is a thousand records that come back in order.
func manySerials(t *testing.T, s *store.Store) {
	const n = 300
	for i := range n {
		must(s.PutSerial(t.Context(), store.Serial{Serial: fmt.Sprintf("SN%04d", i), Router: fmt.Sprintf("r%d", i)}))
	}
	at := 0
	s.View(func(st *store.State) {
		for x := range st.Serials("") {
			if x.Serial != fmt.Sprintf("SN%04d", at) || time.Since(x.Updated) > time.Hour {
				t.Fatalf("%d is %+v", at, x)
			}
			at++
		}
	})
	if at != n {
		t.Errorf("%d serials", at)
	}
}
