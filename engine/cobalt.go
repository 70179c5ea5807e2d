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

// signals is what COBALT remembers of a flow that it has signalled to, or that
// has lost a packet. Few flows are in that state at a time.
type signals struct {
	blueTimer Time   // last change of pDrop
	count     uint32 // CoDel's, of signals
	invSqrt   uint32 // 1/sqrt(count), 1 = 2^32
	pDrop     uint32 // BLUE's drop probability, 1 = 2^32
	drops     uint32
	dropping  bool // CoDel signals, or will when the queue stays over target
}

// remember returns the signals of f to be changed, and makes them if need be.
// signals[0] stands for flows without and is never changed.
func (s *Scheduler) remember(f *flow) *signals {
	if f.signals == 0 {
		i := s.freeSignals
		if i != 0 {
			s.freeSignals = s.signals[i].count
		} else {
			i = uint32(len(s.signals))
			s.signals = append(s.signals, signals{})
		}
		s.signals[i] = signals{blueTimer: s.epoch}
		f.signals = uint16(i)
	}
	return &s.signals[f.signals]
}

// forget gives up the signals of f, which has come to rest. The kernel keeps
// them for whoever gets the queue next.
func (s *Scheduler) forget(f *flow) {
	if f.signals != 0 && !s.stepwise {
		s.signals[f.signals].count = s.freeSignals
		s.freeSignals = uint32(f.signals)
		f.signals = 0
	}
}

// setInvSqrt follows a change of count: from the table, or by one Newton
// step from the value before.
func (s *Scheduler) setInvSqrt(a *signals) {
	if a.count < 16 {
		a.invSqrt = s.sqrtTable[a.count&15]
		return
	}
	inv := a.invSqrt
	inv2 := uint32(mul(inv, inv) >> 32)
	v := (3<<32 - mul(a.count, inv2)) >> 2
	// v*inv>>31; v has 32 bits for every count that can come up here.
	a.invSqrt = uint32(v * uint64(inv) >> 31)
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
	a := &s.signals[f.signals]
	due := a.count != 0 && sched >= 0

	if over {
		if f.signals == 0 {
			a = s.remember(f)
		}
		if !a.dropping {
			a.dropping = true
			inv := a.invSqrt
			if s.compat&CompatFirstSignal == 0 {
				if inv == 0 {
					inv = 1<<32 - 1
				}
				sched = 0
			}
			f.dropNext = s.control(now, b, inv)
		}
		if a.count == 0 {
			a.count = 1
		}
		f.alert = true
	} else {
		a.dropping = false
	}

	v := deliver
	if due && a.dropping {
		if p.tos&3 != 0 && p.flags&qMarkable != 0 {
			v = mark
		} else {
			v = drop
		}
		if a.count++; a.count == 0 {
			a.count--
		}
		s.setInvSqrt(a)
		f.dropNext = s.control(f.dropNext, b, a.invSqrt)
		sched = now - f.dropNext
	} else {
		for due {
			a.count--
			s.setInvSqrt(a)
			f.dropNext = s.control(f.dropNext, b, a.invSqrt)
			sched = now - f.dropNext
			due = a.count != 0 && sched >= 0
		}
		f.alert = a.count != 0 || a.pDrop != 0
	}

	// BLUE does not care for ECN.
	if a.pDrop != 0 && s.rand() < a.pDrop {
		if v == mark {
			v = markDrop
		} else {
			v = drop
		}
	}

	if a.count == 0 {
		f.dropNext = now + Time(b.interval) // until then the queue is active
	} else if sched > 0 && v <= mark {
		f.dropNext = now // no bursts to catch up
	}
	return v
}

// queueFull tells f's AQM state that f has lost a packet to overflow.
func (s *Scheduler) queueFull(b *tin, f *flow, now Time) {
	a := s.remember(f)
	if now-a.blueTimer > Time(b.target) {
		if a.pDrop == 0 {
			b.unresponsive++
		}
		a.pDrop += blueUp
		if a.pDrop < blueUp {
			a.pDrop = 1<<32 - 1
		}
		a.blueTimer = now
	}
	f.alert, a.dropping = true, true
	f.dropNext = now
	if a.count == 0 {
		a.count = 1
	}
}

// queueEmpty tells f's AQM state that f has been found empty. rest: nothing is
// left to remember; else due is the earliest time at which that can change.
func (s *Scheduler) queueEmpty(b *tin, f *flow, now Time) (rest bool, due Time) {
	a := &s.signals[f.signals]
	a.dropping = false
	if a.count != 0 && now >= f.dropNext {
		a.count--
		s.setInvSqrt(a)
		f.dropNext = s.control(f.dropNext, b, a.invSqrt)
	}
	due = f.dropNext
	if a.pDrop != 0 {
		if now-a.blueTimer > Time(b.target) {
			if a.pDrop <= blueDown {
				a.pDrop = 0
				b.unresponsive--
			} else {
				a.pDrop -= blueDown
			}
			a.blueTimer = now
		}
		if a.pDrop != 0 {
			return false, min(due, a.blueTimer+Time(b.target)+1)
		}
	}
	f.alert = a.count != 0
	return !f.alert && now >= due, due
}

// decaySleep lets Dequeue leave the decaying flows of a tin alone while none
// of them can change: until is the earliest time at which one can. It is found
// by a pass over all of them, one visit a call as ever.
type decaySleep struct {
	until Time
	min   Time  // of the flows visited in this pass and of those that came meanwhile
	left  int32 // visits to the end of the pass
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
