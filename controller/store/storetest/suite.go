package storetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Plan returns a plan with rates in Mbit/s and otherwise odd values, so that a
// field that gets lost is noticed.
func Plan(name string, down, up int) plan.Plan {
	p := plan.Plan{Name: name, Link: plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}}
	p.Link.Down.Rate = engine.BitsPerSecond(down) * 1_000_000
	p.Link.Up.Rate = engine.BitsPerSecond(up) * 1_000_000
	p.Link.Down.Ingress, p.Link.Down.Wash, p.Link.Down.SplitGSO = true, true, false
	p.Link.Up.Raw, p.Link.Up.Overhead, p.Link.Up.MPU, p.Link.Up.NAT = false, -4, 64, true
	p.Link.Up.Tins, p.Link.Up.Flows = engine.Diffserv4, engine.DualSrcHost
	p.Link.Up.AckFilter, p.Link.Up.Framing = engine.AckFilterAggressive, engine.PTM
	p.Link.Up.RTT, p.Link.Up.Target, p.Link.Up.Fwmark = 50*time.Millisecond, 2500*time.Microsecond, 0xff
	return p
}

// Suite is what every store must do, whatever KV it is on. open returns a
// store with nothing in it that runs until the test ends.
func Suite(t *testing.T, open func(t *testing.T, onChange ...func(store.Change)) *store.Store) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *store.Store)
	}{
		{"read your writes", readYourWrites},
		{"expectations", expectations},
		{"invalid is not stored", invalidIsNotStored},
		{"references hold", referencesHold},
		{"plan in use", planInUse},
		{"plan with replacement", planWithReplacement},
		{"concurrent writers", concurrentWriters},
		{"references under concurrency", referencesUnderConcurrency},
		{"indexes", indexes},
		{"layers", layers},
		{"listing", listing},
		{"token is used once", tokenIsUsedOnce},
		{"many tokens", manyTokens},
		{"token is refused", tokenIsRefused},
		{"token of a known router", tokenOfKnownRouter},
		{"schedules", schedules},
		{"settling", settling},
		{"join binds", joinBinds},
		{"one key is one router", oneKeyIsOneRouter},
		{"revoked key never joins", revokedKeyNeverJoins},
		{"admissions race", admissionsRace},
		{"quarantine", quarantine},
		{"many serials", manySerials},
		{"rollouts", rollouts},
		{"many targets", manyTargets},
		{"many subscribers", manySubscribers},
		{"many subscribers stop at the first bad one", manySubscribersStop},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
	t.Run("changes are told in order", func(t *testing.T) {
		var got []store.Change
		done := make(chan struct{})
		s := open(t, func(c store.Change) {
			if got = append(got, c); c.Deleted {
				close(done)
			}
		})
		p := must(s.PutPlan(t.Context(), Plan("gold", 100, 10), 0))
		sub := must(s.PutSubscriber(t.Context(), plan.Subscriber{ID: "1", Plan: "gold"}, 0))
		ok(t, s.DeleteSubscriber(t.Context(), "1", store.Any))
		<-done
		gone := got[len(got)-1].Revision
		if gone <= sub.Revision {
			t.Errorf("deletion has revision %d, not after %d", gone, sub.Revision)
		}
		want := []store.Change{
			{Kind: store.KindPlan, ID: "gold", Revision: p.Revision},
			{Kind: store.KindSubscriber, ID: "1", Revision: sub.Revision},
			{Kind: store.KindSubscriber, ID: "1", Revision: gone, Deleted: true},
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func readYourWrites(t *testing.T, s *store.Store) {
	ctx := t.Context()
	p := must(s.PutPlan(ctx, Plan("gold", 115, 12), 0))
	sub := must(s.PutSubscriber(ctx, plan.Subscriber{ID: "C-1", Plan: "gold", Labels: map[string]string{"site": "Zürich, \"north\""}}, store.Any))
	r := must(s.PutRouter(ctx, plan.Router{ID: "r1", Subscriber: sub.ID}, 0))
	s.View(func(st *store.State) {
		gotP, _ := st.Plan("gold")
		gotS, _ := st.Subscriber(sub.ID)
		gotR, _ := st.Router("r1")
		if d := cmp.Diff([]any{p, sub, r}, []any{gotP, gotS, gotR}); d != "" {
			t.Error(d)
		}
		if p.Revision == 0 || sub.Revision <= p.Revision || r.Revision <= sub.Revision || st.Revision() < r.Revision {
			t.Errorf("revisions don't count up: %d, %d, %d, state %d", p.Revision, sub.Revision, r.Revision, st.Revision())
		}
	})
	ok(t, s.DeleteRouter(ctx, "r1", r.Revision))
	s.View(func(st *store.State) {
		if _, found := st.Router("r1"); found {
			t.Error("router is there after it was deleted")
		}
	})
	is(t, s.DeleteRouter(ctx, "r1", store.Any), store.ErrNotFound)
}

func layers(t *testing.T, s *store.Store) {
	ctx := t.Context()
	for _, name := range []string{"gold", "slow", "tarpit"} {
		must(s.PutPlan(ctx, Plan(name, 1, 1), 0))
	}
	setting := func(words ...string) (out plan.Settings) {
		for i := 0; i < len(words); i += 2 {
			ok(t, out.Parse(words[i], words[i+1]))
		}
		return out
	}
	l := plan.Layers{
		Billing:           setting("down.rate", "90mbit"),
		BillingSuspension: "slow",
		Override:          setting("up.rate", "unlimited", "up.tins", "diffserv4", "down.nat", "true"),
		Boost:             plan.Boost{Settings: setting("down.rtt", "50ms"), Until: now},
		Suspension:        "tarpit",
	}
	sub := must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}.WithLayers(l), 0))
	must(s.PutRouter(ctx, plan.Router{ID: "r1", Subscriber: "1"}, 0))
	reaches := func(st *store.State, name string) (ids []string) {
		for id := range st.Affected(store.Change{Kind: store.KindPlan, ID: name}) {
			ids = append(ids, id)
		}
		return ids
	}
	s.View(func(st *store.State) {
		if d := cmp.Diff(sub, first(st.Subscriber("1"))); d != "" {
			t.Error(d)
		}
		for _, name := range []string{"gold", "slow", "tarpit"} {
			if got := reaches(st, name); !slices.Equal(got, []string{"r1"}) {
				t.Errorf("plan %s reaches %v", name, got)
			}
		}
	})
	_, err := s.PutSubscriber(ctx, plan.Subscriber{ID: "2", Plan: "gold"}.WithLayers(plan.Layers{Suspension: "none"}), 0)
	is(t, err, store.ErrDangling)
	_, err = s.DeletePlan(ctx, "slow", "", store.Any)
	is(t, err, store.ErrInUse)
	_, err = s.DeletePlan(ctx, "tarpit", "slow", store.Any)
	ok(t, err)
	s.View(func(st *store.State) {
		if got := first(st.Subscriber("1")).Layers.Suspension; got != "slow" || len(reaches(st, "tarpit")) != 0 {
			t.Errorf("policy is %q after its plan was replaced", got)
		}
	})
	bare := first(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, store.Any))
	s.View(func(st *store.State) {
		if got := reaches(st, "slow"); len(got) != 0 || first(st.Subscriber("1")).Revision != bare.Revision {
			t.Errorf("plan slow reaches %v though nobody is suspended", got)
		}
	})
	_, err = s.DeletePlan(ctx, "slow", "", store.Any)
	ok(t, err)
}

