package identity

import (
	"fmt"
	"sync"
	"time"
)

// Clock is the time that certificates are checked against. A router without a
// battery starts in 1970; Clock never says a time before the latest one that
// is known to have passed.
type Clock struct {
	mu    sync.Mutex
	floor time.Time
	// What the controller's clock said, and when that was on the monotonic
	// clock; zero: it said nothing yet.
	theirs, heard time.Time
}

// NewClock returns a clock that never says less than floor, such as when the
// program was built.
func NewClock(floor time.Time) *Clock {
	c := &Clock{}
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

// Now returns the router's time, or the floor if that is later.
func (c *Clock) Now() time.Time {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Before(c.floor) {
		return c.floor
	}
	return now
}

// Compare tells what the controller's clock says now.
func (c *Clock) Compare(theirs time.Time) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.theirs, c.heard = theirs, now
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
