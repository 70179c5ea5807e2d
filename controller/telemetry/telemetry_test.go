package telemetry_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const interval = 10 * time.Second

func start() time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC) }

// stats are those of a link at 1 Mbit/s that delivered n packets of 1000 bytes
// through two tins, dropped 1 in 10 of them and marked 2.
func stats(n uint64) *engine.Stats {
	s := &engine.Stats{Config: engine.DefaultConfig(), SentBytes: 1000 * n, SentPackets: n, Drops: n / 10, NumTins: 2}
	s.Config.Rate = 1e6
	s.Tins[0].Marks, s.Tins[1].Marks = n/10, n/10
	s.Tins[0].Sojourn[3], s.Tins[1].Sojourn[3], s.Tins[1].Sojourn[40] = n/2, n/4, n/4
	return s
}

func report(boot string, seq uint64, down *engine.Stats) *plan.Report {
	return &plan.Report{BootID: boot, Sequence: seq, Uptime: time.Duration(seq) * interval, Down: down}
}

func newTable() *telemetry.Table {
	return telemetry.New(telemetry.Config{Interval: interval, Labels: []string{"region"}})
}

func gold() telemetry.Place {
	return telemetry.Place{Plan: "gold", Site: "north", Model: "m", Version: "1", Labels: []string{"hills"}}
}

func ingest(t *testing.T, table *telemetry.Table, r *plan.Report) {
	t.Helper()
	if err := ingestAt(table, "r", r, gold(), start()); err != nil {
		t.Fatal(err)
	}
}

func ingestAt(table *telemetry.Table, id string, r *plan.Report, p telemetry.Place, now time.Time) error {
	return table.Ingest(id, wire.AppendReport(nil, r, nil), p, now)
}

// counted are the counters of a group's downloads.
func counted(table *telemetry.Table, by, value string) rollup.Cell {
	return table.Groups().Group(by, value).Sums().Directions[rollup.Down].Cell
}

func all(table *telemetry.Table) rollup.Cell { return counted(table, rollup.ByAll, "") }

func gauges(table *telemetry.Table, now time.Time) telemetry.DirectionGauges {
	if g := table.Gauges(now)[rollup.Key{By: rollup.ByAll}]; g != nil {
		return g.Directions[rollup.Down]
	}
	return telemetry.DirectionGauges{}
}

