package engine

import "time"

// Options are what a Scheduler is made with and keeps for life.
type Options struct {
	// Seed is the randomness of the hash key, and its low 32 bits start the
	// sequence that dithers quanta and decides BLUE's drops.
	Seed uint64

	// Handle is the number of the qdisc that this stands for (8001: is
	// 0x80010000), for Packet.Priority; 0 turns priorities off.
	Handle uint32

	// Compat are faults of the kernel to reproduce.
	Compat Compat

	// Stepwise takes every decision one at a time as the kernel does: quanta
	// are granted singly, a decaying flow is visited at each Dequeue, and
	// Overlimits counts the calls of Dequeue that found the gate closed. The
	// default computes what comes to the same, with fewer random numbers, and
	// counts the deliveries behind which others had to wait.
	Stepwise bool
}

// queued is a packet in a flow queue: 32 bytes, found by its index.
type queued struct {
	next     uint32 // in the queue, or in the free list
	handle   uint32
	len      uint32
	adj      uint32 // bytes on the wire
	truesize uint32
	time     Time // of arrival
	seg      uint16
	tos      uint8
	flags    uint8
}

const (
	qMarkable = 1 << iota // IP, and its header can be changed
	qChanged              // the DSCP has been washed
	qUnsplit              // a super-packet; seg is its number of segments
	qMarked               // COBALT has set CE
	qHasTOS
)

// Scheduler is one shaped direction. It is not safe for concurrent use.
type Scheduler struct {
	// The link's clocks (shaper.go).
	timeNext, failsafe Time
	epoch              Time // when everything began: 0, or where a clock below 0 stood
	rate               rate

	qlen        uint32
	numTins     uint32
	curTin      uint32
	busyTins    uint32 // bit i: tin i has sparse or bulk flows
	emptyTops   uint32 // times in a row that the heap's top was an empty flow
	heapLeft    uint32 // deliveries for which the overflow heap is still kept
	rng         uint32
	free        uint32 // list of unused pkts
	freeSignals uint32 // list of unused signals, linked by count
	handle      uint32
	markMask    uint32
	markShift   uint32
	compat      Compat
	stepwise    bool
	byFlow      bool // the flow mode has a queue per flow
	fairSrc     bool
	fairDst     bool
	wash        bool
	classes     bool // packets have to be classified: there are tins, or washing
	timing      bool // arrivals are measured
	inTurn      bool // tins are served by round robin
	shaped      bool // there is a rate
	order       [MaxTins]uint8
	dscpTin     *[64]uint8

	memUsed  uint64
	memMax   uint64
	memLimit uint64

	pkts    []queued // pkts[0] is not used
	acks    []ackInfo
	flows   []flow      // FlowsPerTin for each tin
	heap    []heapEntry // nil before the first overflow
	heapPos []uint16    // where in heap each flow is
	signals []signals   // signals[0] stands for flows without
	drops   []Drop

	unsplit    uint64 // delivered segments of unsplit super-packets, less one each
	overlimits uint64

	lens      lengths
	auto      autorate
	sqrtTable *[16]uint32

	cfg         Config
	bytesPerSec uint64 // the rate in force
	tins        [MaxTins]tin

	dissector
}

// Enqueued says where a packet went. Congested: the sender should slow down,
// because the queue that lost a packet to the memory limit is the packet's own.
type Enqueued struct {
	Tin       uint8 // internal number, TinStats.Index
	Flow      uint16
	Congested bool
}

// Delivery is a packet that is due.
type Delivery struct {
	Handle  uint32
	Len     uint32
	Sojourn time.Duration
	Seg     uint16 // of a split super-packet, from 0
	Flow    uint16
	Tin     uint8
	TOS     uint8 // the DS field that it must leave with
	HasTOS  bool  // it has a DS field
	CE      bool  // COBALT signalled congestion by marking it
	Changed bool  // TOS is not the one that it arrived with
}

// DropReason says why a packet was dropped.
type DropReason uint8

// The reasons. Cleared: its tin is no longer in use, or Reset was called.
const (
	DropAQM DropReason = iota
	DropOverflow
	DropAck
	DropCleared
)

// String names the reason in one word.
func (r DropReason) String() string {
	return [...]string{"aqm", "overflow", "ack", "clear"}[r&3]
}

// Drop is a packet that will not be delivered.
type Drop struct {
	Handle uint32
	Len    uint32
	Seg    uint16
	Tin    uint8
	Reason DropReason
}

