package nfqueue

import (
	"encoding/binary"

	"golang.org/x/sys/cpu"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
)

// Behind the header of a netlink message netfilter has the 4 bytes of nfgenmsg.
// Its integers are big-endian; headers are not.
const (
	nlHeader = 16
	nfHeader = 4
	atHeader = 4
)

// builder makes netfilter's messages.
type builder struct {
	nlmsg.Builder
	seq uint32
}

// begin starts a message and gives it the next sequence number.
func (m *builder) begin(typ, flags uint16, family uint8, resID uint16) {
	m.seq++
	m.Begin(typ, flags, m.seq)
	m.Raw(family, 0)
	m.Bytes = binary.BigEndian.AppendUint16(m.Bytes, resID)
}

func (m *builder) end()                           { m.End() }
func (m *builder) attr(typ uint16, data []byte)   { m.Attr(typ, data) }
func (m *builder) str(typ uint16, s string)       { m.Str(typ, s) }
func (m *builder) u16(typ, v uint16)              { m.U16BE(typ, v) }
func (m *builder) u32(typ uint16, v uint32)       { m.U32BE(typ, v) }
func (m *builder) u64(typ uint16, v uint64)       { m.U64BE(typ, v) }
func (m *builder) nest(typ uint16, inside func()) { m.Nest(nlmsg.Nested(typ), inside) }

// nextMessage cuts the first netlink message off b: its type and what follows
// the header. ok is false when nothing whole is left.
func nextMessage(b []byte) (typ uint16, seq uint32, body, rest []byte, ok bool) {
	m, rest, ok := nlmsg.Next(nlmsg.Order{}, b)
	return m.Type, m.Seq, m.Body, rest, ok
}

// nextAttr cuts the first attribute off b.
func nextAttr(b []byte) (typ uint16, data, rest []byte, ok bool) {
	return nlmsg.NextAttr(nlmsg.Order{}, b)
}

// findAttr returns the first attribute of a type among attributes.
func findAttr(b []byte, typ uint16) ([]byte, bool) {
	a, ok := nlmsg.Attrs{Bytes: b}.Find(typ)
	return a.Bytes, ok
}

// verdictMsg is a verdict message without further attributes, in words.
type verdictMsg [(nlHeader + nfHeader + atHeader + 8) / 4]uint32

// Words of a verdictMsg.
const (
	wordLen         = 0
	wordType        = 1
	wordSeq         = 2
	wordPort        = 3
	wordNumber      = nlHeader / 4
	wordVerdictHead = (nlHeader + nfHeader) / 4
	wordVerdict     = wordVerdictHead + 1
	wordID          = wordVerdict + 1
)

// newVerdict makes a message but for its queue number, verdict and packet.
func newVerdict(typ uint16) (v verdictMsg) {
	var b builder
	b.begin(typ, 1, 0, 0) // NLM_F_REQUEST, AF_UNSPEC
	b.u64(attrVerdictHdr, 0)
	b.end()
	for i := range v {
		v[i] = binary.NativeEndian.Uint32(b.Bytes[4*i:])
	}
	return v
}

// attrWord is the header of an attribute that holds 4 bytes.
func attrWord(typ uint32) uint32 {
	const length = atHeader + 4
	if cpu.IsBigEndian {
		return length<<16 | typ
	}
	return typ<<16 | length
}
