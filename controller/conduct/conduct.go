// Package conduct carries out rollouts: it looks at the routers, asks
// controller/rollout what follows, and stores it. One controller leads; the
// others only say what they know of the routers that are connected to them.
//
// Everything that is remembered is in the rollout's record, and each write of it
// is fenced and compares the record's revision, so that another leader goes on
// from the same place at any time.
package conduct

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Work is the name under which rollouts are led.
const Work = "rollouts"

const (
	sleepMost   = time.Minute
	sleepFailed = time.Second

	// share is the part of a core that looking at the routers may take.
	share = 0.05

	// oldest is how old what was seen of routers may be, unless looking takes long.
	oldest = 10 * time.Second

	// viewSize is how many routers are looked at in one View, as changes wait for
	// it to end.
	viewSize = 1000

	// sweepEvery is how often old rollouts and targets without a rollout are
	// looked for.
	sweepEvery = 10 * time.Minute
)

// Conductor carries out rollouts.
type Conductor struct {
	store   *store.Store
	hub     *fleet.Hub
	meter   *rollout.Meter
	others  Others
	logger  hclog.Logger
	hashes  resolve.Hashes
	changed chan struct{} // capacity 1: one change stands for any number

	looking sync.Mutex      // held while looking at routers, so that many who ask cost no more than one
	looks   map[string]look // the newest of each rollout; guarded by looking
}

// look is what was seen of a rollout's routers.
type look struct {
	revision plan.Revision // of the rollout
	report   rollout.Report
	at       time.Time
	until    time.Time // when it may be looked again
}

// Others are the other controllers.
type Others interface {
	// Reports returns what the others know of their routers of a rollout as it is
	// in l. missing says who has not said it; empty: all have.
	Reports(ctx context.Context, l *rollout.Live) (reports []rollout.Report, missing string)
}

// Alone is for a controller that has no others and never will.
type Alone struct{}

// Reports returns nothing, of which nothing is missing.
func (Alone) Reports(context.Context, *rollout.Live) ([]rollout.Report, string) { return nil, "" }

// New returns a conductor. Changed is for the store's OnChange, Counted for the
// telemetry table's OnCount.
func New(s *store.Store, hub *fleet.Hub, others Others, logger hclog.Logger) *Conductor {
	c := &Conductor{store: s, hub: hub, meter: rollout.NewMeter(), others: others, logger: logger, changed: make(chan struct{}, 1), looks: map[string]look{}}
	now := time.Now()
	s.View(func(st *store.State) {
		for l := range st.Rollouts("") {
			c.meter.Watch(l.ID, l, now)
		}
	})
	return c
}

