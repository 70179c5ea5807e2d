package engine

import (
	"math/bits"
	"time"
)

// Dequeue takes the next packet that may leave at now; false when nothing may.
// What COBALT drops on the way is in Drops.
//
// It is the round of sch_cake in one piece: gate, tin, flow, packet, verdict,
// accounts. Everything in it runs for every packet, which is why the small
// steps are written out.
func (s *Scheduler) Dequeue(now Time) (d Delivery, ok bool) {
	ok = s.DequeueTo(now, &d)
	return d, ok
}

// DequeueTo is Dequeue for who has a place for the delivery. If there is none it
// leaves d as it was.
func (s *Scheduler) DequeueTo(now Time, d *Delivery) (ok bool) {
	s.drops = s.drops[:0]
	visit := true // one decaying flow may be looked at in each call
round:
	for s.qlen != 0 {
		if s.timeNext > now && s.failsafe > now {
			if s.stepwise {
				s.overlimits++
			}
			break
		}
		var b *tin
		if s.inTurn {
			b = s.pickTinInTurn(now)
		} else {
			b = s.pickTinByClock(now)
		}
		if b == nil {
			break
		}
	pick:
		for {
			q := s.pickFlow(b, now, visit)
			visit = false
			if q == noFlow {
				if b.sparse+b.bulk != 0 && !s.cfg.Ingress {
					continue pick // nothing has been charged: the same tin
				}
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
					s.heapDown(s.heapPos[b.index<<10|q])
				}

				sojourn := uint64(now - k.time)
				if sojourn <= b.overTarget && !f.alert {
					// Under target and nothing to remember: most packets.
					f.dropNext = now + Time(b.interval)
				} else if v := s.judge(b, f, k, now); v != deliver {
					if v == mark || f.head == 0 && v == markDrop {
						s.mark(b, k)
					}
					if v >= drop && f.head != 0 { // the last packet stays
						s.remember(f).drops++
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
				if s.shaped {
					s.charge(b, k.adj, now, false)
				}
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
					d.HasTOS, d.CE, d.Changed = true, false, false
				}
				k.next = s.free
				s.free = i
				return true
			}
		}
	}
	return false
}

// pickFlow chooses the flow of b, which has some that are sparse or bulk, to
// serve by DRR++: one that has a packet and a deficit above 0. noFlow means that
// the round has to start again, because a flow was empty. With visit the
// decaying flows come first.
func (s *Scheduler) pickFlow(b *tin, now Time, visit bool) uint32 {
	flows := b.flows
	l := &b.fresh
	if visit && b.decay.head != noFlow && (now >= b.sleep.until || s.stepwise) {
		l = &b.decay
	}
	for {
		q := uint32(l.head)
		turn := q == noFlow // nothing in l: the bulk flows take turns
		if turn {
			q = b.round.first()
		}
		f := &flows[q&(FlowsPerTin-1)]
		if f.deficit > 0 {
			if f.head != 0 {
				return q
			}
			if turn {
				b.round.pop(flows)
			} else {
				l.pop(flows)
			}
			s.restFlow(b, f, q, now)
			return noFlow
		}

		if turn {
			b.round.pop(flows)
		} else {
			l.pop(flows)
			l = &b.fresh
			if f.head == 0 {
				f.set = setWait
			} else {
				f.set = setBulk
				b.sparse--
				b.bulk++
				s.enterBulk(b, f)
			}
		}

		// As many quanta as pay the deficit, floor(-deficit*load/flowQuantum)+1,
		// but no more than the flow may look ahead.
		load := uint32(1)
		if s.fairSrc {
			load = max(load, uint32(b.hosts[f.srcHost%FlowsPerTin].srcBulk))
		}
		if s.fairDst {
			load = max(load, uint32(b.hosts[f.dstHost%FlowsPerTin].dstBulk))
		}
		sh := &shares[load%uint32(len(shares))]
		bytes, n := b.flowQuantum*uint32(sh.div), uint32(1)
		if !s.stepwise {
			n = min(uint32(mul(uint32(-f.deficit)*load, b.flowsPerByte)>>32)+1, uint32(sh.ahead))
		}
		if n == 1 {
			bytes += s.rand16()
		} else {
			// n roundings spread wider than one: by the square root of n, 2 or 4.
			w := uint32(1)
			if n >= 8 {
				w = 2
			}
			bytes = n*bytes + s.rand16()<<w - (1<<w-1)<<15
		}
		f.deficit += int32(bytes >> 16)

		b.round.push(flows, q, n)
	}
}

// restFlow puts an empty flow, which has been taken off its list, among the
// decaying ones as long as its AQM state has not come to rest.
func (s *Scheduler) restFlow(b *tin, f *flow, q uint32, now Time) {
	rest, due := now >= f.dropNext, f.dropNext
	if f.alert {
		rest, due = s.queueEmpty(b, f, now)
	}
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
	if rest {
		f.set = setNone
		s.forget(f)
		if was == setDecaying {
			b.sleep.visited(n, Never)
		}
		return
	}
	f.set = setDecaying
	b.decaying++
	b.decay.push(b.flows, q)
	if was == setDecaying {
		b.sleep.visited(n, due)
	} else {
		b.sleep.entered(due)
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
	if (sojourn|b.avgDelay|b.peakDelay|b.baseDelay)>>32 != 0 {
		b.sojourn.Observe(time.Duration(sojourn))
		b.avgDelay = ewma(b.avgDelay, sojourn, 8)
		b.peakDelay = ewma2(b.peakDelay, sojourn, sojourn > b.peakDelay)
		b.baseDelay = ewma2(b.baseDelay, sojourn, sojourn < b.baseDelay)
		return
	}
	// The same in 32 bits, which hold 4.3 s.
	x := uint32(sojourn)
	i := x >> histogramShift
	if i >= 4 {
		octave := uint32(bits.Len32(i)) - 1
		i = (octave-1)*4 + i>>((octave-2)&31)&3
	}
	b.sojourn[min(i, HistogramBuckets-1)]++
	avg, peak, base := uint32(b.avgDelay), uint32(b.peakDelay), uint32(b.baseDelay)
	slow := x >> 8
	b.avgDelay = uint64(avg - avg>>8 + slow)
	if x > peak {
		b.peakDelay = uint64(peak - peak>>2 + x>>2)
	} else {
		b.peakDelay = uint64(peak - peak>>8 + slow)
	}
	if x < base {
		b.baseDelay = uint64(base - base>>2 + x>>2)
	} else {
		b.baseDelay = uint64(base - base>>8 + slow)
	}
}
