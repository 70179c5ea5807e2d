package schedule

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Set has all schedules, to be asked which of them are for a subscriber. It is
// not changed; nil is an empty one.
type Set struct {
	byPlan       map[string][]*Entry
	bySubscriber map[string][]*Entry
	byLabel      map[string][]*Entry // by "name=value" of the first label
}

// Entry is one schedule of a Set.
type Entry struct {
	Schedule
	answer atomic.Pointer[answer]
}

// answer holds from the time it was computed for until another.
type answer struct {
	from, until time.Time // until zero: for good
	is          bool
}

// NewSet returns a set of schedules, among them those that were removed.
func NewSet(all []Schedule) *Set {
	if len(all) == 0 {
		return nil
	}
	s := &Set{byPlan: map[string][]*Entry{}, bySubscriber: map[string][]*Entry{}, byLabel: map[string][]*Entry{}}
	for i := range all {
		e := &Entry{Schedule: all[i]}
		switch t := e.Target; {
		case t.Plan != "":
			s.byPlan[t.Plan] = append(s.byPlan[t.Plan], e)
		case t.Subscriber != "":
			s.bySubscriber[t.Subscriber] = append(s.bySubscriber[t.Subscriber], e)
		default:
			for _, k := range slices.Sorted(maps.Keys(t.Labels)) {
				pair := k + "=" + t.Labels[k]
				s.byLabel[pair] = append(s.byLabel[pair], e)
				break
			}
		}
	}
	for _, m := range []map[string][]*Entry{s.byPlan, s.bySubscriber, s.byLabel} {
		for _, entries := range m {
			slices.SortFunc(entries, compareEntries)
		}
	}
	return s
}

func compareEntries(a, b *Entry) int { return Compare(&a.Schedule, &b.Schedule) }

// For returns the schedules whose target a subscriber is, in force or not, in
// the order of precedence with the one that counts last. The result is not to
// be changed.
func (s *Set) For(sub *plan.Subscriber) []*Entry {
	if s == nil {
		return nil
	}
	ofPlan, own := s.byPlan[sub.Plan], s.bySubscriber[sub.ID]
	if len(s.byLabel) == 0 || len(sub.Labels) == 0 {
		switch {
		case len(own) == 0:
			return ofPlan
		case len(ofPlan) == 0:
			return own
		}
	}
	all := slices.Concat(ofPlan, own)
	if len(s.byLabel) > 0 {
		for k, v := range sub.Labels {
			for _, e := range s.byLabel[k+"="+v] {
				if e.Target.Matches(sub) {
					all = append(all, e)
				}
			}
		}
	}
	slices.SortFunc(all, compareEntries)
	return all
}

// At is Schedule.At, remembered while it holds.
func (e *Entry) At(now time.Time) (is bool, next time.Time) {
	if a := e.answer.Load(); a != nil && !now.Before(a.from) && (a.until.IsZero() || now.Before(a.until)) {
		return a.is, a.until
	}
	is, next = e.Schedule.At(now)
	e.answer.Store(&answer{from: now, until: next, is: is})
	return is, next
}
