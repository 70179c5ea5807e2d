package rollout

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Limits and defaults of what an operator may ask for.
const (
	MaxWaves   = 50
	MaxGates   = 32
	MaxTargets = 2_000_000

	DefaultSoak       = 30 * time.Minute
	DefaultAnswerTime = 5 * time.Minute
	DefaultMinSamples = 200
	DefaultSiteLabel  = "site"

	maxTime = 30 * 24 * time.Hour
)

// DefaultWaves are those of a rollout that says none.
func DefaultWaves() []Size { return []Size{{Percent: 1}, {Percent: 10}, {Percent: 50}, {Percent: 100}} }

// Rollout is one staged change.
type Rollout struct {
	Spec
	State
	Revision plan.Revision
}

// Spec is what was asked for. It is not changed once the rollout is made.
type Spec struct {
	ID       string
	Selector Selector
	Set      plan.Settings     // what routers of open steps have above their plan
	Versions map[string]string // versioned settings other than fields of the link, by name
	Note     string            // what it is, for people, such as "plan gold to revision 7"

	Base plan.Revision // of the selector's plan that it changes; 0: of none
	// LinkHash is of the link that the plan gets by it.
	LinkHash string
	// Whole means that the targets are all routers of the plan, so that in the
	// end it becomes the plan.
	Whole bool

	Waves      []Size
	Steps      []Step // made of Waves when the targets were frozen
	Soak       time.Duration
	AnswerTime time.Duration // for routers to answer; those that haven't count as such
	Gates      []Gate
	MinSamples uint64 // packets that a figure must be made of
	OnFailure  OnFailure

	PerSite   int    // routers of one site in one step; 0: any number
	SiteLabel string // that names the site
	Windows   []schedule.Window
	Zone      string         // of Windows and Start
	Start     schedule.Clock // zero: at once
	Approval  bool           // by another person than Author
	Queued    bool           // waits until no other rollout is in the way

	Seed    uint64
	Places  string // names the places in the store; empty: they are not kept
	Author  string
	Created time.Time
}

// Selector says which routers are meant: all that fit every field that is set.
type Selector struct {
	Plan    string
	Labels  map[string]string
	Model   string   // as routers said when the targets were frozen
	Routers []string // only these; empty after the targets were frozen
	Listed  bool     // Routers or Model was said, so that nobody comes later
}

// String returns the selector for people.
func (s Selector) String() string {
	var parts []string
	if s.Plan != "" {
		parts = append(parts, "plan "+s.Plan)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		parts = append(parts, k+"="+s.Labels[k])
	}
	if s.Model != "" {
		parts = append(parts, "model "+s.Model)
	}
	if s.Listed && s.Model == "" {
		parts = append(parts, "a list of routers")
	}
	return strings.Join(parts, ", ")
}