// New returns a Scheduler for c. The error says which field makes no sense.
func New(now Time, c Config, o Options) (*Scheduler, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	s := &Scheduler{
		rng: uint32(o.Seed), handle: o.Handle &^ 0xffff, compat: o.Compat, stepwise: o.Stepwise,
		pkts: make([]queued, 1, 256), drops: make([]Drop, 0, 32), signals: make([]signals, 1, 32), sqrtTable: &sqrtTable,
		epoch: min(now, 0),
	}
	if s.compat&CompatFirstSignal != 0 {
		s.sqrtTable = &sqrtTable61
	}
	if s.handle == 0 {
		s.handle = 1 // no priority's high half
	}
	for i := range s.tins {
		b := &s.tins[i]
		b.index = uint32(i)
		b.timeNext = s.epoch
		b.fresh, b.decay = list{noFlow, noFlow}, list{noFlow, noFlow}
	}
	s.timeNext, s.failsafe = s.epoch, s.epoch
	s.lens.restart()
	s.auto.peak = uint64(c.Rate) / 8
	s.bytesPerSec = s.auto.peak
	if !s.stepwise {
		// A clock that starts late must not look like lateness to make up for.
		s.auto.last, s.auto.windowBegin, s.auto.reconfigured = now, now, now
	}
	s.key = newKeyHash(o.Seed)
	s.apply(c)
	return s, nil
}

// Reconfigure changes the configuration. Packets stay queued, except those in
// tins that the new mode has not; Drops lists them. A Config under autorate
// whose Rate has not changed leaves the measured rate in force.
func (s *Scheduler) Reconfigure(now Time, c Config) error {
	s.drops = s.drops[:0]
	if err := c.Validate(); err != nil {
		return err
	}
	if c.Raw != s.cfg.Raw || c.Overhead != s.cfg.Overhead {
		s.lens.restart()
	}
	if !c.Autorate || !s.cfg.Autorate || c.Rate != s.cfg.Rate {
		s.bytesPerSec = uint64(c.Rate) / 8
	}
	if c.Autorate && !s.cfg.Autorate && s.compat&CompatAutorate == 0 {
		s.auto.windowBegin, s.auto.last = now, now
	}
	flowsWere := s.cfg.Flows
	s.apply(c)
	if s.compat&CompatDeficit == 0 && c.Flows != flowsWere {
		for i := range s.tins {
			s.recountHosts(&s.tins[i])
		}
	}
	return nil
}

// Reset drops everything that is queued. The clocks and counters go on.
func (s *Scheduler) Reset(Time) {
	s.drops = s.drops[:0]
	s.clearTins(0)
}

// Config returns the configuration in force. Under autorate its Rate is the
// measured one.
func (s *Scheduler) Config() Config {
	c := s.cfg
	if c.Autorate {
		c.Rate = BitsPerSecond(s.bytesPerSec * 8)
	}
	return c
}

// Len is the number of packets queued.
func (s *Scheduler) Len() int { return int(s.qlen) }

// Backlog is the number of bytes queued.
func (s *Scheduler) Backlog() uint64 {
	var n uint64
	for i := range s.tins {
		n += s.tins[i].backlog
	}
	return n
}

// Drops lists the packets that the last Enqueue, Dequeue, Reconfigure or Reset
// dropped, in order. It is valid until the next of these calls.
func (s *Scheduler) Drops() []Drop { return s.drops }

// apply makes c the configuration.
func (s *Scheduler) apply(c Config) {
	s.cfg = c
	l := layoutOf(c.Tins)
	s.numTins, s.order, s.dscpTin = uint32(l.tins), l.order, l.index
	s.byFlow = c.Flows&Flows != 0
	s.fairSrc = c.Flows == DualSrcHost || c.Flows == TripleIsolate
	s.fairDst = c.Flows == DualDstHost || c.Flows == TripleIsolate
	s.wash = c.Wash
	s.classes = c.Tins != BestEffort || c.Wash
	s.timing = c.Autorate || s.stepwise
	s.markMask = c.Fwmark
	s.markShift = 0
	for m := c.Fwmark; m != 0 && m&1 == 0; m >>= 1 {
		s.markShift++
	}
	s.lens.forget()
	s.dissector = newDissector(s.key, &c)
	s.allocate()
	s.reconfigure()
}

