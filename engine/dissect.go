package engine

import (
	"encoding/binary"
	"net/netip"
)

// EtherTypes and IP protocols that dissection knows.
const (
	etherIPv4   = 0x0800
	etherARP    = 0x0806
	etherTEB    = 0x6558 // Ethernet in GRE
	etherVLAN   = 0x8100
	etherIPv6   = 0x86dd
	etherMPLS   = 0x8847
	etherMPLSMC = 0x8848
	etherPPPoE  = 0x8864
	etherQinQ   = 0x88a8
	etherPPP    = 0x880b // PPP in GRE version 1 (PPTP)

	ipHopByHop = 0
	ipICMP     = 1
	ipIPIP     = 4
	ipTCP      = 6
	ipUDP      = 17
	ipDCCP     = 33
	ipIPv6     = 41
	ipRouting  = 43
	ipFragment = 44
	ipGRE      = 47
	ipESP      = 50
	ipAH       = 51
	ipICMPv6   = 58
	ipDestOpts = 60
	ipSCTP     = 132
	ipUDPLite  = 136
	ipMPLS     = 137

	pppIPv4 = 0x0021
	pppIPv6 = 0x0057
)

// maxHeaders bounds how many headers one packet is followed through; the
// kernel's number.
const maxHeaders = 15

// dissector turns the bytes of a packet into what scheduling needs of them.
// It reads only bytes that are there; what is cut off or malformed counts as
// absent.
type dissector struct {
	key keyHash

	// Masks of the hashes: all ones for those that the flow mode uses.
	flow, src, dst uint32

	keep bool // Packet.Header is wanted
}

// newDissector prepares for a configuration; the key must stay the same when
// the configuration changes, or flows would move to other queues.
func newDissector(key keyHash, c *Config) dissector {
	d := dissector{key: key, keep: c.AckFilter != AckFilterOff}
	if c.Flows&SrcHost != 0 {
		d.src = ^uint32(0)
	}
	if c.Flows&DstHost != 0 {
		d.dst = ^uint32(0)
	}
	if c.Flows&Flows != 0 {
		d.flow = ^uint32(0)
	}
	return d
}

// Dissect fills in Proto, TOS, HasTOS, Writable, the hashes that the flow mode
// uses, and, for the ACK filter, Header (which is l3 itself, not a copy). l3
// is the packet from its network header on and may be cut short: 128 bytes are
// enough for everything that is in use. Its first four bits say which IP it is.
//
// This function is in the path of every packet. It does the common ones itself,
// TCP and UDP without options, extensions and fragments, straight from the
// bytes to the hashes; network gives all others the same treatment step by
// step, and these, too (the tests compare).
func (d *dissector) Dissect(l3 []byte, p *Packet) {
	if d.keep {
		p.Header = l3
	}
	k := &d.key
	switch version := firstNibble(l3); {
	case version == 4 && len(l3) >= 24:
		h := (*[24]byte)(l3)
		const flagsOffset = 0x3f // more fragments, and the high bits of the offset
		if h[0] != 0x45 || uint32(h[6])&flagsOffset|uint32(h[7]) != 0 || h[9] != ipTCP && h[9] != ipUDP {
			d.network(l3, etherIPv4, 0, p)
			return
		}
		p.Proto, p.TOS, p.HasTOS, p.Writable = etherIPv4, h[1], true, true
		src := k.host4(binary.BigEndian.Uint32(h[12:]))
		dst := k.host4(binary.BigEndian.Uint32(h[16:]))
		ports := binary.BigEndian.Uint32(h[20:])
		// The body of set: a call would cost another twenty instructions.
		low, high := src, dst
		if src >= dst && (src > dst || ports>>16 > ports&0xffff) {
			low, high = dst, src
			ports = ports>>16 | ports<<16
		}
		p.FlowHash = max(k.flow(low, high, ports, uint32(h[9])), 1) & d.flow
		p.SrcHash = max(src, 1) & d.src
		p.DstHash = max(dst, 1) & d.dst

	case version == 6 && len(l3) >= 44:
		h := (*[44]byte)(l3)
		label := (uint32(h[1])<<16 | uint32(h[2])<<8 | uint32(h[3])) & 0xfffff
		var ports uint32
		if label == 0 { // a label stands for the ports
			if h[6] != ipTCP && h[6] != ipUDP {
				d.network(l3, etherIPv6, 0, p)
				return
			}
			ports = binary.BigEndian.Uint32(h[40:])
		}
		p.Proto, p.TOS, p.HasTOS, p.Writable = etherIPv6, h[0]<<4|h[1]>>4, true, true
		src := k.host6(binary.BigEndian.Uint32(h[8:]), binary.BigEndian.Uint32(h[12:]),
			binary.BigEndian.Uint32(h[16:]), binary.BigEndian.Uint32(h[20:]))
		dst := k.host6(binary.BigEndian.Uint32(h[24:]), binary.BigEndian.Uint32(h[28:]),
			binary.BigEndian.Uint32(h[32:]), binary.BigEndian.Uint32(h[36:]))
		d.set(p, src, dst, ports, label<<8|uint32(h[6]))

	case version == 4:
		d.network(l3, etherIPv4, 0, p)
	case version == 6:
		d.network(l3, etherIPv6, 0, p)
	default:
		d.network(l3, 0, 0, p)
	}
}

