package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// by returns a context in which an operator calls.
func by(t *testing.T, name, call string) context.Context {
	return store.WithActor(t.Context(), store.Actor{
		Caller: identity.Caller{Name: name, Role: identity.Operator, Via: "certificate", Address: "192.0.2.1"}, Call: call,
	})
}

// entries returns the whole log, newest first.
func entries(t *testing.T, s *store.Store) []store.AuditEntry {
	t.Helper()
	all, next, err := s.AuditLog(t.Context(), "", 1000, time.Time{}, func(store.AuditEntry) bool { return true })
	if err != nil || next != "" {
		t.Fatalf("%v, next %q", err, next)
	}
	return all
}

func TestAuditOfFake(t *testing.T) { testAudit(t, storetest.NewFake(t)) }

func TestAuditOfEtcd(t *testing.T) {
	s, _ := startEtcd(t)
	testAudit(t, s)
}

func testAudit(t *testing.T, s *store.Store) {
	gold, err := s.PutPlan(by(t, "alice", "CreatePlan"), storetest.Plan("gold", 100, 10), 0)
	if err != nil {
		t.Fatal(err)
	}
	faster, err := s.PutPlan(by(t, "bob", "UpdatePlan"), storetest.Plan("gold", 200, 10), gold.Revision)
	if err != nil {
		t.Fatal(err)
	}
	got := entries(t, s)
	if len(got) != 2 {
		t.Fatalf("%d entries, want 2: %+v", len(got), got)
	}
	e := got[0]
	if e.ID != faster.Revision || e.Actor.Name != "bob" || e.Role != "operator" || e.Actor.Via != "certificate" || e.Actor.Address != "192.0.2.1" || e.Actor.Call != "UpdatePlan" {
		t.Errorf("newest entry is %+v", e)
	}
	if c := e.Changes[0]; c.Kind != store.KindPlan || c.ID != "gold" || !strings.Contains(string(c.Old), "100") || !strings.Contains(string(c.New), "200") {
		t.Errorf("change is %s -> %s", c.Old, c.New)
	}
	if got[1].Added != 1 || got[1].Changes[0].Old != nil {
		t.Errorf("oldest entry is %+v", got[1])
	}

	// Pages.
	first, next, err := s.AuditLog(t.Context(), "", 1, time.Time{}, func(store.AuditEntry) bool { return true })
	if err != nil || len(first) != 1 || first[0].ID != faster.Revision {
		t.Fatalf("first page: %+v, %v", first, err)
	}
	second, last, err := s.AuditLog(t.Context(), next, 1, time.Time{}, func(store.AuditEntry) bool { return true })
	if err != nil || len(second) != 1 || second[0].ID != gold.Revision || last != "" {
		t.Fatalf("second page: %+v, %q, %v", second, last, err)
	}
	// Since.
	none, _, err := s.AuditLog(t.Context(), "", 1, time.Now().Add(time.Hour), func(store.AuditEntry) bool { return true })
	if err != nil || len(none) != 0 {
		t.Errorf("entries of the future: %+v, %v", none, err)
	}

	// Undo the newest, then it is what it was, by another revision.
	if _, err := s.Undo(by(t, "carol", "UndoChange"), faster.Revision, true); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Undo(by(t, "carol", "UndoChange"), faster.Revision, false); err != nil {
		t.Fatal(err)
	}
	s.View(func(st *store.State) {
		p, _ := st.Plan("gold")
		if p.Link != gold.Link || p.Author != "carol" || p.Revision <= faster.Revision {
			t.Errorf("after undo: %+v", p)
		}
	})
	// Again, it says who was faster.
	_, err = s.Undo(by(t, "dave", "UndoChange"), faster.Revision, false)
	if !errors.Is(err, store.ErrChangedSince) || !strings.Contains(err.Error(), "by carol") || !strings.Contains(err.Error(), "UndoChange") {
		t.Errorf("undo twice: %v", err)
	}
	if _, err := s.Undo(by(t, "dave", "UndoChange"), 999999, false); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("undo nothing: %v", err)
	}

	// A subscriber that was removed comes back with everything; its plan must be there.
	sub := plan.Subscriber{ID: "1", Plan: "gold", Labels: map[string]string{"site": "north"}}
	if _, err := s.PutSubscriber(by(t, "alice", "CreateSubscriber"), sub, 0); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteSubscriber(by(t, "alice", "DeleteSubscriber"), "1", store.Any); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Undo(by(t, "bob", "UndoChange"), entries(t, s)[0].ID, false); err != nil {
		t.Fatal(err)
	}
	s.View(func(st *store.State) {
		if got, ok := st.Subscriber("1"); !ok || got.Plan != "gold" || got.Labels["site"] != "north" {
			t.Errorf("after undo: %+v, %v", got, ok)
		}
	})
	// What is in use does not go by undoing its creation.
	if _, err := s.Undo(by(t, "bob", "UndoChange"), gold.Revision, false); !errors.Is(err, store.ErrChangedSince) {
		t.Errorf("undo of the plan's creation: %v", err)
	}
}

