package engine

import "time"

// MaxTins is the largest number of tins that a mode has.
const MaxTins = 8

// Stats is what tc -s qdisc shows of one shaped direction, and more. Counters
// are 64 bits wide and start at 0 with the Scheduler.
type Stats struct {
	Config Config

	SentBytes   uint64 // delivered
	SentPackets uint64 // delivered; an unsplit super-packet counts its segments
	Drops       uint64 // packets dropped by COBALT, the memory limit and the ACK filter
	Overlimits  uint64 // times the shaper held a packet back
	Requeues    uint64 // packets that the device refused
	Backlog     uint64 // bytes queued now
	Qlen        uint32 // packets queued now

	MemoryUsed  uint64 // high-water mark, bytes
	MemoryLimit uint64 // bytes
	Capacity    BitsPerSecond

	MinNetLen, MaxNetLen uint16 // network layer, bytes; min is 65535 before the first packet
	MinAdjLen, MaxAdjLen uint16 // after overhead compensation
	AvgNetOff            uint16 // average offset of the network header, bytes

	NumTins int
	Tins    [MaxTins]TinStats // in display order
}

// TinStats are the counters of one tin.
type TinStats struct {
	Threshold BitsPerSecond // above it the tin loses priority
	Target    time.Duration
	Interval  time.Duration

	PeakDelay time.Duration // average of the sojourn time that rises fast
	AvgDelay  time.Duration
	BaseDelay time.Duration // average of the sojourn time that falls fast

	BacklogBytes   uint64
	BacklogPackets uint32

	Packets uint64 // enqueued
	Bytes   uint64 // enqueued

	WayInds, WayMiss, WayCols uint64 // cake.md 1.6

	Drops, DropBytes       uint64 // COBALT and memory limit
	Marks, MarkBytes       uint64 // CE set by COBALT
	AckDrops, AckDropBytes uint64 // ACK filter

	SparseFlows       uint32 // sparse and decaying
	BulkFlows         uint32
	UnresponsiveFlows uint32 // BLUE probability above 0

	MaxLen  uint32 // largest packet enqueued, before splitting
	Quantum uint32 // of a flow, bytes

	Sojourn Histogram

	Index uint8 // the number of the tin in Enqueued, Delivery and Drop

	// Finer than tc: WayDirect are hash hits at the first way, OverflowDrops
	// the part of Drops that the memory limit made, DecayingFlows the part of
	// SparseFlows that are empty.
	WayDirect     uint64
	OverflowDrops uint64
	DecayingFlows uint32
}

// Stats fills st with the state at now. It does not allocate.
func (s *Scheduler) Stats(_ Time, st *Stats) {
	st.Config = s.Config()
	st.Overlimits, st.Requeues = s.overlimits, 0
	st.Backlog, st.Qlen = s.Backlog(), s.qlen
	// What has been delivered is what came and is not anywhere else: counting
	// it at each delivery would cost more than this.
	st.SentBytes, st.SentPackets, st.Drops = 0, s.unsplit, 0
	for i := range s.tins {
		b := &s.tins[i]
		st.Drops += b.drops + b.ackDrops
		st.SentPackets += b.packets - b.drops - b.ackDrops - b.cleared - uint64(b.qlen)
		st.SentBytes += b.bytes - b.dropBytes - b.ackDropBytes - b.clearedBytes - b.backlog
	}
	st.MemoryUsed, st.MemoryLimit = s.memMax, s.memLimit
	st.Capacity = BitsPerSecond(s.auto.peak * 8)
	l := &s.lens
	st.MinNetLen, st.MaxNetLen = uint16(l.minNet), uint16(l.maxNet)
	st.MinAdjLen, st.MaxAdjLen = uint16(l.minAdj), uint16(l.maxAdj)
	st.AvgNetOff = uint16((l.avgOff + 1<<15) >> 16)
	st.NumTins = int(s.numTins)
	for pos := range s.numTins {
		i := s.order[pos]
		s.tins[i].stats(&st.Tins[pos])
		st.Tins[pos].Index = i
	}
	clear(st.Tins[s.numTins:])
}

func (b *tin) stats(t *TinStats) {
	t.Threshold = BitsPerSecond(b.bytesPerSec * 8)
	t.Target, t.Interval = time.Duration(b.target), time.Duration(b.interval)
	t.PeakDelay = time.Duration(b.peakDelay)
	t.AvgDelay = time.Duration(b.avgDelay)
	t.BaseDelay = time.Duration(b.baseDelay)
	t.BacklogBytes, t.BacklogPackets = b.backlog, b.qlen
	t.Packets, t.Bytes = b.packets, b.bytes
	t.WayDirect, t.WayInds, t.WayMiss, t.WayCols = b.wayDirect, b.wayInds, b.wayMiss, b.wayCols
	t.Drops, t.DropBytes, t.OverflowDrops = b.drops, b.dropBytes, b.overflowDrops
	t.Marks, t.MarkBytes = b.marks, b.markBytes
	t.AckDrops, t.AckDropBytes = b.ackDrops, b.ackDropBytes
	t.SparseFlows = uint32(b.sparse + b.decaying)
	t.BulkFlows, t.UnresponsiveFlows = uint32(b.bulk), b.unresponsive
	t.DecayingFlows = uint32(b.decaying)
	t.MaxLen, t.Quantum = b.maxLen, b.flowQuantum
	t.Sojourn = b.sojourn
}
