package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/agent/state"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const (
	checkEvery   = 10 * time.Second // whether the data plane still runs and what was told still holds
	firstRetry   = time.Second      // of a broken data plane, doubling
	maxRetry     = time.Minute
	saveRetry    = 10 * time.Minute // of a flash that is full: every try wears it
	applyTimeout = 30 * time.Second

	crashTold = 24 * time.Hour // how long it is told that the agent before has ended by itself
)

// runner is the one goroutine that changes the data plane and the saved state.
type runner struct {
	cfg    Config
	log    hclog.Logger
	clock  *identity.Clock
	outbox *outbox.Outbox
	began  time.Time

	pushes chan session.Push           // capacity 1: only the newest counts
	reach  chan time.Time              // capacity 1: only the newest counts
	status atomic.Pointer[plan.Status] // what runs now, for the session

	certificate *atomic.Pointer[plan.Condition] // what is to be said of it; nil: nothing

	device    dataplane.Device // as it was when it was looked at last
	life      life
	answer    outbox.Address // of the push that is on trial
	effective *plan.Link     // read back from the data plane; nil: nothing is shaped
	unhealthy error          // why packets pass unshaped, by the data plane's own account
	fell      error          // why a data plane gave up, the newest; nil: none did
	fellAt    time.Time
	stats     dataplane.Stats // scratch of check

	pending *attempt // what a broken data plane could not take; nil: it is not broken
	broken  error
	retryAt time.Time
	retryIn time.Duration

	store   *state.Store
	saved   plan.Desired
	saveErr error
	saveAt  time.Time // of the next try; zero: what is to be saved is
}

// attempt is a change on its way to the data plane.
type attempt struct {
	target target
	why    reason
	within time.Duration  // forPush: to be confirmed
	answer outbox.Address // forPush: of the push
}

// reason says what a change is for.
type reason uint8

const (
	forPush    reason = iota // the controller, or the saved state, wants it
	forRestore               // it ran before and should still
	forRevert                // the trial failed
	forExpiry                // the state before it ended
)

func newRunner(cfg Config, clock *identity.Clock, out *outbox.Outbox) *runner {
	r := &runner{
		cfg:    cfg,
		log:    cfg.Logger.Named("runner"),
		clock:  clock,
		outbox: out,
		began:  time.Now(),
		pushes: make(chan session.Push, 1),
		reach:  make(chan time.Time, 1),
	}
	r.status.Store(&plan.Status{})
	return r
}

// deliver hands over a push; a newer one replaces one that was not read yet.
// It has one caller at a time.
func (r *runner) deliver(p session.Push) { replace(r.pushes, p) }

// controllerReached tells that the controller answered what was said after since.
func (r *runner) controllerReached(since time.Time) { replace(r.reach, since) }

// current returns what runs now. It may be called from any goroutine.
func (r *runner) current() plan.Status { return *r.status.Load() }

// rates returns what the directions are shaped to; 0: one is not shaped, or it
// is not known. It may be called from any goroutine.
func (r *runner) rates() (down, up engine.BitsPerSecond) {
	if l := r.current().Effective; l != nil {
		return l.Down.Rate, l.Up.Rate
	}
	return 0, 0
}

// start applies the last known good state.
func (r *runner) start(ctx context.Context) {
	if r.cfg.Interface != nil {
		r.device = r.cfg.Interface.Device()
	}
	store, st, damage, err := state.Open(r.cfg.StateDir)
	r.store = store
	if damage != nil {
		r.log.Error("saved state is damaged", "error", damage)
	}
	if err != nil { // state.ErrNone: nothing is shaped until a controller says so
		r.log.Info("no saved state", "directory", r.cfg.StateDir)
		r.publish()
		return
	}
	r.clock.Raise(st.Saved)
	r.saved = st.Desired
	r.try(ctx, attempt{target: target{desired: st.Desired}})
}

