// Package rollup sums up what routers count by group: by plan, site, model,
// version of the agent, and by the labels that the operator names.
//
// # Words
//
// A dimension says by what routers are grouped, such as "plan"; a group is one
// value of it, such as the plan gold. Counts are what routers counted between
// two reports. They are added when a report arrives, to the groups that the
// router is in then, so that a group's counters only go up: a router that moves
// to another plan takes nothing of what it has counted along. Gauges say how the
// routers of a group are now, and are made from all routers each time.
//
// Sojourn times are added bucket by bucket, so that percentiles are those of
// all packets of all routers, never averages of percentiles.
//
// # Bounds
//
// A dimension has at most a number of groups. What comes beyond goes to the
// group Other and is counted, so that a label with a value for each subscriber
// costs as much as any other.
//
// # Concurrency
//
// All methods may be called from any goroutine.
package rollup

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cakefleet/cakefleet/engine"
)

// Dimensions that there always are. ByAll has one group, with all routers.
const (
	ByAll     = "all"
	ByPlan    = "plan"
	BySite    = "site"
	ByModel   = "model"
	ByVersion = "version"
)

// Other is the group of what would be more groups than are allowed.
const Other = "other"

// DefaultMost is how many groups a dimension has at most if nothing else is said.
const DefaultMost = 1000

// Directions, as indices and in words.
const (
	Down = iota
	Up
)

// Direction returns the word for a direction.
func Direction(i int) string { return [2]string{"down", "up"}[i] }

// Counters count packets on their way. For a direction they count what was
// delivered, for a tin what came into it, as tc does for both.
type Counters struct {
	Bytes, Packets uint64
	Drops          uint64 // by the queue control, the memory limit and the ACK filter
	Marks          uint64
}

// Add adds o to c.
func (c *Counters) Add(o *Counters) {
	c.Bytes += o.Bytes
	c.Packets += o.Packets
	c.Drops += o.Drops
	c.Marks += o.Marks
}

// Cell is what is counted of one direction, or of one tin of it.
type Cell struct {
	Counters
	Sojourn engine.Histogram
}

// Bucket is one bucket of a histogram in which something was counted.
type Bucket struct {
	Index uint8
	Count uint64
}

// TinDelta is what one tin counted between two reports.
type TinDelta struct {
	Counters
	Name    string
	Sojourn []Bucket
}

// Delta is what one direction of one router counted between two reports.
type Delta struct {
	Counters
	Tins [engine.MaxTins]TinDelta
	N    int // of the tins
}

// Load is how full a line was when a delay was measured across it.
type Load int

// Loads, see plan.ProbeStats.
const (
	Idle Load = iota
	Light
	DownLoaded
	UpLoaded
	BothLoaded
	Loads int = iota
)

// String returns the word for a load.
func (l Load) String() string { return [Loads]string{"idle", "light", "down", "up", "both"}[l] }

// Echoes counts delays to a host that were measured at one load.
type Echoes struct {
	Delay engine.Histogram // of those that were answered
	Lost  uint64
}

// EchoDelta is what was measured at one load between two reports.
type EchoDelta struct {
	Delay []Bucket
	Lost  uint64
}

// Report is what one router counted between two reports.
type Report struct {
	Directions    [2]Delta
	Echoes        [Loads]EchoDelta
	CPU           uint64 // microseconds that the agent used
	Starts        uint64 // of the agent
	CarrierLosses uint64 // of the shaped interface
}

// Key names a group.
type Key struct{ By, Value string }

// Group is one group of routers.
type Group struct {
	Key

	mu         sync.Mutex // guards what follows
	directions [2]direction
	sums       Counts
	echoes     *[Loads]Echoes // nil until a delay is measured, which few ask for
}

// Counts are the counters of a group that have no direction.
type Counts struct {
	CPU           uint64 // microseconds that the agents used
	Reports       uint64
	Starts        uint64 // of agents
	CarrierLosses uint64 // of shaped interfaces
}

type direction struct {
	total Cell
	tins  []namedCell // in order of arrival; few
}

type namedCell struct {
	name string
	Cell
}

// Add adds what one router counted.
func (g *Group) Add(r *Report) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sums.Reports++
	g.sums.CPU += r.CPU
	g.sums.Starts += r.Starts
	g.sums.CarrierLosses += r.CarrierLosses
	for i := range r.Directions {
		g.directions[i].add(&r.Directions[i])
	}
	for i := range r.Echoes {
		g.addEchoes(Load(i), &r.Echoes[i])
	}
}

