package engine

// Internals are variables of the algorithm that no report shows; replays
// compare them to find where two implementations part.
type Internals struct {
	Rand               uint32 // state of the random sequence
	Rate               uint64 // bytes/s
	RateNS             uint64 // duration of a byte: RateNS >> RateShift ns
	RateShift          uint32
	TimeNext, Failsafe Time
	MemoryUsed         uint64 // now
	CurTin             uint32
	HeapLeft           uint32
	AvgNetOff          uint32 // 16.16
	AvgGap             uint64 // autorate: ns
	WindowBytes        uint64
	WindowBegin        Time
	LastPacket         Time
	Tins               [MaxTins]TinInternals // by internal index
}

// TinInternals are the ones of a tin.
type TinInternals struct {
	AvgDelay, PeakDelay, BaseDelay uint64 // ns
	Sparse, Bulk, Decaying         int32
	Deficit, Quantum               int32
	TimeNext                       Time
	RateNS                         uint64
	RateShift                      uint32
	Target, Interval, MTUTime      uint64 // ns
}

// Internals fills in.
func (s *Scheduler) Internals(in *Internals) {
	*in = Internals{
		Rand: s.rng, Rate: s.bytesPerSec, RateNS: s.rate.ns, RateShift: s.rate.shift,
		TimeNext: s.timeNext, Failsafe: s.failsafe, MemoryUsed: s.memUsed, CurTin: s.curTin, HeapLeft: s.heapLeft,
		AvgNetOff: s.lens.avgOff, AvgGap: s.auto.gap, WindowBytes: s.auto.windowBytes,
		WindowBegin: s.auto.windowBegin, LastPacket: s.auto.last,
	}
	for i := range s.tins {
		b := &s.tins[i]
		in.Tins[i] = TinInternals{
			AvgDelay: b.avgDelay, PeakDelay: b.peakDelay, BaseDelay: b.baseDelay,
			Sparse: b.sparse, Bulk: b.bulk, Decaying: b.decaying, Deficit: b.deficit, Quantum: b.quantum,
			TimeNext: b.timeNext, RateNS: b.rate.ns, RateShift: b.rate.shift,
			Target: b.target, Interval: b.interval, MTUTime: b.mtuTime,
		}
	}
}

// Clocks returns the link's virtual clock and the failsafe clock.
func (s *Scheduler) Clocks() (next, failsafe Time) { return s.timeNext, s.failsafe }
