package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/engine"
)

// writer writes steps. It remembers the references of series, so that their
// labels are made once.
type writer struct {
	config  *Config
	bounds  []float64
	groups  map[rollup.Key]*groupSeries
	routers map[string]*routerSeries
	idle    map[rollup.Key]int   // steps for which a group has had no routers
	began   map[rollup.Key]int64 // when a group's counters began; not forgotten with the references
	begun   map[cellKey]bool     // whose first sample was written; not forgotten with the references
	next    time.Time            // when routers' own series are due
	unkept  int                  // routers without series, because of the bound
}

// dropAfter is for how long a group without routers is kept.
const dropAfter = time.Hour

// one is a series.
type one struct {
	ref    storage.SeriesRef
	labels labels.Labels
}

type groupSeries struct {
	routers, reporting, reports, start one
	cpu, memory, starts, cut, losses   one
	directions                         [2]directionSeries
	echoes                             *[rollup.Loads]echoSeries // nil until a delay is measured
}

type directionSeries struct {
	cellSeries
	shaped, load, utilisation, saturated one
	tins                                 map[string]*cellSeries
}

// cellKey names a cell. Without a tin it is that of the direction; with a load
// it is what a delay was measured at.
type cellKey struct {
	rollup.Key
	direction int
	tin, load string
}

type cellSeries struct{ bytes, packets, drops, marks, sojourn one }

type echoSeries struct{ delay, lost one }

type routerSeries struct {
	seen    bool // in this step
	sent    [2]one
	sojourn [2]one
}

func newWriter(c *Config) *writer {
	w := &writer{config: c, bounds: bounds(), began: map[rollup.Key]int64{}, begun: map[cellKey]bool{}}
	w.reset()
	return w
}

// reset forgets references: they are those of another database.
func (w *writer) reset() {
	w.groups, w.routers, w.idle = map[rollup.Key]*groupSeries{}, map[string]*routerSeries{}, map[rollup.Key]int{}
}

// step is what is written at one time. It is written in parts, as what a part
// takes until it is written, and buffers that stay, grow with it.
type step struct {
	begin   func() storage.Appender // of a part
	app     storage.Appender        // of this part
	samples int                     // in it
	at      int64
	errs    []error
}

// partSamples is how many samples are in a part, a little more or less.
const partSamples = 1000

// part begins another part if this one is large enough. It is called between
// groups, so that none is written by halves.
func (s *step) part() {
	if s.samples < partSamples || len(s.errs) > 0 {
		return
	}
	if err := s.app.Commit(); err != nil {
		s.errs = append(s.errs, fmt.Errorf("write a step: %w", err))
	}
	s.app, s.samples = s.begin(), 0
}

// write writes a step. unkept is how many routers have no series because of the
// bound. After an error a part of the step may have been written.
func (w *writer) write(ctx context.Context, db storage.Appendable, now time.Time) (unkept int, err error) {
	begin := func() storage.Appender { return db.Appender(ctx) }
	s := step{begin: begin, app: begin(), at: now.UnixMilli()}
	gauges := w.config.Table.Gauges(now)
	for _, g := range w.config.Table.Groups().Groups() {
		w.group(&s, g, gauges[g.Key])
		s.part()
	}
	if now.Before(w.next) && w.next.Sub(now) <= w.config.Every { // else the clock was set back
		unkept = w.unkept
	} else {
		unkept = w.eachRouter(&s, now)
		w.unkept, w.next = unkept, now.Truncate(w.config.Every).Add(w.config.Every)
	}
	if len(s.errs) > 0 {
		w.reset()
		return unkept, errors.Join(s.errs[0], s.app.Rollback())
	}
	if err := s.app.Commit(); err != nil {
		// References of series that were new in it may name nothing now.
		w.reset()
		return unkept, fmt.Errorf("write a step: %w", err)
	}
	w.drop(gauges)
	return unkept, nil
}

// drop forgets groups that have had no routers for long.
func (w *writer) drop(gauges map[rollup.Key]*telemetry.Gauges) {
	most := int(dropAfter / w.config.Step)
	w.config.Table.Groups().Drop(func(k rollup.Key) bool {
		if gauges[k] != nil {
			delete(w.idle, k)
			return false
		}
		w.idle[k]++
		if w.idle[k] <= most {
			return false
		}
		delete(w.idle, k)
		delete(w.groups, k)
		delete(w.began, k)
		maps.DeleteFunc(w.begun, func(c cellKey, _ bool) bool { return c.Key == k })
		return true
	})
}

