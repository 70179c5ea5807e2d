package agent

import (
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// target is a state to run.
type target struct {
	desired plan.Desired
	expires time.Time  // on the monotonic clock; zero: it stays
	then    *plan.Link // what follows; nil: nothing is shaped
}

// lasting returns what is left of t in the end. It is what survives a reboot,
// as a router can't know how long it was without power: a boost ends early
// rather than late, and a controller that still wants it says so again.
func (t target) lasting() plan.Desired {
	if t.expires.IsZero() {
		return t.desired
	}
	d := plan.Desired{Revision: t.desired.Revision, Link: t.then}
	if t.then != nil {
		d.Hash = t.then.Hash()
	}
	return d
}

// life decides what runs next. It is a pure machine: it takes the time and
// tells what is due; whoever holds it does it and tells it so. Times are on the
// monotonic clock.
type life struct {
	running target // applied last
	good    target // to go back to: equals running unless running is on trial

	trial    plan.Desired  // what is on trial; meaningless while deadline is zero
	began    time.Time     // when it was applied
	within   time.Duration // how long the controller has to be reached again
	deadline time.Time     // began + within; zero: nothing is on trial

	refused plan.Desired // rolled back: not to be tried again until it changes
	reason  string       // why; empty: nothing is refused
}

// changed tells that t was applied at now. If within is not 0, it is on trial:
// the controller must be reached within that time.
func (l *life) changed(now time.Time, t target, within time.Duration) {
	l.running = t
	l.reason = ""
	if within == 0 {
		// That the state came is a proof that the trial before it, if any, did
		// not cut the router off.
		l.good, l.deadline = t, time.Time{}
		return
	}
	l.trial, l.began, l.within, l.deadline = t.desired, now, within, now.Add(within)
}

// reached tells that the controller answered what was said after since. The
// result is whether that ended a trial.
func (l *life) reached(since time.Time) bool {
	if l.deadline.IsZero() || !since.After(l.began) {
		return false
	}
	l.good, l.deadline = l.running, time.Time{}
	return true
}

// step is what is due.
type step uint8

const (
	stepNone   step = iota
	stepRevert      // the trial failed: run good
	stepExpire      // running has ended: run what follows it
)

// due returns what is due at now and the state to run. A trial that failed
// comes before an expiry.
func (l *life) due(now time.Time) (step, target) {
	switch {
	case !l.deadline.IsZero() && !now.Before(l.deadline):
		return stepRevert, l.good
	case !l.running.expires.IsZero() && !now.Before(l.running.expires):
		return stepExpire, target{desired: l.running.lasting()}
	default:
		return stepNone, target{}
	}
}

// next returns when something will be due; zero: never, as things are.
func (l *life) next() time.Time {
	switch {
	case l.deadline.IsZero():
		return l.running.expires
	case l.running.expires.IsZero() || l.deadline.Before(l.running.expires):
		return l.deadline
	default:
		return l.running.expires
	}
}

// reverted tells that good runs again, and returns why.
func (l *life) reverted() string {
	l.refused = l.trial
	l.reason = fmt.Sprintf("rolled back: the controller was not reached within %v after the change", l.within)
	l.running, l.deadline = l.good, time.Time{}
	return l.reason
}

// expired tells that t, which due gave, runs.
func (l *life) expired(t target) {
	if l.deadline.IsZero() {
		l.good = t
	}
	l.running = t
}

// stuck tells that what was due can't run; what runs goes on for good.
func (l *life) stuck() {
	l.running.expires = time.Time{}
	l.good, l.deadline = l.running, time.Time{}
}

// refuses returns why d is not to be tried; empty if it may be.
func (l *life) refuses(d plan.Desired) string {
	if l.reason != "" && d.Revision == l.refused.Revision && d.Hash == l.refused.Hash {
		return l.reason
	}
	return ""
}
