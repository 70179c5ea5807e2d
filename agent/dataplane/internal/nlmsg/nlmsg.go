// Package nlmsg puts netlink messages together and takes them apart. It knows
// headers and attributes, and nothing of any family.
//
// Lengths and types are in the machine's byte order, and so are integers in
// rtnetlink; a recording of another machine is read by saying its order.
// netfilter's integers are big-endian everywhere. Attributes are aligned to 4
// bytes only, whatever they hold.
package nlmsg

import (
	"encoding/binary"
	"iter"
	"math/bits"
)

const (
	headerLen = 16
	attrLen   = 4

	flagNested = 1 << 15
	typeMask   = 1<<14 - 1
)

// Order is a byte order. The zero value is this machine's. It is no interface,
// because this is on the path of every packet.
type Order struct{ swap bool }

// BigEndian returns the order of a big-endian machine.
func BigEndian() Order { return Order{binary.NativeEndian.Uint16([]byte{0, 1}) != 1} }

// LittleEndian returns the order of a little-endian machine.
func LittleEndian() Order { return Order{binary.NativeEndian.Uint16([]byte{1, 0}) != 1} }

// Uint16 returns the integer in the first bytes of b.
func (o Order) Uint16(b []byte) uint16 {
	v := binary.NativeEndian.Uint16(b)
	if o.swap {
		v = bits.ReverseBytes16(v)
	}
	return v
}

// Uint32 returns the integer in the first bytes of b.
func (o Order) Uint32(b []byte) uint32 {
	v := binary.NativeEndian.Uint32(b)
	if o.swap {
		v = bits.ReverseBytes32(v)
	}
	return v
}

// Uint64 returns the integer in the first bytes of b, which need not be
// aligned.
func (o Order) Uint64(b []byte) uint64 {
	v := binary.NativeEndian.Uint64(b)
	if o.swap {
		v = bits.ReverseBytes64(v)
	}
	return v
}

// Append16 appends the integer to b.
func (o Order) Append16(b []byte, v uint16) []byte {
	if o.swap {
		v = bits.ReverseBytes16(v)
	}
	return binary.NativeEndian.AppendUint16(b, v)
}

// Append32 appends the integer to b.
func (o Order) Append32(b []byte, v uint32) []byte {
	if o.swap {
		v = bits.ReverseBytes32(v)
	}
	return binary.NativeEndian.AppendUint32(b, v)
}

// Append64 appends the integer to b.
func (o Order) Append64(b []byte, v uint64) []byte {
	if o.swap {
		v = bits.ReverseBytes64(v)
	}
	return binary.NativeEndian.AppendUint64(b, v)
}

// Builder puts messages one behind the other into Bytes.
type Builder struct {
	Order Order
	Bytes []byte

	start int // of the message under construction
}

// Begin starts a message.
func (b *Builder) Begin(typ, flags uint16, seq uint32) {
	b.start = len(b.Bytes)
	b.Bytes = append(b.Bytes, 0, 0, 0, 0)
	b.Bytes = b.Order.Append16(b.Bytes, typ)
	b.Bytes = b.Order.Append16(b.Bytes, flags)
	b.Bytes = b.Order.Append32(b.Bytes, seq)
	b.Bytes = append(b.Bytes, 0, 0, 0, 0) // port: the kernel knows
}

// End sets the length of the message.
func (b *Builder) End() {
	b.Order.Append32(b.Bytes[:b.start], uint32(len(b.Bytes)-b.start))
}

// Raw appends bytes as they are, such as a family's own header.
func (b *Builder) Raw(p ...byte) { b.Bytes = append(b.Bytes, p...) }

// Raw32 appends integers in the machine's byte order.
func (b *Builder) Raw32(vs ...uint32) {
	for _, v := range vs {
		b.Bytes = b.Order.Append32(b.Bytes, v)
	}
}

// Attr appends an attribute that holds data.
func (b *Builder) Attr(typ uint16, data []byte) {
	b.head(typ, len(data))
	b.Bytes = append(b.Bytes, data...)
	b.pad()
}

// Str appends an attribute that holds s and a zero.
func (b *Builder) Str(typ uint16, s string) {
	b.head(typ, len(s)+1)
	b.Bytes = append(b.Bytes, s...)
	b.Bytes = append(b.Bytes, 0)
	b.pad()
}

// U8 appends an attribute.
func (b *Builder) U8(typ uint16, v uint8) { b.Attr(typ, []byte{v}) }

// U32 appends an attribute in the machine's byte order.
func (b *Builder) U32(typ uint16, v uint32) {
	b.head(typ, 4)
	b.Bytes = b.Order.Append32(b.Bytes, v)
}

// U64 appends an attribute in the machine's byte order.
func (b *Builder) U64(typ uint16, v uint64) {
	b.head(typ, 8)
	b.Bytes = b.Order.Append64(b.Bytes, v)
}

