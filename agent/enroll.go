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
// until it has one; nil means that ctx ended. A certificate that holds wins
// over any token, as the token of a router that is enrolled is a used one.
func (a *Agent) identify(ctx context.Context) *identity.Identity {
	log := a.cfg.Logger.Named("identity")
	for wait := firstEnrolWait; ; wait = min(2*wait, maxEnrolWait) {
		id, errLoad := identity.Load(a.cfg.StateDir)
		if errLoad == nil && id.Valid(a.clock.Now()) {
			return id
		}
		if errLoad == nil {
			log.Warn("the certificate has ended", "router", id.RouterID, "ended", id.Leaf.NotAfter)
		} else if !errors.Is(errLoad, identity.ErrNone) {
			log.Error("identity can't be read", "error", errLoad)
		}
		enrolled, err := a.enroll(ctx)
		switch {
		case err == nil:
			return enrolled
		case ctx.Err() != nil:
			return nil
		case errLoad == nil:
			// The controller decides whether an ended certificate is still
			// good for something.
			log.Warn("no new certificate", "error", err)
			return id
		}
		pause := wait/2 + time.Duration(rand.Int64N(int64(wait/2)+1))
		log.Error("no identity yet", "controller", a.cfg.Controller, "wait", pause.Round(time.Millisecond), "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

func (a *Agent) enroll(ctx context.Context) (*identity.Identity, error) {
	text, err := a.cfg.Token()
	if err != nil {
		return nil, err
	}
	if text == "" {
		return nil, errors.New("no certificate and no join token: make one with cakefleetctl token create and give it with --token or --token-file")
	}
	token, err := identity.ParseToken(text)
	if err != nil {
		return nil, err
	}
	e, err := identity.Begin(ctx, a.cfg.Controller, a.cfg.StateDir, token, a.clock)
	if err != nil {
		return nil, err
	}
	id, err := session.Enroll(ctx, a.cfg.Controller, e)
	if err != nil {
		return nil, err
	}
	if err := id.Save(a.cfg.StateDir); err != nil {
		// The token is used, so that going on until the next start is the
		// better of two evils.
		a.cfg.Logger.Error("the new identity is not saved and will be lost at the next start", "router", id.RouterID, "error", err)
	}
	return id, nil
}
