package userspace

import (
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	// wholeTime is how long another flow may wait behind a super-packet that is
	// carried whole: one verdict instead of 45 is the difference between keeping
	// up and not.
	wholeTime = time.Millisecond

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

// wholeLen is the length up to which a super-packet stays whole; the kernel
// segments longer ones before they are queued. Without SplitGSO, and where there
// is no rate to speak of, all stay whole.
func wholeLen(c engine.Config) uint32 {
	if !c.SplitGSO || c.Rate == 0 {
		return 1<<32 - 1
	}
	return uint32(min(uint64(c.Rate)*uint64(wholeTime)/8/uint64(time.Second), 1<<32-1))
}

// maxLen is the bound of each of the kernel's queues. It holds everything that
// the scheduler has queued, whose own limit must come first: packets that find
// the kernel's queue full pass unshaped.
func maxLen(s *engine.Scheduler, now engine.Time) uint32 {
	var st engine.Stats
	s.Stats(now, &st)
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
// and NFQUEUE does not. What is longer than the MTU goes, or came, in several
// frames: a super-packet, or a datagram in fragments. Upload meets the hook
// before the kernel fragments it, and download after connection tracking has put
// it together.
func (l *loop) measure(in *nfqueue.Packet, p *engine.Packet) {
	off := uint32(l.device.netOff)
	p.Len = in.Len + off
	p.Segs, p.GSOSize, p.HeaderLen = 1, 0, 0
	if in.Len > l.device.mtu {
		// The segment size is not told either: full segments are assumed, so
		// that a flow with a smaller one is charged up to a few headers less.
		header, payload, size := uint32(0), uint32(0), uint32(0)
		if in.GSO {
			header = headerLen(in.Data)
			payload = in.Len - min(header, in.Len)
			size = l.device.mtu - min(header, l.device.mtu)
		} else {
			header, payload = fragmentHeader(in.Data, in.Len)
			size = (l.device.mtu - min(header, l.device.mtu)) &^ 7 // offsets count 8 bytes
		}
		if header > 0 && size > 0 && payload > 0 {
			segs := (payload + size - 1) / size
			p.Segs, p.GSOSize, p.HeaderLen = uint16(segs), uint16(size), uint16(header+off)
			p.Len = payload + segs*(header+off)
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

// fragmentHeader returns what is in front of each fragment of a datagram of n
// bytes, and how many bytes they carry together; 0 if it is not known.
func fragmentHeader(b []byte, n uint32) (header, payload uint32) {
	if len(b) < 20 {
		return 0, 0
	}
	switch b[0] >> 4 {
	case 4:
		header = uint32(b[0]&15) * 4
		return header, n - min(header, n)
	case 6: // options in front of the fragment header are rare
		const ip, fragment = 40, 8
		return ip + fragment, n - min(ip, n)
	}
	return 0, 0
}

// slots names the packets that the scheduler holds by small numbers, since a
// verdict needs more than the scheduler keeps.
type slots struct {
	s     []slot
	free  uint32 // first unused slot + 1
	count uint32 // packets so far
}

type slot struct {
	ref  nfqueue.Ref
	mark uint32 // of an unused slot: next unused one + 1
	// order is the packet's number by arrival, which wraps around; used says
	// that there is one.
	order uint32
	used  bool
}

func (h *slots) put(ref nfqueue.Ref, mark uint32) uint32 {
	if h.free == 0 {
		h.s = append(h.s, slot{})
		h.free = uint32(len(h.s))
	}
	i := h.free - 1
	s := &h.s[i]
	h.free = s.mark
	h.count++
	s.ref, s.mark, s.order, s.used = ref, mark, h.count, true
	return i
}

func (h *slots) take(i uint32) (ref nfqueue.Ref, mark uint32) {
	s := &h.s[i]
	ref, mark = s.ref, s.mark
	s.mark, s.used = h.free, false
	h.free = i + 1
	return ref, mark
}

// all returns the packets in the order of arrival.
func (h *slots) all() []nfqueue.Ref {
	var used []slot
	for _, s := range h.s {
		if s.used {
			used = append(used, s)
		}
	}
	slices.SortFunc(used, func(a, b slot) int { return int(int32(a.order - b.order)) })
	refs := make([]nfqueue.Ref, 0, len(used))
	for _, s := range used {
		refs = append(refs, s.ref)
	}
	return refs
}
