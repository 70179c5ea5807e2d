package telemetry_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// truth is what became of every packet.
type truth struct {
	bytes, packets, drops, marks uint64
	sojourn                      []time.Duration
}

func (t *truth) add(e enginetest.Event) {
	if e.Dropped {
		t.drops++
		return
	}
	t.bytes += uint64(e.Size)
	t.packets++
	if e.CE {
		t.marks++
	}
	t.sojourn = append(t.sojourn, e.Sojourn)
}

// simulated is a home whose engine shapes real flows, one boot after the other.
type simulated struct {
	id, plan string
	rate     engine.BitsPerSecond
	boot     int
	sequence uint64
	sim      *enginetest.Sim
	truth    *truth
}

func (h *simulated) reboot(t *testing.T, seed uint64) {
	t.Helper()
	h.boot++
	h.sequence = 0
	c := engine.DefaultConfig()
	c.Tins, c.Rate = engine.Diffserv4, h.rate
	s, err := engine.New(0, c, engine.Options{Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	h.sim = &enginetest.Sim{Scheduler: s, Trace: h.truth.add}
	for i := range 3 {
		rtt := time.Duration(10+20*i) * time.Millisecond
		h.sim.Add(enginetest.PlainFlow(i), rtt, &enginetest.TCP{Size: 1514, RTT: rtt, Begin: engine.Time(i) * engine.Time(200*time.Millisecond)})
	}
	h.sim.Add(enginetest.PlainFlow(8), 20*time.Millisecond, enginetest.Voice(0))
}

// report is what the home says now.
func (h *simulated) report() []byte {
	h.sequence++
	var s engine.Stats
	h.sim.Scheduler.Stats(h.sim.Now(), &s)
	r := &plan.Report{Sequence: h.sequence, BootID: fmt.Sprint("boot", h.boot), Uptime: time.Duration(h.sim.Now()), Down: &s}
	return wire.AppendReport(nil, r, nil)
}

// TestTrue feeds reports of real engines through a network that loses three of
// ten, doubles and reorders them, with reboots, and compares with what became
// of every single packet: totals are equal to the byte, and the percentiles of
// each plan within 12.5 % of the exact ones.
func TestTrue(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	table := newTable()
	plans := map[string]*truth{"gold": {}, "silver": {}}
	var homes []*simulated
	for i := range 6 {
		h := &simulated{id: fmt.Sprint("home", i), plan: "gold", rate: 20e6}
		if i%2 == 1 {
			h.plan, h.rate = "silver", 4e6
		}
		h.truth = plans[h.plan]
		h.reboot(t, uint64(i+1))
		homes = append(homes, h)
	}
	now := start()
	ingest := func(h *simulated, raw []byte) {
		err := table.Ingest(h.id, raw, telemetry.Place{Plan: h.plan}, now)
		if err != nil && !errors.Is(err, telemetry.ErrOld) {
			t.Fatal(err)
		}
	}
	const boots, reports = 3, 12
	var lost, late int
	for boot := range boots {
		var under [6][][]byte // on their way, in whatever order
		for n := range reports {
			now = now.Add(500 * time.Millisecond)
			for i, h := range homes {
				h.sim.Run(engine.Time(n+1) * engine.Time(500*time.Millisecond))
				raw := h.report()
				switch first, last := boot == 0 && n == 0, n == reports-1; {
				case last, first:
					// What a boot counted after the last report that arrives, nobody can
					// know; and who has never heard of a router begins with its first.
				case r.IntN(10) < 3:
					lost++
					continue
				case r.IntN(10) < 2:
					under[i] = append(under[i], raw)
					late++
					continue
				}
				ingest(h, raw)
				if r.IntN(5) == 0 {
					ingest(h, raw)
				}
				if k := len(under[i]); k > 0 && r.IntN(2) == 0 {
					ingest(h, under[i][r.IntN(k)])
				}
			}
		}
		if boot < boots-1 {
			for i, h := range homes {
				h.reboot(t, r.Uint64())
				defer func() { // of the boot before, long after it
					for _, raw := range under[i] {
						ingest(h, raw)
					}
				}()
			}
		}
	}
	if lost < 20 || late < 5 {
		t.Fatalf("%d reports were lost and %d late", lost, late)
	}
	for name, want := range plans {
		got := counted(table, rollup.ByPlan, name)
		if got.Bytes != want.bytes || got.Packets != want.packets || got.Drops != want.drops || got.Marks != want.marks || got.Sojourn.Total() != want.packets {
			t.Errorf("%s counted %+v and %d sojourn times, want %d bytes, %d packets, %d drops, %d marks",
				name, got.Counters, got.Sojourn.Total(), want.bytes, want.packets, want.drops, want.marks)
		}
		if want.drops+want.marks == 0 || want.packets < 1000 {
			t.Errorf("%s: the traffic says nothing: %d packets, %d drops", name, want.packets, want.drops)
		}
		slices.Sort(want.sojourn)
		for _, q := range []uint64{50, 90, 99} {
			exact := want.sojourn[(uint64(len(want.sojourn))*q+99)/100-1]
			if said := got.Sojourn.Quantile(q, 100); (said - exact).Abs() > exact/8+2*1024*time.Nanosecond {
				t.Errorf("%s p%d is %v, exactly %v", name, q, said, exact)
			}
		}
	}
	f := table.Faults()
	if f.Reboots != (boots-1)*uint64(len(homes)) || f.Lost == 0 || f.Old == 0 || f.Refused != 0 {
		t.Errorf("faults %+v", f)
	}
}
