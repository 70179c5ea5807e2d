package engine

import "time"

// Dequeue takes the next packet that may leave at now; false when nothing may.
// What COBALT drops on the way is in Drops.
//
// It is the round of sch_cake in one piece: gate, tin, flow, packet, verdict,
// accounts. Everything in it runs for every packet, which is why the small
// steps are written out.
func (s *Scheduler) Dequeue(now Time) (d Delivery, ok bool) {
	s.drops = s.drops[:0]
	visit := true // one decaying flow may be looked at in each call
round:
	for s.qlen != 0 {
		if s.timeNext > now && s.failsafe > now {
			s.overlimits++
			break
		}
		b := s.pickTin(now)
		if b == nil {
			break
		}
	pick:
		for {
			q := s.pickFlow(b, now, visit)
			visit = false
			if q == noFlow {
				continue round
			}
			f := &b.flows[q&(FlowsPerTin-1)]
			for {
				i := f.head
				k := &s.pkts[i]
				f.head = k.next
				f.backlog -= k.len
				b.backlog -= uint64(k.len)
				b.qlen--
				s.qlen--
				s.memUsed -= uint64(k.truesize)
				if s.heapLeft != 0 {
					s.heapDown(uint32(f.heapPos))
				}

				sojourn := uint64(now - k.time)
				if sojourn <= b.overTarget && f.count == 0 && f.pDrop == 0 {
					// Under target and nothing to remember: most packets.
					f.dropping = false
					f.dropNext = now + Time(b.interval)
				} else if v := s.judge(b, f, k, now); v != deliver {
					if v == mark || f.head == 0 && v == markDrop {
						s.mark(b, k)
					}
					if v >= drop && f.head != 0 { // the last packet stays
						f.drops++
						b.drops++
						b.dropBytes += uint64(k.len)
						if s.cfg.Ingress {
							s.charge(b, k.adj, now, true)
							f.deficit -= int32(k.adj)
							b.deficit -= int32(k.adj)
							s.discard(b, i, DropAQM)
							continue pick
						}
						s.discard(b, i, DropAQM)
						continue
					}
				}

				b.observe(sojourn)
				s.charge(b, k.adj, now, false)
				f.deficit -= int32(k.adj)
				b.deficit -= int32(k.adj)
				if s.heapLeft != 0 {
					s.heapLeft--
				}
				d.Handle, d.Len = k.handle, k.len
				d.Sojourn = time.Duration(sojourn)
				d.Seg, d.Flow, d.Tin, d.TOS = k.seg, uint16(q), uint8(b.index), k.tos
				if flags := k.flags; flags != qHasTOS|qMarkable {
					d.HasTOS = flags&qHasTOS != 0
					d.CE, d.Changed = flags&qMarked != 0, flags&qChanged != 0
					if flags&qUnsplit != 0 {
						s.unsplit += uint64(k.seg) - 1
						d.Seg = 0
					}
				} else {
					d.HasTOS = true
				}
				k.next = s.free
				s.free = i
				return d, true
			}
		}
	}
	return d, false
}

// pickFlow chooses the flow of b to serve by DRR++: one that has a packet and
// a deficit above 0. noFlow means that the round has to start again, because a
// flow was empty. With visit the decaying flows come first.
func (s *Scheduler) pickFlow(b *tin, now Time, visit bool) uint32 {
	flows := b.flows
	for {
		var q uint32
		var from *list
		switch {
		case visit && b.decay.head != noFlow && (now >= b.sleep.until || s.stepwise):
			from = &b.decay
			q = uint32(from.head)
		case b.fresh.head != noFlow:
			from = &b.fresh
			q = uint32(from.head)
		case b.round.busy != 0:
			q = b.round.first()
		case b.decay.head != noFlow:
			from = &b.decay
			q = uint32(from.head)
		default:
			return noFlow
		}
		visit = false
		f := &flows[q&(FlowsPerTin-1)]
		if f.deficit > 0 {
			if f.head != 0 {
				return q
			}
			s.restFlow(b, f, q, from, now)
			return noFlow
		}
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
		b.round.push(flows, q, n)
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
	if f.pDrop != 0 || f.count != 0 {
		s.queueEmpty(b, f, now)
	}
	f.dropping = false
	b.unlinkFirst(from)
	was, n := f.set, b.decaying
	switch was {
	case setBulk:
		b.bulk--
		s.leaveBulk(b, f)
	case setDecaying:
		b.decaying--
	default:
		b.sparse--
	}
	if b.sparse+b.bulk == 0 {
		s.busyTins &^= 1 << (b.index & 31)
	}
	if f.pDrop == 0 && f.count == 0 && now >= f.dropNext {
		f.set = setNone
		if was == setDecaying {
			b.sleep.visited(n, Never)
		}
		return
	}
	f.set = setDecaying
	b.decaying++
	b.decay.push(b.flows, q)
	if was == setDecaying {
		b.sleep.visited(n, b.due(f))
	} else {
		b.sleep.entered(b.due(f))
	}
}

// mark sets CE on packet k, which can bear it.
func (s *Scheduler) mark(b *tin, k *queued) {
	b.marks++
	b.markBytes += uint64(k.len)
	if k.tos&3 != 3 {
		k.tos |= 3
		k.flags |= qChanged
	}
	k.flags |= qMarked
}

// observe takes a delivered packet's sojourn time, in ns, into the averages
// and the histogram.
func (b *tin) observe(sojourn uint64) {
	b.sojourn[histogramBucket(time.Duration(sojourn))]++
	if (sojourn|b.avgDelay|b.peakDelay|b.baseDelay)>>32 == 0 {
		// The same in 32 bits, which hold 4.3 s.
		x := uint32(sojourn)
		avg, peak, base := uint32(b.avgDelay), uint32(b.peakDelay), uint32(b.baseDelay)
		b.avgDelay = uint64(avg - avg>>8 + x>>8)
		if x > peak {
			b.peakDelay = uint64(peak - peak>>2 + x>>2)
		} else {
			b.peakDelay = uint64(peak - peak>>8 + x>>8)
		}
		if x < base {
			b.baseDelay = uint64(base - base>>2 + x>>2)
		} else {
			b.baseDelay = uint64(base - base>>8 + x>>8)
		}
		return
	}
	b.avgDelay = ewma(b.avgDelay, sojourn, 8)
	b.peakDelay = ewma2(b.peakDelay, sojourn, sojourn > b.peakDelay)
	b.baseDelay = ewma2(b.baseDelay, sojourn, sojourn < b.baseDelay)
}
