package engine

// ways is the associativity of the flow and host tables.
const ways = 8

// findFlow returns the index of the flow queue for p in tin b. A queue belongs
// to one hash as long as it is active; each hash may take any of 8 queues, so
// that flows collide only when all 8 are taken.
func (s *Scheduler) findFlow(b *tin, p *Packet) uint32 {
	var h uint32
	switch {
	case s.byFlow:
		h = p.FlowHash
	case s.cfg.Flows == FlowBlind:
		return 0
	default:
		if s.cfg.Flows&SrcHost != 0 {
			h = p.SrcHash
		}
		if s.cfg.Flows&DstHost != 0 {
			h ^= p.DstHash
		}
	}
	if f := &b.flows[h%FlowsPerTin]; f.tag == h && f.set != setNone {
		b.wayDirect++
		return h % FlowsPerTin
	}
	return s.searchFlow(b, p, h)
}

func (s *Scheduler) searchFlow(b *tin, p *Packet, h uint32) uint32 {
	set, way := h%FlowsPerTin&^(ways-1), h%ways
	q := (*[ways]flow)(b.flows[set:])
	assign := true
	k := way
	for range ways { // the hash has a queue already
		if q[k].tag == h {
			if k != way {
				b.wayInds++
			}
			assign = q[k].set == setNone
			goto found
		}
		k = (k + 1) % ways
	}
	for range ways { // it takes one that nobody uses
		if q[k].set == setNone {
			b.wayMiss++
			goto found
		}
		k = (k + 1) % ways
	}
	b.wayCols++ // it shares its own with another
	if q[k].set == setBulk {
		s.leaveBulk(b, &q[k])
	}
found:
	f := &q[k]
	f.tag = h
	if assign && (s.fairSrc || s.fairDst) {
		s.assignHosts(b, f, p.SrcHash, p.DstHash)
	}
	return set + k
}
