package rollout

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Input is what Next looks at.
type Input struct {
	Now    time.Time
	Report *Report // nil: not everything is known, so that nothing proceeds
	// Missing says why there is no report.
	Missing string
	// Plan is the present revision of the plan that is changed; 0 if it is gone.
	Plan plan.Revision
	// Blocked names another rollout that changes the same routers and was first.
	Blocked string
}

// patience is how long missing data is waited for before a rollout pauses.
const patience = 2 * time.Minute

// forData begins the reason of a rollout that waits for data.
const forData = "for data: "

// poll is how often a rollout that waits for routers is looked at.
const poll = time.Second

// Next returns what becomes of a rollout. If changed, it is to be stored before
// anything else; effect tells that routers' desired states change with it. Else
// wait says when to ask again at the latest; 0 is never.
func Next(r Rollout, in Input) (next Rollout, changed, effect bool, wait time.Duration) {
	m := machine{Rollout: r, in: in}
	m.run()
	changed = m.changed
	effect = m.Opened != r.Opened || m.Phase == Overtaken && r.Phase != Overtaken
	if !changed {
		return r, false, false, m.wait
	}
	return m.Rollout, true, effect, 0
}

type machine struct {
	Rollout
	in      Input
	changed bool
	wait    time.Duration
}

func (m *machine) enter(p Phase, reason string) {
	m.Phase, m.Since, m.Reason, m.By = p, m.in.Now, reason, ""
	if p.Final() {
		m.Finished = m.in.Now
	}
	m.changed = true
}

func (m *machine) run() {
	if m.Phase.Final() {
		return
	}
	if m.Base != 0 && m.in.Plan != m.Base {
		m.Opened = 0
		why := fmt.Sprintf("plan %s was changed by somebody else", m.Selector.Plan)
		if m.in.Plan == 0 {
			why = fmt.Sprintf("plan %s is gone", m.Selector.Plan)
		}
		m.enter(Overtaken, why)
		return
	}
	m.wait = poll
	switch m.Phase {
	case Waiting:
		m.waiting()
	case Answering:
		m.answering()
	case Soaking:
		m.soaking()
	case RollingBack:
		m.rollingBack()
	default: // an operator's turn
		m.wait = 0
	}
}

// waiting opens the next step when the clock says so.
func (m *machine) waiting() {
	if m.in.Blocked != "" {
		if m.Queued {
			m.reason("queued behind rollout " + m.in.Blocked)
			return
		}
		m.enter(Paused, "rollout "+m.in.Blocked+" changes the same routers")
		return
	}
	may, next := m.mayOpen(m.in.Now)
	if !may {
		m.reason("until a step may be opened by the clock")
		m.wait = 10 * time.Minute
		switch {
		case next.IsZero():
			m.enter(Paused, "no time at which a step may be opened is left")
		default:
			m.wait = min(m.wait, next.Sub(m.in.Now))
		}
		return
	}
	if m.Opened == 0 && m.needsPast() && !strings.HasPrefix(m.Reason, forData) {
		// Counted from the first look, also after another one leads.
		if left := m.Soak - m.in.Now.Sub(m.Since); left > 0 {
			m.reason("for figures from before the change")
			m.wait = min(left, 10*time.Minute)
			return
		}
	}
	if m.in.Report == nil {
		// The clock may have held it up for hours: that is not missing data.
		m.missing(time.Minute)
		return
	}
	m.Opened++
	m.Touched = max(m.Touched, m.Opened)
	m.OpenedAt = m.in.Now
	m.enter(Answering, "")
}

// reason notes why it waits, once.
func (m *machine) reason(why string) {
	if m.Reason != why {
		m.Reason, m.changed = why, true
	}
}

// missing waits for data, but not for ever.
func (m *machine) missing(more time.Duration) {
	why := m.in.Missing
	if why == "" {
		why = "not all controllers have said what they know"
	}
	if m.Phase == Waiting && !strings.HasPrefix(m.Reason, forData) {
		m.Reason, m.Since, m.changed = forData+why, m.in.Now, true
		return
	}
	if m.in.Now.Sub(m.Since) >= more+patience {
		m.enter(Paused, "data is missing: "+why)
	}
}

