// Command cakefleet-agent shapes a router's WAN link with CAKE as its
// controller desires, and goes on without one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent"
)

// Set by the linker: -X main.version=1.2.3 -X main.built=<Unix seconds>.
var (
	version = "devel"
	built   = "0"
)

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	o, err := parseOptions(args, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil:
		fmt.Fprintln(os.Stderr, "cakefleet-agent:", err)
		return exitUsage
	case o.version:
		fmt.Println("cakefleet-agent", version)
		return exitOK
	}
	log := hclog.New(&hclog.LoggerOptions{
		Name:       "cakefleet-agent",
		Level:      hclog.LevelFromString(o.logLevel),
		JSONFormat: o.logJSON,
		Output:     os.Stderr,
	})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, o, log); err != nil {
		log.Error("agent stopped", "error", err)
		return exitFailed
	}
	log.Info("agent stopped, the link is unshaped")
	return exitOK
}

// serve runs an agent until ctx ends.
func serve(ctx context.Context, o options, log hclog.Logger) error {
	plane, name, err := openDataplane(o, log)
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
		DataplaneName: name,
		Logger:        log,
	})
	if err != nil {
		return errors.Join(err, plane.Close())
	}
	log.Info("agent starts", "version", version, "interface", o.iface, "controller", o.controller, "dataplane", name)
	return a.Run(ctx)
}
