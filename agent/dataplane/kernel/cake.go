package kernel

import (
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
)

// TCA_CAKE_*: the options of a qdisc.
const (
	cakePad       = 1
	cakeRate      = 2 // u64, bytes/s
	cakeTins      = 3
	cakeFraming   = 4
	cakeFlows     = 5
	cakeOverhead  = 6 // s32
	cakeRTT       = 7 // µs
	cakeTarget    = 8 // µs
	cakeAutorate  = 9
	cakeMemory    = 10
	cakeNAT       = 11
	cakeRaw       = 12 // its presence counts
	cakeWash      = 13
	cakeMPU       = 14
	cakeIngress   = 15
	cakeAckFilter = 16
	cakeSplitGSO  = 17
	cakeFwmark    = 18
)

// appendOptions appends every option, so that a change resets what is 0 too.
// A kernel without connection tracking refuses even "no NAT": withNAT leaves
// that option out.
func appendOptions(b *nlmsg.Builder, c engine.Config, withNAT bool) {
	b.U64(cakeRate, uint64(c.Rate/8))
	b.U32(cakeTins, uint32(c.Tins))
	b.U32(cakeFraming, uint32(c.Framing))
	b.U32(cakeFlows, uint32(c.Flows))
	// The overhead ends raw and raw keeps the overhead: one behind the other
	// they set both.
	b.U32(cakeOverhead, uint32(int32(c.Overhead)))
	if c.Raw {
		b.U32(cakeRaw, 0)
	}
	b.U32(cakeRTT, uint32(c.RTT/time.Microsecond))
	b.U32(cakeTarget, uint32(c.Target/time.Microsecond))
	b.U32(cakeAutorate, flag(c.Autorate))
	b.U32(cakeMemory, c.MemoryLimit)
	if withNAT {
		b.U32(cakeNAT, flag(c.NAT))
	}
	b.U32(cakeWash, flag(c.Wash))
	b.U32(cakeMPU, uint32(c.MPU))
	b.U32(cakeIngress, flag(c.Ingress))
	b.U32(cakeAckFilter, uint32(c.AckFilter))
	b.U32(cakeSplitGSO, flag(c.SplitGSO))
	b.U32(cakeFwmark, c.Fwmark)
}

func flag(on bool) uint32 {
	if on {
		return 1
	}
	return 0
}

// decodeOptions returns what a dump says. What it leaves out, as kernels do
// that don't have an option yet, is as it was before there was one. The MTU is
// not in it. unknown lists attributes that are newer than this program.
func decodeOptions(a nlmsg.Attrs) (c engine.Config, unknown []string) {
	c = engine.DefaultConfig()
	c.Raw = false
	for typ, v := range a.All() {
		switch typ {
		case cakePad:
		case cakeRate:
			c.Rate = engine.BitsPerSecond(v.U64() * 8)
		case cakeTins:
			c.Tins = engine.TinMode(narrow(v.U32()))
			// A mode that sch_cake does not have must not be taken for cake3,
			// which is the number behind its last one.
			if c.Tins >= engine.Cake3 {
				c.Tins = unknownTins
			}
		case cakeFraming:
			c.Framing = engine.Framing(narrow(v.U32()))
		case cakeFlows:
			c.Flows = engine.FlowMode(narrow(v.U32()))
		case cakeOverhead:
			c.Overhead = int16(max(min(int32(v.U32()), 1<<15-1), -1<<15))
		case cakeRTT:
			c.RTT = micros(v)
		case cakeTarget:
			c.Target = micros(v)
		case cakeAutorate:
			c.Autorate = v.U32() != 0
		case cakeMemory:
			c.MemoryLimit = v.U32()
		case cakeNAT:
			c.NAT = v.U32() != 0
		case cakeRaw:
			c.Raw = true
		case cakeWash:
			c.Wash = v.U32() != 0
		case cakeMPU:
			c.MPU = short(v)
		case cakeIngress:
			c.Ingress = v.U32() != 0
		case cakeAckFilter:
			c.AckFilter = engine.AckFilter(narrow(v.U32()))
		case cakeSplitGSO:
			c.SplitGSO = v.U32() != 0
		case cakeFwmark:
			c.Fwmark = v.U32()
		default:
			unknown = append(unknown, fmt.Sprintf("option %d", typ))
		}
	}
	return c, unknown
}

// unknownTins stands for a tin mode that this program does not know.
const unknownTins = engine.TinMode(255)

// narrow keeps a value that is too large for a mode apart from all modes.
func narrow(v uint32) uint8 { return uint8(min(v, 255)) }

func micros(v nlmsg.Attr) time.Duration { return time.Duration(v.U32()) * time.Microsecond }

func short(v nlmsg.Attr) uint16 { return uint16(min(v.U32(), 1<<16-1)) }

// TCA_STATS_*: statistics that every qdisc has.
const (
	statsBasic = 1 // u64 bytes, u32 packets
	statsQueue = 3 // u32: qlen, backlog, drops, requeues, overlimits
	statsApp   = 4
	statsPkt64 = 8
)

// TCA_CAKE_STATS_*.
const (
	cakeStatsCapacity    = 2 // u64, bytes/s
	cakeStatsMemoryLimit = 3
	cakeStatsMemoryUsed  = 4
	cakeStatsNetOff      = 5
	cakeStatsMinNetLen   = 6
	cakeStatsMaxNetLen   = 7
	cakeStatsMinAdjLen   = 8
	cakeStatsMaxAdjLen   = 9
	cakeStatsTins        = 10
)

