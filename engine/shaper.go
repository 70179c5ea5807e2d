package engine

// minRate is the lowest rate that the shaper divides by, bytes/s: below it a
// packet would hold the link for minutes.
const minRate = 64

// rate is a link rate as nanoseconds per byte in fixed point: n bytes last
// n*ns >> shift. ns has at most 34 bits, so the product of a 30-bit length
// fits into 64. The zero rate is unlimited: everything lasts 0 ns.
type rate struct {
	ns    uint64
	shift uint32

	// The last answer. Most packets are as long as the one before, and a
	// 64-bit multiplication and shift cost a 32-bit CPU more than a look.
	lastLen uint32
	lastDur uint64
}

// rateOf converts bytes per second.
func rateOf(bytesPerSec uint64) rate {
	if bytesPerSec == 0 {
		return rate{}
	}
	shift := uint32(34)
	ns := uint64(1e9) << 34 / max(minRate, bytesPerSec)
	for ns>>34 != 0 {
		ns >>= 1
		shift--
	}
	return rate{ns: ns, shift: shift}
}

// duration returns how long n bytes last, in nanoseconds.
func (r *rate) duration(n uint32) uint64 {
	if n == r.lastLen {
		return r.lastDur
	}
	return r.compute(n)
}

func (r *rate) compute(n uint32) uint64 {
	lo := uint64(n) * uint64(uint32(r.ns))
	d := lo + uint64(n*uint32(r.ns>>32))<<32
	d >>= r.shift & 63
	r.lastLen, r.lastDur = n, d
	return d
}

// charge accounts for n adjusted bytes of tin b: they have been sent, or, with
// drop, have used the link upstream without being delivered.
//
// The clocks say when the next packet may leave: the link's makes up for any
// lateness while the queue is busy; the tin's only says whether the tin is
// within its threshold. failsafe runs at 2/3 of the rate and counts deliveries
// only, so that charged drops cannot stop delivery.
func (s *Scheduler) charge(b *tin, n uint32, now Time, drop bool) {
	if !s.shaped {
		return
	}
	d := Time(s.rate.duration(n))
	if s.cfg.Tins == Cake3 {
		// 2015: this class and all lower ones.
		for i := uint32(0); i <= b.index; i++ {
			c := &s.tins[i&7]
			c.timeNext += Time(c.rate.duration(n))
		}
	} else {
		td := d
		if b.index != 0 {
			td = Time(b.rate.duration(n))
		}
		if b.timeNext < now {
			b.timeNext += td
		} else if t := now + td; b.timeNext < t {
			b.timeNext = t
		}
	}
	s.timeNext += d
	if !drop {
		s.failsafe += d + d>>1
		// Who goes by NextSend never finds the gate closed, so what has to wait
		// behind this packet is counted here. The kernel counts closed gates.
		if s.timeNext > now && s.failsafe > now && s.qlen != 0 && !s.stepwise {
			s.overlimits++
		}
	}
}

// NextSend returns the earliest time at which Dequeue may deliver a packet,
// Never when nothing is queued. Before that time there is no need to call it.
func (s *Scheduler) NextSend() Time {
	if s.qlen == 0 {
		return Never
	}
	return min(s.timeNext, s.failsafe)
}
