package enginetest_test

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// cRun and cTin are what sch_cake of Linux 6.1.192 counts over a million packets
// of a workload, called as DriveKernel does, with the generator of random numbers
// started at 12345. Tins are in the order of their physical index: best effort,
// bulk, video, voice.
type cRun struct {
	sent, sentBytes, drops, overlimits, qlen, backlog, memory, marks uint64

	tins []cTin
}

type cTin struct {
	packets, bytes, drops, marks, ackDrops uint64

	wayInds, wayMiss, wayCols, sparse, bulk, decaying, unresponsive uint64
	averageUS, peakUS, baseUS                                       uint64
}

var cRuns = map[string]cRun{
	"W1": {929265, 1068272890, 68511, 1929264, 2224, 3367136, 5751552, 141482, []cTin{
		{690547, 876171710, 17353, 125215, 0, 39439, 80, 0, 1, 16, 63, 8, 226170, 1771218, 10006},
		{95275, 144246350, 51158, 16267, 0, 0, 8, 0, 0, 8, 0, 4, 9449, 29674, 2115},
		{95275, 144246350, 0, 0, 0, 0, 8, 0, 1, 0, 7, 0, 52, 95, 9},
		{118903, 10701270, 0, 0, 0, 0, 32, 0, 0, 0, 32, 0, 52, 94, 11},
	}},
	"W1u": {1000000, 1119616080, 0, 516424, 0, 0, 2304, 0, []cTin{
		{680760, 833479392, 0, 0, 0, 38215, 80, 0, 3, 0, 77, 0, 9, 76, 0},
		{90381, 136836834, 0, 0, 0, 0, 8, 0, 3, 2, 3, 0, 0, 2, 0},
		{90381, 136836834, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0, 2, 0},
		{138478, 12463020, 0, 0, 0, 0, 32, 0, 0, 0, 32, 0, 46, 93, 3},
	}},
	"W2": {1000000, 1514000000, 0, 0, 0, 0, 2304, 0, []cTin{
		{1000000, 1514000000, 0, 0, 0, 62490, 128, 0, 43, 5, 80, 0, 0, 0, 0},
	}},
	"W2s": {1000000, 1514000000, 0, 0, 128, 193792, 297216, 0, []cTin{
		{1000128, 1514193792, 0, 0, 0, 62498, 128, 0, 0, 128, 0, 0, 1264, 1755, 625},
	}},
	"W3": {833698, 123971212, 164489, 1833697, 1813, 2718890, 4196352, 16824, []cTin{
		{849174, 139968268, 25470, 14290, 135160, 5804, 96, 0, 9, 52, 35, 24, 99395, 2863545, 656},
		{9295, 14072630, 3859, 2534, 0, 0, 8, 0, 0, 8, 0, 4, 2754658, 5767175, 101807},
		{9295, 14072630, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 319, 883, 20},
		{132236, 11901240, 0, 0, 0, 0, 32, 0, 2, 0, 30, 0, 303, 828, 21},
	}},
	"W3n": {834597, 123971178, 163579, 1834596, 1824, 2710928, 4196352, 16813, []cTin{
		{849174, 139968268, 159733, 14280, 0, 5804, 96, 0, 9, 52, 35, 28, 88323, 2719464, 348},
		{9295, 14072630, 3846, 2533, 0, 0, 8, 0, 0, 8, 0, 4, 2710070, 5685188, 113892},
		{9295, 14072630, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 335, 933, 33},
		{132236, 11901240, 0, 0, 0, 0, 32, 0, 2, 0, 30, 0, 306, 857, 32},
	}},
	"W4": {499995, 756992430, 497511, 1499994, 2494, 3775916, 5750784, 186785, []cTin{
		{750000, 1135500000, 404922, 172246, 0, 316, 35137, 684101, 96, 912, 13, 625, 73125, 277228, 5128},
		{125000, 189250000, 92589, 14539, 0, 32321, 510, 971, 2, 507, 1, 510, 283920, 736077, 44752},
		{125000, 189250000, 0, 0, 0, 30597, 3711, 0, 0, 0, 304, 0, 25, 26, 25},
		{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	}},
}

// display gives the place in Stats of each physical tin of diffserv4.
var display = []int{1, 0, 2, 3}

type counted struct {
	delivered, dropped, bytes, marks uint64
	last                             engine.Time
}

func (c *counted) watch() enginetest.Watch {
	return enginetest.Watch{
		Delivered: func(now engine.Time, d engine.Delivery) {
			c.delivered++
			c.bytes += uint64(d.Len)
			c.last = now
			if d.CE {
				c.marks++
			}
		},
		Dropped: func(engine.Time, engine.Drop) { c.dropped++ },
	}
}

// TestWorkloadsAreExactlyC runs a million packets of each workload as the kernel
// would, faults included, and wants every counter of the C code to the last digit.
func TestWorkloadsAreExactlyC(t *testing.T) {
	skipIfSlow(t)
	for _, w := range enginetest.Workloads() {
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			const n = 1_000_000
			s := newScheduler(t, w, engine.Options{Seed: 12345, Stepwise: true, Compat: engine.CompatKernel})
			var got counted
			st := statsAt(s, enginetest.DriveKernel(s, w, n, got.watch()))
			checkConservation(t, w, n, s, got, st)
			if diff := cmp.Diff(cRuns[w.Name], asCRun(st, got), cmp.AllowUnexported(cRun{}, cTin{})); diff != "" {
				t.Errorf("counters (-C +engine):\n%s", diff)
			}
		})
	}
}

