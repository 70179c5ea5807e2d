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

	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
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

func sums(t *telemetry.Table, connected bool, now time.Time) telemetry.Sums {
	var down, up telemetry.Sums
	t.Add("r", connected, now, &down, &up)
	return down
}

func ingest(t *testing.T, table *telemetry.Table, r *plan.Report) {
	t.Helper()
	if err := table.Ingest("r", r, fmt.Append(nil, r.Sequence), start()); err != nil {
		t.Fatal(err)
	}
}

func TestSums(t *testing.T) {
	table := telemetry.New(interval)
	ingest(t, table, report("a", 1, stats(1000)))
	want := telemetry.Sums{Bytes: 1e6, Packets: 1000, Drops: 100, Marks: 200, Capacity: 1e6}
	want.Sojourn[3], want.Sojourn[40] = 750, 250
	if diff := cmp.Diff(want, sums(table, true, start())); diff != "" {
		t.Errorf("one report (-want +got):\n%s", diff)
	}
	ingest(t, table, report("a", 2, stats(2000)))
	want = telemetry.Sums{Bytes: 2e6, Packets: 2000, Drops: 200, Marks: 400, Capacity: 1e6, Rate: 800_000}
	want.Sojourn[3], want.Sojourn[40] = 1500, 500
	if diff := cmp.Diff(want, sums(table, true, start())); diff != "" {
		t.Errorf("two reports (-want +got):\n%s", diff)
	}
	// Two reports were lost: the rate is over the longer time.
	ingest(t, table, report("a", 5, stats(5000)))
	if got := sums(table, true, start()).Rate; got != 800_000 {
		t.Errorf("rate %d after lost reports", got)
	}

	// Who is gone has counted what it has, and does nothing that we know of.
	got := sums(table, false, start())
	if got.Bytes != 5e6 || got.Rate != 0 || got.Capacity != 0 {
		t.Errorf("disconnected: %+v", got)
	}
	if got := sums(table, true, start().Add(31*time.Second)); got.Rate != 0 || got.Capacity != 1e6 {
		t.Errorf("silent: rate %d, capacity %d", got.Rate, got.Capacity)
	}
	latest, received, ok := table.Latest("r")
	if !ok || string(latest) != "5" || !received.Equal(start()) {
		t.Errorf("latest is %q of %v", latest, received)
	}
	if _, _, ok := table.Latest("nobody"); ok {
		t.Error("there is a report of nobody")
	}
	table.Remove("r")
	if got := sums(table, true, start()); got.Bytes != 0 {
		t.Errorf("removed: %+v", got)
	}
}

func TestTotalsGoOnThroughReboots(t *testing.T) {
	table := telemetry.New(interval)
	ingest(t, table, report("a", 7, stats(1000)))
	ingest(t, table, report("b", 1, stats(10)))
	got := sums(table, true, start())
	if got.Packets != 1010 || got.Bytes != 1010*1000 || got.Drops != 101 || got.Marks != 202 || got.Sojourn.Total() != 1009 {
		t.Errorf("after a reboot: %+v", got)
	}
	if got.Rate != 0 {
		t.Errorf("rate %d across a reboot", got.Rate)
	}
	ingest(t, table, report("b", 2, stats(1010)))
	if got := sums(table, true, start()); got.Packets != 2010 || got.Rate != 800_000 {
		t.Errorf("second boot goes on: %+v", got)
	}
	// The new boot passed the counters of the old one before its first report.
	ingest(t, table, report("c", 1, stats(5000)))
	if got := sums(table, true, start()); got.Packets != 7010 || got.Rate != 0 {
		t.Errorf("third boot: %+v", got)
	}
	// Shaping is switched off and on in one boot.
	ingest(t, table, report("c", 2, nil))
	if got := sums(table, true, start()); got.Packets != 7010 || got.Capacity != 0 {
		t.Errorf("not shaped: %+v", got)
	}
	ingest(t, table, report("c", 3, stats(20)))
	if got := sums(table, true, start()); got.Packets != 7030 || got.Rate != 0 {
		t.Errorf("shaped again: %+v", got)
	}
}

// TestOrder: whatever is lost, doubled or late, the totals are those of the
// newest report.
func TestOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	table := telemetry.New(interval)
	var newest uint64
	for range 1000 {
		seq := 1 + r.Uint64N(100)
		err := table.Ingest("r", report("a", seq, stats(seq*100)), nil, start())
		if (seq > newest) != (err == nil) || err != nil && !errors.Is(err, telemetry.ErrOld) {
			t.Fatalf("sequence %d after %d: %v", seq, newest, err)
		}
		newest = max(newest, seq)
		if got := sums(table, true, start()).Packets; got != newest*100 {
			t.Fatalf("%d packets, want %d", got, newest*100)
		}
	}
}

func TestRefuses(t *testing.T) {
	table := telemetry.New(interval)
	fast, odd := stats(1), stats(1)
	fast.Config.Rate = 200e9
	odd.Config.RTT = 0
	for name, r := range map[string]*plan.Report{
		"rate": report("a", 1, fast),
		"rtt":  {BootID: "a", Sequence: 1, Up: odd},
	} {
		if err := table.Ingest("r", r, nil, start()); err == nil || errors.Is(err, telemetry.ErrOld) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, ok := table.Latest("r"); ok {
		t.Error("a refused report is kept")
	}
}

func TestConcurrentUse(t *testing.T) {
	table := telemetry.New(interval)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			id := fmt.Sprint(g % 4)
			for i := range uint64(100) {
				// The other goroutine of the same router may be ahead.
				if err := table.Ingest(id, report("a", i+1, stats(i)), nil, start()); err != nil && !errors.Is(err, telemetry.ErrOld) {
					t.Error(err)
				}
				var down, up telemetry.Sums
				table.Add(id, true, start(), &down, &up)
			}
		})
	}
	wg.Wait()
	var down, up telemetry.Sums
	for g := range 4 {
		table.Add(fmt.Sprint(g), true, start(), &down, &up)
	}
	if down.Packets != 4*99 {
		t.Errorf("%d packets", down.Packets)
	}
}
