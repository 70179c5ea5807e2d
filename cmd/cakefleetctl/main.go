// Command cakefleetctl is the operator's hand on a fleet: plans, subscribers,
// routers, join tokens and how they all feel.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
)

// Set by the linker: -X main.version=1.2.3.
var version = "devel"

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return ctl.Run(ctx, ctl.Config{
		Version: version,
		Args:    os.Args[1:],
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
		Getenv:  os.Getenv,
	})
}
