package agent

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/agent/state"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// stage is a runner in a bubble of virtual time, without a session.
type stage struct {
	t      *testing.T
	dir    string
	plane  *dataplanetest.Fake
	out    *outbox.Outbox
	runner *runner
	stop   func()
}

func newStage(t *testing.T, dir string) *stage {
	plane := &dataplanetest.Fake{}
	return newStageOn(t, plane, Config{StateDir: dir, Dataplane: plane})
}

// newStageOn runs a runner whose data plane is, or contains, plane.
func newStageOn(t *testing.T, plane *dataplanetest.Fake, cfg Config) *stage {
	s := &stage{t: t, dir: cfg.StateDir, plane: plane, out: outbox.New()}
	cfg.Controller = "c:1"
	if err := cfg.validate(); err != nil {
		t.Fatal(err)
	}
	s.runner = newRunner(cfg, identity.NewClock(time.Time{}), s.out)
	ctx, cancel := context.WithCancel(context.Background())
	s.runner.start(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.runner.run(ctx) }()
	s.stop = func() { cancel(); <-done }
	return s
}

func (s *stage) push(p session.Push) {
	if p.Desired.Link != nil {
		p.Desired.Hash = p.Desired.Link.Hash()
	}
	s.runner.deliver(p)
	synctest.Wait()
}

// rate returns the download rate that runs; 0 while nothing is shaped.
func (s *stage) rate() engine.BitsPerSecond {
	if l := s.plane.Running(); l != nil {
		return l.Down.Rate
	}
	return 0
}

// saved returns the download rate that a reboot would bring.
func (s *stage) saved() engine.BitsPerSecond {
	s.t.Helper()
	_, st, damage, err := state.Open(s.dir)
	if errors.Is(err, state.ErrNone) || err == nil && st.Desired.Link == nil {
		return 0
	}
	if err != nil || damage != nil {
		s.t.Fatal(err, damage)
	}
	return st.Desired.Link.Down.Rate
}

func (s *stage) expect(what string, running, saved engine.BitsPerSecond) {
	s.t.Helper()
	synctest.Wait()
	if got := s.rate(); got != running {
		s.t.Errorf("%s: %d runs, want %d", what, got, running)
	}
	if got := s.saved(); got != saved {
		s.t.Errorf("%s: %d is saved, want %d", what, got, saved)
	}
}

func at(rate engine.BitsPerSecond) *plan.Link {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate = rate
	return &l
}

func pushOf(revision plan.Revision, rate engine.BitsPerSecond) session.Push {
	return session.Push{
		Desired: plan.Desired{Revision: revision, Link: at(rate)},
		Answer:  outbox.Address{Stream: 1, Nonce: uint64(revision)},
	}
}

func TestRollBackWithoutController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		s.expect("first", 10e6, 10e6)

		p := pushOf(2, 20e6)
		p.ConfirmWithin = time.Minute
		s.push(p)
		s.expect("on trial", 20e6, 10e6) // a power cut brings the old state back
		if w := s.out.Take(1); !w.Probe || w.Nonce != 2 || w.Status.Outcome != plan.OutcomeApplied {
			t.Errorf("on trial: %+v", w)
		}
		time.Sleep(time.Minute - 1)
		s.expect("a moment before", 20e6, 10e6)
		time.Sleep(time.Nanosecond)
		s.expect("rolled back", 10e6, 10e6)
		w := s.out.Take(1)
		if w.Nonce != 2 || w.Status.Outcome != plan.OutcomeRejected || w.Status.Applied != 1 || !strings.Contains(w.Status.Error, "not reached within 1m0s") {
			t.Errorf("rolled back: %+v, %+v", w, w.Status)
		}

		// A new stream offers it again, as it can't know: no second trial.
		p.Answer = outbox.Address{Stream: 2, Nonce: 1}
		s.push(p)
		s.expect("offered again", 10e6, 10e6)
		if w := s.out.Take(2); w.Nonce != 1 || w.Status.Outcome != plan.OutcomeRejected {
			t.Errorf("offered again: %+v", w)
		}
		// A new revision is a new chance.
		p = pushOf(3, 20e6)
		s.push(p)
		s.expect("new revision", 20e6, 20e6)
	})
}

func TestConfirmedStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		before := time.Now()
		time.Sleep(time.Second)
		p := pushOf(2, 20e6)
		p.ConfirmWithin = time.Minute
		s.push(p)
		s.runner.controllerReached(before) // an answer to something said before the change
		s.expect("stale proof", 20e6, 10e6)
		time.Sleep(time.Second)
		s.runner.controllerReached(time.Now())
		s.expect("confirmed", 20e6, 20e6)
		time.Sleep(time.Hour)
		s.expect("later", 20e6, 20e6)
	})
}

// The controller is away for 30 s while a change is on trial: that alone takes
// nothing back, and once it is reached the change stays.
func TestFleet032_ControllerAwayDuringTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		p := pushOf(2, 20e6)
		p.ConfirmWithin = time.Minute
		s.push(p)
		time.Sleep(30 * time.Second)
		s.expect("away for 30 s", 20e6, 10e6)
		if w := s.out.Take(1); w.Status.Outcome != plan.OutcomeApplied || w.Status.Error != "" {
			t.Errorf("while the controller is away: %+v", w.Status)
		}
		s.runner.controllerReached(time.Now()) // on a new session
		time.Sleep(time.Hour)
		s.expect("an hour after it came back", 20e6, 20e6)

		// Nothing is on trial: it may stay away for as long as it likes.
		time.Sleep(30 * 24 * time.Hour)
		s.expect("away for a month", 20e6, 20e6)
		if n := len(s.plane.History()); n != 2 {
			t.Errorf("applied %d times, want 2", n)
		}
	})
}