func asCRun(st *engine.Stats, got counted) cRun {
	c := cRun{
		sent: st.SentPackets, sentBytes: st.SentBytes, drops: st.Drops, overlimits: st.Overlimits,
		qlen: uint64(st.Qlen), backlog: st.Backlog, memory: st.MemoryUsed, marks: got.marks,
	}
	for i := range st.NumTins {
		tin := st.Tins[i]
		if st.NumTins > 1 {
			tin = st.Tins[display[i]]
		}
		us := func(d time.Duration) uint64 { return uint64(d / time.Microsecond) }
		c.tins = append(c.tins, cTin{
			tin.Packets, tin.Bytes, tin.Drops, tin.Marks, tin.AckDrops,
			tin.WayInds, tin.WayMiss, tin.WayCols,
			uint64(tin.SparseFlows - tin.DecayingFlows), uint64(tin.BulkFlows), uint64(tin.DecayingFlows),
			uint64(tin.UnresponsiveFlows), us(tin.AvgDelay), us(tin.PeakDelay), us(tin.BaseDelay),
		})
	}
	return c
}

// TestShortCutsKeepTheLaw compares the default, which grants quanta together,
// visits decaying flows when they can change and is called when NextSend says so,
// with one step at a time as the kernel does it: over several seeds the drops,
// the marks, the filtered ACKs and what every queue has delivered must be the
// same within sampling noise.
func TestShortCutsKeepTheLaw(t *testing.T) {
	skipIfSlow(t)
	const n, seeds = 300_000, 8
	for _, name := range []string{"W1", "W1u", "W2s", "W3", "W3n", "W4"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, err := enginetest.WorkloadByName(name)
			if err != nil {
				t.Fatal(err)
			}
			plain, quick := samples{}, samples{}
			for seed := range uint64(seeds) {
				plain.run(t, w, n, engine.Options{Seed: 1 + seed<<8, Stepwise: true}, enginetest.DriveKernel)
				quick.run(t, w, n, engine.Options{Seed: 1 + seed<<8}, enginetest.Drive)
			}
			for what, p := range plain {
				// Both means have an error of their own; half a per cent is
				// more than the rounding of quanta can make.
				a, sa := meanAndError(p, seeds)
				b, sb := meanAndError(quick[what], seeds)
				if tolerance := 4*math.Hypot(sa, sb) + 0.005*a + 3*math.Sqrt(a/seeds); math.Abs(a-b) > tolerance {
					t.Errorf("%s: %.0f +- %.0f one by one, %.0f +- %.0f by default", what, a, sa, b, sb)
				}
			}
		})
	}
}

// samples are the values of counters in several runs.
type samples map[string][]float64

