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
type message [maxMessage / 4]uint32

// parse reads an NFQNL_MSG_PACKET of size bytes, at least its headers, into all
// of p but Number. ok is false when there is no packet header, without which no
// verdict can be given.
//
// It is on the path of every packet, so the attributes are walked here and not
// by package nlmsg, word by word: netlink aligns them to 4 bytes, and a MIPS
// that reads bytes takes three times as many instructions.
func (m *message) parse(size uint32, p *Packet) (ok bool) {
	const words = uint32(len(m)) // a power of 2: what is taken modulo it is in range
	var mark, priority, whole, info, from, to uint32
	at := uint32(nlHeader+nfHeader) / 4
	for left := size - (nlHeader + nfHeader); left >= atHeader; {
		n, typ := attrHead(m[at%words])
		if n < atHeader || n > left {
			break
		}
		value := m[(at+1)%words]
		if n < atHeader+4 {
			value = 0
		}
		switch typ {
		case attrPacketHdr:
			if n < atHeader+7 {
				return false
			}
			p.ID, p.Proto = bigEndian(value), uint16(bigEndian(m[(at+2)%words])>>16)
			ok = true
		case attrPayload:
			from, to = 4*at+atHeader, 4*at+n
		case attrMark:
			mark = value
		case attrPriority:
			priority = value
		case attrCapLen: // only sent when the copy range has cut the packet
			whole = value
		case attrSKBInfo:
			info = value
		}
		n += 3
		if n >= left { // the last one
			break
		}
		left -= n &^ 3
		at += n / 4
	}
	p.Mark, p.Priority = bigEndian(mark), bigEndian(priority)
	p.GSO = bigEndian(info)&skbGSO != 0
	p.Data = (*[maxMessage]byte)(unsafe.Pointer(m))[from:to]
	p.Len = max(bigEndian(whole), to-from)
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
