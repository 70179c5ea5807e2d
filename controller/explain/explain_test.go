package explain_test

import (
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/explain"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const mbit = engine.BitsPerSecond(1_000_000)

var now = time.Date(2026, 3, 4, 20, 15, 0, 0, time.UTC)

func waits(d time.Duration, n uint64) (h engine.Histogram) {
	for range n {
		h.Observe(d)
	}
	return h
}

// calm is a line that nothing is wrong with.
func calm() explain.Facts {
	return explain.Facts{
		Now: now, Router: "home-1", Plan: "gold",
		Connected: true, Since: now.Add(-48 * time.Hour), Shaped: true,
		Conditions: []plan.Condition{{Type: "ClockOK", Status: true}, {Type: "Degraded"}},
		Window:     15 * time.Minute,
		Down:       explain.Direction{Rate: 100 * mbit, Delivered: 3 * mbit, Peak: 20 * mbit, Packets: 1000, Sojourn: waits(200*time.Microsecond, 1000)},
		Up:         explain.Direction{Rate: 20 * mbit, Delivered: mbit, Peak: 2 * mbit, Packets: 500, Sojourn: waits(300*time.Microsecond, 500)},
		CPU:        0.03, Cores: 1,
		WAN:   &plan.LinkState{Name: "wan", Index: 3, Up: true, Carrier: true, Speed: 1000 * mbit, MTU: 1500},
		Probe: &plan.ProbeStats{Host: "192.0.2.1", Idle: plan.ProbeDelay{Delay: waits(12*time.Millisecond, 90)}},
		Usual: 11 * time.Millisecond,
	}
}

func TestCauses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*explain.Facts)
		want   []explain.Cause
		says   string // in the first sentence or its figures
	}{
		"nothing":         {func(*explain.Facts) {}, []explain.Cause{explain.Home}, "Wi-Fi"},
		"without a probe": {func(f *explain.Facts) { f.Probe = nil }, []explain.Cause{explain.Home}, "set a probe"},
		"offline":         {func(f *explain.Facts) { f.Connected = false }, []explain.Cause{explain.Offline}, "48h0m0s"},
		"never seen":      {func(f *explain.Facts) { f.Connected, f.Since = false, time.Time{} }, []explain.Cause{explain.Offline}, "never"},
		"cable pulled":    {func(f *explain.Facts) { f.Connected = false; f.WAN.Carrier = false }, []explain.Cause{explain.Offline}, "wan has no carrier"},
		"no report yet":   {func(f *explain.Facts) { f.Window = 0 }, []explain.Cause{explain.Unknown}, "minute"},
		"no plan":         {func(f *explain.Facts) { f.Shaped = false }, []explain.Cause{explain.Unshaped}, "plan"},
		"suspended":       {func(f *explain.Facts) { f.Suspended = true }, []explain.Cause{explain.Unshaped}, "suspended"},
		"data plane broken": {func(f *explain.Facts) {
			f.Conditions[1] = plan.Condition{Type: "Degraded", Status: true, Message: "no NFQUEUE"}
		}, []explain.Cause{explain.Unshaped}, "no NFQUEUE"},
		"no interface": {func(f *explain.Facts) {
			f.Conditions = append(f.Conditions, plan.Condition{Type: "InterfaceUp", Reason: "Missing", Message: "there is no interface wan"})
		}, []explain.Cause{explain.Unshaped}, "there is no interface wan"},
		"refused":               {func(f *explain.Facts) { f.Sync = "refused: rate too high" }, []explain.Cause{explain.Refused}, "rate too high"},
		"carrier lost":          {func(f *explain.Facts) { f.Losses = 4 }, []explain.Cause{explain.Cable}, "4 times"},
		"cable too slow":        {func(f *explain.Facts) { f.WAN.Speed = 10 * mbit }, []explain.Cause{explain.Cable}, "10Mbit"},
		"CPU":                   {func(f *explain.Facts) { f.CPU = 0.97 }, []explain.Cause{explain.CPU}, "97 % of a core"},
		"queue overflows":       {func(f *explain.Facts) { f.Overflow = 1 }, []explain.Cause{explain.CPU}, "1"},
		"download full":         {func(f *explain.Facts) { f.Down.Full = 0.8 }, []explain.Cause{explain.PlanFull}, "80 % of 15 min"},
		"both full, and CPU":    {func(f *explain.Facts) { f.Down.Full, f.Up.Full, f.CPU = 0.8, 0.5, 0.9 }, []explain.Cause{explain.CPU, explain.PlanFull, explain.PlanFull}, "processor"},
		"a moment of full":      {func(f *explain.Facts) { f.Down.Full = 0.05 }, []explain.Cause{explain.Home}, "Wi-Fi"},
		"unlimited, never full": {func(f *explain.Facts) { f.Down.Rate, f.Down.Full = 0, 1 }, []explain.Cause{explain.Home}, "Wi-Fi"},
		"far":                   {func(f *explain.Facts) { f.Probe.Idle.Delay = waits(80*time.Millisecond, 90) }, []explain.Cause{explain.Upstream}, "75ms"},
		"usual there": {func(f *explain.Facts) {
			f.Probe.Idle.Delay, f.Usual = waits(80*time.Millisecond, 90), 75*time.Millisecond
		}, []explain.Cause{explain.Home}, "Wi-Fi"},
		"twice of very little": {func(f *explain.Facts) {
			f.Probe.Idle.Delay, f.Usual = waits(9*time.Millisecond, 90), 2*time.Millisecond
		}, []explain.Cause{explain.Home}, "Wi-Fi"},
		"nothing to compare": {func(f *explain.Facts) { f.Usual, f.Probe.Idle.Delay = 0, waits(90*time.Millisecond, 90) }, []explain.Cause{explain.Upstream}, "idle"},
		"lossy":              {func(f *explain.Facts) { f.Probe.Idle.Lost = 10 }, []explain.Cause{explain.Upstream}, "10 % of 100"},
		"too few to say":     {func(f *explain.Facts) { f.Probe.Idle = plan.ProbeDelay{Lost: 3} }, []explain.Cause{explain.Home}, "set a probe"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := calm()
			c.change(&f)
			found := explain.Explain(&f)
			var got []explain.Cause
			for _, g := range found {
				got = append(got, g.Cause)
				if g.Sentence == "" {
					t.Errorf("%s has no sentence", g.Cause)
				}
				for _, figure := range g.Figures {
					if figure.Name == "" || figure.Value == "" {
						t.Errorf("%s has the figure %q", g.Cause, figure)
					}
				}
			}
			if strings.Join(texts(got), " ") != strings.Join(texts(c.want), " ") {
				t.Fatalf("causes are %v, want %v: %v", got, c.want, found)
			}
			first := found[0].Sentence
			for _, figure := range found[0].Figures {
				first += " " + figure.Name + " " + figure.Value
			}
			if !strings.Contains(first, c.says) {
				t.Errorf("says %q, want it to say %q", first, c.says)
			}
		})
	}
}

func texts(causes []explain.Cause) (all []string) {
	for _, c := range causes {
		all = append(all, string(c))
	}
	return all
}

// TestFault103_CPUIsTheLimit wants the processor named, before a line that is
// full because of it, be it busy or too late to take packets.
func TestFault103_CPUIsTheLimit(t *testing.T) {
	for name, change := range map[string]func(*explain.Facts){
		"busy":          func(f *explain.Facts) { f.CPU = 0.97 },
		"queue is full": func(f *explain.Facts) { f.Overflow = 3 },
	} {
		f := calm()
		f.Down.Full = 0.9
		change(&f)
		got := explain.Explain(&f)
		if len(got) != 2 || got[0].Cause != explain.CPU || got[1].Cause != explain.PlanFull || !strings.Contains(got[0].Sentence, "processor") {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
