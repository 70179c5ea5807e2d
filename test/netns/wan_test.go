package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/agent/dataplane/wan"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// plug makes the router's link "wan" with its addresses, as PPPoE does when it
// has dialed.
func (h *home) plug(t testing.TB) {
	t.Helper()
	err := errors.Join(
		testnet.Veth(h.router, "wan", h.far, "eth0"),
		h.router.Addr("wan", "198.51.100.1/24", "2001:db8:ff::1/64"),
		h.far.Addr("eth0", "198.51.100.2/24", "2001:db8:ff::2/64"),
		h.far.Route("fd00:1::/64", "2001:db8:ff::1"),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// exchange wants datagrams of a host to be answered by the far end.
func (h *home) exchange(t *testing.T, far netip.AddrPort) {
	t.Helper()
	h.exchangeTOS(t, far, 0)
}

// exchangeTOS gives the host's datagrams a DS field.
func (h *home) exchangeTOS(t *testing.T, far netip.AddrPort, tos int) {
	t.Helper()
	var client net.Conn
	var listener net.PacketConn
	err := errors.Join(
		h.far.Do(func() (err error) { listener, err = net.ListenPacket("udp", far.String()); return err }),
		h.hosts[0].Do(func() (err error) { client, err = net.Dial("udp", far.String()); return err }),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	defer client.Close()
	raw, err := client.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	level, option := unix.IPPROTO_IP, unix.IP_TOS
	if far.Addr().Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, tos) }); err != nil || set != nil {
		t.Fatal(err, set)
	}
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := listener.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = listener.WriteTo(b[:n], from) // the client counts what comes back
		}
	}()
	const want = 20
	got := 0
	b := make([]byte, 100)
	for deadline := time.Now().Add(time.Minute); got < want; {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d datagrams to %s were answered", got, want, far)
		}
		if _, err := client.Write([]byte("still there?")); err != nil {
			time.Sleep(10 * time.Millisecond) // refused, while the neighbour is not known
			continue
		}
		if err := client.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Read(b); err == nil {
			got++
		}
	}
}

