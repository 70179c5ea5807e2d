package settle_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/settle"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// A plan that changes at a time changes on the router at that time, and stays
// so when an operator sets another field of the plan afterwards.
func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := storetest.NewKV()
		var settler *settle.Settler
		s := storetest.Start(t, kv, store.Config{}, func(c store.Change) { settler.Changed(c) })
		settler = settle.New(s, hclog.NewNullLogger())
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- lead.New(kv, lead.Config{}).Run(ctx, settle.Work, settler.Run) }()

		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		_, err := s.PutPlan(ctx, storetest.Plan("gold", 100, 10), 0)
		check(err)
		_, err = s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0)
		check(err)
		_, err = s.PutRouter(ctx, plan.Router{ID: "r", Subscriber: "1"}, 0)
		check(err)
		set := plan.Settings{}
		check(set.Parse("down.rate", "300mbit"))
		start := time.Now().Add(72 * time.Hour).UTC()
		_, err = s.PutSchedule(ctx, schedule.Schedule{
			ID: "faster", Target: schedule.Target{Plan: "gold"}, Set: set, Zone: "UTC",
			Start: schedule.Clock{Year: start.Year(), Month: start.Month(), Day: start.Day(), Minute: start.Hour()*60 + start.Minute()},
		}, 0)
		check(err)
		look := func() (down string, settled bool, revision plan.Revision) {
			s.View(func(st *store.State) {
				d, _ := resolve.Router(st, "r", time.Now(), nil)
				v, _ := st.Schedule("faster")
				p, _ := st.Plan("gold")
				down, settled, revision = d.Link.Down.Rate.String(), v.Settled, p.Revision
			})
			return down, settled, revision
		}
		time.Sleep(71 * time.Hour)
		if down, settled, _ := look(); down != "100Mbit" || settled {
			t.Errorf("before: %s, settled %t", down, settled)
		}
		time.Sleep(time.Hour + time.Millisecond)
		synctest.Wait()
		down, settled, revision := look()
		if down != "300Mbit" || !settled {
			t.Errorf("at its time: %s, settled %t", down, settled)
		}
		var p plan.Plan
		s.View(func(st *store.State) { p, _ = st.Plan("gold") })
		p.Link.Down.Rate, p.Link.Up.Rate = 200_000_000, 20_000_000
		_, err = s.PutPlan(ctx, p, revision)
		check(err)
		time.Sleep(time.Hour)
		if down, _, _ := look(); down != "200Mbit" {
			t.Errorf("after an operator has set 200 Mbit/s: %s", down)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
