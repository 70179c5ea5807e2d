package engine

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Builders of headers. Each takes what is inside and puts itself in front.

func ports(src, dst uint16, rest ...byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, src)
	b = binary.BigEndian.AppendUint16(b, dst)
	return append(b, rest...)
}

func ip4(src, dst string, proto, tos byte, payload []byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	b[0], b[1], b[8], b[9] = 0x45, tos, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	copy(b[12:], netip.MustParseAddr(src).AsSlice())
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

func ip6(src, dst string, next, tclass byte, label uint32, payload []byte) []byte {
	b := make([]byte, 40, 40+len(payload))
	binary.BigEndian.PutUint32(b, 6<<28|uint32(tclass)<<20|label)
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	b[6], b[7] = next, 64
	copy(b[8:], netip.MustParseAddr(src).AsSlice())
	copy(b[24:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

// ether puts an Ethernet header in front; types are the EtherTypes of the
// tags (with tag 100+i) and then of the payload.
func ether(payload []byte, types ...uint16) []byte {
	b := []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2}
	for i, t := range types {
		b = binary.BigEndian.AppendUint16(b, t)
		if i < len(types)-1 {
			b = binary.BigEndian.AppendUint16(b, uint16(100+i))
		}
	}
	return append(b, payload...)
}

func pppoeSession(proto uint16, payload []byte) []byte {
	b := []byte{0x11, 0, 0, 7, 0, byte(len(payload) + 2)}
	b = binary.BigEndian.AppendUint16(b, proto)
	return append(b, payload...)
}

var tcpRest = []byte{0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0}

func tcp(src, dst uint16) []byte { return ports(src, dst, tcpRest...) }
func udp(src, dst uint16) []byte { return ports(src, dst, 0, 8, 0, 0) }

func testDissector(mode FlowMode) *dissector {
	c := DefaultConfig()
	c.Flows = mode
	d := newDissector(newKeyHash(42), &c)
	return &d
}

func dissect(l3 []byte) (p Packet) {
	testDissector(TripleIsolate).Dissect(l3, &p)
	return p
}

func dissectFrame(frame []byte) (p Packet) {
	testDissector(TripleIsolate).DissectEthernet(frame, &p)
	return p
}

const (
	a4, b4, c4 = "10.0.0.1", "198.51.100.7", "10.0.0.2"
	a6, b6     = "2001:db8::1", "2001:db8:ffff::7"
)

// Both directions of a connection share a queue, and their hosts change places.
func TestFlowHashIsSymmetric(t *testing.T) {
	for name, pair := range map[string][2][]byte{
		"IPv4 TCP":       {ip4(a4, b4, ipTCP, 0, tcp(40000, 443)), ip4(b4, a4, ipTCP, 0, tcp(443, 40000))},
		"IPv6 UDP":       {ip6(a6, b6, ipUDP, 0, 0, udp(5000, 53)), ip6(b6, a6, ipUDP, 0, 0, udp(53, 5000))},
		"same host":      {ip4(a4, a4, ipTCP, 0, tcp(40000, 443)), ip4(a4, a4, ipTCP, 0, tcp(443, 40000))},
		"ICMP echo":      {ip4(a4, b4, ipICMP, 0, []byte{8, 0, 0, 0, 0x12, 0x34}), ip4(b4, a4, ipICMP, 0, []byte{0, 0, 0, 0, 0x12, 0x34})},
		"ICMPv6 echo":    {ip6(a6, b6, ipICMPv6, 0, 0, []byte{128, 0, 0, 0, 0x12, 0x34}), ip6(b6, a6, ipICMPv6, 0, 0, []byte{129, 0, 0, 0, 0x12, 0x34})},
		"IPv4 fragments": {fragment(ip4(a4, b4, ipUDP, 0, udp(1, 2)), 0x2000), fragment(ip4(b4, a4, ipUDP, 0, udp(2, 1)), 0x0010)},
	} {
		there, back := dissect(pair[0]), dissect(pair[1])
		if there.FlowHash != back.FlowHash || there.FlowHash == 0 {
			t.Errorf("%s: flow hashes %08x and %08x, want equal and not 0", name, there.FlowHash, back.FlowHash)
		}
		if there.SrcHash != back.DstHash || there.DstHash != back.SrcHash || there.SrcHash == 0 || there.DstHash == 0 {
			t.Errorf("%s: host hashes %08x %08x and %08x %08x, want swapped", name, there.SrcHash, there.DstHash, back.SrcHash, back.DstHash)
		}
	}
}

func fragment(l3 []byte, flagsOffset uint16) []byte {
	binary.BigEndian.PutUint16(l3[6:], flagsOffset)
	return l3
}

// What tells flows apart, and what does not.
func TestFlowKeys(t *testing.T) {
	plain := ip4(a4, b4, ipTCP, 0, tcp(40000, 443))
	for _, c := range []struct {
		name string
		a, b []byte
		same bool
	}{
		{"source port", plain, ip4(a4, b4, ipTCP, 0, tcp(40001, 443)), false},
		{"destination port", plain, ip4(a4, b4, ipTCP, 0, tcp(40000, 444)), false},
		{"source", plain, ip4(c4, b4, ipTCP, 0, tcp(40000, 443)), false},
		{"destination", plain, ip4(a4, c4, ipTCP, 0, tcp(40000, 443)), false},
		{"ports exchanged", plain, ip4(a4, b4, ipTCP, 0, tcp(443, 40000)), false},
		{"protocol", plain, ip4(a4, b4, ipUDP, 0, tcp(40000, 443)), false},
		{"DS field", plain, ip4(a4, b4, ipTCP, 0xb8, tcp(40000, 443)), true},
		{"payload", plain, ip4(a4, b4, ipTCP, 0, append(tcp(40000, 443), 1, 2, 3)), true},
		{"first fragment and whole", plain, fragment(ip4(a4, b4, ipTCP, 0, tcp(40000, 443)), 0x2000), false},
		{
			"first and later fragment",
			fragment(ip4(a4, b4, ipTCP, 0, tcp(40000, 443)), 0x2000),
			fragment(ip4(a4, b4, ipTCP, 0, tcp(1, 2)), 0x00b9), true,
		},
		{"don't fragment", plain, fragment(ip4(a4, b4, ipTCP, 0, tcp(40000, 443)), 0x4000), true},
		{"IPv4 options", plain, withOptions(plain, 8), true},
		{"IPv4 options, other port", plain, withOptions(ip4(a4, b4, ipTCP, 0, tcp(9, 443)), 8), false},
		{
			"IPv6 fragments",
			ip6(a6, b6, ipFragment, 0, 0, append([]byte{ipUDP, 0, 0, 1, 0, 0, 0, 9}, udp(1, 2)...)),
			ip6(a6, b6, ipFragment, 0, 0, append([]byte{ipUDP, 0, 1, 0, 0, 0, 0, 9}, udp(3, 4)...)), true,
		},
		{
			"IPv6 fragment and whole",
			ip6(a6, b6, ipFragment, 0, 0, append([]byte{ipUDP, 0, 0, 1, 0, 0, 0, 9}, udp(1, 2)...)),
			ip6(a6, b6, ipUDP, 0, 0, udp(1, 2)), false,
		},
		{
			"IPv6 extension headers",
			ip6(a6, b6, ipUDP, 0, 0, udp(1, 2)),
			ip6(a6, b6, ipHopByHop, 0, 0, append([]byte{ipDestOpts, 0, 1, 4, 0, 0, 0, 0, ipUDP, 1, 1, 12, 23: 0}, udp(1, 2)...)), true,
		},
		{"ICMP id", ip4(a4, b4, ipICMP, 0, []byte{8, 0, 0, 0, 0, 1}), ip4(a4, b4, ipICMP, 0, []byte{8, 0, 0, 0, 0, 2}), false},
		{"ICMP error", ip4(a4, b4, ipICMP, 0, []byte{3, 1, 0, 0, 0, 1}), ip4(a4, b4, ipICMP, 0, []byte{3, 1, 0, 0, 0, 2}), true},
		{"ESP SPI", ip4(a4, b4, ipESP, 0, []byte{0, 0, 0, 1, 0}), ip4(a4, b4, ipESP, 0, []byte{0, 0, 0, 2, 0}), false},
		{"AH SPI", ip4(a4, b4, ipAH, 0, []byte{6, 4, 0, 0, 0, 0, 0, 1}), ip4(a4, b4, ipAH, 0, []byte{6, 4, 0, 0, 0, 0, 0, 2}), false},
		{"ARP", nil, nil, true},
		{"IPv4 in IPv4", plain, ip4("1.1.1.1", "2.2.2.2", ipIPIP, 0, plain), true},
		{"IPv4 in IPv6", plain, ip6(a6, b6, ipIPIP, 0, 0, plain), true},
		{"IPv6 in IPv6", ip6(a6, b6, ipUDP, 0, 0, udp(1, 2)), ip6("::1", "::2", ipIPv6, 0, 0, ip6(a6, b6, ipUDP, 0, 0, udp(1, 2))), true},
		{"GRE", plain, ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x90, 0, 8, 0, 1, 1, 0, 0, 0, 0, 0, 9}, plain...)), true},
		{"GRE with Ethernet", plain, ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0, 0, 0x65, 0x58}, ether(plain, etherVLAN, etherIPv4)...)), true},
		{
			"GRE keys",
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 0, 8, 0, 0, 0, 0, 1}, plain...)),
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 0, 8, 0, 0, 0, 0, 2}, plain...)), false,
		},
		{
			"PPTP payload lengths",
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 0x81, 0x88, 0x0b, 0, 1, 0, 5, 0, 0, 0, 1, 0xff, 3, 0, 0x21}, plain...)),
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 0x81, 0x88, 0x0b, 0, 2, 0, 5, 0, 0, 0, 9, 0xff, 3, 0, 0x21}, plain...)), true,
		},
		{
			"PPTP calls",
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 1, 0x88, 0x0b, 0, 1, 0, 5, 0xff, 3, 0, 0x21}, plain...)),
			ip4("1.1.1.1", "2.2.2.2", ipGRE, 0, append([]byte{0x20, 1, 0x88, 0x0b, 0, 1, 0, 6, 0xff, 3, 0, 0x21}, plain...)), false,
		},
		{"MPLS in IPv4", plain, ip4("1.1.1.1", "2.2.2.2", ipMPLS, 0, append([]byte{0, 1, 0, 64, 0, 2, 1, 64}, plain...)), true},
	} {
		a, b := dissect(c.a), dissect(c.b)
		if (a.FlowHash == b.FlowHash) != c.same {
			t.Errorf("%s: flow hashes %08x and %08x, want the same: %v", c.name, a.FlowHash, b.FlowHash, c.same)
		}
		if c.same && (a.SrcHash != b.SrcHash || a.DstHash != b.DstHash) {
			t.Errorf("%s: host hashes %08x %08x and %08x %08x, want the same", c.name, a.SrcHash, a.DstHash, b.SrcHash, b.DstHash)
		}
	}
}

