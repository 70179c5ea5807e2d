package session

import (
	"math/rand/v2"
	"time"
)

// Bounds of the wait between two attempts.
const (
	firstWait = 500 * time.Millisecond // of the very first attempt, so that a fleet that gets power at once spreads
	baseWait  = time.Second
	capWait   = time.Minute
)

// backoff says how long to wait before the next attempt: full jitter, evenly
// between nothing and a bound that doubles up to a cap. It never gives up.
type backoff struct {
	random   *rand.Rand
	attempts int // since the last good session
}

// next returns the wait before the next attempt.
func (b *backoff) next() time.Duration {
	bound := firstWait
	if b.attempts > 0 {
		bound = min(baseWait<<min(b.attempts-1, 10), capWait)
	}
	b.attempts++
	return time.Duration(b.random.Int64N(int64(bound) + 1))
}

// good tells that a session was had: the next wait is one from the start, but
// not the very first one.
func (b *backoff) good() { b.attempts = 1 }
