package userspace

import (
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	// wholeRate is from where on a super-packet is taken whole: 64 kB then hold
	// up another flow by at most a millisecond, and one verdict instead of 45
	// is the difference between keeping up and not. Below, the kernel segments
	// it before it is queued.
	wholeRate = engine.BitsPerSecond(500_000_000)

	// smallSize and fullSize are what the kernel's memory for one packet is
	// taken to be: an sk_buff with its shared info and a buffer for up to
	// smallLen bytes, or for a full frame. The kernel doesn't tell.
	smallLen  = 256
	smallSize = 768
	frameLen  = 1536
	fullSize  = 2304

	// slack is room in the kernel's queue for packets that were not read yet.
	slack = 4096
)

// takeWhole tells whether super-packets stay whole.
func takeWhole(c engine.Config) bool {
	return !c.SplitGSO || c.Rate == 0 || c.Rate >= wholeRate
}

// maxLen is the bound of the kernel's queue. It holds everything that the
// scheduler has queued, whose own limit must come first: packets that find the
// kernel's queue full pass unshaped.
func (l *loop) maxLen() uint32 {
	var st engine.Stats
	l.sched.Stats(l.now(), &st)
	return uint32(min(st.MemoryLimit/smallSize, 1<<20)) + slack
}

// truesize estimates the memory that a packet of n bytes holds in the kernel.
func truesize(n uint32) uint32 {
	if n <= smallLen {
		return smallSize
	}
	return (n + frameLen - 1) / frameLen * fullSize
}

// measure fills in the lengths. The kernel's qdiscs count the link-layer header
// and NFQUEUE does not.
func (l *loop) measure(in *nfqueue.Packet, p *engine.Packet) {
	off := uint32(l.device.netOff)
	p.Len = in.Len + off
	if in.GSO && in.Len > l.device.mtu {
		// The segment size is not told either: full segments are assumed, so
		// that a flow with a smaller one is charged up to a few headers less.
		header := headerLen(in.Data)
		if header > 0 && header < l.device.mtu && header < in.Len {
			size := l.device.mtu - header
			segs := (in.Len - header + size - 1) / size
			p.Segs, p.GSOSize, p.HeaderLen = uint16(segs), uint16(size), uint16(header+off)
			p.Len = in.Len + (segs-1)*header + segs*off
		}
	}
	p.Truesize = truesize(p.Len)
}

// headerLen is the length of the IP and TCP or UDP header, 0 if not known.
func headerLen(b []byte) uint32 {
	if len(b) < 40 {
		return 0
	}
	var n int
	var proto byte
	switch b[0] >> 4 {
	case 4:
		n, proto = int(b[0]&15)*4, b[9]
	case 6:
		n, proto = 40, b[6]
	default:
		return 0
	}
	switch {
	case proto == 6 && len(b) > n+12:
		return uint32(n + int(b[n+12]>>4)*4)
	case proto == 17:
		return uint32(n + 8)
	default:
		return 0
	}
}

// slots names the packets that the scheduler holds by small numbers, since a
// verdict needs more than the scheduler keeps.
type slots struct {
	s    []slot
	free uint32 // first unused slot + 1
}

type slot struct {
	id   uint32
	mark uint32 // of an unused slot: next unused one + 1
}

func (h *slots) put(id, mark uint32) uint32 {
	if h.free == 0 {
		h.s = append(h.s, slot{})
		h.free = uint32(len(h.s))
	}
	i := h.free - 1
	h.free = h.s[i].mark
	h.s[i] = slot{id, mark}
	return i
}

func (h *slots) take(i uint32) (id, mark uint32) {
	id, mark = h.s[i].id, h.s[i].mark
	h.s[i] = slot{mark: h.free}
	h.free = i + 1
	return id, mark
}
