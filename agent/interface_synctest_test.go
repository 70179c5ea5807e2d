package agent

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/ending"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// cable is a network interface that comes and goes as the test says.
type cable struct {
	mu      sync.Mutex
	device  dataplane.Device
	changed chan struct{}
}

func (w *cable) Device() dataplane.Device {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.device
}

func (w *cable) Changed() <-chan struct{} { return w.changed }

// become changes the interface and lets the runner see it.
func (w *cable) become(d dataplane.Device) {
	w.mu.Lock()
	w.device = d
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
	synctest.Wait()
}

var (
	gone  = dataplane.Device{Name: "wan"}
	there = dataplane.Device{Name: "wan", Index: 7, MTU: 1492, Type: 512, Up: true}
)

// newCable is a stage on an interface.
func newCable(t *testing.T, dir string, d dataplane.Device) (*stage, *cable) {
	w := &cable{device: d, changed: make(chan struct{}, 1)}
	plane := &dataplanetest.Fake{}
	plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
		if w.Device().Index == 0 {
			return dataplane.Effective{}, dataplane.ErrNoDevice
		}
		return dataplane.Effective{Link: l}, nil
	})
	return newStageOn(t, plane, Config{StateDir: dir, Dataplane: plane, Interface: w}), w
}

// condition returns what the controller would be told now.
func (s *stage) condition(name string) plan.Condition {
	s.t.Helper()
	for _, c := range s.runner.current().Conditions {
		if c.Type == name {
			return c
		}
	}
	s.t.Fatalf("there is no condition %s", name)
	return plan.Condition{}
}

// told wants one status in the outbox and returns it.
func (s *stage) told(what string) plan.Status {
	s.t.Helper()
	w := s.out.Take(1)
	if w.Status == nil {
		s.t.Fatalf("%s: the controller is told nothing", what)
	}
	return *w.Status
}

// A router that boots before PPPoE is up shapes as soon as it is.
func TestFault093_InterfaceComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newStage(t, dir)
		s.push(pushOf(1, 10e6))
		s.stop()

		s, w := newCable(t, dir, gone)
		defer s.stop()
		s.expect("missing", 0, 10e6)
		if c := s.condition("InterfaceUp"); c.Status || c.Reason != "Missing" {
			t.Errorf("missing: %+v", c)
		}
		if c := s.condition("Degraded"); c.Status {
			t.Errorf("missing: %+v", c)
		}
		s.out.Take(1)
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if work := s.out.Take(1); work.Status != nil {
			t.Errorf("the controller is told again: %+v", work.Status)
		}
		w.become(there)
		s.expect("there", 10e6, 10e6)
		if st := s.told("there"); st.Effective == nil || st.Applied != 1 {
			t.Errorf("there: %+v", st)
		}
		if c := s.condition("InterfaceUp"); !c.Status {
			t.Errorf("there: %+v", c)
		}
	})
}

// What comes while there is no interface is answered when it runs.
func TestPushWithoutInterface(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, w := newCable(t, t.TempDir(), gone)
		defer s.stop()
		s.push(pushOf(1, 10e6))
		if work := s.out.Take(1); work.Status != nil && work.Status.Outcome != plan.OutcomeNone {
			t.Errorf("missing: answered %+v", work.Status)
		}
		time.Sleep(time.Minute)
		s.push(pushOf(2, 20e6))
		w.become(there)
		s.expect("there", 20e6, 20e6)
		work := s.out.Take(1)
		if work.Nonce != 2 || work.Status == nil || work.Status.Outcome != plan.OutcomeApplied {
			t.Errorf("there: %+v", work)
		}
	})
}

func TestRedial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, w := newCable(t, t.TempDir(), there)
		defer s.stop()
		s.push(pushOf(1, 10e6))
		s.out.Take(1)
		applied := len(s.plane.History())
		for i := range 3 {
			w.become(gone)
			if st := s.told("gone"); st.Effective != nil || st.Applied != 1 {
				t.Errorf("gone: %+v", st)
			}
			if c := s.condition("InterfaceUp"); c.Status {
				t.Errorf("gone: %+v", c)
			}
			time.Sleep(time.Duration(i) * time.Hour)
			d := there
			d.Index += uint32(i + 1)
			w.become(d)
			s.expect("dialed again", 10e6, 10e6)
			if st := s.told("dialed again"); st.Effective == nil {
				t.Errorf("dialed again: %+v", st)
			}
			if n := len(s.plane.History()); n != applied+1+i {
				t.Errorf("dialed again: applied %d times", n)
			}
		}

		// So fast that only the new index shows it.
		d := there
		d.Index = 99
		w.become(d)
		d.MTU = 1480
		w.become(d)
		if n := len(s.plane.History()); n != applied+5 {
			t.Errorf("index and MTU changed: applied %d times, want %d", n, applied+5)
		}
	})
}

