package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func gate(t testing.TB, text string) rollout.Gate {
	t.Helper()
	g, err := rollout.ParseGate(text)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGateText(t *testing.T) {
	for text, want := range map[string]string{
		"p99_sojourn < 1.2x control":        "p99_sojourn < 1.2x control",
		"p99_sojourn<1.2 x control + 500us": "p99_sojourn < 1.2x control + 500µs",
		"p50_sojourn_up < 20ms":             "p50_sojourn_up < 20ms",
		"nack < 1%":                         "nack < 1%",
		"drop_down < past + 0.1 %":          "drop_down < 1x past + 0.1%",
		"utilization > 0.5x past":           "utilisation > 0.5x past",
		"cpu < 80%":                         "cpu < 80%",
	} {
		if got := gate(t, text).String(); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
		if again := gate(t, want).String(); again != want {
			t.Errorf("%q is %q", want, again)
		}
	}
	for text, want := range map[string]string{
		"":                        "has no < or >",
		"nack":                    "has no < or >",
		"speed < 1%":              `metric "speed" is unknown`,
		"nack_up < 1%":            "is unknown",
		"nack < 1":                "must be a share",
		"nack < 1ms":              "must be a share",
		"p99_sojourn < 5%":        "must be a time",
		"p99_sojourn < -1x past":  "factor",
		"p99_sojourn < NaNx past": "factor",
		"drop < past + control":   "two references",
		"drop < 1% + 2%":          "two values",
		"drop < past + 1% + 1%":   "more than two terms",
		"drop < 2 control":        "must be a share",
	} {
		if g, err := rollout.ParseGate(text); err == nil {
			t.Errorf("%q is taken for %v", text, g)
		} else if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "nack < 1%") {
			t.Errorf("%q: %v, want %q and how it should be", text, err, want)
		}
	}
}

func FuzzParseGate(f *testing.F) {
	f.Add("p99_sojourn < 1.2x control + 5ms")
	f.Add("nack < 1%")
	f.Fuzz(func(t *testing.T, text string) {
		g, err := rollout.ParseGate(text)
		if err != nil {
			return
		}
		if _, err := rollout.ParseGate(g.String()); err != nil {
			t.Fatalf("%q is %v, which can't be read: %v", text, g, err)
		}
	})
}

func counts(packets, drops int, sojourn time.Duration) (c rollout.Counts) {
	c.Packets, c.Drops, c.Bytes, c.Capacity = uint64(packets), uint64(drops), uint64(packets)*1000, uint64(packets)*16_000
	for range packets {
		c.Sojourn.Observe(sojourn)
	}
	return c
}

