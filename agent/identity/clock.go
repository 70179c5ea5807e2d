package identity

import (
	"sync"
	"time"
)

// Clock is the time that certificates are checked against. A router without a
// battery starts in 1970; Clock never says a time before the latest one that
// is known to have passed.
type Clock struct {
	mu    sync.Mutex
	floor time.Time
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

// Plausible returns whether the router's own clock may be right; false means
// that it is before what has passed already.
func (c *Clock) Plausible() bool {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	return !now.Before(c.floor)
}