func withOptions(l3 []byte, n int) []byte {
	b := append(append([]byte{}, l3[:20]...), make([]byte, n)...)
	b[0] += byte(n / 4)
	return append(b, l3[20:]...)
}

// What is not IP has no hosts, and is told apart by its type and VLAN only.
func TestNonIPHasNoHosts(t *testing.T) {
	arp, other := dissectFrame(ether(make([]byte, 28), etherARP)), dissectFrame(ether(make([]byte, 28), 0x88cc))
	for _, p := range []Packet{arp, other} {
		if p.SrcHash != 0 || p.DstHash != 0 || p.HasTOS || p.Writable || p.FlowHash == 0 {
			t.Errorf("type %04x: got %+v, want only a flow hash", p.Proto, p)
		}
	}
	if arp.Proto != etherARP || arp.FlowHash == other.FlowHash {
		t.Errorf("ARP: type %04x, flow hash %08x, the other's is %08x", arp.Proto, arp.FlowHash, other.FlowHash)
	}
	if p := dissectFrame(ether(make([]byte, 40), 40)); p.Proto != 0 || p.NetOff != 14 { // 802.3 length
		t.Errorf("802.3 frame: type %04x offset %d, want 0 and 14", p.Proto, p.NetOff)
	}
}

func TestHashesByFlowMode(t *testing.T) {
	l3 := ip4(a4, b4, ipTCP, 2, tcp(40000, 443))
	all := dissect(l3)
	odd := withOptions(l3, 4) // takes the long way
	for mode := FlowBlind; mode <= TripleIsolate; mode++ {
		want := all
		if mode < Flows {
			want.FlowHash = 0
		}
		if mode&1 == 0 {
			want.SrcHash = 0
		}
		if mode&2 == 0 {
			want.DstHash = 0
		}
		for _, b := range [][]byte{l3, odd} {
			got := Packet{FlowHash: 9, SrcHash: 9, DstHash: 9}
			testDissector(mode).Dissect(b, &got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%v (-want +got):\n%s", mode, diff)
			}
		}
	}
}

