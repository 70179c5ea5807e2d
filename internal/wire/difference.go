package wire

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Difference returns what m says beyond before, a report of the same boot,
// which takes half the bytes or less. Both stay as they are.
func Difference(m, before *pb.Report) *pb.Report {
	d := combine(m, before, difference)
	d.Since = before.GetSequence()
	return d
}

// Sum returns the report of which Difference with before is d. It is an error
// if before is not the report that d names.
func Sum(d, before *pb.Report) (*pb.Report, error) {
	if d.GetBootId() != before.GetBootId() || d.GetSince() != before.GetSequence() {
		return nil, fmt.Errorf("since: the difference is from report %d of boot %q, the last one known is %d of %q",
			d.GetSince(), d.GetBootId(), before.GetSequence(), before.GetBootId())
	}
	return combine(d, before, sum), nil
}

// operation is what is done with two integers of a number of bits.
type operation func(m, old uint64, bits int) uint64

// difference is zigzag encoded: small for small ones of either sign.
func difference(now, was uint64, bits int) uint64 {
	n := int64(now-was) << (64 - bits) >> (64 - bits)
	return uint64(n<<1^n>>63) << (64 - bits) >> (64 - bits)
}

func sum(d, was uint64, bits int) uint64 {
	return (was + (d>>1 ^ -(d & 1))) << (64 - bits) >> (64 - bits)
}

// combine returns a report like m whose integers, below the parts that have
// counters, are op of those in m and old.
func combine(m, old *pb.Report, op operation) *pb.Report {
	out := &pb.Report{Sequence: m.GetSequence(), BootId: m.GetBootId(), Uptime: m.GetUptime(), Again: m.GetAgain()}
	for _, name := range []protoreflect.Name{"down", "up", "agent", "probe", "wan"} {
		combineField(out.ProtoReflect(), m.ProtoReflect(), old.ProtoReflect(), out.ProtoReflect().Descriptor().Fields().ByName(name), op)
	}
	return out
}

func combineMessage(out, m, old protoreflect.Message, op operation) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		combineField(out, m, old, fields.Get(i), op)
	}
}

func combineField(out, m, old protoreflect.Message, f protoreflect.FieldDescriptor, op operation) {
	switch {
	case f.IsList() && f.Kind() == protoreflect.Uint64Kind:
		combineNumbers(out, f, m.Get(f).List(), old.Get(f).List(), op)
	case f.IsList() && f.Kind() == protoreflect.MessageKind:
		to, from, was := out.Mutable(f).List(), m.Get(f).List(), old.Get(f).List()
		for i := range from.Len() {
			e := to.NewElement()
			before := e // of which nothing is set yet
			if i < was.Len() {
				before = was.Get(i)
			}
			one := to.NewElement()
			combineMessage(one.Message(), from.Get(i).Message(), before.Message(), op)
			to.Append(one)
		}
	case !f.IsList() && f.Kind() == protoreflect.MessageKind:
		if m.Has(f) {
			combineMessage(out.Mutable(f).Message(), m.Get(f).Message(), old.Get(f).Message(), op)
		}
	default:
		if v := combineNumber(f, m.Get(f), old.Get(f), op); !v.Equal(f.Default()) {
			out.Set(f, v)
		}
	}
}

// combineNumbers leaves out zeros at the end.
func combineNumbers(out protoreflect.Message, f protoreflect.FieldDescriptor, m, old protoreflect.List, op operation) {
	at := func(l protoreflect.List, i int) uint64 {
		if i < l.Len() {
			return l.Get(i).Uint()
		}
		return 0
	}
	n := max(m.Len(), old.Len())
	for n > 0 && op(at(m, n-1), at(old, n-1), 64) == 0 {
		n--
	}
	if n == 0 {
		return
	}
	l := out.Mutable(f).List()
	for i := range n {
		l.Append(protoreflect.ValueOfUint64(op(at(m, i), at(old, i), 64)))
	}
}

// combineNumber returns op of two integers, and m if it is none.
func combineNumber(f protoreflect.FieldDescriptor, m, old protoreflect.Value, op operation) protoreflect.Value {
	if f.IsList() {
		return m
	}
	switch f.Kind() {
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(op(m.Uint(), old.Uint(), 64))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(op(m.Uint(), old.Uint(), 32)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(op(uint64(m.Int()), uint64(old.Int()), 64)))
	case protoreflect.Int32Kind, protoreflect.Sint32Kind:
		return protoreflect.ValueOfInt32(int32(op(uint64(uint32(m.Int())), uint64(uint32(old.Int())), 32)))
	default:
		return m
	}
}
