package enginetest

import (
	"encoding/binary"
	"net/netip"
)

// EthernetHeader is the length of the link-layer header of every frame made
// here, bytes.
const EthernetHeader = 14

// IP protocol numbers of the flows that can be made.
const (
	TCPProto = 6
	UDPProto = 17
)

// Flow is what the packets of one flow have in common.
type Flow struct {
	Src, Dst         netip.Addr // both IPv4 or both IPv6
	Proto            uint8      // TCPProto or UDPProto
	SrcPort, DstPort uint16
	TOS              uint8  // DS field: DSCP << 2 | ECN
	Options          []byte // TCP options, a multiple of 4 bytes, at most 40
}

// AppendFrame appends the headers of a frame of size bytes (Ethernet header
// included): Ethernet, IPv4 or IPv6, and TCP with nothing but ACK set or UDP.
// The payload is not written, so the result is shorter than size unless the
// packet has none.
func (f Flow) AppendFrame(b []byte, size int) []byte {
	b = append(b, 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1)
	l3 := size - EthernetHeader
	if f.Src.Is4() {
		b = append(b, 0x08, 0x00)
		b = f.appendIPv4(b, l3)
		l3 -= 20
	} else {
		b = append(b, 0x86, 0xdd)
		b = f.appendIPv6(b, l3-40)
		l3 -= 40
	}
	b = binary.BigEndian.AppendUint16(b, f.SrcPort)
	b = binary.BigEndian.AppendUint16(b, f.DstPort)
	if f.Proto == UDPProto {
		b = binary.BigEndian.AppendUint16(b, uint16(l3))
		return append(b, 0, 0) // no checksum
	}
	const ackFlag, window = 0x10, 65535
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	b = append(b, byte(5+len(f.Options)/4)<<4, ackFlag)
	b = binary.BigEndian.AppendUint16(b, window)
	b = append(b, 0, 0, 0, 0)
	return append(b, f.Options...)
}

func (f Flow) appendIPv4(b []byte, total int) []byte {
	src, dst := f.Src.As4(), f.Dst.As4()
	h := len(b)
	b = append(b, 0x45, f.TOS)
	b = binary.BigEndian.AppendUint16(b, uint16(total))
	b = append(b, 0, 0, 0x40, 0, 64, f.Proto, 0, 0) // don't fragment, TTL 64
	b = append(b, src[:]...)
	b = append(b, dst[:]...)
	binary.BigEndian.PutUint16(b[h+10:], ipv4Checksum(b[h:]))
	return b
}

func (f Flow) appendIPv6(b []byte, payload int) []byte {
	src, dst := f.Src.As16(), f.Dst.As16()
	b = append(b, 0x60|f.TOS>>4, f.TOS<<4, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(payload))
	b = append(b, f.Proto, 64)
	b = append(b, src[:]...)
	return append(b, dst[:]...)
}

// ipv4Checksum sums a header whose checksum field is zero.
func ipv4Checksum(h []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
