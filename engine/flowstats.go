package engine

// FlowState is the place of a flow queue in its tin's rotations.
type FlowState uint8

// The states of a flow queue. A SparseWait flow counts as sparse while it
// works off its deficit among the bulk flows.
const (
	FlowIdle FlowState = iota
	FlowSparse
	FlowSparseWait
	FlowBulk
	FlowDecaying
)

// FlowStats is one flow queue: the class statistics of sch_cake, and by which
// hashes it and its hosts are known.
type FlowStats struct {
	State    FlowState
	Tag      uint32 // the flow hash that owns the queue
	Qlen     uint32
	Backlog  uint32 // bytes
	Drops    uint32 // since it last was idle
	Deficit  int32  // bytes
	Count    uint32
	Dropping bool
	PDrop    uint32 // BLUE's drop probability, 1 = 2^32
	InvSqrt  uint32 // COBALT's 1/sqrt(Count), 1 = 2^32
	DropNext Time   // meaningful while Count or Dropping is set, else the end of activity
	BlueTime Time   // last change of PDrop

	SrcHost, DstHost   uint16 // slots in the tin's host table
	SrcHash, DstHash   uint32 // the host hashes there
	SrcFlows, DstFlows uint16 // bulk flows of that host
}

// FlowStats fills fs with the state of one flow queue of the tin with internal
// index tin, and reports whether there is such a queue and it is in a rotation.
func (s *Scheduler) FlowStats(tin, flow int, fs *FlowStats) bool {
	*fs = FlowStats{}
	if tin < 0 || tin >= MaxTins || flow < 0 || flow >= FlowsPerTin || s.tins[tin].flows == nil {
		return false
	}
	b := &s.tins[tin]
	f := &b.flows[flow]
	a := &s.signals[f.signals]
	*fs = FlowStats{
		State: FlowState(f.set), Tag: f.tag, Backlog: f.backlog, Drops: a.drops, Deficit: f.deficit,
		Count: a.count, Dropping: a.dropping, PDrop: a.pDrop, InvSqrt: a.invSqrt, DropNext: f.dropNext,
		BlueTime: a.blueTimer, SrcHost: f.srcHost, DstHost: f.dstHost,
	}
	for i := f.head; i != 0; i = s.pkts[i].next {
		fs.Qlen++
	}
	if b.hosts != nil {
		src, dst := &b.hosts[f.srcHost], &b.hosts[f.dstHost]
		fs.SrcHash, fs.SrcFlows = src.srcTag, src.srcBulk
		fs.DstHash, fs.DstFlows = dst.dstTag, dst.dstBulk
	}
	return f.set != setNone
}
