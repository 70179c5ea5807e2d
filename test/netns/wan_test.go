package netns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

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
	for deadline := time.Now().Add(20 * time.Second); got < want; {
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

// TestRedial has the link come late, change, go and come back with another
// index: hosts are online whenever there is a link, and shaped once the data
// plane was told.
func TestRedial(t *testing.T) {
	h := newHome(t)
	if err := h.router.Delete("wan"); err != nil {
		t.Fatal(err)
	}
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
	l := link(20*mbit, 5*mbit)
	if _, err := p.Apply(context.Background(), l); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Fatalf("Apply without an interface: %v", err)
	}

	await := func(what string, ok func(dataplane.Device) bool) {
		t.Helper()
		timeout := time.After(20 * time.Second)
		for !ok(p.Device()) {
			select {
			case <-p.Changed():
			case <-timeout:
				t.Fatalf("%s: the interface is %+v", what, p.Device())
			}
		}
	}
	shaped := func(what string) {
		t.Helper()
		if _, err := p.Apply(context.Background(), l); err != nil {
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
