// Command benchtelemetry is `make bench-telemetry`: what telemetry costs a
// controller, one line a figure. CPU is what this process used of it, not what
// the clock says, as the machine may be shared; the queries' times are the
// clock's.
package main

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/prometheus/tsdb"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

const (
	interval = 10 * time.Second
	plans    = 20
	sites    = 100
)

func main() {
	routers := flag.Int("routers", 5000, "`number` of routers that report")
	flag.Parse()
	if err := run(*routers); err != nil {
		fmt.Fprintln(os.Stderr, "benchtelemetry:", err)
		os.Exit(1)
	}
}

func run(routers int) error {
	for _, f := range []func(int) error{ingest, memory} {
		if err := f(routers); err != nil {
			return err
		}
	}
	if err := disk(); err != nil {
		return err
	}
	for _, n := range []int{10_000, 100_000} {
		if err := queries(n); err != nil {
			return err
		}
	}
	return nil
}

func figure(name string, value float64, unit string) { fmt.Printf("%s %.4g %s\n", name, value, unit) }

func start() time.Time { return time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC) }

func place(i int) telemetry.Place {
	return telemetry.Place{
		Plan: fmt.Sprintf("plan-%02d", i%plans), Site: fmt.Sprintf("site-%03d", i%sites),
		Model: fmt.Sprintf("model-%d", i%7), Version: fmt.Sprintf("1.%d", i%3),
	}
}

// home is a router with four tins both ways. One of four is used by everybody
// at once, one is idle but for a packet now and then.
type home struct {
	id       string
	place    telemetry.Place
	use      int // packets in 10 s
	now, was plan.Report
	stats    [4]engine.Stats
}

func newHome(i int) *home {
	h := &home{id: fmt.Sprintf("router-%06d", i), place: place(i), use: []int{20_000, 2000, 200, 15}[i%4]}
	h.now.BootID, h.was.BootID = "0123456789abcdef", "0123456789abcdef"
	for d := range 2 {
		s := &h.stats[d]
		s.Config = engine.DefaultConfig()
		s.Config.Tins, s.Config.Rate = engine.Diffserv4, 100e6
		s.NumTins, s.MemoryLimit, s.MinNetLen = 4, 4<<20, 64
		for t := range s.Tins[:4] {
			s.Tins[t] = engine.TinStats{Index: uint8(t), Threshold: 100e6 >> t, Target: 5 * time.Millisecond, Interval: 100 * time.Millisecond, Quantum: 1514, MaxLen: 1514}
		}
	}
	return h
}

// report makes the home's next report.
func (h *home) report(r *rand.Rand) []byte {
	h.stats[2], h.stats[3] = h.stats[0], h.stats[1]
	h.was = h.now
	h.was.Down, h.was.Up = &h.stats[2], &h.stats[3]
	h.now.Sequence++
	h.now.Uptime += interval
	h.now.Agent.CPUTime += 30 * time.Millisecond
	h.now.Agent.ResidentBytes = 12e6 + r.Uint64N(1e5)
	for d := range 2 {
		h.traffic(r, &h.stats[d], h.use>>d)
	}
	h.now.Down, h.now.Up = &h.stats[0], &h.stats[1]
	before := &h.was
	if h.now.Sequence%64 == 1 {
		before = nil
	}
	return wire.AppendReport(nil, &h.now, before)
}

// traffic adds packets to the tins, most of them to best effort, with delays as
// they are on a line that is full at times.
func (h *home) traffic(r *rand.Rand, s *engine.Stats, packets int) {
	for t, share := range [4]int{2, 80, 12, 6} {
		n := packets * share / 100
		if n == 0 && r.IntN(4) > 0 {
			continue
		}
		b := &s.Tins[t]
		for left := n; left > 0; {
			some := min(left, 1+n/16)
			at := 12 + int(r.ExpFloat64()*8)
			b.Sojourn[min(at, engine.HistogramBuckets-1)] += uint64(some)
			left -= some
		}
		size := uint64(300 + r.IntN(1100))
		b.Packets += uint64(n)
		b.Bytes += uint64(n) * size
		b.WayDirect += uint64(n)
		b.WayMiss += uint64(n / 400)
		b.Drops += uint64(n / 500)
		b.Marks += uint64(n / 5000)
		b.AvgDelay, b.PeakDelay, b.BaseDelay = time.Duration(r.IntN(5e6)), time.Duration(r.IntN(20e6)), time.Duration(r.IntN(50e3))
		b.SparseFlows, b.BulkFlows = uint32(r.IntN(8)), uint32(r.IntN(3))
		s.SentPackets += uint64(n)
		s.SentBytes += uint64(n) * size
		s.Drops += uint64(n / 500)
		s.Overlimits += uint64(n)
	}
	s.Backlog = uint64(r.IntN(30_000))
	s.MemoryUsed = max(s.MemoryUsed, s.Backlog*3)
}

