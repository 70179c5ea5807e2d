package rollout

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Place returns where a router is among a rollout's targets: the same on every
// controller of every version.
func Place(seed uint64, router string) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211 // FNV-1a
	h := offset ^ seed
	for i := range len(router) {
		h = (h ^ uint64(router[i])) * prime
	}
	// FNV leaves neighbours near each other; this is the finalizer of splitmix64.
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// Target is a router that is to be frozen.
type Target struct {
	Router string
	Site   string // empty: none is known
}

// Freeze puts routers into steps: each gets a place by the seed, the first ones
// are the first wave, and of one site no more than PerSite are in one step. It
// fills in Steps and Seed, and returns the places of all targets, step by step.
func (s *Spec) Freeze(targets []Target, seed uint64) (places []uint64, err error) {
	if len(targets) == 0 {
		return nil, errors.New("no router is meant")
	}
	if len(targets) > MaxTargets {
		return nil, fmt.Errorf("%d routers, at most %d are allowed", len(targets), MaxTargets)
	}
	type placed struct {
		place uint64
		site  string
		step  int
	}
	all := make([]placed, len(targets))
	for unique := false; !unique; seed++ {
		s.Seed = seed
		for i, t := range targets {
			all[i] = placed{place: Place(seed, t.Router), site: t.Site}
		}
		slices.SortFunc(all, func(a, b placed) int { return cmp.Compare(a.place, b.place) })
		unique = true
		for i := range all[1:] {
			unique = unique && all[i].place != all[i+1].place
		}
	}
	s.Steps = nil
	begin := 0
	wave := 0
	for _, size := range s.Waves {
		end := size.of(len(all))
		if end <= begin {
			continue // nobody is left for it
		}
		first := len(s.Steps)
		rounds := 0
		atSite := map[string]int{}
		for i := begin; i < end; i++ {
			round := 0
			if s.PerSite > 0 && all[i].site != "" {
				round = atSite[all[i].site] / s.PerSite
				atSite[all[i].site]++
			}
			all[i].step = first + round
			rounds = max(rounds, round+1)
		}
		for range rounds {
			s.Steps = append(s.Steps, Step{Wave: wave})
		}
		begin = end
		wave++
	}
	if begin < len(all) {
		return nil, fmt.Errorf("waves: end with %d of %d routers; the last one must be 100%%", begin, len(all))
	}
	slices.SortStableFunc(all, func(a, b placed) int { return cmp.Compare(a.step, b.step) })
	places = make([]uint64, len(all))
	for i, p := range all {
		places[i] = p.place
		s.Steps[p.step].Count++
	}
	return places, nil
}

// EncodePlaces returns places for the store.
func EncodePlaces(places []uint64) []byte {
	b := make([]byte, 0, 8*len(places))
	for _, p := range places {
		b = binary.BigEndian.AppendUint64(b, p)
	}
	return b
}

// DecodePlaces is the inverse of EncodePlaces.
func DecodePlaces(b []byte) ([]uint64, error) {
	if len(b)%8 != 0 {
		return nil, fmt.Errorf("places: %d bytes are no whole number of them", len(b))
	}
	places := make([]uint64, len(b)/8)
	for i := range places {
		places[i] = binary.BigEndian.Uint64(b[8*i:])
	}
	return places, nil
}

// Live is a rollout with its targets, to be asked which step a router is in. It
// is not changed.
type Live struct {
	Rollout
	steps map[uint64]int32 // by place; nil: the targets are forgotten
}

// NewLive returns a rollout with its places as Freeze gave them; none if they
// are not kept any more.
func NewLive(r Rollout, places []uint64) (*Live, error) {
	l := &Live{Rollout: r}
	if len(places) == 0 {
		return l, nil
	}
	l.steps = make(map[uint64]int32, len(places))
	next := 0
	for i, step := range r.Steps {
		if next+step.Count > len(places) {
			return nil, fmt.Errorf("rollout %s: %d places, its steps have more", r.ID, len(places))
		}
		for _, p := range places[next : next+step.Count] {
			l.steps[p] = int32(i)
		}
		next += step.Count
	}
	if next != len(places) {
		return nil, fmt.Errorf("rollout %s: %d places, its steps have %d", r.ID, len(places), next)
	}
	return l, nil
}

// With returns a rollout with the same targets in another state.
func (l *Live) With(r Rollout) *Live { return &Live{Rollout: r, steps: l.steps} }

// Step returns the step of a router, whose subscriber is sub; ok is false if it
// is not meant.
func (l *Live) Step(router string, sub *plan.Subscriber) (step int, ok bool) {
	if n, frozen := l.steps[Place(l.Seed, router)]; frozen {
		// One that has another plan now is not meant any more.
		return int(n), l.Selector.Plan == "" || l.Selector.Plan == sub.Plan
	}
	if l.Selector.Listed || len(l.Steps) == 0 || !l.Selector.Matches(sub) {
		return 0, false
	}
	return len(l.Steps) - 1, true
}

// Opens tells whether a router has what the rollout sets.
func (l *Live) Opens(router string, sub *plan.Subscriber) bool {
	if l.Opened == 0 {
		return false
	}
	step, ok := l.Step(router, sub)
	return ok && step < l.Opened
}

// Set has the rollouts that may have an effect, to be asked for a subscriber's.
// It is not changed; nil is an empty one.
type Set struct {
	byPlan map[string][]*Live // that change the plan
	others []*Live
}

// NewSet returns a set of rollouts; of several for one router, one that was
// made later counts.
func NewSet(all []*Live) *Set {
	s := &Set{byPlan: map[string][]*Live{}}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b *Live) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID)) })
	for _, l := range all {
		switch {
		case l.Settled || l.Phase == Overtaken:
		case l.Base != 0:
			s.byPlan[l.Selector.Plan] = append(s.byPlan[l.Selector.Plan], l)
		default:
			s.others = append(s.others, l)
		}
	}
	if len(s.byPlan) == 0 && len(s.others) == 0 {
		return nil
	}
	return s
}

// Plan returns the rollouts that change a plan, also those of another revision
// of it, the one that counts last.
func (s *Set) Plan(name string) []*Live {
	if s == nil {
		return nil
	}
	return s.byPlan[name]
}

// Others returns the rollouts that change routers whatever their plan, the one
// that counts last.
func (s *Set) Others() []*Live {
	if s == nil {
		return nil
	}
	return s.others
}
