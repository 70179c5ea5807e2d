package wan

import (
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/vishvananda/netlink"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// net is a network namespace with a watch on its interface "wan".
type network struct {
	t *testing.T
	*testnet.Namespace
	*watch
}

func newNetwork(t *testing.T, links ...string) *network {
	t.Helper()
	testnet.Require(t)
	n := &network{t: t, Namespace: testnet.Make(t, "wan")}
	for _, l := range links {
		n.add(l)
	}
	n.do(func() (err error) {
		n.watch, err = newWatch("wan", hclog.NewNullLogger())
		return err
	})
	t.Cleanup(func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *network) do(f func() error) {
	n.t.Helper()
	if err := n.Do(f); err != nil {
		n.t.Fatal(err)
	}
}

func (n *network) add(name string) {
	n.t.Helper()
	n.do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "-end"})
	})
}

// change changes the link called name.
func (n *network) change(name string, f func(netlink.Link) error) {
	n.t.Helper()
	n.do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(l)
	})
}

// expect waits for a change after which the interface is as wanted.
func (n *network) expect(what string, ok func(dataplane.Device) bool) {
	n.t.Helper()
	timeout := time.After(time.Minute)
	for !ok(n.Device()) {
		select {
		case <-n.Changed():
		case <-timeout:
			n.t.Fatalf("%s: the interface is %+v", what, n.Device())
		}
	}
}

// drain forgets a change that was seen already.
func (n *network) drain() {
	select {
	case <-n.Changed():
	default:
	}
}

func TestWatch(t *testing.T) {
	n := newNetwork(t)
	if d := n.Device(); d.Index != 0 || d.Name != "wan" {
		t.Fatalf("without an interface: %+v", d)
	}
	n.add("wan")
	n.expect("it comes", func(d dataplane.Device) bool { return d.Index != 0 && d.MTU == 1500 && !d.Up })
	first := n.Device().Index
	n.change("wan", netlink.LinkSetUp)
	n.expect("up", func(d dataplane.Device) bool { return d.Up })
	n.change("wan", func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1492) })
	n.expect("mtu", func(d dataplane.Device) bool { return d.MTU == 1492 })

	// A link that is up can't be renamed on every kernel.
	n.change("wan", netlink.LinkSetDown)
	n.change("wan", func(l netlink.Link) error { return netlink.LinkSetName(l, "other") })
	n.expect("renamed", func(d dataplane.Device) bool { return d.Index == 0 })
	n.change("other", func(l netlink.Link) error { return netlink.LinkSetName(l, "wan") })
	n.expect("renamed back", func(d dataplane.Device) bool { return d.Index == first })

	// As when PPPoE dials again.
	n.change("wan", netlink.LinkDel)
	n.expect("deleted", func(d dataplane.Device) bool { return d.Index == 0 })
	n.add("wan")
	n.expect("made again", func(d dataplane.Device) bool { return d.Index != 0 && d.Index != first })
}

// Flaps and new comings are counted, however fast they come, and a veth says
// that it has 10 Gbit/s.
func TestWatchCounts(t *testing.T) {
	n := newNetwork(t, "wan")
	n.change("wan", netlink.LinkSetUp)
	n.change("wan-end", netlink.LinkSetUp)
	n.expect("carrier", func(d dataplane.Device) bool { return d.Carrier })
	if d := n.Device(); d.Comings != 0 || d.CarrierLosses != 0 || d.Speed != 10_000_000_000 {
		t.Errorf("at first: %+v", d)
	}
	const flaps = 7
	for range flaps {
		n.change("wan-end", netlink.LinkSetDown)
		n.change("wan-end", netlink.LinkSetUp)
	}
	n.expect("flaps", func(d dataplane.Device) bool { return d.Carrier && d.CarrierLosses == flaps })
	for i := range uint64(2) {
		n.change("wan", netlink.LinkDel)
		n.expect("deleted", func(d dataplane.Device) bool { return d.Index == 0 })
		n.add("wan")
		n.expect("came again", func(d dataplane.Device) bool { return d.Comings == i+1 })
	}
	if d := n.Device(); d.CarrierLosses != flaps {
		t.Errorf("after new comings: %+v", d)
	}
}

// News that say nothing new change nothing, and news of another device are
// not even looked into (fault 94).
func TestFault094_OthersEvents(t *testing.T) {
	n := newNetwork(t, "wan", "other")
	n.change("wan", netlink.LinkSetUp)
	n.expect("up", func(d dataplane.Device) bool { return d.Up })
	n.drain()
	before := n.Device()

	asked := n.asked.Load()
	for range 50 {
		n.change("other", netlink.LinkSetUp)
		n.change("other", netlink.LinkSetDown)
	}
	// The socket keeps the order, so after the answer all of that is read.
	n.change("wan", func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1400) })
	n.expect("mtu", func(d dataplane.Device) bool { return d.MTU == 1400 })
	if more := n.asked.Load() - asked; more > 3 {
		t.Errorf("asked %d times because of another device", more)
	}
	n.change("wan", func(l netlink.Link) error { return netlink.LinkSetMTU(l, int(before.MTU)) })
	n.expect("mtu", func(d dataplane.Device) bool { return d == before })
	n.drain()

	asked = n.asked.Load()
	for i := range 100 { // each is an event of "wan" with nothing in it that counts
		n.change("wan", func(l netlink.Link) error { return netlink.LinkSetTxQLen(l, 500+i) })
	}
	// Some may find the socket full, on a busy machine.
	for deadline := time.Now().Add(time.Minute); n.asked.Load() < asked+30; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d of 100 events were seen", n.asked.Load()-asked)
		}
	}
	select {
	case <-n.Changed():
		t.Error("100 events that say nothing new are a change")
	default:
	}
	if d := n.Device(); d != before {
		t.Errorf("the interface is %+v, was %+v", d, before)
	}
	n.change("wan", netlink.LinkSetDown)
	n.expect("down", func(d dataplane.Device) bool { return !d.Up })
	if more := n.asked.Load() - asked; more > 250 {
		t.Errorf("asked %d times because of 100 events", more)
	}
}

// More news than the socket holds (ENOBUFS) cost no change.
func TestWatchOverflow(t *testing.T) {
	n := newNetwork(t, "wan", "other")
	raw, err := n.file.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = setReceiveBuffer(int(fd), 1) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); n.missed.Load() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the socket holds everything")
		}
		n.change("other", netlink.LinkSetUp)
		n.change("other", netlink.LinkSetDown)
	}
	n.change("wan", netlink.LinkSetUp)
	n.expect("up", func(d dataplane.Device) bool { return d.Up })
}

// The second agent on an interface is told; one on another interface is not,
// nor one that comes when the first has ended.
func TestOneAgentAnInterface(t *testing.T) {
	n := newNetwork(t, "wan", "other")
	open := func(iface string) (p *Plane, err error) {
		n.do(func() error {
			p, err = Open(Config{Interface: iface, Open: func() (dataplane.Dataplane, string, error) {
				return new(dataplanetest.Fake), "fake", nil
			}})
			return nil
		})
		return p, err
	}
	end := func(p *Plane) {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	first, err := open("wan")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open("wan"); !errors.Is(err, ErrInUse) || err.Error() != "interface wan: another cakefleet-agent shapes it: stop that one first" {
		t.Errorf("the second: %v", err)
	}
	other, err := open("other")
	if err != nil {
		t.Fatal(err)
	}
	end(other)
	end(first)
	again, err := open("wan")
	if err != nil {
		t.Fatal(err)
	}
	end(again)
}