// The DS field is read from two bytes on, and writable when the header is whole.
func TestTruncatedHeaders(t *testing.T) {
	four, six := ip4(a4, b4, ipTCP, 0xb9, tcp(1, 2)), ip6(a6, b6, ipTCP, 0xb9, 0, tcp(1, 2))
	for _, c := range []struct {
		b     []byte
		whole int
	}{{four, 20}, {six, 40}} {
		for n := range len(c.b) + 1 {
			p := dissect(c.b[:n:n])
			if has := n >= 2; p.HasTOS != has || has && p.TOS != 0xb9 || !has && p.TOS != 0 {
				t.Errorf("%d bytes: TOS %v %02x", n, p.HasTOS, p.TOS)
			}
			if p.Writable != (n >= c.whole) {
				t.Errorf("%d bytes: writable %v", n, p.Writable)
			}
			if hosts := n >= c.whole; (p.SrcHash != 0) != hosts || (p.DstHash != 0) != hosts {
				t.Errorf("%d bytes: host hashes %08x %08x", n, p.SrcHash, p.DstHash)
			}
			if whole := dissect(c.b).FlowHash; (p.FlowHash == whole) != (n >= c.whole+4) {
				t.Errorf("%d bytes: flow hash %08x, of the whole packet %08x", n, p.FlowHash, whole)
			}
		}
	}
}

