package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/explain"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/query"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Bounds of ListWorst.
const (
	defaultWorst = 20
	maxWorst     = 1000
)

// recently is the window of an explanation.
const recently = 15 * time.Minute

// ListRouterSamples returns what one router counted from report to report.
func (s *TelemetryService) ListRouterSamples(ctx context.Context, req *pb.ListRouterSamplesRequest) (*pb.ListRouterSamplesResponse, error) {
	if _, err := memberByID(s.store, req.GetRouterId()); err != nil {
		return nil, err
	}
	resp := &pb.ListRouterSamplesResponse{}
	for _, sample := range s.table.Samples(req.GetRouterId(), wire.ToTime(req.GetStartTime())) {
		resp.Samples = append(resp.Samples, &pb.RouterSample{
			Time:      wire.FromTime(sample.Time),
			Span:      duration(sample.Span),
			CpuTime:   durationpb.New(sample.CPU),
			Rebooted:  sample.Events&telemetry.Rebooted != 0,
			Restarted: sample.Events&telemetry.Restarted != 0,
			Lost:      sample.Events&telemetry.Lost != 0,
			Down:      fromSample(&sample, rollup.Down),
			Up:        fromSample(&sample, rollup.Up),
		})
	}
	// Each controller has those of the reports that it received.
	theirs := askAll(ctx, s.peers, peerTime, func(ctx context.Context, _ pb.PeerServiceClient, m lead.Member) (*pb.ListRouterSamplesResponse, error) {
		return forward(ctx, s.peers, m, req, pb.TelemetryServiceClient.ListRouterSamples)
	})
	for _, a := range theirs() {
		if a.err != nil && status.Code(a.err) != codes.NotFound { // it may not know of a new router yet
			resp.SilentControllers = append(resp.SilentControllers, a.member.ID)
		}
		resp.Samples = append(resp.Samples, a.resp.GetSamples()...)
	}
	slices.SortStableFunc(resp.GetSamples(), func(a, b *pb.RouterSample) int {
		return a.GetTime().AsTime().Compare(b.GetTime().AsTime())
	})
	return resp, nil
}

func fromSample(s *telemetry.Sample, direction int) *pb.DirectionSample {
	d := &s.Directions[direction]
	if !d.Shaped {
		return nil
	}
	m := &pb.DirectionSample{
		RateBps: uint64(d.Rate), LoadBps: uint64(s.Load(direction)), BacklogBytes: d.BacklogBytes,
		Packets: d.Packets, Drops: d.Drops, Marks: d.Marks,
	}
	if d.Sojourn.Total() > 0 {
		m.SojournP50, m.SojournP99 = durationpb.New(d.Sojourn.Quantile(1, 2)), durationpb.New(d.Sojourn.Quantile(99, 100))
	}
	return m
}

// duration returns nil for 0, which stands for not known.
func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// ways are those to suffer.
var ways = map[pb.WorstBy]telemetry.By{
	pb.WorstBy_WORST_BY_UNSPECIFIED: telemetry.BySuffering, pb.WorstBy_WORST_BY_DELAY: telemetry.BySuffering,
	pb.WorstBy_WORST_BY_DROPS: telemetry.ByDrops, pb.WorstBy_WORST_BY_SATURATION: telemetry.BySaturation,
}

// worstQuery is a ListWorstRequest that was checked.
type worstQuery struct {
	by     telemetry.By
	n      int
	wanted func(id string, p *telemetry.Place) bool
	place  func(*telemetry.Place) string // the group; nil: routers are listed
}

func (s *TelemetryService) worstQuery(req *pb.ListWorstRequest) (q worstQuery, err error) {
	if q.n = int(req.GetLimit()); q.n == 0 {
		q.n = defaultWorst
	}
	if q.n < 0 || q.n > maxWorst {
		return q, badField("limit", fmt.Errorf("limit %d: must be 1 to %d", q.n, maxWorst))
	}
	var ok bool
	if q.by, ok = ways[req.GetBy()]; !ok {
		return q, badField("by", fmt.Errorf("by: value %d is unknown", req.GetBy()))
	}
	q.wanted = func(_ string, p *telemetry.Place) bool {
		return (req.GetPlan() == "" || p.Plan == req.GetPlan()) && (req.GetSite() == "" || p.Site == req.GetSite())
	}
	if kind := req.GetKind(); kind != "" && kind != string(store.KindRouter) {
		if q.place, err = s.placeBy(kind); err != nil {
			return q, badField("kind", err)
		}
	}
	return q, nil
}

