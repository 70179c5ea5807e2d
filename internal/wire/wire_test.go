package wire_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fill sets every field that v has to something random that the protocol can
// carry, so that a field that the mapping forgets shows as a difference.
func fill(r *rand.Rand, v reflect.Value) {
	switch v.Interface().(type) {
	case engine.TinMode:
		v.SetUint(r.Uint64N(uint64(engine.Cake3) + 1))
		return
	case engine.FlowMode:
		v.SetUint(r.Uint64N(uint64(engine.TripleIsolate) + 1))
		return
	case engine.AckFilter:
		v.SetUint(r.Uint64N(uint64(engine.AckFilterAggressive) + 1))
		return
	case engine.Framing:
		v.SetUint(r.Uint64N(uint64(engine.PTM) + 1))
		return
	case plan.Outcome:
		v.SetUint(r.Uint64N(uint64(plan.OutcomeRejected) + 1))
		return
	case time.Duration:
		v.SetInt(1000 * r.Int64N(1<<32))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1+r.Int64N(1<<33), r.Int64N(1e9)).UTC()))
		return
	case engine.Stats:
		fillStruct(r, v)
		s := v.Addr().Interface().(*engine.Stats)
		s.NumTins = 1 + r.IntN(engine.MaxTins)
		for i := s.NumTins; i < engine.MaxTins; i++ {
			s.Tins[i] = engine.TinStats{}
		}
		return
	case engine.TinStats:
		fillStruct(r, v)
		v.Addr().Interface().(*engine.TinStats).Index = uint8(r.IntN(engine.MaxTins))
		return
	case engine.Histogram:
		for i := range r.IntN(v.Len() + 1) {
			v.Index(i).SetUint(r.Uint64())
		}
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(r.Uint64()) >> (64 - v.Type().Bits()))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(r.Uint64() >> (64 - v.Type().Bits()))
	case reflect.String:
		v.SetString(fmt.Sprintf("s%x", r.Uint32()))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(r, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(r, v.Index(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(r, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 3 {
			k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(r, k)
			fill(r, e)
			v.SetMapIndex(k, e)
		}
	case reflect.Struct:
		fillStruct(r, v)
	default:
		panic(fmt.Sprintf("fill %s", v.Type()))
	}
}

func fillStruct(r *rand.Rand, v reflect.Value) {
	for _, field := range v.Fields() {
		fill(r, field)
	}
}

// roundTrip sends random values through the protocol's bytes and back.
func roundTrip[T any, M proto.Message](t *testing.T, from func(T) M, to func(M) (T, error), fix func(*T)) {
	t.Helper()
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 50 {
		var want T
		fill(r, reflect.ValueOf(&want).Elem())
		if fix != nil {
			fix(&want)
		}
		raw, err := proto.Marshal(from(want))
		if err != nil {
			t.Fatal(err)
		}
		var zero M
		m := zero.ProtoReflect().Type().New().Interface().(M)
		if err := proto.Unmarshal(raw, m); err != nil {
			t.Fatal(err)
		}
		got, err := to(m)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("seed %d (-sent +received):\n%s", seed, diff)
		}
	}
}

func TestRoundTrips(t *testing.T) {
	t.Run("shaping", func(t *testing.T) { roundTrip(t, wire.FromShaping, wire.ToShaping, nil) })
	t.Run("link", func(t *testing.T) { roundTrip(t, wire.FromLink, wire.ToLink, nil) })
	t.Run("plan", func(t *testing.T) { roundTrip(t, wire.FromPlan, wire.ToPlan, nil) })
	t.Run("subscriber", func(t *testing.T) {
		roundTrip(t, wire.FromSubscriber, func(m *pb.Subscriber) (plan.Subscriber, error) { return wire.ToSubscriber(m), nil }, func(s *plan.Subscriber) { s.Layers = nil })
	})
	t.Run("status", func(t *testing.T) {
		from := func(s plan.Status) *pb.Status {
			m := wire.FromStatus(s, 7)
			if m.GetNonce() != 7 {
				t.Errorf("nonce %d", m.GetNonce())
			}
			return m
		}
		roundTrip(t, from, wire.ToStatus, nil)
	})
	t.Run("desired", func(t *testing.T) {
		from := func(d plan.Desired) *pb.Desired {
			m := wire.FromDesired(d, 7)
			if m.GetNonce() != 7 {
				t.Errorf("nonce %d", m.GetNonce())
			}
			return m
		}
		// Reason and times are for operators and don't go to the router; what
		// follows an expiry the session reads for itself.
		roundTrip(t, from, wire.ToDesired, func(d *plan.Desired) {
			d.Reason, d.Since, d.Changes, d.LinkHash = "", time.Time{}, time.Time{}, ""
			d.ExpiresAfter, d.Then = 0, nil
			d.Known = plan.Known{} // what the store knew is the controller's own business
		})
		then := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
		m := wire.FromDesired(plan.Desired{ExpiresAfter: time.Hour, Then: &then}, 7)
		if got, err := wire.ToLink(m.GetThen()); err != nil || *got != then || m.GetExpiresAfter().AsDuration() != time.Hour {
			t.Errorf("then %v after %v: %v", got, m.GetExpiresAfter(), err)
		}
	})
	t.Run("report", func(t *testing.T) {
		roundTrip(t, func(r plan.Report) *pb.Report { return wire.FromReport(&r) }, wire.ToReport, nil)
	})
	t.Run("histogram", func(t *testing.T) {
		roundTrip(t, func(h engine.Histogram) *pb.Histogram { return wire.FromHistogram(&h) }, wire.ToHistogram, nil)
	})
	t.Run("time", func(t *testing.T) {
		for _, want := range []time.Time{{}, time.Unix(0, 0).UTC(), time.Unix(1e9, 5).UTC()} {
			if got := wire.ToTime(wire.FromTime(want)); !got.Equal(want) {
				t.Errorf("%v became %v", want, got)
			}
		}
	})
}

func TestAbsentStaysAbsent(t *testing.T) {
	if m := wire.FromLink(nil); m != nil {
		t.Errorf("link: %v", m)
	}
	if l, err := wire.ToLink(nil); l != nil || err != nil {
		t.Errorf("link: %v, %v", l, err)
	}
	if m := wire.FromStats(nil); m != nil {
		t.Errorf("stats: %v", m)
	}
	if s, err := wire.ToStats(nil); s != nil || err != nil {
		t.Errorf("stats: %v, %v", s, err)
	}
	r, err := wire.ToReport(&pb.Report{Sequence: 1, BootId: "a"})
	if err != nil || r.Down != nil || r.Up != nil {
		t.Errorf("report: %+v, %v", r, err)
	}
}

func TestRefusesShapes(t *testing.T) {
	shaping := func(change func(*pb.Shaping)) *pb.Shaping {
		m := wire.FromShaping(engine.DefaultConfig())
		change(m)
		return m
	}
	down := func(change func(*pb.DirectionStats)) *pb.Report {
		m := &pb.Report{Sequence: 1, BootId: "a", Down: wire.FromStats(&engine.Stats{Config: engine.DefaultConfig(), NumTins: 1})}
		change(m.Down)
		return m
	}
	none := func(*pb.DirectionStats) {}
	for want, m := range map[string]proto.Message{
		"shaping is missing":       (*pb.Shaping)(nil),
		"tins: value 0":            shaping(func(m *pb.Shaping) { m.Tins = 0 }),
		"tins: value 99":           shaping(func(m *pb.Shaping) { m.Tins = 99 }),
		"tins: value -1":           shaping(func(m *pb.Shaping) { m.Tins = -1 }),
		"flows: value 99":          shaping(func(m *pb.Shaping) { m.Flows = 99 }),
		"ack_filter: value 0":      shaping(func(m *pb.Shaping) { m.AckFilter = 0 }),
		"framing: value 4000":      shaping(func(m *pb.Shaping) { m.Framing = 4000 }),
		"overhead: value 32768":    shaping(func(m *pb.Shaping) { m.Overhead = 32768 }),
		"mpu: value 65536":         shaping(func(m *pb.Shaping) { m.Mpu = 65536 }),
		"mtu: value 65536":         shaping(func(m *pb.Shaping) { m.Mtu = 65536 }),
		"down: shaping is missing": &pb.Link{Up: shaping(func(*pb.Shaping) {})},
		"up: shaping is missing":   &pb.Link{Down: shaping(func(*pb.Shaping) {})},
		"link is missing":          &pb.Plan{Name: "gold"},
		"outcome: value 4":         &pb.Status{Outcome: 4},
		"outcome: value -1":        &pb.Status{Outcome: -1},
		"effective: down":          &pb.Status{Effective: &pb.Link{}},
		"sequence is missing":      &pb.Report{BootId: "a"},
		"boot_id: 0 bytes":         &pb.Report{Sequence: 1},
		"boot_id: 65 bytes":        &pb.Report{Sequence: 1, BootId: strings.Repeat("a", 65)},
		"uptime: value -1s":        &pb.Report{Sequence: 1, BootId: "a", Uptime: durationpb.New(-time.Second)},
		"uptime: ":                 &pb.Report{Sequence: 1, BootId: "a", Uptime: &durationpb.Duration{Nanos: 2e9}},
		"cpu_time: value -1s":      &pb.Report{Sequence: 1, BootId: "a", Agent: &pb.AgentStats{CpuTime: durationpb.New(-time.Second)}},
		"down: tins: 9":            down(func(m *pb.DirectionStats) { m.Tins = make([]*pb.TinStats, 9) }),
		"down: backlog_packets":    down(func(m *pb.DirectionStats) { m.BacklogPackets = 1 << 32 }),
		"down: max_adjusted_size":  down(func(m *pb.DirectionStats) { m.MaxAdjustedSize = 1 << 16 }),
		"down: tin 0: backlog":     down(func(m *pb.DirectionStats) { m.Tins[0].BacklogPackets = 1 << 32 }),
		"down: tin 0: index":       down(func(m *pb.DirectionStats) { m.Tins[0].Index = 8 }),
		"down: tin 0: sojourn: 93": down(func(m *pb.DirectionStats) { m.Tins[0].Sojourn = &pb.Histogram{Counts: make([]uint64, 93)} }),
		"":                         down(none),
	} {
		var err error
		switch m := m.(type) {
		case *pb.Shaping:
			_, err = wire.ToShaping(m)
		case *pb.Link:
			_, err = wire.ToLink(m)
		case *pb.Plan:
			_, err = wire.ToPlan(m)
		case *pb.Status:
			_, err = wire.ToStatus(m)
		case *pb.Report:
			_, err = wire.ToReport(m)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestDelaysSaturate: a delay that the protocol can't carry must not look like
// a small one.
func TestDelaysSaturate(t *testing.T) {
	var s engine.Stats
	s.NumTins = 1
	s.Tins[0].PeakDelay = 2 << 32 * time.Microsecond
	s.Tins[0].AvgDelay = -time.Second
	m := wire.FromStats(&s).GetTins()[0]
	if m.GetPeakDelayUs() != 1<<32-1 || m.GetAvgDelayUs() != 0 {
		t.Errorf("peak %d, average %d", m.GetPeakDelayUs(), m.GetAvgDelayUs())
	}
}

// The sum of what Difference gives is the report again, whatever the two are.
func TestDifference(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	stats := func() *engine.Stats {
		if r.IntN(8) == 0 {
			return nil
		}
		s := &engine.Stats{Config: engine.DefaultConfig(), SentBytes: r.Uint64(), Qlen: r.Uint32(), MinNetLen: uint16(r.Uint32()), NumTins: 1 + r.IntN(engine.MaxTins)}
		s.Config.Overhead = int16(r.IntN(300) - 64)
		for i := range s.Tins[:s.NumTins] {
			s.Tins[i] = engine.TinStats{Packets: r.Uint64() >> r.IntN(64), BulkFlows: r.Uint32(), PeakDelay: time.Duration(r.Uint32()), Index: uint8(i)}
			for range r.IntN(5) {
				s.Tins[i].Sojourn[r.IntN(engine.HistogramBuckets)] = r.Uint64() >> r.IntN(64)
			}
		}
		return s
	}
	probe := func() *plan.ProbeStats {
		if r.IntN(8) == 0 {
			return nil
		}
		p := &plan.ProbeStats{Host: fmt.Sprint("host", r.IntN(2)), Error: strings.Repeat("e", r.IntN(2))}
		for _, d := range []*plan.ProbeDelay{&p.Idle, &p.Down, &p.Both} {
			d.Lost = uint64(r.IntN(3))
			d.Delay[r.IntN(engine.HistogramBuckets)] = uint64(r.IntN(3))
		}
		return p
	}
	wan := func() *plan.LinkState {
		if r.IntN(8) == 0 {
			return nil
		}
		return &plan.LinkState{Name: "wan", Index: r.Uint32(), Up: r.IntN(2) == 0, Carrier: r.IntN(2) == 0, Speed: engine.BitsPerSecond(r.Uint64()), Comings: r.Uint64()}
	}
	var before *pb.Report
	for i := range 150 {
		m := wire.FromReport(&plan.Report{
			Sequence: uint64(1 + i), BootID: "a", Uptime: time.Duration(i) * time.Second, Down: stats(), Up: stats(),
			Agent: plan.AgentStats{CPUTime: time.Duration(r.Uint64() >> 2), ResidentBytes: r.Uint64(), BatchSizeMilli: r.Uint32(), SkippedReports: r.Uint64()},
			Probe: probe(), WAN: wan(),
		})
		if before != nil {
			raw, err := proto.Marshal(wire.Difference(m, before))
			if err != nil {
				t.Fatal(err)
			}
			d := &pb.Report{}
			if err := proto.Unmarshal(raw, d); err != nil {
				t.Fatal(err)
			}
			got, err := wire.Sum(d, before)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, got, protocmp.Transform()); diff != "" {
				t.Fatalf("report %d:\n%s", i, diff)
			}
			d.Since++
			if _, err := wire.Sum(d, before); err == nil {
				t.Fatal("the sum with another report gives no error")
			}
		}
		before = m
	}
}

func FuzzReport(f *testing.F) {
	raw, err := proto.Marshal(wire.FromReport(&plan.Report{Sequence: 1, BootID: "a", Down: &engine.Stats{Config: engine.DefaultConfig(), NumTins: 2}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := &pb.Report{}
		if proto.Unmarshal(raw, m) != nil {
			return
		}
		r, err := wire.ToReport(m)
		if err != nil {
			return
		}
		again, err := wire.ToReport(wire.FromReport(&r))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r, again); diff != "" {
			t.Error(diff)
		}
	})
}
