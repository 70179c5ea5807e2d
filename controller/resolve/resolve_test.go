package resolve_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func at(minute int) time.Time { return time.Date(2026, 7, 1, 12, minute, 0, 0, time.UTC) }

func link(rate engine.BitsPerSecond) plan.Link {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = rate, rate/10
	return l
}

type records struct {
	routers     map[string]plan.Router
	subscribers map[string]plan.Subscriber
	plans       map[string]plan.Plan
	schedules   *schedule.Set
	rollouts    *rollout.Set
}

func (r records) RolloutSet() *rollout.Set { return r.rollouts }

func (r records) SchedulesFor(sub *plan.Subscriber) []*schedule.Entry { return r.schedules.For(sub) }

func (r records) Served(id string) (*plan.Router, *plan.Subscriber) {
	v, ok := r.routers[id]
	if !ok {
		return nil, nil
	}
	sub, ok := r.subscribers[v.Subscriber]
	if !ok {
		return &v, nil
	}
	return &v, &sub
}

func (r records) PlanNamed(name string) *plan.Plan {
	v, ok := r.plans[name]
	if !ok {
		return nil
	}
	return &v
}

func TestRouter(t *testing.T) {
	fast := link(115_000_000)
	shaped := func(rev plan.Revision, since time.Time) plan.Desired {
		return plan.Desired{Revision: rev, Hash: fast.Hash(), Link: &fast, Since: since}
	}
	for _, c := range []struct {
		name       string
		router     plan.Router
		subscriber plan.Subscriber
		plan       plan.Plan
		want       plan.Desired
	}{
		{
			name:   "nobody is served",
			router: plan.Router{ID: "r", Revision: 9, Updated: at(9)},
			want:   plan.Desired{Revision: 9, Reason: "no subscriber", Since: at(9)},
		},
		{
			name:       "subscriber is gone",
			router:     plan.Router{ID: "r", Subscriber: "4711", Revision: 9, Updated: at(9)},
			subscriber: plan.Subscriber{ID: "other", Plan: "gold", Revision: 12},
			want:       plan.Desired{Revision: 9, Reason: "subscriber 4711 is gone", Since: at(9)},
		},
		{
			name:       "plan is gone",
			router:     plan.Router{ID: "r", Subscriber: "1", Revision: 9, Updated: at(9)},
			subscriber: plan.Subscriber{ID: "1", Plan: "gold", Revision: 12, Updated: at(12)},
			plan:       plan.Plan{Name: "silver", Link: fast, Revision: 15},
			want:       plan.Desired{Revision: 12, Reason: "plan gold is gone", Since: at(12)},
		},
		{
			name:       "router is newest",
			router:     plan.Router{ID: "r", Subscriber: "1", Revision: 9, Updated: at(9)},
			subscriber: plan.Subscriber{ID: "1", Plan: "gold", Revision: 8, Updated: at(8)},
			plan:       plan.Plan{Name: "gold", Link: fast, Revision: 7, Updated: at(7)},
			want:       shaped(9, at(9)),
		},
		{
			name:       "subscriber is newest",
			router:     plan.Router{ID: "r", Subscriber: "1", Revision: 7, Updated: at(7)},
			subscriber: plan.Subscriber{ID: "1", Plan: "gold", Revision: 9, Updated: at(9)},
			plan:       plan.Plan{Name: "gold", Link: fast, Revision: 8, Updated: at(8)},
			want:       shaped(9, at(9)),
		},
		{
			name:       "plan is newest",
			router:     plan.Router{ID: "r", Subscriber: "1", Revision: 7, Updated: at(7)},
			subscriber: plan.Subscriber{ID: "1", Plan: "gold", Revision: 8, Updated: at(8)},
			plan:       plan.Plan{Name: "gold", Link: fast, Revision: 9, Updated: at(9)},
			want:       shaped(9, at(9)),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := records{
				routers:     map[string]plan.Router{c.router.ID: c.router},
				subscribers: map[string]plan.Subscriber{c.subscriber.ID: c.subscriber},
				plans:       map[string]plan.Plan{c.plan.Name: c.plan},
			}
			got, ok := resolve.Router(from, "r", at(0), nil)
			if d := cmp.Diff(c.want, got); d != "" || !ok {
				t.Errorf("found: %t\n%s", ok, d)
			}
		})
	}
	if d, ok := resolve.Router(records{}, "r", at(0), nil); ok {
		t.Errorf("a router that doesn't exist should run %+v", d)
	}
}