func TestSums(t *testing.T) {
	table := newTable()
	ingest(t, table, report("a", 1, stats(1000)))
	want := rollup.Cell{Counters: rollup.Counters{Bytes: 1e6, Packets: 1000, Drops: 100, Marks: 200}}
	want.Sojourn[3], want.Sojourn[40] = 750, 250
	if diff := cmp.Diff(want, all(table)); diff != "" {
		t.Errorf("one report (-want +got):\n%s", diff)
	}
	ingest(t, table, report("a", 2, stats(2000)))
	want = rollup.Cell{Counters: rollup.Counters{Bytes: 2e6, Packets: 2000, Drops: 200, Marks: 400}}
	want.Sojourn[3], want.Sojourn[40] = 1500, 500
	for by, value := range map[string]string{rollup.ByAll: "", rollup.ByPlan: "gold", rollup.BySite: "north", rollup.ByModel: "m", rollup.ByVersion: "1", "region": "hills"} {
		if diff := cmp.Diff(want, counted(table, by, value)); diff != "" {
			t.Errorf("two reports, by %s (-want +got):\n%s", by, diff)
		}
	}
	tins := table.Groups().Group(rollup.ByAll, "").Sums().Directions[rollup.Down].Tins
	be := tins["Best Effort"]
	if n := be.Sojourn.Total(); n != 1000 || len(tins) != 2 {
		t.Errorf("%d packets in Best Effort of %d tins", n, len(tins))
	}
	// Two reports were lost: the rate is over the longer time.
	if err := ingestAt(table, "r", report("a", 5, stats(5000)), gold(), start().Add(3*interval)); err != nil {
		t.Fatal(err)
	}
	now := start().Add(3 * interval)
	if g := gauges(table, now); g.Load != 800_000 || g.Shaped != 1e6 || g.Saturated != 0 {
		t.Errorf("after lost reports: %+v", g)
	}
	if g := gauges(table, now.Add(31*time.Second)); g.Load != 0 || g.Shaped != 0 {
		t.Errorf("silent: %+v", g)
	}
	table.Silence("r")
	if g := gauges(table, now); g.Load != 0 || g.Shaped != 0 {
		t.Errorf("gone: %+v", g)
	}
	raw, received, ok := table.Latest("r")
	var latest wire.Scratch
	if err := latest.Read(raw); err != nil || !ok || !received.Equal(now) {
		t.Fatalf("latest of %v: %v, %v", received, ok, err)
	}
	if diff := cmp.Diff(report("a", 5, stats(5000)), &latest.Report); diff != "" {
		t.Errorf("latest (-want +got):\n%s", diff)
	}
	if _, _, ok := table.Latest("nobody"); ok {
		t.Error("there is a report of nobody")
	}
	if f := table.Faults(); f != (telemetry.Faults{Reports: 3, Lost: 2, Clock: 1}) { // two reports came at once
		t.Errorf("faults %+v", f)
	}
	table.Remove("r")
	if _, ok := table.Router("r", now); ok || table.Len() != 0 {
		t.Error("a removed router is there")
	}
	if got := all(table); got.Bytes != 5e6 {
		t.Errorf("what a removed router counted: %d bytes, want 5e6", got.Bytes)
	}
}

// TestMoves: what a router counted stays with the plan that it had.
func TestMoves(t *testing.T) {
	table := newTable()
	ingest(t, table, report("a", 1, stats(1000)))
	silver := gold()
	silver.Plan = "silver"
	if err := ingestAt(table, "r", report("a", 2, stats(1500)), silver, start()); err != nil {
		t.Fatal(err)
	}
	if g, s, a := counted(table, "plan", "gold").Packets, counted(table, "plan", "silver").Packets, all(table).Packets; g != 1000 || s != 500 || a != 1500 {
		t.Errorf("gold %d, silver %d, all %d", g, s, a)
	}
	now := table.Gauges(start())
	if now[rollup.Key{By: "plan", Value: "gold"}] != nil || now[rollup.Key{By: "plan", Value: "silver"}].Routers != 1 {
		t.Error("gauges have the router where it was")
	}
}

// TestTooManyGroups: what is beyond the bound is summed up together.
func TestTooManyGroups(t *testing.T) {
	table := telemetry.New(telemetry.Config{Interval: interval, Most: 3})
	for i := range 10 {
		p := gold()
		p.Site = fmt.Sprint("s", i)
		if err := ingestAt(table, fmt.Sprint(i), report("a", 1, stats(100)), p, start()); err != nil {
			t.Fatal(err)
		}
	}
	if n := counted(table, rollup.BySite, rollup.Other).Packets; n != 700 {
		t.Errorf("%d packets in the group of others, want 700", n)
	}
	if got := table.Groups().Overflow(); got != 7 {
		t.Errorf("overflow %d, want 7", got)
	}
	if got := len(table.Groups().Groups()); got != 4+4 {
		t.Errorf("%d groups", got)
	}
}