// The short way for common packets and the long way must agree.
func TestFastPathAgreesWithWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range 50_000 {
		b := make([]byte, rng.IntN(80))
		for j := range b {
			b[j] = byte(rng.Uint32())
		}
		if len(b) > 0 && i%2 == 0 {
			b[0] = 0x45
			if len(b) > 9 && i%4 == 0 {
				b[9], b[6], b[7] = ipUDP, b[6]&0x40, 0
			}
		} else if len(b) > 6 {
			b[0] = 0x60 | b[0]&15
			if i%4 == 1 {
				b[1], b[2], b[3], b[6] = b[1]&0xf0, 0, 0, ipTCP
			}
		}
		d := testDissector(FlowMode(rng.IntN(8)))
		var fast, slow Packet
		d.Dissect(b, &fast)
		d.network(b, fast.Proto, 0, &slow)
		if diff := cmp.Diff(slow, fast); diff != "" {
			t.Fatalf("% x (-long +short):\n%s", b, diff)
		}
	}
}

// Fault 48: the DS field behind one tag or two.
func TestFault048_DSFieldBehindVLAN(t *testing.T) {
	l3 := ip4(a4, b4, ipUDP, 46<<2, udp(1, 2))
	for _, c := range []struct {
		types []uint16
		off   uint16
	}{
		{[]uint16{etherIPv4}, 14},
		{[]uint16{etherVLAN, etherIPv4}, 18},
		{[]uint16{etherQinQ, etherIPv4}, 18},
		{[]uint16{etherQinQ, etherVLAN, etherIPv4}, 22},
	} {
		p := dissectFrame(ether(l3, c.types...))
		if !p.HasTOS || p.TOS>>2 != 46 || p.Proto != etherIPv4 || p.NetOff != c.off || !p.Writable {
			t.Errorf("types %04x: got %+v, want DSCP 46 at %d", c.types, p, c.off)
		}
	}
}

