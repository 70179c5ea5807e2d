package storetest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// rollouts are stored with every field, one at a time; their targets survive,
// a step tells the routers that it is about and no others, and the end makes
// them part of the plan.
func rollouts(t *testing.T, s *store.Store) {
	ctx := t.Context()
	gold := must(s.PutPlan(ctx, Plan("gold", 100, 10), 0))
	var targets []rollout.Target
	var ids []string
	for i := range 6 {
		id := fmt.Sprint(i)
		must(s.PutSubscriber(ctx, plan.Subscriber{ID: id, Plan: "gold"}, 0))
		must(s.PutRouter(ctx, plan.Router{ID: "r" + id, Subscriber: id}, 0))
		targets = append(targets, rollout.Target{Router: "r" + id})
		ids = append(ids, "r"+id)
	}
	nack, err := rollout.ParseGate("nack < 1%")
	ok(t, err)
	spec := rollout.Spec{
		ID: "x", Selector: rollout.Selector{Plan: "gold"}, Set: plan.RatesOf(Plan("", 200, 20).Link), Versions: map[string]string{"agent": "1.2.3"},
		Note: "plan gold", Base: gold.Revision, LinkHash: "abc", Whole: true, Waves: []rollout.Size{{Count: 2}, {Percent: 100}},
		Soak: 90 * time.Second, AnswerTime: time.Minute, Gates: []rollout.Gate{nack}, MinSamples: 7, OnFailure: rollout.AbortOnFailure,
		PerSite: 3, SiteLabel: "ap", Windows: []schedule.Window{{Days: 3, From: 60, To: 120}}, Zone: "UTC", Start: schedule.Clock{Year: 2027, Month: 1, Day: 2},
		Approval: true, Queued: true, Author: "alice",
	}
	places, err := spec.Freeze(targets, 9)
	ok(t, err)
	seen := s.Revision()
	r := rollout.Rollout{Spec: spec, State: rollout.State{Phase: rollout.Approving}}
	r = must(s.StartRollout(ctx, r, places, seen))
	look := func() (got rollout.Rollout) {
		s.View(func(st *store.State) {
			l, found := st.Rollout("x")
			if !found {
				t.Error("rollout is gone")
				return
			}
			got = l.Rollout
		})
		return got
	}
	if d := cmp.Diff(r, look()); d != "" {
		t.Error(d)
	}
	_, err = s.StartRollout(ctx, r, places, s.Revision())
	is(t, err, store.ErrExists)
	other := r
	other.ID = "y"
	_, err = s.StartRollout(ctx, other, places, seen)
	is(t, err, store.ErrConflict)

	reaches := func(from, to int) (all []string) {
		s.View(func(st *store.State) {
			all = slices.Sorted(st.Affected(store.Change{Kind: store.KindRollout, ID: "x", Steps: [2]int{from, to}}))
		})
		return all
	}
	first, second := reaches(0, 1), reaches(1, 2)
	if len(first) != 2 || len(second) != 4 || !slices.Equal(slices.Sorted(slices.Values(append(slices.Clone(first), second...))), ids) {
		t.Errorf("steps reach %v and %v", first, second)
	}

	stale := r.Revision
	r.Phase, r.Opened, r.Touched, r.OpenedAt, r.Passed, r.Reason, r.By, r.Approved = rollout.Answering, 1, 1, r.Created, 1, "why", "bob", "bob"
	r.Verdicts = []rollout.Verdict{{Wave: 1, Gate: "nack < 1%", Result: rollout.Pass, Value: 0.5, Limit: 0.25, Reference: 0.125, Samples: 3, Time: r.Created, Why: "because"}}
	r = must(s.PutRollout(ctx, r, r.Revision, true))
	if d := cmp.Diff(r, look()); d != "" {
		t.Error(d)
	}
	if r.Effect < gold.Revision || r.EffectSince.IsZero() {
		t.Errorf("effect is of revision %d", r.Effect)
	}
	_, err = s.PutRollout(ctx, r, stale, true)
	is(t, err, store.ErrConflict)

	r.Phase, r.Opened, r.Touched = rollout.Completed, 2, 2
	done := must(s.SettleRollout(ctx, r, r.Revision))
	s.View(func(st *store.State) {
		p, _ := st.Plan("gold")
		if p.Link.Down.Rate != 200_000_000 || p.Link.Up.Rate != 20_000_000 || p.Author != "alice" || p.Revision != done.Revision {
			t.Errorf("plan is %+v", p)
		}
		if st.RolloutSet() != nil {
			t.Error("it still has an effect of its own")
		}
	})
	_, err = s.SettleRollout(ctx, done, done.Revision)
	is(t, err, store.ErrConflict)
}

// manyTargets are kept in pieces, and left behind by no one.
func manyTargets(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 100, 10), 0))
	places := make([]uint64, 150_000)
	for i := range places {
		places[i] = uint64(i) << 20
	}
	r := rollout.Rollout{
		Spec: rollout.Spec{
			ID: "big", Selector: rollout.Selector{Plan: "gold"}, Set: plan.RatesOf(Plan("", 200, 20).Link), Waves: []rollout.Size{{Percent: 100}},
			Steps: []rollout.Step{{Wave: 0, Count: 100_000}, {Wave: 1, Count: 50_000}}, Soak: time.Minute, AnswerTime: time.Minute,
		},
		State: rollout.State{Phase: rollout.Waiting},
	}
	r = must(s.StartRollout(ctx, r, places, s.Revision()))
	s.View(func(st *store.State) {
		if _, found := st.Rollout("big"); !found {
			t.Error("rollout with many targets is not there")
		}
	})
	// One that is refused leaves nothing.
	_, err := s.StartRollout(ctx, r, places, s.Revision())
	is(t, err, store.ErrExists)
	orphans := must(s.SweepPlaces(ctx, nil))
	if len(orphans) != 0 {
		t.Errorf("targets of %v are left", orphans)
	}
}
