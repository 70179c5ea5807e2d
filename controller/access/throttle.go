package access

import (
	"container/list"
	"net/netip"
	"sync"
	"time"
)

const (
	// burst is how many logins may be refused at once, and refill how long it
	// takes until one more may.
	burst  = 20
	refill = 3 * time.Second

	// mostAddresses bounds the memory. An address that is pushed out by so many
	// others is as if it had done nothing.
	mostAddresses = 4096
)

// throttle counts refused logins by address.
type throttle struct {
	mu    sync.Mutex
	by    map[netip.Prefix]*list.Element // guarded by mu; of *failures
	order *list.List                     // guarded by mu; newest first
}

// failures is a bucket that each refused login fills by one and time empties.
type failures struct {
	from  netip.Prefix
	count float64
	last  time.Time
}

func newThrottle() *throttle {
	return &throttle{by: map[netip.Prefix]*list.Element{}, order: list.New()}
}

// network returns what counts as one address: of IPv6 the /64, as whoever has
// one address there has them all.
func network(address string) netip.Prefix {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return netip.Prefix{} // all that have none count as one
	}
	a = a.Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// allows tells whether a login from an address is looked at.
func (t *throttle) allows(address string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.by[network(address)]
	if !ok {
		return true
	}
	f := e.Value.(*failures)
	return f.at(now) <= burst-1
}

// failed counts a login that was refused.
func (t *throttle) failed(address string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	from := network(address)
	e, ok := t.by[from]
	if !ok {
		e = t.order.PushFront(&failures{from: from, last: now})
		t.by[from] = e
	}
	f := e.Value.(*failures)
	f.count, f.last = f.at(now)+1, now
	t.order.MoveToFront(e)
	for len(t.by) > mostAddresses {
		oldest := t.order.Back()
		delete(t.by, oldest.Value.(*failures).from)
		t.order.Remove(oldest)
	}
}

// at returns how full the bucket is.
func (f *failures) at(now time.Time) float64 {
	return max(0, f.count-now.Sub(f.last).Seconds()/refill.Seconds())
}
