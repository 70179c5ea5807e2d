package fleet

import (
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Times between pushes to one router.
const (
	minGap     = 100 * time.Millisecond // after the first change
	maxGap     = 400 * time.Millisecond // while changes keep coming and are answered
	quiet      = time.Second            // after which a change is the first again
	firstRetry = 10 * time.Second       // until an answer that is missing is asked for again
	maxRetry   = 5 * time.Minute
	aheadLook  = 30 * time.Second // until a router that is ahead of the store is looked at again
)

// Push is one desired state for a router.
type Push struct {
	Nonce   uint64
	Desired plan.Desired
}

// Reported is what a router said last.
type Reported struct {
	Applied       plan.Revision
	AppliedHash   string
	EffectiveHash string
	Effective     *plan.Link // not to be changed
	Outcome       plan.Outcome
	Rejected      plan.Revision // that was refused; 0 if the newest answer is not a refusal
	Error         string
	Clamps        []plan.Clamp
	Conditions    []plan.Condition
	Received      time.Time
}

// machine decides what one router is sent. It is pure: times come in and
// decisions go out. reported, refused and clamped outlive sessions.
type machine struct {
	reported Reported
	refused  version
	clamped  clamped

	sent     version // of the newest push in this session; its nonce is 0 before
	sentAt   time.Time
	answered bool
	gap      time.Duration // from sentAt until something else may be sent
	retry    time.Duration // from sentAt until the same may be sent again
}

// version names a desired state. The nonce is that of its push.
type version struct {
	revision plan.Revision
	hash     string
	nonce    uint64
}

// clamped is a desired state that runs with other values, whose hash is known.
type clamped struct {
	hash, effectiveHash string
	is                  bool
}

// hello begins a session.
func (m *machine) hello(now time.Time, h Hello) {
	m.reported.Applied = h.Applied
	m.reported.AppliedHash = h.AppliedHash
	m.reported.EffectiveHash = h.EffectiveHash
	m.reported.Effective = h.Effective
	m.reported.Received = now
	m.sent, m.sentAt, m.answered = version{}, time.Time{}, false
	m.gap, m.retry = minGap, firstRetry
}

// next returns the push that is due, if ok. Else wait says after what time
// there may be one if nothing happens before; 0 is never.
func (m *machine) next(now time.Time, d plan.Desired) (p Push, ok bool, wait time.Duration) {
	if m.ahead(d) {
		return Push{}, false, aheadLook
	}
	if !m.needs(d) {
		m.retry = firstRetry
		return Push{}, false, 0
	}
	again := m.isAgain(d)
	if m.sent.nonce != 0 {
		due := m.sentAt.Add(m.gap)
		if again {
			due = m.sentAt.Add(m.retry)
		}
		if now.Before(due) {
			return Push{}, false, due.Sub(now)
		}
	}
	switch {
	case again:
		m.retry = min(2*m.retry, maxRetry)
	case m.sent.nonce == 0 || m.answered && now.Sub(m.sentAt) >= quiet:
		m.gap, m.retry = minGap, firstRetry
	case m.answered:
		m.gap, m.retry = min(2*m.gap, maxGap), firstRetry
	default:
		// Nobody answers: what was sent may still wait to be read, so that the
		// next change has time.
		m.gap, m.retry = min(2*m.gap, firstRetry), firstRetry
	}
	m.sent = version{revision: d.Revision, hash: d.Hash, nonce: m.sent.nonce + 1}
	m.sentAt, m.answered = now, false
	return Push{Nonce: m.sent.nonce, Desired: d}, true, 0
}

// needs reports whether something is to be sent, now or later.
func (m *machine) needs(d plan.Desired) bool {
	return m.inFlight() || !m.runs(d) && !m.runsClamped(d) && !m.heldBack(d)
}

// ahead reports whether the router runs something newer than the store knows
// and d is another thing, so that a push would move it back in silence.
func (m *machine) ahead(d plan.Desired) bool {
	return !m.runs(d) && d.Known.Ahead(m.reported.Applied, d)
}

// isAgain reports whether a push of d would repeat the newest one.
func (m *machine) isAgain(d plan.Desired) bool {
	return m.sent.nonce != 0 && m.sent.hash == d.Hash && (!m.answered || m.sent.revision == d.Revision)
}

func (m *machine) inFlight() bool { return m.sent.nonce != 0 && !m.answered }

func (m *machine) runs(d plan.Desired) bool {
	return m.reported.AppliedHash == d.Hash && m.reported.EffectiveHash == d.EffectiveHash()
}

// runsClamped reports whether the router said that it can't run d better than
// it does.
func (m *machine) runsClamped(d plan.Desired) bool {
	return m.clamped == clamped{hash: d.Hash, effectiveHash: m.reported.EffectiveHash, is: true} &&
		m.reported.AppliedHash == d.Hash
}

func (m *machine) heldBack(d plan.Desired) bool {
	return m.refused.nonce != 0 && m.refused.revision == d.Revision && m.refused.hash == d.Hash
}

// status takes in what the router says about the push named nonce, or as news
// if nonce is 0 or old. Messages of a stream come in order, so that what it
// runs is true in any case, but only the answer to the newest push counts as
// one. There may be a second one: a router that took a state back later.
func (m *machine) status(now time.Time, nonce uint64, s plan.Status) {
	m.reported.Applied = s.Applied
	m.reported.AppliedHash = s.AppliedHash
	m.reported.EffectiveHash = s.EffectiveHash
	m.reported.Effective = s.Effective
	m.reported.Conditions = s.Conditions
	m.reported.Received = now
	if nonce == 0 || nonce != m.sent.nonce {
		return
	}
	switch s.Outcome {
	case plan.OutcomeRejected:
		m.answered = true
		m.refused = m.sent
		m.reported.Rejected = m.sent.revision
	case plan.OutcomeApplied, plan.OutcomeClamped:
		if s.AppliedHash != m.sent.hash {
			return // it contradicts itself; the question stays open
		}
		m.answered = true
		m.reported.Rejected = 0
		m.clamped = clamped{hash: m.sent.hash, effectiveHash: s.EffectiveHash, is: s.Outcome == plan.OutcomeClamped}
	default:
		return
	}
	m.reported.Outcome = s.Outcome
	m.reported.Error = s.Error
	m.reported.Clamps = s.Clamps
}

// sync sums up a connected router.
func (m *machine) sync(d plan.Desired) Sync {
	switch {
	case m.ahead(d):
		return Ahead
	case m.inFlight():
		return Pending
	case m.runs(d) && d.Link == nil:
		return None
	case m.runs(d):
		return InSync
	case m.heldBack(d):
		return Rejected
	case m.runsClamped(d), m.isAgain(d) && m.reported.AppliedHash == d.Hash:
		return Clamped
	default:
		return Pending
	}
}
