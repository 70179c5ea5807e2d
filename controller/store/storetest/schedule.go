package storetest

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// schedules are stored with every field, reach whom they are for, hold the plan
// that they change to, and leave a revision when they go.
func schedules(t *testing.T, s *store.Store) {
	ctx := t.Context()
	must(s.PutPlan(ctx, Plan("gold", 100, 10), 0))
	must(s.PutPlan(ctx, Plan("night", 10, 1), 0))
	for id, site := range map[string]string{"1": "north", "2": "south", "3": "north"} {
		must(s.PutSubscriber(ctx, plan.Subscriber{ID: id, Plan: "gold", Labels: map[string]string{"site": site}}, 0))
		must(s.PutRouter(ctx, plan.Router{ID: "r" + id, Subscriber: id}, 0))
	}
	north := schedule.Target{Labels: map[string]string{"site": "north"}}
	v := schedule.Schedule{
		ID: "nights", Target: north, ToPlan: "night", Zone: "Europe/Berlin",
		Start: schedule.Clock{Year: 2026, Month: 12, Day: 1, Minute: 90}, End: schedule.Clock{Year: 2027, Month: 12, Day: 1},
		Windows:  []schedule.Window{{Days: schedule.Weekdays, From: 1380, To: 360}, {Days: schedule.Weekend, From: 0, To: 1440}},
		Priority: -3, Paused: true, Author: "bob",
	}
	stored := must(s.PutSchedule(ctx, v, 0))
	reaches := func(id string) (all []string) {
		s.View(func(st *store.State) {
			all = slices.Sorted(st.Affected(store.Change{Kind: store.KindSchedule, ID: id}))
		})
		return all
	}
	s.View(func(st *store.State) {
		got, _ := st.Schedule("nights")
		if d := cmp.Diff(stored, got); d != "" {
			t.Error(d)
		}
		sub, _ := st.Subscriber("1")
		if all := st.SchedulesFor(&sub); len(all) != 1 || all[0].ID != "nights" {
			t.Errorf("schedules for 1: %v", all)
		}
	})
	if got := reaches("nights"); !slices.Equal(got, []string{"r1", "r3"}) {
		t.Errorf("labels reach %v", got)
	}
	_, err := s.PutSchedule(ctx, v, 0)
	is(t, err, store.ErrExists)
	missing := v
	missing.ID, missing.ToPlan = "other", "none"
	_, err = s.PutSchedule(ctx, missing, 0)
	is(t, err, store.ErrDangling)
	_, err = s.DeletePlan(ctx, "night", "", store.Any)
	is(t, err, store.ErrInUse)
	_, err = s.DeletePlan(ctx, "night", "gold", store.Any)
	is(t, err, store.ErrInUse)

	// For somebody else: those who lose it are told too, and their revision stays.
	v.Target, v.Created = schedule.Target{Plan: "gold"}, stored.Created
	moved := must(s.PutSchedule(ctx, v, stored.Revision))
	if got := reaches("nights"); !slices.Equal(got, []string{"r1", "r2", "r3"}) {
		t.Errorf("plan reaches %v", got)
	}
	if got := reaches("~" + north.String()); !slices.Equal(got, []string{"r1", "r3"}) {
		t.Errorf("what it was for reaches %v", got)
	}
	is(t, s.DeleteSchedule(ctx, "nights", stored.Revision), store.ErrConflict)
	ok(t, s.DeleteSchedule(ctx, "nights", moved.Revision))
	is(t, s.DeleteSchedule(ctx, "nights", store.Any), store.ErrNotFound)
	s.View(func(st *store.State) {
		for v := range st.Schedules("") {
			t.Errorf("schedule %s is there", v.ID)
		}
		sub, _ := st.Subscriber("2")
		all := st.SchedulesFor(&sub)
		if len(all) != 1 || all[0].Revision <= moved.Revision {
			t.Errorf("of a removed schedule remains %+v", all)
		}
		for _, e := range all {
			if is, _ := e.At(time.Date(2026, 12, 5, 12, 0, 0, 0, time.UTC)); is {
				t.Error("a removed schedule is in force")
			}
		}
	})
	must(s.DeletePlan(ctx, "night", "", store.Any))
}

// settling makes what changes for good part of what it is for, at once.
func settling(t *testing.T, s *store.Store) {
	ctx := t.Context()
	gold := must(s.PutPlan(ctx, Plan("gold", 100, 10), 0))
	must(s.PutPlan(ctx, Plan("silver", 50, 5), 0))
	sub := must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0))
	start := schedule.Clock{Year: 2026, Month: 12, Day: 1}
	rates := plan.RatesOf(Plan("", 300, 30).Link)
	faster := must(s.PutSchedule(ctx, schedule.Schedule{ID: "faster", Target: schedule.Target{Plan: "gold"}, Set: rates, Zone: "UTC", Start: start}, 0))
	move := must(s.PutSchedule(ctx, schedule.Schedule{ID: "move", Target: schedule.Target{Subscriber: "1"}, ToPlan: "silver", Zone: "UTC", Start: start}, 0))
	evening := must(s.PutSchedule(ctx, schedule.Schedule{ID: "evening", Target: schedule.Target{Plan: "gold"}, Set: rates, Zone: "UTC", Windows: []schedule.Window{{Days: 1, From: 0, To: 1}}}, 0))

	ok(t, s.SettleSchedule(ctx, faster))
	ok(t, s.SettleSchedule(ctx, move))
	is(t, s.SettleSchedule(ctx, faster), store.ErrConflict)
	is(t, s.SettleSchedule(ctx, evening), store.ErrInvalid)
	s.View(func(st *store.State) {
		p, _ := st.Plan("gold")
		want := gold
		rates.Over(&want.Link)
		if p.Link != want.Link || p.Author != "schedule faster" || p.Revision <= gold.Revision {
			t.Errorf("plan is %+v", p)
		}
		got, _ := st.Subscriber("1")
		if got.Plan != "silver" || got.Revision <= sub.Revision {
			t.Errorf("subscriber is %+v", got)
		}
		for _, id := range []string{"faster", "move"} {
			v, _ := st.Schedule(id)
			if is, _ := v.At(time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)); is || !v.Settled {
				t.Errorf("schedule %s is %+v", id, v)
			}
		}
	})
	if all := must(s.PlanHistory(ctx, "gold")); len(all) != 2 {
		t.Errorf("history has %d revisions", len(all))
	}
	// It doesn't hold the plan any more.
	must(s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, store.Any))
	must(s.DeletePlan(ctx, "silver", "", store.Any))
}
