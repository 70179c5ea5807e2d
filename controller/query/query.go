// Package query answers how groups of routers felt over time, from the history
// that one controller has or from a server that several write theirs to.
package query

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/engine"
)

// Source evaluates PromQL at from, from + step and so on up to to.
type Source interface {
	Range(ctx context.Context, expr string, from, to time.Time, step time.Duration) (model.Matrix, error)
}

// between is what a source may have for the sojourn times of a long window,
// where PromQL would look at every sample.
type between interface {
	SojournBetween(ctx context.Context, by, direction, tin string, from, to time.Time) (map[string]*engine.Histogram, error)
}

// Bounds of a request.
const (
	MaxSteps = 2000
	MinStep  = time.Minute // two of the history's own: with fewer samples nothing goes up
)

// Request asks for groups over time.
type Request struct {
	By       string // dimension
	Groups   []string
	From, To time.Time
	Step     time.Duration // 0: the whole window is one
	Tins     bool
	Probe    bool // the delays to hosts that routers measure, by load of the line, in place of the sojourn times
}

// Validate completes r at now. Its errors name the field.
func (r *Request) Validate(now time.Time) error {
	if r.By == "" {
		return fmt.Errorf("group_by is missing: all, plan, site, model, version or a label")
	}
	if r.To.IsZero() {
		r.To = now
	}
	if r.From.IsZero() {
		r.From = r.To.Add(-24 * time.Hour)
	}
	window := r.To.Sub(r.From)
	switch {
	case window < MinStep:
		return fmt.Errorf("window %s to %s: must be %v or more", r.From.Format(time.RFC3339), r.To.Format(time.RFC3339), MinStep)
	case r.Step == 0:
		r.Step = window
	case r.Step < MinStep:
		return fmt.Errorf("step %v: must be %v or more", r.Step, MinStep)
	case r.Step > window:
		return fmt.Errorf("step %v: is longer than the window of %v", r.Step, window)
	case r.Tins && r.Probe:
		return errors.New("tins: a delay to a host has none")
	case window/r.Step > MaxSteps:
		return fmt.Errorf("step %v: %v has %d of them, at most %d are allowed", r.Step, window, window/r.Step, MaxSteps)
	}
	return nil
}

// Key names a series. One of probes has a load and no direction.
type Key struct{ Group, Direction, Tin, Load string }

func (k Key) compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Group, o.Group), cmp.Compare(k.Direction, o.Direction), cmp.Compare(k.Tin, o.Tin), cmp.Compare(k.Load, o.Load))
}

// Series is how one group felt, by the ends of steps.
type Series struct {
	Key
	Points []Point
}

// Point is one step. What is not known, such as the percentiles of no packets,
// is 0.
type Point struct {
	Time        time.Time
	Sojourn     []Bucket // in order
	Rate        float64  // delivered bits per second
	Packets     float64  // delivered a second
	Drops       float64  // a second
	Marks       float64  // a second
	Utilisation float64
	Saturated   float64 // routers
	Routers     float64 // that reported
	Lost        float64 // echoes without an answer; the others are in Sojourn
}

// Bucket is one bucket of a histogram in which there is something.
type Bucket struct {
	Lower, Upper time.Duration
	Packets      float64
}

// Quantile returns the middle of the bucket that the given share of the packets
// reaches; 0 if there are none.
func (p *Point) Quantile(share float64) time.Duration {
	var total, seen float64
	for _, b := range p.Sojourn {
		total += b.Packets
	}
	for i, b := range p.Sojourn {
		if seen += b.Packets; seen >= share*total && b.Packets > 0 || i == len(p.Sojourn)-1 {
			return (b.Lower + b.Upper) / 2
		}
	}
	return 0
}

// Max returns the upper bound of the longest time; 0 if there are no packets.
func (p *Point) Max() time.Duration {
	if len(p.Sojourn) == 0 {
		return 0
	}
	return p.Sojourn[len(p.Sojourn)-1].Upper
}