func expectations(t *testing.T, s *store.Store) {
	ctx := t.Context()
	_, err := s.PutPlan(ctx, Plan("gold", 1, 1), 7)
	is(t, err, store.ErrNotFound)
	first := must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	_, err = s.PutPlan(ctx, Plan("gold", 2, 2), 0)
	is(t, err, store.ErrExists)
	second := must(s.PutPlan(ctx, Plan("gold", 2, 2), first.Revision))
	_, err = s.PutPlan(ctx, Plan("gold", 3, 3), first.Revision)
	is(t, err, store.ErrConflict)
	var e *store.Error
	if !errors.As(err, &e) || e.Have != second.Revision || e.Want != first.Revision || !e.Updated.Equal(second.Updated) {
		t.Errorf("conflict %+v doesn't say that %d of %s is stored", e, second.Revision, second.Updated)
	}
	_, err = s.DeletePlan(ctx, "gold", "", first.Revision)
	is(t, err, store.ErrConflict)
	third := must(s.PutPlan(ctx, Plan("gold", 4, 4), store.Any))
	if _, err = s.DeletePlan(ctx, "gold", "", third.Revision); err != nil {
		t.Error(err)
	}
	_, err = s.DeletePlan(ctx, "gold", "", store.Any)
	is(t, err, store.ErrNotFound)
}

