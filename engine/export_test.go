package engine

import "fmt"

// CheckInvariants recomputes every sum and every membership of s the slow way
// and says where the books of s are wrong.
func CheckInvariants(s *Scheduler) error {
	var bytes, memory uint64
	var packets uint32
	for i := range s.tins {
		b := &s.tins[i]
		if b.flows == nil {
			continue
		}
		if err := s.checkTin(b, &bytes, &memory, &packets); err != nil {
			return fmt.Errorf("tin %d: %w", i, err)
		}
	}
	if bytes != s.Backlog() || packets != s.qlen || memory != s.memUsed {
		return fmt.Errorf("%d bytes, %d packets, %d of memory counted; kept are %d, %d and %d",
			bytes, packets, memory, s.Backlog(), s.qlen, s.memUsed)
	}
	if err := s.checkSignals(); err != nil {
		return err
	}
	return s.checkHeap()
}

func (s *Scheduler) checkTin(b *tin, bytes, memory *uint64, packets *uint32) error {
	var sets [setDecaying + 1]int32
	var unresponsive, qlen uint32
	var backlog uint64
	var src, dst [FlowsPerTin]uint16
	for q := range b.flows {
		f := &b.flows[q]
		sets[f.set]++
		if s.signals[f.signals].pDrop != 0 {
			unresponsive++
		}
		if f.set == setBulk {
			src[f.srcHost]++
			dst[f.dstHost]++
		}
		var n uint32
		last := uint32(0)
		for i := f.head; i != 0; i = s.pkts[i].next {
			k := &s.pkts[i]
			n += k.len
			qlen++
			*memory += uint64(k.truesize)
			last = i
		}
		if last != 0 && f.tail != last {
			return fmt.Errorf("flow %d: tail %d, last packet %d", q, f.tail, last)
		}
		if n != f.backlog {
			return fmt.Errorf("flow %d: %d bytes queued, %d kept", q, n, f.backlog)
		}
		if n != 0 && (f.set == setNone || f.set == setDecaying) {
			return fmt.Errorf("flow %d has packets and is in set %d", q, f.set)
		}
		backlog += uint64(n)
	}
	*bytes += backlog
	*packets += qlen
	if backlog != b.backlog || qlen != b.qlen {
		return fmt.Errorf("%d bytes, %d packets counted, %d and %d kept", backlog, qlen, b.backlog, b.qlen)
	}
	if sets[setSparse]+sets[setWait] != b.sparse || sets[setBulk] != b.bulk || sets[setDecaying] != b.decaying {
		return fmt.Errorf("flows by set %v, kept are sparse %d, bulk %d, decaying %d", sets, b.sparse, b.bulk, b.decaying)
	}
	if unresponsive != b.unresponsive {
		return fmt.Errorf("%d unresponsive flows, %d kept", unresponsive, b.unresponsive)
	}
	if b.hosts == nil {
		if (s.fairSrc || s.fairDst) && sets[setBulk] != 0 {
			return fmt.Errorf("%d bulk flows and no host table", sets[setBulk])
		}
	} else if s.fairSrc || s.fairDst {
		for h := range b.hosts {
			if s.fairSrc && b.hosts[h].srcBulk != src[h] || s.fairDst && b.hosts[h].dstBulk != dst[h] {
				return fmt.Errorf("host %d has %d and %d bulk flows, kept are %d and %d",
					h, src[h], dst[h], b.hosts[h].srcBulk, b.hosts[h].dstBulk)
			}
		}
	}
	return b.checkLists(sets)
}

// checkLists walks the rotations: every flow in a set is in the right one once.
func (b *tin) checkLists(sets [setDecaying + 1]int32) error {
	seen := map[uint16]bool{}
	walk := func(l list, allowed ...uint8) error {
		for q := l.head; ; q = b.flows[q].next {
			if q == noFlow || seen[q] {
				return fmt.Errorf("flow %d in a list twice, or a list without end", q)
			}
			seen[q] = true
			ok := false
			for _, set := range allowed {
				ok = ok || b.flows[q].set == set
			}
			if !ok {
				return fmt.Errorf("flow %d of set %d is in the list of sets %v", q, b.flows[q].set, allowed)
			}
			if q == l.tail {
				return nil
			}
		}
	}
	if b.fresh.head != noFlow {
		if err := walk(b.fresh, setSparse); err != nil {
			return err
		}
	}
	if b.decay.head != noFlow {
		if err := walk(b.decay, setDecaying); err != nil {
			return err
		}
	}
	for k := range b.round.slot {
		if b.round.busy>>k&1 != 0 {
			if err := walk(b.round.slot[(int(b.round.cur)+k)%len(b.round.slot)], setSparse, setWait, setBulk); err != nil {
				return err
			}
		}
	}
	if want := int(sets[setSparse] + sets[setWait] + sets[setBulk] + sets[setDecaying]); len(seen) != want {
		return fmt.Errorf("%d flows in the lists, %d in a set", len(seen), want)
	}
	return nil
}

// checkHeap holds only while the heap is kept up to date.
func (s *Scheduler) checkHeap() error {
	for i, e := range s.heap {
		if int(s.heapPos[e]) != i {
			return fmt.Errorf("heap entry %d names flow %d, which says %d", i, e, s.heapPos[e])
		}
		if p := s.heap[max(i-1, 0)/2]; s.heapLeft != 0 && s.compat&CompatHeap == 0 && s.flows[p].backlog < s.flows[e].backlog {
			return fmt.Errorf("heap entry %d has %d bytes, its parent %d", i, s.flows[e].backlog, s.flows[p].backlog)
		}
	}
	return nil
}

// checkSignals: each flow has signals of its own, those that are free belong to
// nobody, and idle flows have none unless the kernel's ways are followed.
func (s *Scheduler) checkSignals() error {
	if s.signals[0] != (signals{}) {
		return fmt.Errorf("signals of flows without: %+v", s.signals[0])
	}
	owned := make([]int, len(s.signals))
	for i := range s.flows {
		f := &s.flows[i]
		if a := &s.signals[f.signals]; f.alert != (a.count != 0 || a.pDrop != 0) || a.dropping && !f.alert {
			return fmt.Errorf("flow %d: alert %v, signals %+v", i, f.alert, *a)
		}
		if f.signals == 0 {
			continue
		}
		owned[f.signals]++
		if f.set == setNone && !s.stepwise {
			return fmt.Errorf("flow %d is idle and has signals", i)
		}
	}
	for i := s.freeSignals; i != 0; i = s.signals[i].count {
		owned[i]++
	}
	for i, n := range owned[1:] {
		if n != 1 {
			return fmt.Errorf("signals %d belong to %d", i+1, n)
		}
	}
	return nil
}
