package ctl

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// window is how people say which part of the past they mean.
type window struct {
	last             time.Duration
	from, to, around string
	step             time.Duration
	groups           []string
	direction        string
	tins             bool
	probe            bool
	histogram        bool
	csv              bool
	plot             string
}

// define adds the flags of w.
func (w *window) define(c *cobra.Command) {
	f := c.Flags()
	f.DurationVar(&w.last, "last", 0, "the window: this `long`, up to now or --to (default 1h)")
	f.StringVar(&w.from, "from", "", "begin of the window: a `time` such as 2026-03-04T20:00, in the local zone unless it says another")
	f.StringVar(&w.to, "to", "", "end of the window: a `time`")
	f.StringVar(&w.around, "around", "", "compare the windows before and after a `time`, such as that of a change")
	f.DurationVar(&w.step, "step", 0, "`length` of one step, such as 5m; not given: the whole window, or a 60th of it (1m or more) for --csv and --plot")
	f.StringArrayVar(&w.groups, "group", nil, "only this `group`; may be given several times")
	f.StringVar(&w.direction, "direction", "", "only this `way`: down or up")
	f.BoolVar(&w.tins, "tins", false, "tell tins apart")
	f.BoolVar(&w.probe, "probe", false, "the delay to a host that routers measure, by load of the line, in place of their queues'")
	f.BoolVar(&w.histogram, "histogram", false, "draw the distribution of the delays")
	f.BoolVar(&w.csv, "csv", false, "print every step as CSV")
	f.StringVar(&w.plot, "plot", "", "also draw the 99th percentile over time into this SVG `file`")
	must(c.RegisterFlagCompletionFunc("direction", cobra.FixedCompletions([]string{"down", "up"}, cobra.ShellCompDirectiveNoFileComp)))
	c.MarkFlagsMutuallyExclusive("from", "last")
	c.MarkFlagsMutuallyExclusive("around", "from")
	c.MarkFlagsMutuallyExclusive("around", "to")
	c.MarkFlagsMutuallyExclusive("around", "plot")
	c.MarkFlagsMutuallyExclusive("around", "csv")
	c.MarkFlagsMutuallyExclusive("around", "step")
	c.MarkFlagsMutuallyExclusive("around", "histogram")
	c.MarkFlagsMutuallyExclusive("probe", "tins")
	c.MarkFlagsMutuallyExclusive("probe", "direction")
}

// given reports whether the past is asked for.
func (w *window) given() bool {
	return w.last != 0 || w.from != "" || w.to != "" || w.around != "" || w.step != 0 || len(w.groups) > 0 ||
		w.direction != "" || w.tins || w.probe || w.histogram || w.csv || w.plot != ""
}

// timeForms are what people type.
var timeForms = []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02 15:04:05", "2006-01-02 15:04", "2006-01-02"}

// parseWhen returns the time of a flag, in the zone of now unless it says
// another; a time of day is that of today.
func parseWhen(flag, text string, now time.Time) (time.Time, error) {
	for _, form := range timeForms {
		if t, err := time.ParseInLocation(form, text, now.Location()); err == nil {
			return t, nil
		}
	}
	if t, err := time.ParseInLocation("15:04", text, now.Location()); err == nil {
		return time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), 0, 0, now.Location()), nil
	}
	return time.Time{}, fmt.Errorf("--%s %q: must be a time such as 2026-03-04T20:00, 2026-03-04 or 20:00", flag, text)
}

