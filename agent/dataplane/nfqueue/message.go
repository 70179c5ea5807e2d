package nfqueue

import "encoding/binary"

// A netlink message is a 16-byte header in the machine's byte order, the
// 4-byte nfgenmsg, and attributes. Inside the attributes netfilter is
// big-endian, but the attribute headers are not.
const (
	nlHeader = 16
	nfHeader = 4
	atHeader = 4

	attrNested = 1 << 15
	attrType   = 1<<14 - 1
)

// builder puts netlink messages one behind the other into one buffer.
type builder struct {
	b     []byte
	start int // of the message under construction
	seq   uint32
}

// begin starts a message and gives it the next sequence number.
func (m *builder) begin(typ, flags uint16, family uint8, resID uint16) {
	m.start = len(m.b)
	m.seq++
	m.b = append(m.b, 0, 0, 0, 0)
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
	m.b = binary.NativeEndian.AppendUint16(m.b, flags)
	m.b = binary.NativeEndian.AppendUint32(m.b, m.seq)
	m.b = append(m.b, 0, 0, 0, 0) // port: the kernel knows
	m.b = append(m.b, family, 0)
	m.b = binary.BigEndian.AppendUint16(m.b, resID)
}

// end sets the message's length.
func (m *builder) end() {
	binary.NativeEndian.PutUint32(m.b[m.start:], uint32(len(m.b)-m.start))
}

func (m *builder) attr(typ uint16, data []byte) {
	m.head(typ, len(data))
	m.b = append(m.b, data...)
	m.pad()
}

func (m *builder) str(typ uint16, s string) {
	m.head(typ, len(s)+1)
	m.b = append(m.b, s...)
	m.b = append(m.b, 0)
	m.pad()
}

func (m *builder) u16(typ, v uint16) {
	m.head(typ, 2)
	m.b = binary.BigEndian.AppendUint16(m.b, v)
	m.pad()
}

func (m *builder) u32(typ uint16, v uint32) {
	m.head(typ, 4)
	m.b = binary.BigEndian.AppendUint32(m.b, v)
}

func (m *builder) u64(typ uint16, v uint64) {
	m.head(typ, 8)
	m.b = binary.BigEndian.AppendUint64(m.b, v)
}

// nest encloses the attributes that inside adds.
func (m *builder) nest(typ uint16, inside func()) {
	at := len(m.b)
	m.head(typ|attrNested, 0)
	inside()
	binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at))
}

func (m *builder) head(typ uint16, n int) {
	m.b = binary.NativeEndian.AppendUint16(m.b, uint16(atHeader+n))
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
}

func (m *builder) pad() {
	for len(m.b)%4 != 0 {
		m.b = append(m.b, 0)
	}
}

// nextMessage cuts the first netlink message off b: its type and what follows
// the header. ok is false when nothing whole is left.
func nextMessage(b []byte) (typ uint16, seq uint32, body, rest []byte, ok bool) {
	if len(b) < nlHeader {
		return 0, 0, nil, nil, false
	}
	n := binary.NativeEndian.Uint32(b)
	if n < nlHeader || uint64(n) > uint64(len(b)) {
		return 0, 0, nil, nil, false
	}
	typ = binary.NativeEndian.Uint16(b[4:])
	seq = binary.NativeEndian.Uint32(b[8:])
	next := min((uint64(n)+3)&^3, uint64(len(b)))
	return typ, seq, b[nlHeader:n], b[next:], true
}

// nextAttr cuts the first attribute off b.
func nextAttr(b []byte) (typ uint16, data, rest []byte, ok bool) {
	if len(b) < atHeader {
		return 0, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < atHeader || n > len(b) {
		return 0, nil, nil, false
	}
	typ = binary.NativeEndian.Uint16(b[2:]) & attrType
	return typ, b[atHeader:n], b[min((n+3)&^3, len(b)):], true
}

// findAttr returns the first attribute of a type among attributes.
func findAttr(b []byte, typ uint16) ([]byte, bool) {
	for {
		t, data, rest, ok := nextAttr(b)
		if !ok {
			return nil, false
		}
		if t == typ {
			return data, true
		}
		b = rest
	}
}