// ListWorst returns who suffers most now.
func (s *TelemetryService) ListWorst(ctx context.Context, req *pb.ListWorstRequest) (*pb.ListWorstResponse, error) {
	q, err := s.worstQuery(req)
	if err != nil {
		return nil, statusOf(err)
	}
	moved := s.moved(ctx)
	theirs := askAll(ctx, s.peers, sumTime, func(ctx context.Context, c pb.PeerServiceClient, m lead.Member) (*pb.FindWorstResponse, error) {
		return c.FindWorst(ctx, &pb.FindWorstRequest{Request: req, Elsewhere: moved.from(m.ID)})
	})
	all := s.findWorst(&q, moved.from(s.peers.self()))
	resp := &pb.ListWorstResponse{SilentControllers: moved.silent}
	for _, a := range theirs() {
		if a.err != nil {
			resp.SilentControllers = include(resp.GetSilentControllers(), a.member.ID)
		}
		all = append(all, a.resp.GetWorst()...)
	}
	if q.place != nil {
		all = worstGroups(q.by, all)
	}
	slices.SortFunc(all, func(a, b *pb.Worst) int {
		return cmp.Or(cmp.Compare(b.GetFigure(), a.GetFigure()), cmp.Compare(a.GetName(), b.GetName()))
	})
	resp.Worst = all[:min(q.n, len(all))]
	return resp, nil
}

// findWorst returns who suffers of the routers that report here: the worst, or
// every group in both directions. Those that are elsewhere by now don't count.
func (s *TelemetryService) findWorst(q *worstQuery, elsewhere []string) (all []*pb.Worst) {
	s.leave(elsewhere)
	now := time.Now()
	if q.place != nil {
		return s.sumGroups(q, now)
	}
	for _, w := range s.table.Worst(q.by, q.n, now, q.wanted) {
		d := &w.Directions[w.Direction]
		m := &pb.Worst{
			Name: w.ID, Plan: w.Place.Plan, Site: w.Place.Site, Direction: rollup.Direction(w.Direction), Figure: w.Figure,
			LoadBps: uint64(d.Load), ShapedBps: uint64(d.Shaped), DropsPerSecond: float64(d.Drops), Routers: 1,
			SaturatedRouters: uint32(full(d)),
		}
		if d.SojournP99 > 0 {
			m.SojournP50, m.SojournP99 = durationpb.New(d.SojournP50), durationpb.New(d.SojournP99)
		}
		all = append(all, m)
	}
	return all
}

// full returns 1 for a direction that is full, to be added up.
func full(d *telemetry.Now) int {
	if telemetry.Full(d.Load, d.Shaped) {
		return 1
	}
	return 0
}

// dimensions are what routers may be grouped by.
func (s *TelemetryService) dimensions() []string {
	return append([]string{rollup.ByAll, rollup.ByPlan, rollup.BySite, rollup.ByModel, rollup.ByVersion}, s.table.Config().Labels...)
}

// placeBy returns the group that a place is in.
func (s *TelemetryService) placeBy(by string) (func(p *telemetry.Place) string, error) {
	switch by {
	case rollup.ByAll:
		return func(*telemetry.Place) string { return rollup.ByAll }, nil
	case rollup.ByPlan:
		return func(p *telemetry.Place) string { return p.Plan }, nil
	case rollup.BySite:
		return func(p *telemetry.Place) string { return p.Site }, nil
	case rollup.ByModel:
		return func(p *telemetry.Place) string { return p.Model }, nil
	case rollup.ByVersion:
		return func(p *telemetry.Place) string { return p.Version }, nil
	}
	if i := slices.Index(s.table.Config().Labels, by); i >= 0 {
		return func(p *telemetry.Place) string { return p.Labels[i] }, nil
	}
	return nil, fmt.Errorf("%q is not what routers are grouped by: %s; labels are named with --rollup-labels when the controller starts", by, strings.Join(s.dimensions(), ", "))
}