// TCA_CAKE_TIN_STATS_*.
const (
	tinPackets        = 2
	tinBytes          = 3 // u64
	tinDrops          = 4
	tinDropBytes      = 5 // u64
	tinAckDrops       = 6
	tinAckDropBytes   = 7 // u64
	tinMarks          = 8
	tinMarkBytes      = 9 // u64
	tinBacklogPackets = 10
	tinBacklogBytes   = 11
	tinThreshold      = 12 // u64, bytes/s
	tinTarget         = 13
	tinInterval       = 14
	tinWayInds        = 15
	tinWayMiss        = 16
	tinWayCols        = 17
	tinPeakDelay      = 18
	tinAvgDelay       = 19
	tinBaseDelay      = 20
	tinSparse         = 21
	tinBulk           = 22
	tinUnresponsive   = 23
	tinMaxLen         = 24
	tinQuantum        = 25
)

// decodeStats fills st with what TCA_STATS2 says; the configuration is the
// caller's. Counters that the kernel has 32 bits for are as they came.
func decodeStats(a nlmsg.Attrs, st *engine.Stats) {
	*st = engine.Stats{Config: st.Config}
	for typ, v := range a.All() {
		switch typ {
		case statsBasic:
			if len(v.Bytes) >= 12 {
				st.SentBytes = v.U64()
				// Where both come, the 64-bit count is the one behind.
				st.SentPackets = uint64(v.Order.Uint32(v.Bytes[8:]))
			}
		case statsPkt64:
			st.SentPackets = v.U64()
		case statsQueue:
			if len(v.Bytes) >= 20 {
				st.Qlen = v.U32()
				st.Backlog = uint64(v.Order.Uint32(v.Bytes[4:]))
				st.Drops = uint64(v.Order.Uint32(v.Bytes[8:]))
				st.Requeues = uint64(v.Order.Uint32(v.Bytes[12:]))
				st.Overlimits = uint64(v.Order.Uint32(v.Bytes[16:]))
			}
		case statsApp:
			decodeCakeStats(v.Attrs(), st)
		}
	}
}

func decodeCakeStats(a nlmsg.Attrs, st *engine.Stats) {
	for typ, v := range a.All() {
		switch typ {
		case cakeStatsCapacity:
			st.Capacity = engine.BitsPerSecond(v.U64() * 8)
		case cakeStatsMemoryLimit:
			st.MemoryLimit = uint64(v.U32())
		case cakeStatsMemoryUsed:
			st.MemoryUsed = uint64(v.U32())
		case cakeStatsNetOff:
			st.AvgNetOff = short(v)
		case cakeStatsMinNetLen:
			st.MinNetLen = short(v)
		case cakeStatsMaxNetLen:
			st.MaxNetLen = short(v)
		case cakeStatsMinAdjLen:
			st.MinAdjLen = short(v)
		case cakeStatsMaxAdjLen:
			st.MaxAdjLen = short(v)
		case cakeStatsTins:
			for i, tin := range v.Attrs().All() {
				if i < 1 || i > engine.MaxTins {
					continue
				}
				decodeTin(tin.Attrs(), &st.Tins[i-1])
				st.NumTins = max(st.NumTins, int(i))
			}
		}
	}
	order := tinOrder(st.NumTins)
	for i := range st.NumTins {
		st.Tins[i].Index = order[i]
	}
}

func decodeTin(a nlmsg.Attrs, t *engine.TinStats) {
	for typ, v := range a.All() {
		switch typ {
		case tinPackets:
			t.Packets = uint64(v.U32())
		case tinBytes:
			t.Bytes = v.U64()
		case tinDrops:
			t.Drops = uint64(v.U32())
		case tinDropBytes:
			t.DropBytes = v.U64()
		case tinAckDrops:
			t.AckDrops = uint64(v.U32())
		case tinAckDropBytes:
			t.AckDropBytes = v.U64()
		case tinMarks:
			t.Marks = uint64(v.U32())
		case tinMarkBytes:
			t.MarkBytes = v.U64()
		case tinBacklogPackets:
			t.BacklogPackets = v.U32()
		case tinBacklogBytes:
			t.BacklogBytes = uint64(v.U32())
		case tinThreshold:
			t.Threshold = engine.BitsPerSecond(v.U64() * 8)
		case tinTarget:
			t.Target = micros(v)
		case tinInterval:
			t.Interval = micros(v)
		case tinWayInds:
			t.WayInds = uint64(v.U32())
		case tinWayMiss:
			t.WayMiss = uint64(v.U32())
		case tinWayCols:
			t.WayCols = uint64(v.U32())
		case tinPeakDelay:
			t.PeakDelay = micros(v)
		case tinAvgDelay:
			t.AvgDelay = micros(v)
		case tinBaseDelay:
			t.BaseDelay = micros(v)
		case tinSparse:
			t.SparseFlows = v.U32()
		case tinBulk:
			t.BulkFlows = v.U32()
		case tinUnresponsive:
			t.UnresponsiveFlows = v.U32()
		case tinMaxLen:
			t.MaxLen = v.U32()
		case tinQuantum:
			t.Quantum = v.U32()
		}
	}
}

// tinOrder returns the kernel's own numbers of the tins in display order. The
// number of tins tells which mode's they are.
func tinOrder(tins int) [engine.MaxTins]uint8 {
	switch tins {
	case 3:
		return [engine.MaxTins]uint8{1, 0, 2}
	case 4:
		return [engine.MaxTins]uint8{1, 0, 2, 3}
	}
	return [engine.MaxTins]uint8{0, 1, 2, 3, 4, 5, 6, 7}
}
