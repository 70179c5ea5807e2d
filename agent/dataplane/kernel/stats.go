package kernel

import "github.com/cakefleet/cakefleet/engine"

// counters makes 64-bit counters of the kernel's 32-bit ones, which begin anew
// after 4.29 thousand million. It must see them more often than that: 300 000
// packets a second take four hours.
type counters struct {
	sentBytes, sentPackets, drops, overlimits, requeues uint64

	tins [engine.MaxTins]tinCounters // by the kernel's numbers; a change of mode keeps them
}

type tinCounters struct {
	packets, wayInds, wayMiss, wayCols, drops, marks, ackDrops uint64
}

// widen replaces the counters of st by what they have come to.
func (c *counters) widen(st *engine.Stats) {
	if st.SentBytes < c.sentBytes { // 64 bits: they only go back if somebody made the qdisc anew
		*c = counters{}
	}
	c.sentBytes = st.SentBytes
	widen(&c.sentPackets, &st.SentPackets)
	widen(&c.drops, &st.Drops)
	widen(&c.overlimits, &st.Overlimits)
	widen(&c.requeues, &st.Requeues)
	for i := range st.NumTins {
		t := &st.Tins[i]
		p := &c.tins[t.Index]
		widen(&p.packets, &t.Packets)
		widen(&p.wayInds, &t.WayInds)
		widen(&p.wayMiss, &t.WayMiss)
		widen(&p.wayCols, &t.WayCols)
		widen(&p.drops, &t.Drops)
		widen(&p.marks, &t.Marks)
		widen(&p.ackDrops, &t.AckDrops)
	}
}

// widen adds to total what the low 32 bits have moved on, and returns it in v.
func widen(total, v *uint64) {
	*total += uint64(uint32(*v) - uint32(*total))
	*v = *total
}

// add adds a queue of cake_mq to the sum of its siblings.
func add(sum, st *engine.Stats) {
	if sum.NumTins == 0 { // the first
		c := sum.Config
		*sum = *st
		sum.Config = c
		return
	}
	sum.SentBytes += st.SentBytes
	sum.SentPackets += st.SentPackets
	sum.Drops += st.Drops
	sum.Overlimits += st.Overlimits
	sum.Requeues += st.Requeues
	sum.Backlog += st.Backlog
	sum.Qlen += st.Qlen
	sum.MemoryUsed += st.MemoryUsed
	sum.MemoryLimit += st.MemoryLimit
	sum.Capacity = max(sum.Capacity, st.Capacity)
	sum.MinNetLen, sum.MaxNetLen = min(sum.MinNetLen, st.MinNetLen), max(sum.MaxNetLen, st.MaxNetLen)
	sum.MinAdjLen, sum.MaxAdjLen = min(sum.MinAdjLen, st.MinAdjLen), max(sum.MaxAdjLen, st.MaxAdjLen)
	sum.AvgNetOff = max(sum.AvgNetOff, st.AvgNetOff)
	for i := range min(sum.NumTins, st.NumTins) {
		a, b := &sum.Tins[i], &st.Tins[i]
		// Each queue has the share of the rate that it needs now; the largest
		// are closest to what was configured.
		a.Threshold, a.Quantum = max(a.Threshold, b.Threshold), max(a.Quantum, b.Quantum)
		a.Target, a.Interval = min(a.Target, b.Target), min(a.Interval, b.Interval)
		a.PeakDelay = max(a.PeakDelay, b.PeakDelay)
		a.AvgDelay = max(a.AvgDelay, b.AvgDelay)
		a.BaseDelay = max(a.BaseDelay, b.BaseDelay)
		a.BacklogBytes += b.BacklogBytes
		a.BacklogPackets += b.BacklogPackets
		a.Packets += b.Packets
		a.Bytes += b.Bytes
		a.WayInds += b.WayInds
		a.WayMiss += b.WayMiss
		a.WayCols += b.WayCols
		a.Drops += b.Drops
		a.DropBytes += b.DropBytes
		a.Marks += b.Marks
		a.MarkBytes += b.MarkBytes
		a.AckDrops += b.AckDrops
		a.AckDropBytes += b.AckDropBytes
		a.SparseFlows += b.SparseFlows
		a.BulkFlows += b.BulkFlows
		a.UnresponsiveFlows += b.UnresponsiveFlows
		a.MaxLen = max(a.MaxLen, b.MaxLen)
	}
}