func TestTotalsGoOnThroughReboots(t *testing.T) {
	table := newTable()
	ingest(t, table, report("a", 1, stats(1000)))
	ingest(t, table, report("b", 1, stats(10)))
	got := all(table)
	if got.Packets != 1010 || got.Bytes != 1010*1000 || got.Drops != 101 || got.Marks != 202 || got.Sojourn.Total() != 1009 {
		t.Errorf("after a reboot: %+v", got)
	}
	if got := gauges(table, start()).Load; got != 0 {
		t.Errorf("rate %d across a reboot", got)
	}
	ingest(t, table, report("b", 2, stats(1010)))
	if got := all(table); got.Packets != 2010 {
		t.Errorf("second boot goes on: %+v", got)
	}
	// A report of the boot before comes late.
	if err := ingestAt(table, "r", report("a", 2, stats(3000)), gold(), start()); !errors.Is(err, telemetry.ErrOld) {
		t.Errorf("late report of an earlier boot: %v", err)
	}
	// The new boot passed the counters of the old one before its first report.
	ingest(t, table, report("c", 1, stats(5000)))
	if got := all(table); got.Packets != 7010 {
		t.Errorf("third boot: %+v", got)
	}
	// Shaping is switched off and on in one boot, and the counters begin again.
	ingest(t, table, report("c", 2, nil))
	if got := gauges(table, start()); got.Shaped != 0 {
		t.Errorf("not shaped: %+v", got)
	}
	ingest(t, table, report("c", 3, stats(20)))
	ingest(t, table, report("c", 4, stats(10)))
	if got := all(table); got.Packets != 7040 {
		t.Errorf("shaped again: %+v", got)
	}
	r, _ := table.Router("r", start())
	if r.Totals[rollup.Down].Packets != 7040 {
		t.Errorf("the router's own total is %d", r.Totals[rollup.Down].Packets)
	}
	if f := table.Faults(); f.Reboots != 2 || f.Restarts != 1 || f.Old != 1 {
		t.Errorf("faults %+v", f)
	}
}

// TestWraps: counters of 32 bits that run over while bytes go on.
func TestWraps(t *testing.T) {
	table := newTable()
	near := stats(0)
	near.SentBytes, near.SentPackets, near.Drops = 1<<42, 1<<32-5, 1<<32-1
	near.Tins[0].Packets, near.Tins[0].Bytes, near.Tins[0].Marks = 1<<32-2, 1<<41, 1<<32-3
	ingest(t, table, report("a", 1, near))
	before := all(table)
	over := stats(0)
	over.SentBytes, over.SentPackets, over.Drops = 1<<42+10_000, 5, 0
	over.Tins[0].Packets, over.Tins[0].Bytes, over.Tins[0].Marks = 8, 1<<41+10_000, 7
	ingest(t, table, report("a", 2, over))
	got := all(table)
	if got.Packets-before.Packets != 10 || got.Drops-before.Drops != 1 || got.Marks-before.Marks != 10 || got.Bytes-before.Bytes != 10_000 {
		t.Errorf("after running over: %+v, before %+v", got.Counters, before.Counters)
	}
	if f := table.Faults(); f.Wraps != 4 || f.Restarts != 0 {
		t.Errorf("faults %+v", f)
	}
}

// TestHandover: a router that goes from one controller to another, and back, is
// counted once, whatever each of them knows of it.
func TestHandover(t *testing.T) {
	a, b := newTable(), newTable()
	ingest(t, a, report("x", 1, stats(100)))
	ingest(t, a, report("x", 2, stats(200)))
	again := func(seq, n uint64, from *telemetry.Table) *plan.Report {
		r := report("x", seq, stats(n))
		r.Again = from.Origin()
		return r
	}
	ingest(t, b, again(2, 200, a))
	ingest(t, b, report("x", 3, stats(300)))
	ingest(t, b, report("x", 4, stats(450)))
	ingest(t, a, again(4, 450, b)) // a knows nothing of what b counted, and must not count it
	ingest(t, a, report("x", 5, stats(500)))
	// The stream breaks, what was sent last was lost, and the router comes back.
	ingest(t, a, again(7, 700, a))
	if got := all(a).Packets + all(b).Packets; got != 700 {
		t.Errorf("%d packets at one and %d at the other, want 700 together", all(a).Packets, all(b).Packets)
	}
	if f := b.Faults(); f.Handovers != 1 {
		t.Errorf("faults %+v", f)
	}
}

