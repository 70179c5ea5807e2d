package engine

// host counts the bulk flows of the hosts that have taken this slot: one as a
// source, one as a destination; the two have nothing to do with each other.
type host struct {
	srcTag, dstTag   uint32
	srcBulk, dstBulk uint16
}

// assignHosts finds slots for the two hosts of flow f, as far as the flow mode
// is fair between hosts, 8 ways each: the slot that has the tag, else one
// without bulk flows, else the first, which is then shared.
func (s *Scheduler) assignHosts(b *tin, f *flow, src, dst uint32) {
	h := b.hosts
	if s.fairSrc {
		set, way := src%FlowsPerTin&^(ways-1), src%ways
		k := way
		for range ways {
			if h[(set+k)%FlowsPerTin].srcTag == src {
				goto foundSrc
			}
			k = (k + 1) % ways
		}
		for range ways {
			if h[(set+k)%FlowsPerTin].srcBulk == 0 {
				break
			}
			k = (k + 1) % ways
		}
		h[(set+k)%FlowsPerTin].srcTag = src
	foundSrc:
		f.srcHost = uint16(set + k)
		if f.set == setBulk {
			h[f.srcHost%FlowsPerTin].addSrc()
		}
	}
	if s.fairDst {
		set, way := dst%FlowsPerTin&^(ways-1), dst%ways
		k := way
		for range ways {
			if h[(set+k)%FlowsPerTin].dstTag == dst {
				goto foundDst
			}
			k = (k + 1) % ways
		}
		for range ways {
			if h[(set+k)%FlowsPerTin].dstBulk == 0 {
				break
			}
			k = (k + 1) % ways
		}
		h[(set+k)%FlowsPerTin].dstTag = dst
	foundDst:
		f.dstHost = uint16(set + k)
		if f.set == setBulk {
			h[f.dstHost%FlowsPerTin].addDst()
		}
	}
}

func (h *host) addSrc() {
	if h.srcBulk < FlowsPerTin {
		h.srcBulk++
	}
}

func (h *host) addDst() {
	if h.dstBulk < FlowsPerTin {
		h.dstBulk++
	}
}

// enterBulk counts f with its hosts; leaveBulk takes it off.
func (s *Scheduler) enterBulk(b *tin, f *flow) {
	if s.fairSrc {
		b.hosts[f.srcHost%FlowsPerTin].addSrc()
	}
	if s.fairDst {
		b.hosts[f.dstHost%FlowsPerTin].addDst()
	}
}

func (s *Scheduler) leaveBulk(b *tin, f *flow) {
	if s.fairSrc {
		if h := &b.hosts[f.srcHost%FlowsPerTin]; h.srcBulk != 0 {
			h.srcBulk--
		}
	}
	if s.fairDst {
		if h := &b.hosts[f.dstHost%FlowsPerTin]; h.dstBulk != 0 {
			h.dstBulk--
		}
	}
}

// recountHosts makes the counts right for a new flow mode.
func (s *Scheduler) recountHosts(b *tin) {
	if b.hosts == nil {
		return
	}
	for i := range b.hosts {
		b.hosts[i].srcBulk, b.hosts[i].dstBulk = 0, 0
	}
	for i := range b.flows {
		if f := &b.flows[i]; f.set == setBulk {
			s.enterBulk(b, f)
		}
	}
}
