package engine

// layout is what a TinMode means. Tins are numbered as sch_cake numbers them
// inside; order maps the position in reports, which is also what the firewall
// mark and the priority count, to that number.
type layout struct {
	tins  uint8
	order [MaxTins]uint8
	index *[64]uint8 // DSCP -> tin
}

func layoutOf(m TinMode) layout {
	identity := [MaxTins]uint8{0, 1, 2, 3, 4, 5, 6, 7}
	switch m {
	case Diffserv3:
		return layout{3, [MaxTins]uint8{1, 0, 2}, &diffserv3}
	case Diffserv4:
		return layout{4, [MaxTins]uint8{1, 0, 2, 3}, &diffserv4}
	case Diffserv8:
		return layout{8, identity, &diffserv8}
	case Precedence:
		return layout{8, identity, &precedence}
	case Cake3:
		return layout{4, identity, &cake3}
	default:
		return layout{1, identity, &besteffort}
	}
}

// DSCP to tin, one table a mode; row r, column c is DSCP 8r+c.
var (
	besteffort [64]uint8

	precedence = [64]uint8{
		0, 0, 0, 0, 0, 0, 0, 0,
		1, 1, 1, 1, 1, 1, 1, 1,
		2, 2, 2, 2, 2, 2, 2, 2,
		3, 3, 3, 3, 3, 3, 3, 3,
		4, 4, 4, 4, 4, 4, 4, 4,
		5, 5, 5, 5, 5, 5, 5, 5,
		6, 6, 6, 6, 6, 6, 6, 6,
		7, 7, 7, 7, 7, 7, 7, 7,
	}
	diffserv8 = [64]uint8{
		2, 0, 1, 2, 4, 2, 2, 2,
		1, 2, 1, 2, 1, 2, 1, 2,
		5, 2, 4, 2, 4, 2, 4, 2,
		3, 2, 3, 2, 3, 2, 3, 2,
		6, 2, 3, 2, 3, 2, 3, 2,
		6, 2, 2, 2, 6, 2, 6, 2,
		7, 2, 2, 2, 2, 2, 2, 2,
		7, 2, 2, 2, 2, 2, 2, 2,
	}
	diffserv4 = [64]uint8{
		0, 1, 0, 0, 2, 0, 0, 0,
		1, 0, 0, 0, 0, 0, 0, 0,
		2, 0, 2, 0, 2, 0, 2, 0,
		2, 0, 2, 0, 2, 0, 2, 0,
		3, 0, 2, 0, 2, 0, 2, 0,
		3, 0, 0, 0, 3, 0, 3, 0,
		3, 0, 0, 0, 0, 0, 0, 0,
		3, 0, 0, 0, 0, 0, 0, 0,
	}
	diffserv3 = [64]uint8{
		0, 1, 0, 0, 2, 0, 0, 0,
		1, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 2, 0, 2, 0,
		2, 0, 0, 0, 0, 0, 0, 0,
		2, 0, 0, 0, 0, 0, 0, 0,
	}
	// The classes of April 2015: 0 Bulk, 1 Best Effort, 2 Video, 3 Voice.
	cake3 = [64]uint8{
		1, 2, 1, 1, 2, 1, 1, 1,
		0, 1, 1, 1, 1, 1, 1, 1,
		2, 1, 2, 1, 2, 1, 2, 1,
		2, 1, 2, 1, 2, 1, 2, 1,
		3, 1, 2, 1, 2, 1, 2, 1,
		3, 1, 1, 1, 3, 1, 3, 1,
		3, 1, 1, 1, 1, 1, 1, 1,
		3, 1, 1, 1, 1, 1, 1, 1,
	}
)

const (
	protoIPv4 = 0x0800
	protoARP  = 0x0806
	protoIPv6 = 0x86dd
)

// classify chooses the tin of p, and returns the DS field with which it leaves
// and whether that differs from the one it came with. Washing comes first, in
// every mode; the code point that a packet came with selects its tin.
func (s *Scheduler) classify(p *Packet) (tin uint32, tos uint8, washed bool) {
	tos = p.TOS
	var dscp uint8
	if p.HasTOS {
		dscp = tos >> 2
		if s.wash && dscp != 0 {
			if p.Writable {
				tos &= 3
				washed = true
			} else {
				dscp = 0
			}
		}
	} else if p.Proto == protoARP {
		dscp = 0x38
	}
	n := s.numTins
	if s.cfg.Tins == BestEffort {
		return 0, tos, washed
	}
	if s.markMask != 0 {
		if m := p.Mark & s.markMask; m != 0 {
			if m >>= s.markShift & 31; m <= n {
				return uint32(s.order[(m-1)&7]), tos, washed
			}
		}
	}
	if p.Priority&0xffff0000 == s.handle {
		if m := p.Priority & 0xffff; m-1 < n {
			return uint32(s.order[(m-1)&7]), tos, washed
		}
	}
	return uint32(s.dscpTin[dscp&63]), tos, washed
}
