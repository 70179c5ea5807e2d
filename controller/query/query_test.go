package query_test

import (
	"math"
	"math/rand/v2"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/promapi"
	"github.com/cakefleet/cakefleet/controller/query"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// plans have names that mean something in a regular expression.
var plans = []string{"gold.1", "gold+1", "silver"}

// hour is an hour of three routers, one for each plan, whose second half waits
// ten times as long. exact has every sojourn time by plan and half.
type hour struct {
	history *history.History
	end     time.Time
	exact   map[string]*[2]engine.Histogram
	packets map[string]uint64
}

func newHour(t *testing.T) *hour {
	t.Helper()
	table := telemetry.New(telemetry.Config{Interval: 30 * time.Second})
	h, err := history.New(history.Config{Dir: t.TempDir(), Controller: "c1", Table: table})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	const steps = 121 // the first is what everything goes up from
	f := &hour{history: h, end: time.Now().Truncate(time.Minute), exact: map[string]*[2]engine.Histogram{}, packets: map[string]uint64{}}
	random := rand.New(rand.NewPCG(1, 2))
	stats := map[string]*engine.Stats{}
	for i := range steps {
		now := f.end.Add(time.Duration(i-steps+1) * 30 * time.Second)
		for _, name := range plans {
			s := stats[name]
			if s == nil {
				s = &engine.Stats{Config: engine.DefaultConfig(), NumTins: 3}
				for k := range s.Tins[:3] {
					s.Tins[k].Index = uint8(k)
				}
				s.Config.Rate = 8e6
				stats[name], f.exact[name] = s, &[2]engine.Histogram{}
			}
			half, scale := 0, time.Millisecond
			if i > steps/2 {
				half, scale = 1, 10*time.Millisecond
			}
			for range 300 {
				if i == 0 {
					break
				}
				wait := time.Duration(random.ExpFloat64() * float64(scale))
				s.Tins[1].Sojourn.Observe(wait)
				f.exact[name][half].Observe(wait)
				f.packets[name]++
				s.Tins[1].Packets++
				s.Tins[1].Bytes += 1000
				s.SentPackets++
				s.SentBytes += 1000
			}
			raw := wire.AppendReport(nil, &plan.Report{Sequence: uint64(i + 1), BootID: "b", Uptime: time.Duration(i+1) * 30 * time.Second, Down: s, Up: s}, nil)
			if err := table.Ingest("router-"+name, raw, telemetry.Place{Plan: name, Site: "s", Model: "m", Version: "v"}, now); err != nil {
				t.Fatal(err)
			}
		}
		if h.Step(t.Context(), now); h.Status().Err != nil {
			t.Fatal(h.Status().Err)
		}
	}
	return f
}

// sources are the ways to ask the same history.
func sources(t *testing.T, h *history.History) map[string]query.Source {
	t.Helper()
	engine := promapi.NewEngine(0, 0, nil, nil)
	server := httptest.NewServer(promapi.New(promapi.Config{Data: h, Engine: engine, Metrics: history.Metrics()}))
	t.Cleanup(server.Close)
	base, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	there, err := query.There(base, nil)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]query.Source{"here": query.Here(engine, h), "there": there}
}

func near(got, want time.Duration) bool {
	return math.Abs(got.Seconds()/want.Seconds()-1) <= 0.125
}

func TestWindowAndSteps(t *testing.T) {
	f := newHour(t)
	for name, source := range sources(t, f.history) {
		t.Run(name, func(t *testing.T) {
			for _, tins := range []bool{false, true} {
				for _, step := range []time.Duration{0, 30 * time.Minute} {
					r := query.Request{By: "plan", Groups: []string{"gold.1", "silver"}, From: f.end.Add(-time.Hour), To: f.end, Step: step, Tins: tins}
					if err := r.Validate(f.end); err != nil {
						t.Fatal(err)
					}
					found, err := query.Stats(t.Context(), source, r)
					if err != nil {
						t.Fatal(err)
					}
					f.check(t, found, r, step)
				}
			}
		})
	}
}