// Matches tells whether a subscriber's routers are meant, as far as records
// tell.
func (s *Selector) Matches(sub *plan.Subscriber) bool {
	if s.Plan != "" && sub.Plan != s.Plan {
		return false
	}
	for k, v := range s.Labels {
		if have, ok := sub.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// Size is the size of a wave together with those before it: a number of
// routers, or a share of them.
type Size struct {
	Percent float64 // 0: Count
	Count   int
}

// ParseSize reads "10%" or "25".
func ParseSize(text string) (Size, error) {
	text = strings.TrimSpace(text)
	if share, ok := strings.CutSuffix(text, "%"); ok {
		p, err := strconv.ParseFloat(share, 64)
		if err != nil || !(p > 0 && p <= 100) {
			return Size{}, fmt.Errorf("wave %q: must be above 0%% and at most 100%%", text)
		}
		return Size{Percent: p}, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > MaxTargets {
		return Size{}, fmt.Errorf("wave %q: must be a number of routers or a share such as 10%%", text)
	}
	return Size{Count: n}, nil
}

// String returns what ParseSize reads.
func (s Size) String() string {
	if s.Percent > 0 {
		return strconv.FormatFloat(s.Percent, 'f', -1, 64) + "%"
	}
	return strconv.Itoa(s.Count)
}

// of returns how many of total routers it is: never more, and at least one.
func (s Size) of(total int) int {
	n := s.Count
	if s.Percent > 0 {
		n = int(s.Percent * float64(total) / 100)
	}
	return min(max(n, 1), total)
}

// Step is a number of routers that are opened at once.
type Step struct {
	Wave  int // from 0
	Count int // frozen targets in it
}

// OnFailure is what is done when a gate fails.
type OnFailure uint8

// What can be done.
const (
	PauseOnFailure OnFailure = iota
	RollbackOnFailure
	AbortOnFailure
)

var onFailureWords = []string{"pause", "rollback", "abort"}

// String returns the word that ParseOnFailure reads.
func (o OnFailure) String() string { return onFailureWords[o] }

// ParseOnFailure reads the word; an empty one is pause.
func ParseOnFailure(word string) (OnFailure, error) {
	if word == "" {
		return PauseOnFailure, nil
	}
	i := slices.Index(onFailureWords, word)
	if i < 0 {
		return 0, fmt.Errorf("on failure %q: must be one of %s", word, strings.Join(onFailureWords, ", "))
	}
	return OnFailure(i), nil
}

// Phase is where a rollout is.
type Phase uint8

// The phases; those from Completed on are final.
const (
	Approving   Phase = iota + 1 // another person must say yes
	Waiting                      // for the time at which the next step may be opened
	Answering                    // for routers of the newest step
	Soaking                      // for the gates' data
	Paused                       // for an operator
	RollingBack                  // for routers to return to what they had
	Completed
	Aborted
	RolledBack
	Overtaken // by a change of the plan
)

var phaseWords = []string{"", "approval", "waiting", "answering", "soaking", "paused", "rolling back", "completed", "aborted", "rolled back", "overtaken"}

// String returns the word that operators see.
func (p Phase) String() string { return phaseWords[p] }

// ParsePhase reads the word.
func ParsePhase(word string) (Phase, error) {
	i := slices.Index(phaseWords, word)
	if i < 1 {
		return 0, fmt.Errorf("phase %q is unknown", word)
	}
	return Phase(i), nil
}

// Final tells whether nothing happens any more by itself.
func (p Phase) Final() bool { return p >= Completed }

// State is how far a rollout is.
type State struct {
	Phase    Phase
	Since    time.Time // of the phase
	Opened   int       // steps that are open
	Touched  int       // steps that ever were open
	OpenedAt time.Time // when the newest step was opened
	Passed   int       // waves whose gates have passed, or that an operator let pass
	Settled  bool      // became part of the plan
	Reason   string    // why it is paused or has ended
	By       string    // who gave the newest command; empty: nobody
	Approved string    // who approved it
	Verdicts []Verdict

	// Effect is a revision from the time at which what routers should run was
	// changed last, so that other changes of the record are none for them.
	Effect      plan.Revision
	EffectSince time.Time
	Finished    time.Time
}

// Active tells whether a rollout may still open a step by itself or by a
// command, so that no other may change the same routers.
func (s *State) Active() bool { return !s.Phase.Final() }

// Wave returns the newest wave with an open step; -1 if there is none.
func (r *Rollout) Wave() int {
	if r.Opened == 0 {
		return -1
	}
	return r.Steps[r.Opened-1].Wave
}

// NumWaves returns how many waves there are.
func (s *Spec) NumWaves() int {
	if len(s.Steps) == 0 {
		return 0
	}
	return s.Steps[len(s.Steps)-1].Wave + 1
}

// Size returns how many frozen targets are in waves up to one.
func (s *Spec) Size(wave int) (n int) {
	for _, step := range s.Steps {
		if step.Wave <= wave {
			n += step.Count
		}
	}
	return n
}

// Validate returns an error that names the field. It does not ask whether the
// plan exists.
func (s *Spec) Validate() error {
	if err := plan.ValidateName("rollout", s.ID); err != nil {
		return err
	}
	if err := s.validate(); err != nil {
		return fmt.Errorf("rollout %s: %w", s.ID, err)
	}
	return nil
}

func (s *Spec) validate() error {
	switch sel := s.Selector; {
	case sel.Plan == "" && len(sel.Labels) == 0 && sel.Model == "" && len(sel.Routers) == 0 && !sel.Listed:
		return errors.New("targets: say a plan, labels, a model or routers")
	case sel.Plan != "":
		if err := plan.ValidateName("plan", sel.Plan); err != nil {
			return err
		}
	}
	for k, v := range s.Selector.Labels {
		if err := plan.ValidateLabel(k, v); err != nil {
			return err
		}
	}
	if s.Set.Fields == 0 && len(s.Versions) == 0 {
		return errors.New("nothing to change: say a plan's revision, values to set or versions")
	}
	if err := s.Set.Validate(); err != nil {
		return err
	}
	for name, version := range s.Versions {
		if err := plan.ValidateName("setting", name); err != nil {
			return err
		}
		if err := plan.ValidateLabel(name, version); err != nil {
			return err
		}
	}
	if err := validateWaves(s.Waves); err != nil {
		return err
	}
	for _, d := range []struct {
		name string
		time time.Duration
	}{{"soak time", s.Soak}, {"answer time", s.AnswerTime}} {
		if d.time < time.Second || d.time > maxTime {
			return fmt.Errorf("%s %v: must be 1s to %v", d.name, d.time, maxTime)
		}
	}
	if len(s.Gates) > MaxGates {
		return fmt.Errorf("%d gates, at most %d are allowed", len(s.Gates), MaxGates)
	}
	if s.PerSite < 0 {
		return fmt.Errorf("routers of one site at once: %d is below 0", s.PerSite)
	}
	if s.Zone != "" || len(s.Windows) > 0 || !s.Start.IsZero() {
		if _, err := schedule.Location(s.Zone); err != nil {
			return err
		}
	}
	for _, w := range s.Windows {
		if err := w.Validate(); err != nil {
			return err
		}
	}
	return nil
}

func validateWaves(waves []Size) error {
	if len(waves) == 0 || len(waves) > MaxWaves {
		return fmt.Errorf("%d waves: must be 1 to %d", len(waves), MaxWaves)
	}
	for i, w := range waves[1:] {
		before := waves[i]
		if (w.Percent > 0) == (before.Percent > 0) && (w.Percent < before.Percent || w.Count < before.Count) {
			return fmt.Errorf("wave %v: is smaller than %v before it; each wave counts those before", w, before)
		}
	}
	return nil
}

// clock returns the schedule that says when steps may be opened.
func (s *Spec) clock() *schedule.Schedule {
	if s.Zone == "" {
		return nil
	}
	return &schedule.Schedule{ID: s.ID, Zone: s.Zone, Windows: s.Windows, Start: s.Start}
}

// mayOpen tells whether a step may be opened by the clock, and else when.
func (s *Spec) mayOpen(now time.Time) (may bool, next time.Time) {
	c := s.clock()
	if c == nil || len(s.Windows) == 0 && s.Start.IsZero() {
		return true, time.Time{}
	}
	return c.At(now)
}
