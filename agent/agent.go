// Package agent is the process on a router: it makes the data plane run what
// the controller desires, goes on without one, and tells what really runs.
package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/probe"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/agent/state"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Waits between two attempts to get an identity. Evenly spread between the
// half and the whole.
const (
	firstEnrolWait = time.Second
	maxEnrolWait   = time.Minute
)

// Agent owns one router's data plane and its talk with the controller.
type Agent struct {
	cfg    Config
	boot   string
	clock  *identity.Clock
	outbox *outbox.Outbox
	runner *runner
	report *reporter
	prober *probe.Prober // nil: there is no interface to bind to

	certificate atomic.Pointer[plan.Condition] // nil: nothing is known of it yet
	asking      asking                         // of talk
}

// New returns an agent that has touched nothing yet.
func New(cfg Config) (*Agent, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	boot := make([]byte, 8)
	if _, err := rand.Read(boot); err != nil {
		return nil, fmt.Errorf("boot id: %w", err)
	}
	a := &Agent{
		cfg:    cfg,
		boot:   hex.EncodeToString(boot),
		clock:  identity.NewClock(cfg.Built),
		outbox: outbox.New(),
	}
	a.runner = newRunner(cfg, a.clock, a.outbox)
	a.runner.certificate = &a.certificate
	if cfg.Interface != nil {
		a.prober = probe.New(probe.Config{Interface: cfg.Interface.Device().Name, Rates: a.runner.rates, Logger: cfg.Logger.Named("probe")})
	}
	if cfg.Probe != "" && cfg.Probe != plan.ProbeOff {
		a.setProbe(plan.Probe{Host: cfg.Probe, Interval: cfg.ProbeInterval})
	}
	a.report = newReporter(a.boot, cfg.Dataplane, cfg.Interface, a.prober)
	a.report.skipped = a.outbox.Skipped
	return a, nil
}

// Run shapes the link with the last known good state, then follows the
// controller until ctx ends, and undoes everything. It returns an error only
// if something could not be undone or the agent can't work at all.
func (a *Agent) Run(ctx context.Context) (err error) {
	defer func() {
		if errClose := a.cfg.Dataplane.Close(); errClose != nil {
			err = errors.Join(err, fmt.Errorf("close data plane: %w", errClose))
		}
	}()
	// Only the last part of the path: a flash that is not mounted must show.
	if err := os.Mkdir(a.cfg.StateDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("state directory: %w; is the flash mounted that it shall be on?", err)
	}
	if info, err := os.Stat(a.cfg.StateDir); err != nil {
		return fmt.Errorf("state directory: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("state directory %s: not a directory", a.cfg.StateDir)
	}
	lock, err := state.Lock(a.cfg.StateDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	a.runner.start(ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.runner.run(ctx) })
	g.Go(func() error { return a.talk(ctx) })
	if a.prober != nil {
		g.Go(func() error { return a.prober.Run(ctx) })
	}
	return g.Wait()
}

// talk gets an identity and keeps the session, anew with every identity.
func (a *Agent) talk(ctx context.Context) error {
	for id := a.identify(ctx); id != nil; {
		var err error
		if id, err = a.talkAs(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// talkAs keeps the session until ctx ends or there is another identity, which
// it returns.
func (a *Agent) talkAs(ctx context.Context, id *identity.Identity) (*identity.Identity, error) {
	keeper := newKeeper(a, id)
	a.cfg.Logger.Info("identity is known", "router", id.RouterID, "valid-until", id.Leaf.NotAfter)
	a.clock.Raise(id.Leaf.NotBefore)
	err := session.New(session.Config{
		Address: a.cfg.Controller,
		TLS:     identity.TLS(a.clock, id.Authorities, keeper.id.Load),
		Logger:  a.cfg.Logger.Named("session"),
		Hello: session.Hello{
			RouterID:     id.RouterID,
			BootID:       a.boot,
			Version:      a.cfg.Version,
			Model:        a.cfg.Model,
			Dataplane:    a.cfg.DataplaneName,
			Capabilities: []string{"confirm", "expiry"},
		},
		Outbox:    a.outbox,
		Status:    a.runner.current,
		Report:    a.report.next,
		Deliver:   a.runner.deliver,
		Probe:     a.probeFromController,
		Reached:   a.runner.controllerReached,
		Clock:     a.clock.Compare,
		Handshake: keeper.handshake,
		Ended:     keeper.ended,
		Renewal:   keeper,
	}).Run(ctx)
	return keeper.next, err
}

func (a *Agent) setProbe(p plan.Probe) {
	if a.prober != nil {
		a.prober.Set(p)
	}
}

// probeFromController measures what the controller says, unless the router has
// a word of its own. What is measured goes on while there is no controller.
func (a *Agent) probeFromController(p plan.Probe) {
	if a.cfg.Probe == "" {
		a.setProbe(p)
	}
}
