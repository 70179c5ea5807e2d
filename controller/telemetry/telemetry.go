package telemetry

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// ErrOld means that a report was overtaken by a newer one.
var ErrOld = errors.New("report is not newer than the last")

// ErrUnknown means that a report is a difference from one that isn't known.
// The agent sends a whole one from time to time.
var ErrUnknown = errors.New("report is a difference from one that is not known")

// maxReport is the largest report that is kept, bytes. One with eight tins in
// use both ways has about 8 kB.
const maxReport = 32 << 10

// saturated is the share of its rate from which on a direction counts as full.
const saturated = 0.9

// Full reports whether a direction that delivers load counts as full. One
// without a rate never does.
func Full(load, rate engine.BitsPerSecond) bool {
	return rate > 0 && float64(load) >= saturated*float64(rate)
}

// Config says what is kept.
type Config struct {
	Interval time.Duration // between two reports; a router that missed three is not fresh
	Labels   []string      // labels of subscribers that there are roll-ups of
	Most     int           // groups of a dimension; 0: rollup.DefaultMost
}

// Place says which groups a router is in.
type Place struct {
	Plan, Site     string
	Model, Version string   // of the hardware, of the agent
	Labels         []string // values, in the order of Config.Labels
}

func (p *Place) equal(o *Place) bool {
	return p.Plan == o.Plan && p.Site == o.Site && p.Model == o.Model && p.Version == o.Version && slices.Equal(p.Labels, o.Labels)
}

// Faults counts what was unusual about reports since the controller started.
type Faults struct {
	Reports   uint64 // taken
	Old       uint64 // came twice, late, or from an earlier boot
	Unknown   uint64 // differences from a report that isn't known
	Refused   uint64 // made no sense
	Lost      uint64 // never came
	Reboots   uint64 // starts of agents
	Restarts  uint64 // counters that began again within one boot
	Wraps     uint64 // counters of 32 bits that ran over
	Handovers uint64 // routers that came from another controller, or from before this one started
	Clock     uint64 // routers' clocks that ran more than a second and a tenth apart from ours between two reports
}

// Table has the reports of all routers and the groups' counters.
type Table struct {
	counted func(string, *Counted) // nil: nobody asks
	config  Config
	origin  string
	groups  *rollup.Set
	seed    maphash.Seed
	expect  atomic.Int64      // nanoseconds between two reports, as agents are told
	faults  [10]atomic.Uint64 // in the order of Faults

	mu      sync.RWMutex
	routers map[string]*router // guarded by mu
}

const (
	faultReports = iota
	faultOld
	faultUnknown
	faultRefused
	faultLost
	faultReboots
	faultRestarts
	faultWraps
	faultHandovers
	faultClock
)

// router is what is kept of one router. Its fields are guarded by mu; who holds
// it takes no lock of the table.
type router struct {
	id string

	mu       sync.Mutex
	gone     bool // removed from the table
	silent   bool // not connected since its newest report
	latest   []byte
	received time.Time
	bootID   string
	boots    [3]uint64 // hashes of earlier boots, newest first
	sequence uint64
	uptime   time.Duration
	place    *Place
	groups   []*rollup.Group
	totals   [2]rollup.Counters
	now      [2]Now
	memory   uint64 // of the agent, bytes
	cut      bool   // the shaped interface is not there, down or without carrier
	ring     ring
}

// noReport is a router before its agent started.
var noReport plan.Report

// Now is how one direction of a router is. The smooth figures follow the last
// minute.
type Now struct {
	Shaped      engine.BitsPerSecond // 0 while not shaped
	Load        engine.BitsPerSecond // delivered between the latest two reports
	SojournP50  time.Duration        // of the same time
	SojournP99  time.Duration
	Drops       float32 // a second, smooth
	Utilisation float32 // load as a share of the shaped rate, smooth
	Suffering   float32 // sojourn p99 in seconds × load in bits per second, smooth
}

// New returns an empty table.
func New(c Config) *Table {
	return &Table{config: c, origin: rand.Text(), groups: rollup.NewSet(c.Most), seed: maphash.MakeSeed(), routers: map[string]*router{}}
}