// DissectEthernet does the same for a frame that begins with its Ethernet
// header. It sees through 802.1Q and 802.1ad tags and sets NetOff.
func (d *dissector) DissectEthernet(frame []byte, p *Packet) {
	const header = 14
	if len(frame) < header {
		p.NetOff = uint16(len(frame))
		d.network(nil, 0, 0, p)
		return
	}
	proto := binary.BigEndian.Uint16(frame[12:])
	l3 := frame[header:]
	if v := firstNibble(l3); proto == etherIPv4 && v == 4 || proto == etherIPv6 && v == 6 {
		p.NetOff = header
		d.Dissect(l3, p)
		return
	}
	var vlan uint32 // of the outermost tag
	for proto == etherVLAN || proto == etherQinQ {
		if len(l3) < 4 || len(frame)-len(l3) > header+4*maxHeaders {
			proto, l3 = 0, nil
			break
		}
		if vlan == 0 {
			vlan = uint32(proto)<<16 | uint32(binary.BigEndian.Uint16(l3))&^0x1000 // without the drop eligible bit
		}
		proto = binary.BigEndian.Uint16(l3[2:])
		l3 = l3[4:]
	}
	if proto < 0x600 { // an 802.3 length
		proto = 0
	}
	p.NetOff = uint16(len(frame) - len(l3))
	d.network(l3, proto, vlan, p)
}

// network dissects any packet from its network header on. The DS field is read
// as soon as it is there; it can be changed only in a header that is whole.
func (d *dissector) network(l3 []byte, proto uint16, vlan uint32, p *Packet) {
	if d.keep {
		p.Header = l3
	}
	p.Proto = proto
	p.TOS, p.HasTOS, p.Writable = 0, false, false
	switch proto {
	case etherIPv4:
		if len(l3) >= 2 {
			p.TOS, p.HasTOS = l3[1], true
		}
		p.Writable = len(l3) >= 20
	case etherIPv6:
		if len(l3) >= 2 {
			p.TOS, p.HasTOS = l3[0]<<4|l3[1]>>4, true
		}
		p.Writable = len(l3) >= 40
	}

	p.FlowHash, p.SrcHash, p.DstHash = 0, 0, 0
	if d.flow|d.src|d.dst == 0 {
		return
	}
	var f flowKeys
	f.walk(l3, proto)
	k := &d.key
	var src, dst uint32
	switch f.family {
	case etherIPv4:
		src, dst = k.host4(f.src[0]), k.host4(f.dst[0])
	case etherIPv6:
		src = k.host6(f.src[0], f.src[1], f.src[2], f.src[3])
		dst = k.host6(f.dst[0], f.dst[1], f.dst[2], f.dst[3])
	default: // no hosts: all that tells such packets apart is their type
		p.FlowHash = max(k.extra(0, uint32(proto), vlan), 1) & d.flow
		return
	}
	if vlan != 0 {
		src, dst = k.extra(src, vlan, 0), k.extra(dst, vlan, 0)
	}
	d.set(p, src, dst, f.ports, f.label<<8|uint32(f.proto))
	if f.hasKeyID {
		p.FlowHash = max(k.extra(p.FlowHash, f.keyID, 1), 1) & d.flow
	}
}

