package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Times of the certificate's renewal.
const (
	renewSoon  = 10 * time.Minute // within which one that is due begins, spread
	renewRetry = time.Hour        // after one that went wrong, and up to twice that
	renewAgain = 24 * time.Hour   // after one whose certificate is due already

	// againEvery is how often at most another identity is asked for when the
	// controller does not take the one that there is.
	againEvery = time.Minute
)

// keeper keeps a router's identity good: it renews the certificate over the
// live session, and asks for another one if the controller takes it no more.
// Whatever happens, what is shaped stays. It is a session's Renewal.
type keeper struct {
	agent  *Agent
	log    hclog.Logger
	id     atomic.Pointer[identity.Identity]
	spread float64 // of the renewal, see identity.RenewAt

	renewAt time.Time // of the next attempt, if one is due; zero: not chosen yet
	failed  error     // of the newest attempt

	foreign atomic.Bool // the newest handshake has met an authority that is not the identity's

	wanted  []byte // names the authorities that the fleet has; nil: those of the identity
	confirm bool   // the controller waits to hear that they are stored
	began   []byte // names those that the session trusts

	next *identity.Identity // another one; nil: there is none
}

// asking is how an agent asks for another identity. It outlives keepers.
type asking struct {
	notBefore time.Time
	told      string // why there was none
	burnt     string // a token that was refused
}

func newKeeper(a *Agent, id *identity.Identity) *keeper {
	k := &keeper{agent: a, log: a.cfg.Logger.Named("identity"), spread: rand.Float64()}
	k.id.Store(id)
	k.began = id.TrustID()
	return k
}

// Wait returns how long there is until the certificate is to be renewed.
func (k *keeper) Wait() time.Duration {
	id := k.id.Load()
	k.tell(id)
	due := id.RenewAt(k.spread).Sub(k.agent.clock.Best())
	if due > 0 && (k.wanted == nil || bytes.Equal(k.wanted, id.TrustID())) {
		return due
	}
	if k.renewAt.IsZero() {
		k.renewAt = time.Now().Add(rand.N(renewSoon))
	}
	return time.Until(k.renewAt)
}

// handshake is told why a handshake ended, and returns whether another try will
// do.
func (k *keeper) handshake(err error) bool {
	id := k.id.Load()
	k.foreign.Store(id.Foreign(err))
	return id.LearnTime(err, k.agent.clock)
}

// Request returns a signing request.
func (k *keeper) Request() ([]byte, error) { return k.id.Load().Request() }

// Trust is told which authorities the fleet has. If they are others than the
// identity's, a renewal brings them.
func (k *keeper) Trust(id []byte, spread time.Duration) {
	if !bytes.Equal(k.wanted, id) { // a renewal that has just been made was for others
		k.renewAt = time.Now().Add(rand.N(min(max(spread, time.Second), renewSoon)))
	}
	k.wanted, k.confirm = id, true
}

// Confirms returns the name of the authorities if the controller waits for it.
func (k *keeper) Confirms() []byte {
	id := k.id.Load().TrustID()
	if !k.confirm || !bytes.Equal(k.wanted, id) {
		return nil
	}
	k.confirm = false
	return id
}

// Take takes a new certificate, or why there is none.
func (k *keeper) Take(certificate []byte, authorities [][]byte, err error) {
	var now *identity.Identity
	if err == nil {
		now, err = k.id.Load().Renewed(certificate, authorities)
	}
	if err == nil {
		err = now.Save(k.agent.cfg.StateDir)
	}
	if k.failed = err; err != nil {
		k.renewAt = time.Now().Add(renewRetry + rand.N(renewRetry))
		k.log.Warn("certificate is not renewed", "wait", time.Until(k.renewAt).Round(time.Second), "error", err)
		k.tell(k.id.Load())
		return
	}
	k.renewAt = time.Now().Add(renewAgain) // counts only if it is due again by then
	k.id.Store(now)
	k.log.Info("certificate is renewed", "router", now.RouterID, "valid-until", now.Leaf.NotAfter, "count", len(now.Authorities))
	k.tell(now)
}

