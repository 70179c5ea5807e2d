// Package settle makes schedules that change a plan's fields, or a subscriber's
// plan, for good part of what they are for once their time has come. Routers
// don't notice: they had it by the clock already. It makes what an operator sets
// afterwards count. One controller does it for all.
package settle

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
)

// Work is the name under which it is led.
const Work = "schedules"

const (
	// sleepMost is how long Run waits before it looks at the clock again, which
	// somebody may have set.
	sleepMost = 10 * time.Minute

	// sleepFailed is how long after something was in the way.
	sleepFailed = 30 * time.Second
)

// Settler settles schedules.
type Settler struct {
	store   *store.Store
	logger  hclog.Logger
	changed chan struct{} // capacity 1: one change stands for any number
}

// New returns a settler on s. Changed is for its OnChange.
func New(s *store.Store, logger hclog.Logger) *Settler {
	return &Settler{store: s, logger: logger, changed: make(chan struct{}, 1)}
}

// Changed notes a change of a record.
func (s *Settler) Changed(c store.Change) {
	if c.Kind == store.KindSchedule {
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
}

// Run settles what is due until ctx ends or this controller does not lead any
// more.
func (s *Settler) Run(ctx context.Context, _ store.Compare) error {
	for {
		wait, err := s.settle(ctx, time.Now())
		if errors.Is(err, store.ErrFenced) {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-s.changed:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// settle settles what is due, and returns after what time something may be. An
// error is told, and tried again.
func (s *Settler) settle(ctx context.Context, now time.Time) (wait time.Duration, err error) {
	var due []schedule.Schedule
	wait = sleepMost
	s.store.View(func(st *store.State) {
		for v := range st.Schedules("") {
			if !v.Settles() {
				continue
			}
			is, next := v.At(now)
			switch {
			case is:
				due = append(due, v)
			case !next.IsZero():
				wait = min(wait, next.Sub(now))
			}
		}
	})
	slices.SortFunc(due, func(a, b schedule.Schedule) int { return schedule.Compare(&a, &b) })
	for _, v := range due {
		switch err = s.store.SettleSchedule(ctx, v); {
		case err == nil:
			s.logger.Info("schedule became part of what it is for", "schedule", v.ID, "for", v.Target.String())
		case errors.Is(err, store.ErrFenced), ctx.Err() != nil:
			return 0, err
		case errors.Is(err, store.ErrNotFound):
			// Nobody is there whom it is for.
		default:
			s.logger.Warn("schedule could not become part of what it is for, try again", "schedule", v.ID, "wait", sleepFailed, "error", err)
			wait = min(wait, sleepFailed)
		}
	}
	return wait, nil
}
