package wire_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fillMessage sets every field of m to something that the native types can hold, some
// of them to nothing.
func fillMessage(r *rand.Rand, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.IsMap() || f.Name() == "since" || f.Name() == "name" {
			continue
		}
		if r.IntN(6) == 0 && f.Kind() != protoreflect.EnumKind && f.Name() != "shaping" && f.Name() != "boot_id" && f.Name() != "sequence" {
			continue
		}
		switch {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			l := m.Mutable(f).List()
			for range r.IntN(engine.MaxTins + 1) {
				fillMessage(r, l.AppendMutable().Message())
			}
		case f.IsList():
			l := m.Mutable(f).List()
			for range 1 + r.IntN(engine.HistogramBuckets) {
				l.Append(protoreflect.ValueOfUint64(r.Uint64() >> r.IntN(64)))
			}
		case f.Kind() == protoreflect.MessageKind:
			fillMessage(r, m.Mutable(f).Message())
		case f.Kind() == protoreflect.EnumKind:
			m.Set(f, protoreflect.ValueOfEnum(protoreflect.EnumNumber(1+r.IntN(f.Enum().Values().Len()-1))))
		case f.Kind() == protoreflect.BoolKind:
			m.Set(f, protoreflect.ValueOfBool(true))
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString("a"))
		case f.Kind() == protoreflect.Int64Kind:
			m.Set(f, protoreflect.ValueOfInt64(r.Int64N(1e6)))
		case f.Kind() == protoreflect.Int32Kind:
			m.Set(f, protoreflect.ValueOfInt32(r.Int32N(1e9)))
		case f.Kind() == protoreflect.Sint32Kind:
			m.Set(f, protoreflect.ValueOfInt32(r.Int32N(300)-64))
		case f.Kind() == protoreflect.Uint64Kind && f.Name() == "backlog_packets":
			m.Set(f, protoreflect.ValueOfUint64(uint64(r.Uint32())))
		case f.Kind() == protoreflect.Uint64Kind:
			m.Set(f, protoreflect.ValueOfUint64(1+r.Uint64()>>r.IntN(64)))
		case f.Name() == "index":
			m.Set(f, protoreflect.ValueOfUint32(r.Uint32N(engine.MaxTins)))
		default: // some are of 16 bits in the engine
			m.Set(f, protoreflect.ValueOfUint32(r.Uint32N(1<<16)))
		}
	}
}

// canonical is m without what says nothing.
func canonical(t *testing.T, m *pb.Report) *pb.Report {
	t.Helper()
	r, err := wire.ToReport(m)
	if err != nil {
		t.Fatal(err)
	}
	return wire.FromReport(&r)
}

// TestReportAsGenerated: the reader and writer of this package say what the
// generated code says, for every field there is, whole and as a difference. Who
// adds a field to the message and not to them meets this test.
func TestReportAsGenerated(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var before *pb.Report
	var was, now wire.Scratch
	for i := range 60 {
		filled := &pb.Report{}
		fillMessage(r, filled.ProtoReflect())
		filled.Sequence = uint64(i + 1)
		m := canonical(t, filled)
		raw, err := proto.Marshal(filled)
		if err != nil {
			t.Fatal(err)
		}
		if err := now.Read(raw); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(m, wire.FromReport(&now.Report), protocmp.Transform()); diff != "" {
			t.Fatalf("report %d read whole:\n%s", i, diff)
		}
		same(t, "written whole", m, wire.AppendReport([]byte("x"), &now.Report, nil)[1:])
		if before != nil {
			d := wire.Difference(m, before)
			same(t, "written as a difference", d, wire.AppendReport(nil, &now.Report, &was.Report))
			if raw, err = proto.Marshal(d); err != nil {
				t.Fatal(err)
			}
			var sum wire.Scratch
			sum.Copy(&was.Report)
			if err := sum.Read(raw); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, wire.FromReport(&sum.Report), protocmp.Transform()); diff != "" {
				t.Fatalf("report %d read as a difference:\n%s", i, diff)
			}
		}
		before = m
		was.Copy(&now.Report)
	}
}