// check compares with what is known.
func (f *hour) check(t *testing.T, found []query.Series, r query.Request, step time.Duration) {
	t.Helper()
	busy := 0
	for _, s := range found {
		if s.Group == "gold+1" {
			t.Errorf("%v was not asked for", s.Key)
		}
		for i := range s.Points {
			p := &s.Points[i]
			if len(p.Sojourn) == 0 {
				continue
			}
			busy++
			var want engine.Histogram
			switch {
			case step == 0:
				want.Merge(&f.exact[s.Group][0])
				want.Merge(&f.exact[s.Group][1])
			case p.Time.After(f.end.Add(-30 * time.Minute)):
				want = f.exact[s.Group][1]
			default:
				want = f.exact[s.Group][0]
			}
			if got, exact := p.Quantile(0.99), want.Quantile(99, 100); !near(got, exact) {
				t.Errorf("%v at %v: 99 %% is %v, want %v within 12.5 %%", s.Key, p.Time, got, exact)
			}
			if got, exact := p.Quantile(0.5), want.Quantile(1, 2); !near(got, exact) {
				t.Errorf("%v at %v: median is %v, want %v within 12.5 %%", s.Key, p.Time, got, exact)
			}
			if p.Max() < p.Quantile(0.99) {
				t.Errorf("%v: max %v is less than 99 %%", s.Key, p.Max())
			}
			if math.Abs(p.Packets-10) > 0.5 || math.Abs(p.Rate-80_000) > 4000 {
				t.Errorf("%v at %v: %v packets a second, %v bit/s, want 10 and 80000", s.Key, p.Time, p.Packets, p.Rate)
			}
			if !r.Tins && (math.Abs(p.Utilisation-0.01) > 0.001 || math.Abs(p.Routers-1) > 0.05 || p.Saturated != 0) {
				t.Errorf("%v at %v: utilisation %v of %v routers, %v full, want 0.01 of 1, 0", s.Key, p.Time, p.Utilisation, p.Routers, p.Saturated)
			}
		}
	}
	want := 4 // two plans, two directions
	if step != 0 {
		want *= 2
	}
	if busy != want {
		t.Errorf("%v by %v: %d points have delays, want %d: %+v", r.Groups, r.Step, busy, want, found)
	}
}