// A key that was taken away from a router does not come back by undoing.
func TestUndoLeavesIdentities(t *testing.T) {
	s := storetest.NewFake(t)
	r, err := s.PutRouter(by(t, "a", "x"), plan.Router{ID: "home-1", Key: plan.Key{1}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteRouter(by(t, "a", "DeleteRouter"), "home-1", r.Revision); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Undo(by(t, "a", "UndoChange"), entries(t, s)[0].ID, false); err != nil {
		t.Fatal(err)
	}
	s.View(func(st *store.State) {
		got, ok := st.Router("home-1")
		if !ok || got.Key != (plan.Key{}) {
			t.Errorf("after undo: %+v, %v", got, ok)
		}
	})
}

// Secrets are never in the log, nor hashes of them, and what opens doors does
// not come back.
func TestAuditHasNoSecrets(t *testing.T) {
	s := storetest.NewFake(t)
	hash := [32]byte{0xab, 0xcd, 0xef}
	if err := s.PutToken(by(t, "a", "CreateToken"), store.Token{ID: "t1", Router: "home-1", SecretHash: hash, Expires: time.Now().Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateOperator(by(t, "a", "CreateOperator"), store.Operator{Name: "bob", Role: identity.Viewer, Credentials: []store.Credential{{ID: "x", Hash: hash, Token: true, Expires: time.Now().Add(time.Hour)}}}); err != nil {
		t.Fatal(err)
	}
	all := entries(t, s)
	if len(all) != 2 {
		t.Fatalf("%d entries", len(all))
	}
	for _, e := range all {
		for _, c := range e.Changes {
			if strings.Contains(string(c.New), "abcdef") || !strings.Contains(string(c.New), "hidden") {
				t.Errorf("%s %s: %s", c.Kind, c.ID, c.New)
			}
		}
		if _, err := s.Undo(by(t, "a", "UndoChange"), e.ID, false); !errors.Is(err, store.ErrLasting) {
			t.Errorf("undo %s: %v", e.Actor.Call, err)
		}
	}
}

// An import is one entry with its counts, whatever it takes to store it, and
// rolling it forward is none.
func TestAuditOfImport(t *testing.T) {
	s, _ := startEtcd(t)
	if _, err := s.PutPlan(t.Context(), storetest.Plan("gold", 1, 1), 0); err != nil {
		t.Fatal(err)
	}
	var writes []store.SubscriberWrite
	for i := range 1000 {
		writes = append(writes, store.SubscriberWrite{Subscriber: plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold"}})
	}
	if _, err := s.WriteSubscribers(by(t, "billing", "ImportSubscribers"), writes); err != nil {
		t.Fatal(err)
	}
	// A write of a subscriber waits until the import is rolled forward.
	if _, err := s.PutSubscriber(by(t, "bob", "UpdateSubscriber"), plan.Subscriber{ID: "1", Plan: "gold", Labels: map[string]string{"a": "b"}}, store.Any); err != nil {
		t.Fatal(err)
	}
	all := entries(t, s)
	if len(all) != 3 {
		t.Fatalf("%d entries, want the plan, the import and the change: %+v", len(all), all)
	}
	if e := all[1]; e.Actor.Name != "billing" || e.Added != 1000 || e.Changed != 0 || len(e.Changes) != 0 {
		t.Errorf("import is %+v", e)
	}
	if all[2].Actor.Name != "controller" {
		t.Errorf("a change without an actor is by %q", all[2].Actor.Name)
	}
	if _, err := s.Undo(t.Context(), all[1].ID, false); !errors.Is(err, store.ErrChangedSince) || !strings.Contains(err.Error(), "subscriber 1 ") {
		t.Errorf("undo the import: %v", err)
	}
}

// labelsOf returns all subscribers, each with its labels.
func labelsOf(s *store.Store) (all map[string]map[string]string) {
	all = map[string]map[string]string{}
	s.View(func(st *store.State) {
		for sub := range st.Subscribers("") {
			all[sub.ID] = sub.Labels
		}
	})
	return all
}

// What an import adds, changes and removes is undone as a whole, and so is the
// undoing, whether it took one transaction or many.
func TestUndoImport(t *testing.T) {
	for _, n := range []int{50, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			kv := storetest.NewKV()
			s := storetest.Start(t, kv, store.Config{})
			if _, err := s.PutPlan(t.Context(), storetest.Plan("gold", 1, 1), 0); err != nil {
				t.Fatal(err)
			}
			note := strings.Repeat("x", 200) // 50 of them are too much for an entry
			write := func(round string, only func(i int) bool, remove bool) plan.Revision {
				t.Helper()
				have := map[string]plan.Revision{}
				s.View(func(st *store.State) {
					for sub := range st.Subscribers("") {
						have[sub.ID] = sub.Revision
					}
				})
				var writes []store.SubscriberWrite
				for i := range 2 * n {
					if id := fmt.Sprint(i); only(i) {
						sub := plan.Subscriber{ID: id, Plan: "gold", Labels: map[string]string{"round": round, "note": note, "more": note}}
						writes = append(writes, store.SubscriberWrite{Subscriber: sub, Expect: have[id], Remove: remove})
					}
				}
				if _, err := s.WriteSubscribers(by(t, "billing", "ImportSubscribers"), writes); err != nil {
					t.Fatal(err)
				}
				return entries(t, s)[0].ID
			}
			states := []map[string]map[string]string{labelsOf(s)}
			var ids []plan.Revision
			for _, w := range []struct {
				round  string
				only   func(i int) bool
				remove bool
			}{
				{"one", func(i int) bool { return i < n }, false},
				{"two", func(i int) bool { return i >= n/2 && i < n+n/2 }, false}, // changes half, adds half
				{"three", func(i int) bool { return i >= n/4 && i < n }, true},
			} {
				ids = append(ids, write(w.round, w.only, w.remove))
				states = append(states, labelsOf(s))
			}
			same := func(when string, want map[string]map[string]string) {
				t.Helper()
				if diff := cmp.Diff(want, labelsOf(s)); diff != "" {
					t.Errorf("%s (-want +got):\n%.2000s", when, diff)
				}
			}
			if _, err := s.Undo(by(t, "ann", "UndoChange"), ids[1], false); !errors.Is(err, store.ErrChangedSince) {
				t.Errorf("undo what was changed since: %v", err)
			}
			same("after a refusal", states[3])
			if all, err := s.Undo(by(t, "ann", "UndoChange"), ids[2], true); err != nil || len(all) != min(n-n/4, 1000) || all[0].Old != nil || all[0].New == nil {
				t.Errorf("dry run: %d changes, %v", len(all), err)
			}
			same("after a dry run", states[3])
			undo := func(id plan.Revision) {
				t.Helper()
				if why := entries(t, s)[0].Lasting(); why != "" {
					t.Errorf("lasting: %s", why)
				}
				if _, err := s.Undo(by(t, "ann", "UndoChange"), id, false); err != nil {
					t.Errorf("undo %d: %v", id, err)
				}
			}
			undo(ids[2])
			same("the removal undone", states[2])
			undo(entries(t, s)[0].ID)
			same("that undone", states[3])
			undo(entries(t, s)[0].ID)
			same("and that", states[2])
			if err := s.Prune(t.Context(), time.Now().AddDate(0, 0, 8)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Undo(by(t, "ann", "UndoChange"), entries(t, s)[0].ID, false); !errors.Is(err, store.ErrLasting) {
				t.Errorf("undo after more than a week: %v", err)
			}
			if items, _, err := kv.List(t.Context(), "/cakefleet/undo/"); err != nil || len(items) != 0 {
				t.Errorf("%d pieces are kept for ever, %v", len(items), err)
			}
		})
	}
}

// A schedule that was made, changed or deleted is as it was before.
func TestUndoSchedule(t *testing.T) {
	s := storetest.NewFake(t)
	if _, err := s.PutPlan(t.Context(), storetest.Plan("gold", 1, 1), 0); err != nil {
		t.Fatal(err)
	}
	ctx := by(t, "ann", "UpdateSchedule")
	v := schedule.Schedule{
		ID: "night", Target: schedule.Target{Plan: "gold"}, Zone: "UTC",
		Windows: []schedule.Window{{Days: schedule.Weekdays | schedule.Weekend, From: 0, To: 360}},
	}
	if err := v.Set.Parse("down.rate", "200mbit"); err != nil {
		t.Fatal(err)
	}
	shown := func() string {
		var is schedule.Schedule
		var ok bool
		s.View(func(st *store.State) { is, ok = st.Schedule("night") })
		if !ok {
			return "none"
		}
		return is.Target.String() + " " + is.Zone + " " + is.Windows[0].String()
	}
	steps := []func() error{
		func() error { _, err := s.PutSchedule(ctx, v, 0); return err },
		func() error {
			v.Zone, v.Target = "Europe/Berlin", schedule.Target{Labels: map[string]string{"site": "north"}}
			_, err := s.PutSchedule(ctx, v, store.Any)
			return err
		},
		func() error { return s.DeleteSchedule(ctx, "night", store.Any) },
	}
	for i, step := range steps {
		before := shown()
		if err := step(); err != nil {
			t.Fatal(err)
		}
		after := shown()
		if before == after {
			t.Fatalf("step %d changes nothing: %s", i, after)
		}
		for turn, want := range []string{before, after} { // and the undoing itself
			if _, err := s.Undo(ctx, entries(t, s)[0].ID, false); err != nil {
				t.Fatalf("undo step %d: %v", i, err)
			}
			if got := shown(); got != want {
				t.Errorf("step %d, undone %d times: %s, want %s", i, turn+1, got, want)
			}
		}
	}
}

// A change and its entry are one: what is refused is not told.
func TestRefusedIsNotTold(t *testing.T) {
	s := storetest.NewFake(t)
	gold, err := s.PutPlan(t.Context(), storetest.Plan("gold", 1, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutPlan(t.Context(), storetest.Plan("gold", 2, 1), gold.Revision+5); !errors.Is(err, store.ErrConflict) {
		t.Fatalf("got %v", err)
	}
	if n := len(entries(t, s)); n != 1 {
		t.Errorf("%d entries, want 1", n)
	}
}

func TestPrune(t *testing.T) {
	for name, c := range map[string]struct {
		config store.Config
		now    time.Time
		left   int
	}{
		"nothing to do": {store.Config{}, time.Now(), 300},
		"too many":      {store.Config{AuditEntries: 100}, time.Now(), 100},
		"too old":       {store.Config{AuditAge: time.Hour}, time.Now().Add(2 * time.Hour), 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := storetest.Start(t, storetest.NewKV(), c.config)
			for i := range 300 {
				if _, err := s.PutPlan(t.Context(), storetest.Plan(fmt.Sprintf("p%d", i), 1, 1), 0); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Prune(t.Context(), c.now); err != nil {
				t.Fatal(err)
			}
			all := entries(t, s)
			if len(all) != c.left {
				t.Errorf("%d entries are left, want %d", len(all), c.left)
			}
			if len(all) > 0 && all[0].Changes[0].ID != "p299" {
				t.Errorf("newest is %s", all[0].Changes[0].ID)
			}
		})
	}
}

// The last admin who can come in stays, whatever is tried, and two can't remove
// each other at once.
func TestLastAdmin(t *testing.T) {
	s := storetest.NewFake(t)
	ctx := t.Context()
	open := store.Credential{ID: "c1", Hash: [32]byte{1}, Expires: time.Now().Add(time.Hour)}
	if err := s.EnsureAdmin(ctx, "admin", open, false); err != nil {
		t.Fatal(err)
	}
	demote := func(o *store.Operator) error { o.Role = identity.Viewer; return nil }
	disarm := func(o *store.Operator) error { o.Credentials = nil; return nil }
	limit := func(o *store.Operator) error { o.Credentials[0].Role = identity.Viewer; return nil }
	for name, try := range map[string]func() error{
		"delete":        func() error { return s.DeleteOperator(ctx, "admin") },
		"demote":        func() error { _, err := s.ChangeOperator(ctx, "admin", store.Any, demote); return err },
		"revoke":        func() error { _, err := s.ChangeOperator(ctx, "admin", store.Any, disarm); return err },
		"limit a token": func() error { _, err := s.ChangeOperator(ctx, "admin", store.Any, limit); return err },
	} {
		if err := try(); !errors.Is(err, store.ErrLastAdmin) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// One who can't come in is no other admin; one whose token has ended neither.
	if _, err := s.CreateOperator(ctx, store.Operator{Name: "bob", Role: identity.Admin, Credentials: []store.Credential{{ID: "t", Token: true, Hash: [32]byte{2}, Expires: time.Now().Add(-time.Second)}}}); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteOperator(ctx, "admin"); !errors.Is(err, store.ErrLastAdmin) {
		t.Errorf("delete beside one who can't come in: %v", err)
	}
	if _, err := s.ChangeOperator(ctx, "bob", store.Any, func(o *store.Operator) error { o.Credentials[0].Expires = time.Now().Add(time.Hour); return nil }); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 2)
	for _, name := range []string{"admin", "bob"} {
		go func() { errs <- s.DeleteOperator(ctx, name) }()
	}
	one, two := <-errs, <-errs
	if (one == nil) == (two == nil) {
		t.Errorf("both remove each other: %v and %v", one, two)
	}
	n := 0
	s.View(func(st *store.State) {
		for range st.Operators("") {
			n++
		}
	})
	if n != 1 {
		t.Errorf("%d admins are left", n)
	}
}

// A start lets nobody in who was taken away, unless it made new credentials.
func TestEnsureAdmin(t *testing.T) {
	s := storetest.NewFake(t)
	ctx := t.Context()
	c := func(n byte) store.Credential {
		return store.Credential{ID: fmt.Sprint(n), Hash: [32]byte{n}, Expires: time.Now().Add(time.Hour)}
	}
	if err := s.EnsureAdmin(ctx, "admin", c(1), false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateOperator(ctx, store.Operator{Name: "bob", Role: identity.Admin, Credentials: []store.Credential{c(2)}}); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteOperator(ctx, "admin"); err != nil {
		t.Fatal(err)
	}
	has := func() (ok bool) {
		s.View(func(st *store.State) { _, ok = st.Operator("admin") })
		return ok
	}
	if err := s.EnsureAdmin(ctx, "admin", c(1), false); err != nil || has() {
		t.Errorf("a start lets a removed admin in again: %v, %v", has(), err)
	}
	if err := s.EnsureAdmin(ctx, "admin", c(3), true); err != nil || !has() {
		t.Errorf("new credentials open nothing: %v, %v", has(), err)
	}
}
