package engine

// COBALT is CoDel and BLUE side by side. CoDel signals at the head of a queue
// whose packets have waited longer than target, at intervals that shrink with
// the square root of the number of signals; BLUE drops at random from queues
// that have been hit by overflow, which are those that do not listen.

const (
	blueUp   = 1 << 24 // 1/256 for each overflow, 1 = 2^32
	blueDown = 1 << 20 // 1/4096 for each time the queue is found empty
)

// sqrtTable[n] is 2^32/sqrt(n); sqrtTable61 what Linux 6.1 computes instead.
var (
	sqrtTable = [16]uint32{
		4294967295, 4294967295, 3037000500, 2479700525, 2147483647, 1920767767, 1753413056, 1623345051,
		1518500250, 1431655765, 1358187914, 1294981364, 1239850263, 1191209601, 1147878294, 1108955788,
	}
	sqrtTable61 = func() (t [16]uint32) {
		t = sqrtTable
		t[2], t[3], t[6] = 3035289760, 2479700455, 1753413055
		return t
	}()
)

// setInvSqrt follows a change of f.count: from the table, or by one Newton
// step from the value before.
func (s *Scheduler) setInvSqrt(f *flow) {
	if f.count < 16 {
		f.invSqrt = s.sqrtTable[f.count&15]
		return
	}
	inv := f.invSqrt
	inv2 := uint32(mul(inv, inv) >> 32)
	v := (3<<32 - mul(f.count, inv2)) >> 2
	// v*inv>>31; v has 32 bits for every count that can come up here.
	f.invSqrt = uint32(v * uint64(inv) >> 31)
}

// control is the control law: the time of the next signal after t.
func (s *Scheduler) control(t Time, b *tin, inv uint32) Time {
	d := Time(mul(uint32(b.interval), inv) >> 32)
	if hi := uint32(b.interval >> 32); hi != 0 && s.compat&Compat32Bit == 0 {
		d += Time(mul(hi, inv))
	}
	return t + d
}

// A verdict on a packet at the head of its queue.
type verdict uint8

const (
	deliver verdict = iota
	mark
	drop
	markDrop // marked by CoDel, then picked by BLUE
)

// judge decides about packet p at the head of f: deliver, mark, drop. Called
// once for each packet that comes to the head.
func (s *Scheduler) judge(b *tin, f *flow, p *queued, now Time) verdict {
	sojourn := uint64(now - p.time)
	over := sojourn > b.overTarget
	if over && s.cfg.Ingress {
		over = sojourn > 2*b.mtuTime*uint64(uint32(b.bulk))
	}
	sched := now - f.dropNext
	due := f.count != 0 && sched >= 0

	if over {
		if !f.dropping {
			f.dropping = true
			inv := f.invSqrt
			if inv == 0 && s.compat&CompatFirstSignal == 0 {
				inv = 1<<32 - 1
			}
			f.dropNext = s.control(now, b, inv)
		}
		if f.count == 0 {
			f.count = 1
		}
	} else {
		f.dropping = false
	}

	v := deliver
	if due && f.dropping {
		if p.tos&3 != 0 && p.flags&qMarkable != 0 {
			v = mark
		} else {
			v = drop
		}
		if f.count++; f.count == 0 {
			f.count--
		}
		s.setInvSqrt(f)
		f.dropNext = s.control(f.dropNext, b, f.invSqrt)
		sched = now - f.dropNext
	} else {
		for due {
			f.count--
			s.setInvSqrt(f)
			f.dropNext = s.control(f.dropNext, b, f.invSqrt)
			sched = now - f.dropNext
			due = f.count != 0 && sched >= 0
		}
	}

	// BLUE does not care for ECN.
	if f.pDrop != 0 && s.rand() < f.pDrop {
		if v == mark {
			v = markDrop
		} else {
			v = drop
		}
	}

	if f.count == 0 {
		f.dropNext = now + Time(b.interval) // until then the queue is active
	} else if sched > 0 && v <= mark {
		f.dropNext = now // no bursts to catch up
	}
	return v
}

// queueFull tells f's AQM state that f has lost a packet to overflow.
func (s *Scheduler) queueFull(b *tin, f *flow, now Time) {
	if now-f.blueTimer > Time(b.target) {
		if f.pDrop == 0 {
			b.unresponsive++
		}
		f.pDrop += blueUp
		if f.pDrop < blueUp {
			f.pDrop = 1<<32 - 1
		}
		f.blueTimer = now
	}
	f.dropping = true
	f.dropNext = now
	if f.count == 0 {
		f.count = 1
	}
}

// queueEmpty tells f's AQM state that f has been found empty.
func (s *Scheduler) queueEmpty(b *tin, f *flow, now Time) {
	if f.pDrop != 0 && now-f.blueTimer > Time(b.target) {
		if f.pDrop <= blueDown {
			f.pDrop = 0
			b.unresponsive--
		} else {
			f.pDrop -= blueDown
		}
		f.blueTimer = now
	}
	f.dropping = false
	if f.count != 0 && now >= f.dropNext {
		f.count--
		s.setInvSqrt(f)
		f.dropNext = s.control(f.dropNext, b, f.invSqrt)
	}
}

// decaySleep lets Dequeue leave the decaying flows of a tin alone while none
// of them can change: until is the earliest time at which one can. It is found
// by a pass over all of them, one visit a call as ever.
type decaySleep struct {
	until Time
	min   Time  // of the flows visited in this pass and of those that came meanwhile
	left  int32 // visits to the end of the pass
}

// due is the earliest time at which a visit to the decaying flow f can change
// anything.
func (b *tin) due(f *flow) Time {
	if f.pDrop != 0 {
		return min(f.dropNext, f.blueTimer+Time(b.target)+1)
	}
	return f.dropNext
}

// entered takes in a flow that begins to decay.
func (d *decaySleep) entered(due Time) {
	d.until, d.min = min(d.until, due), min(d.min, due)
}

// visited takes in a visit to one of n decaying flows, due again at due.
func (d *decaySleep) visited(n int32, due Time) {
	if d.left <= 0 {
		d.left, d.min = n, Never
	}
	d.min = min(d.min, due)
	if d.left--; d.left == 0 {
		d.until = d.min
	}
}