// U16BE appends an attribute in netfilter's byte order.
func (b *Builder) U16BE(typ, v uint16) {
	b.head(typ, 2)
	b.Bytes = binary.BigEndian.AppendUint16(b.Bytes, v)
	b.pad()
}

// U32BE appends an attribute in netfilter's byte order.
func (b *Builder) U32BE(typ uint16, v uint32) {
	b.head(typ, 4)
	b.Bytes = binary.BigEndian.AppendUint32(b.Bytes, v)
}

// U64BE appends an attribute in netfilter's byte order.
func (b *Builder) U64BE(typ uint16, v uint64) {
	b.head(typ, 8)
	b.Bytes = binary.BigEndian.AppendUint64(b.Bytes, v)
}

// Nest encloses the attributes that inside appends. The nested flag is the
// caller's choice: rtnetlink does without, netfilter wants Nested(typ).
func (b *Builder) Nest(typ uint16, inside func()) {
	at := len(b.Bytes)
	b.head(typ, 0)
	inside()
	b.Order.Append16(b.Bytes[:at], uint16(len(b.Bytes)-at))
	b.pad()
}

// Nested returns the type with the flag that says: attributes inside.
func Nested(typ uint16) uint16 { return typ | flagNested }

func (b *Builder) head(typ uint16, n int) {
	b.Bytes = b.Order.Append16(b.Bytes, uint16(attrLen+n))
	b.Bytes = b.Order.Append16(b.Bytes, typ)
}

func (b *Builder) pad() {
	for len(b.Bytes)%4 != 0 {
		b.Bytes = append(b.Bytes, 0)
	}
}

// Message is one message without its header.
type Message struct {
	Type, Flags uint16
	Seq         uint32
	Body        []byte
}

// Next cuts the first message off b. ok is false when nothing whole is left.
func Next(order Order, b []byte) (m Message, rest []byte, ok bool) {
	if len(b) < headerLen {
		return m, nil, false
	}
	n := order.Uint32(b)
	if n < headerLen || uint64(n) > uint64(len(b)) {
		return m, nil, false
	}
	m = Message{Type: order.Uint16(b[4:]), Flags: order.Uint16(b[6:]), Seq: order.Uint32(b[8:]), Body: b[headerLen:n:n]}
	return m, b[min((uint64(n)+3)&^3, uint64(len(b))):], true
}

// Attrs are attributes one behind the other.
type Attrs struct {
	Order Order
	Bytes []byte
}

// Attr is the content of one attribute.
type Attr Attrs

// NextAttr cuts the first attribute off b. ok is false when nothing whole is
// left.
func NextAttr(order Order, b []byte) (typ uint16, data, rest []byte, ok bool) {
	if len(b) < attrLen {
		return 0, nil, nil, false
	}
	n := int(order.Uint16(b))
	if n < attrLen || n > len(b) {
		return 0, nil, nil, false
	}
	typ = order.Uint16(b[2:]) & typeMask
	return typ, b[attrLen:n], b[min((n+3)&^3, len(b)):], true
}

// All yields the attributes in their order, up to the first whose length makes
// no sense.
func (a Attrs) All() iter.Seq2[uint16, Attr] {
	return func(yield func(uint16, Attr) bool) {
		for b := a.Bytes; ; {
			typ, data, rest, ok := NextAttr(a.Order, b)
			if !ok || !yield(typ, Attr{a.Order, data}) {
				return
			}
			b = rest
		}
	}
}

// Find returns the first attribute of a type.
func (a Attrs) Find(typ uint16) (Attr, bool) {
	for t, attr := range a.All() {
		if t == typ {
			return attr, true
		}
	}
	return Attr{}, false
}

// Attrs returns what is nested in the attribute.
func (a Attr) Attrs() Attrs { return Attrs(a) }

// U16 returns the integer; 0 if the attribute is too short to hold one.
func (a Attr) U16() uint16 {
	if len(a.Bytes) < 2 {
		return 0
	}
	return a.Order.Uint16(a.Bytes)
}

// U32 returns the integer; 0 if the attribute is too short to hold one.
func (a Attr) U32() uint32 {
	if len(a.Bytes) < 4 {
		return 0
	}
	return a.Order.Uint32(a.Bytes)
}

// U64 returns the integer, of 8 or of 4 bytes; 0 if the attribute is shorter.
// It reads byte by byte where the machine can't load unaligned.
func (a Attr) U64() uint64 {
	if len(a.Bytes) < 8 {
		return uint64(a.U32())
	}
	return a.Order.Uint64(a.Bytes)
}

// Str returns the text up to the first zero.
func (a Attr) Str() string {
	for i, c := range a.Bytes {
		if c == 0 {
			return string(a.Bytes[:i])
		}
	}
	return string(a.Bytes)
}