// Stats answers a valid request. Groups in which nothing happened are left out.
func Stats(ctx context.Context, from Source, r Request) ([]Series, error) {
	a := &asking{source: from, request: r, points: map[Key]map[model.Time]*Point{}}
	if err := a.sojourns(ctx); err != nil {
		return nil, err
	}
	if r.Probe {
		lost := fmt.Sprintf("sum by (%s) (increase(%s[%s]))", a.grouping(), a.selector(history.ProbeLost), a.step())
		err := a.values(ctx, lost, func(p *Point, v float64) { p.Lost = v })
		return a.series(), err
	}
	metrics := [4]string{history.SentBytes, history.SentPackets, history.Dropped, history.Marked}
	if r.Tins {
		metrics = [4]string{history.TinBytes, history.TinPackets, history.TinDropped, history.TinMarked}
	}
	for i, set := range []func(*Point, float64){
		func(p *Point, v float64) { p.Rate = 8 * v },
		func(p *Point, v float64) { p.Packets = v },
		func(p *Point, v float64) { p.Drops = v },
		func(p *Point, v float64) { p.Marks = v },
	} {
		if err := a.values(ctx, a.perSecond(metrics[i]), set); err != nil {
			return nil, err
		}
	}
	if !r.Tins {
		if err := a.gauges(ctx); err != nil {
			return nil, err
		}
	}
	return a.series(), nil
}

// series returns what was found, in order.
func (a *asking) series() []Series {
	all := make([]Series, 0, len(a.points))
	for _, k := range slices.SortedFunc(maps.Keys(a.points), Key.compare) {
		s := Series{Key: k}
		for _, at := range slices.Sorted(maps.Keys(a.points[k])) {
			p := a.points[k][at]
			p.Time = at.Time()
			s.Points = append(s.Points, *p)
		}
		all = append(all, s)
	}
	return all
}

// asking is one request on its way.
type asking struct {
	source  Source
	request Request
	points  map[Key]map[model.Time]*Point
}

func (a *asking) label() string { return history.GroupLabel(a.request.By) }

// grouping is the labels that are kept.
func (a *asking) grouping() string {
	switch {
	case a.request.Tins:
		return a.label() + ", " + history.LabelDirection + ", " + history.LabelTin
	case a.request.Probe:
		return a.label() + ", " + history.LabelLoad
	default:
		return a.label() + ", " + history.LabelDirection
	}
}

// selector returns the series of a metric that are asked for.
func (a *asking) selector(metric string) string {
	return fmt.Sprintf("%s{%s=%q%s}", metric, history.LabelBy, a.request.By, a.only())
}

// only is the matcher of the groups; empty: all.
func (a *asking) only() string {
	if len(a.request.Groups) == 0 {
		return ""
	}
	quoted := make([]string, len(a.request.Groups))
	for i, g := range a.request.Groups {
		quoted[i] = regexp.QuoteMeta(g)
	}
	return fmt.Sprintf(", %s=~%q", a.label(), strings.Join(quoted, "|"))
}

func (a *asking) step() string {
	return model.Duration(a.request.Step.Truncate(time.Millisecond)).String()
}

func (a *asking) perSecond(metric string) string {
	return fmt.Sprintf("sum by (%s) (rate(%s[%s]))", a.grouping(), a.selector(metric), a.step())
}

func (a *asking) sojourns(ctx context.Context) error {
	if b, ok := a.source.(between); ok && a.request.Step == a.request.To.Sub(a.request.From) && !a.request.Tins && !a.request.Probe {
		return a.sojournsAtOnce(ctx, b)
	}
	metric := history.Sojourn
	switch {
	case a.request.Tins:
		metric = history.TinSojourn
	case a.request.Probe:
		metric = history.ProbeDelay
	}
	expr := fmt.Sprintf("sum by (%s) (increase(%s[%s]))", a.grouping(), a.selector(metric), a.step())
	found, err := a.ask(ctx, expr)
	if err != nil {
		return err
	}
	for _, s := range found {
		for _, h := range s.Histograms {
			if h.Histogram == nil || h.Histogram.Count == 0 {
				continue
			}
			p := a.point(a.key(s.Metric), h.Timestamp)
			for _, b := range h.Histogram.Buckets {
				if b.Count > 0 {
					p.Sojourn = append(p.Sojourn, Bucket{seconds(float64(b.Lower)), seconds(float64(b.Upper)), float64(b.Count)})
				}
			}
		}
	}
	return nil
}