// Config returns what New was given.
func (t *Table) Config() Config { return t.config }

// Origin names this table among all that count what routers report. A new one
// has a new name: it knows nothing of what the one before it had counted.
func (t *Table) Origin() string { return t.origin }

// Expect says that agents were told to report at another interval than that of
// the configuration.
func (t *Table) Expect(interval time.Duration) { t.expect.Store(int64(interval)) }

// Counted is what one router counted between two reports.
type Counted struct {
	Span       time.Duration // between them
	CPU        time.Duration // that the agent took
	Directions *[2]rollup.Delta
	Stats      [2]*engine.Stats // that were reported; nil while a direction is not shaped
}

// OnCount registers a function that is called with everything that is counted,
// with the router locked: it must not call the table and be fast, and not keep
// c. It comes before the first report.
func (t *Table) OnCount(fn func(router string, c *Counted)) { t.counted = fn }

// Groups returns the groups.
func (t *Table) Groups() *rollup.Set { return t.groups }

// Faults returns what was unusual.
func (t *Table) Faults() Faults {
	n := func(i int) uint64 { return t.faults[i].Load() }
	return Faults{
		Reports: n(faultReports), Old: n(faultOld), Unknown: n(faultUnknown), Refused: n(faultRefused), Lost: n(faultLost),
		Reboots: n(faultReboots), Restarts: n(faultRestarts), Wraps: n(faultWraps), Handovers: n(faultHandovers), Clock: n(faultClock),
	}
}

