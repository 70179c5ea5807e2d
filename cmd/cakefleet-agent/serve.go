package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent"
)

// serve runs an agent until ctx ends.
func serve(ctx context.Context, o options, log hclog.Logger) error {
	plane, err := openDataplane(o, log)
	if err != nil {
		return err
	}
	seconds, err := strconv.ParseInt(built, 10, 64)
	if err != nil {
		return errors.Join(fmt.Errorf("build time %q: %w", built, err), plane.Close())
	}
	a, err := agent.New(agent.Config{
		Controller:    o.controller,
		StateDir:      o.stateDir,
		Token:         o.joinToken,
		Version:       version,
		Model:         o.model(),
		Built:         time.Unix(seconds, 0),
		MaxRate:       o.maxRate,
		Dataplane:     plane,
		DataplaneName: plane.Name,
		Interface:     plane,
		Logger:        log,
	})
	if err != nil {
		return errors.Join(err, plane.Close())
	}
	log.Info("agent starts", "version", version, "interface", o.iface, "controller", o.controller, "dataplane", plane.Name())
	return a.Run(ctx)
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
