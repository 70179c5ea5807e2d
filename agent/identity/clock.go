package identity

import (
	"fmt"
	"sync"
	"time"
)

// Clock is the time that certificates are checked against. A router without a
// battery starts in 1970, or years ahead if it was wrong when it was saved.
// Clock never says a time before the latest one that is known to have passed,
// and may stop to believe a clock that is past the end of everything.
type Clock struct {
	mu     sync.Mutex
	floor  time.Time
	synced func() bool // whether something keeps the router's clock right
	// The time that was known to have passed when the router's clock lost its
	// credit, and when that was on the monotonic clock; zero: it has it.
	believed, since time.Time
	// What the controller's clock said, and when that was on the monotonic
	// clock; zero: it said nothing yet.
	theirs, heard time.Time
}

// NewClock returns a clock that never says less than floor, such as when the
// program was built.
func NewClock(floor time.Time) *Clock {
	c := &Clock{synced: synced}
	c.Raise(floor)
	return c
}

// Raise tells that t has passed.
func (c *Clock) Raise(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.After(c.floor) {
		c.floor = t.Round(0) // without a monotonic reading
	}
}

// Now returns the router's time, or the floor if that is later; if the router's
// clock has no credit, the earliest time that it may be.
func (c *Clock) Now() time.Time {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.disbelievedLocked() {
		return c.knownLocked(now)
	}
	if now.Before(c.floor) {
		return c.floor
	}
	return now
}

// disbelievedLocked returns whether the router's clock has no credit. It gets it
// back from whatever sets it right.
func (c *Clock) disbelievedLocked() bool { return !c.believed.IsZero() && !c.synced() }

// Known returns the latest time that is known to have passed, whatever the
// router's own clock says, unless something keeps that right. It is what may be
// remembered: a time that was wrong once must not bar every certificate for
// ever.
func (c *Clock) Known() time.Time {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.knownLocked(now)
	if now.After(known) && c.synced() {
		return now.Round(0)
	}
	return known
}

func (c *Clock) knownLocked(now time.Time) time.Time {
	known := c.floor
	for _, t := range []struct{ said, at time.Time }{{c.believed, c.since}, {c.theirs, c.heard}} {
		if !t.at.IsZero() {
			// The monotonic clock says how long ago that was.
			if passed := t.said.Add(now.Sub(t.at)); passed.After(known) {
				known = passed
			}
		}
	}
	return known.Round(0)
}

// disbelieve tells that the router's clock is past what can be, and what has
// passed at least.
func (c *Clock) disbelieve(at time.Time) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.believed, c.since = at.Round(0), now
}

// keptRight returns whether something keeps the router's clock right.
func (c *Clock) keptRight() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.synced()
}

// Compare tells what the controller's clock says now.
func (c *Clock) Compare(theirs time.Time) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.theirs, c.heard = theirs, now
}

// Best returns the controller's time if it was told, as the router's own may be
// of 1970; else that of Now.
func (c *Clock) Best() time.Time {
	now := time.Now()
	c.mu.Lock()
	theirs, heard := c.theirs, c.heard
	c.mu.Unlock()
	if heard.IsZero() {
		return c.Now()
	}
	return theirs.Add(now.Sub(heard))
}

// MaxSkew is how far the router's clock may be from the controller's.
const MaxSkew = 5 * time.Minute

// Wrong returns what is wrong with the router's own clock: it is before what
// has passed already, or far from the controller's. Empty: nothing that is
// known.
func (c *Clock) Wrong() string {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Before(c.floor) {
		return "the router's clock is behind a time that is known to have passed"
	}
	if c.heard.IsZero() {
		if c.disbelievedLocked() {
			return "the router's clock is past the end of the controller's certificate"
		}
		return ""
	}
	// The monotonic clock says how long ago that was, whatever was done to the
	// wall clock since.
	skew := now.Round(0).Sub(c.theirs.Add(now.Sub(c.heard)))
	switch {
	case skew > MaxSkew:
		return fmt.Sprintf("the router's clock is %s ahead of the controller's", about(skew))
	case skew < -MaxSkew:
		return fmt.Sprintf("the router's clock is %s behind the controller's", about(-skew))
	default:
		return ""
	}
}

// about rounds, so that the same skew is told in the same words.
func about(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d >= 2*day:
		return fmt.Sprintf("%d days", d.Round(day)/day)
	case d >= 2*time.Hour:
		return fmt.Sprintf("%d hours", d.Round(time.Hour)/time.Hour)
	default:
		return fmt.Sprintf("%d minutes", d.Round(time.Minute)/time.Minute)
	}
}
