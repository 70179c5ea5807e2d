package nfqueue

import (
	"bytes"
	"encoding/binary"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

// body is that of an NFQNL_MSG_PACKET as the kernel sends it.
func body(attrs func(b *builder)) []byte {
	var b builder
	b.begin(msgPacket, 0, 2, firstQueue)
	attrs(&b)
	b.end()
	return b.Bytes[nlHeader:]
}

// parse puts a message's body where a Queue has it, behind a header, and reads
// it as one whose layout l may be.
func parse(body []byte, l *layout, p *Packet) bool {
	var m message
	b := unsafe.Slice((*byte)(unsafe.Pointer(&m)), maxMessage)
	size := min(nlHeader+max(len(body), nfHeader), maxMessage)
	copy(b[nlHeader:], body)
	binary.NativeEndian.PutUint32(b, uint32(size))
	return m.parse(uint32(size), l, p)
}

func packetHdr(b *builder, id uint32, proto uint16) {
	v := binary.BigEndian.AppendUint32(nil, id)
	v = binary.BigEndian.AppendUint16(v, proto)
	b.attr(attrPacketHdr, append(v, 4))
}

func TestParsePacket(t *testing.T) {
	data := bytes.Repeat([]byte{0x45}, 127) // an odd length is padded
	for _, c := range []struct {
		name string
		body []byte
		want Packet
		ok   bool
	}{
		{"everything", body(func(b *builder) {
			packetHdr(b, 0x01020304, 0x86dd)
			b.u32(5, 3) // in
			b.u32(6, 4) // out
			b.u32(attrMark, 0xaabbccdd)
			b.u32(attrPriority, 6)
			b.u32(attrSKBInfo, skbGSO|1)
			b.u32(attrCapLen, 1500)
			b.attr(attrPayload, data)
		}), Packet{Ref: Ref{ID: 0x01020304}, Len: 1500, Mark: 0xaabbccdd, Priority: 6, Proto: 0x86dd, GSO: true, Data: data}, true},
		{"not cut", body(func(b *builder) {
			packetHdr(b, 1, 0x0800)
			b.attr(attrPayload, data)
		}), Packet{Ref: Ref{ID: 1}, Len: 127, Proto: 0x0800, Data: data}, true},
		{"no bytes", body(func(b *builder) { packetHdr(b, 1, 0x0800) }), Packet{Ref: Ref{ID: 1}, Proto: 0x0800, Data: []byte{}}, true},
		{"no header", body(func(b *builder) { b.attr(attrPayload, data) }), Packet{}, false},
		{"short header", body(func(b *builder) { b.attr(attrPacketHdr, []byte{1, 2, 3}) }), Packet{}, false},
		{"empty", nil, Packet{}, false},
	} {
		var got Packet
		var l layout
		ok := parse(c.body, &l, &got)
		if ok != c.ok {
			t.Errorf("%s: ok is %v, want %v", c.name, ok, c.ok)
		}
		if diff := cmp.Diff(c.want, got); ok && diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
		if l.known != ok {
			t.Errorf("%s: the layout is known: %v, want %v", c.name, l.known, ok)
		}
	}
}

// TestLayout reads each message as if it were laid out as each other.
func TestLayout(t *testing.T) {
	payload := func(n int) func(*builder) {
		return func(b *builder) { b.attr(attrPayload, bytes.Repeat([]byte{0x45}, n)) }
	}
	var all [][]byte
	for _, attrs := range [][]func(*builder){
		{payload(64)},
		{payload(63)},
		{payload(65)},
		{payload(56), func(b *builder) { b.u32(attrMark, 7) }},
		{payload(56), func(b *builder) { b.u32(attrPriority, 7) }},
		{func(b *builder) { b.u32(attrCapLen, 1500) }, payload(56)},
		{func(b *builder) { b.u32(attrSKBInfo, skbGSO) }, payload(56)},
		{func(b *builder) { b.u32(attrSKBInfo, 0) }, payload(56)},
		{func(b *builder) { b.u32(99, skbGSO) }, payload(56)},
	} {
		for _, first := range []bool{true, false} {
			all = append(all, body(func(b *builder) {
				if first {
					packetHdr(b, uint32(len(all)), 0x0800)
				}
				for _, a := range attrs {
					a(b)
				}
				if !first {
					packetHdr(b, uint32(len(all)), 0x86dd)
				}
			}))
		}
	}
	all = append(all, body(payload(76)))
	for i, before := range all {
		for j, b := range all {
			var fresh, l layout
			var want, got Packet
			ok := parse(b, &fresh, &want)
			parse(before, &l, new(Packet))
			if parse(b, &l, &got) != ok {
				t.Errorf("message %d behind %d: %v, want %v", j, i, !ok, ok)
			}
			if diff := cmp.Diff(want, got); ok && diff != "" {
				t.Errorf("message %d behind %d: %s", j, i, diff)
			}
		}
	}
}

func FuzzParsePacket(f *testing.F) {
	f.Add(body(func(b *builder) {
		packetHdr(b, 1, 0x0800)
		b.u32(attrCapLen, 1500)
		b.attr(attrPayload, make([]byte, 128))
	}))
	f.Add([]byte{0, 0, 0, 0, 3, 0, 1, 0})
	f.Add([]byte{0, 0, 0, 0, 255, 255, 1, 0})
	f.Fuzz(func(t *testing.T, body []byte) {
		var p Packet
		var l layout
		if parse(body, &l, &p) && uint64(p.Len) < uint64(len(p.Data)) {
			t.Errorf("%d bytes of a packet of %d", len(p.Data), p.Len)
		}
		for b := body; ; {
			_, _, _, rest, ok := nextMessage(b)
			if !ok {
				break
			}
			if len(rest) >= len(b) {
				t.Fatal("a message of no length")
			}
			b = rest
		}
	})
}

func TestGapsAreOverflows(t *testing.T) {
	for _, c := range []struct {
		name string
		last uint32
		ids  []uint32
		want uint64
	}{
		{"from the start", 0, []uint32{1, 2, 3}, 0},
		{"lost at the start", 0, []uint32{4}, 3},
		{"lost between", 7, []uint32{8, 11, 12}, 2},
		{"around", 1<<32 - 2, []uint32{1<<32 - 1, 0, 2}, 1},
	} {
		q := &Queue{}
		q.lastID[3] = c.last
		for _, id := range c.ids {
			q.count(Ref{ID: id, Number: 3})
			q.count(Ref{ID: q.lastID[4] + 1, Number: 4}) // another number counts for itself
		}
		if got := q.counters.Down; got.Overflows != c.want || got.Packets != 2*uint64(len(c.ids)) || q.counters.Up != (Received{}) {
			t.Errorf("%s: %+v, want %d overflows", c.name, q.counters, c.want)
		}
	}
}
