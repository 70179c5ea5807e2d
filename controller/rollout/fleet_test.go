package rollout_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// ofTen is a rollout to ten routers in steps of one, five and all.
func ofTen(t *testing.T, onFailure rollout.OnFailure) rollout.Rollout {
	t.Helper()
	s := rollout.Spec{
		ID: "x", Selector: rollout.Selector{Plan: "gold"}, Set: plan.RatesOf(plan.DefaultLink()), Base: 7, Whole: true,
		Waves: []rollout.Size{{Count: 1}, {Count: 5}, {Percent: 100}}, Soak: time.Minute, AnswerTime: time.Minute, MinSamples: 100,
		OnFailure: onFailure, Author: "alice", Gates: []rollout.Gate{gate(t, "nack < 20%")},
	}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	var targets []rollout.Target
	for i := range 10 {
		targets = append(targets, rollout.Target{Router: fmt.Sprint(i)})
	}
	if _, err := s.Freeze(targets, 1); err != nil {
		t.Fatal(err)
	}
	return rollout.Rollout{Spec: s, State: rollout.State{Phase: rollout.Waiting, Since: beginning}}
}

var beginning = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// settled takes steps until there are none.
func settled(t *testing.T, r rollout.Rollout, now time.Time, report *rollout.Report) rollout.Rollout {
	t.Helper()
	for range 1000 {
		next, changed, _, _ := rollout.Next(r, rollout.Input{Now: now, Plan: 7, Report: report})
		if !changed && next.Phase.Final() {
			return next
		}
		r, now = next, now.Add(10*time.Second)
	}
	return r
}

// An abort ends every rollout that has not ended, whatever phase it is in, and
// nothing wakes it afterwards.
func TestFleet083_AbortEndsFromEveryPhase(t *testing.T) {
	good := &rollout.Report{Since: beginning, Changed: rollout.Tally{Members: 10, Applied: 10}, Step: rollout.Tally{Members: 1, Applied: 1}}
	for phase := rollout.Approving; phase <= rollout.Overtaken; phase++ {
		for opened := range 4 {
			r := ofTen(t, rollout.PauseOnFailure)
			r.Phase, r.Opened, r.Touched = phase, opened, opened
			t.Run(fmt.Sprintf("%v/%d", phase, opened), func(t *testing.T) {
				next, _, err := rollout.Do(r, rollout.Abort, "bob", beginning)
				if phase.Final() {
					if err == nil || next.Phase != phase {
						t.Errorf("what has ended becomes %v (%v)", next.Phase, err)
					}
					return
				}
				if err != nil || next.Phase != rollout.Aborted || next.Opened != opened {
					t.Fatalf("aborted it is %v with %d steps (%v)", next.Phase, next.Opened, err)
				}
				if end := settled(t, next, beginning.Add(time.Hour), good); end.Phase != rollout.Aborted || end.Opened != opened {
					t.Errorf("later it is %v with %d steps", end.Phase, end.Opened)
				}
				if again, _, err := rollout.Do(next, rollout.Abort, "bob", beginning); err == nil {
					t.Errorf("aborted twice it is %v", again.Phase)
				}
			})
		}
	}
}

// What is done when a gate fails is what was asked for: a pause, which is the
// default, an abort, or the way back.
func TestFleet086_OnFailure(t *testing.T) {
	bad := &rollout.Report{Since: beginning, Changed: rollout.Tally{Members: 1, Rejected: 1}, Step: rollout.Tally{Members: 1, Rejected: 1}, Control: rollout.Tally{Members: 9, Applied: 9}}
	for word, want := range map[string]struct {
		phase  rollout.Phase
		opened int
	}{
		"":         {rollout.Paused, 1},
		"pause":    {rollout.Paused, 1},
		"abort":    {rollout.Aborted, 1},
		"rollback": {rollout.RolledBack, 0},
	} {
		t.Run(word, func(t *testing.T) {
			onFailure, err := rollout.ParseOnFailure(word)
			if err != nil {
				t.Fatal(err)
			}
			end := settled(t, ofTen(t, onFailure), beginning, bad)
			if end.Phase != want.phase || end.Opened != want.opened {
				t.Errorf("it is %v with %d steps, want %v with %d; %s", end.Phase, end.Opened, want.phase, want.opened, end.Reason)
			}
		})
	}
	if f, err := rollout.ParseOnFailure("explode"); err == nil {
		t.Errorf("explode is taken for %v", f)
	}
}