func (w *writer) group(s *step, g *rollup.Group, now *telemetry.Gauges) {
	k := w.groups[g.Key]
	if k == nil {
		k = w.newGroup(g.Key)
		w.groups[g.Key] = k
	}
	if now == nil {
		now = &telemetry.Gauges{}
	}
	if w.began[g.Key] == 0 {
		w.began[g.Key] = s.at
	}
	sums := g.Sums()
	s.value(&k.routers, float64(now.Routers))
	s.value(&k.reporting, float64(now.Fresh))
	s.value(&k.cpu, float64(sums.CPU)/1e6)
	s.value(&k.memory, float64(now.Memory))
	s.value(&k.starts, float64(sums.Starts))
	s.value(&k.cut, float64(now.Cut))
	s.value(&k.losses, float64(sums.CarrierLosses))
	if sums.Echoes != nil {
		w.echoes(s, g.Key, k, sums.Echoes)
	}
	s.value(&k.reports, float64(sums.Reports))
	s.value(&k.start, float64(w.began[g.Key])/1e3)
	for i := range sums.Directions {
		sum, d, n := &sums.Directions[i], &k.directions[i], &now.Directions[i]
		w.cell(s, &d.cellSeries, &sum.Cell, cellKey{Key: g.Key, direction: i})
		s.value(&d.shaped, float64(n.Shaped))
		s.value(&d.load, float64(n.Load))
		s.value(&d.utilisation, n.Utilisation())
		s.value(&d.saturated, float64(n.Saturated))
		for name, c := range sum.Tins {
			t := d.tins[name]
			if t == nil {
				t = w.newCell([5]string{TinBytes, TinPackets, TinDropped, TinMarked, TinSojourn},
					LabelBy, g.By, GroupLabel(g.By), g.Value, LabelDirection, rollup.Direction(i), LabelTin, name)
				d.tins[name] = t
			}
			w.cell(s, t, &c, cellKey{Key: g.Key, direction: i, tin: name})
		}
	}
}

// echoes writes the delays that were measured.
func (w *writer) echoes(s *step, g rollup.Key, k *groupSeries, sums *[rollup.Loads]rollup.Echoes) {
	if k.echoes == nil {
		k.echoes = &[rollup.Loads]echoSeries{}
		for l := range k.echoes {
			own := append(groupLabels(g), LabelLoad, rollup.Load(l).String())
			k.echoes[l] = echoSeries{
				delay: one{labels: w.config.series(ProbeDelay, own...)},
				lost:  one{labels: w.config.series(ProbeLost, own...)},
			}
		}
	}
	for l := range sums {
		e := &k.echoes[l]
		if c := (cellKey{Key: g, load: rollup.Load(l).String()}); !w.begun[c] {
			w.begun[c] = true
			s.first(&e.lost, w.before(s))
			s.firstHistogram(&e.delay, w.before(s), w.bounds)
		}
		s.value(&e.lost, float64(sums[l].Lost))
		s.histogram(&e.delay, native(&sums[l].Delay, w.bounds))
	}
}

// groupLabels returns the labels that name a group.
func groupLabels(g rollup.Key) []string {
	own := []string{LabelBy, g.By}
	if g.By != rollup.ByAll {
		own = append(own, GroupLabel(g.By), g.Value)
	}
	return slices.Clip(own)
}

func (w *writer) newGroup(g rollup.Key) *groupSeries {
	own := groupLabels(g)
	series := func(metric string, more ...string) one {
		return one{labels: w.config.series(metric, append(own, more...)...)}
	}
	k := &groupSeries{
		routers: series(Routers), reporting: series(Reporting), reports: series(Reports), start: series(Start),
		cpu: series(AgentCPU), memory: series(AgentRSS), starts: series(Starts), cut: series(Cut), losses: series(Losses),
	}
	for i := range k.directions {
		way := []string{LabelDirection, rollup.Direction(i)}
		k.directions[i] = directionSeries{
			cellSeries: *w.newCell([5]string{SentBytes, SentPackets, Dropped, Marked, Sojourn}, append(own, way...)...),
			shaped:     series(Shaped, way...),
			load:       series(Load, way...), utilisation: series(Utilisation, way...), saturated: series(Saturated, way...),
			tins: map[string]*cellSeries{},
		}
	}
	return k
}