// Fault 51 (CVE-2026-74704): malformed and cut headers do no harm, whatever
// they claim. FuzzDissect goes on from here.
func TestFault051_MalformedHeaders(t *testing.T) {
	whole := [][]byte{
		ether(ip4(a4, b4, ipIPv6, 0, ip6(a6, b6, ipHopByHop, 0, 0, append([]byte{ipTCP, 0, 0, 0, 0, 0, 0, 0}, tcp(1, 2)...))), etherQinQ, etherVLAN, etherIPv4),
		ether(ip4(a4, b4, ipGRE, 0, append([]byte{0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2}, ether(pppoeSession(pppIPv6, ip6(a6, b6, ipUDP, 0, 0, udp(1, 2))), etherPPPoE)...)), etherIPv4),
		ether(pppoeSession(pppIPv4, ip4(a4, b4, ipAH, 0, make([]byte, 12))), etherPPPoE),
		ether(append([]byte{0, 1, 1, 64}, ip4(a4, b4, ipICMP, 0, []byte{8, 0, 0, 0, 1, 2})...), etherMPLS),
	}
	rng := rand.New(rand.NewPCG(9, 10))
	d := testDissector(TripleIsolate)
	d.keep = true
	for _, w := range whole {
		for n := range len(w) + 1 {
			for range 40 {
				b := append([]byte(nil), w[:n]...)
				if n > 12 {
					b[12+rng.IntN(n-12)] = byte(rng.Uint32())
				}
				var p Packet
				d.DissectEthernet(b[:n:n], &p)
				if int(p.NetOff) > n || len(p.Header) > n-int(p.NetOff) {
					t.Fatalf("% x: network header at %d, %d bytes", b, p.NetOff, len(p.Header))
				}
			}
		}
	}
	// Header lengths that lie: IPv4 with 16 bytes, options past the end, an
	// extension header past the end.
	short := ip4(a4, b4, ipTCP, 0, tcp(1, 2))
	short[0] = 0x44
	if p := dissect(short); p.SrcHash != 0 || p.FlowHash == 0 {
		t.Errorf("IPv4 header of 16 bytes: got %+v, want no hosts", p)
	}
	long := ip4(a4, b4, ipTCP, 0, tcp(1, 2)[:8])
	long[0] = 0x4f
	if p := dissect(long); p.SrcHash == 0 || p.FlowHash == dissect(ip4(a4, b4, ipTCP, 0, tcp(1, 2))).FlowHash {
		t.Errorf("IPv4 options past the end: got %+v, want hosts and no ports", p)
	}
	if p := dissect(ip6(a6, b6, ipRouting, 0, 0, []byte{ipTCP, 255, 0, 0})); p.SrcHash == 0 {
		t.Errorf("extension header past the end: got %+v, want hosts", p)
	}
}

// Fault 60: after destination translation, the inside ports count, when the
// caller gives them.
func TestFault060_TranslatedPorts(t *testing.T) {
	d := testDissector(TripleIsolate)
	inside := dissect(ip4("203.0.113.9", "192.168.1.10", ipTCP, 0, tcp(55555, 8080)))
	var p Packet
	d.Dissect(ip4("203.0.113.9", "198.51.100.1", ipTCP, 0, tcp(55555, 80)), &p)
	if p.FlowHash == inside.FlowHash || p.DstHash == inside.DstHash {
		t.Fatal("outside and inside hash alike")
	}
	d.Rekey(Tuple{
		Src: netip.MustParseAddr("203.0.113.9"), Dst: netip.MustParseAddr("192.168.1.10"),
		SrcPort: 55555, DstPort: 8080, Proto: ipTCP,
	}, &p)
	if p.FlowHash != inside.FlowHash || p.SrcHash != inside.SrcHash || p.DstHash != inside.DstHash {
		t.Errorf("got %08x %08x %08x, want those of the inside addresses %08x %08x %08x",
			p.FlowHash, p.SrcHash, p.DstHash, inside.FlowHash, inside.SrcHash, inside.DstHash)
	}
}