// run follows pushes and times until ctx ends.
func (r *runner) run(ctx context.Context) error {
	check := time.NewTicker(checkEvery)
	defer check.Stop()
	var changed <-chan struct{}
	if r.cfg.Interface != nil {
		changed = r.cfg.Interface.Changed()
	}
	for {
		due := time.NewTimer(r.wait(time.Now()))
		select {
		case <-ctx.Done():
		case p := <-r.pushes:
			r.offer(ctx, p)
		case since := <-r.reach:
			r.reached(since)
		case <-due.C:
			r.due(ctx, time.Now())
		case <-changed:
			r.follow(ctx)
		case <-check.C:
			r.check(ctx)
		}
		due.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// wait returns how long nothing is due.
func (r *runner) wait(now time.Time) time.Duration {
	next := r.life.next()
	if r.pending != nil {
		next = r.retryAt
	}
	if next.IsZero() || !r.saveAt.IsZero() && r.saveAt.Before(next) {
		next = r.saveAt
	}
	if next.IsZero() {
		return time.Hour
	}
	return next.Sub(now)
}

// due does what the time has come for.
func (r *runner) due(ctx context.Context, now time.Time) {
	if !r.saveAt.IsZero() && !now.Before(r.saveAt) {
		r.save(now)
	}
	if r.pending != nil {
		if !now.Before(r.retryAt) {
			r.try(ctx, *r.pending)
		}
		return // what runs is not known; first things first
	}
	switch step, t := r.life.due(now); step {
	case stepRevert:
		r.log.Warn("rolling back: the controller was not reached", "revision", r.life.trial.Revision, "to", t.desired.Revision)
		r.try(ctx, attempt{target: t, why: forRevert})
	case stepNone:
	case stepExpire:
		r.log.Info("the state has ended", "revision", r.life.running.desired.Revision)
		r.try(ctx, attempt{target: t, why: forExpiry})
	}
}

// offer answers a push.
func (r *runner) offer(ctx context.Context, p session.Push) {
	d := p.Desired
	refusal := p.Err
	if why := r.life.refuses(d); refusal == nil && why != "" {
		refusal = errors.New(why)
	}
	if refusal == nil && p.ExpiresAfter > 0 && p.Then != nil {
		// What can't run in the end must not begin.
		if err := r.accept(*p.Then); err != nil {
			refusal = fmt.Errorf("then: %w", err)
		}
	}
	if refusal != nil {
		r.reject(d.Revision, p.Answer, refusal)
		return
	}
	t := target{desired: d}
	if p.ExpiresAfter > 0 {
		t.expires, t.then = time.Now().Add(p.ExpiresAfter), p.Then
	}
	r.try(ctx, attempt{target: t, within: p.ConfirmWithin, answer: p.Answer})
}

// try makes the data plane run the target, and does what follows from how that
// went: it runs, or it was refused and the old still runs, or the data plane
// is broken and it is tried again.
func (r *runner) try(ctx context.Context, a attempt) {
	if r.cfg.Interface != nil {
		r.device = r.cfg.Interface.Device() // a change from here on is another reason to try
	}
	effective, err := r.apply(ctx, a.target.desired.Link)
	var refused *dataplane.RejectedError
	switch {
	case err == nil:
		r.pending, r.broken, r.retryIn = nil, nil, 0
		r.effective = nil
		if a.target.desired.Link != nil {
			r.effective = &effective.Link
		}
		r.applied(a, effective.Clamps)
	case errors.As(err, &refused):
		if r.pending != nil && r.pending.why == a.why && r.pending.target == a.target {
			r.pending = nil // it is not broken for this any more
		}
		r.refused(a, refused)
	case ctx.Err() != nil:
	case errors.Is(err, dataplane.ErrNoDevice): // whose coming is told
		r.postpone(a, err, maxRetry)
		r.log.Info("state waits for the interface", "revision", a.target.desired.Revision)
	default:
		if errors.Is(err, dataplane.ErrEnded) { // the next try opens another
			r.fell, r.fellAt = err, time.Now()
		}
		r.postpone(a, err, min(max(2*r.retryIn, firstRetry), maxRetry))
		r.log.Error("data plane is broken", "revision", a.target.desired.Revision, "wait", r.retryIn, "error", err)
	}
}

// postpone notes what the data plane could not take, and why.
func (r *runner) postpone(a attempt, err error, wait time.Duration) {
	r.broken, r.pending = err, &a
	r.retryIn, r.retryAt = wait, time.Now().Add(wait)
	r.tell()
}

// follow does what a change of the interface asks for.
func (r *runner) follow(ctx context.Context) {
	before := r.device
	r.device = r.cfg.Interface.Device()
	switch {
	case r.device.Same(before): // up or down: the data plane doesn't mind
		r.tell()
	case r.pending != nil:
		r.retryIn = 0
		r.try(ctx, *r.pending)
	case r.effective != nil:
		r.try(ctx, attempt{target: r.life.running, why: forRestore})
	default:
		r.tell()
	}
}

// tell publishes what runs, and sends what is not as it was told.
func (r *runner) tell() {
	before := r.current()
	r.publish()
	if now := r.current(); !reflect.DeepEqual(before, now) {
		r.outbox.PutStatus(outbox.Address{}, now)
	}
}

// applied follows up on a target that runs.
func (r *runner) applied(a attempt, clamps []plan.Clamp) {
	d := a.target.desired
	now := time.Now()
	answer, outcome, why := a.answer, plan.OutcomeNone, ""
	switch a.why {
	case forPush:
		r.life.changed(now, a.target, a.within)
		r.answer = a.answer
		outcome = plan.OutcomeApplied
		if len(clamps) > 0 {
			outcome = plan.OutcomeClamped
		}
		if a.within > 0 {
			r.outbox.PutProbe()
		}
	case forRevert:
		why = r.life.reverted()
		answer, outcome = r.answer, plan.OutcomeRejected
	case forExpiry:
		r.life.expired(a.target)
	case forRestore:
	}
	r.save(now)
	r.publish()
	r.log.Info("state runs", "revision", d.Revision, "hash", d.Hash, "shaped", d.Link != nil, "clamps", len(clamps))
	st := r.current()
	st.Outcome, st.Error, st.Clamps = outcome, why, clamps
	r.outbox.PutStatus(answer, st)
}

// refused follows up on a target that the data plane can't run.
func (r *runner) refused(a attempt, err error) {
	switch a.why {
	case forPush:
		r.reject(a.target.desired.Revision, a.answer, err)
	case forRestore, forRevert, forExpiry:
		// It ran before, or was accepted together with what it follows: the
		// router has changed since. What runs is the best there is.
		r.log.Error("state can't run any more", "revision", a.target.desired.Revision, "error", err)
		r.life.stuck()
		r.publish()
		r.outbox.PutStatus(outbox.Address{}, r.current())
	}
}

// reject answers a push with what is wrong with it.
func (r *runner) reject(revision plan.Revision, to outbox.Address, err error) {
	r.log.Warn("desired state refused", "revision", revision, "error", err)
	r.publish()
	st := r.current()
	st.Outcome, st.Error = plan.OutcomeRejected, err.Error()
	r.outbox.PutStatus(to, st)
}

// apply makes the data plane run the link; nil clears it.
func (r *runner) apply(ctx context.Context, link *plan.Link) (dataplane.Effective, error) {
	ctx, cancel := context.WithTimeout(ctx, applyTimeout)
	defer cancel()
	if link == nil {
		return dataplane.Effective{}, r.cfg.Dataplane.Clear(ctx)
	}
	if err := r.accept(*link); err != nil {
		return dataplane.Effective{}, err
	}
	return r.cfg.Dataplane.Apply(ctx, *link)
}

// accept returns why this router must not try a link: it makes no sense, or is
// faster than the router was said to be able to shape.
func (r *runner) accept(link plan.Link) error {
	if err := link.Validate(); err != nil {
		return &dataplane.RejectedError{Field: "link", Reason: err.Error()}
	}
	for _, d := range []struct {
		field string
		rate  engine.BitsPerSecond
	}{{"down.rate", link.Down.Rate}, {"up.rate", link.Up.Rate}} {
		if most := r.cfg.MaxRate; most != 0 && d.rate > most {
			return &dataplane.RejectedError{Field: d.field, Reason: fmt.Sprintf("%s is above the %s that this router can shape (--max-rate)", d.rate, most)}
		}
	}
	return nil
}

// reached ends a trial if the controller was reached since it began.
func (r *runner) reached(since time.Time) {
	if !r.life.reached(since) {
		return
	}
	r.log.Info("change confirmed", "revision", r.life.running.desired.Revision)
	r.save(time.Now())
	r.publish()
	r.outbox.PutStatus(outbox.Address{}, r.current())
}

// check notices a data plane that stopped by itself and conditions that are no
// longer as told.
func (r *runner) check(ctx context.Context) {
	if r.health() != nil {
		r.tell() // it goes on by itself
		return
	}
	if r.pending == nil && r.effective != nil && !r.cfg.Dataplane.Stats(&r.stats) {
		r.log.Error("data plane has stopped by itself", "revision", r.life.running.desired.Revision)
		r.try(ctx, attempt{target: r.life.running, why: forRestore})
		return
	}
	r.tell()
}

// health asks the data plane whether it does what it should, if it can tell.
func (r *runner) health() error {
	h, ok := r.cfg.Dataplane.(interface{ Health() error })
	if !ok {
		return nil
	}
	err := h.Health()
	if err != nil && r.unhealthy == nil {
		r.log.Error("packets pass unshaped", "error", err)
	}
	r.unhealthy = err
	return err
}

// save writes the state that is good to flash if it is not there already.
func (r *runner) save(now time.Time) {
	d := r.life.good.lasting()
	if d.Hash == r.saved.Hash && reflect.DeepEqual(d.Link, r.saved.Link) {
		r.saveErr, r.saveAt = nil, time.Time{}
		return
	}
	if err := r.store.Save(state.State{Desired: d, Saved: r.clock.Known()}); err != nil {
		r.log.Error("state is not saved: after a power cut the one before it will run", "revision", d.Revision, "error", err)
		r.saveErr, r.saveAt = err, now.Add(saveRetry)
		return
	}
	r.saved, r.saveErr, r.saveAt = d, nil, time.Time{}
}

// publish makes what runs now visible to the session.
func (r *runner) publish() {
	st := &plan.Status{
		Applied:     r.life.running.desired.Revision,
		AppliedHash: r.life.running.desired.Hash,
		Effective:   r.effective,
		Conditions:  r.conditions(),
		Dataplane:   r.cfg.DataplaneName(),
	}
	if r.broken != nil {
		st.Effective = nil // it is not known
	}
	if st.Effective != nil {
		st.EffectiveHash = st.Effective.Hash()
	}
	r.status.Store(st)
}

// conditions returns all lasting facts, true and false ones.
func (r *runner) conditions() []plan.Condition {
	clock := plan.Condition{Type: "ClockOK", Status: true}
	if wrong := r.clock.Wrong(); wrong != "" {
		clock = plan.Condition{Type: "ClockOK", Reason: "Wrong", Message: wrong}
	}
	degraded := plan.Condition{Type: "Degraded"}
	switch {
	case errors.Is(r.broken, dataplane.ErrNoDevice): // has a condition of its own
	case r.broken != nil:
		degraded = plan.Condition{Type: "Degraded", Status: true, Reason: "DataplaneError", Message: r.broken.Error()}
	case r.unhealthy != nil:
		degraded = plan.Condition{Type: "Degraded", Status: true, Reason: "Unshaped", Message: r.unhealthy.Error()}
	}
	saved := plan.Condition{Type: "StateSaved", Status: true}
	if r.saveErr != nil {
		saved = plan.Condition{Type: "StateSaved", Reason: "WriteError", Message: r.saveErr.Error()}
	}
	confirming := plan.Condition{Type: "Confirming"}
	if !r.life.deadline.IsZero() {
		confirming = plan.Condition{Type: "Confirming", Status: true, Reason: "Trial", Message: fmt.Sprintf("revision %d is rolled back unless the controller is reached within %v", r.life.trial.Revision, r.life.within)}
	}
	all := []plan.Condition{clock, confirming, degraded, saved, r.crashed()}
	if r.certificate != nil {
		if c := r.certificate.Load(); c != nil {
			all = append(all, *c)
		}
	}
	if b, ok := r.cfg.Dataplane.(interface{ Bypass() string }); ok {
		offload := plan.Condition{Type: "FlowOffload"}
		if why := b.Bypass(); why != "" {
			offload = plan.Condition{Type: "FlowOffload", Status: true, Reason: "Bypassed", Message: why}
		}
		all = append(all, offload)
	}
	if r.cfg.Interface != nil {
		all = append(all, interfaceUp(r.device))
	}
	return all
}

// crashed tells of a data plane that gave up, or of agents that ended without
// being stopped. Packets passed unshaped from then until another had started.
func (r *runner) crashed() plan.Condition {
	if r.fell != nil && time.Since(r.fellAt) < crashTold {
		return plan.Condition{Type: "Crashed", Status: true, Reason: "Dataplane", Message: "the data plane has given up and is opened anew: " + r.fell.Error()}
	}
	p := r.cfg.Before
	if p.Count == 0 || time.Since(r.began) >= crashTold {
		return plan.Condition{Type: "Crashed"}
	}
	message := "the agent has ended by itself and was started again: " + p.Message
	if p.Count > 1 {
		message = fmt.Sprintf("the agent has ended by itself %d times in a row and was started again; the last time: %s", p.Count, p.Message)
	}
	return plan.Condition{Type: "Crashed", Status: true, Reason: p.Reason, Message: message}
}

func interfaceUp(d dataplane.Device) plan.Condition {
	switch {
	case d.Index == 0:
		return plan.Condition{Type: "InterfaceUp", Reason: "Missing", Message: fmt.Sprintf("there is no interface %s: nothing is shaped until it comes", d.Name)}
	case !d.Up:
		return plan.Condition{Type: "InterfaceUp", Reason: "Down", Message: fmt.Sprintf("interface %s is down", d.Name)}
	default:
		return plan.Condition{Type: "InterfaceUp", Status: true}
	}
}

// replace makes v the only value in a channel of capacity 1 that has one
// sender.
func replace[T any](ch chan T, v T) {
	for {
		select {
		case ch <- v:
			return
		default:
		}
		select {
		case <-ch:
		default:
		}
	}
}
