package engine

import "encoding/binary"

// The ACK filter thins out TCP acknowledgements that a later one in the same
// queue makes redundant. What it has to know of a queued packet is read from
// its headers once, when it is enqueued.

// TCP header bits: byte 12 holds 4 reserved bits, byte 13 the flags.
const (
	tcpFIN  = 0x01
	tcpSYN  = 0x02
	tcpACK  = 0x10
	tcpEcho = 0xc0 // CWR and ECE

	optEnd       = 0
	optNop       = 1
	optSACK      = 5
	optTimestamp = 8
	optMD5       = 19
)

// ackInfo is what the filter knows of a queued packet. The zero value is a
// packet that is not TCP.
type ackInfo struct {
	addr   [8]uint32 // IPv4: source, destination, 6 words of no meaning; IPv6: the same, 4 words each
	ports  uint32
	ack    uint32
	tsVal  uint32
	tsEcr  uint32
	sack   [4][2]uint32 // start, end
	family uint8        // 4 or 6; 0 is not TCP
	flags  uint8
	blocks uint8 // of sack
	pure   bool  // nothing but an acknowledgement: may be dropped, as far as its own headers say
	stamp  bool  // has a timestamp
}

// parse reads the headers h of one packet, from the network header on.
func (a *ackInfo) parse(h []byte) {
	a.family, a.flags, a.blocks, a.pure, a.stamp = 0, 0, 0, false, false
	a.tsVal, a.tsEcr = 0, 0
	if len(h) < 40 {
		return
	}
	const protoTCP, proto6in4 = 6, 41
	if h[0]>>4 == 4 && h[9] == proto6in4 { // a tunnel: what counts is inside
		if h = h[min(int(h[0]&15)*4, len(h)):]; len(h) < 40 || h[0]>>4 != 6 {
			return
		}
	}
	var seg, off int // bytes behind the IP header; where TCP begins
	family := h[0] >> 4
	switch {
	case family == 4 && h[9] == protoTCP:
		off = int(h[0]&15) * 4
		seg = int(binary.BigEndian.Uint16(h[2:])) - off
		a.addr[0], a.addr[1] = binary.BigEndian.Uint32(h[12:]), binary.BigEndian.Uint32(h[16:])
	case family == 6 && h[6] == protoTCP:
		off = 40
		seg = int(binary.BigEndian.Uint16(h[4:]))
		for i := range a.addr {
			a.addr[i] = binary.BigEndian.Uint32(h[8+4*i:])
		}
	default:
		return
	}
	if len(h) < off+20 {
		return
	}
	t := h[off:]
	size := int(t[12]>>4) * 4
	if size < 20 || len(t) < size {
		return
	}
	a.family = family
	a.ports = binary.BigEndian.Uint32(t)
	a.ack = binary.BigEndian.Uint32(t[8:])
	a.flags = t[13]
	a.pure = t[12]&15 == 0 && t[13]&^tcpEcho == tcpACK && seg == size
	a.options(t[20:size])
}

// options reads the TCP options o. The first SACK and timestamp count; a
// packet with an option that the filter does not know is not pure.
func (a *ackInfo) options(o []byte) {
	// Nearly all of them: NOP, NOP, timestamp (RFC 7323, appendix A).
	if len(o) == 12 && binary.BigEndian.Uint32(o) == 0x0101080a {
		a.stamp = true
		a.tsVal, a.tsEcr = binary.BigEndian.Uint32(o[4:]), binary.BigEndian.Uint32(o[8:])
		return
	}
	for len(o) > 0 {
		code := o[0]
		if code == optEnd {
			return
		}
		if code == optNop {
			o = o[1:]
			continue
		}
		if len(o) < 2 {
			return
		}
		size := int(o[1])
		if size < 2 || size > len(o) {
			return
		}
		v := o[2:size]
		switch code {
		case optMD5:
		case optSACK:
			if size%8 != 2 {
				a.pure = false
			}
			if a.blocks == 0 {
				for ; len(v) >= 8 && a.blocks < 4; v = v[8:] {
					a.sack[a.blocks] = [2]uint32{binary.BigEndian.Uint32(v), binary.BigEndian.Uint32(v[4:])}
					a.blocks++
				}
			}
		case optTimestamp:
			if size != 10 || a.stamp {
				a.pure = false
			} else {
				a.stamp = true
				a.tsVal, a.tsEcr = binary.BigEndian.Uint32(v), binary.BigEndian.Uint32(v[4:])
			}
		default:
			a.pure = false
		}
		o = o[size:]
	}
}