func invalidIsNotStored(t *testing.T, s *store.Store) {
	ctx := t.Context()
	_, err := s.PutPlan(ctx, Plan("Gold", 1, 1), 0)
	is(t, err, store.ErrInvalid)
	_, err = s.PutSubscriber(ctx, plan.Subscriber{ID: "a b", Plan: "gold"}, 0)
	is(t, err, store.ErrInvalid)
	_, err = s.PutRouter(ctx, plan.Router{ID: "../r"}, 0)
	is(t, err, store.ErrInvalid)
	is(t, s.PutToken(ctx, store.Token{ID: "t", Router: "r"}), store.ErrInvalid)
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	_, err = s.DeletePlan(ctx, "gold", "gold", store.Any)
	is(t, err, store.ErrInvalid)
	n, err := s.WriteSubscribers(ctx, []store.SubscriberWrite{
		{Subscriber: plan.Subscriber{ID: "1", Plan: "gold"}},
		{Subscriber: plan.Subscriber{ID: "1", Plan: "gold"}},
	})
	is(t, err, store.ErrInvalid)
	s.View(func(st *store.State) {
		if p, subs, r := st.Len(); n != 0 || p != 1 || subs != 0 || r != 0 {
			t.Errorf("%d plans, %d subscribers and %d routers are stored", p, subs, r)
		}
	})
}

func referencesHold(t *testing.T, s *store.Store) {
	ctx := t.Context()
	_, err := s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0)
	is(t, err, store.ErrDangling)
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	_, err = s.PutRouter(ctx, plan.Router{ID: "r", Subscriber: "2"}, 0)
	is(t, err, store.ErrDangling)
	is(t, s.PutToken(ctx, token("t", "r", "2")), store.ErrDangling)
	must(s.PutRouter(ctx, plan.Router{ID: "r", Subscriber: "1"}, 0))
	err = s.DeleteSubscriber(ctx, "1", store.Any)
	is(t, err, store.ErrInUse)
	var e *store.Error
	if !errors.As(err, &e) || e.Count != 1 || e.RefID != "r" {
		t.Errorf("%+v doesn't say that router r serves it", e)
	}
	_, err = s.WriteSubscribers(ctx, []store.SubscriberWrite{{Subscriber: plan.Subscriber{ID: "1"}, Remove: true, Expect: store.Any}})
	is(t, err, store.ErrInUse)
	must(s.PutRouter(ctx, plan.Router{ID: "r"}, store.Any))
	ok(t, s.DeleteSubscriber(ctx, "1", store.Any))
	_, err = s.DeletePlan(ctx, "gold", "", store.Any)
	ok(t, err)
}