// What a group counted before its first sample is counted, too.
func TestFromTheFirst(t *testing.T) {
	table := telemetry.New(telemetry.Config{Interval: 10 * time.Second})
	h, err := history.New(history.Config{Dir: t.TempDir(), Controller: "c1", Table: table})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	now := time.Now().Truncate(time.Minute)
	s := &engine.Stats{Config: engine.DefaultConfig(), NumTins: 1}
	for i := range 4 {
		if i > 0 {
			s.SentPackets += 100
			s.SentBytes += 100_000
			s.Tins[0].Packets += 100
			s.Tins[0].Bytes += 100_000
			s.Tins[0].Sojourn[30] += 100
		}
		raw := wire.AppendReport(nil, &plan.Report{Sequence: uint64(i + 1), BootID: "b", Uptime: time.Duration(i+1) * 10 * time.Second, Down: s, Up: s}, nil)
		if err := table.Ingest("r", raw, telemetry.Place{Plan: "gold"}, now.Add(time.Duration(10*i-30)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	if h.Step(t.Context(), now); h.Status().Err != nil {
		t.Fatal(h.Status().Err)
	}
	for name, source := range sources(t, h) {
		found, err := query.Stats(t.Context(), source, query.Request{By: "plan", From: now.Add(-time.Minute), To: now, Step: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		if len(found) != 2 || len(found[0].Points) != 1 || found[0].Points[0].Rate < 8*300_000/60*0.9 || found[0].Points[0].Packets < 4.5 || found[0].Points[0].Quantile(0.99) == 0 {
			t.Errorf("%s: %+v, want 300 packets of 1000 bytes in a minute", name, found)
		}
	}
}

// TestProbe asks for delays to a host, by the load of the line.
func TestProbe(t *testing.T) {
	table := telemetry.New(telemetry.Config{Interval: 30 * time.Second})
	h, err := history.New(history.Config{Dir: t.TempDir(), Controller: "c1", Table: table})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	const steps = 40
	end := time.Now().Truncate(time.Minute)
	p := plan.ProbeStats{Host: "far"}
	for i := range steps {
		now := end.Add(time.Duration(i-steps+1) * 30 * time.Second)
		for range 10 {
			p.Idle.Delay.Observe(12 * time.Millisecond)
			p.Both.Delay.Observe(230 * time.Millisecond)
		}
		p.Both.Lost++
		raw := wire.AppendReport(nil, &plan.Report{Sequence: uint64(i + 1), BootID: "b", Uptime: time.Duration(i+1) * 30 * time.Second, Probe: &p}, nil)
		if err := table.Ingest("r", raw, telemetry.Place{Plan: "gold"}, now); err != nil {
			t.Fatal(err)
		}
		if h.Step(t.Context(), now); h.Status().Err != nil {
			t.Fatal(h.Status().Err)
		}
	}
	for name, source := range sources(t, h) {
		for _, step := range []time.Duration{0, 5 * time.Minute} {
			r := query.Request{By: "plan", From: end.Add(-10 * time.Minute), To: end, Step: step, Probe: true}
			if err := r.Validate(end); err != nil {
				t.Fatal(err)
			}
			found, err := query.Stats(t.Context(), source, r)
			if err != nil {
				t.Fatal(err)
			}
			busy := 0
			for _, s := range found {
				want := map[string]time.Duration{"idle": 12 * time.Millisecond, "both": 230 * time.Millisecond}[s.Load]
				for i := range s.Points {
					busy++
					point := &s.Points[i]
					echoes := 0.0
					for _, b := range point.Sojourn {
						echoes += b.Packets
					}
					sent := 20 * r.Step.Minutes() // ten each half minute
					lost := 0.0
					if s.Load == "both" {
						lost = sent / 10
					}
					if want == 0 || !near(point.Quantile(0.5), want) || math.Abs(echoes-sent) > sent/10 || math.Abs(point.Lost-lost) > sent/50 {
						t.Errorf("%s, %v: median %v of %v echoes, %v lost", name, s.Key, point.Quantile(0.5), echoes, point.Lost)
					}
				}
			}
			if want := 2 * int(10*time.Minute/r.Step); busy != want {
				t.Errorf("%s by %v: %d points, want %d: %+v", name, step, busy, want, found)
			}
		}
	}
}

func TestRequests(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		r    query.Request
		want string // in the error; empty: none
	}{
		{query.Request{By: "plan"}, ""},
		{query.Request{By: "plan", Step: time.Hour}, ""},
		{query.Request{}, "group_by is missing"},
		{query.Request{By: "plan", From: now, To: now}, "must be 1m0s or more"},
		{query.Request{By: "plan", From: now.Add(time.Hour)}, "must be 1m0s or more"},
		{query.Request{By: "plan", Step: time.Second}, "step 1s: must be 1m0s or more"},
		{query.Request{By: "plan", Step: 48 * time.Hour}, "is longer than the window"},
		{query.Request{By: "plan", From: now.Add(-1000 * time.Hour), Step: time.Minute}, "at most 2000 are allowed"},
	} {
		err := c.r.Validate(now)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%+v: %v", c.r, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: error %v, want %q", c.r, err, c.want)
		}
	}
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	base, err := url.Parse("http://fleet:secret@127.0.0.1:1/prometheus")
	if err != nil {
		t.Fatal(err)
	}
	there, err := query.There(base, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := query.Request{By: "plan"}
	if err := r.Validate(time.Now()); err != nil {
		t.Fatal(err)
	}
	_, err = query.Stats(t.Context(), there, r)
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v, want who is not there and no password", err)
	}
}