// Whoever holds a desired state sees no later change.
func TestDesiredIsACopy(t *testing.T) {
	var hashes resolve.Hashes
	from := records{
		routers:     map[string]plan.Router{"r": {ID: "r", Subscriber: "1"}},
		subscribers: map[string]plan.Subscriber{"1": {ID: "1", Plan: "gold"}},
		plans:       map[string]plan.Plan{"gold": {Name: "gold", Link: link(1_000_000), Revision: 1}},
	}
	for _, h := range []*resolve.Hashes{nil, &hashes} {
		from.plans["gold"] = plan.Plan{Name: "gold", Link: link(1_000_000), Revision: 1}
		d, _ := resolve.Router(from, "r", at(0), h)
		from.plans["gold"] = plan.Plan{Name: "gold", Link: link(2_000_000), Revision: 2}
		after, _ := resolve.Router(from, "r", at(0), h)
		if d.Link.Down.Rate != 1_000_000 || d.Hash != d.Link.Hash() || after.Link.Down.Rate != 2_000_000 || after.Hash != after.Link.Hash() {
			t.Errorf("desired rate became %d, the new one is %d", d.Link.Down.Rate, after.Link.Down.Rate)
		}
	}
}

func set(t testing.TB, words ...string) plan.Settings {
	t.Helper()
	var s plan.Settings
	for i := 0; i < len(words); i += 2 {
		if err := s.Parse(words[i], words[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Every layer takes precedence in the fields that it sets, and in no other; the
// end of a boost comes with what follows.
func TestLayers(t *testing.T) {
	billing := set(t, "down.rate", "90mbit", "up.rate", "9mbit")
	override := set(t, "up.rate", "20mbit", "down.tins", "diffserv4")
	boost := plan.Boost{Settings: set(t, "down.rate", "300mbit"), Until: at(30)}
	const rate, tins = plan.DownRate, plan.DownRate + 1
	for _, c := range []struct {
		name    string
		layers  plan.Layers
		now     time.Time
		want    string // down and up rate, tins of down
		owners  map[int]plan.Owner
		then    string // rate of down after the boost; empty: none
		changes time.Time
	}{
		{name: "plan", want: "100Mbit 10Mbit diffserv3"},
		{"billing", plan.Layers{Billing: billing}, at(0), "90Mbit 9Mbit diffserv3", map[int]plan.Owner{rate: plan.OwnerBilling, plan.UpRate: plan.OwnerBilling}, "", time.Time{}},
		{"override over billing", plan.Layers{Billing: billing, Override: override}, at(0), "90Mbit 20Mbit diffserv4", map[int]plan.Owner{rate: plan.OwnerBilling, plan.UpRate: plan.OwnerOverride, tins: plan.OwnerOverride}, "", time.Time{}},
		{"boost over all", plan.Layers{Billing: billing, Override: override, Boost: boost}, at(10), "300Mbit 20Mbit diffserv4", map[int]plan.Owner{rate: plan.OwnerBoost, plan.UpRate: plan.OwnerOverride, tins: plan.OwnerOverride}, "90Mbit", at(30)},
		{"boost is over", plan.Layers{Boost: boost}, at(30), "100Mbit 10Mbit diffserv3", nil, "", time.Time{}},
		{"suspension over boost", plan.Layers{Override: override, Boost: boost, Suspension: "slow"}, at(10), "1Mbit 100Kbit diffserv4", map[int]plan.Owner{rate: plan.OwnerSuspension, plan.UpRate: plan.OwnerSuspension, tins: plan.OwnerOverride}, "", at(30)},
		{"suspension by billing", plan.Layers{BillingSuspension: "slow"}, at(10), "1Mbit 100Kbit diffserv3", map[int]plan.Owner{rate: plan.OwnerSuspension, plan.UpRate: plan.OwnerSuspension}, "", time.Time{}},
		{"policy is gone", plan.Layers{Suspension: "none"}, at(10), "100Mbit 10Mbit diffserv3", nil, "", time.Time{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := records{
				routers:     map[string]plan.Router{"r": {ID: "r", Subscriber: "1"}},
				subscribers: map[string]plan.Subscriber{"1": plan.Subscriber{ID: "1", Plan: "gold"}.WithLayers(c.layers)},
				plans:       map[string]plan.Plan{"gold": {Name: "gold", Link: link(100_000_000)}, "slow": {Name: "slow", Link: link(1_000_000), Revision: 7}},
			}
			d, _ := resolve.Router(from, "r", c.now, nil)
			got := d.Link.Down.Rate.String() + " " + d.Link.Up.Rate.String() + " " + d.Link.Down.Tins.String()
			if got != c.want || d.EffectiveHash() != d.Link.Hash() {
				t.Errorf("desired is %s, want %s; hash fits: %t", got, c.want, d.EffectiveHash() == d.Link.Hash())
			}
			owners, _ := resolve.Owners(from, "r", c.now)
			for i, owner := range owners {
				if owner.Owner != c.owners[i] {
					t.Errorf("%s is the word of %v, want %v", plan.FieldName(i), owner, c.owners[i])
				}
			}
			then := ""
			if d.Then != nil {
				then = d.Then.Down.Rate.String()
			}
			if then != c.then || !d.Changes.Equal(c.changes) || (d.ExpiresAfter != 0) != (then != "") || then != "" && (d.ExpiresAfter != c.changes.Sub(c.now) || d.Hash == d.LinkHash) {
				t.Errorf("then %q after %v, changes %v; want %q, %v", then, d.ExpiresAfter, d.Changes, c.then, c.changes)
			}
		})
	}
}

// An override of one field, and a plan that changes afterwards: the rate
// follows the plan.
func TestFleet004_OverrideOfOneFieldMasksNoOther(t *testing.T) {
	from := records{
		routers: map[string]plan.Router{"r": {ID: "r", Subscriber: "1"}},
		subscribers: map[string]plan.Subscriber{
			"1": plan.Subscriber{ID: "1", Plan: "gold"}.WithLayers(plan.Layers{Override: set(t, "up.tins", "besteffort", "up.rtt", "50ms")}),
		},
		plans: map[string]plan.Plan{},
	}
	for _, rate := range []engine.BitsPerSecond{100_000_000, 250_000_000} {
		from.plans["gold"] = plan.Plan{Name: "gold", Link: link(rate)}
		d, _ := resolve.Router(from, "r", at(0), nil)
		want := link(rate)
		want.Up.Tins, want.Up.RTT = engine.BestEffort, 50*time.Millisecond
		if *d.Link != want {
			t.Errorf("desired %+v, want %+v", *d.Link, want)
		}
	}
}

// BenchmarkPlanChange is what a change of one plan costs that 100 000 routers
// have; a hundredth of them have an override.
func BenchmarkPlanChange(b *testing.B) {
	const n = 100_000
	from := records{routers: map[string]plan.Router{}, subscribers: map[string]plan.Subscriber{}, plans: map[string]plan.Plan{}}
	ids := make([]string, n)
	for i := range ids {
		sub := plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold", Revision: 8}
		if i%100 == 0 {
			sub = sub.WithLayers(plan.Layers{Override: set(b, "down.rate", fmt.Sprintf("%dkbit", 1000+i))})
		}
		ids[i] = fmt.Sprintf("router-%d", i)
		from.routers[ids[i]] = plan.Router{ID: ids[i], Subscriber: sub.ID, Revision: 7}
		from.subscribers[sub.ID] = sub
	}
	var hashes resolve.Hashes
	p := plan.Plan{Name: "gold", Link: link(115_000_000), Revision: 9}
	var boxed resolve.Records = from
	b.ReportAllocs()
	for b.Loop() {
		p.Link.Down.Rate++
		from.plans["gold"] = p
		for _, id := range ids {
			if d, ok := resolve.Router(boxed, id, at(0), &hashes); !ok || d.Link == nil {
				b.Fatal("nothing desired")
			}
		}
	}
}

func BenchmarkRouter(b *testing.B) {
	from := records{
		routers:     map[string]plan.Router{"r": {ID: "r", Subscriber: "1", Revision: 7}},
		subscribers: map[string]plan.Subscriber{"1": {ID: "1", Plan: "gold", Revision: 8}},
		plans:       map[string]plan.Plan{"gold": {Name: "gold", Link: link(115_000_000), Revision: 9}},
	}
	b.ReportAllocs()
	for b.Loop() {
		if d, ok := resolve.Router(from, "r", at(0), nil); !ok || d.Link == nil {
			b.Fatal("nothing desired")
		}
	}
}
