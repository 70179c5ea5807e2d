package schedule

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // all controllers must agree, whatever their systems have

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Limits on what an operator may ask for.
const (
	maxWindows = 32
)

// Schedule is one change by the clock.
type Schedule struct {
	ID     string
	Target Target

	// What is so while it is in force; exactly one of them.
	Set    plan.Settings
	ToPlan string // the whole link of this plan

	Zone    string   // such as "Europe/Berlin"
	Start   Clock    // zero: as far back as it goes
	End     Clock    // zero: never
	Windows []Window // none: all the time from Start to End

	Priority int  // the higher one counts
	Paused   bool // not in force whatever the time
	Settled  bool // became part of the plan or subscriber; not in force any more
	Removed  bool // only kept so that revisions don't go back

	Created  time.Time
	Updated  time.Time
	Author   string // operator who made the last change; empty if not known
	Revision plan.Revision
}

// Target is whom a schedule is for; exactly one field is set.
type Target struct {
	Plan       string            // all subscribers of a plan
	Subscriber string            // one subscriber
	Labels     map[string]string // all subscribers that have every one of them
}

// Validate returns an error that names the field.
func (t Target) Validate() error {
	set := 0
	for _, is := range []bool{t.Plan != "", t.Subscriber != "", len(t.Labels) > 0} {
		if is {
			set++
		}
	}
	if set != 1 {
		return errors.New("target: say one of a plan, a subscriber and labels")
	}
	switch {
	case t.Plan != "":
		return plan.ValidateName("plan", t.Plan)
	case t.Subscriber != "":
		return plan.ValidateID("subscriber", t.Subscriber)
	}
	for k, v := range t.Labels {
		if err := plan.ValidateLabel(k, v); err != nil {
			return err
		}
	}
	return nil
}

// String returns the target for people, such as "plan gold".
func (t Target) String() string {
	switch {
	case t.Plan != "":
		return "plan " + t.Plan
	case t.Subscriber != "":
		return "subscriber " + t.Subscriber
	}
	var words []string
	for _, k := range slices.Sorted(maps.Keys(t.Labels)) {
		words = append(words, k+"="+t.Labels[k])
	}
	return "labels " + strings.Join(words, ",")
}

// Equal tells whether two targets are the same.
func (t Target) Equal(o Target) bool {
	return t.Plan == o.Plan && t.Subscriber == o.Subscriber && maps.Equal(t.Labels, o.Labels)
}

// Matches tells whether a subscriber is meant.
func (t Target) Matches(sub *plan.Subscriber) bool {
	switch {
	case t.Plan != "":
		return sub.Plan == t.Plan
	case t.Subscriber != "":
		return sub.ID == t.Subscriber
	}
	for k, v := range t.Labels {
		if have, ok := sub.Labels[k]; !ok || have != v {
			return false
		}
	}
	return len(t.Labels) > 0
}

// Validate returns an error that names the field. It does not ask whether
// plans and subscribers exist.
func (s *Schedule) Validate() error {
	if err := plan.ValidateName("schedule", s.ID); err != nil {
		return err
	}
	if err := s.validate(); err != nil {
		return fmt.Errorf("schedule %s: %w", s.ID, err)
	}
	return nil
}

func (s *Schedule) validate() error {
	if err := s.Target.Validate(); err != nil {
		return err
	}
	if (s.Set.Fields == 0) == (s.ToPlan == "") {
		return errors.New("say either values to set or a plan to change to")
	}
	if err := s.Set.Validate(); err != nil {
		return err
	}
	if s.ToPlan != "" {
		if err := plan.ValidateName("plan", s.ToPlan); err != nil {
			return err
		}
		if s.ToPlan == s.Target.Plan {
			return fmt.Errorf("plan %s: is what its subscribers have already", s.ToPlan)
		}
	}
	loc, err := Location(s.Zone)
	if err != nil {
		return err
	}
	for name, c := range map[string]Clock{"start": s.Start, "end": s.End} {
		if err := c.validate(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if len(s.Windows) == 0 && s.Start.IsZero() {
		return errors.New("time: say when it starts, or in which windows it is in force")
	}
	if len(s.Windows) > maxWindows {
		return fmt.Errorf("%d windows, at most %d are allowed", len(s.Windows), maxWindows)
	}
	for _, w := range s.Windows {
		if err := w.Validate(); err != nil {
			return err
		}
	}
	if !s.Start.IsZero() && !s.End.IsZero() && !s.Start.instant(loc, false).Before(s.End.instant(loc, true)) {
		return fmt.Errorf("end %v: is not after the start %v", s.End, s.Start)
	}
	return nil
}

// Location returns a time zone of the database. The error says what is wrong
// with the name.
func Location(zone string) (*time.Location, error) {
	if zone == "" {
		return nil, errors.New("zone is missing, such as Europe/Berlin or UTC")
	}
	if zone == "Local" {
		return nil, errors.New("zone Local: differs from machine to machine, say one such as Europe/Berlin")
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return nil, fmt.Errorf("zone %.64q: is not in the time zone database; allowed are names such as Europe/Berlin or UTC", zone)
	}
	return loc, nil
}

// Permanent tells whether it is in force from its start on for good, so that it
// can become part of what it is for.
func (s *Schedule) Permanent() bool {
	return len(s.Windows) == 0 && s.End.IsZero() && !s.Settled && !s.Removed
}

// Settles tells whether the schedule becomes part of the plan, or of the
// subscriber, once it is in force: what an operator sets afterwards counts then.
// All others stay a layer until they end or are removed.
func (s *Schedule) Settles() bool {
	return s.Permanent() && (s.Target.Plan != "" && s.ToPlan == "" || s.Target.Subscriber != "" && s.ToPlan != "")
}

// Compare orders schedules by precedence, the one that counts last.
func Compare(a, b *Schedule) int {
	return cmp.Or(
		cmp.Compare(a.Priority, b.Priority),
		cmp.Compare(a.Target.narrow(), b.Target.narrow()),
		a.Created.Compare(b.Created),
		strings.Compare(a.ID, b.ID),
	)
}

// narrow is higher the more a target says.
func (t Target) narrow() int {
	switch {
	case t.Plan != "":
		return 0
	case t.Subscriber != "":
		return 1 << 10
	default:
		return len(t.Labels)
	}
}

// What returns what it does, for people.
func (s *Schedule) What() string {
	if s.ToPlan != "" {
		return "plan " + s.ToPlan
	}
	return s.Set.String()
}

// When returns when it is in force, for people.
func (s *Schedule) When() string {
	var parts []string
	for _, w := range s.Windows {
		parts = append(parts, w.String())
	}
	if !s.Start.IsZero() {
		parts = append(parts, "from "+s.Start.String())
	}
	if !s.End.IsZero() {
		parts = append(parts, "until "+s.End.String())
	}
	return strings.Join(parts, ", ") + " " + s.Zone
}