// sumGroups adds up routers, in both directions.
func (s *TelemetryService) sumGroups(q *worstQuery, now time.Time) (all []*pb.Worst) {
	groups := map[string]*[2]*pb.Worst{}
	s.table.Each(now, func(r *telemetry.Router) bool {
		if !r.Fresh || !q.wanted(r.ID, &r.Place) {
			return true
		}
		name := q.place(&r.Place)
		g := groups[name]
		if g == nil {
			g = &[2]*pb.Worst{{Name: name, Direction: rollup.Direction(rollup.Down)}, {Name: name, Direction: rollup.Direction(rollup.Up)}}
			groups[name] = g
			all = append(all, g[:]...)
		}
		for i, w := range g {
			d := &r.Directions[i]
			w.Routers++
			w.LoadBps += uint64(d.Load)
			w.ShapedBps += uint64(d.Shaped)
			w.DropsPerSecond += float64(d.Drops)
			w.SaturatedRouters += uint32(full(d))
			w.Figure += q.by.Of(d)
		}
		return true
	})
	return all
}

// worstGroups adds up what the controllers have of each group, and returns each
// in its worse direction. A group suffers as much as its routers together.
func worstGroups(by telemetry.By, parts []*pb.Worst) (all []*pb.Worst) {
	type key struct{ name, direction string }
	sums := map[key]*pb.Worst{}
	for _, p := range parts {
		k := key{p.GetName(), p.GetDirection()}
		w := sums[k]
		if w == nil {
			sums[k] = p
			continue
		}
		w.Routers += p.GetRouters()
		w.LoadBps += p.GetLoadBps()
		w.ShapedBps += p.GetShapedBps()
		w.DropsPerSecond += p.GetDropsPerSecond()
		w.SaturatedRouters += p.GetSaturatedRouters()
		w.Figure += p.GetFigure()
	}
	worse := map[string]*pb.Worst{}
	for _, w := range sums {
		if by == telemetry.BySaturation {
			w.Figure = float64(w.GetSaturatedRouters()) / float64(max(w.GetRouters(), 1))
		}
		was := worse[w.GetName()]
		// Of two that are equal it is the download, as with one controller.
		if was == nil || w.GetFigure() > was.GetFigure() || w.GetFigure() == was.GetFigure() && w.GetDirection() == rollup.Direction(rollup.Down) {
			worse[w.GetName()] = w
		}
	}
	for _, w := range worse {
		if w.GetFigure() > 0 {
			all = append(all, w)
		}
	}
	return all
}

// QueryStats returns how groups felt over time.
func (s *TelemetryService) QueryStats(ctx context.Context, req *pb.QueryStatsRequest) (*pb.QueryStatsResponse, error) {
	r := query.Request{
		By: req.GetGroupBy(), Groups: req.GetGroups(), Tins: req.GetTins(), Probe: req.GetProbe(),
		From: wire.ToTime(req.GetStartTime()), To: wire.ToTime(req.GetEndTime()),
	}
	if _, err := s.placeBy(r.By); err != nil {
		return nil, statusOf(badField("group_by", err))
	}
	if req.GetStep() != nil {
		if err := req.GetStep().CheckValid(); err != nil {
			return nil, statusOf(badField("step", fmt.Errorf("step: %w", err)))
		}
		if r.Step = req.GetStep().AsDuration(); r.Step <= 0 {
			return nil, statusOf(badField("step", fmt.Errorf("step %v: must be more than 0", r.Step)))
		}
	}
	if err := r.Validate(time.Now()); err != nil {
		return nil, statusOf(badField("window", err))
	}
	if s.source == nil {
		return nil, status.Error(codes.FailedPrecondition, "this controller keeps no history: start it without --history-retention 0")
	}
	found, err := query.Stats(ctx, s.source, r)
	if err != nil {
		return nil, historyError(err)
	}
	if err := s.groupsExist(&r, found); err != nil {
		return nil, statusOf(badField("groups", err))
	}
	resp := &pb.QueryStatsResponse{Step: durationpb.New(r.Step)}
	for _, series := range found {
		m := &pb.StatsSeries{Group: series.Group, Direction: series.Direction, Tin: series.Tin, Load: series.Load}
		for i := range series.Points {
			m.Points = append(m.Points, fromPoint(&series.Points[i]))
		}
		resp.Series = append(resp.Series, m)
	}
	return resp, nil
}

