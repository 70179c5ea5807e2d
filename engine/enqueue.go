package engine

// Enqueue puts p into a flow queue. What it drops to make room, or because p
// makes it redundant, is in Drops; that may be p itself.
func (s *Scheduler) Enqueue(now Time, p *Packet) Enqueued {
	s.drops = s.drops[:0]
	t, tos, washed := uint32(0), p.TOS, false
	if s.classes {
		t, tos, washed = s.classify(p)
	}
	b := &s.tins[t&7]
	q := s.findFlow(b, p) & (FlowsPerTin - 1)
	f := &b.flows[q]

	// A clock that stood still while nothing was queued starts at now.
	if b.qlen == 0 {
		if b.timeNext < now {
			b.timeNext = now
		}
		if s.qlen == 0 {
			if s.timeNext < now {
				s.timeNext, s.failsafe = now, now
			} else if s.timeNext > now && s.failsafe > now {
				s.overlimits++
			}
		}
	}
	if p.Len > b.maxLen {
		b.maxLen = p.Len
	}

	var flags uint8
	if p.HasTOS {
		flags = qHasTOS
		if p.Writable {
			flags |= qMarkable
		}
	}
	if washed {
		flags |= qChanged
	}
	grown := true
	if p.Segs > 1 && s.cfg.SplitGSO {
		s.enqueueSegments(now, b, f, p, tos, flags)
	} else {
		adj := s.adjustPacket(p)
		i := s.newPacket()
		k := &s.pkts[i]
		k.handle, k.len, k.adj, k.truesize = p.Handle, p.Len, adj, p.Truesize
		k.time = now
		k.seg, k.tos, k.flags = 0, tos, flags
		if p.Segs > 1 {
			k.flags |= qUnsplit
			k.seg = p.Segs
		}
		s.put(b, f, i, k)
		if s.acks != nil {
			s.acks[i].parse(p.Header)
			if s.cfg.AckFilter != AckFilterOff {
				if a := s.filterAcks(f); a != 0 {
					grown = s.dropAck(now, b, f, a, p.Len)
				}
			}
		}
	}
	if s.heapLeft != 0 {
		if grown || s.compat&CompatHeap != 0 {
			s.heapUp(s.heapPos[t<<10|q])
		} else {
			s.heapDown(s.heapPos[t<<10|q])
		}
	}
	if s.timing {
		s.measure(now, p)
	}

	switch f.set {
	case setNone, setDecaying:
		if f.set == setDecaying {
			b.decaying--
			b.decay.remove(b.flows, f)
		}
		b.fresh.push(b.flows, q)
		s.busyTins |= 1 << (t & 31)
		f.set = setSparse
		b.sparse++
		f.deficit = s.quantum(b, f)
	case setWait:
		f.set = setBulk
		b.sparse--
		b.bulk++
		s.enterBulk(b, f)
	}

	e := Enqueued{Tin: uint8(t), Flow: uint16(q)}
	if s.memUsed > s.memMax {
		s.memMax = s.memUsed
	}
	for s.memUsed > s.memLimit {
		victim, dropped := s.dropFattest(now)
		if victim == heapEntry(t<<10|q) {
			e.Congested = true
		}
		if dropped {
			b.overflowDrops++
		}
	}
	return e
}

// enqueueSegments queues a super-packet segment by segment. Each counts as a
// packet, with the memory that a buffer of its own would take.
func (s *Scheduler) enqueueSegments(now Time, b *tin, f *flow, p *Packet, tos, flags uint8) {
	size, hdr := uint32(p.GSOSize), uint32(p.HeaderLen)
	payload := p.Len - min(p.Len, uint32(p.Segs)*hdr)
	for n := range p.Segs {
		l := max(hdr+min(payload, size), 1)
		payload -= min(payload, size)
		truesize := uint32(2304)
		if l <= 256 {
			truesize = 768
		}
		s.noteOffset(uint32(p.NetOff))
		i := s.newPacket()
		k := &s.pkts[i]
		*k = queued{
			handle: p.Handle, len: l, adj: s.adjust(l, uint32(p.NetOff)), truesize: truesize,
			time: now, seg: n, tos: tos, flags: flags,
		}
		s.put(b, f, i, k)
		if s.acks != nil {
			a := &s.acks[i]
			a.parse(p.Header)
			a.pure = false
		}
	}
}

// put appends packet i to f.
func (s *Scheduler) put(b *tin, f *flow, i uint32, k *queued) {
	k.next = 0
	if f.head == 0 {
		f.head = i
	} else {
		s.pkts[f.tail].next = i
	}
	f.tail = i
	f.backlog += k.len
	b.backlog += uint64(k.len)
	b.qlen++
	b.packets++
	b.bytes += uint64(k.len)
	s.qlen++
	s.memUsed += uint64(k.truesize)
}

// dropAck drops packet i, which filterAcks took out of f, in favour of one of
// n bytes, and reports whether f's backlog is at least what it was before both.
func (s *Scheduler) dropAck(now Time, b *tin, f *flow, i, n uint32) bool {
	a := &s.pkts[i]
	l := a.len
	s.uncount(b, f, a)
	b.ackDrops++
	b.ackDropBytes += uint64(l)
	if s.timing {
		s.auto.windowBytes -= uint64(l)
	}
	if s.cfg.Ingress {
		s.charge(b, a.adj, now, true)
	}
	s.discard(b, i, DropAck)
	return n >= l
}

// take removes the first packet of f, which must have one.
func (s *Scheduler) take(b *tin, f *flow) uint32 {
	i := f.head
	k := &s.pkts[i]
	f.head = k.next
	s.uncount(b, f, k)
	return i
}

// uncount takes packet k, which has left f, off every sum.
func (s *Scheduler) uncount(b *tin, f *flow, k *queued) {
	f.backlog -= k.len
	b.backlog -= uint64(k.len)
	b.qlen--
	s.qlen--
	s.memUsed -= uint64(k.truesize)
}

// discard reports packet i, which has left its queue, as dropped.
func (s *Scheduler) discard(b *tin, i uint32, why DropReason) {
	k := &s.pkts[i]
	if why == DropCleared {
		b.cleared++
		b.clearedBytes += uint64(k.len)
	}
	d := Drop{Handle: k.handle, Len: k.len, Tin: uint8(b.index), Reason: why}
	if k.flags&qUnsplit == 0 {
		d.Seg = k.seg
	}
	s.drops = append(s.drops, d)
	k.next = s.free
	s.free = i
}

// newPacket returns an unused index of pkts.
func (s *Scheduler) newPacket() uint32 {
	i := s.free
	if i == 0 {
		return s.morePackets()
	}
	s.free = s.pkts[i].next
	return i
}

// morePackets makes the pool half as large again, and returns a new index.
// The pool never shrinks: it stops growing at what the memory limit lets in.
func (s *Scheduler) morePackets() uint32 {
	if len(s.pkts) == cap(s.pkts) {
		n := cap(s.pkts) + cap(s.pkts)/2
		pkts := make([]queued, len(s.pkts), n)
		copy(pkts, s.pkts)
		s.pkts = pkts
		if s.acks != nil {
			acks := make([]ackInfo, len(s.acks), n)
			copy(acks, s.acks)
			s.acks = acks
		}
	}
	i := len(s.pkts)
	s.pkts = s.pkts[:i+1]
	if s.acks != nil {
		s.acks = s.acks[:i+1]
	}
	return uint32(i)
}
