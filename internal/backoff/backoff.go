// Package backoff says when a router comes back to its controller: after waits
// with full jitter that grow, and not before the time that a controller asked
// for. Agents and what plays them share it, so that a storm of simulated ones
// is one of real ones.
package backoff

import (
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// Bounds of the wait between two attempts.
const (
	FirstWait = 500 * time.Millisecond // of the very first attempt, so that a fleet that gets power at once spreads
	BaseWait  = time.Second
	CapWait   = time.Minute

	// GoodAfter is how long a session lives to be a good one.
	GoodAfter = 10 * time.Second

	// mostAsked is the most that a controller is believed.
	mostAsked = time.Hour
)

// Backoff says how long to wait before the next attempt: full jitter, evenly
// between nothing and a bound that doubles up to a cap. It never gives up.
type Backoff struct {
	Random *rand.Rand
	// Spread is how long the controller said that its agents need to come back.
	// The first attempt after a good session is at once, for whom has lost just
	// its own connection. If it fails everybody has, and the next one is somewhere in
	// the first firstPart of this time; who is refused then, too, comes back within
	// laterPart of it. So the controller always has somebody to let in until all are
	// back, even if the time was not quite right.
	Spread time.Duration

	attempts int           // since the last good session
	waited   time.Duration // since the first of them failed
}

// maxSpread is the most that a controller is believed.
const maxSpread = 10 * time.Minute

// Parts of Spread, and for how many of it the waits are laterPart of it before they
// are what they are without a controller. See TestFleetReturns for what this is
// worth. An attempt that is refused costs a controller next to nothing.
const (
	firstPart, laterPart = 0.8, 0.2
	laterFor             = 2
)

// Next returns the wait before the next attempt.
func (b *Backoff) Next() time.Duration {
	bound := FirstWait
	if b.attempts > 0 {
		bound = min(BaseWait<<min(b.attempts-1, 10), CapWait)
	}
	switch spread := min(b.Spread, maxSpread); {
	case b.attempts == 2:
		bound = max(bound, time.Duration(firstPart*float64(spread)))
	case b.attempts > 2 && b.waited < laterFor*spread:
		bound = max(BaseWait, time.Duration(laterPart*float64(spread)))
	}
	b.attempts++
	wait := b.even(bound)
	b.waited += wait
	return wait
}

// After returns the wait before the next attempt after a session that lived
// for a time and ended with err. What a controller asks for is waited in full,
// and up to a tenth more: those whom it told the same don't come at once.
func (b *Backoff) After(lived time.Duration, err error) time.Duration {
	if lived >= GoodAfter {
		b.attempts, b.waited = 1, 0 // as from the start, but not the very first
	}
	ask := RetryAfter(err)
	wait := b.Next()
	if ask <= 0 {
		return wait
	}
	return max(wait, ask+b.even(ask/10))
}

func (b *Backoff) even(bound time.Duration) time.Duration {
	return time.Duration(b.Random.Int64N(int64(bound) + 1))
}

// RetryAfter returns how long the controller asks to stay away: RetryInfo in
// the details of the error, read by hand as it is two numbers.
func RetryAfter(err error) time.Duration {
	s, ok := status.FromError(err)
	if !ok {
		return 0
	}
	for _, d := range s.Proto().GetDetails() {
		if d.GetTypeUrl() != "type.googleapis.com/google.rpc.RetryInfo" {
			continue
		}
		delay := bytesField(d.GetValue(), 1)
		seconds, nanos := varintField(delay, 1), varintField(delay, 2)
		if seconds > uint64(mostAsked/time.Second) || nanos > uint64(time.Second) {
			return mostAsked
		}
		return time.Duration(seconds)*time.Second + time.Duration(nanos)
	}
	return 0
}

// bytesField returns the first field of a number and of bytes in b; nil if
// there is none.
func bytesField(b []byte, want protowire.Number) []byte {
	v, _ := protowire.ConsumeBytes(field(b, want, protowire.BytesType))
	return v
}

// varintField is the same for integers; 0 if there is none.
func varintField(b []byte, want protowire.Number) uint64 {
	v, n := protowire.ConsumeVarint(field(b, want, protowire.VarintType))
	if n < 0 {
		return 0
	}
	return v
}

// field returns b from the value of the first field of a number and type on.
func field(b []byte, want protowire.Number, kind protowire.Type) []byte {
	for len(b) > 0 {
		number, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if number == want && typ == kind {
			return b
		}
		if n = protowire.ConsumeFieldValue(number, typ, b); n < 0 {
			return nil
		}
		b = b[n:]
	}
	return nil
}
