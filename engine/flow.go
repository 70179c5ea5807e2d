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

// flow is one queue. 64 bytes, two cache lines of a 74Kc: what every packet
// touches is in the first, the AQM state in the second.
type flow struct {
	head, tail       uint32 // packets, indices into Scheduler.pkts; 0 = none
	backlog          uint32 // bytes
	deficit          int32  // bytes
	tag              uint32 // the hash that owns the queue
	next, prev       uint16 // neighbours in a list
	srcHost, dstHost uint16 // slots in the tin's host table
	set              uint8
	dropping         bool
	heapPos          uint16 // place in the overflow heap

	dropNext  Time
	blueTimer Time
	count     uint32
	invSqrt   uint32
	pDrop     uint32
	drops     uint32
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
// busy has bit i set where slot i is not empty, slot cur is the round that is
// being served. With one quantum at a time this is exactly one FIFO.
type rotation struct {
	busy uint32
	cur  uint32
	slot [maxGrants + 1]list
}

// first returns the next flow in turn. The rotation must not be empty.
func (r *rotation) first() uint32 {
	if r.busy>>(r.cur&31)&1 == 0 {
		r.cur += uint32(bits.TrailingZeros32(bits.RotateLeft32(r.busy, -int(r.cur&31))))
		r.cur &= 31
	}
	return uint32(r.slot[r.cur&31].head)
}

// pop takes the flow that first returned off the rotation.
func (r *rotation) pop(flows *[FlowsPerTin]flow) {
	l := &r.slot[r.cur&31]
	if l.head == l.tail {
		r.busy &^= 1 << (r.cur & 31)
		return
	}
	l.head = flows[l.head&(FlowsPerTin-1)].next
}

// push puts flow i down for the n-th round from now.
func (r *rotation) push(flows *[FlowsPerTin]flow, i, n uint32) {
	k := (r.cur + n) & 31
	l := &r.slot[k]
	if r.busy>>k&1 == 0 {
		r.busy |= 1 << k
		l.head = uint16(i)
	} else {
		flows[l.tail&(FlowsPerTin-1)].next = uint16(i)
	}
	l.tail = uint16(i)
}

// quantumDiv[n] is the share of a flow whose host has n bulk flows, 1 = 65535.
var quantumDiv = func() (t [FlowsPerTin + 1]uint16) {
	t[0] = 65535
	for n := range uint16(FlowsPerTin) {
		t[n+1] = 65535 / (n + 1)
	}
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
	n := s.load(b, f)
	return int32(uint16((b.flowQuantum*uint32(quantumDiv[n]) + s.rand16()) >> 16))
}

// grant pays f's deficit, as far as maxGrants quanta do, and returns the
// number of rounds it has to wait for that. (load and quantum, in one place:
// this runs several times a packet.)
func (s *Scheduler) grant(b *tin, f *flow) uint32 {
	load := s.load(b, f)
	share := b.flowQuantum * uint32(quantumDiv[load])
	n := uint32(1)
	if !s.stepwise {
		// The rounds are floor(-deficit / (flowQuantum/load)) + 1.
		n += uint32(uint64(uint32(-f.deficit)*load) * uint64(b.flowsPerByte) >> 32)
		n = min(n, maxGrants)
		if load > 1 {
			// The load may change before the flow's turn comes: look ahead
			// less where one flow more or less makes a difference.
			n = min(n, 1+load/2)
		}
	}
	// n roundings spread wider than one: by the square root of n.
	w := uint32(bits.Len32(n)) / 2
	f.deficit += int32((n*share + s.rand16()<<(w&3) - (1<<(w&3)-1)<<15) >> 16)
	return n
}

// rand returns the next 32 random bits; rand16 the upper 16 of them. A linear
// congruential generator is enough for dither and for BLUE.
func (s *Scheduler) rand() uint32 {
	s.rng = s.rng*1664525 + 1013904223
	return s.rng
}

func (s *Scheduler) rand16() uint32 { return s.rand() >> 16 }
