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
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/session"
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
	a.report = newReporter(a.boot, cfg.Dataplane)
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
		return fmt.Errorf("state directory: %w", err)
	}
	if info, err := os.Stat(a.cfg.StateDir); err != nil {
		return fmt.Errorf("state directory: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("state directory %s: not a directory", a.cfg.StateDir)
	}
	a.runner.start(ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.runner.run(ctx) })
	g.Go(func() error { return a.talk(ctx) })
	return g.Wait()
}

// talk gets an identity and keeps the session.
func (a *Agent) talk(ctx context.Context) error {
	id := a.identify(ctx)
	if id == nil {
		return nil
	}
	a.cfg.Logger.Info("identity is known", "router", id.RouterID, "valid-until", id.Leaf.NotAfter)
	a.clock.Raise(id.Leaf.NotBefore)
	return session.New(session.Config{
		Address: a.cfg.Controller,
		TLS:     id.TLS(a.clock),
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
		Reached:   a.runner.controllerReached,
		Clock:     a.clock.Compare,
		Handshake: func(err error) bool { return id.LearnTime(err, a.clock) },
	}).Run(ctx)
}