func (a *asking) sojournsAtOnce(ctx context.Context, b between) error {
	for _, direction := range []string{"down", "up"} {
		found, err := b.SojournBetween(ctx, a.request.By, direction, "", a.request.From, a.request.To)
		if err != nil {
			return err
		}
		for group, h := range found {
			if h.Total() == 0 || len(a.request.Groups) > 0 && !slices.Contains(a.request.Groups, group) {
				continue
			}
			p := a.point(Key{Group: group, Direction: direction}, model.TimeFromUnixNano(a.request.To.UnixNano()))
			for i, n := range h {
				if n > 0 {
					low, high := engine.BucketBounds(i)
					p.Sojourn = append(p.Sojourn, Bucket{low, high, float64(n)})
				}
			}
		}
	}
	return nil
}

// seconds returns a bound of a bucket; those that are none are the largest time.
func seconds(s float64) time.Duration {
	switch {
	case s <= 0:
		return 0
	case math.IsInf(s, 1) || s > math.MaxInt64/1e9:
		_, last := engine.BucketBounds(engine.HistogramBuckets - 2)
		return 2 * last
	default:
		return time.Duration(s * 1e9)
	}
}

// gauges asks how the routers were on average over each step. Groups may be of
// several controllers, whose sums add up; utilisation is that of the sums.
func (a *asking) gauges(ctx context.Context) error {
	average := func(metric string) string {
		return fmt.Sprintf("sum by (%s) (avg_over_time(%s[%s]))", a.grouping(), a.selector(metric), a.step())
	}
	use := average(history.Load) + " / (" + average(history.Shaped) + " > 0)"
	if err := a.values(ctx, use, func(p *Point, v float64) { p.Utilisation = v }); err != nil {
		return err
	}
	if err := a.values(ctx, average(history.Saturated), func(p *Point, v float64) { p.Saturated = v }); err != nil {
		return err
	}
	reporting := fmt.Sprintf("sum by (%s) (avg_over_time(%s[%s]))", a.label(), a.selector(history.Reporting), a.step())
	found, err := a.ask(ctx, reporting)
	if err != nil {
		return err
	}
	for _, s := range found {
		for _, v := range s.Values {
			for _, direction := range []string{"down", "up"} {
				k := a.key(s.Metric)
				k.Direction = direction
				if p := a.points[k][v.Timestamp]; p != nil {
					p.Routers = float64(v.Value)
				}
			}
		}
	}
	return nil
}

// values asks for numbers, and sets them where they are not 0.
func (a *asking) values(ctx context.Context, expr string, set func(*Point, float64)) error {
	found, err := a.ask(ctx, expr)
	if err != nil {
		return err
	}
	for _, s := range found {
		for _, v := range s.Values {
			if n := float64(v.Value); n != 0 && !math.IsNaN(n) {
				set(a.point(a.key(s.Metric), v.Timestamp), n)
			}
		}
	}
	return nil
}

// ask evaluates at the ends of the steps. The last one ends with the window.
func (a *asking) ask(ctx context.Context, expr string) (model.Matrix, error) {
	r := &a.request
	steps := (r.To.Sub(r.From) - 1) / r.Step
	found, err := a.source.Range(ctx, expr, r.To.Add(-steps*r.Step), r.To, r.Step)
	if err != nil {
		return nil, fmt.Errorf("ask the history for %s: %w", expr, err)
	}
	return found, nil
}

func (a *asking) key(m model.Metric) Key {
	return Key{
		Group:     string(m[model.LabelName(a.label())]),
		Direction: string(m[history.LabelDirection]),
		Tin:       string(m[history.LabelTin]),
		Load:      string(m[history.LabelLoad]),
	}
}

func (a *asking) point(k Key, at model.Time) *Point {
	of := a.points[k]
	if of == nil {
		of = map[model.Time]*Point{}
		a.points[k] = of
	}
	p := of[at]
	if p == nil {
		p = &Point{}
		of[at] = p
	}
	return p
}
