package nfqueue

import "encoding/binary"

// Packet is one packet that the kernel holds until it gets a verdict.
type Packet struct {
	ID       uint32 // for the verdict; counts up by one, wraps around
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
	attrPriority  = 19

	skbGSO = 2 // NFQA_SKB_GSO in attrSKBInfo
)

// parsePacket reads the body of an NFQNL_MSG_PACKET into p. ok is false when
// there is no packet header, without which no verdict can be given.
func parsePacket(body []byte, p *Packet) (ok bool) {
	*p = Packet{}
	if len(body) < nfHeader {
		return false
	}
	capLen := uint32(0)
	for b := body[nfHeader:]; ; {
		typ, data, rest, more := nextAttr(b)
		if !more {
			break
		}
		b = rest
		switch typ {
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