// Fault 62: IPv6 is not translated back; NPT and NAT66 flows count with the
// addresses that are in the packet.
func TestFault062_NATIsIPv4Only(t *testing.T) {
	d := testDissector(TripleIsolate)
	var p Packet
	d.Dissect(ip6(a6, b6, ipTCP, 0, 0, tcp(1, 2)), &p)
	before := p
	d.Rekey(Tuple{Src: netip.MustParseAddr("fd00::1"), Dst: netip.MustParseAddr(b6), SrcPort: 1, DstPort: 2, Proto: ipTCP}, &p)
	if diff := cmp.Diff(before, p); diff != "" {
		t.Errorf("Rekey with IPv6 changed the packet:\n%s", diff)
	}
}

// Fault 63: a WireGuard tunnel seen from outside is one flow, its inner flows
// are many when shaping inside.
func TestFault063_WireGuard(t *testing.T) {
	outer := func(payload byte) Packet {
		return dissect(ip4(a4, b4, ipUDP, 0, append(udp(51820, 51820), 4, 0, 0, 0, payload)))
	}
	if outer(1).FlowHash != outer(2).FlowHash {
		t.Error("two packets of one tunnel hash apart")
	}
	inner := func(port uint16) Packet { return dissect(ip4("10.9.0.2", "10.9.0.1", ipTCP, 0, tcp(port, 443))) }
	if inner(1).FlowHash == inner(2).FlowHash {
		t.Error("two flows inside hash alike")
	}
}

// Fault 67: the inner IP of QinQ is found.
func TestFault067_QinQ(t *testing.T) {
	frame := func(port uint16) Packet {
		return dissectFrame(ether(ip4(a4, b4, ipTCP, 0, tcp(port, 443)), etherQinQ, etherVLAN, etherIPv4))
	}
	if a, b := frame(1), frame(2); a.FlowHash == b.FlowHash || a.SrcHash == 0 || a.SrcHash != b.SrcHash {
		t.Errorf("two flows behind two tags: %08x and %08x, source %08x", a.FlowHash, b.FlowHash, a.SrcHash)
	}
	// The outer tag is part of the key, as in the kernel, but not its DEI bit.
	tagged, dei := ether(ip4(a4, b4, ipTCP, 0, tcp(1, 443)), etherVLAN, etherIPv4), ether(ip4(a4, b4, ipTCP, 0, tcp(1, 443)), etherVLAN, etherIPv4)
	dei[14] |= 0x10
	if a, b := dissectFrame(tagged), dissectFrame(dei); a.FlowHash != b.FlowHash {
		t.Errorf("drop eligible bit: %08x and %08x, want the same", a.FlowHash, b.FlowHash)
	}
	if a, b := dissectFrame(tagged), dissect(tagged[18:]); a.FlowHash == b.FlowHash || a.SrcHash == b.SrcHash {
		t.Error("a tagged and an untagged flow hash alike")
	}
}

// Fault 68: the flows of one PPPoE session are apart. The frame itself has no
// DS field, as for the kernel.
func TestFault068_PPPoE(t *testing.T) {
	frame := func(port uint16) Packet {
		return dissectFrame(ether(pppoeSession(pppIPv4, ip4(a4, b4, ipTCP, 0xb8, tcp(port, 443))), etherPPPoE))
	}
	a, b := frame(1), frame(2)
	if a.FlowHash == b.FlowHash {
		t.Errorf("both flows hash to %08x", a.FlowHash)
	}
	if plain := dissect(ip4(a4, b4, ipTCP, 0xb8, tcp(1, 443))); a.FlowHash != plain.FlowHash || a.SrcHash != plain.SrcHash {
		t.Errorf("in PPPoE %08x %08x, plain %08x %08x, want the same", a.FlowHash, a.SrcHash, plain.FlowHash, plain.SrcHash)
	}
	if a.HasTOS || a.Proto != etherPPPoE || a.NetOff != 14 {
		t.Errorf("got %+v, want no DS field, and the type of PPPoE", a)
	}
	six := func(proto uint16, cut int) Packet {
		s := pppoeSession(proto, ip6(a6, b6, ipTCP, 0, 0, tcp(1, 443)))
		return dissectFrame(ether(append(s[:6:6], s[6+cut:]...), etherPPPoE))
	}
	if a, b := six(pppIPv6, 0), six(pppIPv6, 1); a.FlowHash != b.FlowHash || a.SrcHash == 0 {
		t.Errorf("compressed protocol: %08x and %08x, want the same", a.FlowHash, b.FlowHash)
	}
}