func same(t *testing.T, what string, want *pb.Report, raw []byte) {
	t.Helper()
	got := &pb.Report{}
	if err := proto.Unmarshal(raw, got); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

// FuzzReadReport: what comes from outside is either understood as the generated
// code understands it, or refused.
func FuzzReadReport(f *testing.F) {
	s := &engine.Stats{Config: engine.DefaultConfig(), NumTins: 2}
	s.Tins[1].Sojourn[7] = 300
	one := &plan.Report{Sequence: 1, BootID: "a", Down: s, Up: s}
	f.Add(wire.AppendReport(nil, one, nil))
	f.Add(wire.AppendReport(nil, &plan.Report{Sequence: 2, BootID: "a", Up: s, Uptime: time.Hour}, one))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var got wire.Scratch
		if got.Read(raw) != nil {
			return
		}
		h, err := wire.ReadReportHead(raw)
		if err != nil {
			t.Fatal(err)
		}
		if h.Since != 0 {
			return
		}
		again := wire.AppendReport(nil, &got.Report, nil)
		var second wire.Scratch
		if err := second.Read(again); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got.Report, second.Report); diff != "" {
			t.Error(diff)
		}
	})
}

func benchReport() (whole, later *plan.Report) {
	r := rand.New(rand.NewPCG(1, 1))
	stats := func(k uint64) *engine.Stats {
		s := &engine.Stats{Config: engine.DefaultConfig(), SentBytes: k * 1e9, SentPackets: k * 1e6, Drops: k * 1000, NumTins: 4}
		for i := range s.Tins[:4] {
			s.Tins[i] = engine.TinStats{Packets: k * 250e3, Bytes: k * 250e6, Threshold: 1e8, Target: 5e6, Interval: 1e8, WayDirect: k * 9999, Index: uint8(i)}
			for b := 14; b < 54; b++ {
				s.Tins[i].Sojourn[b] = k*1000 + r.Uint64N(k*10)
			}
		}
		return s
	}
	return &plan.Report{Sequence: 1, BootID: "0123456789abcdef", Uptime: time.Hour, Down: stats(100), Up: stats(50)},
		&plan.Report{Sequence: 2, BootID: "0123456789abcdef", Uptime: time.Hour + 10*time.Second, Down: stats(101), Up: stats(51)}
}

func BenchmarkReport(b *testing.B) {
	whole, later := benchReport()
	raw, diff := wire.AppendReport(nil, whole, nil), wire.AppendReport(nil, later, whole)
	b.Run("read", func(b *testing.B) {
		var s wire.Scratch
		b.ReportMetric(float64(len(raw)), "bytes")
		b.ReportAllocs()
		for b.Loop() {
			if err := s.Read(raw); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read-difference", func(b *testing.B) {
		var was, s wire.Scratch
		if err := was.Read(raw); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(diff)), "bytes")
		b.ReportAllocs()
		for b.Loop() {
			s.Copy(&was.Report)
			if err := s.Read(diff); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("write", func(b *testing.B) {
		var buf []byte
		b.ReportAllocs()
		for b.Loop() {
			buf = wire.AppendReport(buf[:0], later, nil)
		}
	})
	b.Run("write-difference", func(b *testing.B) {
		var buf []byte
		b.ReportAllocs()
		for b.Loop() {
			buf = wire.AppendReport(buf[:0], later, whole)
		}
	})
	b.Run("generated-read", func(b *testing.B) {
		for b.Loop() {
			m := &pb.Report{}
			if err := proto.Unmarshal(raw, m); err != nil {
				b.Fatal(err)
			}
			if _, err := wire.ToReport(m); err != nil {
				b.Fatal(err)
			}
		}
	})
}
