package agent

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/session"
)

// identify returns the router's identity, and enrols if there is none. It tries
// until it has one; nil means that ctx ended. A certificate wins over any token,
// also one that has ended, as the token of a router that is enrolled is a used
// one and its key brings another certificate.
func (a *Agent) identify(ctx context.Context) *identity.Identity {
	log := a.cfg.Logger.Named("identity")
	told, unreadable := "", ""
	for wait := firstEnrolWait; ; wait = min(2*wait, maxEnrolWait) {
		id, err := identity.Load(a.cfg.StateDir)
		if err == nil {
			if id.Damage != nil {
				log.Error("the newest identity is damaged, go on with the one before it", "error", id.Damage)
			}
			return id
		}
		if !errors.Is(err, identity.ErrNone) && err.Error() != unreadable {
			unreadable = err.Error()
			log.Error("identity can't be read: what ran last is shaped on, and the router needs a join token that is not used yet (cakefleetctl token create; --token, --token-file) or an operator who approves it (--ca-pin)", "error", err)
		}
		id, err = a.enroll(ctx)
		switch {
		case err == nil:
			return id
		case ctx.Err() != nil:
			return nil
		}
		pause := a.enrolPause(wait, err)
		if err.Error() != told { // every time would be a line a minute for who waits for an operator
			told = err.Error()
			log.Error("no identity yet", "controller", a.cfg.Controller, "wait", pause.Round(time.Millisecond), "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// enrolPause returns how long to wait after an attempt that ended in err.
func (a *Agent) enrolPause(wait time.Duration, err error) time.Duration {
	pause := wait/2 + rand.N(wait/2+1)
	if waiting, ok := errors.AsType[*session.WaitingError](err); ok {
		return max(min(waiting.After, time.Hour), firstEnrolWait)
	}
	if refused, ok := errors.AsType[*session.EnrollError](err); ok {
		return max(pause, refused.After)
	}
	if errors.Is(err, identity.ErrToken) {
		return maxEnrolWait // somebody has to mend it
	}
	return pause
}

// enroll asks for a new identity, with a join token or else to be approved.
func (a *Agent) enroll(ctx context.Context) (*identity.Identity, error) {
	token, err := a.joinToken()
	if err != nil {
		return nil, err
	}
	e, err := identity.Begin(ctx, a.cfg.Controller, a.cfg.StateDir, token, a.clock)
	if err != nil {
		return nil, err
	}
	return a.ask(ctx, e)
}

// joinToken returns the join token, or the pin alone if there is no token.
func (a *Agent) joinToken() (identity.Token, error) {
	text, err := a.cfg.Token()
	switch {
	case err != nil:
		return identity.Token{}, err
	case text != "":
		return identity.ParseToken(text)
	case a.cfg.Pin != "":
		return identity.ParsePin(a.cfg.Pin)
	}
	return identity.Token{}, errors.New("no certificate and no join token: make one with cakefleetctl token create and give it with --token or --token-file; or give the pin of cakefleetctl router pin with --ca-pin, and an operator approves this router")
}

// ask asks for an identity and saves it.
func (a *Agent) ask(ctx context.Context, e *identity.Enrollment) (*identity.Identity, error) {
	e.Serial, e.Model = a.cfg.Serial, a.cfg.Model
	id, err := session.Enroll(ctx, a.cfg.Controller, e)
	if err != nil {
		return nil, err
	}
	if err := id.Save(a.cfg.StateDir); err != nil {
		// The key is kept and brings the certificate again at the next start, so
		// that going on is the better of two evils.
		a.cfg.Logger.Error("the new identity is not saved and will be asked for again at the next start", "router", id.RouterID, "error", err)
	}
	return id, nil
}
