package rollout

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Gate is a condition for going on.
type Gate struct {
	Metric  string
	Above   bool      // must be above the bound, and not below
	Factor  float64   // of the reference; 0 if there is none
	Against Reference // what the factor is of
	Bound   float64   // added to it: seconds, or a share
}

// Reference is what a figure is compared with.
type Reference uint8

// The references.
const (
	Absolute Reference = iota
	Control            // routers that are not changed yet, of the same time
	Past               // the same routers before they were changed
)

// metric is a figure that a gate can be about.
type metric struct {
	name   string
	time   bool // in seconds; else a share
	counts bool // of what routers say, which is known at once; else of what they count
	about  string
}

// The metrics. Those of traffic may end in _down or _up for one direction.
var metrics = []metric{
	{"nack", false, true, "routers that refused, of those that were connected"},
	{"clamp", false, true, "routers that run it with other values, of those that were connected"},
	{"unanswered", false, true, "connected routers that haven't answered"},
	{"disconnect", false, true, "routers that went away since the step was opened"},
	{"flap", false, true, "routers whose session began anew since the step was opened"},
	{"p50_sojourn", true, false, "time in the queue that half of all packets are below"},
	{"p90_sojourn", true, false, "the same of 90 % of all packets"},
	{"p95_sojourn", true, false, "the same of 95 %"},
	{"p99_sojourn", true, false, "the same of 99 %"},
	{"p999_sojourn", true, false, "the same of 99.9 %"},
	{"drop", false, false, "packets that were dropped"},
	{"mark", false, false, "packets that were marked CE"},
	{"utilisation", false, false, "of the shaped rate that was used"},
	{"cpu", false, false, "of one core that the agent took"},
}

// Metrics returns the metrics that a gate can be about, and what they are.
func Metrics() (all [][2]string) {
	for _, m := range metrics {
		all = append(all, [2]string{m.name, m.about})
	}
	return all
}

func metricOf(name string) (m metric, direction string, ok bool) {
	for _, d := range []string{"", "_down", "_up"} {
		base, has := strings.CutSuffix(name, d)
		i := slices.IndexFunc(metrics, func(m metric) bool { return m.name == base })
		if has && i >= 0 && (d == "" || !metrics[i].counts && base != "cpu") {
			return metrics[i], strings.TrimPrefix(d, "_"), true
		}
	}
	return metric{}, "", false
}

const gateSyntax = "must be such as 'p99_sojourn < 1.2x control', 'p99_sojourn < 20ms', 'drop < 2x past + 0.1%' or 'nack < 1%'"

// ParseGate reads METRIC < BOUND or METRIC > BOUND, where the bound is a value,
// or a factor of control or past, or both with a + between them.
func ParseGate(text string) (Gate, error) {
	bad := func(format string, args ...any) (Gate, error) {
		return Gate{}, fmt.Errorf("gate %.100q: %s; %s", text, fmt.Sprintf(format, args...), gateSyntax)
	}
	at := strings.IndexAny(text, "<>")
	if at < 0 {
		return bad("has no < or >")
	}
	g := Gate{Metric: strings.TrimSpace(text[:at]), Above: text[at] == '>'}
	g.Metric = strings.Replace(g.Metric, "utilization", "utilisation", 1)
	m, _, ok := metricOf(g.Metric)
	if !ok {
		var names []string
		for _, m := range metrics {
			names = append(names, m.name)
		}
		return bad("metric %q is unknown, there are %s", g.Metric, strings.Join(names, ", "))
	}
	terms := strings.Split(text[at+1:], "+")
	if len(terms) > 2 {
		return bad("has more than two terms")
	}
	hasBound := false
	for _, term := range terms {
		term = strings.TrimSpace(term)
		if factor, ref, is := reference(term); is {
			if g.Against != Absolute {
				return bad("has two references")
			}
			f := 1.0
			if factor != "" {
				var err error
				if f, err = strconv.ParseFloat(factor, 64); err != nil || !(f > 0 && f <= 1000) {
					return bad("factor %q must be a number above 0 and at most 1000", factor)
				}
			}
			g.Factor, g.Against = f, ref
			continue
		}
		if hasBound {
			return bad("has two values")
		}
		hasBound = true
		var err error
		if g.Bound, err = parseBound(term, m.time); err != nil {
			return bad("%v", err)
		}
	}
	return g, nil
}

