// Package model judges what happened to a fleet. It is pure: a history comes
// in, and what must not have happened comes out.
//
// The rules, by what they are called in a Violation:
//
//   - unpublished: a router was sent a state that nobody ever wrote, or another
//     one than was written at that revision.
//   - stale: a router went back to an older state, or to one twice.
//   - unanswered: a router read a push and did not answer it.
//   - repeated: a push was sent again although it was answered.
//   - guessed: a controller said that a router runs what it never ran.
//   - lost: a write that was confirmed is gone.
//   - not converged: after everything was healed, a router or what is shown of
//     it is not as was written last.
//   - led by two: a step of work that one controller must do was done twice, or
//     one is missing.
//   - stranded: a router whose controller failed never had a session again.
package model

import (
	"fmt"
	"slices"
	"time"
)

// Kind is what an event is about.
type Kind uint8

// The kinds, with the fields that count.
const (
	Wrote      Kind = 1 + iota // Plan, Revision, Hash: a write was confirmed
	MaybeWrote                 // Plan, Hash: a write was asked for, and nobody knows
	Began                      // Router, Session, At: a session
	Pushed                     // Router, Session, Nonce, Revision, Hash: a router read a push
	Applied                    // Router, Revision, Hash: a router runs something else from now on
	Answered                   // Router, Session, Nonce: a router answered
	Showed                     // Router, At, Revision, Hash: a controller said that the router is in sync
	Failed                     // At, Routers: a controller with these routers failed
	Led                        // Step, By: a step of led work was done
)

// Event is one thing that happened.
type Event struct {
	Time     time.Duration // since the beginning
	Kind     Kind
	Plan     string
	Router   string
	At       string // controller
	Session  int
	Nonce    uint64
	Revision int64
	Hash     string
	Routers  []string
	Step     int
	By       string
}

// State is a plan or what a router runs.
type State struct {
	Revision int64
	Hash     string
}

// History is everything that happened, in order of time, and how it ended
// after all was healed.
type History struct {
	PlanOf map[string]string // plan by router
	Events []Event
	Plans  map[string]State             // in the store at the end
	Runs   map[string]State             // by router, what it runs at the end
	Shown  map[string]map[string]string // by controller and router, the state that is shown at the end
}

// Violation is something that must not happen.
type Violation struct {
	Rule string
	What string
}

// String returns both.
func (v Violation) String() string { return v.Rule + ": " + v.What }

// reask is how long a controller waits before it asks for an answer again, less
// some for clocks and queues.
const reask = 9 * time.Second

// Judge returns what must not have happened, in order of time.
func Judge(h History) []Violation {
	j := judge{
		History: h, written: map[string]map[string]bool{}, at: map[string]map[int64]string{}, last: map[string]int64{},
		runs: map[string]State{}, ran: map[string]map[string]bool{}, pushes: map[push]*sent{}, steps: map[int]string{},
		where: map[string][]began{},
	}
	// What was written counts from the start: who reads a push may be earlier in
	// time than who is told that the write is done.
	for _, e := range h.Events {
		if e.Kind == Wrote || e.Kind == MaybeWrote {
			j.write(e)
		}
		if e.Kind == Began {
			j.where[e.Router] = append(j.where[e.Router], began{e.Time, e.At})
		}
	}
	for _, e := range h.Events {
		j.take(e)
	}
	for p, s := range j.pushes {
		if !s.answered {
			j.blame("unanswered", "%s: nonce %d of session %d, revision %d", p.router, p.nonce, p.session, s.revision)
		}
	}
	j.end()
	return j.found
}

type judge struct {
	History
	found   []Violation
	written map[string]map[string]bool  // by plan and hash
	at      map[string]map[int64]string // hash by plan and revision, of confirmed writes
	last    map[string]int64            // newest confirmed revision by plan
	runs    map[string]State            // by router
	ran     map[string]map[string]bool  // by router and hash
	pushes  map[push]*sent
	steps   map[int]string
	where   map[string][]began
}

type push struct {
	router  string
	session int
	nonce   uint64
}

type sent struct {
	State
	revision int64
	answered bool
	when     time.Duration
}

type began struct {
	when time.Duration
	at   string
}

func (j *judge) blame(rule, format string, args ...any) {
	j.found = append(j.found, Violation{rule, fmt.Sprintf(format, args...)})
}

