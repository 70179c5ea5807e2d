package access

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

func TestThrottle(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	th := newThrottle()
	for range burst {
		if !th.allows("192.0.2.1", now) {
			t.Fatal("throttled too early")
		}
		th.failed("192.0.2.1", now)
	}
	for address, want := range map[string]bool{"192.0.2.1": false, "::ffff:192.0.2.1": false, "192.0.2.2": true, "": true} {
		if got := th.allows(address, now); got != want {
			t.Errorf("%q: %v, want %v", address, got, want)
		}
	}
	if th.allows("192.0.2.1", now.Add(refill-time.Millisecond)) || !th.allows("192.0.2.1", now.Add(refill)) {
		t.Error("not one more after each refill time")
	}
	// Who has one address of a /64 has them all.
	for i := range burst {
		th.failed(fmt.Sprintf("2001:db8::%x", i), now)
	}
	if th.allows("2001:db8::ffff", now) || !th.allows("2001:db8:0:1::1", now) {
		t.Error("IPv6 is not counted by /64")
	}
}

// However many addresses try, the memory stays the same, and newest counts.
func TestThrottleIsBounded(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	th := newThrottle()
	for i := range 10 * mostAddresses {
		th.failed(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), now)
	}
	if len(th.by) != mostAddresses || th.order.Len() != mostAddresses {
		t.Errorf("%d and %d addresses are kept, want %d", len(th.by), th.order.Len(), mostAddresses)
	}
}

// One operator that goes wild is slowed down, and the others are not.
func TestPace(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var p pace
	n := 0
	for p.allows("billing", now) {
		n++
	}
	if n != callBurst || !p.allows("noc", now) {
		t.Errorf("%d calls at once, want %d, and others at any time", n, callBurst)
	}
	n = 0
	for p.allows("billing", now.Add(time.Second)) {
		n++
	}
	if n != callRate {
		t.Errorf("%d calls in the next second, want %d", n, callRate)
	}
	for i := range 3 * mostPaced {
		p.allows(fmt.Sprint(i), now)
	}
	if len(p.by) > mostPaced {
		t.Errorf("%d operators are kept", len(p.by))
	}
}

// Whatever a stranger sends as credentials is refused without a trace of it in
// the answer.
func FuzzAuthorization(f *testing.F) {
	token, err := identity.NewOperatorToken("noc", identity.Pin{1})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{
		"Bearer " + token.Text(), "Basic " + base64.StdEncoding.EncodeToString([]byte("a:"+token.Text())), "Bearer", "Basic", "basic =", "x y z",
		"Bearer cfo1.a.b.c.aaaaaaaaaa.d.e", "Bearer cfo1....", "Bearer " + strings.Repeat(".", 600),
	} {
		f.Add(s)
	}
	c := New(storetest.NewFake(f))
	now := time.Now()
	c.now = func() time.Time { now = now.Add(time.Minute); return now } // nothing is throttled
	f.Fuzz(func(t *testing.T, text string) {
		if text == "" {
			return
		}
		who, err := c.Admit(Credentials{Authorization: text, Address: text})
		if err == nil || who != (identity.Caller{}) {
			t.Fatalf("%q is %+v, %v", text, who, err)
		}
		if _, secret, ok := strings.Cut(text, " "); ok && len(secret) > 8 && strings.Contains(err.Error(), secret) {
			t.Errorf("the answer repeats what was sent: %v", err)
		}
	})
}
