package engine

import "math/bits"

// tin is one priority lane: flow queues that share one set of parameters and
// one threshold. The threshold is a priority limit, not a cap: above it a tin
// waits behind the others and may still use what they leave.
type tin struct {
	flows *[FlowsPerTin]flow
	hosts *[FlowsPerTin]host // nil where the flow mode has no use for it

	timeNext Time
	rate     rate

	// COBALT's parameters, ns.
	target, interval uint64
	overTarget       uint64 // max(target, 4*mtuTime)
	mtuTime          uint64

	// Flows by set; sparse includes those that wait (flow.go).
	sparse, bulk, decaying int32

	fresh list     // sparse flows, served first
	round rotation // bulk flows, and sparse ones with a deficit
	decay list     // empty flows whose AQM state has not come to rest
	sleep decaySleep

	deficit              int32 // of the round robin between tins, bytes
	quantum, quantumBand int32 // bytes; quantumBand: Cake3's while over the threshold
	flowQuantum          uint32
	flowsPerByte         uint32 // 2^32 / flowQuantum, rounded up
	bytesPerSec          uint64
	index                uint32

	backlog                        uint64 // bytes
	qlen                           uint32
	maxLen                         uint32
	unresponsive                   uint32 // flows with a BLUE probability
	avgDelay, peakDelay, baseDelay uint64 // ns

	packets, bytes                       uint64
	wayDirect, wayInds, wayMiss, wayCols uint64
	drops, dropBytes, overflowDrops      uint64
	marks, markBytes                     uint64
	ackDrops, ackDropBytes               uint64
	cleared, clearedBytes                uint64
	sojourn                              Histogram
}

// setRate derives everything that depends on the tin's rate (bytes/s).
func (b *tin) setRate(bytesPerSec uint64, c *Config) {
	b.bytesPerSec = bytesPerSec
	b.rate = rateOf(bytesPerSec)
	b.flowQuantum = 1514
	if bytesPerSec != 0 {
		b.flowQuantum = uint32(max(min(bytesPerSec>>12, 1514), 300))
	}
	b.flowsPerByte = ^uint32(0)/b.flowQuantum + 1

	target, rtt := uint64(c.Target), uint64(c.RTT)
	b.mtuTime = uint64(c.MTU) * b.rate.ns >> b.rate.shift
	b.target = max(b.mtuTime*3>>1, target)
	b.interval = max(rtt+b.target-target, b.target*2)
	if c.Tins == Cake3 {
		b.interval = max(rtt+b.target, b.target*8)
	}
	b.overTarget = max(b.target, 4*b.mtuTime)
}

// configureTins gives each tin of the mode its share of r bytes/s, and returns
// how many there are.
func (s *Scheduler) configureTins(r uint64) {
	c := &s.cfg
	set := func(i int, r uint64, quantum int32) {
		s.tins[i].setRate(r, c)
		s.tins[i].quantum = quantum
	}
	switch c.Tins {
	case Diffserv3:
		set(0, r, 1024)
		set(1, r>>4, 64)
		set(2, r>>2, 256)
	case Diffserv4:
		set(0, r, 1024)
		set(1, r>>4, 64)
		set(2, r>>1, 512)
		set(3, r>>2, 256)
	case Diffserv8, Precedence:
		q := int32(256)
		for i := range MaxTins {
			set(i, r, q)
			r, q = r*7>>3, q*7>>3
		}
	case Cake3:
		// The quanta of 2015: what a class may send per round while it is
		// within its threshold, and what while it is over.
		for i, share := range [4]uint64{r, r - r>>4, r - r>>2, r >> 2} {
			set(i, share, [4]int32{64, 256, 1024, 4096}[i])
			s.tins[i].quantumBand = [4]int32{64, 60, 48, 16}[i]
		}
	default:
		set(0, r, 65535)
	}
}

// pickTinByClock chooses the tin to serve, nil when no flow has a packet to
// send: the highest tin whose clock has been reached, else the one whose clock is
// earliest.
func (s *Scheduler) pickTinByClock(now Time) *tin {
	busy := s.busyTins & (1<<s.numTins - 1)
	if busy == 0 {
		s.curTin = 0
		return nil
	}
	i := uint32(bits.Len32(busy)) - 1
	best := &s.tins[i&7]
	for busy &^= 1 << i; busy != 0 && best.timeNext > now; busy &^= 1 << i {
		i = uint32(bits.Len32(busy)) - 1
		if b := &s.tins[i&7]; b.timeNext < best.timeNext {
			best = b
		}
	}
	s.curTin = best.index
	return best
}

// pickTinInTurn is deficit round robin between the tins: for unlimited
// mode, and for Cake3, where the quantum is the priority one as long as a
// class is within its threshold.
func (s *Scheduler) pickTinInTurn(now Time) *tin {
	cake3 := s.cfg.Tins == Cake3
	wrapped, empty := false, true
	b := &s.tins[s.curTin&7]
	for b.deficit < 0 || b.sparse+b.bulk == 0 {
		if b.deficit <= 0 {
			if cake3 && b.timeNext > now {
				b.deficit += b.quantumBand
			} else {
				b.deficit += b.quantum
			}
		}
		if b.sparse+b.bulk != 0 {
			empty = false
		}
		s.curTin++
		if s.curTin >= s.numTins {
			s.curTin = 0
			if wrapped && empty {
				return nil
			}
			wrapped = true
		}
		b = &s.tins[s.curTin&7]
	}
	return b
}