// Fault 69: a flow label stands for the ports, so two connections with the
// same label share a queue. That is the kernel's rule.
func TestFault069_FlowLabel(t *testing.T) {
	p := func(label uint32, port uint16) uint32 {
		return dissect(ip6(a6, b6, ipTCP, 0, label, tcp(port, 443))).FlowHash
	}
	if p(0x12345, 1) != p(0x12345, 2) {
		t.Error("equal labels, different ports: hash apart")
	}
	if p(0x12345, 1) == p(0x12346, 1) {
		t.Error("different labels: hash alike")
	}
	if p(0, 1) == p(0, 2) {
		t.Error("no labels, different ports: hash alike")
	}
}

// Fault 102: the flows inside of a 6in4 tunnel are apart.
func TestFault102_6in4(t *testing.T) {
	p := func(port uint16) Packet {
		return dissect(ip4("192.0.2.1", "192.0.2.2", ipIPv6, 0x28, ip6(a6, b6, ipTCP, 0, 0, tcp(port, 443))))
	}
	a, b := p(1), p(2)
	inner := dissect(ip6(a6, b6, ipTCP, 0, 0, tcp(1, 443)))
	if a.FlowHash == b.FlowHash || a.FlowHash != inner.FlowHash || a.SrcHash != inner.SrcHash {
		t.Errorf("got %08x and %08x, want two flows with the hashes of what is inside", a.FlowHash, b.FlowHash)
	}
	if a.TOS != 0x28 || a.Proto != etherIPv4 {
		t.Errorf("got TOS %02x type %04x, want those of the outer header", a.TOS, a.Proto)
	}
}

// A chain of tunnels without end is not followed for ever.
func TestDissectionIsBounded(t *testing.T) {
	b := tcp(1, 2)
	for range 40 {
		b = ip4(a4, b4, ipIPIP, 0, b)
	}
	c := append([]byte(nil), b...)
	c[len(c)-len(tcp(1, 2))] ^= 0xff // the port at the bottom
	if x, y := dissect(b), dissect(c); x.FlowHash != y.FlowHash {
		t.Error("40 nested headers were followed to the end")
	}
	chain := udp(1, 2)
	for range 40 {
		chain = append([]byte{ipDestOpts, 0, 0, 0, 0, 0, 0, 0}, chain...)
	}
	if p := dissect(ip6(a6, b6, ipDestOpts, 0, 0, chain)); p.SrcHash == 0 {
		t.Error("hosts in front of 40 extension headers are not found")
	}
}

// Neighbouring addresses and ports, which are what a router sees, spread over
// the 1024 queues like random numbers: chi square within 6 sigma.
func TestHashesSpread(t *testing.T) {
	const slots, n = 1024, 64 * 1024
	kinds := map[string]func(i int) uint32{}
	d := testDissector(TripleIsolate)
	flow := func(l3 func(i int) []byte) func(i int) uint32 {
		return func(i int) uint32 { var p Packet; d.Dissect(l3(i), &p); return p.FlowHash }
	}
	kinds["ports"] = flow(func(i int) []byte { return ip4(a4, b4, ipTCP, 0, tcp(uint16(i), 443)) })
	kinds["addresses"] = flow(func(i int) []byte {
		b := ip4(a4, b4, ipTCP, 0, tcp(40000, 443))
		binary.BigEndian.PutUint16(b[14:], uint16(i))
		return b
	})
	kinds["source hosts"] = func(i int) uint32 { return d.key.host4(10<<24 + uint32(i)) }
	kinds["networks"] = func(i int) uint32 { return d.key.host4(uint32(i) << 16) }
	kinds["IPv6 hosts"] = func(i int) uint32 { return d.key.host6(0x20010db8, uint32(i)<<8, 0, 1) }
	kinds["IPv6 interfaces"] = func(i int) uint32 { return d.key.host6(0x20010db8, 0, 0, uint32(i)) }
	kinds["IPv6 labels"] = flow(func(i int) []byte { return ip6(a6, b6, ipTCP, 0, uint32(i)+1, tcp(1, 2)) })
	for name, hash := range kinds {
		for _, shift := range []int{0, 10, 22} {
			var count [slots]int
			for i := range n {
				count[hash(i)>>shift%slots]++
			}
			chi2 := 0.0
			for _, c := range count {
				diff := float64(c) - n/slots
				chi2 += diff * diff / (n / slots)
			}
			const mean, sigma = slots - 1, 45.2 // sqrt(2 * mean)
			if chi2 > mean+6*sigma {
				t.Errorf("%s, bits from %d: chi square %.0f, want about %d", name, shift, chi2, mean)
			}
		}
	}
}

