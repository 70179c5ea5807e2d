// Package resolve says what a router should run. It is pure: records and the
// time in, the desired state out, the same on every controller.
package resolve

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Records is where Router looks; *store.State is one.
type Records interface {
	// Served returns a router and whom it serves; nil stands for what does not
	// exist. They are not changed, and not kept after Router has returned.
	Served(id string) (*plan.Router, *plan.Subscriber)
	// PlanNamed returns a plan, which is not changed; nil if there is none.
	PlanNamed(name string) *plan.Plan
	// SchedulesFor returns the schedules for a subscriber, in force or not, the
	// one that counts last.
	SchedulesFor(sub *plan.Subscriber) []*schedule.Entry
	// RolloutSet returns the rollouts that may have an effect; nil if there are
	// none.
	RolloutSet() *rollout.Set
}

// Router returns the desired state of the router of that id; ok is false if
// there is no such router. hashes may be nil.
//
// The revision is that of the newest record that was looked at, so that it
// never goes back while references hold, and Since is that record's time.
// Where nothing is to be shaped, Reason says why.
func Router(from Records, id string, now time.Time, hashes *Hashes) (d plan.Desired, ok bool) {
	r, sub := from.Served(id)
	if r == nil {
		return plan.Desired{}, false
	}
	d = plan.Desired{Revision: r.Revision, Since: r.Updated}
	if r.Subscriber == "" {
		d.Reason = "no subscriber"
		return d, true
	}
	if sub == nil {
		d.Reason = fmt.Sprintf("subscriber %s is gone", r.Subscriber)
		return d, true
	}
	newer(&d, sub.Revision, sub.Updated)
	p := from.PlanNamed(sub.Plan)
	if p == nil {
		d.Reason = fmt.Sprintf("plan %s is gone", sub.Plan)
		return d, true
	}
	newer(&d, p.Revision, p.Updated)
	schedules := from.SchedulesFor(sub)
	opened := rollouts(&d, from.RolloutSet(), id, sub, p.Revision)
	if sub.Layers == nil && len(schedules) == 0 && !opened {
		d.Link, d.Hash = hashes.of(p)
		return d, true
	}
	v := newView(from, id, sub, p, schedules)
	v.desired(&d, now, hashes)
	return d, true
}

// rollouts notes the revision of the rollouts of a router, and tells whether it
// is in an open step of any.
func rollouts(d *plan.Desired, set *rollout.Set, id string, sub *plan.Subscriber, base plan.Revision) (opened bool) {
	for _, l := range set.Plan(sub.Plan) {
		if l.Base == base && touched(d, l, id, sub) {
			opened = true
		}
	}
	for _, l := range set.Others() {
		if touched(d, l, id, sub) {
			opened = true
		}
	}
	return opened
}

func touched(d *plan.Desired, l *rollout.Live, id string, sub *plan.Subscriber) (opened bool) {
	if l.Touched == 0 {
		return false
	}
	step, ok := l.Step(id, sub)
	if !ok || step >= l.Touched {
		return false
	}
	newer(d, l.Effect, l.EffectSince)
	return step < l.Opened
}

// none is not changed.
var none plan.Layers

// view is what a router's link is made of.
type view struct {
	from      Records
	router    string
	sub       *plan.Subscriber
	plan      *plan.Plan
	layers    *plan.Layers
	schedules []*schedule.Entry
}

func newView(from Records, id string, sub *plan.Subscriber, p *plan.Plan, schedules []*schedule.Entry) view {
	v := view{from: from, router: id, sub: sub, plan: p, layers: sub.Layers, schedules: schedules}
	if v.layers == nil {
		v.layers = &none
	}
	return v
}

// desired fills in the link of a subscriber that has layers or schedules.
func (v *view) desired(d *plan.Desired, now time.Time, hashes *Hashes) {
	if policy := v.from.PlanNamed(v.layers.Suspended()); policy != nil {
		newer(d, policy.Revision, policy.Updated)
	}
	for _, e := range v.schedules {
		newer(d, e.Revision, e.Updated)
		_, next := e.At(now)
		if to := v.from.PlanNamed(e.ToPlan); to != nil {
			newer(d, to.Revision, to.Updated)
		}
		sooner(d, next)
	}
	var link plan.Link
	v.link(&link, now, true)
	d.Link, d.Hash = hashes.ofLink(&link, v.layers == &none || *v.layers == none)
	if !now.Before(v.layers.Boost.Until) {
		return
	}
	sooner(d, v.layers.Boost.Until)
	then := &plan.Link{}
	v.link(then, v.layers.Boost.Until, false)
	hash := then.Hash()
	if hash == d.Hash {
		return // a suspension leaves nothing of it
	}
	d.ExpiresAfter, d.Then, d.LinkHash = v.layers.Boost.Until.Sub(now), then, d.Hash
	// A boost that ends at another time, or in something else, is another state
	// though the link is the same.
	sum := sha256.Sum256(fmt.Appendf(nil, "%s until %d then %s", d.LinkHash, v.layers.Boost.Until.UnixMicro(), hash))
	d.Hash = hex.EncodeToString(sum[:16])
}

// link makes l the link as it is, or will be, at a time.
func (v *view) link(l *plan.Link, at time.Time, isNow bool) {
	v.under(l, at, isNow, func(Word) {})
	v.each(at, isNow, func(_ Word, set *plan.Settings) { set.Over(l) })
}

