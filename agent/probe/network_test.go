package probe

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cake.md 119: with two links, echoes leave by the one that is shaped, also
// where the routes prefer the other; both families.
func TestFault119(t *testing.T) {
	testnet.Require(t)
	router, far := testnet.Make(t, "router"), testnet.Make(t, "far")
	err := errors.Join(
		testnet.Veth(router, "wan", far, "a"), testnet.Veth(router, "other", far, "b"),
		router.Addr("wan", "198.51.100.1/24", "2001:db8:1::1/64"), far.Addr("a", "198.51.100.2/24", "2001:db8:1::2/64"),
		router.Addr("other", "203.0.113.1/24", "2001:db8:2::1/64"), far.Addr("b", "203.0.113.2/24", "2001:db8:2::2/64"),
	)
	if err != nil {
		t.Fatal(err)
	}
	echo := func(d device, to string) (ok bool, err error) {
		err = router.Do(func() error {
			var took time.Duration
			took, ok, err = d.echo(t.Context(), netip.MustParseAddr(to), wait)
			if ok && (took <= 0 || took > wait) {
				t.Errorf("%s by %s took %v", to, d, took)
			}
			return err
		})
		return ok, err
	}
	sent := func(link string) uint64 {
		_, _, packets, _, err := router.Counters(link)
		if err != nil {
			t.Fatal(err)
		}
		return packets
	}
	for _, to := range []string{"198.51.100.2", "2001:db8:1::2"} {
		// The neighbour is found, and IPv6 has looked for duplicates, when the
		// first one is answered.
		var ok bool
		var err error
		for deadline := time.Now().Add(time.Minute); !ok; {
			if ok, err = echo("wan", to); time.Now().After(deadline) {
				t.Fatalf("%s is not answered: %v", to, err)
			}
		}
		before := sent("wan")
		const n = 5
		for range n {
			if ok, err := echo("wan", to); err != nil || !ok {
				t.Errorf("%s by wan: %v, %v", to, ok, err)
			}
		}
		if got := sent("wan") - before; got < n {
			t.Errorf("%d packets left by wan, want %d", got, n)
		}
	}
	// The routes lead to these by the other link. Whoever is asked by this one
	// may answer, or not.
	for _, to := range []string{"203.0.113.2", "2001:db8:2::2"} {
		before := sent("wan")
		_, err := echo("wan", to)
		if got := sent("wan") - before; got == 0 && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("nothing left by wan for %s: %v", to, err)
		}
	}
	if _, err := echo("nosuch", "198.51.100.2"); err == nil {
		t.Error("an interface that is not there gives no error")
	}
	err = router.Do(func() error {
		down, up, err := device("wan").passed()
		if down < 5*98 || up < 5*98 {
			t.Errorf("passed are %d and %d bytes", down, up)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// An echo ends with its context.
func TestEchoEnds(t *testing.T) {
	testnet.Require(t)
	router, far := testnet.Make(t, "router"), testnet.Make(t, "far")
	if err := errors.Join(testnet.Veth(router, "wan", far, "a"), router.Addr("wan", "198.51.100.1/24")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := router.Do(func() error {
		time.AfterFunc(50*time.Millisecond, cancel)
		_, ok, err := device("wan").echo(ctx, netip.MustParseAddr("198.51.100.9"), time.Hour)
		if ok {
			t.Error("nobody answered")
		}
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

func TestAnswers(t *testing.T) {
	cookie := []byte("0123456789abcdef")
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	head := append([]byte{0x46}, make([]byte, 23)...) // with options
	reply := append([]byte{echoReply, 0, 0, 0, 1, 2, 0, 0}, cookie...)
	reply6 := append([]byte{echoReply6, 0, 0, 0, 1, 2, 0, 0}, cookie...)
	for _, c := range []struct {
		name   string
		b      []byte
		to     netip.Addr
		header bool
		want   bool
	}{
		{"v4", append(head, reply...), v4, true, true},
		{"v4 without a header", reply, v4, false, true},
		{"v6", reply6, v6, false, true},
		{"our own request", append(head, request(v4, cookie)...), v4, true, false},
		{"of another", append(head, append(reply[:8:8], "0123456789abcdeF"...)...), v4, true, false},
		{"longer", append(slices.Clip(reply), 0), v4, false, false},
		{"short", reply[:7], v4, false, false},
		{"header only", head, v4, true, false},
		{"half a header", head[:10], v4, true, false},
		{"empty", nil, v4, true, false},
	} {
		if got := answers(c.b, c.to, c.header, cookie); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if b := request(v4, cookie); checksum(b) != 0 {
		t.Errorf("the checksum of % x is wrong", b)
	}
}

func TestCounted(t *testing.T) {
	const text = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  131072     100    0    0    0     0          0         0   131072     100    0    0    0     0       0          0
pppoe-wan:18446744073709551615 1 0 0 0 0 0 0 5000000000 1 0 0 0 0 0 0
  wan2: 1
`
	down, up, err := counted(text, "pppoe-wan")
	if down != 1<<64-1 || up != 5_000_000_000 || err != nil {
		t.Errorf("%d, %d, %v", down, up, err)
	}
	for _, name := range []string{"wan", "wan2", "face |bytes    packets errs drop fifo frame compressed multicast|bytes", ""} {
		if _, _, err := counted(text, name); err == nil {
			t.Errorf("%q is found", name)
		}
	}
}
