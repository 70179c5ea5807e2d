package engine

import "time"

// Dequeue takes the next packet that may leave at now; false when nothing may.
// What COBALT drops on the way is in Drops.
func (s *Scheduler) Dequeue(now Time) (d Delivery, ok bool) {
	s.drops = s.drops[:0]
	first := true // the decaying flows get one visit a call
	for {
		if s.qlen == 0 {
			return Delivery{}, false
		}
		if s.timeNext > now && s.failsafe > now {
			s.overlimits++
			return Delivery{}, false
		}
		b := s.pickTin(now)
		if b == nil {
			return Delivery{}, false
		}
		if i, q := s.pickPacket(b, now, &first); i != 0 {
			return s.deliver(b, q, i, now), true
		}
	}
}

// pickPacket serves the flows of b by DRR++ until one of them has a packet
// that passes COBALT, and returns the packet and the flow. 0 means that the
// round has to start again, because a flow was empty.
func (s *Scheduler) pickPacket(b *tin, now Time, first *bool) (pkt, flowIndex uint32) {
	for {
		var q uint32
		from := &b.fresh
		switch {
		case *first && b.decay.head != noFlow && (s.stepwise || now >= b.sleep.until):
			q, from = uint32(b.decay.head), &b.decay
		case b.fresh.head != noFlow:
			q = uint32(b.fresh.head)
		case b.round.busy != 0:
			q, from = b.round.first(), nil
		case b.decay.head != noFlow:
			q, from = uint32(b.decay.head), &b.decay
		default:
			return 0, 0
		}
		*first = false
		f := &b.flows[q&(FlowsPerTin-1)]

		if f.deficit <= 0 {
			if f.set == setSparse {
				if f.head != 0 {
					f.set = setBulk
					b.sparse--
					b.bulk++
					s.enterBulk(b, f)
				} else {
					f.set = setWait
				}
			}
			n := s.grant(b, f)
			b.unlinkFirst(from)
			b.round.push(b.flows, q, n)
			continue
		}
		if f.head == 0 {
			s.restFlow(b, f, q, from, now)
			return 0, 0
		}
		for {
			i := s.take(b, f)
			if s.heapLeft != 0 {
				s.heapDown(uint32(f.heapPos))
			}
			k := &s.pkts[i]
			v := s.judge(b, f, k, now)
			if v == mark || v == markDrop {
				if v == mark || f.head == 0 {
					b.marks++
					b.markBytes += uint64(k.len)
					if k.tos&3 != 3 {
						k.tos |= 3
						k.flags |= qChanged
					}
					k.flags |= qMarked
				}
			}
			if v < drop || f.head == 0 { // the last packet is not dropped
				return i, q
			}
			f.drops++
			b.drops++
			b.dropBytes += uint64(k.len)
			s.dropCount++
			if s.cfg.Ingress {
				s.charge(b, k.adj, now, true)
				f.deficit -= int32(k.adj)
				b.deficit -= int32(k.adj)
				s.discard(b, i, DropAQM)
				break
			}
			s.discard(b, i, DropAQM)
		}
	}
}

// unlinkFirst takes the first flow off a list, nil for the rotation.
func (b *tin) unlinkFirst(from *list) {
	if from == nil {
		b.round.pop(b.flows)
	} else {
		from.pop(b.flows)
	}
}

// restFlow takes an empty flow, the first of its list, out of the rotation: to
// the decaying ones as long as its AQM state has not come to rest.
func (s *Scheduler) restFlow(b *tin, f *flow, q uint32, from *list, now Time) {
	s.queueEmpty(b, f, now)
	b.unlinkFirst(from)
	switch f.set {
	case setBulk:
		b.bulk--
		s.leaveBulk(b, f)
	case setDecaying:
		b.decaying--
	default:
		b.sparse--
	}
	if f.pDrop == 0 && f.count == 0 && now >= f.dropNext {
		f.set = setNone
		return
	}
	f.set = setDecaying
	b.decaying++
	b.decay.push(b.flows, q)
	b.sleep.note(b, f)
}

// deliver accounts for packet i of flow q and hands it out.
func (s *Scheduler) deliver(b *tin, q, i uint32, now Time) Delivery {
	k := &s.pkts[i]
	f := &b.flows[q&(FlowsPerTin-1)]
	sojourn := uint64(now - k.time)
	b.avgDelay = ewma(b.avgDelay, sojourn, 8)
	b.peakDelay = ewma2(b.peakDelay, sojourn, sojourn > b.peakDelay)
	b.baseDelay = ewma2(b.baseDelay, sojourn, sojourn < b.baseDelay)
	b.sojourn.Observe(time.Duration(sojourn))

	s.charge(b, k.adj, now, false)
	f.deficit -= int32(k.adj)
	b.deficit -= int32(k.adj)

	d := Delivery{
		Handle: k.handle, Len: k.len, Sojourn: time.Duration(sojourn), Flow: uint16(q), Tin: uint8(b.index),
		TOS: k.tos, HasTOS: k.flags&qHasTOS != 0, CE: k.flags&qMarked != 0, Changed: k.flags&qChanged != 0,
	}
	s.sentBytes += uint64(k.len)
	if k.flags&qUnsplit != 0 {
		s.sentPackets += uint64(k.seg)
	} else {
		s.sentPackets++
		d.Seg = k.seg
	}
	k.next = s.free
	s.free = i
	if s.heapLeft != 0 {
		s.heapLeft--
	}
	return d
}
