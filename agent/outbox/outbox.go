// Package outbox holds what an agent has to tell its controller: only the
// newest of each kind, so that a slow controller costs no memory.
package outbox

import (
	"sync"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Address says which push a status answers. Nonces count anew on every stream,
// so that a nonce means nothing without its stream.
type Address struct {
	Stream uint64 // 0: no push is answered
	Nonce  uint64
}

// Work is what is to be sent now. The zero value is nothing.
type Work struct {
	Status *plan.Status
	Nonce  uint64 // of the push that Status answers; 0 for news only
	Report bool   // a report is due; it is made when it is sent, so that it is fresh
	Probe  bool   // the controller's presence is to be proven
}

// Outbox has at most one status, one due report and one due probe. It may be
// used from several goroutines.
type Outbox struct {
	ready chan struct{} // capacity 1: a wake-up that is pending already is enough

	mu      sync.Mutex // guards all below
	status  *plan.Status
	to      Address
	report  bool
	probe   bool
	skipped uint64
}

// New returns an empty outbox.
func New() *Outbox {
	return &Outbox{ready: make(chan struct{}, 1)}
}

// Ready has a value when there may be something to take.
func (o *Outbox) Ready() <-chan struct{} { return o.ready }

// PutStatus replaces the pending status. News (outcome none) that replaces an
// answer which was not sent yet carries the answer along.
func (o *Outbox) PutStatus(to Address, s plan.Status) {
	o.mu.Lock()
	if p := o.status; p != nil && s.Outcome == plan.OutcomeNone && p.Outcome != plan.OutcomeNone {
		s.Outcome, s.Error, s.Clamps, to = p.Outcome, p.Error, p.Clamps, o.to
	}
	o.status, o.to = &s, to
	o.mu.Unlock()
	o.wake()
}

// PutReport makes a report due. One that is due already is skipped and
// counted: counters are cumulative, so that only resolution is lost.
func (o *Outbox) PutReport() {
	o.mu.Lock()
	if o.report {
		o.skipped++
	}
	o.report = true
	o.mu.Unlock()
	o.wake()
}

// PutProbe makes a probe due.
func (o *Outbox) PutProbe() {
	o.mu.Lock()
	o.probe = true
	o.mu.Unlock()
	o.wake()
}

// Take empties the outbox for the given stream. An answer to a push of another
// stream becomes news: what it says of the router still holds.
func (o *Outbox) Take(stream uint64) Work {
	o.mu.Lock()
	defer o.mu.Unlock()
	w := Work{Status: o.status, Report: o.report, Probe: o.probe}
	switch {
	case w.Status == nil:
	case o.to.Stream == stream:
		w.Nonce = o.to.Nonce
	default:
		w.Status = News(*w.Status)
	}
	o.status, o.to, o.report, o.probe = nil, Address{}, false, false
	return w
}

// Skip counts reports that were never made because nobody could send them.
func (o *Outbox) Skip(n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.skipped += n
}

// Skipped returns how many reports were never made because one was due still or
// the one before could not be sent.
func (o *Outbox) Skipped() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.skipped
}

// News returns s without the answer in it.
func News(s plan.Status) *plan.Status {
	s.Outcome, s.Error, s.Clamps = plan.OutcomeNone, "", nil
	return &s
}

func (o *Outbox) wake() {
	select {
	case o.ready <- struct{}{}:
	default:
	}
}