type driver func(*engine.Scheduler, enginetest.Workload, int, enginetest.Watch) engine.Time

func (m samples) run(t *testing.T, w enginetest.Workload, n int, o engine.Options, drive driver) {
	t.Helper()
	s := newScheduler(t, w, o)
	delivered := map[[2]int]float64{}
	st := statsAt(s, drive(s, w, n, enginetest.Watch{Delivered: func(_ engine.Time, d engine.Delivery) {
		delivered[[2]int{int(d.Tin), int(d.Flow)}]++
	}}))
	add := func(what string, v float64) { m[what] = append(m[what], v) }
	for i := range st.NumTins {
		tin := &st.Tins[i]
		add(fmt.Sprintf("tin %d drops", i), float64(tin.Drops))
		add(fmt.Sprintf("tin %d marks", i), float64(tin.Marks))
		add(fmt.Sprintf("tin %d ACKs filtered", i), float64(tin.AckDrops))
	}
	if w.Name == "W4" {
		return // 4096 flows come and go among 1024 queues: which gets which is chance
	}
	for q, v := range delivered {
		add(fmt.Sprintf("tin %d queue %d packets", q[0], q[1]), v)
	}
}

// meanAndError takes values that are missing for 0.
func meanAndError(v []float64, n float64) (mean, stderr float64) {
	var sum, squares float64
	for _, x := range v {
		sum += x
		squares += x * x
	}
	mean = sum / n
	return mean, math.Sqrt(max(0, squares/n-mean*mean) / (n - 1))
}

func skipIfSlow(t *testing.T) {
	t.Helper()
	if testing.Short() || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("millions of packets take minutes under emulation")
	}
}

func newScheduler(t *testing.T, w enginetest.Workload, o engine.Options) *engine.Scheduler {
	t.Helper()
	s, err := engine.New(0, w.Config, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func statsAt(s *engine.Scheduler, now engine.Time) *engine.Stats {
	st := new(engine.Stats)
	s.Stats(now, st)
	return st
}

// TestWorkloadsShort runs as much of each workload as any machine has time for.
func TestWorkloadsShort(t *testing.T) {
	for _, w := range enginetest.Workloads() {
		t.Run(w.Name, func(t *testing.T) {
			const n = 20_000
			s := newScheduler(t, w, engine.Options{Seed: 1})
			var got counted
			st := statsAt(s, enginetest.Drive(s, w, n, got.watch()))
			checkConservation(t, w, n, s, got, st)
			if w.Config.Rate == 0 {
				return
			}
			span := got.last.Sub(enginetest.Start).Seconds()
			// The duration of a packet is rounded down to nanoseconds.
			if ahead := float64(got.bytes)*8*(1-0.00003) - span*float64(w.Config.Rate); ahead > 1514*8 {
				t.Errorf("output %.0f bits ahead of the rate, more than one packet", ahead)
			}
		})
	}
}

func checkConservation(t *testing.T, w enginetest.Workload, n int, s *engine.Scheduler, got counted, st *engine.Stats) {
	t.Helper()
	offered := uint64(n + w.Standing)
	if in, out := offered, got.delivered+got.dropped+uint64(s.Len()); in != out {
		t.Errorf("%d packets in, %d delivered + %d dropped + %d queued", in, got.delivered, got.dropped, s.Len())
	}
	var packets, backlog, marks uint64
	for _, tin := range st.Tins[:st.NumTins] {
		packets += tin.Packets
		backlog += tin.BacklogBytes
		marks += tin.Marks
	}
	for _, c := range []struct {
		what      string
		got, want uint64
	}{
		{"packets of all tins", packets, offered},
		{"backlog of all tins", backlog, s.Backlog()},
		{"marks of all tins", marks, got.marks},
		{"sent packets", st.SentPackets, got.delivered},
		{"sent bytes", st.SentBytes, got.bytes},
		{"drops", st.Drops, got.dropped},
		{"queue length", uint64(st.Qlen), uint64(s.Len())},
	} {
		if c.got != c.want {
			t.Errorf("%s: %d, want %d", c.what, c.got, c.want)
		}
	}
}