// Every metric is computed from what it says, and what can't be told is not
// guessed.
func TestJudge(t *testing.T) {
	s := rollout.Spec{MinSamples: 100}
	full := func() *rollout.Report {
		return &rollout.Report{
			Changed:        rollout.Tally{Members: 13, Applied: 6, Clamped: 1, Rejected: 1, Offered: 2, Unreachable: 3, Lost: 2, Restarted: 1},
			Control:        rollout.Tally{Members: 20, Applied: 20},
			ChangedFigures: rollout.Figures{Routers: 7, Down: counts(1000, 10, 12*time.Millisecond), Up: counts(1000, 0, time.Millisecond), CPU: 3 * time.Second, Time: time.Minute},
			ControlFigures: rollout.Figures{Routers: 20, Down: counts(3000, 30, 10*time.Millisecond), CPU: time.Second, Time: time.Minute},
			PastFigures:    rollout.Figures{Routers: 7, Down: counts(1000, 40, 20*time.Millisecond), CPU: 3 * time.Second, Time: time.Minute},
		}
	}
	for _, c := range []struct {
		gate   string
		change func(*rollout.Report)
		want   rollout.Result
		value  string // rounded
		why    string
	}{
		{"nack < 10%", nil, rollout.Fail, "0.100", "nack 10% is not < 10%"},
		{"nack < 10.1%", nil, rollout.Pass, "0.100", ""},
		{"nack < 2x control", nil, rollout.Fail, "0.100", "(control 0%)"},
		{"clamp < 20%", nil, rollout.Pass, "0.100", ""},
		{"unanswered < 10%", nil, rollout.Fail, "0.200", ""},
		{"disconnect < 10%", nil, rollout.Fail, "0.167", ""},
		{"flap < 20%", nil, rollout.Pass, "0.100", ""},
		{"disconnect < 1%", func(r *rollout.Report) { r.Changed = rollout.Tally{Members: 3, Unreachable: 3} }, rollout.Inconclusive, "0.000", "none is connected"},
		{"nack < past", nil, rollout.Inconclusive, "0.100", "has no past"},
		{"p99_sojourn_down < 1.1x control", nil, rollout.Fail, "0.012", ""},
		{"p99_sojourn_down < 1.5x control", nil, rollout.Pass, "0.012", ""},
		{"p99_sojourn_down < 1.0x past", nil, rollout.Pass, "0.012", ""},
		{"p50_sojourn_up < 2ms", nil, rollout.Pass, "0.001", ""},
		{"drop_down < 1.1x control", nil, rollout.Pass, "0.010", ""},
		{"drop_up < 1x control", func(r *rollout.Report) { r.ControlFigures.Up = counts(500, 0, 0) }, rollout.Pass, "0.000", "no more than"},
		{"utilisation_down > 0.4x control", nil, rollout.Pass, "0.500", ""},
		{"utilisation_down > 60%", nil, rollout.Fail, "0.500", ""},
		{"cpu < 2x control", nil, rollout.Fail, "0.050", ""},
		{"cpu < 1.1x past", nil, rollout.Pass, "0.050", ""},
		{"p99_sojourn < 1s", func(r *rollout.Report) { r.ChangedFigures.Routers = 3 }, rollout.Inconclusive, "0.000", "only 3 of 7 have reported"},
		{"p99_sojourn < 1s", func(r *rollout.Report) { r.ChangedFigures = rollout.Figures{Routers: 7, Down: counts(99, 0, 0)} }, rollout.Inconclusive, "0.000", "99 packets, at least 100 are needed"},
		{"p99_sojourn < 1.2x control", func(r *rollout.Report) { r.ControlFigures = rollout.Figures{} }, rollout.Inconclusive, "0.012", "control: only 0 of 20 have reported"},
		{"p99_sojourn_down < 1.2x control", func(r *rollout.Report) { r.Control = rollout.Tally{} }, rollout.Pass, "0.012", "(past"},
		{"cpu < 1%", func(r *rollout.Report) { r.ChangedFigures.Time = 0 }, rollout.Inconclusive, "0.000", "no time"},
	} {
		r := full()
		if c.change != nil {
			c.change(r)
		}
		v := s.Judge(gate(t, c.gate), r, true)
		if got := fmt.Sprintf("%.3f", v.Value); v.Result != c.want || got != c.value || !strings.Contains(v.Why, c.why) || v.Why == "" {
			t.Errorf("%s: %v of %s: %s; want %v of %s and %q", c.gate, v.Result, got, v.Why, c.want, c.value, c.why)
		}
	}
}

// The seed alone decides who is in which wave.
func TestFreeze(t *testing.T) {
	var targets []rollout.Target
	for i := range 1000 {
		targets = append(targets, rollout.Target{Router: fmt.Sprintf("home-%d", i)})
	}
	first := func(seed uint64) (ids []string) {
		s := rollout.Spec{Waves: rollout.DefaultWaves()}
		places, err := s.Freeze(targets, seed)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{0, 1, 2, 3} {
			if got, want := s.Size(n), []int{10, 100, 500, 1000}[n]; got != want {
				t.Errorf("wave %d has %d routers, want %d", n, got, want)
			}
		}
		l, err := rollout.NewLive(rollout.Rollout{Spec: s}, places)
		if err != nil {
			t.Fatal(err)
		}
		again, err := rollout.DecodePlaces(rollout.EncodePlaces(places))
		if err != nil || len(again) != len(places) || again[7] != places[7] {
			t.Errorf("places don't survive: %v", err)
		}
		for _, x := range targets {
			if step, ok := l.Step(x.Router, &plan.Subscriber{}); ok && step == 0 {
				ids = append(ids, x.Router)
			}
		}
		return ids
	}
	a, b, c := first(1), first(1), first(2)
	if len(a) != 10 || fmt.Sprint(a) != fmt.Sprint(b) || fmt.Sprint(a) == fmt.Sprint(c) {
		t.Errorf("first waves: %v, %v, %v", a, b, c)
	}
	s := rollout.Spec{Waves: []rollout.Size{{Percent: 10}}}
	if _, err := s.Freeze(targets, 1); err == nil {
		t.Error("waves that end at 10% are taken")
	}
}