// TestDifferences: reports that are differences come to the same.
func TestDifferences(t *testing.T) {
	table := newTable()
	before := report("a", 1, stats(10))
	ingest(t, table, before)
	for seq := uint64(2); seq < 100; seq++ {
		r := report("a", seq, stats(seq*10))
		raw := wire.AppendReport(nil, r, before)
		if seq%10 == 0 {
			// It is lost, and so is what refers to it, up to a whole one.
			if err := table.Ingest("r", wire.AppendReport(nil, report("a", seq+1, stats(seq*10+10)), r), gold(), start()); !errors.Is(err, telemetry.ErrUnknown) {
				t.Fatalf("difference from a lost report: %v", err)
			}
			raw = wire.AppendReport(nil, r, nil)
		}
		if err := table.Ingest("r", raw, gold(), start()); err != nil {
			t.Fatal(err)
		}
		before = r
	}
	if got := all(table); got.Packets != 990 || got.Bytes != 990_000 {
		t.Errorf("%+v", got.Counters)
	}
}

// TestOrder: whatever is lost, doubled or late, the totals are those of the
// newest report.
func TestOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	table := newTable()
	ingest(t, table, report("a", 1, stats(100)))
	newest := uint64(1)
	for range 1000 {
		seq := 1 + r.Uint64N(100)
		err := ingestAt(table, "r", report("a", seq, stats(seq*100)), gold(), start())
		if (seq > newest) != (err == nil) || err != nil && !errors.Is(err, telemetry.ErrOld) {
			t.Fatalf("sequence %d after %d: %v", seq, newest, err)
		}
		newest = max(newest, seq)
		if got := all(table).Packets; got != newest*100 {
			t.Fatalf("%d packets, want %d", got, newest*100)
		}
	}
}

