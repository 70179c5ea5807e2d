package telemetry

import (
	"math"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// none is a direction before anything was counted.
var none engine.Stats

// deltas has the memory for what one report counts.
type deltas struct {
	rollup.Report
	upsets  Upsets
	buckets [2][engine.MaxTins][engine.HistogramBuckets]rollup.Bucket
	echoes  [rollup.Loads][engine.HistogramBuckets]rollup.Bucket
}

// take fills in what direction i counted from was to s. was is nil if counters
// began at 0 with a boot, s if the direction isn't shaped. It returns how many
// counters had begun again or had run over.
func (d *deltas) take(i int, s, was *engine.Stats) (restarts, wraps uint64) {
	out := &d.Directions[i]
	out.N, out.Counters = 0, rollup.Counters{}
	if s == nil {
		return 0, 0
	}
	if was == nil {
		was = &none
	}
	// Bytes have 64 bits everywhere: they go back only if the data plane was made
	// anew, and then everything begins at 0.
	if s.SentBytes < was.SentBytes {
		was, restarts = &none, 1
	}
	c := counter{wraps: &wraps}
	out.Bytes = s.SentBytes - was.SentBytes
	out.Packets = c.from(was.SentPackets, s.SentPackets)
	out.Drops = c.from(was.Drops, s.Drops)
	out.N = s.NumTins
	for place := range s.Tins[:s.NumTins] {
		t := &s.Tins[place]
		before := tinBefore(was, s, place)
		if t.Bytes < before.Bytes {
			before = &none.Tins[0]
		}
		o := &out.Tins[place]
		*o = rollup.TinDelta{
			Name: rollup.TinName(s.Config.Tins, place),
			Counters: rollup.Counters{
				Bytes:   t.Bytes - before.Bytes,
				Packets: c.from(before.Packets, t.Packets),
				Drops:   c.from(before.Drops, t.Drops) + c.from(before.AckDrops, t.AckDrops),
				Marks:   c.from(before.Marks, t.Marks),
			},
			Sojourn: d.buckets[i][place][:0],
		}
		out.Marks += o.Marks
		o.Sojourn = buckets(o.Sojourn, &before.Sojourn, &t.Sojourn)
	}
	return restarts, wraps
}

// buckets appends what was counted from was to now. Counters that went back
// have begun anew.
func buckets(to []rollup.Bucket, was, now *engine.Histogram) []rollup.Bucket {
	for b, n := range now {
		switch {
		case n == was[b]:
		case n > was[b]:
			to = append(to, rollup.Bucket{Index: uint8(b), Count: n - was[b]})
		default: // made anew, and ahead in what came before
			return buckets(to[:0], &none.Tins[0].Sojourn, now)
		}
	}
	return to
}

// takeRest fills in what has no direction. was is that of the same boot.
func (d *deltas) takeRest(r, was *plan.Report) {
	d.CPU = uint64(max(r.Agent.CPUTime-was.Agent.CPUTime, 0) / time.Microsecond)
	var now, then plan.LinkState
	if r.WAN != nil {
		now = *r.WAN
	}
	if was.WAN != nil {
		then = *was.WAN
	}
	d.upsets = Upsets{
		CarrierLosses: since(now.CarrierLosses, then.CarrierLosses), Comings: since(now.Comings, then.Comings),
		Bypassed:  since(r.Agent.BypassedPackets, was.Agent.BypassedPackets),
		Overflows: since(r.Agent.QueueOverflows, was.Agent.QueueOverflows),
	}
	d.CarrierLosses = d.upsets.CarrierLosses
	before := &noProbe
	if was.Probe != nil && r.Probe != nil && was.Probe.Host == r.Probe.Host {
		before = was.Probe
	}
	for l := range d.Echoes {
		e := &d.Echoes[l]
		e.Delay, e.Lost = d.echoes[l][:0], 0
		if r.Probe == nil {
			continue
		}
		now, was := at(r.Probe, rollup.Load(l)), at(before, rollup.Load(l))
		e.Delay = buckets(e.Delay, &was.Delay, &now.Delay)
		e.Lost = since(now.Lost, was.Lost)
	}
}

// since returns what a counter has counted. One that went back has begun anew.
func since(now, was uint64) uint64 {
	if was <= now {
		return now - was
	}
	return now
}

// noProbe is a measurement before the first echo.
var noProbe plan.ProbeStats

// at returns what was measured at a load.
func at(p *plan.ProbeStats, l rollup.Load) *plan.ProbeDelay {
	return [rollup.Loads]*plan.ProbeDelay{
		rollup.Idle: &p.Idle, rollup.Light: &p.Light, rollup.DownLoaded: &p.Down, rollup.UpLoaded: &p.Up, rollup.BothLoaded: &p.Both,
	}[l]
}

// tinBefore returns what a tin was. It is the tin of that number in the
// scheduler: a change of mode reorders the list, and counters go on.
func tinBefore(was, s *engine.Stats, place int) *engine.TinStats {
	index := s.Tins[place].Index
	if place < was.NumTins && was.Tins[place].Index == index {
		return &was.Tins[place]
	}
	for i := range was.Tins[:was.NumTins] {
		if was.Tins[i].Index == index {
			return &was.Tins[i]
		}
	}
	return &none.Tins[0]
}

// counter takes differences of counters that may have 32 bits.
type counter struct{ wraps *uint64 }

// from returns what was counted from was to now, in a data plane that was not
// made anew.
func (c counter) from(was, now uint64) uint64 {
	switch {
	case now >= was:
		return now - was
	case was <= math.MaxUint32:
		*c.wraps++
		return now + 1<<32 - was
	default:
		return now // of 64 bits, and it has begun again: nobody knows from where
	}
}
