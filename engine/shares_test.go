package engine_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// TestCollisionCurve places n flows into one tin while none of them leaves, and
// compares how many had to share a queue with what chance predicts of sets of
// eight: a flow collides when eight others came to its set before it.
func TestCollisionCurve(t *testing.T) {
	patterns := map[string]func(r *rand.Rand, i int) enginetest.Flow{
		"random": func(r *rand.Rand, _ int) enginetest.Flow {
			return enginetest.Flow{
				Src: ipv4(r.Uint32()), Dst: ipv4(r.Uint32()), Proto: enginetest.TCPProto,
				SrcPort: uint16(r.Uint32()), DstPort: uint16(r.Uint32()),
			}
		},
		"one host, consecutive ports": func(_ *rand.Rand, i int) enginetest.Flow {
			return enginetest.Flow{
				Src: ipv4(0x0a000001), Dst: ipv4(0xc0000201), Proto: enginetest.UDPProto,
				SrcPort: uint16(32768 + i), DstPort: 443,
			}
		},
		"consecutive hosts": func(_ *rand.Rand, i int) enginetest.Flow {
			return enginetest.Flow{
				Src: ipv4(0x0a000000 + uint32(i)), Dst: ipv4(0xc0000201), Proto: enginetest.TCPProto,
				SrcPort: 5000, DstPort: 443,
			}
		},
		"IPv6, consecutive subnets": func(_ *rand.Rand, i int) enginetest.Flow {
			src := netip.MustParseAddr("2001:db8::1").As16()
			binary.BigEndian.PutUint16(src[6:], uint16(i))
			return enginetest.Flow{
				Src: netip.AddrFrom16(src), Dst: netip.MustParseAddr("2001:db8:ffff::2"),
				Proto: enginetest.TCPProto, SrcPort: 5000, DstPort: 443,
			}
		},
	}
	for name, pattern := range patterns {
		for _, n := range []int{50, 100, 200, 256, 400, 500, 600, 800, 1000, 1024} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				trials := 40
				if testing.Short() {
					trials = 8
				}
				r := rand.New(rand.NewPCG(3, uint64(n)))
				var sum, squares float64
				for trial := range trials {
					c := float64(collisions(t, n, uint64(trial), func(i int) enginetest.Flow { return pattern(r, i) }))
					sum += c
					squares += c * c
				}
				mean := sum / float64(trials)
				want := float64(n) * sharedPlacements(n)
				variance := max(squares/float64(trials)-mean*mean, want)
				// One more collision in all is allowed where hardly any is expected.
				if tolerance := 3*math.Sqrt(variance/float64(trials)) + 1/float64(trials); math.Abs(mean-want) > tolerance {
					t.Errorf("%.3f of %d flows share a queue, expected %.3f +- %.3f", mean, n, want, tolerance)
				}
			})
		}
	}
}

// collisions counts the way collisions of n flows that all stay queued.
func collisions(t *testing.T, n int, seed uint64, flow func(i int) enginetest.Flow) uint64 {
	t.Helper()
	c := engine.DefaultConfig()
	c.Tins, c.Flows = engine.BestEffort, engine.Flows
	s := newScheduler(t, c, seed)
	for i := range n {
		offer(s, 0, flow(i), 100)
	}
	st := stats(s, 0)
	return st.Tins[0].WayCols
}

// sharedPlacements is the expected fraction of n placements into 128 sets of
// eight that find their set full.
func sharedPlacements(n int) float64 {
	const p = 1.0 / 128
	var sum float64
	for before := range n {
		free := 0.0 // probability that fewer than 8 of those before fell into one given set
		term := math.Pow(1-p, float64(before))
		for k := range min(8, before+1) {
			free += term
			term *= float64(before-k) / float64(k+1) * p / (1 - p)
		}
		sum += max(0, 1-free)
	}
	return sum / float64(n)
}

// TestSharedPlacements holds the expectation to the published curve.
func TestSharedPlacements(t *testing.T) {
	for n, want := range map[int]float64{
		50: 0, 100: 0, 200: 2e-5, 256: 1.6e-4, 400: 0.0021, 500: 0.0073, 600: 0.0177, 800: 0.060, 1000: 0.129, 1024: 0.139,
	} {
		if got := sharedPlacements(n); math.Abs(got-want) > max(0.05*want, 3e-5) {
			t.Errorf("%d flows: %.6f, published %.6f", n, got, want)
		}
	}
}

