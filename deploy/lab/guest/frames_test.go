package main

import (
	"encoding/binary"
	"net/netip"
	"testing"
)

// TestFrames checks that a frame's checksums are right when it is built and
// after its number has grown.
func TestFrames(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		f := frame{
			dst: wanMAC, src: gatewayMAC, size: fullFrame, ect: true,
			from: netip.AddrPortFrom(server(3, v6), 443), to: netip.AddrPortFrom(host4(2), 40000),
		}
		header := ip4Header
		if v6 {
			f.to, header = netip.AddrPortFrom(host6(2), 40000), ip6Header
		}
		b := make([]byte, 2048)
		tcp := f.build(b)
		if tcp != ethHeader+header {
			t.Fatalf("v6=%v: the TCP header is at %d", v6, tcp)
		}
		check := func(when string) {
			t.Helper()
			pseudo := uint32(6) + uint32(fullFrame-tcp)
			for _, a := range []netip.Addr{f.from.Addr(), f.to.Addr()} {
				pseudo += uint32(sum(a.AsSlice(), 0))
			}
			if s := sum(b[tcp:fullFrame], pseudo); s != 0xffff {
				t.Errorf("v6=%v %s: TCP checksum is off: %#x", v6, when, s)
			}
			if s := sum(b[ethHeader:tcp], 0); !v6 && s != 0xffff {
				t.Errorf("%s: IP checksum is off: %#x", when, s)
			}
		}
		check("built")
		for range 100_000 { // past 2^16 and 2^32
			advance(b, tcp+4, tcp+16, 0xfffe1)
		}
		check("advanced")
		if got, want := binary.BigEndian.Uint32(b[tcp+4:]), uint32((1+100_000*0xfffe1)&0xffffffff); got != want {
			t.Errorf("sequence number is %d, want %d", got, want)
		}
	}
}