// set stores the hashes of a flow of two hosts. Both directions of a flow get
// the same: hosts and ports are put in order together. A hash that is 0 becomes
// 1, as in the kernel, where 0 means none.
func (d *dissector) set(p *Packet, src, dst, ports, rest uint32) {
	low, high := src, dst
	if src >= dst && (src > dst || ports>>16 > ports&0xffff) {
		low, high = dst, src
		ports = ports>>16 | ports<<16
	}
	p.FlowHash = max(d.key.flow(low, high, ports, rest), 1) & d.flow
	p.SrcHash = max(src, 1) & d.src
	p.DstHash = max(dst, 1) & d.dst
}

// firstNibble returns the version of IP that b begins with, 0 if it is empty.
func firstNibble(b []byte) byte {
	if len(b) == 0 {
		return 0
	}
	return b[0] >> 4
}

// flowKeys is what identifies a flow, of the innermost headers that could be
// read.
type flowKeys struct {
	family   uint16 // etherIPv4, etherIPv6, or 0: no addresses
	proto    uint8
	hasKeyID bool
	src, dst [4]uint32 // IPv4: the first word
	ports    uint32    // source << 16 | destination; an SPI; an ICMP id, twice
	label    uint32    // IPv6 flow label
	keyID    uint32    // GRE key
}

// walk follows the headers of b, which begins with one of the given EtherType.
// It stops where the kernel's flow dissector stops for CAKE: at ports, at a
// fragment (the first one, too: all of a datagram must share a queue), at a
// flow label, and at what it does not know or what is cut off; then what has
// been found stands.
func (k *flowKeys) walk(b []byte, ether uint16) {
	for range maxHeaders {
		var next uint8
		switch ether {
		case etherIPv4:
			if len(b) < 20 || b[0]&15 < 5 {
				return
			}
			k.family, k.label = etherIPv4, 0
			k.src[0] = binary.BigEndian.Uint32(b[12:])
			k.dst[0] = binary.BigEndian.Uint32(b[16:])
			k.proto = b[9]
			if b[6]&0x3f|b[7] != 0 {
				return
			}
			next = b[9]
			b = b[min(int(b[0]&15)*4, len(b)):]
		case etherIPv6:
			if len(b) < 40 {
				return
			}
			k.family = etherIPv6
			for i := range 4 {
				k.src[i] = binary.BigEndian.Uint32(b[8+4*i:])
				k.dst[i] = binary.BigEndian.Uint32(b[24+4*i:])
			}
			k.proto = b[6]
			k.label = binary.BigEndian.Uint32(b) & 0xfffff
			if k.label != 0 {
				return
			}
			next = b[6]
			b = b[40:]
		case etherVLAN, etherQinQ: // inside of a tunnel
			if len(b) < 4 {
				return
			}
			ether = binary.BigEndian.Uint16(b[2:])
			b = b[4:]
			continue
		case etherPPPoE:
			ether, b = pppoe(b)
			continue
		case etherMPLS, etherMPLSMC:
			ether, b = mpls(b)
			continue
		default:
			return
		}
		if ether, b = k.transport(b, next); ether == 0 {
			return
		}
	}
}

// transport reads what is behind an IP header. It returns the EtherType of the
// next network header and the bytes from there if this is a tunnel, else 0.
func (k *flowKeys) transport(b []byte, proto uint8) (uint16, []byte) {
	for range maxHeaders {
		k.proto = proto
		switch proto {
		case ipTCP, ipUDP, ipUDPLite, ipSCTP, ipDCCP, ipESP:
			if len(b) >= 4 {
				k.ports = binary.BigEndian.Uint32(b)
			}
			return 0, nil
		case ipAH: // the SPI
			if len(b) >= 8 {
				k.ports = binary.BigEndian.Uint32(b[4:])
			}
			return 0, nil
		case ipICMP, ipICMPv6:
			if len(b) >= 6 && icmpHasID(proto, b[0]) {
				id := uint32(binary.BigEndian.Uint16(b[4:]))
				k.ports = id<<16 | id
			}
			return 0, nil
		case ipIPIP:
			return etherIPv4, b
		case ipIPv6:
			return etherIPv6, b
		case ipMPLS:
			return etherMPLS, b
		case ipGRE:
			return k.gre(b)
		case ipHopByHop, ipRouting, ipDestOpts:
			if k.family != etherIPv6 || len(b) < 2 {
				return 0, nil
			}
			proto = b[0]
			b = b[min((int(b[1])+1)*8, len(b)):]
		case ipFragment:
			if k.family == etherIPv6 && len(b) >= 8 {
				k.proto = b[0]
			}
			return 0, nil
		default:
			return 0, nil
		}
	}
	return 0, nil
}

