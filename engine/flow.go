package engine

import "math/bits"

// FlowsPerTin is the number of flow queues in a tin.
const FlowsPerTin = 1024

// The sets a flow can be in (RFC 8290 calls sparse flows new). Sparse: just
// became active. Wait: counted as sparse, but working off a deficit among the
// bulk flows. Decaying: empty, kept until its AQM state has come to rest.
const (
	setNone uint8 = iota
	setSparse
	setWait
	setBulk
	setDecaying
)

// flow is one queue. There are up to 8192 of them, so that its 40 bytes hold
// only what each flow needs; signals has the rest.
type flow struct {
	head, tail       uint32 // packets, indices into Scheduler.pkts; 0 = none
	backlog          uint32 // bytes
	deficit          int32  // bytes
	tag              uint32 // the hash that owns the queue
	next, prev       uint16 // neighbours in a list
	srcHost, dstHost uint16 // slots in the tin's host table
	set              uint8
	alert            bool   // its signals are not at rest
	signals          uint16 // index into Scheduler.signals
	dropNext         Time
}

// list is a FIFO of flows, linked through flow.next (and prev where flows may
// leave from the middle).
type list struct{ head, tail uint16 }

const noFlow = 0xffff

func (l *list) push(flows *[FlowsPerTin]flow, i uint32) {
	f := &flows[i&(FlowsPerTin-1)]
	f.next, f.prev = noFlow, noFlow
	if l.head == noFlow {
		l.head = uint16(i)
	} else {
		f.prev = l.tail
		flows[l.tail&(FlowsPerTin-1)].next = uint16(i)
	}
	l.tail = uint16(i)
}

func (l *list) remove(flows *[FlowsPerTin]flow, f *flow) {
	if f.prev == noFlow {
		l.head = f.next
	} else {
		flows[f.prev&(FlowsPerTin-1)].next = f.next
	}
	if f.next == noFlow {
		l.tail = f.prev
	} else {
		flows[f.next&(FlowsPerTin-1)].prev = f.prev
	}
}

// pop takes the first flow off a list that is not empty; prev links are not
// kept, so it is for lists that flows leave at the head only.
func (l *list) pop(flows *[FlowsPerTin]flow) {
	l.head = flows[l.head&(FlowsPerTin-1)].next
	if l.head != noFlow {
		flows[l.head&(FlowsPerTin-1)].prev = noFlow
	}
}

// maxGrants is how many quanta a flow gets at once at most, and one less than
// the rounds that a rotation looks ahead.
const maxGrants = 31

// rotation is the round robin over the flows that have used up a quantum.
//
// DRR gives a flow with a deficit one quantum and sends it to the end of the
// line, again and again until the deficit is paid. Where many flows share one
// host's quantum that takes hundreds of grants per packet. Here the rounds are
// counted instead: a flow that needs n quanta gets them at once and is put
// down for n rounds later. Rounds in which nobody is due are skipped.
//
// cur is the slot of the round that is being served; busy has bit n set where
// the n-th slot from there is not empty. With one quantum at a time this is
// exactly one FIFO.
type rotation struct {
	busy uint32
	cur  uint32
	slot [maxGrants + 1]list
}

// first returns the next flow in turn. The rotation must not be empty.
func (r *rotation) first() uint32 {
	if r.busy&1 == 0 {
		n := uint32(bits.TrailingZeros32(r.busy))
		r.busy >>= n & 31
		r.cur += n
	}
	return uint32(r.slot[r.cur&31].head)
}

// pop takes the flow that first returned off the rotation.
func (r *rotation) pop(flows *[FlowsPerTin]flow) {
	l := &r.slot[r.cur&31]
	if l.head == l.tail {
		r.busy &^= 1
		return
	}
	l.head = flows[l.head&(FlowsPerTin-1)].next
}

// push puts flow i down for the n-th round from now.
func (r *rotation) push(flows *[FlowsPerTin]flow, i, n uint32) {
	l := &r.slot[(r.cur+n)&31]
	if r.busy>>(n&31)&1 == 0 {
		r.busy |= 1 << (n & 31)
		l.head = uint16(i)
	} else {
		flows[l.tail&(FlowsPerTin-1)].next = uint16(i)
	}
	l.tail = uint16(i)
}

// share is what the load of a host means for one of its flows: div/65536 of a
// quantum for each grant, and at most ahead grants at once. The load may change
// before a flow's turn comes, so that it looks ahead less where one flow more or
// less makes a difference.
type share struct{ div, ahead uint16 }

// shares is indexed by load, 1 to FlowsPerTin; the rest pads it to a power of 2.
var shares = func() (t [2 * FlowsPerTin]share) {
	t[0] = share{65535, maxGrants}
	for n := 1; n <= FlowsPerTin; n++ {
		t[n] = share{uint16(65535 / n), uint16(min(1+n/2, maxGrants))}
	}
	t[1].ahead = maxGrants // its own master
	return t
}()

// load is the number of bulk flows with which f shares its busier host.
func (s *Scheduler) load(b *tin, f *flow) uint32 {
	n := uint16(1)
	if s.fairSrc {
		n = max(n, b.hosts[f.srcHost&(FlowsPerTin-1)].srcBulk)
	}
	if s.fairDst {
		n = max(n, b.hosts[f.dstHost&(FlowsPerTin-1)].dstBulk)
	}
	return uint32(n)
}

// quantum is one grant for f. The random fraction keeps the average right
// where the quotient is not whole; it can be 0.
func (s *Scheduler) quantum(b *tin, f *flow) int32 {
	return int32((b.flowQuantum*uint32(shares[s.load(b, f)%(2*FlowsPerTin)].div) + s.rand16()) >> 16)
}

// rand returns the next 32 random bits; rand16 the upper 16 of them. A linear
// congruential generator is enough for dither and for BLUE.
func (s *Scheduler) rand() uint32 {
	s.rng = s.rng*1664525 + 1013904223
	return s.rng
}

func (s *Scheduler) rand16() uint32 { return s.rand() >> 16 }