func TestRefuses(t *testing.T) {
	table := newTable()
	fast, odd := stats(1), stats(1)
	fast.Config.Rate = 200e9
	odd.Config.RTT = 0
	for name, r := range map[string]*plan.Report{
		"rate":     report("a", 1, fast),
		"rtt":      {BootID: "a", Sequence: 1, Up: odd},
		"boot":     report("", 1, nil),
		"sequence": report("a", 0, nil),
	} {
		if err := ingestAt(table, "r", r, gold(), start()); err == nil || errors.Is(err, telemetry.ErrOld) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := table.Ingest("r", make([]byte, 33<<10), gold(), start()); err == nil {
		t.Error("a huge report was taken")
	}
	if _, _, ok := table.Latest("r"); ok {
		t.Error("a refused report is kept")
	}
	if f := table.Faults(); f.Refused != 5 || f.Reports != 0 {
		t.Errorf("faults %+v", f)
	}
}

// TestRing: a sample says what its report added, for a quarter of an hour.
func TestRing(t *testing.T) {
	table := newTable()
	now := start()
	var n uint64
	for seq := uint64(1); seq <= 200; seq++ {
		n += 10 * (1 + seq%7)
		s := stats(n)
		if seq > 150 {
			s.Config.Rate = 2e6
		}
		s.Backlog = seq
		now = now.Add(interval)
		if err := ingestAt(table, "r", report("a", seq, s), gold(), now); err != nil {
			t.Fatal(err)
		}
	}
	samples := table.Samples("r", time.Time{})
	if len(samples) != 91 { // both ends of a quarter of an hour
		t.Fatalf("%d samples", len(samples))
	}
	var h engine.Histogram
	for i, s := range samples {
		seq := uint64(110 + i)
		d := &s.Directions[rollup.Down]
		want := 10 * (1 + seq%7)
		rate := engine.BitsPerSecond(1e6)
		if seq > 150 {
			rate = 2e6
		}
		if !s.Time.Equal(start().Add(time.Duration(seq)*interval)) || s.Span != interval || d.Packets != want || d.Bytes != want*1000 || d.BacklogBytes != seq || d.Rate != rate || s.Events != 0 {
			t.Fatalf("sample of report %d at %v: %+v", seq, s.Time, d.Counters)
		}
		if s.Load(rollup.Down) != engine.BitsPerSecond(want*8000/10) || s.Directions[rollup.Up].Shaped {
			t.Fatalf("load %d", s.Load(rollup.Down))
		}
		h.Merge(&d.Sojourn)
	}
	if n := len(table.Samples("r", now.Add(-time.Minute))); n != 6 {
		t.Errorf("%d samples in a minute", n)
	}
	if first := stats(n); h.Total() > first.Tins[0].Sojourn.Total()+first.Tins[1].Sojourn.Total() || h.Total() == 0 {
		t.Errorf("%d packets in the ring", h.Total())
	}
	table.Gauges(now.Add(time.Hour))
	if n := len(table.Samples("r", time.Time{})); n != 0 {
		t.Errorf("%d samples of a router that is long silent", n)
	}
}

func TestWorst(t *testing.T) {
	table := newTable()
	for i := range uint64(50) {
		id := fmt.Sprintf("r%02d", i)
		for seq := uint64(1); seq <= 2; seq++ {
			if err := ingestAt(table, id, report("a", seq, stats(seq*10*i)), gold(), start()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, by := range []telemetry.By{telemetry.BySuffering, telemetry.ByDrops, telemetry.BySaturation} {
		worst := table.Worst(by, 3, start(), nil)
		if len(worst) != 3 || worst[0].ID != "r49" || worst[1].ID != "r48" || worst[2].ID != "r47" || worst[0].Figure < worst[2].Figure {
			t.Errorf("by %d: %+v", by, worst)
		}
	}
	odd := table.Worst(telemetry.ByDrops, 1, start(), func(id string, _ *telemetry.Place) bool { return id < "r30" })
	if len(odd) != 1 || odd[0].ID != "r29" {
		t.Errorf("of those wanted: %+v", odd)
	}
	if w := table.Worst(telemetry.ByDrops, 3, start().Add(time.Hour), nil); len(w) != 0 {
		t.Errorf("silent ones: %+v", w)
	}
}

func TestConcurrentUse(t *testing.T) {
	table := newTable()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			id := fmt.Sprint(g % 4)
			for i := range uint64(100) {
				// The other goroutine of the same router may be ahead.
				if err := ingestAt(table, id, report("a", i+1, stats(i)), gold(), start()); err != nil && !errors.Is(err, telemetry.ErrOld) {
					t.Error(err)
				}
				table.Gauges(start())
				table.Worst(telemetry.ByDrops, 2, start(), nil)
			}
		})
	}
	wg.Wait()
	if got := all(table); got.Packets > 4*99 {
		t.Errorf("%d packets", got.Packets)
	}
}

// TestRest follows what has no direction through a lost report, a start of the
// agent and another host.
func TestRest(t *testing.T) {
	table := newTable()
	rest := func(boot string, seq uint64, host string, idle, lost, losses uint64) *plan.Report {
		r := report(boot, seq, nil)
		r.Agent = plan.AgentStats{CPUTime: time.Duration(seq) * time.Second, ResidentBytes: 20 << 20}
		r.WAN = &plan.LinkState{Name: "wan", Index: 2, Up: true, Carrier: losses%2 == 0, CarrierLosses: losses}
		r.Probe = &plan.ProbeStats{Host: host, Idle: plan.ProbeDelay{Lost: lost}}
		r.Probe.Idle.Delay[5] = idle
		r.Probe.Both.Delay[50] = 2 * idle
		return r
	}
	sums := func() rollup.Sums { return table.Groups().Group(rollup.ByPlan, "gold").Sums() }
	for i, c := range []struct {
		report            *plan.Report
		idle, both, lost  uint64
		cpu, starts, cuts uint64
		down              int
	}{
		{rest("a", 1, "far", 10, 1, 0), 10, 20, 1, 1, 1, 0, 0},
		{rest("a", 3, "far", 25, 1, 3), 25, 50, 1, 3, 1, 3, 1},
		{rest("b", 1, "far", 5, 2, 0), 30, 60, 3, 4, 2, 3, 0},   // started again
		{rest("b", 2, "near", 2, 0, 2), 32, 64, 3, 5, 2, 5, 0},  // its counters are new
		{rest("b", 3, "near", 1, 0, 2), 33, 66, 3, 6, 2, 5, 0},  // near, far and near again in between
		{report("b", 4, nil), 33, 66, 3, 6, 2, 5, 0},            // no longer asked
		{rest("b", 5, "near", 1, 1, 2), 34, 68, 4, 11, 2, 7, 0}, // asked again
	} {
		ingest(t, table, c.report)
		got := sums()
		if got.Echoes == nil {
			t.Fatalf("report %d: no delays", i)
		}
		idle, both := &got.Echoes[rollup.Idle], &got.Echoes[rollup.BothLoaded]
		if idle.Delay[5] != c.idle || idle.Delay.Total() != c.idle || both.Delay[50] != c.both || idle.Lost != c.lost {
			t.Errorf("report %d: %d idle, %d loaded, %d lost, want %d, %d, %d", i, idle.Delay[5], both.Delay[50], idle.Lost, c.idle, c.both, c.lost)
		}
		if got.CPU != c.cpu*1e6 || got.Starts != c.starts || got.CarrierLosses != c.cuts || got.Reports != uint64(i+1) {
			t.Errorf("report %d: %+v, want %d s of CPU, %d starts, carrier lost %d times", i, got.Counts, c.cpu, c.starts, c.cuts)
		}
		g := table.Gauges(start())[rollup.Key{By: rollup.ByPlan, Value: "gold"}]
		if g.Cut != c.down {
			t.Errorf("report %d: %d lines are cut, want %d", i, g.Cut, c.down)
		}
		if c.report.WAN != nil && g.Memory != 20<<20 {
			t.Errorf("report %d: %d bytes of agents", i, g.Memory)
		}
	}
	if n := table.Groups().Group(rollup.ByPlan, "silver").Sums(); n.Echoes != nil {
		t.Error("a group in which no delay is measured keeps some")
	}
}

// TestUpsets wants what should not happen in the sample of its time, through a
// start of the agent and counters that begin again.
func TestUpsets(t *testing.T) {
	table := newTable()
	at := start()
	upsets := func(boot string, seq, losses, comings, bypassed, overflows uint64) {
		t.Helper()
		r := report(boot, seq, nil)
		r.WAN = &plan.LinkState{Name: "wan", Index: 2, CarrierLosses: losses, Comings: comings}
		r.Agent.BypassedPackets, r.Agent.QueueOverflows = bypassed, overflows
		ingest(t, table, r)
	}
	upsets("a", 1, 0, 0, 0, 0)
	upsets("a", 2, 3, 1, 1000, 400)
	upsets("a", 3, 3, 1, 1000, 400)
	upsets("b", 1, 1, 0, 7, 0)   // started again
	upsets("b", 2, 1, 0, 70, 2)  // and goes on
	upsets("b", 3, 1, 2, 0, 100) // a data plane that was made anew
	var got []telemetry.Upsets
	for _, s := range table.Samples("r", at.Add(-time.Hour)) {
		got = append(got, s.Upsets)
		if s.Events&^(telemetry.Rebooted|telemetry.Restarted|telemetry.Lost) != 0 {
			t.Errorf("events %b", s.Events)
		}
	}
	want := []telemetry.Upsets{{}, {3, 1, 1000, 400}, {}, {1, 0, 7, 0}, {0, 0, 63, 2}, {0, 2, 0, 98}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
