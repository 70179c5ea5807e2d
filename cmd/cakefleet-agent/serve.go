package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/ending"
	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/state"
)

// serve runs an agent until ctx ends.
func serve(ctx context.Context, o options, log hclog.Logger) (err error) {
	if err := o.checkToken(); err != nil {
		return err
	}
	plane, err := openDataplane(o, log)
	if err != nil {
		return rights(err)
	}
	record, err := ending.Begin(o.runDir, o.iface)
	if err != nil {
		log.Warn("the next agent will not know how this one has ended", "error", err)
	}
	defer func() { err = errors.Join(err, record.End(err)) }()
	seconds, err := strconv.ParseInt(built, 10, 64)
	if err != nil {
		return errors.Join(fmt.Errorf("build time %q: %w", built, err), plane.Close())
	}
	a, err := agent.New(agent.Config{
		Controller:    o.controller,
		StateDir:      o.stateDir,
		Token:         o.joinToken,
		Pin:           o.caPin,
		Serial:        o.serial(),
		Version:       version,
		Model:         o.model(),
		Built:         time.Unix(seconds, 0),
		MaxRate:       o.maxRate,
		Dataplane:     plane,
		DataplaneName: plane.Name,
		Interface:     plane,
		Probe:         o.probe,
		ProbeInterval: o.probeInterval,
		Before:        record.Previous(),
		Logger:        log,
	})
	if err != nil {
		return errors.Join(err, plane.Close())
	}
	if p := record.Previous(); p.Count > 0 {
		log.Warn("the agent before has ended without being stopped", "count", p.Count, "reason", p.Message)
	}
	log.Info("agent starts", "version", version, "interface", o.iface, "controller", o.controller, "dataplane", plane.Name())
	return rights(a.Run(ctx))
}

// checkToken returns an error if the router can only join and its token is none.
// A router that has joined, or has something to shape, goes on whatever the
// token is, and a file may get a better one.
func (o options) checkToken() error {
	if o.token == "" || o.tokenFile != "" {
		return nil
	}
	_, err := identity.ParseToken(o.token)
	if err == nil {
		return nil
	}
	if _, errID := identity.Load(o.stateDir); !errors.Is(errID, identity.ErrNone) {
		return nil
	}
	if _, _, _, errState := state.Open(o.stateDir); !errors.Is(errState, state.ErrNone) {
		return nil
	}
	return err
}

// rights says what it takes if the kernel did not permit something.
func rights(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("the agent needs root, or CAP_NET_ADMIN to shape, CAP_NET_RAW for --probe and a state directory that it may write: %w", err)
	}
	return err
}

// printKey prints what an operator needs to announce this router.
func printKey(w io.Writer, o options) error {
	if err := os.Mkdir(o.stateDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("state directory: %w", err)
	}
	key, err := identity.OwnKey(o.stateDir)
	if err != nil {
		return err
	}
	fingerprint, err := identity.Fingerprint(key)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, cmp.Or(o.serial(), "unknown"), fingerprint)
	return err
}

// follow waits for the agent to end, and ends it when a hangup brought new
// options; the link is unshaped for the moment between the two.
func follow(done <-chan error, hangup <-chan os.Signal, reload func() bool, cancel func()) error {
	for {
		select {
		case err := <-done:
			return err
		case <-hangup:
			if reload() {
				cancel()
				return <-done
			}
		}
	}
}
