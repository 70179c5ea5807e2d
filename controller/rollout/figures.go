package rollout

import (
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Tally counts routers by what they have said.
type Tally struct {
	Members     int // all of them
	Pending     int // of steps that are not open
	Offered     int // connected, and haven't answered
	Applied     int // run it, and it was read back
	Clamped     int // run it with other values
	Rejected    int // refused it
	Unreachable int // not connected
	Already     int // would run the same without the rollout
	RolledBack  int // have what they had before
	Lost        int // of the unreachable: since the newest step was opened
	Restarted   int // of the others: sessions that began since then
}

// Add adds o to t.
func (t *Tally) Add(o *Tally) {
	for _, f := range []struct{ to, from *int }{
		{&t.Members, &o.Members},
		{&t.Pending, &o.Pending},
		{&t.Offered, &o.Offered},
		{&t.Applied, &o.Applied},
		{&t.Clamped, &o.Clamped},
		{&t.Rejected, &o.Rejected},
		{&t.Unreachable, &o.Unreachable},
		{&t.Already, &o.Already},
		{&t.RolledBack, &o.RolledBack},
		{&t.Lost, &o.Lost},
		{&t.Restarted, &o.Restarted},
	} {
		*f.to += *f.from
	}
}

// connected returns how many routers could have answered.
func (t *Tally) connected() int {
	return t.Offered + t.Applied + t.Clamped + t.Rejected + t.Already + t.RolledBack
}

// Counts is what routers count in one direction.
type Counts struct {
	Bytes, Packets, Drops, Marks uint64
	Capacity                     uint64 // bits that the shaped rate had room for
	Sojourn                      engine.Histogram
}

// Add adds o to c.
func (c *Counts) Add(o *Counts) {
	c.Bytes += o.Bytes
	c.Packets += o.Packets
	c.Drops += o.Drops
	c.Marks += o.Marks
	c.Capacity += o.Capacity
	c.Sojourn.Merge(&o.Sojourn)
}

// Figures is what a group of routers has counted.
type Figures struct {
	Routers  int // that have reported
	Down, Up Counts
	CPU      time.Duration // of the agents
	Time     time.Duration // of all routers together
}

// Add adds o, of other routers, to f.
func (f *Figures) Add(o *Figures) {
	f.Routers += o.Routers
	f.Down.Add(&o.Down)
	f.Up.Add(&o.Up)
	f.CPU += o.CPU
	f.Time += o.Time
}

// Report is what is known of a rollout's routers.
type Report struct {
	Time  time.Time // as of
	Since time.Time // from when the figures count

	Step    Tally // of the newest step
	Changed Tally // of all open steps; while rolling back, of all that ever were
	Control Tally // of those that were never open

	ChangedFigures Figures // since the newest step was opened and answered
	ControlFigures Figures // of the same time
	PastFigures    Figures // of the changed routers, before they were changed
}

// Add adds what another controller knows of its routers.
func (r *Report) Add(o *Report) {
	if o.Time.Before(r.Time) {
		r.Time = o.Time
	}
	if o.Since.After(r.Since) {
		r.Since = o.Since
	}
	r.Step.Add(&o.Step)
	r.Changed.Add(&o.Changed)
	r.Control.Add(&o.Control)
	r.ChangedFigures.Add(&o.ChangedFigures)
	r.ControlFigures.Add(&o.ControlFigures)
	r.PastFigures.Add(&o.PastFigures)
}
