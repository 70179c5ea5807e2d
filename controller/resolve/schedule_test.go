package resolve_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// scheduled returns a schedule for minutes of the hour that at counts in.
func scheduled(t testing.TB, id string, target schedule.Target, from, to int, words ...string) schedule.Schedule {
	t.Helper()
	s := schedule.Schedule{ID: id, Target: target, Zone: "UTC", Set: set(t, words...), Revision: 20, Updated: at(0)}
	s.Windows = []schedule.Window{{Days: schedule.AllDays, From: 12*60 + from, To: 12*60 + to}}
	return s
}

// Schedules are above the plan and billing and below the rest, for the time
// that they are in force; the next change is foretold, and a boost ends in what
// is so then.
func TestSchedules(t *testing.T) {
	gold, one := schedule.Target{Plan: "gold"}, schedule.Target{Subscriber: "1"}
	rates := []string{"down.rate", "200mbit", "up.rate", "20mbit"}
	night := scheduled(t, "night", one, 10, 20)
	night.ToPlan = "slow"
	from10 := scheduled(t, "from10", gold, 0, 0, "down.rate", "50mbit")
	from10.Windows, from10.Start = nil, schedule.Clock{Year: 2026, Month: 7, Day: 1, Minute: 12*60 + 10}
	paused := scheduled(t, "paused", gold, 10, 20, rates...)
	paused.Paused = true
	removed := schedule.Schedule{ID: "~plan gold", Target: gold, Removed: true, Revision: 99, Updated: at(5)}

	billing := plan.Layers{Billing: set(t, "up.rate", "9mbit")}
	boosted := plan.Layers{Boost: plan.Boost{Settings: set(t, "down.rate", "300mbit"), Until: at(15)}}
	for _, c := range []struct {
		name      string
		schedules []schedule.Schedule
		layers    plan.Layers
		now       int
		want      string // rates of down and up
		changes   int    // minute
		owner     string // of down.rate and up.rate
		then      string
	}{
		{"before", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{}, 9, "100Mbit 10Mbit", 10, "plan plan", ""},
		{"in force", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{}, 10, "200Mbit 20Mbit", 20, "schedule a schedule a", ""},
		{"after", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{}, 20, "100Mbit 10Mbit", 24*60 + 10, "plan plan", ""},
		{"above billing", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, billing, 15, "200Mbit 20Mbit", 20, "schedule a schedule a", ""},
		{"below an override", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{Override: set(t, "up.rate", "2mbit")}, 15, "200Mbit 2Mbit", 20, "schedule a override", ""},
		{"below a suspension", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{Suspension: "slow"}, 15, "1Mbit 100Kbit", 20, "suspension suspension", ""},
		{"below a boost, and both below a suspension", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, plan.Layers{Boost: boosted.Boost, Suspension: "slow"}, 12, "1Mbit 100Kbit", 15, "suspension suspension", ""},
		{"boost ends in it", []schedule.Schedule{scheduled(t, "a", gold, 10, 20, rates...)}, boosted, 5, "300Mbit 10Mbit", 10, "boost plan", "200Mbit 20Mbit"},
		{"subscriber before plan", []schedule.Schedule{scheduled(t, "a", one, 10, 20, "up.rate", "3mbit"), scheduled(t, "b", gold, 10, 30, rates...)}, plan.Layers{}, 15, "200Mbit 3Mbit", 20, "schedule b schedule a", ""},
		{"another plan", []schedule.Schedule{night}, billing, 15, "1Mbit 9Mbit", 20, "schedule night billing", ""},
		{"a plan that changes for good is below billing", []schedule.Schedule{from10}, plan.Layers{Billing: set(t, "down.rate", "90mbit")}, 15, "90Mbit 10Mbit", 0, "billing plan", ""},
		{"a plan that changes for good", []schedule.Schedule{from10}, plan.Layers{}, 15, "50Mbit 10Mbit", 0, "schedule from10 plan", ""},
		{"paused and removed", []schedule.Schedule{paused, removed}, plan.Layers{}, 15, "100Mbit 10Mbit", 0, "plan plan", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := records{
				routers:     map[string]plan.Router{"r": {ID: "r", Subscriber: "1"}},
				subscribers: map[string]plan.Subscriber{"1": plan.Subscriber{ID: "1", Plan: "gold"}.WithLayers(c.layers)},
				plans:       map[string]plan.Plan{"gold": {Name: "gold", Link: link(100_000_000), Revision: 3}, "slow": {Name: "slow", Link: link(1_000_000), Revision: 7}},
				schedules:   schedule.NewSet(c.schedules),
			}
			var hashes resolve.Hashes
			d, _ := resolve.Router(from, "r", at(c.now), &hashes)
			rates := func(l *plan.Link) string {
				if l == nil {
					return ""
				}
				return l.Down.Rate.String() + " " + l.Up.Rate.String()
			}
			var changes time.Time
			if c.changes != 0 {
				changes = at(c.changes)
			}
			if rates(d.Link) != c.want || rates(d.Then) != c.then || !d.Changes.Equal(changes) || d.EffectiveHash() != d.Link.Hash() {
				t.Errorf("desired %s, then %q, changes %v; want %s, %q, %v; hash fits: %t", rates(d.Link), rates(d.Then), d.Changes, c.want, c.then, changes, d.EffectiveHash() == d.Link.Hash())
			}
			// Also while it is not in force, so that the revision never goes back.
			if want := c.schedules[len(c.schedules)-1].Revision; d.Revision != want {
				t.Errorf("revision %d, want %d", d.Revision, want)
			}
			words, _ := resolve.Owners(from, "r", at(c.now))
			owner := ""
			for _, i := range []int{plan.DownRate, plan.UpRate} {
				owner += " " + words[i].Owner.String()
				if words[i].ID != "" {
					owner += " " + words[i].ID
				}
			}
			if owner[1:] != c.owner {
				t.Errorf("rates are the word of %s, want %s", owner[1:], c.owner)
			}
		})
	}
}

// BenchmarkScheduled is what it costs when a window of a plan begins that
// 100 000 routers have, some of them with a schedule of their own too.
func BenchmarkScheduled(b *testing.B) {
	const n = 100_000
	from := records{routers: map[string]plan.Router{}, subscribers: map[string]plan.Subscriber{}, plans: map[string]plan.Plan{}}
	ids := make([]string, n)
	all := []schedule.Schedule{scheduled(b, "evening", schedule.Target{Plan: "gold"}, 10, 20, "down.rate", "200mbit")}
	for i := range ids {
		sub := plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold", Revision: 8}
		ids[i] = fmt.Sprintf("router-%d", i)
		from.routers[ids[i]] = plan.Router{ID: ids[i], Subscriber: sub.ID, Revision: 7}
		from.subscribers[sub.ID] = sub
		if i%1000 == 0 {
			all = append(all, scheduled(b, "own"+sub.ID, schedule.Target{Subscriber: sub.ID}, 10, 20, "up.rate", "5mbit"))
		}
	}
	from.schedules = schedule.NewSet(all)
	from.plans["gold"] = plan.Plan{Name: "gold", Link: link(115_000_000), Revision: 9}
	var hashes resolve.Hashes
	var boxed resolve.Records = from
	b.ReportAllocs()
	for minute := 0; b.Loop(); minute++ {
		for _, id := range ids {
			if d, ok := resolve.Router(boxed, id, at(minute%30), &hashes); !ok || d.Link == nil {
				b.Fatal("nothing desired")
			}
		}
	}
}
