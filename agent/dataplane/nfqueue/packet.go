package nfqueue

import "encoding/binary"

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

// parsePacket reads the body of an NFQNL_MSG_PACKET into p. ok is false when
// there is no packet header, without which no verdict can be given.
//
// It is on the path of every packet, so the attributes are walked here and not
// by package nlmsg.
func parsePacket(body []byte, p *Packet) (ok bool) {
	*p = Packet{}
	if len(body) < nfHeader {
		return false
	}
	capLen := uint32(0)
	for b := body[nfHeader:]; len(b) >= atHeader; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < atHeader || n > len(b) {
			break
		}
		data := b[atHeader:n]
		switch binary.NativeEndian.Uint16(b[2:]) {
		case attrPacketHdr:
			if len(data) < 7 {
				return false
			}
			p.ID = binary.BigEndian.Uint32(data)
			p.Proto = binary.BigEndian.Uint16(data[4:])
			ok = true
		case attrPayload:
			p.Data = data
		case attrMark:
			p.Mark = be32(data)
		case attrPriority:
			p.Priority = be32(data)
		case attrCapLen:
			capLen = be32(data)
		case attrSKBInfo:
			p.GSO = be32(data)&skbGSO != 0
		}
		n = (n + 3) &^ 3
		if n >= len(b) {
			break
		}
		b = b[n:]
	}
	// The length is only sent when the copy range has cut the packet.
	p.Len = max(capLen, uint32(len(p.Data)))
	return ok
}

// be32 is 0 for an attribute that is too short.
func be32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}
