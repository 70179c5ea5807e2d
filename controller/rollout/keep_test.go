package rollout_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
)

// What has ended and is of no effect any more is kept for a year, and a hundred
// of each plan; what routers still have is kept for ever.
func TestOld(t *testing.T) {
	now := time.Date(2028, 1, 1, 0, 0, 0, 0, time.UTC)
	day := 24 * time.Hour
	var all []*rollout.Live
	add := func(id, plan string, ago time.Duration, s rollout.State) {
		s.Finished = now.Add(-ago)
		all = append(all, &rollout.Live{Rollout: rollout.Rollout{Spec: rollout.Spec{ID: id, Selector: rollout.Selector{Plan: plan}, Places: "p"}, State: s}})
	}
	add("year", "gold", 366*day, rollout.State{Phase: rollout.RolledBack, Touched: 1})
	add("month", "gold", 30*day, rollout.State{Phase: rollout.RolledBack, Touched: 1})
	add("day", "gold", day, rollout.State{Phase: rollout.RolledBack, Touched: 1})
	add("settled", "gold", 400*day, rollout.State{Phase: rollout.Completed, Opened: 4, Settled: true})
	add("overtaken", "gold", 400*day, rollout.State{Phase: rollout.Overtaken})
	add("has", "gold", 400*day, rollout.State{Phase: rollout.Completed, Opened: 4})
	add("left", "gold", 400*day, rollout.State{Phase: rollout.Aborted, Opened: 1})
	add("goes-on", "gold", 400*day, rollout.State{Phase: rollout.Paused, Opened: 1})
	for i := range 103 {
		add(fmt.Sprintf("many-%03d", i), "silver", time.Duration(i)*time.Hour, rollout.State{Phase: rollout.RolledBack})
	}
	ids := func(ls []*rollout.Live) (ids []string) {
		for _, l := range ls {
			ids = append(ids, l.ID)
		}
		slices.Sort(ids)
		return ids
	}
	gone, forgotten := rollout.Old(all, now)
	if got, want := ids(gone), []string{"many-100", "many-101", "many-102", "overtaken", "settled", "year"}; !slices.Equal(got, want) {
		t.Errorf("to be removed are %v, want %v", got, want)
	}
	if got, want := ids(forgotten), []string{"month"}; !slices.Equal(got, want) {
		t.Errorf("without targets are %v, want %v", got, want)
	}
}