func planInUse(t *testing.T, s *store.Store) {
	ctx := t.Context()
	gold := must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	for i := range 3 {
		must(s.PutSubscriber(ctx, plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold"}, 0))
	}
	moved, err := s.DeletePlan(ctx, "gold", "", gold.Revision)
	is(t, err, store.ErrInUse)
	var e *store.Error
	if !errors.As(err, &e) || e.Count != 3 || moved != 0 {
		t.Errorf("%+v and %d moved, want a count of 3 and 0", e, moved)
	}
	_, err = s.DeletePlan(ctx, "gold", "silver", store.Any)
	is(t, err, store.ErrDangling)
	s.View(func(st *store.State) {
		if p, _ := st.Plan("gold"); p.Revision != gold.Revision || st.CountSubscribers("gold") != 3 {
			t.Errorf("plan has revision %d and %d subscribers, want %d and 3", p.Revision, st.CountSubscribers("gold"), gold.Revision)
		}
	})
}

func planWithReplacement(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutPlan(ctx, Plan("silver", 2, 2), 0))
	const n = 300
	fill(t, s, n, "gold")
	must(s.PutRouter(ctx, plan.Router{ID: "r", Subscriber: subscriberID(0)}, 0))
	moved, err := s.DeletePlan(ctx, "gold", "silver", 1)
	is(t, err, store.ErrConflict)
	s.View(func(st *store.State) {
		if left := st.CountSubscribers("gold"); moved != 0 || left != n {
			t.Errorf("%d moved and %d left, though the plan has another revision", moved, left)
		}
	})
	moved, err = s.DeletePlan(ctx, "gold", "silver", store.Any)
	ok(t, err)
	s.View(func(st *store.State) {
		_, there := st.Plan("gold")
		if there || moved != n || st.CountSubscribers("gold") != 0 || st.CountSubscribers("silver") != n || st.CountRouters("silver") != 1 {
			t.Errorf("moved %d, plan there: %t, subscribers %d and %d, want %d, false, 0 and %d",
				moved, there, st.CountSubscribers("gold"), st.CountSubscribers("silver"), n, n)
		}
		if sub, _ := st.Subscriber(subscriberID(7)); sub.Labels["site"] != "7" {
			t.Errorf("labels are %v after the move", sub.Labels)
		}
	})
}

// Two operators edit one plan: one is told so, and nothing is lost.
func concurrentWriters(t *testing.T, s *store.Store) {
	ctx := t.Context()
	p := must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	const writers = 8
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for i := range writers {
		wg.Go(func() { _, errs[i] = s.PutPlan(ctx, Plan("gold", i+2, 1), p.Revision) })
	}
	wg.Wait()
	won := -1
	for i, err := range errs {
		if err == nil && won < 0 {
			won = i
			continue
		}
		is(t, err, store.ErrConflict)
	}
	s.View(func(st *store.State) {
		if got, _ := st.Plan("gold"); won < 0 || got.Link.Down.Rate != engine.BitsPerSecond(won+2)*1_000_000 {
			t.Errorf("writer %d won, but the rate is %d", won, got.Link.Down.Rate)
		}
	})
}

// Whatever the order of those who refer and those who delete, nothing refers
// to what is gone.
func referencesUnderConcurrency(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("base", 1, 1), 0))
	for round := range 20 {
		name := fmt.Sprintf("p%d", round)
		must(s.PutPlan(ctx, Plan(name, 1, 1), 0))
		id := subscriberID(round)
		must(s.PutSubscriber(ctx, plan.Subscriber{ID: id, Plan: "base"}, 0))
		var wg sync.WaitGroup
		var refer, drop, serve, leave error
		wg.Go(func() { _, refer = s.PutSubscriber(ctx, plan.Subscriber{ID: "user-" + id, Plan: name}, 0) })
		wg.Go(func() { _, drop = s.DeletePlan(ctx, name, "", store.Any) })
		wg.Go(func() { _, serve = s.PutRouter(ctx, plan.Router{ID: "r-" + name, Subscriber: id}, 0) })
		wg.Go(func() { leave = s.DeleteSubscriber(ctx, id, store.Any) })
		wg.Wait()
		for _, c := range []struct {
			made, removed, blocked, missing error
		}{{refer, drop, store.ErrInUse, store.ErrDangling}, {serve, leave, store.ErrInUse, store.ErrDangling}} {
			switch {
			case c.made == nil:
				is(t, c.removed, c.blocked)
			case c.removed == nil:
				is(t, c.made, c.missing)
			default:
				t.Errorf("round %d: neither happened: %v; %v", round, c.made, c.removed)
			}
		}
	}
}