// reference reads "1.2x control", "1.2 x past" and "control".
func reference(term string) (factor string, r Reference, ok bool) {
	for word, r := range map[string]Reference{"control": Control, "past": Past} {
		rest, is := strings.CutSuffix(term, word)
		if !is {
			continue
		}
		rest = strings.TrimSpace(rest)
		factor, isFactor := strings.CutSuffix(rest, "x")
		if rest != "" && !isFactor {
			return "", 0, false
		}
		return strings.TrimSpace(factor), r, true
	}
	return "", 0, false
}

func parseBound(term string, isTime bool) (float64, error) {
	if isTime {
		d, err := time.ParseDuration(strings.ReplaceAll(term, " ", ""))
		if err != nil || d < 0 {
			return 0, fmt.Errorf("%q must be a time such as 20ms", term)
		}
		return d.Seconds(), nil
	}
	share, ok := strings.CutSuffix(term, "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(share), 64)
	if !ok || err != nil || !(v >= 0 && v <= 100) {
		return 0, fmt.Errorf("%q must be a share such as 1%%", term)
	}
	return v / 100, nil
}

// String returns what ParseGate reads.
func (g Gate) String() string {
	m, _, _ := metricOf(g.Metric)
	b := g.Metric + " < "
	if g.Above {
		b = g.Metric + " > "
	}
	if g.Against == Absolute {
		return b + text(g.Bound, m.time)
	}
	b += strconv.FormatFloat(g.Factor, 'g', -1, 64) + "x " + [...]string{"", "control", "past"}[g.Against]
	if g.Bound > 0 {
		b += " + " + text(g.Bound, m.time)
	}
	return b
}

// text returns a value for people, which parseBound reads.
func text(v float64, isTime bool) string {
	if isTime {
		d := time.Duration(v * 1e9)
		switch {
		case d >= time.Second:
			return d.Round(time.Millisecond).String()
		case d >= time.Millisecond:
			return d.Round(10 * time.Microsecond).String()
		default:
			return d.Round(time.Nanosecond).String()
		}
	}
	return strconv.FormatFloat(v*100, 'g', 4, 64) + "%"
}

// Result is what a gate says.
type Result uint8

// The results.
const (
	Inconclusive Result = iota + 1 // the data don't tell
	Pass
	Fail
)

var resultWords = []string{"", "inconclusive", "pass", "fail"}

// String returns the word that operators see.
func (r Result) String() string { return resultWords[r] }

// ParseResult reads the word.
func ParseResult(word string) (Result, error) {
	i := slices.Index(resultWords, word)
	if i < 1 {
		return 0, fmt.Errorf("result %q is unknown", word)
	}
	return Result(i), nil
}

// Verdict is what a gate said of a wave, and why.
type Verdict struct {
	Wave      int
	Gate      string
	Result    Result
	Value     float64 // seconds or a share; 0 if there is none
	Limit     float64 // that it was compared with
	Reference float64 // control's or past's value; 0 if there is none
	Samples   uint64  // routers or packets that the value is made of
	Time      time.Time
	Why       string // a sentence for people
}

// measured is one figure of one group.
type measured struct {
	value   float64
	samples uint64
	missing string // why there is none; empty: there is
}

// Judge says what a gate makes of a report. answered tells that routers had
// their time to answer.
func (s *Spec) Judge(g Gate, r *Report, answered bool) Verdict {
	m, direction, _ := metricOf(g.Metric)
	v := Verdict{Gate: g.String(), Time: r.Time}
	var value, ref measured
	against := g.Against
	if m.counts {
		value = countOf(m.name, &r.Changed, answered)
		ref = countOf(m.name, &r.Control, answered)
	} else {
		changed := r.Changed.Applied + r.Changed.Clamped
		value = s.figureOf(m, direction, &r.ChangedFigures, changed)
		if against == Control && r.Control.Members == 0 {
			against = Past // in the last wave nobody is left to compare with
		}
		if against == Past {
			ref = s.figureOf(m, direction, &r.PastFigures, changed)
		} else {
			ref = s.figureOf(m, direction, &r.ControlFigures, r.Control.connected())
		}
	}
	v.Value, v.Samples = value.value, value.samples
	name := [...]string{"", "control", "past"}[against]
	if against != Absolute {
		v.Reference = ref.value
	}
	v.Limit = g.Factor*v.Reference + g.Bound
	switch {
	case m.counts && against == Past:
		v.Result, v.Why = Inconclusive, fmt.Sprintf("%s has no past", m.name)
		return v
	case value.missing != "":
		v.Result, v.Why = Inconclusive, "the changed routers: "+value.missing
		return v
	case against != Absolute && ref.missing != "":
		v.Result, v.Why = Inconclusive, name+": "+ref.missing
		return v
	}
	v.Result = Pass
	sign := "<"
	if g.Above {
		sign = ">"
	}
	if g.Above && !(v.Value > v.Limit) || !g.Above && !(v.Value < v.Limit) {
		v.Result = Fail
		sign = "is not " + sign
	}
	// Nothing of nothing: a share of 0 against a control group with 0.
	if v.Value == 0 && v.Limit == 0 && !g.Above {
		v.Result, sign = Pass, "is no more than"
	}
	v.Why = fmt.Sprintf("%s %s %s %s", g.Metric, text(v.Value, m.time), sign, text(v.Limit, m.time))
	if against != Absolute {
		v.Why += fmt.Sprintf(" (%s %s)", name, text(v.Reference, m.time))
	}
	return v
}

// countOf returns a share of routers.
func countOf(name string, t *Tally, answered bool) measured {
	n, of := 0, t.connected()
	switch name {
	case "nack":
		n = t.Rejected
	case "clamp":
		n = t.Clamped
	case "unanswered":
		if n = t.Offered; !answered {
			return measured{missing: "their time to answer is not over"}
		}
	case "disconnect":
		n, of = t.Lost, of+t.Lost
	case "flap":
		n = t.Restarted
	}
	if of == 0 {
		return measured{missing: "none is connected"}
	}
	return measured{value: float64(n) / float64(of), samples: uint64(of)}
}

// figureOf returns a figure of what routers counted; connected is how many
// should have.
func (s *Spec) figureOf(m metric, direction string, f *Figures, connected int) measured {
	if connected == 0 {
		return measured{missing: "none runs it"}
	}
	if 2*f.Routers < connected {
		return measured{missing: fmt.Sprintf("only %d of %d have reported", f.Routers, connected)}
	}
	if m.name == "cpu" {
		if f.Time <= 0 {
			return measured{missing: "no time was reported"}
		}
		return measured{value: f.CPU.Seconds() / f.Time.Seconds(), samples: uint64(f.Routers)}
	}
	var c Counts
	if direction != "up" {
		c.Add(&f.Down)
	}
	if direction != "down" {
		c.Add(&f.Up)
	}
	if m.name == "utilisation" {
		if c.Capacity == 0 {
			return measured{missing: "nothing is shaped"}
		}
		return measured{value: float64(c.Bytes) * 8 / float64(c.Capacity), samples: uint64(f.Routers)}
	}
	samples := c.Packets
	if m.time {
		samples = c.Sojourn.Total()
	}
	if samples < max(s.MinSamples, 1) {
		return measured{samples: samples, missing: fmt.Sprintf("%d packets, at least %d are needed", samples, s.MinSamples)}
	}
	switch m.name {
	case "drop":
		return measured{value: float64(c.Drops) / float64(c.Packets+c.Drops), samples: samples}
	case "mark":
		return measured{value: float64(c.Marks) / float64(c.Packets), samples: samples}
	}
	num := map[string]uint64{"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p999": 999}[strings.TrimSuffix(m.name, "_sojourn")]
	return measured{value: c.Sojourn.Quantile(num, 1000).Seconds(), samples: samples}
}

// counts tells whether a gate is about what routers say.
func (g Gate) counts() bool {
	m, _, _ := metricOf(g.Metric)
	return m.counts
}

// needsPast tells whether a gate needs figures from before the first step; with
// one wave there is no control group to compare with.
func (s *Spec) needsPast() bool {
	return slices.ContainsFunc(s.Gates, func(g Gate) bool {
		return !g.counts() && (g.Against == Past || g.Against == Control && s.NumWaves() == 1)
	})
}