// answering waits until the newest step has answered.
func (m *machine) answering() {
	if m.in.Report == nil {
		m.missing(m.AnswerTime)
		return
	}
	if m.failsEarly() {
		return
	}
	if m.in.Report.Step.Offered > 0 && m.in.Now.Sub(m.OpenedAt) < m.AnswerTime {
		return
	}
	if m.Opened < len(m.Steps) && m.Steps[m.Opened].Wave == m.Steps[m.Opened-1].Wave {
		m.enter(Waiting, "")
		return
	}
	m.enter(Soaking, "")
}

// failsEarly stops a wave whose routers refuse or go away, without waiting for
// its end.
func (m *machine) failsEarly() bool {
	for _, g := range m.Gates {
		if !g.counts() || g.Above || g.Metric == "unanswered" {
			continue
		}
		if v := m.Judge(g, m.in.Report, false); v.Result == Fail {
			m.fail([]Verdict{m.of(v)})
			return true
		}
	}
	return false
}

// of stamps a verdict with the wave that it is about.
func (m *machine) of(v Verdict) Verdict {
	v.Wave, v.Time = m.Wave(), m.in.Now
	return v
}

// soaking judges the wave at the end of its time.
func (m *machine) soaking() {
	if m.in.Report == nil {
		m.missing(m.Soak)
		return
	}
	if m.failsEarly() {
		return
	}
	soaked := m.in.Now.Sub(m.Since)
	if soaked < m.Soak {
		return
	}
	var verdicts, failed, unclear []Verdict
	for _, g := range m.Gates {
		v := m.of(m.Judge(g, m.in.Report, true))
		// Figures that began late, because a controller did, are of too short a time.
		if !g.counts() && v.Result != Inconclusive && m.in.Now.Sub(m.in.Report.Since) < m.Soak/2 {
			v.Result, v.Why = Inconclusive, "the figures are of too short a time"
		}
		verdicts = append(verdicts, v)
		switch v.Result {
		case Fail:
			failed = append(failed, v)
		case Inconclusive:
			unclear = append(unclear, v)
		case Pass:
		}
	}
	switch {
	case len(failed) > 0:
		m.fail(verdicts)
	case len(unclear) > 0 && soaked < 2*m.Soak:
		// More data may come.
	case len(unclear) > 0:
		m.Verdicts = append(m.Verdicts, verdicts...)
		m.enter(Paused, "inconclusive: "+whys(unclear))
	default:
		m.Verdicts = append(m.Verdicts, verdicts...)
		m.pass()
	}
}

// pass goes on behind the present wave.
func (m *machine) pass() {
	m.Passed = m.Wave() + 1
	if m.Opened == len(m.Steps) {
		m.enter(Completed, "")
		return
	}
	m.enter(Waiting, "")
}

func whys(verdicts []Verdict) string {
	var all []string
	for _, v := range verdicts {
		all = append(all, v.Why)
	}
	return strings.Join(all, "; ")
}

// fail does what was asked for when a gate fails.
func (m *machine) fail(verdicts []Verdict) {
	m.Verdicts = append(m.Verdicts, verdicts...)
	failed := slices.DeleteFunc(slices.Clone(verdicts), func(v Verdict) bool { return v.Result != Fail })
	why := fmt.Sprintf("wave %d failed: %s", m.Wave()+1, whys(failed))
	switch m.OnFailure {
	case RollbackOnFailure:
		m.Opened = 0
		m.enter(RollingBack, why)
	case AbortOnFailure:
		m.enter(Aborted, why)
	case PauseOnFailure:
		m.enter(Paused, why)
	}
}

// rollingBack waits until the routers have what they had. It ends also without:
// who is away gets it when it returns, and what is missing are only answers.
func (m *machine) rollingBack() {
	returned := m.in.Report != nil && m.in.Report.Changed.Offered == 0
	if returned || m.in.Now.Sub(m.Since) >= m.AnswerTime+patience {
		m.enter(RolledBack, m.Reason)
	}
}

// Command is what an operator says.
type Command uint8