// tell makes the condition of the certificate what it is.
func (k *keeper) tell(id *identity.Identity) {
	c := plan.Condition{Type: "CertExpiring"}
	if id.Expiring(k.agent.clock.Best()) {
		c.Status, c.Reason = true, "NotRenewed"
		c.Message = "the certificate ends at " + id.Leaf.NotAfter.UTC().Format(time.RFC3339)
		if k.failed != nil {
			c.Message += fmt.Sprintf(" and is not renewed: %v", k.failed)
		}
	}
	k.agent.certificate.Store(&c)
}

// ended is told why a session ended. It returns true if there is another
// identity to begin anew with.
func (k *keeper) ended(ctx context.Context, err error) bool {
	id, clock := k.id.Load(), k.agent.clock
	k.tell(id)
	if !bytes.Equal(k.began, id.TrustID()) { // the next handshake needs to know
		k.next = id
		return true
	}
	if k.foreign.Swap(false) {
		return k.joinOther(ctx, id)
	}
	expired := session.Expired(err) || !id.Valid(clock.Best())
	quarantined, retired := session.Quarantined(err), session.Retired(err)
	if !expired && !retired && !quarantined && !session.Refused(err) || time.Now().Before(k.agent.asking.notBefore) {
		return false
	}
	k.agent.asking.notBefore = time.Now().Add(againEvery)
	if expired {
		k.say("the certificate has ended, ask for another", fmt.Errorf("it ended at %s", id.Leaf.NotAfter.UTC().Format(time.RFC3339)))
	}
	if retired {
		k.say("the certificate is of an authority that is retired, ask for another", errors.New("the router's key brings one"))
	}
	k.next, err = k.another(ctx, id, !expired && !retired, quarantined)
	switch {
	case errors.Is(err, errWait):
	case err == nil:
		k.agent.asking.told = ""
		return true
	case ctx.Err() != nil:
	default:
		k.say("no other identity", err)
	}
	return false
}

// joinOther joins the fleet whose authority the configured join token or pin
// names, if that is another one than the identity's: the fleet has got a new
// authority, or the router a new fleet. The controller has to prove it; until
// then, and if it can't, the identity stays what it is.
func (k *keeper) joinOther(ctx context.Context, id *identity.Identity) bool {
	a := k.agent
	if time.Now().Before(a.asking.notBefore) {
		return false
	}
	a.asking.notBefore = time.Now().Add(againEvery)
	token, err := a.joinToken()
	if err != nil || id.Of(token) {
		k.say("the controller shows another authority than the router's", errors.New("if the fleet has got a new one, give the router a join token of it (cakefleetctl token create; --token, --token-file) or its pin (cakefleetctl router pin; --ca-pin)"))
		return false
	}
	next, err := a.enroll(ctx)
	if err != nil {
		if ctx.Err() == nil {
			k.say("the fleet of the join token is not joined", err)
		}
		return false
	}
	k.next, a.asking.told = next, ""
	k.log.Info("joined with another authority", "router", next.RouterID, "valid-until", next.Leaf.NotAfter)
	return true
}

// errWait says that nothing but waiting helps.
var errWait = errors.New("wait for an operator")

// another asks for another identity. One that is refused needs a join token
// that is not used yet. Without one, the controller decides by the key: it
// gives a certificate, or lets an operator approve. A key that two devices have
// brings nothing.
func (k *keeper) another(ctx context.Context, id *identity.Identity, refused, quarantined bool) (*identity.Identity, error) {
	a := k.agent
	text, errToken := a.cfg.Token()
	if refused && errToken == nil && text != "" && text != a.asking.burnt {
		got, err := a.enroll(ctx)
		if err == nil || errors.Is(err, context.Canceled) {
			return got, err
		}
		if _, said := errors.AsType[*session.EnrollError](err); said || errors.Is(err, identity.ErrToken) {
			a.asking.burnt = text // so that what the controller says of the key is heard next
		}
		return nil, err
	}
	if quarantined {
		return nil, errWait
	}
	e, err := id.Again(a.clock)
	if err != nil {
		return nil, err
	}
	return a.ask(ctx, e)
}

// say logs what is not said already.
func (k *keeper) say(what string, err error) {
	if text := what + err.Error(); text != k.agent.asking.told {
		k.agent.asking.told = text
		k.log.Warn(what, "error", err)
	}
}