func indexes(t *testing.T, s *store.Store) {
	ctx := t.Context()
	gold := must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutPlan(ctx, Plan("iron", 2, 2), 0))
	fill(t, s, 4, "gold")
	for i := range 4 {
		must(s.PutRouter(ctx, plan.Router{ID: fmt.Sprintf("r%d", i), Subscriber: subscriberID(i)}, 0))
	}
	must(s.PutRouter(ctx, plan.Router{ID: "spare"}, 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: subscriberID(1), Plan: "iron"}, store.Any))
	must(s.PutRouter(ctx, plan.Router{ID: "r2", Subscriber: subscriberID(3)}, store.Any))
	ok(t, s.DeleteRouter(ctx, "r0", store.Any))
	s.View(func(st *store.State) {
		affected := func(k store.Kind, id string) []string {
			return slices.Collect(st.Affected(store.Change{Kind: k, ID: id}))
		}
		routers := func(name string) (ids []string) {
			for r := range st.RoutersOfPlan(name, "") {
				ids = append(ids, r.ID)
			}
			return ids
		}
		for _, c := range []struct {
			what      string
			got, want any
		}{
			{"plan gold reaches", affected(store.KindPlan, "gold"), []string{"r2", "r3"}},
			{"plan iron reaches", affected(store.KindPlan, "iron"), []string{"r1"}},
			{"subscriber 3 reaches", affected(store.KindSubscriber, subscriberID(3)), []string{"r2", "r3"}},
			{"subscriber 0 reaches", affected(store.KindSubscriber, subscriberID(0)), []string(nil)},
			{"router spare reaches", affected(store.KindRouter, "spare"), []string{"spare"}},
			{"token reaches", affected(store.KindToken, "x"), []string(nil)},
			{"routers of gold", routers("gold"), []string{"r2", "r3"}},
			{"counts", []int{st.CountSubscribers("gold"), st.CountRouters("gold"), st.CountSubscribers("iron"), st.CountRouters("iron")}, []int{3, 2, 1, 1}},
			{"revision of gold", first(st.Plan("gold")).Revision, gold.Revision},
		} {
			if d := cmp.Diff(c.want, c.got); d != "" {
				t.Errorf("%s: %s", c.what, d)
			}
		}
	})
}

func listing(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutPlan(ctx, Plan("alu", 1, 1), 0))
	fill(t, s, 250, "gold")
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "~last", Plan: "alu"}, 0))
	s.View(func(st *store.State) {
		var ids, ofGold []string
		for after := ""; ; {
			n := len(ids)
			for sub := range st.Subscribers(after) {
				if ids = append(ids, sub.ID); len(ids) == n+100 {
					break
				}
			}
			if len(ids) == n {
				break
			}
			after = ids[len(ids)-1]
		}
		for sub := range st.SubscribersOfPlan("gold", subscriberID(99)) {
			ofGold = append(ofGold, sub.ID)
		}
		if len(ids) != 251 || !slices.IsSorted(ids) || ids[250] != "~last" {
			t.Errorf("%d subscribers in pages, last is %s; in order: %t", len(ids), ids[len(ids)-1], slices.IsSorted(ids))
		}
		if len(ofGold) != 150 || ofGold[0] != subscriberID(100) {
			t.Errorf("%d subscribers of gold after the 100th, first is %s", len(ofGold), ofGold[0])
		}
		var plans []string
		for p := range st.Plans("") {
			plans = append(plans, p.Name)
		}
		if d := cmp.Diff([]string{"alu", "gold"}, plans); d != "" {
			t.Error(d)
		}
	})
}