func homes(n int) []*home {
	all := make([]*home, n)
	for i := range all {
		all[i] = newHome(i)
	}
	return all
}

func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it has no reason to
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ingest takes in a quarter of an hour of reports, with roll-ups, the ring, and
// a history with a step each 30 s and the series of all routers. It is all the
// CPU that the process uses meanwhile, with the garbage collector's.
func ingest(routers int) error {
	dir, err := os.MkdirTemp("", "benchtelemetry")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	table := telemetry.New(telemetry.Config{Interval: interval})
	h, err := history.New(history.Config{Dir: dir, Controller: "c", Table: table, Routers: routers})
	if err != nil {
		return err
	}
	defer h.Close()
	all, r := homes(routers), rand.New(rand.NewPCG(1, 1))
	var used, steps time.Duration
	var bytes, most int
	raw := make([][]byte, routers)
	const rounds = 91
	now := start()
	for round := range rounds {
		now = now.Add(interval)
		for i, k := range all {
			raw[i] = k.report(r)
			if round > 0 && k.now.Sequence%64 != 1 {
				bytes += len(raw[i])
			}
			most = max(most, len(raw[i]))
		}
		runtime.GC()
		began := cpu()
		for i, k := range all {
			if err := table.Ingest(k.id, raw[i], k.place, now); err != nil {
				return err
			}
		}
		between := cpu()
		if round%3 == 2 {
			if h.Step(context.Background(), now); h.Status().Err != nil {
				return h.Status().Err
			}
		}
		if round > 0 {
			used += cpu() - began
			steps += cpu() - between
		}
	}
	n := float64(routers * (rounds - 1))
	figure("telemetry-ingest", n/used.Seconds(), "reports/s/core")
	figure("telemetry-ingest-without-history", n/(used-steps).Seconds(), "reports/s/core")
	figure("telemetry-report-bytes", float64(bytes)/n, "bytes")
	figure("telemetry-report-bytes-whole", float64(most), "bytes")
	return nil
}

// memory is what the routers take with a ring of a quarter of an hour.
func memory(routers int) error {
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for _, c := range []struct {
		name string
		kind func(i int) int
	}{{"telemetry-memory", func(i int) int { return i }}, {"telemetry-memory-busy", func(int) int { return 0 }}} {
		r := rand.New(rand.NewPCG(1, 1))
		before := heap()
		table := telemetry.New(telemetry.Config{Interval: interval})
		for i := range routers {
			k := newHome(c.kind(i))
			k.id = fmt.Sprintf("router-%06d", i)
			now := start()
			for range 100 {
				now = now.Add(interval)
				if err := table.Ingest(k.id, k.report(r), k.place, now); err != nil {
					return err
				}
			}
		}
		figure(c.name, (heap()-before)/float64(routers), "bytes/router")
		runtime.KeepAlive(table)
	}
	return nil
}

// day fills a history with a day of steps as a fleet of so many routers gives
// them, of which the last has the routers' own series.
func day(dir string, routers int) (*telemetry.Table, time.Time, error) {
	table := telemetry.New(telemetry.Config{Interval: interval})
	h, err := history.New(history.Config{Dir: dir, Controller: "c", Table: table, Routers: routers, Retention: 30 * 24 * time.Hour})
	if err != nil {
		return nil, time.Time{}, err
	}
	defer h.Close()
	r := rand.New(rand.NewPCG(1, 1))
	now := time.Now().Truncate(time.Minute).Add(-24 * time.Hour)
	counted := rollup.Report{CPU: 1000}
	d := &counted.Directions
	buckets := make([]rollup.Bucket, 0, 4*engine.HistogramBuckets)
	for range 24 * 60 * 2 {
		now = now.Add(30 * time.Second)
		for i := range plans { // and as many sites
			buckets = buckets[:0]
			for way := range d {
				d[way] = rollup.Delta{N: 4}
				for t := range d[way].Tins[:4] {
					n := uint64(routers / plans * (1 + r.IntN(1000)))
					from := len(buckets)
					for b := 12; b < 50; b++ {
						buckets = append(buckets, rollup.Bucket{Index: uint8(b), Count: n / uint64(b) * r.Uint64N(9)})
					}
					c := rollup.Counters{Bytes: n * 900, Packets: n, Drops: n / 1000}
					d[way].Tins[t] = rollup.TinDelta{Name: rollup.TinName(engine.Diffserv4, t), Counters: c, Sojourn: buckets[from:len(buckets):len(buckets)]}
					d[way].Add(&c)
				}
			}
			p := place(i)
			for _, g := range []rollup.Key{{By: rollup.ByAll}, {By: rollup.ByPlan, Value: p.Plan}, {By: rollup.BySite, Value: p.Site}, {By: rollup.ByModel, Value: p.Model}, {By: rollup.ByVersion, Value: p.Version}} {
				table.Groups().Group(g.By, g.Value).Add(&counted)
			}
		}
		if h.Step(context.Background(), now); h.Status().Err != nil {
			return nil, now, h.Status().Err
		}
	}
	for i := range routers {
		k := newHome(i)
		for n := range 3 {
			if err := table.Ingest(k.id, k.report(r), k.place, now.Add(time.Duration(n)*interval)); err != nil {
				return nil, now, err
			}
		}
	}
	now = now.Add(time.Minute)
	h.Step(context.Background(), now)
	return table, now, h.Status().Err
}

