package netns

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// These are named after the numbers of cake.md 6.

// counted returns the packets that came for each direction.
func counted(t *testing.T, d *userspace.Dataplane) (down, up uint64) {
	t.Helper()
	var st dataplane.Stats
	if !d.Stats(&st) {
		t.Fatal("no statistics")
	}
	return st.Down.SentPackets + st.Down.Drops, st.Up.SentPackets + st.Up.Drops
}

// pour sends datagrams one way until n have arrived.
func pour(t *testing.T, from, to *testnet.Namespace, at netip.AddrPort, n int) {
	t.Helper()
	var far net.PacketConn
	var near net.Conn
	err := errors.Join(
		to.Do(func() (err error) { far, err = net.ListenPacket("udp", at.String()); return err }),
		from.Do(func() (err error) { near, err = net.Dial("udp", at.String()); return err }),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	defer near.Close()
	b := make([]byte, 1000)
	for end := time.Now().Add(time.Minute); n > 0; {
		if time.Now().After(end) {
			t.Fatalf("%d datagrams to %s have not arrived", n, at)
		}
		if _, err := near.Write(b); err != nil {
			time.Sleep(10 * time.Millisecond) // refused, while the neighbour is not known
			continue
		}
		if err := far.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := far.ReadFrom(b); err == nil {
			n--
		}
	}
}

// few are the packets of others: neighbours and multicast.
const few = 40

// TestFault126_LANIsNotShaped has hosts talk to each other and to the router
// faster than the line is, and wants none of it to meet the shaper.
func TestFault126_LANIsNotShaped(t *testing.T) {
	h := newHome(t)
	d := h.open(t)
	apply(t, d, link(1*mbit, 1*mbit/10))
	const packets = 500
	pour(t, h.hosts[0], h.hosts[1], netip.MustParseAddrPort("10.9.1.12:5001"), packets)
	pour(t, h.hosts[0], h.hosts[1], netip.MustParseAddrPort("[fd00:1::12]:5001"), packets)
	pour(t, h.hosts[0], h.router, lan, packets)
	pour(t, h.router, h.hosts[1], netip.MustParseAddrPort("10.9.1.12:5001"), packets)
	if down, up := counted(t, d); down > few || up > few {
		t.Errorf("%d packets down and %d up have met the shaper of %d within the LAN", down, up, 4*packets)
	}
}

// TestFault131_Directions sends one way at a time, and wants it counted as that
// way, on the interface that was named.
func TestFault131_Directions(t *testing.T) {
	h := newHome(t)
	d := h.open(t)
	apply(t, d, link(20*mbit, 5*mbit))
	const packets = 200
	pour(t, h.hosts[0], h.far, far4, packets)
	down, up := counted(t, d)
	if up < packets || down > few {
		t.Errorf("%d packets up are counted as %d up and %d down", packets, up, down)
	}
	// IPv6 is not translated, so that the world can begin.
	pour(t, h.far, h.hosts[0], netip.MustParseAddrPort("[fd00:1::11]:5001"), packets)
	down2, up2 := counted(t, d)
	if down2-down < packets || up2-up > few {
		t.Errorf("%d packets down are counted as %d down and %d up", packets, down2-down, up2-up)
	}
}
