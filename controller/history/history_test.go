package history_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"go.uber.org/goleak"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// asWriter makes the test binary a program that writes steps until it is killed.
const asWriter = "CAKEFLEET_TEST_WRITES_HISTORY"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asWriter); dir != "" {
		writeForEver(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

const interval = 10 * time.Second

// feed reports for routers whose traffic is known.
type feed struct {
	table   *telemetry.Table
	r       *rand.Rand
	stats   map[string]*engine.Stats
	seq     uint64
	sojourn map[string]*engine.Histogram // of downloads, by plan
}

func newFeed(table *telemetry.Table) *feed {
	return &feed{table: table, r: rand.New(rand.NewPCG(1, 2)), stats: map[string]*engine.Stats{}, sojourn: map[string]*engine.Histogram{}}
}

func (f *feed) report(routers int, now time.Time) error {
	f.seq++
	for i := range routers {
		id, name := fmt.Sprint("r", i), fmt.Sprint("plan", i%3)
		s := f.stats[id]
		if s == nil {
			s = &engine.Stats{Config: engine.DefaultConfig(), NumTins: 3}
			for t := range s.Tins[:3] {
				s.Tins[t].Index = uint8(t)
			}
			s.Config.Rate = 100e6
			f.stats[id] = s
		}
		if f.sojourn[name] == nil {
			f.sojourn[name] = &engine.Histogram{}
		}
		for t := range s.Tins[:3] {
			n := f.r.Uint64N(1000)
			at := 20 + f.r.IntN(30)
			s.Tins[t].Sojourn[at] += n
			f.sojourn[name][at] += n
			s.Tins[t].Packets += n
			s.Tins[t].Bytes += 1000 * n
			s.SentPackets += n
			s.SentBytes += 1000 * n
		}
		raw := wire.AppendReport(nil, &plan.Report{Sequence: f.seq, BootID: "b", Uptime: time.Duration(f.seq) * interval, Down: s, Up: s, Probe: &plan.ProbeStats{Host: "far", Idle: plan.ProbeDelay{Lost: f.seq}}}, nil)
		if err := f.table.Ingest(id, raw, telemetry.Place{Plan: name, Site: "s", Model: "m", Version: "v"}, now); err != nil {
			return err
		}
	}
	return nil
}

func newTable() *telemetry.Table { return telemetry.New(telemetry.Config{Interval: interval}) }

func open(t *testing.T, c history.Config) *history.History {
	t.Helper()
	c.Controller = "c1"
	h, err := history.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func step(t *testing.T, h *history.History, now time.Time) {
	t.Helper()
	if h.Step(t.Context(), now); h.Status().Err != nil {
		t.Fatal(h.Status().Err)
	}
}

// start is when time begins in these tests, the same in all of one run: an hour
// may end while they go on.
var start = sync.OnceValue(func() time.Time { return time.Now().Truncate(time.Hour).Add(-6 * time.Hour) })

// TestWindows: the sojourn times between any two times are those of the packets
// delivered then, bucket by bucket, through restarts of the controller.
func TestWindows(t *testing.T) {
	dir := t.TempDir()
	now := start()
	var total []map[string]engine.Histogram // as it was with each step
	copied := map[string]engine.Histogram{}
	for range 3 { // lives of the controller
		f := newFeed(newTable())
		before := copied
		h := open(t, history.Config{Dir: dir, Table: f.table, Routers: 10})
		for i := range 300 {
			now = now.Add(30 * time.Second)
			if err := f.report(9, now); err != nil {
				t.Fatal(err)
			}
			step(t, h, now)
			if i == 150 {
				// A step that can't be written makes the writer forget its series:
				// counters go on for all that.
				if h.Step(t.Context(), now.Add(-time.Hour)); h.Status().Err == nil {
					t.Fatal("a step of an hour ago is written")
				}
			}
			copied = map[string]engine.Histogram{}
			for name, n := range f.sojourn {
				sum := before[name]
				sum.Merge(n)
				copied[name] = sum
			}
			total = append(total, copied)
		}
		h.Close()
	}
	h := open(t, history.Config{Dir: dir, Table: newTable()})
	step(t, h, now.Add(30*time.Second))
	at := func(i int) time.Time { return start().Add(time.Duration(i+1) * 30 * time.Second) }
	for _, w := range [][2]int{{0, 899}, {10, 20}, {250, 350}, {299, 300}, {300, 301}, {0, 0}, {100, 800}, {640, 899}} {
		got, err := h.SojournBetween(t.Context(), rollup.ByPlan, "down", "", at(w[0]), at(w[1]))
		if err != nil {
			t.Fatal(err)
		}
		for name, after := range total[w[1]] {
			before := total[w[0]][name]
			for i := range after {
				after[i] -= before[i]
			}
			if diff := cmp.Diff(&after, got[name]); diff != "" {
				t.Fatalf("steps %v of %s (-want +got):\n%s", w, name, diff)
			}
		}
	}
	if got := query(t, h, `sum by (plan) (cakefleet_tin_packets_total{by="plan",direction="down"})`, at(299)); len(got) != 3 {
		t.Errorf("tins by plan: %v", got)
	}
	// What PromQL makes of the buckets is in the bucket that the engine names.
	whole := total[299]["plan0"]
	want := whole.Quantile(99, 100)
	got := query(t, h, `histogram_quantile(0.99, cakefleet_sojourn_seconds{by="plan",plan="plan0",direction="down"})`, at(299))
	if len(got) != 1 || got[0].F < want.Seconds()/1.126 || got[0].F > want.Seconds()*1.126 {
		t.Errorf("PromQL says %v, the engine %v", got, want)
	}
	if got := query(t, h, `count(cakefleet_router_sent_bytes_total)`, at(299)); len(got) != 1 || got[0].F != 18 {
		t.Errorf("series of routers: %v", got)
	}
}

func query(t *testing.T, h *history.History, q string, at time.Time) promql.Vector {
	t.Helper()
	e := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute})
	defer e.Close()
	query, err := e.NewInstantQuery(t.Context(), h, nil, q, at)
	if err != nil {
		t.Fatal(err)
	}
	defer query.Close()
	v, err := query.Exec(t.Context()).Vector()
	if err != nil {
		t.Fatalf("%s: %v", q, err)
	}
	return append(promql.Vector(nil), v...)
}

func TestBound(t *testing.T) {
	f := newFeed(newTable())
	h := open(t, history.Config{Dir: t.TempDir(), Table: f.table, Routers: 4})
	if err := f.report(9, start()); err != nil {
		t.Fatal(err)
	}
	step(t, h, start())
	if n := h.Status().Unkept; n != 5 {
		t.Errorf("%d routers without series, want 5", n)
	}
	if got := query(t, h, `count(cakefleet_router_sent_bytes_total)`, start()); len(got) != 1 || got[0].F != 8 {
		t.Errorf("series of routers: %v", got)
	}
}

// TestMetricsAreListed: everything that is written is in the list, with the
// labels that it has.
func TestMetricsAreListed(t *testing.T) {
	f := newFeed(newTable())
	h := open(t, history.Config{Dir: t.TempDir(), Table: f.table, Routers: 4})
	if err := f.report(3, start()); err != nil {
		t.Fatal(err)
	}
	step(t, h, start())
	listed := map[string]history.Metric{}
	for _, m := range history.Metrics() {
		listed[m.Name] = m
	}
	q, err := h.Querier(0, time.Now().UnixMilli())
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	found := map[string]bool{}
	set := q.Select(t.Context(), false, nil, labels.MustNewMatcher(labels.MatchRegexp, model.MetricNameLabel, ".+"))
	for set.Next() {
		l := set.At().Labels()
		name := l.Get(model.MetricNameLabel)
		m, ok := listed[name]
		if !ok {
			t.Errorf("%s is not listed", name)
		}
		found[name] = true
		for _, want := range m.Labels {
			if want == "GROUP" {
				want = history.GroupLabel(l.Get(history.LabelBy))
				if want == rollup.ByAll {
					continue
				}
			}
			if !l.Has(want) {
				t.Errorf("%s has no label %s", l, want)
			}
		}
		if isHistogram := set.At().Iterator(nil).Next() == chunkenc.ValHistogram; isHistogram != (m.Type == "histogram") {
			t.Errorf("%s is listed as a %s", name, m.Type)
		}
	}
	for name := range listed {
		if !found[name] {
			t.Errorf("%s is listed and not written", name)
		}
	}
}

func TestRefuses(t *testing.T) {
	for name, c := range map[string]history.Config{
		"step":      {Step: time.Millisecond},
		"retention": {Retention: time.Minute},
		"size":      {Size: 5},
		"routers":   {Routers: -1},
		"URL":       {Remotes: []history.Remote{{URL: "metrics.example.net"}}},
		"version":   {Remotes: []history.Remote{{URL: "http://a/b", Version: 3}}},
	} {
		if _, err := history.New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// writeForEver writes a step after the other and says so.
func writeForEver(dir string) {
	f := newFeed(newTable())
	h, err := history.New(history.Config{Dir: dir, Table: f.table, Controller: "c1", Routers: 100})
	if err != nil {
		panic(err)
	}
	for now := start(); ; now = now.Add(30 * time.Second) {
		if err := f.report(50, now); err != nil {
			panic(err)
		}
		if h.Step(context.Background(), now); h.Status().Err != nil {
			panic(h.Status().Err)
		}
		fmt.Println(now.UnixMilli(), f.seq)
	}
}

// TestKilled: after kill -9 in the middle of its work the history has every
// step that was said to be written.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), asWriter+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var last, seq int64
		lines := bufio.NewScanner(out)
		for n := 0; n < 40 && lines.Scan(); n++ {
			if _, err := fmt.Sscan(lines.Text(), &last, &seq); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		if seq != 40 {
			t.Fatalf("wrote %d steps", seq)
		}
		h := open(t, history.Config{Dir: dir, Table: newTable()})
		h.Step(t.Context(), time.UnixMilli(last).Add(time.Hour))
		got := query(t, h, `cakefleet_reports_total{by="all"}`, time.UnixMilli(last))
		if len(got) != 1 || got[0].F != float64(50*seq) {
			t.Fatalf("after kill -9: %v at step %d", got, seq)
		}
		h.Close()
		if err := os.RemoveAll(dir); err != nil { // each life begins at the same time
			t.Fatal(err)
		}
	}
}

// TestFullDisk: a full disk ends the history; telemetry goes on, and the history
// too when there is room again.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"); err != nil {
		t.Skipf("a tmpfs can't be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	f := newFeed(newTable())
	h := open(t, history.Config{Dir: filepath.Join(dir, "history"), Table: f.table, Routers: 1000})
	now := start()
	one := func() error {
		now = now.Add(30 * time.Second)
		if err := f.report(20, now); err != nil {
			t.Fatal(err)
		}
		h.Step(t.Context(), now)
		return h.Status().Err
	}
	if err := one(); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	file, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = file.Write(make([]byte, 4096))
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	full := false
	for range 200 {
		if err := one(); err != nil {
			full = true
			if !errors.Is(err, syscall.ENOSPC) {
				t.Logf("error: %v", err)
			}
			break
		}
	}
	if !full {
		t.Fatal("the disk is full and nobody said so")
	}
	if h.Status().Running || h.Status().Missed == 0 {
		t.Errorf("status %+v", h.Status())
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := one(); err != nil {
		if err = one(); err != nil {
			t.Fatalf("there is room again: %v", err)
		}
	}
	got := query(t, h, `cakefleet_reports_total{by="all"}`, now)
	if len(got) != 1 || got[0].F != float64(20*f.seq) {
		t.Errorf("counted %v, want %d", got, 20*f.seq)
	}
	// And after a restart.
	h.Close()
	h = open(t, history.Config{Dir: filepath.Join(dir, "history"), Table: f.table})
	step(t, h, now.Add(time.Minute))
	if got := query(t, h, `cakefleet_reports_total{by="all"}`, now); len(got) != 1 || got[0].F != float64(20*f.seq) {
		t.Errorf("after a restart: %v, want %d", got, 20*f.seq)
	}
}