// queries asks what an operator asks first: which plans have suffered for a day,
// and which routers suffer now.
func queries(routers int) error {
	dir, err := os.MkdirTemp("", "benchtelemetry")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	table, now, err := day(dir, routers)
	if err != nil {
		return err
	}
	size := fmt.Sprintf("%dk", routers/1000)
	var took, used []time.Duration
	for range 5 {
		// From cold: a controller that has just started, and nothing in the page
		// cache where that can be had.
		h, err := history.New(history.Config{Dir: dir, Controller: "c", Table: telemetry.New(telemetry.Config{}), Retention: 30 * 24 * time.Hour})
		if err != nil {
			return err
		}
		h.Open(now)
		syscall.Sync()
		_ = os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0) // only root may
		runtime.GC()
		before, began := cpu(), time.Now()
		for _, direction := range []string{"down", "up"} {
			got, err := h.SojournBetween(context.Background(), rollup.ByPlan, direction, "", now.Add(-24*time.Hour), now)
			if err != nil {
				return err
			}
			if len(got) != plans {
				return fmt.Errorf("%d plans", len(got))
			}
			for _, p := range got {
				if p.Quantile(99, 100) == 0 {
					return fmt.Errorf("a plan has no packets")
				}
			}
		}
		took, used = append(took, time.Since(began)), append(used, cpu()-before)
		h.Close()
	}
	figure("telemetry-p99-24h-"+size+"-cpu", median(used), "ms")
	figure("telemetry-p99-24h-"+size, median(took), "ms")
	took = took[:0]
	for range 15 {
		began := time.Now()
		if n := len(table.Worst(telemetry.BySuffering, 20, now.Add(-time.Minute+2*interval), nil)); n != 20 {
			return fmt.Errorf("%d worst routers", n)
		}
		took = append(took, time.Since(began))
	}
	figure("telemetry-worst20-"+size, median(took), "ms")
	return nil
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2]) / 1e6
}

// disk is what the database costs.
func disk() error {
	dir, err := os.MkdirTemp("", "benchtelemetry")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	table := telemetry.New(telemetry.Config{Interval: interval})
	const routers = 2000
	h, err := history.New(history.Config{Dir: dir, Controller: "c", Table: table, Routers: routers, Every: 30 * time.Second})
	if err != nil {
		return err
	}
	defer h.Close()
	all, r := homes(routers), rand.New(rand.NewPCG(1, 1))
	now := time.Now().Truncate(2 * time.Hour).Add(-8 * time.Hour)
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before := m.HeapAlloc
	var used time.Duration
	const steps = 400
	for range steps {
		now = now.Add(30 * time.Second)
		for _, k := range all {
			if err := table.Ingest(k.id, k.report(r), k.place, now); err != nil {
				return err
			}
		}
		began := cpu()
		if h.Step(context.Background(), now); h.Status().Err != nil {
			return h.Status().Err
		}
		used += cpu() - began
	}
	series := float64(h.Status().Series)
	figure("telemetry-tsdb-append", float64(used)/steps/series, "ns/sample")
	held := func() float64 {
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc) - float64(before)
	}
	with := held()
	h.Close()
	figure("telemetry-tsdb-memory", (with-held())/series, "bytes/series")
	runtime.KeepAlive(table)
	db, err := tsdb.Open(dir, nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if err := db.Compact(context.Background()); err != nil {
		return err
	}
	var blocks, log int64
	var samples, histograms uint64
	for _, b := range db.Blocks() {
		blocks += b.Size()
		samples += b.Meta().Stats.NumFloatSamples
		histograms += b.Meta().Stats.NumHistogramSamples
	}
	figure("telemetry-tsdb-disk", float64(blocks)/float64(samples+histograms), "bytes/sample")
	figure("telemetry-tsdb-histograms", float64(histograms)/float64(samples+histograms)*100, "%")
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if filepath.Base(filepath.Dir(path)) == "wal" {
			log += info.Size()
		}
		return nil
	})
	figure("telemetry-tsdb-log", float64(log)/steps/series, "bytes/sample")
	return err
}