// TestHostShares saturates 100 Mbit/s with six flows between two sources A, B
// and four destinations a..d, and compares each flow's share with the ideal one
// of its flow mode.
func TestHostShares(t *testing.T) {
	const A, B, a, b, c, d = 0x0a000001, 0x0a000002, 0xc0000201, 0xc0000202, 0xc0000203, 0xc0000204
	ends := [6][2]uint32{{A, a}, {A, b}, {A, c}, {A, c}, {B, c}, {B, d}}
	for name, m := range map[string]struct {
		mode  engine.FlowMode
		share [6]float64 // per cent
	}{
		"flows":          {engine.Flows, [6]float64{16.67, 16.67, 16.67, 16.67, 16.67, 16.67}},
		"dual-srchost":   {engine.DualSrcHost, [6]float64{12.5, 12.5, 12.5, 12.5, 25, 25}},
		"dual-dsthost":   {engine.DualDstHost, [6]float64{25, 25, 8.33, 8.33, 8.33, 25}},
		"triple-isolate": {engine.TripleIsolate, [6]float64{13.64, 13.64, 13.64, 13.64, 18.18, 27.27}},
	} {
		t.Run(name, func(t *testing.T) {
			conf := engine.DefaultConfig()
			conf.Rate, conf.Flows, conf.Tins = 100_000_000, m.mode, engine.BestEffort
			sim := &enginetest.Sim{Scheduler: newScheduler(t, conf, 1)}
			for i, e := range ends {
				f := tcpFlow(e[0], e[1], i)
				sim.Add(f, time.Millisecond, &enginetest.CBR{Rate: 40_000_000, Size: 1514})
			}
			sim.Run(at(time.Second / 2))
			sim.ResetTotals()
			sim.Run(at(simulated(3 * time.Second)))
			var sum float64
			for i := range ends {
				sum += float64(sim.Totals(i).DeliveredBytes)
			}
			for i, want := range m.share {
				got := 100 * float64(sim.Totals(i).DeliveredBytes) / sum
				if math.Abs(got-want) > 1 {
					t.Errorf("flow %d: %.2f %%, want %.2f", i, got, want)
				}
			}
		})
	}
}

// TestTinShares overloads all tins of diffserv4 at once. The threshold of a tin
// is the rate at which it loses its priority, so the three below the link's rate
// get exactly that and best effort what remains.
func TestTinShares(t *testing.T) {
	c := engine.DefaultConfig()
	c.Rate, c.Tins = 50_000_000, engine.Diffserv4
	sim := &enginetest.Sim{Scheduler: newScheduler(t, c, 1)}
	want := []float64{6.25, 18.75, 50, 25} // per cent: bulk, best effort, video, voice
	for i, dscp := range []uint8{8, 0, 34, 46} {
		f := tcpFlow(0x0a000001, 0xc0000201, i)
		f.TOS = dscp << 2
		sim.Add(f, time.Millisecond, &enginetest.CBR{Rate: 60_000_000, Size: 1514})
	}
	sim.Run(at(time.Second / 2))
	sim.ResetTotals()
	end := simulated(6 * time.Second)
	sim.Run(at(end))
	for i, w := range want {
		got := 100 * float64(sim.Totals(i).DeliveredBytes) * 8 / (end - time.Second/2).Seconds() / 50e6
		if math.Abs(got-w) > 1 {
			t.Errorf("tin %d: %.2f %% of the rate, want %.2f", i, got, w)
		}
	}
}

// TestVoiceBesideBulk: 32 bulk TCP flows at 10 Mbit/s do not delay a 2 Mbit/s EF
// flow by more than the few packets that may be ahead of it.
func TestVoiceBesideBulk(t *testing.T) {
	c := engine.DefaultConfig()
	c.Rate = 10_000_000
	sim := &enginetest.Sim{Scheduler: newScheduler(t, c, 1)}
	for i := range 32 {
		rtt := 50 * time.Millisecond
		sim.Add(tcpFlow(0x0a000001, 0xc0000201, i), rtt, &enginetest.TCP{Size: 1514, RTT: rtt})
	}
	ef := tcpFlow(0x0a000002, 0xc0000202, 99)
	ef.Proto, ef.TOS = enginetest.UDPProto, 46<<2
	voice := sim.Add(ef, time.Millisecond, &enginetest.CBR{Rate: 2_000_000, Size: 1000})
	sim.Run(at(10 * time.Second))
	got := sim.Totals(voice)
	if got.DroppedPackets != 0 {
		t.Errorf("%d packets of the EF flow dropped", got.DroppedPackets)
	}
	// One packet of 1514 bytes takes 1.2 ms at this rate.
	if got.MaxSojourn > 5*time.Millisecond {
		t.Errorf("the EF flow waited up to %v (mean %v)", got.MaxSojourn, got.MeanSojourn())
	}
}

func newScheduler(t testing.TB, c engine.Config, seed uint64) *engine.Scheduler {
	t.Helper()
	s, err := engine.New(0, c, engine.Options{Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func stats(s *engine.Scheduler, now engine.Time) *engine.Stats {
	st := new(engine.Stats)
	s.Stats(now, st)
	return st
}

// offer enqueues one packet of f, size bytes long.
func offer(s *engine.Scheduler, now engine.Time, f enginetest.Flow, size int) {
	p := engine.Packet{Len: uint32(size), Truesize: uint32(size) + 256, NetOff: enginetest.EthernetHeader}
	s.DissectEthernet(f.AppendFrame(nil, size), &p)
	s.Enqueue(now, &p)
}

// simulated is how long a simulation goes on: a third with -short, since an
// emulated router takes half a minute for what takes a second here.
func simulated(d time.Duration) time.Duration {
	if testing.Short() {
		return d / 3
	}
	return d
}

// at is a point of a simulation that began at 0.
func at(d time.Duration) engine.Time { return engine.Time(d) }

func ipv4(a uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)})
}

// tcpFlow is the i-th flow between two IPv4 hosts.
func tcpFlow(src, dst uint32, i int) enginetest.Flow {
	return enginetest.Flow{
		Src: ipv4(src), Dst: ipv4(dst), Proto: enginetest.TCPProto, SrcPort: uint16(40000 + i), DstPort: 443,
	}
}