// scratch is the memory that taking in a report needs.
type scratch struct {
	was, now wire.Scratch
	deltas   deltas
	out      []byte
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Ingest takes in a report of a router in the form in which it came. ErrOld and
// ErrUnknown mean that it was not taken; other errors name what makes no sense
// in it.
func (t *Table) Ingest(id string, raw []byte, place Place, now time.Time) error {
	err := t.ingest(id, raw, &place, now)
	switch {
	case err == nil:
		t.faults[faultReports].Add(1)
	case errors.Is(err, ErrOld):
		t.faults[faultOld].Add(1)
	case errors.Is(err, ErrUnknown):
		t.faults[faultUnknown].Add(1)
	default:
		t.faults[faultRefused].Add(1)
	}
	return err
}

func (t *Table) ingest(id string, raw []byte, place *Place, now time.Time) error {
	if len(raw) > maxReport {
		return fmt.Errorf("report has %d bytes, at most %d are allowed", len(raw), maxReport)
	}
	head, err := wire.ReadReportHead(raw)
	if err != nil {
		return err
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	k := t.lock(id)
	defer k.mu.Unlock()

	sameBoot := k.bootID == string(head.BootID)
	switch {
	case sameBoot && head.Sequence <= k.sequence:
		return ErrOld
	case !sameBoot && slices.Contains(k.boots[:], t.hash(head.BootID)):
		return ErrOld
	case head.Since != 0 && (!sameBoot || head.Since != k.sequence):
		return ErrUnknown
	}
	known := k.latest != nil
	if known {
		if err := s.was.Read(k.latest); err != nil {
			return fmt.Errorf("report that is kept: %w", err) // it was written here
		}
		s.now.Copy(&s.was.Report)
	}
	if err := s.now.Read(raw); err != nil {
		return err
	}
	if err := validate(&s.now.Report, &s.was.Report, known); err != nil {
		return err
	}
	t.take(k, s, place, sameBoot, known, now)
	return nil
}

// validate checks what the reader doesn't: whether the configurations make
// sense. Nearly always they are those of the report before.
func validate(r, was *plan.Report, known bool) error {
	check := func(name string, s, was *engine.Stats) error {
		switch {
		case s == nil || known && was != nil && was.Config == s.Config:
			return nil
		case s.Config.Rate > plan.MaxRate:
			return fmt.Errorf("%s rate %d bit/s: above the limit of 100 Gbit/s", name, s.Config.Rate)
		}
		if err := s.Config.Validate(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	return errors.Join(check("down", r.Down, was.Down), check("up", r.Up, was.Up))
}

func (t *Table) hash(boot []byte) uint64 { return maphash.Bytes(t.seed, boot) }

// lock returns a router with its mutex held.
func (t *Table) lock(id string) *router {
	for {
		k := t.lookup(id)
		if k == nil {
			t.mu.Lock()
			if k = t.routers[id]; k == nil {
				k = &router{id: id}
				t.routers[id] = k
			}
			t.mu.Unlock()
		}
		k.mu.Lock()
		if !k.gone {
			return k
		}
		k.mu.Unlock()
	}
}

// take counts what the report in s.now adds to that in s.was.
func (t *Table) take(k *router, s *scratch, place *Place, sameBoot, known bool, now time.Time) {
	r, was := &s.now.Report, &s.was.Report
	if !known {
		*was = plan.Report{}
	}
	var span time.Duration // 0: there is no earlier report to take a rate from
	var events Event
	arrived := k.received
	rest := was
	before := [2]*engine.Stats{was.Down, was.Up}
	count := true
	switch {
	case r.Again != "" && (!known || r.Again != t.origin), !known && r.Sequence > 1:
		// Somebody else has counted up to here.
		t.faults[faultHandovers].Add(1)
		count = false
	case sameBoot:
		span = max(r.Uptime-k.uptime, 0)
		if n := r.Sequence - k.sequence - 1; n > 0 {
			t.faults[faultLost].Add(n)
			events |= Lost
		}
		if drift := now.Sub(arrived) - span; drift.Abs() > time.Second+span/10 && events&Lost == 0 && r.Again == "" {
			t.faults[faultClock].Add(1)
		}
	default:
		before, rest = [2]*engine.Stats{}, &noReport
		if known {
			t.faults[faultReboots].Add(1)
			events |= Rebooted
		}
	}
	if !sameBoot && known {
		copy(k.boots[1:], k.boots[:])
		k.boots[0] = t.hash([]byte(k.bootID))
	}
	if !sameBoot {
		k.bootID = r.BootID
	}
	k.sequence, k.uptime, k.received, k.silent = r.Sequence, r.Uptime, now, false
	k.settle(t, place)

	after := [2]*engine.Stats{r.Down, r.Up}
	if count {
		for i := range after {
			restarts, wraps := s.deltas.take(i, after[i], before[i])
			if restarts > 0 {
				t.faults[faultRestarts].Add(restarts)
				events |= Restarted
			}
			t.faults[faultWraps].Add(wraps)
		}
		s.deltas.takeRest(r, rest)
		if s.deltas.Starts = 0; !sameBoot {
			s.deltas.Starts = 1
		}
		for _, g := range k.groups {
			g.Add(&s.deltas.Report)
		}
		d := &s.deltas.Directions
		if t.counted != nil && span > 0 {
			t.counted(k.id, &Counted{Span: span, CPU: time.Duration(s.deltas.CPU) * time.Microsecond, Directions: d, Stats: after})
		}
		rateSpan := span
		if events&Restarted != 0 {
			rateSpan = 0
		}
		for i := range d {
			k.totals[i].Add(&d[i].Counters)
			k.now[i].take(after[i], &d[i], rateSpan)
		}
		k.ring.add(now, span, s.deltas.CPU, events, s.deltas.upsets, d, &after)
	} else {
		for i := range after {
			k.now[i].take(after[i], &rollup.Delta{}, 0)
		}
	}
	k.memory, k.cut = r.Agent.ResidentBytes, r.WAN != nil && (r.WAN.Index == 0 || !r.WAN.Up || !r.WAN.Carrier)
	r.Again = ""
	s.out = wire.AppendReport(s.out[:0], r, nil)
	k.keep(s.out)
}

// keep keeps the newest report. Memory is made anew only where it has become
// too small or far too large.
func (k *router) keep(raw []byte) {
	if n := len(raw); n > cap(k.latest) || n < cap(k.latest)/2 {
		k.latest = make([]byte, 0, n+n/32)
	}
	k.latest = append(k.latest[:0], raw...)
}

// settle puts the router into the groups of its place.
func (k *router) settle(t *Table, p *Place) {
	if k.place != nil && k.place.equal(p) {
		return
	}
	own := *p
	own.Labels = slices.Clone(p.Labels)
	k.place = &own
	k.groups = append(make([]*rollup.Group, 0, 5+len(p.Labels)),
		t.groups.Group(rollup.ByAll, ""), t.groups.Group(rollup.ByPlan, p.Plan), t.groups.Group(rollup.BySite, p.Site),
		t.groups.Group(rollup.ByModel, p.Model), t.groups.Group(rollup.ByVersion, p.Version))
	for i, name := range t.config.Labels {
		value := ""
		if i < len(p.Labels) {
			value = p.Labels[i]
		}
		k.groups = append(k.groups, t.groups.Group(name, value))
	}
}

// take brings the figures up to date.
func (n *Now) take(s *engine.Stats, d *rollup.Delta, span time.Duration) {
	if s == nil {
		*n = Now{}
		return
	}
	n.Shaped = s.Config.Rate
	if span <= 0 {
		n.Load = 0
		return
	}
	sec := span.Seconds()
	n.Load = engine.BitsPerSecond(float64(d.Bytes) * 8 / sec)
	var h engine.Histogram
	for i := range d.Tins[:d.N] {
		for _, b := range d.Tins[i].Sojourn {
			h[b.Index] += b.Count
		}
	}
	n.SojournP50, n.SojournP99 = h.Quantile(1, 2), h.Quantile(99, 100)
	// Reports come at any interval; the weight of this one is that of its time.
	weight := float32(sec / (sec + 60))
	smooth := func(v *float32, now float64) { *v += (float32(now) - *v) * weight }
	smooth(&n.Drops, float64(d.Drops)/sec)
	smooth(&n.Suffering, n.SojournP99.Seconds()*float64(n.Load))
	if n.Shaped > 0 {
		smooth(&n.Utilisation, min(float64(n.Load)/float64(n.Shaped), 1))
	}
}

func (t *Table) lookup(id string) *router {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.routers[id]
}

// Latest returns the latest report of a router, whole, in the form of the
// protocol, and when it was received; ok is false if there is none.
func (t *Table) Latest(id string) (raw []byte, received time.Time, ok bool) {
	k := t.lookup(id)
	if k == nil {
		return nil, time.Time{}, false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.latest), k.received, k.latest != nil
}

// Samples returns what a router counted between its reports since from, oldest
// first; at most the last fifteen minutes.
func (t *Table) Samples(id string, from time.Time) []Sample {
	k := t.lookup(id)
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []Sample
	k.ring.samples(from, func(s *Sample) { all = append(all, *s) })
	return all
}

// Router is how a router is.
type Router struct {
	ID         string
	Place      Place
	Received   time.Time
	Fresh      bool // its reports come
	Directions [2]Now
	Totals     [2]rollup.Counters // counted by this controller, through reboots
}

// Router returns how a router is; ok is false if it has not reported.
func (t *Table) Router(id string, now time.Time) (r Router, ok bool) {
	k := t.lookup(id)
	if k == nil {
		return Router{}, false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.latest == nil {
		return Router{}, false
	}
	return t.routerLocked(k, now), true
}

// Silence says that a router has gone, so that it is not fresh until it reports
// again.
func (t *Table) Silence(id string) {
	if k := t.lookup(id); k != nil {
		k.mu.Lock()
		k.silent = true
		k.mu.Unlock()
	}
}

func (t *Table) fresh(k *router, now time.Time) bool {
	return !k.silent && now.Sub(k.received) <= 3*max(t.config.Interval, time.Duration(t.expect.Load()))
}

func (t *Table) routerLocked(k *router, now time.Time) Router {
	return Router{ID: k.id, Place: *k.place, Received: k.received, Fresh: t.fresh(k, now), Directions: k.now, Totals: k.totals}
}

// Each calls yield with every router that has reported, in no order, until it
// returns false. No lock is held meanwhile.
func (t *Table) Each(now time.Time, yield func(*Router) bool) {
	for _, k := range t.all() {
		k.mu.Lock()
		if k.latest == nil || k.gone {
			k.mu.Unlock()
			continue
		}
		r := t.routerLocked(k, now)
		k.mu.Unlock()
		if !yield(&r) {
			return
		}
	}
}

func (t *Table) all() []*router {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make([]*router, 0, len(t.routers))
	for _, k := range t.routers {
		all = append(all, k)
	}
	return all
}

// Remove forgets a router. What it has counted stays in its groups.
func (t *Table) Remove(id string) {
	t.mu.Lock()
	k := t.routers[id]
	delete(t.routers, id)
	t.mu.Unlock()
	if k != nil {
		k.mu.Lock()
		k.gone = true
		k.mu.Unlock()
	}
}

// Len returns how many routers have reported.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.routers)
}

// By says what is worst.
type By uint8

// The ways to be worst.
const (
	BySuffering  By = iota // delay × demand: sojourn p99 × load
	ByDrops                // drops a second
	BySaturation           // share of the rate that is used
)

// Of returns the figure that By means.
func (b By) Of(n *Now) float64 {
	switch b {
	case ByDrops:
		return float64(n.Drops)
	case BySaturation:
		return float64(n.Utilisation)
	default:
		return float64(n.Suffering)
	}
}

// Worst is a router and how bad it is.
type Worst struct {
	Router
	Direction int
	Figure    float64
}

// Worst returns the n routers that are worst, worst first, each in its worse
// direction; only fresh ones, with a figure above 0, for which wanted is true;
// nil is all of them.
func (t *Table) Worst(by By, n int, now time.Time, wanted func(id string, p *Place) bool) []Worst {
	worst := make([]Worst, 0, n+1)
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, k := range t.routers {
		k.mu.Lock()
		direction, figure := rollup.Down, by.Of(&k.now[rollup.Down])
		if up := by.Of(&k.now[rollup.Up]); up > figure {
			direction, figure = rollup.Up, up
		}
		if figure > 0 && (len(worst) < n || figure > worst[len(worst)-1].Figure) && t.fresh(k, now) && (wanted == nil || wanted(k.id, k.place)) {
			w := Worst{t.routerLocked(k, now), direction, figure}
			at, _ := slices.BinarySearchFunc(worst, w, func(a, b Worst) int { return cmp.Compare(b.Figure, a.Figure) })
			worst = slices.Insert(worst, at, w)
			worst = worst[:min(len(worst), n)]
		}
		k.mu.Unlock()
	}
	return worst
}

// Gauges are how the routers of a group are.
type Gauges struct {
	Routers    int    // that have reported and were not removed
	Fresh      int    // of them, whose reports come
	Cut        int    // of these, whose shaped interface is not there, down or without carrier
	Memory     uint64 // resident of the agents of those, bytes
	Directions [2]DirectionGauges
}

// DirectionGauges are sums over fresh routers.
type DirectionGauges struct {
	Shaped    engine.BitsPerSecond // sum of the rates
	Load      engine.BitsPerSecond // sum of what is delivered
	Saturated int                  // routers that use nine tenths of their rate or more
}

// Utilisation returns what is delivered as a share of what could be.
func (g *DirectionGauges) Utilisation() float64 {
	if g.Shaped == 0 {
		return 0
	}
	return float64(g.Load) / float64(g.Shaped)
}

// Gauges returns how the routers of every group are, and lets go of what is
// too old of the silent ones. It looks at every router.
func (t *Table) Gauges(now time.Time) map[rollup.Key]*Gauges {
	of := map[*rollup.Group]*Gauges{}
	for _, k := range t.all() {
		k.mu.Lock()
		fresh := t.fresh(k, now)
		if !fresh {
			k.ring.trim(now)
		}
		for _, g := range k.groups {
			s := of[g]
			if s == nil {
				s = &Gauges{}
				of[g] = s
			}
			s.Routers++
			if !fresh {
				continue
			}
			s.Fresh++
			s.Memory += k.memory
			if k.cut {
				s.Cut++
			}
			for i := range k.now {
				n, d := &k.now[i], &s.Directions[i]
				d.Shaped += n.Shaped
				d.Load += n.Load
				if Full(n.Load, n.Shaped) {
					d.Saturated++
				}
			}
		}
		k.mu.Unlock()
	}
	all := make(map[rollup.Key]*Gauges, len(of))
	for g, s := range of {
		all[g.Key] = s
	}
	return all
}
