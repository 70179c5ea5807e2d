package nfqueue

import (
	"math/bits"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// Ref names a packet that the kernel holds.
type Ref struct {
	ID     uint32 // counts up by one in each of the kernel's queues, wraps around
	Number uint8  // which of the Queue's numbers it is in
}

// Up tells whether the packet is in one of the numbers for the upload.
func (r Ref) Up() bool { return r.Number >= perDirection }

// Wakes tells whether the packet was sent here because the rules had run out.
func (r Ref) Wakes() bool { return r.Number%perDirection == wakeOffset }

// Packet is one packet that the kernel holds until it gets a verdict.
type Packet struct {
	Ref
	Len      uint32 // bytes from the network header on, also when Data is cut
	Mark     uint32 // firewall mark
	Priority uint32 // skb priority; kernels before 5.18 don't say it
	Proto    uint16 // EtherType
	GSO      bool   // a super-packet that becomes several on the wire
	// Data is the packet from the network header on, cut after the copy range.
	// It is valid until the next Recv.
	Data []byte
}

// Attributes of NFQNL_MSG_PACKET, from linux/netfilter/nfnetlink_queue.h.
const (
	attrPacketHdr = 1
	attrMark      = 3
	attrPayload   = 10
	attrCapLen    = 13
	attrSKBInfo   = 14
	attrPriority  = 21

	skbGSO = 2 // NFQA_SKB_GSO in attrSKBInfo
)

// message is what the kernel has sent, in words.
type message [messageWords]uint32

// messageWords is a power of 2: what is taken modulo it is in range.
const messageWords = maxMessage / 4

// layout is where the attributes of a message are: the kernel sends the same ones
// for all packets of a kind, so that most are where they were the last time.
type layout struct {
	known bool
	heads [maxHeads]place // words that tell that it is this layout
	// Words with what a packet's attributes hold; wordSeq, which is 0 then, if
	// there is none.
	header, mark, priority, whole, info uint32
	from, to                            uint32 // the payload, bytes
}

type place struct{ at, word uint32 }

const (
	// numLayouts is how many are remembered, by length.
	numLayouts = 32

	// maxHeads is more than the kernel sends attributes without being asked.
	maxHeads = 12
)

// parse reads an NFQNL_MSG_PACKET of size bytes, at least its headers, into all
// of p but Number. ok is false when there is no packet header, without which no
// verdict can be given. l is the layout that a message of this size had.
//
// It is on the path of every packet, so the attributes are walked here and not
// by package nlmsg, word by word: netlink aligns them to 4 bytes, and a MIPS
// that reads bytes takes three times as many instructions.
func (m *message) parse(size uint32, l *layout, p *Packet) (ok bool) {
	if !l.is(m) && !l.learn(m, size) {
		return false
	}
	p.ID, p.Proto = bigEndian(m[l.header%messageWords]), uint16(bigEndian(m[(l.header+1)%messageWords])>>16)
	p.Mark, p.Priority = bigEndian(m[l.mark%messageWords]), bigEndian(m[l.priority%messageWords])
	p.GSO = bigEndian(m[l.info%messageWords])&skbGSO != 0
	p.Data = (*[maxMessage]byte)(unsafe.Pointer(m))[l.from:l.to]
	p.Len = max(bigEndian(m[l.whole%messageWords]), l.to-l.from) // it is only sent when the copy range has cut the packet
	return true
}

// is tells whether m has this layout.
func (l *layout) is(m *message) bool {
	if !l.known {
		return false
	}
	for i := range l.heads {
		h := &l.heads[i]
		if m[h.at%messageWords] != h.word {
			return false
		}
		if h.at == wordLen {
			return true
		}
	}
	return false
}

// learn finds the layout of m. It is not known if the message has no packet
// header, or if nothing would stand for what it lacks.
func (l *layout) learn(m *message, size uint32) (ok bool) {
	*l = layout{header: wordSeq, mark: wordSeq, priority: wordSeq, whole: wordSeq, info: wordSeq}
	n := uint32(0)
	remember := func(at uint32) {
		if n < maxHeads {
			l.heads[n] = place{at, m[at]}
		}
		n++
	}
	m[wordSeq] = 0
	remember(wordSeq)
	at := uint32(nlHeader+nfHeader) / 4
	for left := size - (nlHeader + nfHeader); left >= atHeader; {
		length, typ := attrHead(m[at])
		if length < atHeader || length > left {
			break
		}
		remember(at)
		switch {
		case typ == attrPayload:
			l.from, l.to = 4*at+atHeader, 4*at+length
		case length < atHeader+4: // too short for what we know
		case typ == attrPacketHdr:
			l.header, ok = at+1, length >= atHeader+7
		case typ == attrMark:
			l.mark = at + 1
		case typ == attrPriority:
			l.priority = at + 1
		case typ == attrCapLen:
			l.whole = at + 1
		case typ == attrSKBInfo:
			l.info = at + 1
		}
		length += 3
		if length >= left { // the last one
			break
		}
		left -= length &^ 3
		at += length / 4
	}
	remember(wordLen) // the last: how long it is, and that there are no more
	l.known = ok && n <= maxHeads
	return ok
}

// attrHead is an attribute's length, its header included, and its type.
func attrHead(w uint32) (length, typ uint32) {
	if cpu.IsBigEndian {
		return w >> 16, w & 0xffff
	}
	return w & 0xffff, w >> 16
}

// typeOf is the type of the message that has w behind its length.
func typeOf(w uint32) uint32 {
	if cpu.IsBigEndian {
		return w >> 16
	}
	return w & 0xffff
}

// bigEndian is a word that has netfilter's order in this machine's, and the
// other way round.
func bigEndian(w uint32) uint32 {
	if cpu.IsBigEndian {
		return w
	}
	return bits.ReverseBytes32(w)
}
