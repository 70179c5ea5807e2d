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
}
