package api

import (
	"net/netip"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// rate is how often something may happen: burst times at once, then once in an
// interval.
type rate struct {
	interval time.Duration
	burst    int
}

// tally is when a rate's bucket will be full again. Its zero value is a full
// bucket.
type tally time.Time

// take takes one if there is one. Else wait says when there will be.
func (t *tally) take(r rate, now time.Time) (ok bool, wait time.Duration) {
	full := time.Time(*t)
	if full.Before(now) {
		full = now
	}
	next := full.Add(r.interval)
	if wait := next.Sub(now) - time.Duration(r.burst)*r.interval; wait > 0 {
		return false, wait
	}
	*t = tally(next)
	return true, 0
}

// tallies are those of many keys. It holds the ones that were used last, twice
// most at the highest: who is forgotten has a full bucket again, so that it
// takes that many others to gain anything.
type tallies[K comparable] struct {
	rate     rate
	most     int
	now, old map[K]tally
}

func newTallies[K comparable](r rate, most int) tallies[K] {
	return tallies[K]{rate: r, most: most, now: map[K]tally{}}
}

func (x *tallies[K]) take(k K, now time.Time) (bool, time.Duration) {
	t, known := x.now[k]
	if !known {
		if len(x.now) >= x.most {
			x.now, x.old = map[K]tally{}, x.now
		}
		t = x.old[k]
	}
	ok, wait := t.take(x.rate, now)
	x.now[k] = t
	return ok, wait
}

// The rates of enrolments. Behind one address of a provider's NAT there may be
// thousands of routers after a power cut, so that an address has a large burst
// and the key is what counts.
var (
	enrollAll     = rate{interval: 5 * time.Millisecond, burst: 1000}
	enrollAddress = rate{interval: 20 * time.Millisecond, burst: 1000}
	enrollKey     = rate{interval: 5 * time.Second, burst: 6}
)

// maxTallies is how many addresses, and keys, are remembered at least.
const maxTallies = 8192

// enrollLimits bound what strangers can make a controller do.
type enrollLimits struct {
	mu        sync.Mutex
	all       tally                 // guarded by mu
	addresses tallies[netip.Prefix] // guarded by mu
	keys      tallies[plan.Key]     // guarded by mu
}

func newEnrollLimits() *enrollLimits {
	return &enrollLimits{
		addresses: newTallies[netip.Prefix](enrollAddress, maxTallies),
		keys:      newTallies[plan.Key](enrollKey, maxTallies),
	}
}

// connection lets one request of an address through before it is looked at.
// Else wait says when to try again.
func (l *enrollLimits) connection(from netip.Prefix, now time.Time) (ok bool, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ok, wait = l.addresses.take(from, now); !ok {
		return ok, wait
	}
	return l.all.take(enrollAll, now)
}

// key lets one request of a key through.
func (l *enrollLimits) key(k plan.Key, now time.Time) (ok bool, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.keys.take(k, now)
}

// news says what is worth a line in the log: a key once an hour.
type news struct {
	mu   sync.Mutex
	told tallies[plan.Key] // guarded by mu
}

func newNews() *news {
	return &news{told: newTallies[plan.Key](rate{interval: time.Hour, burst: 1}, maxTallies)}
}

func (n *news) is(k plan.Key, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	ok, _ := n.told.take(k, now)
	return ok
}

// origin returns what stands for the other end: its IPv4 address, or the /64
// that an IPv6 host can choose its address in. What isn't an address is one
// origin.
func origin(address string) netip.Prefix {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return netip.Prefix{}
	}
	addr, bits := ap.Addr().Unmap().WithZone(""), 64
	if addr.Is4() {
		bits = 32
	}
	p, err := addr.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