func (j *judge) write(e Event) {
	if j.written[e.Plan] == nil {
		j.written[e.Plan], j.at[e.Plan] = map[string]bool{}, map[int64]string{}
	}
	j.written[e.Plan][e.Hash] = true
	if e.Kind == Wrote {
		j.at[e.Plan][e.Revision] = e.Hash
		j.last[e.Plan] = max(j.last[e.Plan], e.Revision)
	}
}

func (j *judge) take(e Event) {
	planName := j.PlanOf[e.Router]
	switch e.Kind {
	case Pushed:
		if want, ok := j.at[planName][e.Revision]; !j.written[planName][e.Hash] || ok && want != e.Hash {
			j.blame("unpublished", "%s was sent %.8s as revision %d", e.Router, e.Hash, e.Revision)
		}
		for p, s := range j.pushes {
			if p.router == e.Router && p.session == e.Session && s.State == (State{e.Revision, e.Hash}) && s.answered && e.Time-s.when < reask {
				j.blame("repeated", "%s was sent revision %d again after %v", e.Router, e.Revision, e.Time-s.when)
			}
		}
		j.pushes[push{e.Router, e.Session, e.Nonce}] = &sent{State: State{e.Revision, e.Hash}, revision: e.Revision, when: e.Time}
	case Answered:
		if s := j.pushes[push{e.Router, e.Session, e.Nonce}]; s != nil {
			s.answered = true
		}
	case Applied:
		if was := j.runs[e.Router]; e.Revision <= was.Revision {
			j.blame("stale", "%s went from revision %d to %d", e.Router, was.Revision, e.Revision)
		}
		j.runs[e.Router] = State{e.Revision, e.Hash}
		if j.ran[e.Router] == nil {
			j.ran[e.Router] = map[string]bool{}
		}
		j.ran[e.Router][e.Hash] = true
	case Showed:
		if !j.ran[e.Router][e.Hash] {
			j.blame("guessed", "%s says that %s runs %.8s, revision %d", e.At, e.Router, e.Hash, e.Revision)
		}
	case Failed:
		for _, r := range e.Routers {
			if !slices.ContainsFunc(j.where[r], func(b began) bool { return b.when > e.Time }) {
				j.blame("stranded", "%s has no session since %s failed", r, e.At)
			}
		}
	case Led:
		if by, done := j.steps[e.Step]; done {
			j.blame("led by two", "step %d was done by %s and by %s", e.Step, by, e.By)
		}
		j.steps[e.Step] = e.By
	case Wrote, MaybeWrote, Began: // taken before
	}
}

// Moved returns how many times a router went to another controller than the one
// that failed.
func Moved(h History) (n int) {
	at := map[string]string{}
	for _, e := range h.Events {
		switch e.Kind {
		case Failed:
			for _, r := range e.Routers {
				at[r] = e.At
			}
		case Began:
			if was, ok := at[e.Router]; ok && was != e.At {
				n++
			}
			delete(at, e.Router)
		default: // the others don't move anybody
		}
	}
	return n
}

// end judges how it ended.
func (j *judge) end() {
	for name, rev := range j.last {
		is := j.Plans[name]
		switch want, confirmed := j.at[name][is.Revision]; {
		case is.Revision < rev:
			j.blame("lost", "plan %s: revision %d was confirmed, and %d is stored", name, rev, is.Revision)
		case confirmed && want != is.Hash, !j.written[name][is.Hash]:
			j.blame("lost", "plan %s: %.8s is stored as revision %d, which nobody wrote", name, is.Hash, is.Revision)
		}
	}
	for r, name := range j.PlanOf {
		if runs := j.Runs[r]; runs.Hash != j.Plans[name].Hash {
			j.blame("not converged", "%s runs revision %d (%.8s), and %d (%.8s) is stored", r, runs.Revision, runs.Hash, j.Plans[name].Revision, j.Plans[name].Hash)
		}
		for at, shown := range j.Shown {
			if shown[r] != "in sync" {
				j.blame("not converged", "%s says that %s is %q", at, r, shown[r])
			}
		}
	}
	for i := range len(j.steps) {
		if _, ok := j.steps[i+1]; !ok {
			j.blame("led by two", "step %d is missing of %d", i+1, len(j.steps))
			break
		}
	}
}