// Two changes on trial in a row: what was confirmed comes back, not the first
// trial.
func TestRollBackGoesToWhatWasConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		for i, rate := range []engine.BitsPerSecond{20e6, 30e6} {
			p := pushOf(plan.Revision(2+i), rate)
			p.ConfirmWithin = time.Minute
			s.push(p)
			time.Sleep(30 * time.Second)
		}
		s.expect("second trial", 30e6, 10e6)
		time.Sleep(time.Minute)
		s.expect("rolled back", 10e6, 10e6)
	})
}

func TestBoostEndsWithoutController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newStage(t, dir)
		s.push(pushOf(1, 10e6))
		p := pushOf(2, 50e6)
		p.ExpiresAfter, p.Then = 2*time.Hour, at(10e6)
		s.push(p)
		s.expect("boost", 50e6, 10e6)
		time.Sleep(2*time.Hour - 1)
		s.expect("a moment before", 50e6, 10e6)
		time.Sleep(time.Nanosecond)
		s.expect("after", 10e6, 10e6)
		w := s.out.Take(1)
		if w.Status.AppliedHash != at(10e6).Hash() || w.Status.EffectiveHash != at(10e6).Hash() {
			t.Errorf("after: %+v", w.Status)
		}

		// One that ends with nothing shaped, and a reboot in the middle: it is
		// over, as nobody knows how long the power was away.
		p = pushOf(3, 50e6)
		p.ExpiresAfter = time.Hour
		s.push(p)
		s.expect("second boost", 50e6, 0)
		s.stop()
		s = newStage(t, dir)
		defer s.stop()
		s.expect("after a reboot", 0, 0)
	})
}

// A boost on trial that is rolled back does not come back when it would end.
func TestBoostOnTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		p := pushOf(2, 50e6)
		p.ConfirmWithin, p.ExpiresAfter, p.Then = time.Minute, time.Hour, at(20e6)
		s.push(p)
		time.Sleep(time.Minute)
		s.expect("rolled back", 10e6, 10e6)
		time.Sleep(2 * time.Hour)
		s.expect("after its end", 10e6, 10e6)
	})
}

func TestThenThatCannotRunIsRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		bad := at(20e6)
		bad.Up.MTU = 1
		p := pushOf(2, 50e6)
		p.ExpiresAfter, p.Then = time.Hour, bad
		s.push(p)
		s.expect("refused", 10e6, 10e6)
		if w := s.out.Take(1); w.Status.Outcome != plan.OutcomeRejected || !strings.HasPrefix(w.Status.Error, "then: ") {
			t.Errorf("%+v", w.Status)
		}
	})
}

// Flash is written when the state changes and at no other time.
func TestFlashIsSpared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		generations := s.runner.store.Generation()
		for range 5 {
			p := pushOf(1, 10e6) // an ack that was lost is asked for again
			s.push(p)
			p = pushOf(2, 90e6)
			p.ExpiresAfter, p.Then = time.Hour, at(10e6)
			s.push(p)
		}
		time.Sleep(10 * time.Hour)
		s.expect("in the end", 10e6, 10e6)
		if got := s.runner.store.Generation(); got != generations {
			t.Errorf("flash was written %d times for nothing", got-generations)
		}
	})
}

// What a broken data plane could not take is tried at growing intervals, for
// ever, and a newer push replaces it.
func TestBrokenDataplaneForDays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		var tries atomic.Int32
		var mended atomic.Bool
		s.plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
			tries.Add(1)
			if !mended.Load() {
				return dataplane.Effective{}, errors.New("no such device")
			}
			return dataplane.Effective{Link: l}, nil
		})
		s.push(pushOf(1, 10e6))
		time.Sleep(48 * time.Hour)
		if n := tries.Load(); n < 48*60-10 || n > 48*60+10 {
			t.Errorf("%d tries in 48 hours, want about one a minute", n)
		}
		if st := s.runner.current(); st.Applied != 0 || st.Effective != nil {
			t.Errorf("%+v is told while nothing runs", st)
		}
		s.push(pushOf(2, 20e6))
		mended.Store(true)
		time.Sleep(2 * time.Minute)
		s.expect("mended", 20e6, 20e6)
		if w := s.out.Take(1); w.Nonce != 2 || w.Status.Outcome != plan.OutcomeApplied || w.Status.Applied != 2 {
			t.Errorf("%+v", w.Status)
		}
	})
}

func TestDataplaneThatStopsIsStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		s.plane.Stop()
		time.Sleep(2 * checkEvery)
		s.expect("after the check", 10e6, 10e6)
		if n := len(s.plane.History()); n != 2 {
			t.Errorf("applied %d times", n)
		}
	})
}

func TestNextIsTheEarlierOne(t *testing.T) {
	now := time.Now()
	l := life{}
	if !l.next().IsZero() {
		t.Error("something is due of nothing")
	}
	l.changed(now, target{expires: now.Add(time.Hour)}, time.Minute)
	if diff := cmp.Diff(now.Add(time.Minute), l.next()); diff != "" {
		t.Error(diff)
	}
	l.changed(now, target{expires: now.Add(time.Second)}, time.Minute)
	if diff := cmp.Diff(now.Add(time.Second), l.next()); diff != "" {
		t.Error(diff)
	}
}
