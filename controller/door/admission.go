package door

import "time"

// Bucket is a token bucket. It is pure: the time is passed in.
type Bucket struct {
	rate  float64 // tokens/s
	burst float64
	have  float64
	at    time.Time
}

// NewBucket returns a full bucket.
func NewBucket(rate, burst float64) Bucket { return Bucket{rate: rate, burst: burst, have: burst} }

// SetRate changes how many tokens come each second from now on, and how many
// there are at most.
func (b *Bucket) SetRate(rate, burst float64) {
	b.rate, b.burst = rate, burst
	b.have = min(b.have, burst)
}

// Take takes n tokens if they are there. Else it returns after what time they
// will be.
func (b *Bucket) Take(now time.Time, n float64) (wait time.Duration, ok bool) {
	if b.at.IsZero() {
		b.at = now
	}
	if since := now.Sub(b.at); since > 0 { // not back, whatever the clock does
		b.have = min(b.burst, b.have+since.Seconds()*b.rate)
		b.at = now
	}
	if b.have >= n {
		b.have -= n
		return 0, true
	}
	return time.Duration((n - b.have) / b.rate * float64(time.Second)), false
}

// budget is what a connection may send: a small Bucket, as there are very many.
// It counts in units that come back with time.
type budget struct {
	used uint32
	at   uint32 // seconds since the server began
}

// spend notes n units of which rate come back each second, and reports whether
// there were as many of the burst left.
func (b *budget) spend(now, n, rate, burst uint32) bool {
	if now > b.at {
		back := uint64(now-b.at) * uint64(rate)
		b.used -= uint32(min(back, uint64(b.used)))
		b.at = now
	}
	if n > burst || b.used > burst-n {
		return false
	}
	b.used += n
	return true
}
