package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// echoed sends packets one after the other from a namespace to an address where
// each is answered, by the kernel or by answer, and wants them all back.
// network is such as "udp" or "ip4:47".
func echoed(t *testing.T, from, at *testnet.Namespace, network, source, target string, packet []byte, n int, answer bool) {
	t.Helper()
	listen := func(ns *testnet.Namespace, addr string) (c net.PacketConn) {
		t.Helper()
		if strings.HasPrefix(network, "udp") {
			addr = net.JoinHostPort(addr, "7007")
		}
		if err := ns.Do(func() (err error) { c, err = net.ListenPacket(network, addr); return err }); err != nil {
			t.Fatal(err)
		}
		return c
	}
	client := listen(from, source)
	defer client.Close()
	var to net.Addr
	if strings.HasPrefix(network, "udp") {
		to = &net.UDPAddr{IP: net.ParseIP(target), Port: 7007}
	} else {
		to = &net.IPAddr{IP: net.ParseIP(target)}
	}
	if answer {
		server := listen(at, target)
		defer server.Close()
		go func() {
			b := make([]byte, 64<<10)
			for {
				n, who, err := server.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = server.WriteTo(b[:n], who) // the client counts what comes back
			}
		}()
	}
	b := make([]byte, 64<<10)
	for i := range n {
		for end := time.Now().Add(time.Minute); ; {
			if time.Now().After(end) {
				t.Fatalf("packet %d of %d is not answered", i, n)
			}
			if _, err := client.WriteTo(packet, to); err != nil {
				t.Logf("packet %d of %d: %v", i, n, err) // the neighbour may not be known yet
				time.Sleep(100 * time.Millisecond)
				continue
			}
			if err := client.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			// A raw socket sees what is not for it, too.
			got, err := 0, error(nil)
			for err == nil && got != len(packet) {
				got, _, err = client.ReadFrom(b)
			}
			if err == nil {
				break
			}
		}
	}
}

// icmpEcho is an echo request for IPv4 or IPv6; the kernel sums the latter.
func icmpEcho(v6 bool, n int) []byte {
	b := make([]byte, n)
	b[4], b[7] = 0x77, 1
	if v6 {
		b[0] = 128
		return b
	}
	b[0] = 8
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum+sum>>16))
	return b
}

// wire is what has gone over the router's link.
type wire struct{ down, up, downPackets, upPackets uint64 }

func (h *home) wire(t *testing.T, link string) (w wire) {
	t.Helper()
	var err error
	if w.downPackets, w.down, w.upPackets, w.up, err = h.router.Counters(link); err != nil {
		t.Fatal(err)
	}
	return w
}

// still returns what was counted on both sides once nothing is on its way: not
// when a packet, or its repetition on a slow machine, is between the two.
func (h *home) still(t *testing.T, d dataplane.Dataplane, link string) (st dataplane.Stats, w wire) {
	t.Helper()
	read := func() (st dataplane.Stats, w wire) {
		if !d.Stats(&st) {
			t.Fatal("no statistics")
		}
		return st, h.wire(t, link)
	}
	st, w = read()
	for range 600 {
		time.Sleep(100 * time.Millisecond)
		again, wireAgain := read()
		if wireAgain == w && again.Down.SentBytes == st.Down.SentBytes && again.Up.SentBytes == st.Up.SentBytes {
			return again, w
		}
		st, w = again, wireAgain
	}
	t.Fatal("packets go on and on")
	return st, w
}

// TestFault122_Kinds sends packets of every kind, of hosts and of the router itself, and
// wants each to be shaped both ways and to be counted with as many bytes as go
// over the wire: cake.md 6.1 1 on
// real packets.
func TestFault122_Kinds(t *testing.T) {
	h := newHome(t)
	kinds(t, h, "wan")
}

