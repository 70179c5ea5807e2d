package enginetest

import (
	"encoding/binary"
	"math/bits"

	"github.com/cakefleet/cakefleet/engine"
)

// Placement is where a flow goes: what Dissect computes of it.
type Placement struct{ Flow, Src, Dst uint32 }

// apply replaces the hashes of p.
func (l Placement) apply(p *engine.Packet) { p.FlowHash, p.SrcHash, p.DstHash = l.Flow, l.Src, l.Dst }

// kernelPlacement is where sch_cake puts the flow of a frame without VLAN tags
// or options: SipHash-2-4 over struct flow_keys, on a little-endian 64-bit
// machine. Which flows and hosts share a slot decides the course of an overloaded
// workload, so figures can be compared only where it is the same.
func kernelPlacement(frame []byte) Placement {
	k := flowKeys{etherType: [2]byte(frame[12:])}
	l3 := frame[EthernetHeader:]
	var src, dst []byte
	if l3[0]>>4 == 4 {
		k.proto, src, dst = l3[9], l3[12:16], l3[16:20]
		k.ports = [4]byte(l3[20:])
	} else {
		k.proto, src, dst = l3[6], l3[8:24], l3[24:40]
		k.ports = [4]byte(l3[40:])
	}
	l := Placement{Flow: k.hash(src, dst)}
	k.proto, k.ports = 0, [4]byte{}
	none := make([]byte, len(src))
	l.Src, l.Dst = k.hash(src, none), k.hash(none, dst)
	return l
}

// flowKeys is what is hashed of struct flow_keys, without the addresses.
type flowKeys struct {
	etherType [2]byte
	proto     uint8
	ports     [4]byte // source, destination
}

// hash puts addresses and ports in order, each pair for itself, and hashes.
func (k flowKeys) hash(src, dst []byte) uint32 {
	if swapped(src, dst) {
		src, dst = dst, src
	}
	if swapped(k.ports[:2], k.ports[2:]) {
		k.ports = [4]byte{k.ports[2], k.ports[3], k.ports[0], k.ports[1]}
	}
	b := make([]byte, 0, 72)
	b = append(b, k.etherType[0], k.etherType[1], k.proto, 0)
	b = append(b, make([]byte, 4+8+8+4)...) // flow label, two VLAN tags, key id
	b = append(b, k.ports[:]...)
	b = append(b, make([]byte, 4)...) // ICMP
	b = append(b, src...)
	b = append(b, dst...)
	b = append(b, make([]byte, 4)...) // the structure is aligned to 8 bytes
	return max(uint32(sipHash(b)), 1)
}

// swapped says whether the kernel puts b before a: words are compared as a
// little-endian machine reads them, IPv6 addresses byte by byte.
func swapped(a, b []byte) bool {
	switch len(a) {
	case 2:
		return binary.LittleEndian.Uint16(b) < binary.LittleEndian.Uint16(a)
	case 4:
		return binary.LittleEndian.Uint32(b) < binary.LittleEndian.Uint32(a)
	}
	return string(b) < string(a)
}

// sipHash is SipHash-2-4 with the key 00 01 ... 0f.
func sipHash(b []byte) uint64 {
	const k0, k1 = 0x0706050403020100, 0x0f0e0d0c0b0a0908
	v := [4]uint64{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573}
	rounds := func(n int) {
		for range n {
			v[0] += v[1]
			v[2] += v[3]
			v[1] = bits.RotateLeft64(v[1], 13) ^ v[0]
			v[3] = bits.RotateLeft64(v[3], 16) ^ v[2]
			v[0] = bits.RotateLeft64(v[0], 32)
			v[2] += v[1]
			v[0] += v[3]
			v[1] = bits.RotateLeft64(v[1], 17) ^ v[2]
			v[3] = bits.RotateLeft64(v[3], 21) ^ v[0]
			v[2] = bits.RotateLeft64(v[2], 32)
		}
	}
	last := uint64(len(b)) << 56
	for ; len(b) >= 8; b = b[8:] {
		m := binary.LittleEndian.Uint64(b)
		v[3] ^= m
		rounds(2)
		v[0] ^= m
	}
	for i, c := range b {
		last |= uint64(c) << (8 * i)
	}
	v[3] ^= last
	rounds(2)
	v[0] ^= last
	v[2] ^= 0xff
	rounds(4)
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}