func (g *Group) addEchoes(l Load, d *EchoDelta) {
	if len(d.Delay) == 0 && d.Lost == 0 {
		return
	}
	if g.echoes == nil {
		g.echoes = &[Loads]Echoes{}
	}
	e := &g.echoes[l]
	e.Lost += d.Lost
	for _, b := range d.Delay {
		e.Delay[b.Index] += b.Count
	}
}

func (g *direction) add(d *Delta) {
	g.total.Add(&d.Counters)
	for i := range d.Tins[:d.N] {
		t := &d.Tins[i]
		if t.Counters == (Counters{}) && len(t.Sojourn) == 0 {
			continue
		}
		c := g.tin(t.Name)
		c.Add(&t.Counters)
		for _, b := range t.Sojourn {
			c.Sojourn[b.Index] += b.Count
			g.total.Sojourn[b.Index] += b.Count
		}
	}
}

func (g *direction) tin(name string) *Cell {
	for i := range g.tins {
		if g.tins[i].name == name {
			return &g.tins[i].Cell
		}
	}
	g.tins = append(g.tins, namedCell{name: name})
	return &g.tins[len(g.tins)-1].Cell
}

// Sum is what was counted of one direction of a group since the controller
// started.
type Sum struct {
	Cell
	Tins map[string]Cell // by the names of TinName; only those that counted something
}

// Sums are the counters of a group.
type Sums struct {
	Counts
	Directions [2]Sum
	Echoes     *[Loads]Echoes // nil if no delay was measured
}

// Sums returns the group's counters.
func (g *Group) Sums() Sums {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := Sums{Counts: g.sums}
	if g.echoes != nil {
		echoes := *g.echoes
		s.Echoes = &echoes
	}
	for i := range g.directions {
		d := &g.directions[i]
		s.Directions[i] = Sum{Cell: d.total, Tins: make(map[string]Cell, len(d.tins))}
		for j := range d.tins {
			s.Directions[i].Tins[d.tins[j].name] = d.tins[j].Cell
		}
	}
	return s
}

// Set has the groups of all dimensions.
type Set struct {
	most     int
	overflow atomic.Uint64

	mu     sync.RWMutex
	groups map[Key]*Group // guarded by mu
	counts map[string]int // guarded by mu; groups of each dimension, without Other
}

// NewSet returns a set without groups. A dimension will have at most that many;
// 0 is DefaultMost.
func NewSet(most int) *Set {
	return &Set{most: cmp.Or(most, DefaultMost), groups: map[Key]*Group{}, counts: map[string]int{}}
}

// Group returns a group, which is made if there is none yet, or Other of the
// same dimension if there are as many as allowed. The empty value is a group
// too: routers without a plan.
func (s *Set) Group(by, value string) *Group {
	k := Key{by, value}
	s.mu.RLock()
	g := s.groups[k]
	s.mu.RUnlock()
	if g != nil {
		return g
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.groups[k]; g != nil {
		return g
	}
	if value != Other {
		if s.counts[by] >= s.most {
			s.overflow.Add(1)
			k.Value = Other
			if g := s.groups[k]; g != nil {
				return g
			}
		} else {
			s.counts[by]++
		}
	}
	g = &Group{Key: k}
	s.groups[k] = g
	return g
}

// Overflow returns how often a group was not made because there were too many
// of its dimension.
func (s *Set) Overflow() uint64 { return s.overflow.Load() }

// Drop forgets groups that hold nothing wanted any more, which makes room for
// others.
func (s *Set) Drop(unwanted func(Key) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.groups {
		if unwanted(k) {
			delete(s.groups, k)
			if k.Value != Other {
				s.counts[k.By]--
			}
		}
	}
}

// Groups returns all groups in order of dimension and value.
func (s *Set) Groups() []*Group {
	s.mu.RLock()
	all := make([]*Group, 0, len(s.groups))
	for _, g := range s.groups {
		all = append(all, g)
	}
	s.mu.RUnlock()
	slices.SortFunc(all, func(a, b *Group) int { return cmp.Or(cmp.Compare(a.By, b.By), cmp.Compare(a.Value, b.Value)) })
	return all
}

// TinName returns the name of a tin by its place in the list and the mode, as
// tc prints it.
func TinName(mode engine.TinMode, place int) string {
	names := []string{"Bulk", "Best Effort", "Video", "Voice"}
	switch {
	case mode == engine.Diffserv3 && place == 2:
		return "Voice"
	case mode == engine.Diffserv3 && place < 2, (mode == engine.Diffserv4 || mode == engine.Cake3) && place < 4:
		return names[place]
	default:
		return tinNumbers[place&(engine.MaxTins-1)]
	}
}

var tinNumbers = func() (names [engine.MaxTins]string) {
	for i := range names {
		names[i] = fmt.Sprintf("Tin %d", i)
	}
	return names
}()