// The commands.
const (
	Approve  Command = iota + 1
	Pause            // open no more steps
	Resume           // go on: routers have their time again, and gates their data
	Promote          // go on behind the present wave, whatever its gates say
	Abort            // end it, and leave everything as it is
	Rollback         // close all steps
	Retry            // ask those again that refused
)

var commandWords = []string{"", "approve", "pause", "resume", "promote", "abort", "roll back", "retry"}

// String returns the word for people.
func (c Command) String() string { return commandWords[c] }

// ErrCommand means that a command makes no sense in a rollout's phase.
var ErrCommand = errors.New("can't be done now")

// Do returns what becomes of a rollout when an operator gives a command; effect
// is as in Next. Errors: ErrCommand.
func Do(r Rollout, c Command, by string, now time.Time) (next Rollout, effect bool, err error) {
	m := machine{Rollout: r, in: Input{Now: now}}
	refuse := func(why string) (Rollout, bool, error) {
		return r, false, fmt.Errorf("rollout %s is %v: %v %w%s", r.ID, r.Phase, c, ErrCommand, why)
	}
	said := fmt.Sprintf("%v by %s", map[Command]string{
		Approve: "approved", Pause: "paused", Resume: "resumed", Promote: "promoted", Abort: "aborted", Rollback: "rolled back", Retry: "tried again",
	}[c], by)
	running := r.Phase == Waiting || r.Phase == Answering || r.Phase == Soaking
	switch c {
	case Approve:
		switch {
		case r.Phase != Approving:
			return refuse("")
		case by == "" || by == r.Author:
			return r, false, fmt.Errorf("rollout %s: %w: another person than %s must approve it", r.ID, ErrCommand, r.Author)
		}
		m.Approved = by
		m.enter(Waiting, said)
	case Pause:
		if !running {
			return refuse("")
		}
		m.enter(Paused, said)
	case Resume:
		if r.Phase != Paused {
			return refuse("")
		}
		m.resume(said)
	case Promote:
		if r.Phase != Paused && r.Phase != Answering && r.Phase != Soaking || r.Opened == 0 {
			return refuse("")
		}
		if r.Opened < len(r.Steps) && r.Steps[r.Opened].Wave == r.Wave() {
			m.enter(Waiting, said) // the rest of the wave
			break
		}
		m.pass()
		m.Reason = said
	case Abort:
		if r.Phase.Final() {
			return refuse("")
		}
		m.enter(Aborted, said)
	case Rollback:
		if r.Phase == RollingBack || r.Phase == RolledBack || r.Phase == Overtaken || r.Settled {
			why := ""
			if r.Settled {
				why = fmt.Sprintf("; it is part of plan %s: see cakefleetctl plan rollback", r.Selector.Plan)
			}
			return refuse(why)
		}
		m.Finished = time.Time{}
		m.Opened = 0
		m.enter(RollingBack, said)
		if r.Touched == 0 {
			m.enter(RolledBack, said)
		}
	case Retry:
		switch {
		case r.Settled:
			return refuse(fmt.Sprintf("; it is part of plan %s, and a router tries again what it refused when the plan is changed or its agent starts anew", r.Selector.Plan))
		case r.Opened == 0 || r.Phase == RollingBack || r.Phase == Overtaken:
			return refuse("")
		}
		effect = true
		if r.Phase == Paused || running {
			m.OpenedAt = now
			m.enter(Answering, said)
		}
	default:
		return refuse("")
	}
	m.By = by
	return m.Rollout, effect || m.Opened != r.Opened, nil
}

// resume goes on where it was paused.
func (m *machine) resume(said string) {
	if m.Opened == 0 || m.Passed > m.Wave() {
		m.enter(Waiting, said)
		return
	}
	// The newest step has its time again, and then the gates their data.
	m.OpenedAt = m.in.Now
	m.enter(Answering, said)
}

// Held tells whether what a rollout sets was rolled back before and not edited
// since.
func Held(s *Spec, before *Rollout) bool {
	if before.Phase != RolledBack && before.Phase != RollingBack || before.Selector.Plan != s.Selector.Plan {
		return false
	}
	if s.LinkHash != "" || before.LinkHash != "" {
		return s.LinkHash == before.LinkHash
	}
	return before.Set == s.Set && maps.Equal(before.Versions, s.Versions)
}