func TestDissectDoesNotAllocate(t *testing.T) {
	d := testDissector(TripleIsolate)
	d.keep = true
	frames := [][]byte{
		ether(ip4(a4, b4, ipTCP, 0, tcp(1, 2)), etherIPv4),
		ether(ip6(a6, b6, ipIPv6, 0, 0, ip6(a6, b6, ipUDP, 0, 0, udp(1, 2))), etherVLAN, etherIPv6),
	}
	var p Packet
	if n := testing.AllocsPerRun(100, func() {
		for _, f := range frames {
			d.DissectEthernet(f, &p)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzDissect(f *testing.F) {
	f.Add(ether(ip4(a4, b4, ipTCP, 0, tcp(40000, 443)), etherIPv4))
	f.Add(ether(ip6(a6, b6, ipHopByHop, 0xb8, 0, append([]byte{ipTCP, 0, 0, 0, 0, 0, 0, 0}, tcp(1, 2)...)), etherQinQ, etherVLAN, etherIPv6))
	f.Add(ether(pppoeSession(pppIPv4, ip4(a4, b4, ipGRE, 0, append([]byte{0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2}, ether(ip4(a4, b4, ipAH, 0, make([]byte, 12)), etherIPv4)...))), etherPPPoE))
	f.Add(ether(ip4(a4, b4, ipGRE, 0, append([]byte{0x20, 0x81, 0x88, 0x0b, 0, 1, 0, 5, 0, 0, 0, 1, 0xff, 3, 0, 0x57}, ip6(a6, b6, ipFragment, 0, 0, []byte{ipUDP, 0, 0, 1, 0, 0, 0, 9})...)), etherIPv4))
	f.Add(ether(append([]byte{0, 1, 0, 64, 0, 1, 1, 64}, ip4(a4, b4, ipICMP, 0, []byte{8, 0, 0, 0, 1, 2})...), etherMPLS))
	f.Fuzz(func(t *testing.T, frame []byte) {
		d := testDissector(TripleIsolate)
		d.keep = true
		var p, q Packet
		d.DissectEthernet(frame, &p)
		// Nothing behind the end may be looked at.
		longer := append(append(make([]byte, 0, len(frame)+64), frame...), make([]byte, 64)...)
		for i := len(frame); i < len(longer); i++ {
			longer[i] = 0xa5
		}
		d.DissectEthernet(longer[:len(frame)], &q)
		p.Header, q.Header = nil, nil
		if diff := cmp.Diff(p, q); diff != "" {
			t.Fatalf("depends on what is behind the frame:\n%s", diff)
		}
		if len(frame) >= 14 {
			l3 := frame[p.NetOff:]
			var r Packet
			d.Dissect(l3, &r)
			if len(l3) >= 40 && (p.Proto == etherIPv4 && l3[0]>>4 == 4 || p.Proto == etherIPv6 && l3[0]>>4 == 6) && p.NetOff == 14 {
				r.Header, r.NetOff = nil, 14
				if diff := cmp.Diff(p, r); diff != "" {
					t.Fatalf("from Ethernet and from the network header (-Ethernet +network):\n%s", diff)
				}
			}
		}
		if (p.SrcHash == 0) != (p.DstHash == 0) || p.FlowHash == 0 {
			t.Fatalf("hashes %08x %08x %08x", p.FlowHash, p.SrcHash, p.DstHash)
		}
	})
}