// follow opens a data plane that follows the router's link "wan".
func (h *home) follow(t *testing.T) *wan.Plane {
	t.Helper()
	var p *wan.Plane
	err := h.router.Do(func() (err error) {
		p, err = wan.Open(wan.Config{Interface: "wan", Logger: logger(t), Open: func() (d dataplane.Dataplane, name string, err error) {
			err = h.router.Do(func() (err error) {
				d, err = userspace.Open(userspace.Config{Interface: "wan", Logger: logger(t), Seed: 1})
				return err
			})
			return d, "userspace", err
		}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if left := h.left(t); left != "" {
			t.Errorf("left behind: %s", left)
		}
	})
	return p
}

// await waits for the interface to be so.
func await(t *testing.T, p *wan.Plane, what string, ok func(dataplane.Device) bool) {
	t.Helper()
	timeout := time.After(time.Minute)
	for !ok(p.Device()) {
		select {
		case <-p.Changed():
		case <-timeout:
			t.Fatalf("%s: the interface is %+v", what, p.Device())
		}
	}
}

// shaped applies a link and wants packets of both families to be shaped.
func (h *home) shaped(t *testing.T, p *wan.Plane, what string) {
	t.Helper()
	if _, err := p.Apply(context.Background(), link(20*mbit, 5*mbit)); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	for _, far := range []netip.AddrPort{far4, far6} {
		var before, after dataplane.Stats
		if !p.Stats(&before) {
			t.Fatalf("%s: no statistics", what)
		}
		h.exchange(t, far)
		if !p.Stats(&after) || after.Up.SentPackets < before.Up.SentPackets+20 || after.Down.SentPackets < before.Down.SentPackets+20 {
			t.Errorf("%s: packets to %s are not shaped", what, far)
		}
	}
}

// TestRedial has the link come late, change, go and come back with another
// index: hosts are online whenever there is a link, and shaped once the data
// plane was told.
func TestRedial(t *testing.T) {
	h := newHome(t)
	if err := h.router.Delete("wan"); err != nil {
		t.Fatal(err)
	}
	p := h.follow(t)
	if _, err := p.Apply(context.Background(), link(20*mbit, 5*mbit)); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Fatalf("Apply without an interface: %v", err)
	}
	await := func(what string, ok func(dataplane.Device) bool) {
		t.Helper()
		await(t, p, what, ok)
	}
	shaped := func(what string) {
		t.Helper()
		h.shaped(t, p, what)
	}
	var last uint32
	for _, what := range []string{"it came", "it came back"} {
		h.plug(t)
		await(what, func(d dataplane.Device) bool { return d.Index != 0 && d.Index != last && d.Up })
		last = p.Device().Index
		h.exchange(t, far4) // online before anybody applied
		shaped(what)
		if err := h.router.Delete("wan"); err != nil {
			t.Fatal(err)
		}
		await("it went", func(d dataplane.Device) bool { return d.Index == 0 })
		var st dataplane.Stats
		if p.Stats(&st) {
			t.Error("statistics of an interface that is gone")
		}
	}

	h.plug(t)
	await("it came again", func(d dataplane.Device) bool { return d.Index != 0 && d.Up })
	shaped("it came again")
	if err := h.router.MTU("wan", 1492); err != nil {
		t.Fatal(err)
	}
	await("MTU", func(d dataplane.Device) bool { return d.MTU == 1492 })
	h.exchange(t, far4)
	shaped("MTU")
	// Under another name it is somebody else's: online, and not shaped by us.
	if err := errors.Join(h.router.Down("wan"), h.router.Rename("wan", "other")); err != nil {
		t.Fatal(err)
	}
	await("renamed", func(d dataplane.Device) bool { return d.Index == 0 })
	if err := errors.Join(h.router.Up("other"), h.router.Addr("other", "2001:db8:ff::1/64")); err != nil {
		t.Fatal(err)
	}
	h.exchange(t, far6) // the test's own NAT for IPv4 goes by the name
	if err := errors.Join(h.router.Down("other"), h.router.Rename("other", "wan"), h.router.Up("wan"), h.router.Addr("wan", "2001:db8:ff::1/64")); err != nil {
		t.Fatal(err)
	}
	await("renamed back", func(d dataplane.Device) bool { return d.Index != 0 && d.Up })
	shaped("renamed back")
}

// dial makes the router's link "wan" a PPPoE session over its link "modem".
func (h *home) dial(t *testing.T, number uint16) (hangUp func()) {
	t.Helper()
	near, far, err := testnet.PPPoE(number, h.router, "modem", "wan", h.far, "eth0", "ppp-home")
	if err != nil {
		testnet.Skip(t, fmt.Sprintf("this kernel has no PPPoE: %v", err))
	}
	hangUp = func() {
		if err := errors.Join(near.Close(), far.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(hangUp)
	err = errors.Join(
		h.router.Addr("wan", "198.51.100.1/24", "2001:db8:ff::1/64"),
		h.far.Addr("ppp-home", "198.51.100.2/24", "2001:db8:ff::2/64"),
		h.far.Route("fd00:1::/64", "2001:db8:ff::1"),
	)
	if err != nil {
		t.Fatal(err)
	}
	return hangUp
}

// modem puts a link for PPPoE in the place of the router's wan.
func (h *home) modem(t *testing.T) {
	t.Helper()
	if err := errors.Join(h.router.Delete("wan"), testnet.Veth(h.router, "modem", h.far, "eth0")); err != nil {
		t.Fatal(err)
	}
}

// TestPPPoE dials, hangs up and dials again: another interface of the same name,
// with another index.
func TestPPPoE(t *testing.T) {
	h := newHome(t)
	h.modem(t)
	hangUp := h.dial(t, 1)
	p := h.follow(t)
	var indices [2]uint32
	for i := range indices {
		await(t, p, "dialed", func(d dataplane.Device) bool { return d.Index != 0 && d.Up && d.MTU == 1492 })
		indices[i] = p.Device().Index
		h.exchange(t, far4) // online before anybody applied
		h.shaped(t, p, "dialed")
		var st dataplane.Stats
		if !p.Stats(&st) || st.Up.AvgNetOff != 0 || st.Down.AvgNetOff != 0 {
			t.Errorf("average network header offset %d and %d, want 0 on PPP", st.Up.AvgNetOff, st.Down.AvgNetOff)
		}
		hangUp()
		await(t, p, "hung up", func(d dataplane.Device) bool { return d.Index == 0 })
		hangUp = h.dial(t, uint16(2+i))
	}
	if indices[0] == indices[1] {
		t.Errorf("both sessions have index %d", indices[0])
	}
}

// TestPPPoEKinds shapes all kinds of packets in a PPPoE session.
func TestPPPoEKinds(t *testing.T) {
	h := newHome(t)
	h.modem(t)
	h.dial(t, 1)
	kinds(t, h, "wan")
}