// groupsExist tells a group in which nothing was counted from one that was
// misspelt.
func (s *TelemetryService) groupsExist(r *query.Request, found []query.Series) error {
	if len(r.Groups) == 0 {
		return nil
	}
	known := map[string]bool{}
	for _, f := range found {
		known[f.Group] = true
	}
	for _, g := range s.table.Groups().Groups() {
		if g.By == r.By {
			known[g.Value] = true
		}
	}
	if r.By == rollup.ByPlan {
		s.store.View(func(st *store.State) {
			for p := range st.Plans("") {
				known[p.Name] = true
			}
		})
	}
	for _, g := range r.Groups {
		if known[g] {
			continue
		}
		names := slices.DeleteFunc(slices.Sorted(maps.Keys(known)), func(n string) bool { return n == "" })
		if len(names) == 0 {
			return fmt.Errorf("no %s %q: no router that reported has one", r.By, g)
		}
		if more := len(names) - 10; more > 0 {
			names = append(names[:10], fmt.Sprintf("and %d more", more))
		}
		return fmt.Errorf("no %s %q; there are %s", r.By, g, strings.Join(names, ", "))
	}
	return nil
}

// historyError is what a caller is told when the history can't be asked.
func historyError(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return statusOf(err)
	}
	return status.Error(codes.Unavailable, err.Error())
}

func fromPoint(p *query.Point) *pb.StatsPoint {
	m := &pb.StatsPoint{
		Time:    wire.FromTime(p.Time),
		RateBps: p.Rate, PacketsPerSecond: p.Packets, DropsPerSecond: p.Drops, MarksPerSecond: p.Marks,
		Utilisation: p.Utilisation, SaturatedRouters: p.Saturated, Routers: p.Routers, Lost: p.Lost,
	}
	if len(p.Sojourn) > 0 {
		m.P50, m.P90, m.P99 = durationpb.New(p.Quantile(0.5)), durationpb.New(p.Quantile(0.9)), durationpb.New(p.Quantile(0.99))
		m.Max = durationpb.New(p.Max())
	}
	for _, b := range p.Sojourn {
		m.Sojourn = append(m.Sojourn, &pb.StatsBucket{Upper: durationpb.New(b.Upper), Packets: b.Packets})
	}
	return m
}

// ExplainRouter says why a line is slow.
func (s *TelemetryService) ExplainRouter(ctx context.Context, req *pb.ExplainRouterRequest) (*pb.ExplainRouterResponse, error) {
	m, err := memberByID(s.store, req.GetRouterId())
	if err != nil {
		return nil, err
	}
	holder, silent := s.holder(ctx, m.router.ID)
	if holder != nil {
		resp, err := forward(ctx, s.peers, *holder, req, pb.TelemetryServiceClient.ExplainRouter)
		if err != nil {
			return nil, err
		}
		resp.SilentControllers = silent
		return resp, nil
	}
	now := time.Now()
	f := s.facts(m, now)
	resp := &pb.ExplainRouterResponse{Window: duration(f.Window), Changes: s.recentChanges(m), SilentControllers: silent}
	for _, g := range explain.Explain(&f) {
		out := &pb.Finding{Cause: string(g.Cause), Sentence: g.Sentence}
		for _, figure := range g.Figures {
			out.Figures = append(out.Figures, &pb.Figure{Name: figure.Name, Value: figure.Value})
		}
		resp.Findings = append(resp.Findings, out)
	}
	return resp, nil
}

// facts gathers what is known of a router.
func (s *TelemetryService) facts(m member, now time.Time) explain.Facts {
	snap := s.hub.Snapshot(m.router.ID, m.desired)
	f := explain.Facts{
		Now: now, Router: m.router.ID, Plan: m.plan,
		Connected: snap.Connected, Since: snap.Since,
		Shaped: m.desired.Link != nil,
	}
	if !snap.Connected && !snap.LastSeen.IsZero() {
		f.Since = snap.LastSeen
	}
	s.store.View(func(st *store.State) {
		if sub, ok := st.Subscriber(m.router.Subscriber); ok {
			l := sub.EditLayers()
			f.Suspended = l.Suspension != "" || l.BillingSuspension != ""
		}
	})
	if r := snap.Reported; r != nil {
		f.Conditions = r.Conditions
		f.Shaped = r.Effective != nil
		f.Sync = syncSentence(snap.Sync, r)
	}
	if raw, _, ok := s.table.Latest(m.router.ID); ok {
		report := &pb.Report{}
		if err := proto.Unmarshal(raw, report); err == nil { // it was decoded once already when it came
			if r, err := wire.ToReport(report); err == nil {
				f.WAN, f.Probe = r.WAN, r.Probe
			}
		}
	}
	if f.Probe != nil {
		f.Usual = s.usualDelay(m)
	}
	s.measure(&f, m.router.ID, now)
	return f
}

