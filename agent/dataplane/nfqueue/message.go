package nfqueue

import (
	"encoding/binary"

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

// verdictMsg is a verdict message but for its sequence number, queue number,
// verdict and packet.
type verdictMsg [nlHeader + nfHeader + atHeader + 8]byte

func newVerdict() (v verdictMsg) {
	var b builder
	b.begin(msgVerdict, 1, 0, 0) // NLM_F_REQUEST, AF_UNSPEC
	b.u64(attrVerdictHdr, 0)
	b.end()
	copy(v[:], b.Bytes)
	return v
}

// again appends a verdict with the next sequence number.
func (m *builder) again(v *verdictMsg) {
	m.seq++
	m.Copy(v[:], m.seq)
}
