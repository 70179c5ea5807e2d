package main

import (
	"encoding/binary"
	"net/netip"
)

// The network: LAN hosts, the router, and a server behind the WAN gateway.
// Hosts and gateway are nothing but addresses that the router has permanent
// neighbour entries for; the two that ping are real.
const (
	lanRouter4, lanRouter6 = "192.168.1.1", "fd00:1::1"
	wanRouter4, wanRouter6 = "192.0.2.2", "2001:db8::2"
	gateway4, gateway6     = "192.0.2.1", "2001:db8::1"
	pinger4, pinger6       = "192.168.1.9", "fd00:1::9"
	echoer4, echoer6       = "192.0.2.9", "2001:db8::9"
	numHosts               = 4
)

type mac [6]byte

// The cards' addresses, as QEMU is told, and those of hosts that are not there.
var (
	lanMAC     = mac{2, 0, 0, 0, 1, 1}
	wanMAC     = mac{2, 0, 0, 0, 2, 1}
	pingerMAC  = mac{2, 0, 0, 0, 1, 9}
	echoerMAC  = mac{2, 0, 0, 0, 2, 9}
	gatewayMAC = mac{2, 0, 0, 0, 2, 254}
)

func hostMAC(i int) mac { return mac{2, 0, 0, 0, 1, byte(10 + i)} }

func host4(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, 1, byte(10 + i)}) }

func host6(i int) netip.Addr {
	a := netip.MustParseAddr("fd00:1::").As16()
	a[15] = byte(10 + i)
	return netip.AddrFrom16(a)
}

// server is who a flow's far end is: one of eight.
func server(i int, v6 bool) netip.Addr {
	if v6 {
		a := netip.MustParseAddr("2001:db8:ffff::").As16()
		a[15] = byte(1 + i%8)
		return netip.AddrFrom16(a)
	}
	return netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + i%8)})
}

// frame is what one kind of a TCP flow's packets looks like.
type frame struct {
	dst, src mac
	from, to netip.AddrPort
	size     int // with the Ethernet header
	ect      bool
}

// Bytes of headers.
const (
	ethHeader = 14
	ip4Header = 20
	ip6Header = 40
	tcpHeader = 32 // with timestamps
)

// build writes the frame and returns where its TCP header is. Checksums are
// right.
func (f frame) build(b []byte) (tcp int) {
	clear(b[:f.size])
	copy(b, f.dst[:])
	copy(b[6:], f.src[:])
	tos := byte(0)
	if f.ect {
		tos = 2
	}
	ip := b[ethHeader:f.size]
	var hlen int
	if f.from.Addr().Is4() {
		hlen = ip4Header
		binary.BigEndian.PutUint16(b[12:], 0x0800)
		ip[0], ip[1] = 0x45, tos
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
		ip[6], ip[8], ip[9] = 0x40, 64, 6 // don't fragment, TTL, TCP
		copy(ip[12:], f.from.Addr().AsSlice())
		copy(ip[16:], f.to.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], ^sum(ip[:hlen], 0))
	} else {
		hlen = ip6Header
		binary.BigEndian.PutUint16(b[12:], 0x86dd)
		ip[0], ip[1] = 0x60|tos>>4, tos<<4
		binary.BigEndian.PutUint16(ip[4:], uint16(len(ip)-hlen))
		ip[6], ip[7] = 6, 64
		copy(ip[8:], f.from.Addr().AsSlice())
		copy(ip[24:], f.to.Addr().AsSlice())
	}
	t := ip[hlen:]
	binary.BigEndian.PutUint16(t, f.from.Port())
	binary.BigEndian.PutUint16(t[2:], f.to.Port())
	binary.BigEndian.PutUint32(t[4:], 1)
	binary.BigEndian.PutUint32(t[8:], 1)
	t[12], t[13] = tcpHeader/4<<4, 0x10 // ACK
	binary.BigEndian.PutUint16(t[14:], 4000)
	copy(t[20:], []byte{1, 1, 8, 10}) // NOP, NOP, timestamps
	binary.BigEndian.PutUint32(t[24:], 1)
	binary.BigEndian.PutUint32(t[28:], 1)
	pseudo := uint32(6) + uint32(len(t))
	for _, a := range []netip.Addr{f.from.Addr(), f.to.Addr()} {
		s := a.AsSlice()
		for i := 0; i < len(s); i += 2 {
			pseudo += uint32(binary.BigEndian.Uint16(s[i:]))
		}
	}
	binary.BigEndian.PutUint16(t[16:], ^sum(t, pseudo))
	return ethHeader + hlen
}

// sum is the Internet checksum's sum, from a start on.
func sum(b []byte, start uint32) uint16 {
	s := start
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// advance adds n to the 32-bit number at off and mends the checksum at check
// (RFC 1624).
func advance(b []byte, off, check int, n uint32) {
	was := binary.BigEndian.Uint32(b[off:])
	is := was + n
	binary.BigEndian.PutUint32(b[off:], is)
	c := uint32(^binary.BigEndian.Uint16(b[check:])) + (^was >> 16) + (^was & 0xffff) + is>>16 + is&0xffff
	c = c&0xffff + c>>16
	c = c&0xffff + c>>16
	binary.BigEndian.PutUint16(b[check:], ^uint16(c))
}