// icmpHasID says whether an ICMP message has an identifier, which request and
// reply share.
func icmpHasID(proto, kind uint8) bool {
	if proto == ipICMPv6 {
		return kind == 128 || kind == 129 // echo
	}
	return kind == 0 || kind == 8 || kind == 13 || kind == 14 // echo, timestamp
}

// gre reads a GRE header (RFC 2784, 2890) or PPTP's (RFC 2637).
func (k *flowKeys) gre(b []byte) (uint16, []byte) {
	const (
		checksum = 0x80 // in the first byte
		routing  = 0x40
		key      = 0x20
		sequence = 0x10
		ack      = 0x80 // in the second byte
	)
	if len(b) < 4 {
		return 0, nil
	}
	flags, version := b[0], b[1]&7
	ether := binary.BigEndian.Uint16(b[2:])
	if flags&routing != 0 || version > 1 || version == 1 && (ether != etherPPP || flags&key == 0) {
		return 0, nil
	}
	n := 4
	if flags&checksum != 0 {
		n += 4
	}
	if flags&key != 0 {
		if len(b) < n+4 {
			return 0, nil
		}
		k.hasKeyID, k.keyID = true, binary.BigEndian.Uint32(b[n:])
		if version == 1 { // the other half is the payload's length
			k.keyID &= 0xffff
		}
		n += 4
	}
	if flags&sequence != 0 {
		n += 4
	}
	if version == 1 && b[1]&ack != 0 {
		n += 4
	}
	b = b[min(n, len(b)):]
	switch {
	case version == 1:
		if len(b) < 4 {
			return 0, nil
		}
		return pppEther(binary.BigEndian.Uint16(b[2:])), b[4:]
	case ether == etherTEB:
		if len(b) < 14 {
			return 0, nil
		}
		return binary.BigEndian.Uint16(b[12:]), b[14:]
	}
	return ether, b
}

// pppoe reads the header of a PPPoE session (RFC 2516).
func pppoe(b []byte) (uint16, []byte) {
	if len(b) < 8 || b[0] != 0x11 || b[1] != 0 {
		return 0, nil
	}
	if b[6]&1 != 0 { // the protocol field is compressed to one byte
		return pppEther(uint16(b[6])), b[7:]
	}
	return pppEther(binary.BigEndian.Uint16(b[6:])), b[8:]
}

func pppEther(proto uint16) uint16 {
	switch proto {
	case pppIPv4:
		return etherIPv4
	case pppIPv6:
		return etherIPv6
	}
	return 0
}

// mpls skips a label stack. What is behind it has no type of its own; if it
// looks like IP, it is.
func mpls(b []byte) (uint16, []byte) {
	for range maxHeaders {
		if len(b) < 5 {
			return 0, nil
		}
		bottom := b[2]&1 != 0
		b = b[4:]
		if bottom {
			switch b[0] >> 4 {
			case 4:
				return etherIPv4, b
			case 6:
				return etherIPv6, b
			}
			return 0, nil
		}
	}
	return 0, nil
}

// Tuple is one direction of a connection as connection tracking knows it.
type Tuple struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16 // 0 for protocols without
	Proto            uint8
}

// Rekey replaces the hashes of p by those of t: the addresses and ports before
// source translation, or behind destination translation, so that fairness
// between hosts means the hosts inside (the nat keyword). As in the kernel it
// is for IPv4 only; an IPv6 packet keeps the addresses that are in it. The
// caller of a data plane that sees inside addresses anyway needs no Rekey.
func (d *dissector) Rekey(t Tuple, p *Packet) {
	from, to := t.Src.Unmap(), t.Dst.Unmap()
	if !from.Is4() || !to.Is4() {
		return
	}
	a, b := from.As4(), to.As4()
	src := d.key.host4(binary.BigEndian.Uint32(a[:]))
	dst := d.key.host4(binary.BigEndian.Uint32(b[:]))
	d.set(p, src, dst, uint32(t.SrcPort)<<16|uint32(t.DstPort), uint32(t.Proto))
}