// allocate makes the tables that the configuration needs and that are not
// there yet. A tin that has been used keeps its counters.
func (s *Scheduler) allocate() {
	tins := int(s.numTins)
	if s.compat&CompatHeap != 0 {
		tins = MaxTins // the kernel's heap is over all of them
	}
	if have := len(s.flows) / FlowsPerTin; have < tins {
		flows := make([]flow, tins*FlowsPerTin)
		copy(flows, s.flows)
		s.flows = flows
		for i := range tins {
			s.tins[i].flows = (*[FlowsPerTin]flow)(flows[i*FlowsPerTin:])
		}
		s.heap, s.heapPos, s.heapLeft = nil, nil, 0
	}
	if s.fairSrc || s.fairDst {
		for i := range tins {
			if s.tins[i].hosts == nil {
				s.tins[i].hosts = new([FlowsPerTin]host)
			}
		}
	}
	// Packets that came before the filter was turned on are no candidates; the
	// kernel can still read their headers, so a stepwise scheduler remembers all.
	if s.cfg.AckFilter == AckFilterOff && !s.stepwise {
		s.acks = nil
	} else if s.acks == nil {
		s.acks = make([]ackInfo, len(s.pkts), cap(s.pkts))
	}
}

// reconfigure recomputes all parameters from the configuration and the rate in
// force, and clears the tins that are not in use.
func (s *Scheduler) reconfigure() {
	s.configureTins(s.bytesPerSec)
	if s.numTins < MaxTins {
		s.clearTins(s.numTins)
	}
	for i := s.numTins; i < MaxTins; i++ {
		s.tins[i].mtuTime = s.tins[0].mtuTime
	}
	s.rate = s.tins[0].rate
	s.shaped = s.rate.ns != 0
	inTurn := !s.shaped || s.cfg.Tins == Cake3
	if inTurn != s.inTurn && s.compat&CompatDeficit == 0 {
		// What was sent while nobody took turns is not owed.
		for i := range s.tins {
			s.tins[i].deficit = 0
		}
	}
	s.inTurn = inTurn
	s.memLimit = memoryLimit(&s.cfg, s.bytesPerSec, s.compat)
}

// memoryLimit is the number of bytes that may be queued: four times the
// bandwidth-delay product, unless set.
func memoryLimit(c *Config, bytesPerSec uint64, compat Compat) uint64 {
	limit := uint64(c.MemoryLimit)
	if limit == 0 {
		limit = 1<<32 - 1
		if bytesPerSec != 0 {
			limit = bytesPerSec * uint64(c.RTT/time.Microsecond) / 250000
			if compat&Compat32Bit != 0 {
				limit = uint64(uint32(limit))
			}
			limit = max(limit, 4<<20)
		}
	}
	const packets = 10240
	return min(limit, max(packets*uint64(c.MTU), uint64(c.MemoryLimit)))
}

// clearTins drops what is queued in the tins from first on.
func (s *Scheduler) clearTins(first uint32) {
	for t := first; t < MaxTins; t++ {
		b := &s.tins[t]
		if b.flows != nil {
			s.clearTin(b)
		}
	}
	if s.compat&CompatClear != 0 {
		s.curTin = MaxTins - 1
	} else if s.curTin >= s.numTins {
		s.curTin = 0
	}
}

func (s *Scheduler) clearTin(b *tin) {
	for i := range b.flows {
		f := &b.flows[i]
		for f.head != 0 {
			k := s.take(b, f)
			if s.heapLeft != 0 {
				s.heapDown(s.heapPos[b.index<<10|uint32(i)])
			}
			s.discard(b, k, DropCleared)
		}
	}
	if s.compat&CompatClear != 0 {
		return
	}
	for i := range b.flows {
		f := &b.flows[i]
		s.forget(f)
		*f = flow{signals: f.signals}
		if f.signals != 0 {
			s.signals[f.signals] = signals{blueTimer: s.epoch, drops: s.signals[f.signals].drops}
		}
	}
	if b.hosts != nil {
		*b.hosts = [FlowsPerTin]host{}
	}
	s.busyTins &^= 1 << b.index
	b.sparse, b.bulk, b.decaying, b.unresponsive, b.deficit = 0, 0, 0, 0, 0
	b.fresh, b.decay, b.round = list{noFlow, noFlow}, list{noFlow, noFlow}, rotation{}
	b.sleep = decaySleep{}
}
