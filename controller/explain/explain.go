// Package explain answers a support call: why is it slow at one customer's? It
// is a pure function of what the controller knows of a router, and says what the
// figures say and no more: a cause that could not be looked at is named as such.
package explain

import (
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Cause is one reason for a slow line.
type Cause string

// The causes, in the order in which they are looked for: each hides those behind
// it.
const (
	Offline  Cause = "offline"     // the controller can't reach the router
	Unshaped Cause = "not-shaped"  // nothing holds its queue short
	Refused  Cause = "not-applied" // it runs something else than it should
	Cable    Cause = "cable"       // its interface goes away, or is slower than the plan
	CPU      Cause = "cpu-bound"   // the router can't move that many packets
	PlanFull Cause = "plan-full"   // the customer uses all of it
	Upstream Cause = "upstream"    // the delay or the loss is behind the line
	Home     Cause = "home"        // nothing of this: Wi-Fi, LAN, a device, or a far server
	Unknown  Cause = "unknown"     // there are no figures
)

// Direction is one direction of the line over the window.
type Direction struct {
	Rate      engine.BitsPerSecond // shaped to; 0: unlimited
	Delivered engine.BitsPerSecond // on average
	Peak      engine.BitsPerSecond // the most between two reports
	Full      float64              // share of the window in which it was full, see telemetry.Full
	Packets   uint64
	Drops     uint64
	Marks     uint64
	Sojourn   engine.Histogram // of what was delivered
}

// Facts are what is known of one router.
type Facts struct {
	Now    time.Time
	Router string
	Plan   string

	Connected bool
	Since     time.Time // connected or not; zero: never seen
	Sync      string    // what is not as desired, in a few words; empty: all is
	Shaped    bool      // whether the data plane shapes, by its own word
	Suspended bool

	Conditions []plan.Condition

	Window   time.Duration // that the figures are of; 0: there are none
	Down, Up Direction
	CPU      float64 // share of one core that the agent used
	Cores    int     // of the router; 0: not known
	Bypassed uint64  // packets that passed unshaped in the window
	Overflow uint64  // packets that the kernel could not queue in the window
	Comings  uint64  // of the interface in the window
	Losses   uint64  // of the carrier in the window
	WAN      *plan.LinkState

	// Probe counts echoes in the window, nil: none is set. Usual is the median
	// at idle of the routers of the same site or plan; 0: not known.
	Probe *plan.ProbeStats
	Usual time.Duration
}

// Figure is one number that a finding rests on.
type Figure struct{ Name, Value string }

// Finding is one cause with what shows it.
type Finding struct {
	Cause    Cause
	Sentence string // for people, says what to do
	Figures  []Figure
}

// Thresholds. Each is where the other side of it would be a complaint of its own.
const (
	fullShare   = 0.1                   // of the window: 90 s of 15 min are felt
	cpuShare    = 0.85                  // of one core: the kernel's half of the work comes on top
	badLoss     = 0.02                  // of echoes: TCP over it is slow whatever the rate
	fewEchoes   = 20                    // fewer say nothing of loss
	highDelay   = 60 * time.Millisecond // to a host near by, at idle, if nothing is known of others
	worseDelay  = 3                     // times what is usual at idle
	leastExcess = 20 * time.Millisecond // less than this nobody hears, whatever is usual
)

// Explain returns what makes the line slow, the most likely first. There is
// always at least one finding.
func Explain(f *Facts) []Finding {
	if !f.Connected {
		return []Finding{f.offline()}
	}
	var found []Finding
	add := func(g Finding, ok bool) {
		if ok {
			found = append(found, g)
		}
	}
	add(f.unshaped())
	add(f.refused())
	if f.Window == 0 {
		return append(found, Finding{Cause: Unknown, Sentence: "The router has not reported since it connected: ask again in a minute."})
	}
	add(f.cable())
	add(f.cpu())
	add(f.full("download", &f.Down))
	add(f.full("upload", &f.Up))
	add(f.upstream())
	if len(found) == 0 {
		found = append(found, f.home())
	}
	return found
}

func (f *Facts) offline() Finding {
	g := Finding{Cause: Offline}
	if f.Since.IsZero() {
		g.Sentence = "The router has never connected: is its agent installed, and did it use its token?"
		return g
	}
	g.Sentence = "The router is not connected: its power, its line, or its way to the controller is gone. What it ran last goes on without the controller."
	g.Figures = []Figure{{"offline for", f.Now.Sub(f.Since).Round(time.Second).String()}}
	if w := f.WAN; w != nil {
		g.Figures = append(g.Figures, Figure{"interface, at the last report", wanText(w)})
	}
	return g
}

func (f *Facts) unshaped() (Finding, bool) {
	g := Finding{Cause: Unshaped}
	for _, c := range f.Conditions {
		if c.Message != "" && ((c.Type == "Degraded" || c.Type == "FlowOffload") && c.Status || c.Type == "InterfaceUp" && !c.Status) {
			g.Sentence = "The line is not shaped as it should be: " + c.Message + "."
			return g, true
		}
	}
	if f.Suspended || f.Shaped {
		if f.Suspended {
			g.Sentence = "The subscriber is suspended."
		}
		return g, f.Suspended
	}
	g.Sentence = "Nothing is shaped, so that a full line has a long queue: give the router a subscriber with a plan."
	return g, true
}

func (f *Facts) refused() (Finding, bool) {
	return Finding{Cause: Refused, Sentence: "The router does not run what it should: " + f.Sync + ". See router show."}, f.Sync != ""
}

func (f *Facts) cable() (Finding, bool) {
	g := Finding{Cause: Cable}
	if n := f.Losses + f.Comings; n > 0 {
		g.Sentence = "The line was interrupted: look at the cable, the modem, or who dials."
		g.Figures = []Figure{{"carrier lost", times(f.Losses)}, {"dialed anew", times(f.Comings)}, {"in", f.window()}}
		return g, true
	}
	if w := f.WAN; w != nil && w.Speed != 0 && (w.Speed < f.Down.Rate || w.Speed < f.Up.Rate) {
		g.Sentence = "The cable of the WAN port is slower than the plan: look at the cable and at the port of the modem."
		g.Figures = []Figure{{"cable", w.Speed.String()}, {"plan down", f.Down.Rate.String()}, {"plan up", f.Up.Rate.String()}}
		return g, true
	}
	return g, false
}

func (f *Facts) cpu() (Finding, bool) {
	if f.CPU < cpuShare && f.Overflow == 0 {
		return Finding{}, false
	}
	return Finding{
		Cause:    CPU,
		Sentence: "The router's processor is the limit, not the line: shape in the kernel if its firmware can, take a lower rate, or replace it.",
		Figures: []Figure{
			{"agent", percent(f.CPU) + " of a core"},
			{"packets that found the queue full", fmt.Sprint(f.Overflow)},
			{"passed unshaped", fmt.Sprint(f.Bypassed)},
			{"down", f.Down.Delivered.String()},
			{"up", f.Up.Delivered.String()},
			{"in", f.window()},
		},
	}, true
}

func (f *Facts) full(name string, d *Direction) (Finding, bool) {
	if d.Rate == 0 || d.Full < fullShare {
		return Finding{}, false
	}
	return Finding{
		Cause: PlanFull,
		Sentence: fmt.Sprintf("The %s is full: the home uses all of its %v. Short packets still get through quickly; what is slow is what shares the rest. A faster plan would help.",
			name, d.Rate),
		Figures: append([]Figure{
			{"full", percent(d.Full) + " of " + f.window()}, {"on average", d.Delivered.String()}, {"at most", d.Peak.String()},
		}, delays(d)...),
	}, true
}

func (f *Facts) upstream() (Finding, bool) {
	p := f.Probe
	if p == nil {
		return Finding{}, false
	}
	g := Finding{Cause: Upstream}
	echoes := p.Idle.Delay.Total() + p.Idle.Lost
	loss := 0.0
	if echoes > 0 {
		loss = float64(p.Idle.Lost) / float64(echoes)
	}
	idle := p.Idle.Delay.Quantile(1, 2)
	limit := highDelay
	if f.Usual > 0 {
		limit = max(worseDelay*f.Usual, f.Usual+leastExcess)
	}
	lossy, slow := echoes >= fewEchoes && loss >= badLoss, p.Idle.Delay.Total() > 0 && idle > limit
	switch {
	case lossy:
		g.Sentence = "Packets are lost behind the router while the line is idle: look at the access line and at what is between it and " + p.Host + "."
	case slow:
		g.Sentence = "The way to " + p.Host + " is long while the line is idle: the delay is behind the router, not in its queue."
	default:
		return g, false
	}
	g.Figures = []Figure{{"delay to " + p.Host + ", idle", short(idle)}, {"lost", fmt.Sprintf("%s of %d", percent(loss), echoes)}}
	if f.Usual > 0 {
		g.Figures = append(g.Figures, Figure{"usual here", short(f.Usual)})
	}
	return g, true
}

func (f *Facts) home() Finding {
	g := Finding{Cause: Home, Figures: []Figure{
		{"down", f.use(&f.Down)}, {"up", f.use(&f.Up)}, {"in", f.window()},
	}}
	g.Figures = append(g.Figures, delays(&f.Down)...)
	if p := f.Probe; p != nil && p.Idle.Delay.Total() > 0 {
		g.Sentence = "The line is not full and answers quickly: what is slow is in the home (Wi-Fi, cables, a device) or at the other end."
		g.Figures = append(g.Figures, Figure{"delay to " + p.Host + ", idle", short(p.Idle.Delay.Quantile(1, 2))})
		return g
	}
	g.Sentence = "The line is not full and packets don't wait in the router: what is slow is in the home (Wi-Fi, cables, a device), at the other end, or on the way there. No delay is measured behind this router, so that the way can't be told apart: set a probe."
	return g
}

func (f *Facts) use(d *Direction) string {
	if d.Rate == 0 {
		return d.Delivered.String()
	}
	return fmt.Sprintf("%v of %v (%s)", d.Delivered, d.Rate, percent(float64(d.Delivered)/float64(d.Rate)))
}

func (f *Facts) window() string {
	if d := f.Window.Round(time.Second); d >= time.Minute {
		return fmt.Sprintf("%d min", int(d.Round(time.Minute)/time.Minute))
	}
	return f.Window.Round(time.Second).String()
}

// delays are those in the router's own queue; none if the data plane has no
// histogram.
func delays(d *Direction) []Figure {
	if d.Sojourn.Total() == 0 {
		return nil
	}
	return []Figure{{"wait in the queue, median", short(d.Sojourn.Quantile(1, 2))}, {"99 %", short(d.Sojourn.Quantile(99, 100))}}
}

func wanText(w *plan.LinkState) string {
	switch {
	case w.Index == 0:
		return w.Name + " is missing"
	case !w.Up:
		return w.Name + " is switched off"
	case !w.Carrier:
		return w.Name + " has no carrier"
	default:
		return w.Name + " was up"
	}
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// short is a duration with two digits.
func short(d time.Duration) string {
	unit := time.Duration(1)
	for limit := 100 * unit; d >= limit; limit *= 10 {
		unit *= 10
	}
	return d.Round(unit).String()
}
