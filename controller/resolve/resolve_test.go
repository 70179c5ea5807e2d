package resolve_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/resolve"
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
}

func (r records) Router(id string) (v plan.Router, ok bool) { v, ok = r.routers[id]; return }

func (r records) Subscriber(id string) (v plan.Subscriber, ok bool) {
	v, ok = r.subscribers[id]
	return
}

func (r records) Plan(name string) (v plan.Plan, ok bool) { v, ok = r.plans[name]; return }

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
			got, ok := resolve.Router(from, "r")
			if d := cmp.Diff(c.want, got); d != "" || !ok {
				t.Errorf("found: %t\n%s", ok, d)
			}
		})
	}
	if d, ok := resolve.Router(records{}, "r"); ok {
		t.Errorf("a router that doesn't exist should run %+v", d)
	}
}

// The desired state is a copy: who holds it sees no later change.
func TestDesiredIsACopy(t *testing.T) {
	p := plan.Plan{Name: "gold", Link: link(1_000_000), Revision: 1}
	d := resolve.Desired(plan.Router{ID: "r", Subscriber: "1"}, &plan.Subscriber{ID: "1", Plan: "gold"}, &p)
	p.Link.Down.Rate = 2_000_000
	if d.Link.Down.Rate != 1_000_000 || d.Hash != d.Link.Hash() {
		t.Errorf("desired rate became %d, hash fits: %t", d.Link.Down.Rate, d.Hash == d.Link.Hash())
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
		if d, ok := resolve.Router(from, "r"); !ok || d.Link == nil {
			b.Fatal("nothing desired")
		}
	}
}
