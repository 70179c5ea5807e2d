package engine

// lengths remembers the extremes of what overhead compensation saw, and the
// average offset of the network header (16.16 fixed point).
type lengths struct {
	minNet, maxNet, minAdj, maxAdj uint32
	avgOff                         uint32

	lastLen, lastOff, lastAdj uint32 // the last answer
}

func (l *lengths) restart() {
	l.minNet, l.maxNet, l.minAdj, l.maxAdj = 0xffff, 0, 0xffff, 0
	l.forget()
}

// forget drops the last answer: the configuration has changed.
func (l *lengths) forget() { l.lastOff = ^uint32(0) }

// adjust returns what a frame of n bytes with its network header at off takes
// on the wire.
func (s *Scheduler) adjust(n, off uint32) uint32 {
	l := &s.lens
	if !s.cfg.Raw {
		n -= off
	}
	l.maxNet, l.minNet = max(l.maxNet, n), min(l.minNet, n)
	v := max(int32(n)+int32(s.cfg.Overhead), int32(s.cfg.MPU))
	n = uint32(v)
	switch s.cfg.Framing {
	case ATM: // cells of 53 bytes with 48 of payload
		n = (n + 47) / 48 * 53
	case PTM: // one byte per 64 or part thereof
		n += (n + 63) / 64
	default: // NoATM: as it is
	}
	l.maxAdj, l.minAdj = max(l.maxAdj, n), min(l.minAdj, n)
	return n
}

// adjustPacket is adjust for a packet that is queued as it came: an unsplit
// super-packet takes what its segments will take.
func (s *Scheduler) adjustPacket(p *Packet) uint32 {
	off := uint32(p.NetOff)
	s.noteOffset(off)
	if p.Segs <= 1 {
		l := &s.lens
		if p.Len == l.lastLen && off == l.lastOff {
			return l.lastAdj
		}
		l.lastLen, l.lastOff = p.Len, off
		l.lastAdj = s.adjust(p.Len, off)
		return l.lastAdj
	}
	segs, size, hdr := uint32(p.Segs), uint32(p.GSOSize), uint32(p.HeaderLen)
	whole := p.Len - (segs-1)*hdr // as the super-packet is in memory
	return s.adjust(size+hdr, off)*(segs-1) + s.adjust(whole-size*(segs-1), off)
}

func (s *Scheduler) noteOffset(off uint32) {
	avg := s.lens.avgOff
	s.lens.avgOff = avg - avg>>8 + off<<16>>8
}