// requests returns what is to be asked: one window, or the two around a time.
func (w *window) requests(by string, now time.Time) ([]*pb.QueryStatsRequest, error) {
	if w.direction != "" && w.direction != "down" && w.direction != "up" {
		return nil, fmt.Errorf("--direction %q: must be down or up", w.direction)
	}
	last := w.last
	switch {
	case last < 0:
		return nil, fmt.Errorf("--last %v: must be more than 0", last)
	case last == 0:
		last = time.Hour
	}
	request := func(from, to time.Time) *pb.QueryStatsRequest {
		r := &pb.QueryStatsRequest{GroupBy: by, Groups: w.groups, StartTime: timestamppb.New(from), EndTime: timestamppb.New(to), Tins: w.tins, Probe: w.probe}
		step := w.step
		if step == 0 && (w.plot != "" || w.csv) {
			step = max(to.Sub(from)/60, time.Minute).Truncate(time.Second)
		}
		if step != 0 {
			r.Step = durationpb.New(step)
		}
		return r
	}
	if w.around != "" {
		at, err := parseWhen("around", w.around, now)
		if err != nil {
			return nil, err
		}
		after := at.Add(last)
		if after.After(now) {
			after = now
		}
		if !at.Before(after) {
			return nil, fmt.Errorf("--around %s: is not in the past", w.around)
		}
		return []*pb.QueryStatsRequest{request(at.Add(-last), at), request(at, after)}, nil
	}
	to, from := now, time.Time{}
	var err error
	if w.to != "" {
		if to, err = parseWhen("to", w.to, now); err != nil {
			return nil, err
		}
	}
	if from = to.Add(-last); w.from != "" {
		if from, err = parseWhen("from", w.from, now); err != nil {
			return nil, err
		}
	}
	if !from.Before(to) {
		return nil, fmt.Errorf("the window ends at %s, before it begins at %s", to.Format(time.RFC3339), from.Format(time.RFC3339))
	}
	return []*pb.QueryStatsRequest{request(from, to)}, nil
}