// sameHosts reports whether a and b, of one family, have the same addresses.
// Word by word it costs a tenth of the call that compares arrays.
func (a *ackInfo) sameHosts(b *ackInfo) bool {
	if a.addr[0] != b.addr[0] || a.addr[1] != b.addr[1] {
		return false
	}
	return a.family == 4 || [6]uint32(a.addr[2:]) == [6]uint32(b.addr[2:])
}

// before is the serial order of TCP sequence numbers.
func before(a, b uint32) bool { return int32(a-b) < 0 }

// compareSACK returns 0 when b's blocks tell the same as a's, 1 when b tells
// more, and -1 when a tells something that b does not, or has a DSACK.
func compareSACK(a, b *ackInfo) int {
	if a.blocks == 0 && b.blocks == 0 {
		return 0
	}
	if b.blocks == 0 {
		return -1
	}
	if a.blocks == 0 {
		return 1
	}
	var bytesA, bytesB uint32
	for _, y := range b.sack[:b.blocks&7] {
		bytesB += y[1] - y[0]
	}
	for _, x := range a.sack[:a.blocks&7] {
		if before(x[0], a.ack) {
			return -1
		}
		bytesA += x[1] - x[0]
		covered := false
		for _, y := range b.sack[:b.blocks&7] {
			if !before(x[0], y[0]) && !before(y[1], x[1]) {
				covered = true
				break
			}
		}
		if !covered {
			return -1
		}
	}
	if bytesB > bytesA {
		return 1
	}
	return 0
}

// redundant reports whether the pure ACK c may go because p follows it.
func (c *ackInfo) redundant(p *ackInfo) bool {
	if !c.pure || before(p.ack, c.ack) {
		return false
	}
	if c.stamp && (before(p.tsVal, c.tsVal) || before(p.tsEcr, c.tsEcr)) {
		return false
	}
	sack := compareSACK(c, p)
	return sack > 0 || sack == 0 && c.ack != p.ack
}

// filterAcks takes one packet out of f that its last packet makes redundant,
// and returns its index, 0 for none. The victim is the redundant ACK nearest
// to the head, and goes only if there is a second one; or, when aggressive, if
// it is next to the last packet. A change of the ECN echo bits after it is
// news that has to stay, so it saves the ACK before the change.
func (s *Scheduler) filterAcks(f *flow) uint32 {
	last := f.tail
	if f.head == last {
		return 0
	}
	p := &s.acks[last]
	if p.family == 0 || p.flags&(tcpACK|tcpSYN) != tcpACK {
		return 0
	}
	var found, foundPrev, prev uint32
	for i := f.head; i != last; prev, i = i, s.pkts[i].next {
		c := &s.acks[i]
		if c.family != p.family || c.ports != p.ports || !c.sameHosts(p) {
			continue
		}
		if found != 0 && (c.flags^s.acks[found].flags)&tcpEcho != 0 {
			found = 0
		}
		if !c.redundant(p) {
			continue
		}
		if found != 0 {
			return s.unlink(f, found, foundPrev)
		}
		found, foundPrev = i, prev
	}
	if found != 0 && s.cfg.AckFilter == AckFilterAggressive && s.pkts[found].next == last &&
		(p.flags^s.acks[found].flags)&tcpEcho == 0 {
		return s.unlink(f, found, foundPrev)
	}
	return 0
}

// unlink takes packet i, which is not the last, out of f; prev is the packet
// before it, 0 where it is the first.
func (s *Scheduler) unlink(f *flow, i, prev uint32) uint32 {
	next := s.pkts[i].next
	if prev == 0 {
		f.head = next
	} else {
		s.pkts[prev].next = next
	}
	return i
}
