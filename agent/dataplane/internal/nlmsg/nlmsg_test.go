package nlmsg_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
)

// TestBytes wants a message to be as the header files say, in both orders.
func TestBytes(t *testing.T) {
	build := func(o nlmsg.Order) []byte {
		b := nlmsg.Builder{Order: o}
		b.Begin(0x1234, 5, 7)
		b.Raw32(0xa1a2a3a4)
		b.Str(3, "eth0")
		b.Nest(2, func() { b.U64(1, 0x0102030405060708); b.U8(4, 9) })
		b.Nest(nlmsg.Nested(6), func() { b.U32(1, 0x11) })
		b.End()
		return b.Bytes
	}
	big := []byte{
		0, 0, 0, 68, 0x12, 0x34, 0, 5, 0, 0, 0, 7, 0, 0, 0, 0,
		0xa1, 0xa2, 0xa3, 0xa4,
		0, 9, 0, 3, 'e', 't', 'h', '0', 0, 0, 0, 0,
		0, 24, 0, 2, 0, 12, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 5, 0, 4, 9, 0, 0, 0,
		0, 12, 0x80, 6, 0, 8, 0, 1, 0, 0, 0, 0x11,
	}
	if diff := cmp.Diff(big, build(nlmsg.BigEndian())); diff != "" {
		t.Error(diff)
	}
	for _, o := range []nlmsg.Order{nlmsg.BigEndian(), nlmsg.LittleEndian(), {}} {
		both := append(build(o), build(o)...)
		for range 2 {
			m, rest, ok := nlmsg.Next(o, both)
			if !ok || m.Type != 0x1234 || m.Flags != 5 || m.Seq != 7 {
				t.Fatalf("%v: %+v %v", o, m, ok)
			}
			both = rest
			attrs := nlmsg.Attrs{Order: o, Bytes: m.Body[4:]}
			name, _ := attrs.Find(3)
			nest, _ := attrs.Find(2)
			u64, _ := nest.Attrs().Find(1)
			u8, _ := nest.Attrs().Find(4)
			flagged, ok := attrs.Find(6)
			if name.Str() != "eth0" || u64.U64() != 0x0102030405060708 || u8.U32() != 0 || !ok || len(flagged.Bytes) != 8 {
				t.Errorf("%v: %v %v %v %v", o, name, u64, u8, flagged)
			}
			if _, ok := attrs.Find(9); ok {
				t.Errorf("%v: found what is not there", o)
			}
		}
		if len(both) != 0 {
			t.Errorf("%d bytes are left", len(both))
		}
	}
}

// TestShort reads less than there should be.
func TestShort(t *testing.T) {
	b := nlmsg.Builder{Order: nlmsg.BigEndian()}
	b.Begin(1, 2, 3)
	b.U64(1, 1<<32|2)
	b.End()
	for n := range len(b.Bytes) {
		if _, _, ok := nlmsg.Next(nlmsg.BigEndian(), b.Bytes[:n]); ok {
			t.Errorf("%d bytes are a message", n)
		}
		for range (nlmsg.Attrs{Order: nlmsg.BigEndian(), Bytes: b.Bytes[min(n, 16):n]}).All() {
			t.Errorf("%d bytes hold an attribute", n)
		}
	}
	a := nlmsg.Attr{Order: nlmsg.BigEndian(), Bytes: []byte{1, 2, 3, 4}}
	if a.U64() != 0x01020304 || a.U16() != 0x0102 {
		t.Errorf("%x, %x", a.U64(), a.U16())
	}
	a.Bytes = a.Bytes[:1]
	if a.U64() != 0 || a.U32() != 0 || a.U16() != 0 {
		t.Error("one byte is a number")
	}
}

// FuzzNext takes anything apart; it must come to an end and stay inside.
func FuzzNext(f *testing.F) {
	b := nlmsg.Builder{Order: nlmsg.LittleEndian()}
	b.Begin(1, 2, 3)
	b.Nest(1, func() { b.Str(2, "x") })
	b.End()
	f.Add(b.Bytes)
	f.Add([]byte{16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		for b := data; ; {
			m, rest, ok := nlmsg.Next(nlmsg.LittleEndian(), b)
			if !ok {
				return
			}
			if len(rest) >= len(b) {
				t.Fatal("it does not get on")
			}
			b = rest
			sum := 0
			for _, a := range (nlmsg.Attrs{Order: nlmsg.LittleEndian(), Bytes: m.Body}).All() {
				sum += 4 + len(a.Bytes)
				a.U64()
				_ = a.Str()
			}
			if sum > len(m.Body) {
				t.Fatalf("attributes of %d bytes in %d", sum, len(m.Body))
			}
		}
	})
}