func tokenIsUsedOnce(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	tok := token("t", "r1", "1")
	ok(t, s.PutToken(ctx, tok))
	is(t, s.PutToken(ctx, tok), store.ErrExists)
	const uses = 8
	var wg sync.WaitGroup
	errs := make([]error, uses)
	for i := range uses {
		wg.Go(func() {
			r, err := s.UseToken(ctx, "t", tok.SecretHash, plan.Key{1}, "", now)
			if errs[i] = err; err == nil && (r.ID != "r1" || r.Subscriber != "1" || r.Revision == 0) {
				t.Errorf("token gave %+v", r)
			}
		})
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else {
			is(t, err, store.ErrToken)
		}
	}
	s.View(func(st *store.State) {
		_, there := st.Token("t")
		if r, _ := st.Router("r1"); won != 1 || there || r.Subscriber != "1" || st.CountRouters("gold") != 1 {
			t.Errorf("%d of %d uses succeeded, token there: %t, router %+v", won, uses, there, r)
		}
	})
}

// manyTokens stores more than fit one transaction, and removes them.
func manyTokens(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	var all []store.Token
	var ids []string
	for i := range 300 {
		x := token(fmt.Sprintf("t%03d", i), fmt.Sprintf("r%03d", i), "1")
		x.Batch = "b"
		all, ids = append(all, x), append(ids, x.ID)
	}
	count := func() (n int) {
		s.View(func(st *store.State) {
			for x := range st.Tokens("") {
				if x.Batch != "b" {
					t.Errorf("token %s is of batch %q", x.ID, x.Batch)
				}
				n++
			}
		})
		return n
	}
	bad := slices.Clone(all)
	bad[299].Subscriber = "nobody"
	n, err := s.PutTokens(ctx, bad)
	is(t, err, store.ErrDangling)
	if n == 0 || n == 300 || n != count() {
		t.Errorf("%d are said to be stored, %d are", n, count())
	}
	if m, err := s.PutTokens(ctx, all[n:]); err != nil || n+m != 300 || count() != 300 {
		t.Errorf("%d more, %v: %d are stored", m, err, count())
	}
	ok(t, s.DeleteTokens(ctx, append(ids, "never")))
	if count() != 0 {
		t.Errorf("%d are left", count())
	}
}

func tokenIsRefused(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	tok := token("t", "r1", "1")
	ok(t, s.PutToken(ctx, tok))
	use := func(id string, hash [32]byte, at time.Time) error {
		_, err := s.UseToken(ctx, id, hash, plan.Key{1}, "", at)
		return err
	}
	is(t, use("x", tok.SecretHash, now), store.ErrToken)
	is(t, use("", tok.SecretHash, now), store.ErrToken)
	is(t, use("t", sha256.Sum256([]byte("wrong")), now), store.ErrToken)
	is(t, use("t", tok.SecretHash, tok.Expires), store.ErrToken)
	ok(t, s.DeleteSubscriber(ctx, "1", store.Any))
	is(t, use("t", tok.SecretHash, now), store.ErrDangling)
	s.View(func(st *store.State) {
		if got, there := st.Token("t"); !there || got.SecretHash != tok.SecretHash || !got.Expires.Equal(tok.Expires) {
			t.Errorf("token is %+v after it was refused", got)
		}
		if _, there := st.Router("r1"); there {
			t.Error("a refused token made a router")
		}
	})
	ok(t, s.DeleteToken(ctx, "t"))
	is(t, s.DeleteToken(ctx, "t"), store.ErrNotFound)
	is(t, use("t", tok.SecretHash, now), store.ErrToken)
}