// Changed notes a change of a record.
func (c *Conductor) Changed(change store.Change) {
	switch change.Kind {
	case store.KindRollout:
		c.store.View(func(st *store.State) {
			l, _ := st.Rollout(change.ID)
			c.meter.Watch(change.ID, l, time.Now())
		})
	case store.KindPlan:
	default:
		return
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// Counted takes in what a router has counted.
func (c *Conductor) Counted(router string, n *telemetry.Counted) {
	c.meter.Count(router, time.Now(), n.Span, func(f *rollout.Figures) {
		f.CPU, f.Time = n.CPU, n.Span
		for i, to := range []*rollout.Counts{&f.Down, &f.Up} {
			counts(to, &n.Directions[i], n.Stats[i], n.Span)
		}
	})
}

func counts(to *rollout.Counts, d *rollup.Delta, s *engine.Stats, span time.Duration) {
	to.Bytes, to.Packets, to.Drops, to.Marks = d.Bytes, d.Packets, d.Drops, d.Marks
	if s != nil {
		to.Capacity = uint64(float64(s.Config.Rate) * span.Seconds())
	}
	for i := range d.Tins[:d.N] {
		for _, b := range d.Tins[i].Sojourn {
			to.Sojourn[b.Index] += b.Count
		}
	}
}

// Run carries out rollouts until ctx ends or this controller doesn't lead any
// more.
func (c *Conductor) Run(ctx context.Context, _ store.Compare) error {
	var orphans map[string]bool
	swept := time.Now() // the first look at them comes later: one may be being made
	for {
		wait, err := c.turn(ctx)
		if errors.Is(err, store.ErrFenced) {
			return err
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			c.prune(ctx, swept.UTC())
			if orphans, err = c.store.SweepPlaces(ctx, orphans); err != nil && ctx.Err() == nil {
				c.logger.Warn("remove targets without a rollout", "error", err)
			}
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-c.changed:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// prune removes rollouts that have ended long ago.
func (c *Conductor) prune(ctx context.Context, now time.Time) {
	var all []*rollout.Live
	c.store.View(func(st *store.State) { all = slices.Collect(st.Rollouts("")) })
	rollouts, targets := rollout.Old(all, now)
	var err error
	for _, l := range targets {
		_, failed := c.store.PutRollout(ctx, l.Rollout, l.Revision, false)
		err = errors.Join(err, failed)
	}
	for _, l := range rollouts {
		err = errors.Join(err, c.store.RemoveRollout(ctx, &l.Rollout, l.Revision))
	}
	if err != nil && ctx.Err() == nil {
		c.logger.Warn("remove old rollouts", "error", err)
	}
}

// turn looks at every rollout once, and returns after what time to look again.
func (c *Conductor) turn(ctx context.Context) (wait time.Duration, err error) {
	var all []*rollout.Live
	c.store.View(func(st *store.State) {
		for l := range st.Rollouts("") {
			if l.Active() {
				all = append(all, l)
			}
		}
	})
	wait = sleepMost
	for _, l := range all {
		again, err := c.step(ctx, l)
		switch {
		case errors.Is(err, store.ErrFenced):
			return 0, err
		case errors.Is(err, store.ErrConflict), errors.Is(err, store.ErrNotFound):
			again = 0 // somebody else was faster: look at what it is now
		case err != nil && ctx.Err() == nil:
			c.logger.Warn("rollout could not go on, try again", "rollout", l.ID, "wait", sleepFailed, "error", err)
			again = sleepFailed
		}
		wait = min(wait, again)
	}
	return max(wait, 10*time.Millisecond), nil
}

// step lets one rollout go on.
func (c *Conductor) step(ctx context.Context, l *rollout.Live) (wait time.Duration, err error) {
	began := time.Now()
	in := rollout.Input{Now: began.UTC().Truncate(time.Microsecond)}
	c.store.View(func(st *store.State) {
		if p, ok := st.Plan(l.Selector.Plan); ok {
			in.Plan = p.Revision
		}
		if l.Phase == rollout.Waiting && l.Opened == 0 {
			in.Blocked = Blocked(st, l)
		}
	})
	if l.Phase != rollout.Paused && l.Phase != rollout.Approving {
		in.Report, in.Missing = c.Report(ctx, l)
	}
	next, changed, effect, wait := rollout.Next(l.Rollout, in)
	if !changed {
		if wait == 0 {
			return sleepMost, nil
		}
		// Looking costs by the number of routers.
		return max(wait, pause(time.Since(began))), nil
	}
	if next.Phase == rollout.Completed && next.Whole && next.Base != 0 {
		next, err = c.store.SettleRollout(ctx, next, l.Revision)
	} else {
		next, err = c.store.PutRollout(ctx, next, l.Revision, effect)
	}
	if err == nil {
		c.logger.Info("rollout goes on", "rollout", l.ID, "phase", next.Phase.String(), "wave", next.Wave()+1, "opened", next.Opened, "reason", next.Reason)
	}
	return 0, err
}

// Report returns what is known of a rollout's routers; nil if something is
// missing, which is said.
func (c *Conductor) Report(ctx context.Context, l *rollout.Live) (report *rollout.Report, missing string) {
	r, ok := c.Own(l)
	if !ok {
		return nil, "this controller has only begun to count"
	}
	others, missing := c.others.Reports(ctx, l)
	if missing != "" {
		return nil, missing
	}
	for i := range others {
		r.Add(&others[i])
	}
	// Members are what the records say; each controller only has the connected
	// ones.
	c.members(l, r)
	return r, ""
}

// members fills in how many routers there are of each kind, and how many are
// nowhere.
func (c *Conductor) members(l *rollout.Live, r *rollout.Report) {
	r.Step.Members, r.Changed.Members, r.Control.Members = 0, 0, 0
	reach := reach(l)
	c.store.View(func(st *store.State) {
		for _, step := range st.RoutersOf(l) {
			if step >= reach {
				r.Control.Members++
				continue
			}
			r.Changed.Members++
			if step == l.Opened-1 {
				r.Step.Members++
			}
		}
	})
	for _, t := range []*rollout.Tally{&r.Step, &r.Changed, &r.Control} {
		t.Unreachable = max(t.Members-t.Offered-t.Applied-t.Clamped-t.Rejected-t.Already-t.RolledBack-t.Pending, 0)
		t.Lost = min(t.Lost, t.Unreachable)
	}
}

// reach is the number of steps whose routers are changed, or are on their way
// back.
func reach(l *rollout.Live) int {
	if l.Opened == 0 {
		return l.Touched
	}
	return l.Opened
}

// Own returns what this controller knows of the routers that are connected to
// it; false if it has not seen the rollout as it is in l. It may be some seconds
// old where looking takes long.
func (c *Conductor) Own(l *rollout.Live) (*rollout.Report, bool) {
	c.looking.Lock()
	defer c.looking.Unlock()
	now := time.Now()
	if k := c.looks[l.ID]; k.revision == l.Revision && now.Before(k.until) {
		return &k.report, true
	}
	maps.DeleteFunc(c.looks, func(_ string, k look) bool { return now.Sub(k.at) > oldest })
	c.meter.Watch(l.ID, l, now) // the news of it may still be on its way
	r := &rollout.Report{Time: now.UTC()}
	reach := reach(l)
	c.each(l, func(step int, s State, standing fleet.Standing) {
		t := tally(s, standing, l.OpenedAt)
		if step >= reach {
			r.Control.Add(&t)
			return
		}
		r.Changed.Add(&t)
		if step == l.Opened-1 {
			r.Step.Add(&t)
		}
	})
	if !c.meter.Fill(l, r) {
		return r, false
	}
	c.looks[l.ID] = look{l.Revision, *r, now, now.Add(pause(time.Since(now)))}
	return r, true
}

// pause returns how long not to look again after a look that took a time. Of a
// machine that is busy with other things most of that was waiting, so that there
// is a bound.
func pause(took time.Duration) time.Duration {
	return min(time.Duration(float64(took)/share), max(oldest, 4*took))
}

// State is how a router stands to a rollout.
type State uint8

// The states.
const (
	Pending     State = 1 + iota // its step is not open
	Offered                      // connected, and has not answered
	Applied                      // runs it, and it was read back
	Clamped                      // runs it with other values
	Rejected                     // refused it; what ran before still runs
	Unreachable                  // not connected here
	Already                      // would run the same without the rollout
	RolledBack                   // has what it had before
)

var stateWords = []string{"", "pending", "offered", "applied", "clamped", "rejected", "unreachable", "already at target", "rolled back"}

// String returns the word that operators see.
func (s State) String() string { return stateWords[s] }

// CheckState returns an error if there is no such word; the empty one is fine.
func CheckState(word string) error {
	if !slices.Contains(stateWords, word) {
		return fmt.Errorf("state %q: must be one of %s", word, strings.Join(stateWords[1:], ", "))
	}
	return nil
}

// tally counts one router. One that is not connected here may be elsewhere, and
// is counted by whoever has all.
func tally(s State, standing fleet.Standing, opened time.Time) (t rollout.Tally) {
	switch s {
	case Offered:
		t.Offered = 1
	case Pending: // a control router, which runs what it should, or is about to
		if standing.Sync == fleet.Rejected {
			t.Rejected = 1
		} else {
			t.Applied = 1
		}
	case Applied:
		t.Applied = 1
	case Clamped:
		t.Clamped = 1
	case Rejected:
		t.Rejected = 1
	case Already:
		t.Already = 1
	case RolledBack:
		t.RolledBack = 1
	case Unreachable:
		if standing.Since.After(opened) && !opened.IsZero() {
			t.Lost = 1
		}
		return t
	}
	// Two sessions since then: the first may have come after a long absence.
	if !opened.IsZero() && standing.Before.After(opened) {
		t.Restarted = 1
	}
	return t
}

// without is the state without one rollout.
type without struct {
	*store.State
	set *rollout.Set
}

// RolloutSet returns the others.
func (w without) RolloutSet() *rollout.Set { return w.set }

// Router is how one router stands to a rollout, as this controller knows it.
type Router struct {
	ID    string
	Step  int
	State State
	Since time.Time // when it connected, or went; zero: it never was connected
}

// Routers returns the ids of the routers that a rollout means, in order.
func (c *Conductor) Routers(l *rollout.Live) (ids []string) {
	c.store.View(func(st *store.State) {
		for id := range st.RoutersOf(l) {
			ids = append(ids, id)
		}
	})
	slices.Sort(ids)
	return ids
}

// States returns how routers stand to a rollout. Those that it does not mean are
// left out.
func (c *Conductor) States(l *rollout.Live, ids []string) (all []Router) {
	now := time.Now()
	c.store.View(func(st *store.State) {
		rest := without{st, others(st, l)}
		for _, id := range ids {
			r, ok := st.Router(id)
			if !ok {
				continue
			}
			sub, ok := st.Subscriber(r.Subscriber)
			if !ok {
				continue
			}
			if step, ok := l.Step(id, &sub); ok {
				state, standing := c.state(rest, l, id, step, now)
				all = append(all, Router{id, step, state, standing.Since})
			}
		}
	})
	return all
}

// others returns all rollouts but one.
func others(st *store.State, l *rollout.Live) *rollout.Set {
	var all []*rollout.Live
	for o := range st.Rollouts("") {
		if o.ID != l.ID {
			all = append(all, o)
		}
	}
	return rollout.NewSet(all)
}

// each calls do with the state of every router that a rollout means, as this
// controller knows it. It does not hold up changes.
func (c *Conductor) each(l *rollout.Live, do func(step int, s State, standing fleet.Standing)) {
	type member struct {
		id   string
		step int
	}
	var all []member
	var set *rollout.Set
	c.store.View(func(st *store.State) {
		for id, step := range st.RoutersOf(l) {
			all = append(all, member{id, step})
		}
		set = others(st, l)
	})
	for part := range slices.Chunk(all, viewSize) {
		now := time.Now()
		states := make([]State, len(part))
		standings := make([]fleet.Standing, len(part))
		c.store.View(func(st *store.State) {
			rest := without{st, set}
			for i, m := range part {
				states[i], standings[i] = c.state(rest, l, m.id, m.step, now)
			}
		})
		for i, m := range part {
			do(m.step, states[i], standings[i])
		}
	}
}

func (c *Conductor) state(rest without, l *rollout.Live, id string, step int, now time.Time) (State, fleet.Standing) {
	d, ok := resolve.Router(rest.State, id, now, &c.hashes)
	if !ok {
		return Unreachable, fleet.Standing{}
	}
	standing := c.hub.Standing(id, d)
	opened := step < l.Opened
	back := !opened && step < l.Touched
	switch {
	case !standing.Connected:
		return Unreachable, standing
	case !opened && !back:
		return Pending, standing
	}
	switch standing.Sync {
	case fleet.InSync, fleet.None:
	case fleet.Clamped:
		if opened {
			return Clamped, standing
		}
	case fleet.Rejected:
		return Rejected, standing
	default:
		return Offered, standing
	}
	if back {
		return RolledBack, standing
	}
	if same(rest, id, now, d, &c.hashes) {
		return Already, standing
	}
	return Applied, standing
}

// same tells whether a router would run d without a rollout too.
func same(rest without, id string, now time.Time, d plan.Desired, hashes *resolve.Hashes) bool {
	other, _ := resolve.Router(rest, id, now, hashes)
	return other.Hash == d.Hash
}

// Blocked returns another rollout that goes on for some of the same routers and
// was made before, or has begun; empty if there is none.
func Blocked(st *store.State, l *rollout.Live) string {
	for o := range st.Rollouts("") {
		first := o.Opened > 0 || o.Created.Before(l.Created) || l.Created.IsZero()
		if o.ID != l.ID && o.Active() && first && Overlap(st, o, l) {
			return o.ID
		}
	}
	return ""
}

// Overlap tells whether two rollouts mean the same router.
func Overlap(st *store.State, a, b *rollout.Live) bool {
	if a.Selector.Plan != "" && b.Selector.Plan != "" && a.Selector.Plan != b.Selector.Plan {
		return false
	}
	for id := range st.RoutersOf(a) {
		r, _ := st.Router(id)
		sub, ok := st.Subscriber(r.Subscriber)
		if _, both := b.Step(id, &sub); ok && both {
			return true
		}
	}
	return false
}

// Targets returns the routers that a selector means now. Models are what those
// routers said that are, or were, connected to this controller.
func Targets(st *store.State, hub *fleet.Hub, sel rollout.Selector, siteLabel string) (all []rollout.Target, err error) {
	add := func(r plan.Router) {
		sub, ok := st.Subscriber(r.Subscriber)
		if !ok || !sel.Matches(&sub) {
			return
		}
		if sel.Model != "" && hub.Model(r.ID) != sel.Model {
			return
		}
		all = append(all, rollout.Target{Router: r.ID, Site: sub.Labels[siteLabel]})
	}
	switch {
	case len(sel.Routers) > 0:
		seen := map[string]bool{}
		for _, id := range sel.Routers {
			r, ok := st.Router(id)
			if !ok {
				return nil, fmt.Errorf("router %s: does not exist", id)
			}
			if !seen[id] {
				add(r)
			}
			seen[id] = true
		}
	case sel.Plan != "":
		for r := range st.RoutersOfPlan(sel.Plan, "") {
			add(r)
		}
	default:
		for r := range st.Routers("") {
			add(r)
		}
	}
	return all, nil
}
