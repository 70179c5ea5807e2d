// Package telemetry keeps what routers report: the latest report of each, and
// counters that go on through reboots, which add up over any set of routers.
//
// Reports are cumulative within one boot of the agent. What an earlier boot
// counted is kept as a base that is added to what the present one counts. A
// report that comes late or twice changes nothing; one that is lost costs
// resolution and no totals. Everything is in memory: totals begin with the
// controller.
//
// A Table may be used from any goroutine.
package telemetry

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// ErrOld means that a report was overtaken by a newer one.
var ErrOld = errors.New("report is not newer than the last")

// Sums are sums over routers of one direction.
type Sums struct {
	Bytes, Packets uint64 // delivered
	Drops          uint64
	Marks          uint64
	Rate           engine.BitsPerSecond // of delivery over the latest two reports
	Capacity       engine.BitsPerSecond // shaped rates
	Sojourn        engine.Histogram
}

// Table has the reports of all routers.
type Table struct {
	fresh time.Duration

	mu      sync.RWMutex
	routers map[string]*router // guarded by mu
}

// router is what is kept of one router. Its fields are guarded by mu, which is
// taken after the table's is released.
type router struct {
	mu       sync.Mutex
	latest   []byte // opaque to this package
	received time.Time
	bootID   string
	sequence uint64
	uptime   time.Duration
	down, up direction
}

// direction is one shaped direction of one router. Its total is base + last.
type direction struct {
	base, last counters
	rate       engine.BitsPerSecond
	shaped     engine.BitsPerSecond // 0 while not shaped
}

// counters only count up within one boot. The sojourn counts have no trailing
// zeros, as most routers use few of the buckets.
type counters struct {
	bytes, packets, drops, marks uint64
	sojourn                      []uint64
}

// New returns an empty table. interval is the time between two reports; the
// rate of a router that missed three counts as 0.
func New(interval time.Duration) *Table {
	return &Table{fresh: 3 * interval, routers: map[string]*router{}}
}

// Ingest takes in a report of a router. latest is the report in the form in
// which Latest returns it; the table keeps it. ErrOld means that it was not
// taken; other errors name what makes no sense in the report.
func (t *Table) Ingest(id string, r *plan.Report, latest []byte, now time.Time) error {
	if err := errors.Join(validate("down", r.Down), validate("up", r.Up)); err != nil {
		return err
	}
	k := t.entry(id)
	k.mu.Lock()
	defer k.mu.Unlock()
	sameBoot := k.bootID == r.BootID
	if sameBoot && r.Sequence <= k.sequence {
		return ErrOld
	}
	var span time.Duration // 0: there is no earlier report to take a rate from
	if sameBoot {
		span = r.Uptime - k.uptime
	}
	k.down.take(r.Down, sameBoot, span)
	k.up.take(r.Up, sameBoot, span)
	k.latest, k.received = latest, now
	k.bootID, k.sequence, k.uptime = r.BootID, r.Sequence, r.Uptime
	return nil
}

func validate(name string, s *engine.Stats) error {
	if s == nil {
		return nil
	}
	if s.Config.Rate > plan.MaxRate {
		return fmt.Errorf("%s rate %d bit/s: above the limit of 100 Gbit/s", name, s.Config.Rate)
	}
	if err := s.Config.Validate(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func (t *Table) entry(id string) *router {
	if k := t.lookup(id); k != nil {
		return k
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.routers[id]
	if k == nil {
		k = &router{}
		t.routers[id] = k
	}
	return k
}

func (t *Table) lookup(id string) *router {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.routers[id]
}

// Latest returns the latest report of a router as it was given to Ingest, and
// when it was received; ok is false if there is none.
func (t *Table) Latest(id string) (latest []byte, received time.Time, ok bool) {
	k := t.lookup(id)
	if k == nil {
		return nil, time.Time{}, false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.latest, k.received, k.latest != nil
}

// Add adds what a router counted to sums. Its rate and capacity are added only
// if it is connected; of the others nobody knows what they do now.
func (t *Table) Add(id string, connected bool, now time.Time, down, up *Sums) {
	k := t.lookup(id)
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	fresh := connected && now.Sub(k.received) <= t.fresh
	k.down.addTo(down, connected, fresh)
	k.up.addTo(up, connected, fresh)
}

// Remove forgets a router.
func (t *Table) Remove(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.routers, id)
}

// take takes in the counters s; nil while the direction is not shaped. span is
// the time since the report before, by the router's monotonic clock.
func (d *direction) take(s *engine.Stats, sameBoot bool, span time.Duration) {
	if !sameBoot {
		d.restart()
	}
	if s == nil {
		d.rate, d.shaped = 0, 0
		return
	}
	c := count(s)
	// A data plane that was closed and opened again within one boot begins at
	// 0 too.
	if c.bytes < d.last.bytes || c.packets < d.last.packets {
		d.restart()
		span = 0
	}
	d.rate, d.shaped = 0, s.Config.Rate
	if span > 0 {
		d.rate = engine.BitsPerSecond(float64(c.bytes-d.last.bytes) * 8 / span.Seconds())
	}
	d.last = c
}

// restart keeps what was counted, because the counters begin again.
func (d *direction) restart() {
	d.base.add(&d.last)
	d.last = counters{}
}

func (d *direction) addTo(s *Sums, connected, fresh bool) {
	for _, c := range []*counters{&d.base, &d.last} {
		s.Bytes += c.bytes
		s.Packets += c.packets
		s.Drops += c.drops
		s.Marks += c.marks
		for i, n := range c.sojourn {
			s.Sojourn[i] += n
		}
	}
	if connected {
		s.Capacity += d.shaped
	}
	if fresh {
		s.Rate += d.rate
	}
}

// count returns the counters in s.
func count(s *engine.Stats) counters {
	c := counters{bytes: s.SentBytes, packets: s.SentPackets, drops: s.Drops}
	var h engine.Histogram
	for i := range s.Tins[:s.NumTins] {
		c.marks += s.Tins[i].Marks
		h.Merge(&s.Tins[i].Sojourn)
	}
	n := len(h)
	for n > 0 && h[n-1] == 0 {
		n--
	}
	c.sojourn = append([]uint64(nil), h[:n]...)
	return c
}

func (c *counters) add(o *counters) {
	c.bytes += o.bytes
	c.packets += o.packets
	c.drops += o.drops
	c.marks += o.marks
	if len(c.sojourn) < len(o.sojourn) {
		c.sojourn = append(c.sojourn, make([]uint64, len(o.sojourn)-len(c.sojourn))...)
	}
	for i, n := range o.sojourn {
		c.sojourn[i] += n
	}
}