func (w *writer) newCell(metrics [5]string, pairs ...string) *cellSeries {
	s := func(i int) one { return one{labels: w.config.series(metrics[i], pairs...)} }
	return &cellSeries{s(0), s(1), s(2), s(3), s(4)}
}

// cell writes the counters of a cell. What comes before the first sample of one
// is a sample of 0: PromQL's increase() counts from sample to sample, and would
// miss what was counted until then.
func (w *writer) cell(s *step, c *cellSeries, v *rollup.Cell, k cellKey) {
	if !w.begun[k] {
		w.begun[k] = true
		for _, o := range []*one{&c.bytes, &c.packets, &c.drops, &c.marks} {
			s.first(o, w.before(s))
		}
		s.firstHistogram(&c.sojourn, w.before(s), w.bounds)
	}
	s.value(&c.bytes, float64(v.Bytes))
	s.value(&c.packets, float64(v.Packets))
	s.value(&c.drops, float64(v.Drops))
	s.value(&c.marks, float64(v.Marks))
	s.histogram(&c.sojourn, native(&v.Sojourn, w.bounds))
}

// before is when the step before s was.
func (w *writer) before(s *step) int64 { return s.at - w.config.Step.Milliseconds() }

// eachRouter writes the routers' own series, those that have some first.
func (w *writer) eachRouter(s *step, now time.Time) (unkept int) {
	if w.config.Routers == 0 {
		return 0
	}
	w.config.Table.Each(now, func(r *telemetry.Router) bool {
		k := w.routers[r.ID]
		if k == nil {
			if len(w.routers) >= w.config.Routers {
				unkept++
				return true
			}
			k = &routerSeries{}
			for i := range k.sent {
				way := []string{LabelRouter, r.ID, LabelDirection, rollup.Direction(i)}
				k.sent[i].labels = w.config.series(RouterSentBytes, way...)
				k.sojourn[i].labels = w.config.series(RouterSojourn, way...)
			}
			w.routers[r.ID] = k
		}
		k.seen = true
		for i := range k.sent {
			s.value(&k.sent[i], float64(r.Totals[i].Bytes))
			if r.Fresh {
				s.value(&k.sojourn[i], r.Directions[i].SojournP99.Seconds())
			}
		}
		s.part()
		return true
	})
	for id, k := range w.routers {
		if !k.seen {
			delete(w.routers, id)
		}
		k.seen = false
	}
	return unkept
}

// value appends a sample. A step that doesn't come after the last, because the
// clock was set back, is an error for every sample; the first one tells.
func (s *step) value(o *one, v float64) {
	ref, err := s.app.Append(o.ref, o.labels, s.at, v)
	s.note(o, ref, err)
}

func (s *step) histogram(o *one, h *histogram.Histogram) {
	ref, err := s.app.AppendHistogram(o.ref, o.labels, s.at, h, nil)
	s.note(o, ref, err)
}

// first appends a 0.
func (s *step) first(o *one, at int64) {
	ref, err := s.app.Append(o.ref, o.labels, at, 0)
	s.noteFirst(o, ref, err)
}

func (s *step) firstHistogram(o *one, at int64, bounds []float64) {
	ref, err := s.app.AppendHistogram(o.ref, o.labels, at, native(&engine.Histogram{}, bounds), nil)
	s.noteFirst(o, ref, err)
}

// noteFirst is note for a sample of 0. There is no room for it where a
// controller that was started again has written since; going back to less tells
// the same there.
func (s *step) noteFirst(o *one, ref storage.SeriesRef, err error) {
	if errors.Is(err, storage.ErrOutOfOrderSample) || errors.Is(err, storage.ErrDuplicateSampleForTimestamp) || errors.Is(err, storage.ErrOutOfBounds) {
		return
	}
	s.note(o, ref, err)
}

func (s *step) note(o *one, ref storage.SeriesRef, err error) {
	if err != nil {
		if len(s.errs) == 0 {
			s.errs = append(s.errs, fmt.Errorf("append %s: %w", o.labels, err))
		}
		return
	}
	o.ref = ref
	s.samples++
}