// statsOver shows how groups felt over a window.
func (a *app) statsOver(ctx context.Context, by string, w *window) error {
	requests, err := w.requests(by, a.now())
	if err != nil {
		return err
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	var all []*pb.QueryStatsResponse
	for _, r := range requests {
		resp, err := call(ctx, a, conn.telemetry.QueryStats, r)
		if err != nil {
			return err
		}
		if w.direction != "" {
			resp.Series = slices.DeleteFunc(resp.GetSeries(), func(s *pb.StatsSeries) bool { return s.GetDirection() != w.direction })
		}
		all = append(all, resp)
	}
	if w.plot != "" {
		title := fmt.Sprintf("by %s, %s to %s", by, requests[0].GetStartTime().AsTime().Format("2006-01-02 15:04"), requests[0].GetEndTime().AsTime().Format("2006-01-02 15:04 MST"))
		if err := plotSeries(w.plot, title, all[0].GetSeries()); err != nil {
			return err
		}
		a.note("drawn into %s", w.plot)
	}
	switch {
	case a.output == "json" && len(all) == 2:
		return a.printBeforeAfterJSON(all)
	case a.output == "json":
		return a.printJSON(all[0])
	case w.csv:
		return a.statsCSV(all[0])
	case len(all) == 2:
		return a.statsAround(all[0], all[1], w)
	default:
		return a.statsTable(all[0], w)
	}
}

// statsTable prints one line for each series: figures of the whole window if
// it is one step, else a line over time.
func (a *app) statsTable(resp *pb.QueryStatsResponse, w *window) error {
	steps := 0
	for _, s := range resp.GetSeries() {
		steps = max(steps, len(s.GetPoints()))
	}
	empty := "nothing was counted in this window"
	if w.probe {
		empty = "no delay was measured in this window; see cakefleetctl stats --help for who measures one"
	}
	if w.probe && steps <= 1 {
		return a.probeTable(resp, w, empty)
	}
	if steps > 1 {
		head := []string{"GROUP", "WAY", "TIN", "P99 AT MOST", "P99 OVER TIME", "RATE AT MOST", "RATE OVER TIME"}
		if w.probe {
			head = []string{"GROUP", "LINE", "", "P99 AT MOST", "P99 OVER TIME"}
		}
		t := a.table(lead(w.tins, head...)...)
		for _, s := range resp.GetSeries() {
			var p99s, rates []float64
			for _, p := range timeline(s, resp.GetStep().AsDuration()) {
				v, r := math.NaN(), 0.0
				if p != nil {
					r = p.GetRateBps()
					if p.GetP99() != nil {
						v = p.GetP99().AsDuration().Seconds()
					}
				}
				p99s, rates = append(p99s, v), append(rates, r)
			}
			most := 0.0
			for _, v := range p99s {
				most = max(most, noNaN(v))
			}
			cells := []string{groupName(s.GetGroup()), s.GetDirection(), s.GetTin(), delay(time.Duration(most * 1e9)), sparkline(p99s, 40)}
			if w.probe {
				cells[1] = lineOf(s)
			} else {
				cells = append(cells, rate(uint64(slices.Max(rates))), sparkline(rates, 40))
			}
			t.row(lead(w.tins, cells...)...)
		}
		return t.end(a, empty)
	}
	t := a.table(lead(w.tins, "GROUP", "WAY", "TIN", "ROUTERS", "FULL", "RATE", "USED", "DROPS/S", "MARKS/S", "P50", "P90", "P99", "MAX")...)
	for _, s := range resp.GetSeries() {
		for _, p := range s.GetPoints() {
			t.row(lead(w.tins, groupName(s.GetGroup()), s.GetDirection(), s.GetTin(), rounded(p.GetRouters()), rounded(p.GetSaturatedRouters()), rate(uint64(p.GetRateBps())),
				fmt.Sprintf("%.0f %%", 100*p.GetUtilisation()), rounded(p.GetDropsPerSecond()), rounded(p.GetMarksPerSecond()),
				maybeDelay(p.GetP50()), maybeDelay(p.GetP90()), maybeDelay(p.GetP99()), maybeDelay(p.GetMax()))...)
		}
	}
	return a.endStats(t, resp, w, empty)
}

// endStats ends a table of one window, with the distributions if they are wanted.
func (a *app) endStats(t *table, resp *pb.QueryStatsResponse, w *window, empty string) error {
	if err := t.end(a, empty); err != nil || !w.histogram {
		return err
	}
	for _, s := range resp.GetSeries() {
		for _, p := range s.GetPoints() {
			fmt.Fprintf(a.cfg.Stdout, "\n%s\n", seriesName(s))
			a.histogramLines(p.GetSojourn())
		}
	}
	return nil
}

// probeTable prints the delays to hosts of one window.
func (a *app) probeTable(resp *pb.QueryStatsResponse, w *window, empty string) error {
	t := a.table("GROUP", "LINE", "ANSWERED", "LOST", "P50", "P90", "P99", "MAX")
	for _, s := range resp.GetSeries() {
		for _, p := range s.GetPoints() {
			t.row(groupName(s.GetGroup()), lineOf(s), rounded(answered(p)), rounded(p.GetLost()),
				maybeDelay(p.GetP50()), maybeDelay(p.GetP90()), maybeDelay(p.GetP99()), maybeDelay(p.GetMax()))
		}
	}
	return a.endStats(t, resp, w, empty)
}

// answered returns how many echoes came back in a step.
func answered(p *pb.StatsPoint) (n float64) {
	for _, b := range p.GetSojourn() {
		n += b.GetPackets()
	}
	return n
}

// lineOf says how full the line was when a delay was measured.
func lineOf(s *pb.StatsSeries) string {
	switch l := s.GetLoad(); l {
	case "down", "up":
		return l + "load full"
	case "both":
		return "both full"
	case "light":
		return "light load"
	default:
		return l
	}
}

// lead leaves out the third cell, the tin, where tins are not told apart.
func lead(tins bool, cells ...string) []string {
	if tins {
		return cells
	}
	return slices.Delete(cells, 2, 3)
}

func noNaN(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

// timeline returns the points with nil where there is none.
func timeline(s *pb.StatsSeries, step time.Duration) (all []*pb.StatsPoint) {
	for _, p := range s.GetPoints() {
		if n := len(all); n > 0 && step > 0 {
			for missing := int(p.GetTime().AsTime().Sub(lastTime(all)).Round(step)/step) - 1; missing > 0 && len(all) < 10_000; missing-- {
				all = append(all, nil)
			}
		}
		all = append(all, p)
	}
	return all
}

func lastTime(all []*pb.StatsPoint) time.Time {
	for _, p := range slices.Backward(all) {
		if p != nil {
			return p.GetTime().AsTime()
		}
	}
	return time.Time{}
}

// statsAround compares two windows of the same groups.
func (a *app) statsAround(before, after *pb.QueryStatsResponse, w *window) error {
	type pair struct{ before, after *pb.StatsPoint }
	pairs := map[string]*pair{}
	var order []*pb.StatsSeries
	take := func(all []*pb.StatsSeries, set func(*pair, *pb.StatsPoint)) {
		for _, s := range all {
			if len(s.GetPoints()) == 0 {
				continue
			}
			k := seriesName(s)
			if pairs[k] == nil {
				pairs[k] = &pair{}
				order = append(order, s)
			}
			set(pairs[k], s.GetPoints()[len(s.GetPoints())-1])
		}
	}
	take(before.GetSeries(), func(p *pair, at *pb.StatsPoint) { p.before = at })
	take(after.GetSeries(), func(p *pair, at *pb.StatsPoint) { p.after = at })
	slices.SortStableFunc(order, func(x, y *pb.StatsSeries) int { return strings.Compare(seriesName(x), seriesName(y)) })
	head := []string{"GROUP", "WAY", "TIN", "P50 BEFORE", "AFTER", "P99 BEFORE", "AFTER", "CHANGE", "DROPS/S BEFORE", "AFTER", "RATE BEFORE", "AFTER"}
	if w.probe {
		head = []string{"GROUP", "LINE", "", "P50 BEFORE", "AFTER", "P99 BEFORE", "AFTER", "CHANGE", "LOST BEFORE", "AFTER"}
	}
	t := a.table(lead(w.tins, head...)...)
	for _, s := range order {
		p := pairs[seriesName(s)]
		change := ""
		if b, c := p.before.GetP99(), p.after.GetP99(); b != nil && c != nil && b.AsDuration() > 0 {
			change = fmt.Sprintf("x%.2f", c.AsDuration().Seconds()/b.AsDuration().Seconds())
		}
		cells := []string{
			groupName(s.GetGroup()), s.GetDirection(), s.GetTin(), maybeDelay(p.before.GetP50()), maybeDelay(p.after.GetP50()),
			maybeDelay(p.before.GetP99()), maybeDelay(p.after.GetP99()), change,
		}
		if w.probe {
			cells[1] = lineOf(s)
			cells = append(cells, rounded(p.before.GetLost()), rounded(p.after.GetLost()))
		} else {
			cells = append(cells, rounded(p.before.GetDropsPerSecond()), rounded(p.after.GetDropsPerSecond()), rate(uint64(p.before.GetRateBps())), rate(uint64(p.after.GetRateBps())))
		}
		t.row(lead(w.tins, cells...)...)
	}
	return t.end(a, "nothing was counted in these windows")
}

// printBeforeAfterJSON prints two answers as one object.
func (a *app) printBeforeAfterJSON(all []*pb.QueryStatsResponse) error {
	var texts []string
	for _, m := range all {
		b, err := marshal(m)
		if err != nil {
			return failure{err}
		}
		texts = append(texts, string(b))
	}
	return a.printJSONText(fmt.Appendf(nil, `{"before":%s,"after":%s}`, texts[0], texts[1]))
}

// statsCSV prints every step of every series, in the units of the protocol.
func (a *app) statsCSV(resp *pb.QueryStatsResponse) error {
	w := csv.NewWriter(a.cfg.Stdout)
	errs := []error{w.Write([]string{
		"time", "group", "direction", "tin", "routers", "saturated_routers", "rate_bps", "utilisation",
		"packets_per_second", "drops_per_second", "marks_per_second", "p50_seconds", "p90_seconds", "p99_seconds", "max_seconds",
		"load", "answered", "lost",
	})}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	echoes := func(s *pb.StatsSeries, n float64) string {
		if s.GetLoad() == "" {
			return ""
		}
		return number(n)
	}
	seconds := func(d *durationpb.Duration) string {
		if d == nil {
			return ""
		}
		return number(d.AsDuration().Seconds())
	}
	for _, s := range resp.GetSeries() {
		for _, p := range s.GetPoints() {
			errs = append(errs, w.Write([]string{
				p.GetTime().AsTime().Format(time.RFC3339), s.GetGroup(), s.GetDirection(), s.GetTin(), number(p.GetRouters()), number(p.GetSaturatedRouters()),
				number(p.GetRateBps()), number(p.GetUtilisation()), number(p.GetPacketsPerSecond()), number(p.GetDropsPerSecond()), number(p.GetMarksPerSecond()),
				seconds(p.GetP50()), seconds(p.GetP90()), seconds(p.GetP99()), seconds(p.GetMax()),
				s.GetLoad(), echoes(s, answered(p)), echoes(s, p.GetLost()),
			}))
		}
	}
	w.Flush()
	if err := errors.Join(append(errs, w.Error())...); err != nil {
		return failure{err}
	}
	return nil
}

func maybeDelay(d *durationpb.Duration) string {
	if d == nil {
		return ""
	}
	return delay(d.AsDuration())
}

// rounded returns a number with at most two digits behind the point.
func rounded(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 0.01:
		return "< 0.01"
	case v < 10:
		return strconv.FormatFloat(v, 'g', 2, 64)
	default:
		return strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	}
}