// Events that say nothing new change nothing and tell nothing, as does a cable
// that is pulled, but for the condition.
func TestEventsWithoutChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, w := newCable(t, t.TempDir(), there)
		defer s.stop()
		s.push(pushOf(1, 10e6))
		s.out.Take(1)
		applied, saved := len(s.plane.History()), s.runner.store.Generation()
		for range 100 {
			w.become(there)
		}
		if work := s.out.Take(1); work.Status != nil {
			t.Errorf("the controller is told %+v", work.Status)
		}
		down := there
		down.Up = false
		w.become(down)
		if st := s.told("down"); st.Effective == nil || s.condition("InterfaceUp").Reason != "Down" {
			t.Errorf("down: %+v", st)
		}
		if n := len(s.plane.History()); n != applied {
			t.Errorf("applied %d times, want %d", n, applied)
		}
		if g := s.runner.store.Generation(); g != saved {
			t.Errorf("flash was written: generation %d, want %d", g, saved)
		}
	})
}

// sick is a data plane that may say that packets pass.
type sick struct {
	*dataplanetest.Fake
	mu  sync.Mutex
	err error
}

func (s *sick) Health() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *sick) become(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// A packet loop that stands still is told, and left to itself.
func TestUnshapedIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &sick{Fake: &dataplanetest.Fake{}}
		s := newStageOn(t, plane.Fake, Config{StateDir: t.TempDir(), Dataplane: plane})
		defer s.stop()
		s.push(pushOf(1, 10e6))
		s.out.Take(1)
		applied := len(plane.History())
		for range 2 {
			plane.become(errors.New("the up packet loop stands still"))
			time.Sleep(checkEvery)
			synctest.Wait()
			s.told("it stands still")
			if c := s.condition("Degraded"); !c.Status || c.Reason != "Unshaped" {
				t.Errorf("it stands still: %+v", c)
			}
			time.Sleep(time.Hour)
			plane.become(nil)
			time.Sleep(checkEvery)
			synctest.Wait()
			s.told("it moves")
			if c := s.condition("Degraded"); c.Status {
				t.Errorf("it moves: %+v", c)
			}
		}
		if n := len(plane.History()); n != applied {
			t.Errorf("applied %d times, want %d", n, applied)
		}
	})
}

// How the agents before have ended is told for a day, and so is a data plane
// that has given up.
func TestCrashesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &dataplanetest.Fake{}
		s := newStageOn(t, plane, Config{StateDir: t.TempDir(), Dataplane: plane, Before: ending.Previous{Count: 3, Reason: ending.Panic, Message: "panic: so"}})
		defer s.stop()
		if c := s.condition("Crashed"); !c.Status || c.Reason != ending.Panic || c.Message != "the agent has ended by itself 3 times in a row and was started again; the last time: panic: so" {
			t.Errorf("after three crashes: %+v", c)
		}
		s.push(pushOf(1, 10e6))
		over := func() {
			t.Helper()
			s.out.Take(1)
			time.Sleep(crashTold + checkEvery)
			synctest.Wait()
			s.told("a day later")
			if c := s.condition("Crashed"); c.Status {
				t.Errorf("a day later: %+v", c)
			}
		}
		over()
		ended := fmt.Errorf("three panics: %w", dataplane.ErrEnded)
		plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
			err := ended
			ended = nil // the next one is another data plane
			return dataplane.Effective{Link: l}, err
		})
		s.push(pushOf(2, 20e6))
		time.Sleep(firstRetry)
		synctest.Wait()
		s.expect("another data plane", 20e6, 20e6)
		if c := s.condition("Crashed"); !c.Status || c.Reason != "Dataplane" || !strings.Contains(c.Message, "three panics") {
			t.Errorf("another data plane: %+v", c)
		}
		if c := s.condition("Degraded"); c.Status {
			t.Errorf("another data plane: %+v", c)
		}
		over()
	})
}