func kinds(t *testing.T, h *home, link string) {
	// NAT can't tell apart what has no ports, so the router's own goes elsewhere.
	if err := errors.Join(h.far.Addr("lo", "203.0.113.1/32"), h.router.Route("203.0.113.1/32", "198.51.100.2")); err != nil {
		t.Fatal(err)
	}
	d := h.open(t)
	l := plainLink()
	apply(t, d, l)
	const n = 20
	raw := make([]byte, 400) // GRE version 0 without a key, ESP of SPI 0
	big := make([]byte, 4000)
	forwarded4, forwarded6 := "10.9.1.11", "fd00:1::11"
	local4, local6 := "198.51.100.1", "2001:db8:ff::1"
	far4, far6 := "198.51.100.2", "2001:db8:ff::2"
	tracked := false
	run := func(name, network string, packet []byte, v6 bool) {
		for _, local := range []bool{false, true} {
			from, source, target := h.hosts[0], forwarded4, far4
			switch {
			case local && v6:
				from, source, target = h.router, local6, far6
			case local:
				from, source, target = h.router, local4, "203.0.113.1"
			case v6:
				source, target = forwarded6, far6
			}
			t.Run(fmt.Sprintf("%s, local %v, tracked %v", name, local, tracked), func(t *testing.T) {
				answer := !strings.Contains(network, "icmp")
				send := packet
				if !answer { // by the kernel
					send = icmpEcho(v6, len(packet))
				}
				echoed(t, from, h.far, network, source, target, send, 1, answer) // neighbours know each other now
				before, w := h.still(t, d, link)
				echoed(t, from, h.far, network, source, target, send, n, answer)
				after, now := h.still(t, d, link)
				for _, dir := range []struct {
					name           string
					bytes, packets uint64
					st, was        *engine.Stats
				}{
					{"down", now.down - w.down, now.downPackets - w.downPackets, &after.Down, &before.Down},
					{"up", now.up - w.up, now.upPackets - w.upPackets, &after.Up, &before.Up},
				} {
					counted := dir.st.SentBytes - dir.was.SentBytes
					// What neighbours say to each other by ARP is not shaped, and a
					// tag is not counted everywhere.
					others := 3*100 + 4*dir.packets
					// On a machine that is slow enough a packet is dropped for its delay.
					others += 1518 * (dir.st.Drops - dir.was.Drops)
					if counted > dir.bytes || counted+others < dir.bytes {
						t.Errorf("%s: %d bytes are counted, and %d went over the wire in %d frames", dir.name, counted, dir.bytes, dir.packets)
					}
					if got := dir.st.SentPackets - dir.was.SentPackets; got < n {
						t.Errorf("%s: %d packets were shaped, want %d", dir.name, got, n)
					}
				}
				if after.BypassedPackets != 0 || after.QueueOverflows != 0 {
					t.Errorf("%d packets bypassed, %d overflows", after.BypassedPackets, after.QueueOverflows)
				}
			})
		}
	}
	all := func() {
		run("ICMP", "ip4:icmp", raw, false)
		run("ICMPv6", "ip6:ipv6-icmp", raw, true)
		run("UDP", "udp4", raw, false)
		run("UDP over IPv6", "udp6", raw, true)
		run("GRE", "ip4:47", raw, false)
		run("GRE over IPv6", "ip6:47", raw, true)
		run("ESP", "ip4:50", raw, false)
		run("ESP over IPv6", "ip6:50", raw, true)
		run("SCTP over IPv6", "ip6:132", raw, true)
		run("experiment", "ip4:253", raw, false)
		run("fragments", "udp4", big, false)
		run("IPv6 fragments", "udp6", big, true)
		run("fragments of ESP", "ip4:50", big, false)
	}
	all()
	// NAT has connection tracking put fragments of IPv4 together; here IPv6, too.
	if err := h.router.MarkConnections(1); err != nil {
		t.Logf("connections can't be tracked here: %v", err)
		return
	}
	tracked = true
	run("IPv6 fragments", "udp6", big, true)
	run("SCTP over IPv6", "ip6:132", raw, true)
}

// plainLink is fast enough to drop nothing.
func plainLink() (l plan.Link) {
	c := engine.DefaultConfig()
	c.Rate = 100 * mbit
	l.Down, l.Up = c, c
	return l
}

// TestVLAN shapes a VLAN of the router's link, whose packets have their tag when
// they are on the wire and none at the hooks.
func TestVLAN(t *testing.T) {
	h := newHome(t)
	err := errors.Join(h.router.Delete("wan"), testnet.Veth(h.router, "eth9", h.far, "eth0"))
	if err != nil {
		t.Fatal(err)
	}
	if err := h.router.VLAN("eth9", "wan", 7); err != nil {
		testnet.Skip(t, fmt.Sprintf("this kernel has no VLANs: %v", err))
	}
	err = errors.Join(
		h.far.VLAN("eth0", "eth0.7", 7),
		h.router.Addr("wan", "198.51.100.1/24", "2001:db8:ff::1/64"),
		h.far.Addr("eth0.7", "198.51.100.2/24", "2001:db8:ff::2/64"),
		h.far.Route("fd00:1::/64", "2001:db8:ff::1"),
	)
	if err != nil {
		t.Fatal(err)
	}
	kinds(t, h, "eth9")
}

// TestFault108 wants a packet in the tin of its DSCP, and one that comes without
// in the tin of its connection's mark.
func TestFault108(t *testing.T) {
	h := newHome(t)
	d := h.open(t)
	l := plainLink()
	l.Down.Tins, l.Up.Tins = engine.Diffserv4, engine.Diffserv4
	const besteffort, voice = 1, 3 // as tc shows them: bulk, best effort, video, voice
	for _, c := range []struct {
		name     string
		tos      int
		fwmark   uint32
		up, down int // tin; the answers have no DSCP
	}{
		{"no DSCP", 0, 0, besteffort, besteffort},
		{"EF", 0xb8, 0, voice, besteffort},
		{"mark of the connection", 0, 0xff00, voice, voice},
		{"bits that it does not have", 0, 0xff0000, besteffort, besteffort},
	} {
		if c.fwmark == 0xff00 {
			if err := h.router.MarkConnections(0x400); err != nil { // the fourth tin
				testnet.Skip(t, fmt.Sprintf("this kernel can't mark connections: %v", err))
			}
		}
		l.Down.Fwmark, l.Up.Fwmark = c.fwmark, c.fwmark
		apply(t, d, l)
		for _, far := range []netip.AddrPort{far4, far6} {
			t.Run(c.name+" "+far.Addr().String(), func(t *testing.T) {
				h.exchangeTOS(t, far, c.tos) // neighbours know each other now
				var before, after dataplane.Stats
				if !d.Stats(&before) {
					t.Fatal("no statistics")
				}
				h.exchangeTOS(t, far, c.tos)
				if !d.Stats(&after) {
					t.Fatal("no statistics")
				}
				up := after.Up.Tins[c.up].Packets - before.Up.Tins[c.up].Packets
				down := after.Down.Tins[c.down].Packets - before.Down.Tins[c.down].Packets
				if up < 20 || down < 20 {
					t.Errorf("%d packets up in tin %d and %d down in tin %d, want 20", up, c.up, down, c.down)
				}
			})
		}
	}
}