// under makes l what the layers are above: the link of the plan, as rollouts
// change it, or of what a schedule has put in its place. It calls told after
// each change of l.
func (v *view) under(l *plan.Link, at time.Time, isNow bool, told func(Word)) {
	*l = v.plan.Link
	set := v.from.RolloutSet()
	for _, r := range set.Plan(v.sub.Plan) {
		if r.Base == v.plan.Revision && r.Opens(v.router, v.sub) {
			r.Set.Over(l)
			told(Word{plan.OwnerRollout, r.ID})
		}
	}
	for _, e := range v.schedules {
		if !e.Settles() && e.ToPlan == "" || !inForce(e, at, isNow) {
			continue
		}
		if e.ToPlan == "" {
			e.Set.Over(l)
			told(Word{plan.OwnerSchedule, e.ID})
		} else if to := v.from.PlanNamed(e.ToPlan); to != nil {
			*l = to.Link
			told(Word{plan.OwnerSchedule, e.ID})
		}
	}
	for _, r := range set.Others() {
		if r.Opens(v.router, v.sub) {
			r.Set.Over(l)
			told(Word{plan.OwnerRollout, r.ID})
		}
	}
}

// each calls do with the layers that there are at a time, the lowest first.
func (v *view) each(at time.Time, isNow bool, do func(Word, *plan.Settings)) {
	do(Word{Owner: plan.OwnerBilling}, &v.layers.Billing)
	for _, e := range v.schedules {
		if e.ToPlan == "" && !e.Settles() && inForce(e, at, isNow) {
			do(Word{plan.OwnerSchedule, e.ID}, &e.Set)
		}
	}
	do(Word{Owner: plan.OwnerOverride}, &v.layers.Override)
	if at.Before(v.layers.Boost.Until) {
		do(Word{Owner: plan.OwnerBoost}, &v.layers.Boost.Settings)
	}
	if policy := v.from.PlanNamed(v.layers.Suspended()); policy != nil {
		rates := plan.RatesOf(policy.Link)
		do(Word{Owner: plan.OwnerSuspension}, &rates)
	}
}

// inForce asks a schedule, without its memory if it is not about now: that is
// for the next router.
func inForce(e *schedule.Entry, at time.Time, isNow bool) (is bool) {
	if isNow {
		is, _ = e.At(at)
	} else {
		is, _ = e.Schedule.At(at)
	}
	return is
}

// Word is whose word a field is.
type Word struct {
	Owner plan.Owner
	ID    string // of the schedule or rollout, if it is one's
}

// Owners returns whose word each field of a router's desired state is; ok is
// false if nothing is shaped.
func Owners(from Records, id string, now time.Time) (owners [plan.NumFields]Word, ok bool) {
	_, sub := from.Served(id)
	if sub == nil {
		return owners, false
	}
	p := from.PlanNamed(sub.Plan)
	if p == nil {
		return owners, false
	}
	v := newView(from, id, sub, p, from.SchedulesFor(sub))
	was := p.Link
	var link plan.Link
	v.under(&link, now, true, func(w Word) {
		for i := range owners {
			switch text := plan.FieldText(&link, i); {
			case text == plan.FieldText(&p.Link, i):
				owners[i] = Word{}
			case text != plan.FieldText(&was, i):
				owners[i] = w
			}
		}
		was = link
	})
	v.each(now, true, func(w Word, set *plan.Settings) {
		for i := range owners {
			if set.Has(i) {
				owners[i] = w
			}
		}
	})
	return owners, true
}

// sooner notes that there will be something else at a time, if not before; the
// zero time is never.
func sooner(d *plan.Desired, at time.Time) {
	if !at.IsZero() && (d.Changes.IsZero() || at.Before(d.Changes)) {
		d.Changes = at
	}
}

func newer(d *plan.Desired, rev plan.Revision, updated time.Time) {
	if rev > d.Revision {
		d.Revision, d.Since = rev, updated
	}
}

// Hashes remembers the hash of each plan's link, because most routers run one
// of few plans, and of the links that schedules make of them. The zero value is
// ready; a nil one remembers nothing. All methods may be called from any
// goroutine.
type Hashes struct {
	mu    sync.RWMutex
	known map[string]*hashed    // guarded by mu; by name of the plan
	links map[plan.Link]*hashed // guarded by mu
}

type hashed struct {
	link plan.Link
	hash string
}

// maxKnown bounds what Hashes holds: about 4 MB.
const maxKnown = 4096

// of returns a copy of a plan's link that must not be changed, and its hash.
func (h *Hashes) of(p *plan.Plan) (*plan.Link, string) {
	if h == nil {
		link := p.Link
		return &link, link.Hash()
	}
	h.mu.RLock()
	e := h.known[p.Name]
	h.mu.RUnlock()
	if e == nil || e.link != p.Link {
		e = &hashed{link: p.Link, hash: p.Link.Hash()}
		h.mu.Lock()
		if h.known == nil || len(h.known) >= maxKnown {
			h.known = map[string]*hashed{}
		}
		h.known[p.Name] = e
		h.mu.Unlock()
	}
	return &e.link, e.hash
}

// ofLink returns a copy of a link that must not be changed, and its hash. Those
// that many routers are likely to have are remembered.
func (h *Hashes) ofLink(l *plan.Link, shared bool) (*plan.Link, string) {
	if h == nil || !shared {
		link := *l
		return &link, link.Hash()
	}
	h.mu.RLock()
	e := h.links[*l]
	h.mu.RUnlock()
	if e == nil {
		e = &hashed{link: *l, hash: l.Hash()}
		h.mu.Lock()
		if h.links == nil || len(h.links) >= maxKnown {
			h.links = map[plan.Link]*hashed{}
		}
		h.links[*l] = e
		h.mu.Unlock()
	}
	return &e.link, e.hash
}