// A router that enrols again keeps its subscriber unless the token names one,
// and only its new key counts.
func tokenOfKnownRouter(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "2", Plan: "gold"}, 0))
	must(s.PutRouter(ctx, plan.Router{ID: "r1", Subscriber: "1", Key: plan.Key{1}}, 0))
	for _, c := range []struct {
		names, serves string
		key           plan.Key
	}{{"", "1", plan.Key{2}}, {"2", "2", plan.Key{31: 3}}} {
		tok := token("t"+c.names, "r1", c.names)
		ok(t, s.PutToken(ctx, tok))
		r, err := s.UseToken(ctx, tok.ID, tok.SecretHash, c.key, "", now)
		ok(t, err)
		if r.Subscriber != c.serves || r.Key != c.key {
			t.Errorf("token for %q: router serves %s with key %x, want %s and %x", c.names, r.Subscriber, r.Key, c.serves, c.key)
		}
		s.View(func(st *store.State) {
			if stored, _ := st.Router("r1"); stored.Key != c.key {
				t.Errorf("token for %q: stored with key %x, want %x", c.names, stored.Key, c.key)
			}
		})
	}
}

func manySubscribers(t *testing.T, s *store.Store) {
	ctx := t.Context()
	var names []string
	for i := range 5 {
		names = append(names, fmt.Sprintf("p%d", i))
		must(s.PutPlan(ctx, Plan(names[i], 1, 1), 0))
	}
	const n = 500
	writes := make([]store.SubscriberWrite, n)
	for i := range writes {
		writes[i].Subscriber = plan.Subscriber{ID: subscriberID(i), Plan: names[i%5], Labels: map[string]string{"site": fmt.Sprint(i)}}
	}
	written, err := s.WriteSubscribers(ctx, writes)
	ok(t, err)
	var removes []store.SubscriberWrite
	s.View(func(st *store.State) {
		if written != n || st.CountSubscribers("p3") != n/5 {
			t.Errorf("%d written, p3 has %d", written, st.CountSubscribers("p3"))
		}
		for sub := range st.Subscribers("") {
			removes = append(removes, store.SubscriberWrite{Subscriber: sub, Remove: true, Expect: sub.Revision})
		}
	})
	written, err = s.WriteSubscribers(ctx, removes)
	ok(t, err)
	s.View(func(st *store.State) {
		if _, left, _ := st.Len(); written != n || left != 0 {
			t.Errorf("%d removed, %d are left", written, left)
		}
	})
}

func manySubscribersStop(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 1, 1), 0))
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: subscriberID(50), Plan: "gold"}, 0))
	writes := make([]store.SubscriberWrite, 60)
	for i := range writes {
		writes[i].Subscriber = plan.Subscriber{ID: subscriberID(i), Plan: "gold"}
	}
	written, err := s.WriteSubscribers(ctx, writes)
	is(t, err, store.ErrExists)
	var e *store.Error
	if !errors.As(err, &e) || e.ID != subscriberID(50) {
		t.Errorf("%v doesn't name subscriber %s", err, subscriberID(50))
	}
	s.View(func(st *store.State) {
		if n := st.CountSubscribers("gold"); written != 0 || n != 1 {
			t.Errorf("%d written and %d stored, though it is one transaction", written, n)
		}
	})
}

// now is within the life of every token here.
var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func token(id, router, subscriber string) store.Token {
	return store.Token{ID: id, Router: router, Subscriber: subscriber, SecretHash: sha256.Sum256([]byte("secret")), Expires: now.Add(time.Hour)}
}

func subscriberID(i int) string { return fmt.Sprintf("s%05d", i) }

func fill(t *testing.T, s *store.Store, n int, planName string) {
	t.Helper()
	writes := make([]store.SubscriberWrite, n)
	for i := range writes {
		writes[i].Subscriber = plan.Subscriber{ID: subscriberID(i), Plan: planName, Labels: map[string]string{"site": fmt.Sprint(i)}}
	}
	if _, err := s.WriteSubscribers(context.WithoutCancel(t.Context()), writes); err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("prepare: %v", err))
	}
	return v
}

func first[T, R any](v T, _ R) T { return v }

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func is(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}
