package api

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestRate(t *testing.T) {
	r := rate{interval: time.Second, burst: 3}
	now := time.Now()
	var y tally
	for i := range 3 {
		if ok, _ := y.take(r, now); !ok {
			t.Errorf("%d of the burst is refused", i)
		}
	}
	for range 5 { // refusals cost nothing
		if ok, wait := y.take(r, now); ok || wait != time.Second {
			t.Errorf("after the burst: %t, %v", ok, wait)
		}
	}
	if ok, _ := y.take(r, now.Add(time.Second)); !ok {
		t.Error("refused when there is one again")
	}
	if ok, wait := y.take(r, now.Add(1500*time.Millisecond)); ok || wait != 500*time.Millisecond {
		t.Errorf("too early: %t, %v", ok, wait)
	}
}

// One who asks too often is refused while others go on, however many there are,
// and what is remembered of them has a bound.
func TestTallies(t *testing.T) {
	x := newTallies[int](rate{interval: time.Hour, burst: 2}, 100)
	now := time.Now()
	for i := range 10_000 {
		if ok, _ := x.take(i+1, now); !ok {
			t.Fatalf("%d is refused", i)
		}
		ok, _ := x.take(0, now)
		if want := i < 2; ok != want {
			t.Fatalf("after %d others: %t", i, ok)
		}
		if n := len(x.now) + len(x.old); n > 200 {
			t.Fatalf("%d are remembered", n)
		}
	}
}

func TestOrigin(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1:99":                   "192.0.2.1/32",
		"[::ffff:192.0.2.1]:99":          "192.0.2.1/32",
		"[2001:db8:1:2:3:4:5:6]:99":      "2001:db8:1:2::/64",
		"[fe80::1%eth0]:99":              "fe80::/64",
		"bufconn":                        "invalid Prefix",
		"":                               "invalid Prefix",
		"192.0.2.1":                      "invalid Prefix",
		"[2001:db8:1:2:ffff::1]:1":       "2001:db8:1:2::/64",
		"[2001:db8:1:3:ffff::1]:1":       "2001:db8:1:3::/64",
		"[::ffff:198.51.100.7%eth0]:100": "198.51.100.7/32",
	} {
		if got := origin(address).String(); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

// The queue has bounds, for all and for one address; who goes away makes room.
func TestPendingIsBounded(t *testing.T) {
	q := newPendingQueue()
	now := time.Now()
	at := func(n int) pendingRouter {
		return pendingRouter{key: plan.Key{byte(n), byte(n >> 8), 1}, seen: now, origin: origin(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 1).String())}
	}
	one := at(1)
	for n := range 1000 {
		p := at(n)
		p.origin = one.origin
		if ok := q.put(p); ok != (n < maxPendingOrigin) {
			t.Fatalf("number %d of one address: %t", n, ok)
		}
	}
	for n := 1000; n < 10_000; n++ {
		if ok := q.put(at(n)); ok != (n < 1000+maxPending-maxPendingOrigin) {
			t.Fatalf("number %d: %t", n, ok)
		}
	}
	if ok := q.put(at(1000)); !ok {
		t.Error("who waits already is refused")
	}
	all, refused := q.list(now)
	if len(all) != maxPending || refused != 1000-maxPendingOrigin+10_000-1000-(maxPending-maxPendingOrigin) {
		t.Errorf("%d wait, %d were refused", len(all), refused)
	}
	now = now.Add(pendingLife + time.Second)
	if ok := q.put(at(9999)); !ok {
		t.Error("no room after all have gone")
	}
	if all, _ := q.list(now); len(all) != 1 || len(q.byOrigin) != 1 {
		t.Errorf("%d left, of %d addresses", len(all), len(q.byOrigin))
	}
}
