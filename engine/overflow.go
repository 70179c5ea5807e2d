package engine

// Over the memory limit, the fattest flow loses its first packet. A heap over
// all flow queues, largest backlog first, knows which that is. It is built
// when it is needed and kept up to date until heapFresh packets have been
// delivered without it.
const heapFresh = 65535

// heapEntry names a flow: tin<<10 | queue.
type heapEntry = uint16

func (s *Scheduler) heapBacklog(e heapEntry) uint32 { return s.flows[e].backlog }

func (s *Scheduler) heapPlace(i uint32, e heapEntry) {
	s.heap[i] = e
	s.heapPos[e] = uint16(i)
}

// heapInit numbers the entries as sch_cake does, queue by queue, all tins of a
// queue together.
func (s *Scheduler) heapInit() {
	tins := uint32(len(s.flows) / FlowsPerTin)
	s.heap, s.heapPos = make([]heapEntry, len(s.flows)), make([]uint16, len(s.flows))
	for i := range uint32(len(s.flows)) {
		s.heapPlace(i, heapEntry(i%tins*FlowsPerTin+i/tins))
	}
}

func (s *Scheduler) heapBuild() {
	if s.heap == nil {
		s.heapInit()
	}
	for i := len(s.heap) / 2; i >= 0; i-- {
		s.heapDown(uint16(i))
	}
}

// heapDown restores the order below i, whose backlog may have shrunk.
func (s *Scheduler) heapDown(at uint16) {
	i := uint32(at)
	if s.compat&CompatHeap != 0 {
		s.heapDown61(i)
		return
	}
	heap, pos, flows := s.heap, s.heapPos, s.flows
	if i >= uint32(len(heap)) {
		return
	}
	e := heap[i]
	mine := flows[e].backlog
	for {
		c := 2*i + 1
		if c >= uint32(len(heap)) {
			break
		}
		ce := heap[c]
		most := flows[ce].backlog
		if r := c + 1; r < uint32(len(heap)) {
			if re := heap[r]; flows[re].backlog > most {
				c, ce, most = r, re, flows[re].backlog
			}
		}
		if most <= mine {
			if i == uint32(at) {
				return
			}
			break
		}
		heap[i] = ce
		pos[ce] = uint16(i)
		i = c
	}
	heap[i] = e
	pos[e] = uint16(i)
}

// heapDown61 is heapDown with CompatHeap: below the first level it compares
// with the backlog of the child that moved up, not of the entry that sinks.
func (s *Scheduler) heapDown61(i uint32) {
	n := uint32(len(s.heap))
	most := s.heapBacklog(s.heap[i])
	for m := i; m < n; {
		l, r := 2*m+1, 2*m+2
		if l < n {
			if b := s.heapBacklog(s.heap[l]); b > most {
				m, most = l, b
			}
		}
		if r < n {
			if b := s.heapBacklog(s.heap[r]); b > most {
				m, most = r, b
			}
		}
		if m == i {
			return
		}
		a, b := s.heap[i], s.heap[m]
		s.heapPlace(i, b)
		s.heapPlace(m, a)
		i = m
	}
}

// heapUp restores the order above i, whose backlog may have grown.
func (s *Scheduler) heapUp(at uint16) {
	i := uint32(at)
	heap, pos, flows := s.heap, s.heapPos, s.flows
	if i >= uint32(len(heap)) {
		return
	}
	e := heap[i]
	mine := flows[e].backlog
	for i > 0 {
		p := (i - 1) / 2
		pe := heap[p]
		if flows[pe].backlog >= mine {
			if i == uint32(at) {
				return
			}
			break
		}
		heap[i] = pe
		pos[pe] = uint16(i)
		i = p
	}
	heap[i] = e
	pos[e] = uint16(i)
}

// dropFattest drops the head of the fattest queue and returns that queue's
// entry. With CompatHeap the queue may be empty: nothing is dropped then, and
// the heap is built anew the next time. Where that does not help, because what is
// queued has no length, whoever has a packet loses it.
func (s *Scheduler) dropFattest(now Time) (victim heapEntry, dropped bool) {
	if s.heapLeft == 0 {
		s.heapBuild()
	}
	s.heapLeft = heapFresh
	e := s.heap[0]
	if s.flows[e].head == 0 {
		s.heapLeft = 0
		if s.emptyTops++; s.compat&CompatHeap != 0 && s.emptyTops < 64 {
			return e, false
		}
		for e = 0; s.flows[e].head == 0; e++ {
		}
	}
	s.emptyTops = 0
	b, f := &s.tins[e>>10&7], &s.flows[e]
	i := s.take(b, f)
	p := &s.pkts[i]
	s.queueFull(b, f, now)
	s.signals[f.signals].drops++
	b.drops++
	b.dropBytes += uint64(p.len)
	if s.cfg.Ingress {
		s.charge(b, p.adj, now, true)
	}
	s.discard(b, i, DropOverflow)
	if s.heapLeft != 0 {
		s.heapDown(0)
	}
	return e, true
}
