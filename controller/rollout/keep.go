package rollout

import (
	"cmp"
	"slices"
	"time"
)

// How long rollouts that have ended are kept.
const (
	// KeepFor is how long one is kept at most, and with it what holds back what
	// it rolled back.
	KeepFor = 365 * 24 * time.Hour
	// KeepOfPlan is how many are kept of one plan, and of those of no plan.
	KeepOfPlan = 100
	// KeepTargets is how long the targets of one that was rolled back are kept.
	KeepTargets = 7 * 24 * time.Hour
)

// InEffect tells whether routers have by it what they would not have without,
// so that it can't be forgotten.
func (s *State) InEffect() bool { return s.Opened > 0 && !s.Settled && s.Phase != Overtaken }

// Forgettable tells whether a rollout has ended and nothing is left of it.
func (s *State) Forgettable() bool { return s.Phase.Final() && !s.InEffect() }

// Old returns the rollouts that are not to be kept any longer, and those whose
// targets are not.
func Old(all []*Live, now time.Time) (rollouts, targets []*Live) {
	ended := slices.DeleteFunc(slices.Clone(all), func(l *Live) bool { return !l.Forgettable() })
	slices.SortFunc(ended, func(a, b *Live) int { return cmp.Or(b.Finished.Compare(a.Finished), cmp.Compare(a.ID, b.ID)) })
	kept := map[string]int{}
	for _, l := range ended {
		switch {
		case now.Sub(l.Finished) > KeepFor || kept[l.Selector.Plan] == KeepOfPlan:
			rollouts = append(rollouts, l)
			continue
		case l.Places != "" && now.Sub(l.Finished) > KeepTargets:
			targets = append(targets, l)
		}
		kept[l.Selector.Plan]++
	}
	return rollouts, targets
}