// syncSentence says what is not as desired.
func syncSentence(sync fleet.Sync, r *fleet.Reported) string {
	switch sync {
	case fleet.Rejected:
		return "it refused the newest change: " + r.Error
	case fleet.Clamped:
		var all []string
		for _, c := range r.Clamps {
			all = append(all, fmt.Sprintf("%s is %s instead of %s (%s)", c.Field, c.Effective, c.Desired, c.Reason))
		}
		return strings.Join(all, "; ")
	case fleet.Pending:
		return "the newest change is not answered yet"
	default:
		return ""
	}
}

// measure adds up the last minutes.
func (s *TelemetryService) measure(f *explain.Facts, id string, now time.Time) {
	var cpu time.Duration
	for _, sample := range s.table.Samples(id, now.Add(-recently)) {
		f.Window += sample.Span
		cpu += sample.CPU
		f.Losses += sample.CarrierLosses
		f.Comings += sample.Comings
		f.Bypassed += sample.Bypassed
		f.Overflow += sample.Overflows
		for i, d := range []*explain.Direction{&f.Down, &f.Up} {
			from := &sample.Directions[i]
			if !from.Shaped {
				continue
			}
			load := sample.Load(i)
			d.Rate = from.Rate
			d.Peak = max(d.Peak, load)
			d.Delivered += engine.BitsPerSecond(from.Bytes * 8) // bits, until the end
			d.Packets += from.Packets
			d.Drops += from.Drops
			d.Marks += from.Marks
			d.Sojourn.Merge(&from.Sojourn)
			if telemetry.Full(load, from.Rate) {
				d.Full += sample.Span.Seconds()
			}
		}
	}
	if f.Window <= 0 {
		f.Window = 0
		return
	}
	seconds := f.Window.Seconds()
	f.CPU = cpu.Seconds() / seconds
	for _, d := range []*explain.Direction{&f.Down, &f.Up} {
		d.Delivered = engine.BitsPerSecond(float64(d.Delivered) / seconds)
		d.Full /= seconds
	}
}

// mostPeers is how many other routers are looked at for what is usual.
const mostPeers = 50

// usualDelay returns the median at idle, to the same host, of routers with the
// same plan; 0 if none measures it.
func (s *TelemetryService) usualDelay(m member) time.Duration {
	var ids []string
	s.store.View(func(st *store.State) {
		for r := range st.RoutersOfPlan(m.plan, "") {
			if r.ID != m.router.ID {
				ids = append(ids, r.ID)
			}
			if len(ids) == mostPeers {
				break
			}
		}
	})
	var all engine.Histogram
	for _, id := range ids {
		raw, _, ok := s.table.Latest(id)
		if !ok {
			continue
		}
		report := &pb.Report{}
		if err := proto.Unmarshal(raw, report); err != nil {
			continue
		}
		if h, err := wire.ToHistogram(report.GetProbe().GetIdle().GetDelay()); err == nil {
			all.Merge(&h)
		}
	}
	if all.Total() == 0 {
		return 0
	}
	return all.Quantile(1, 2)
}

// recentChanges says when what changed last.
func (s *TelemetryService) recentChanges(m member) []*pb.RecentChange {
	at := map[time.Time]string{}
	s.store.View(func(st *store.State) {
		at[m.router.Updated] = "the record of the router changed"
		if sub, ok := st.Subscriber(m.router.Subscriber); ok {
			at[sub.Updated] = fmt.Sprintf("subscriber %s changed", sub.ID)
			if p, ok := st.Plan(sub.Plan); ok {
				what := fmt.Sprintf("plan %s changed", p.Name)
				if p.Author != "" {
					what += " by " + p.Author
				}
				at[p.Updated] = what
			}
		}
	})
	snap := s.hub.Snapshot(m.router.ID, m.desired)
	if snap.Connected {
		at[snap.Since] = "the router connected"
	} else {
		at[snap.Since] = "the router disconnected"
	}
	delete(at, time.Time{})
	var all []*pb.RecentChange
	for _, t := range slices.SortedFunc(maps.Keys(at), func(a, b time.Time) int { return b.Compare(a) }) {
		all = append(all, &pb.RecentChange{Time: wire.FromTime(t), What: at[t]})
	}
	return all
}
