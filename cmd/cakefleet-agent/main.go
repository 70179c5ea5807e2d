// A router's CPUs don't come and go; looking for them once a second would be
// most of what an idle agent does.

//go:debug updatemaxprocs=0

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
	"syscall"

	"github.com/hashicorp/go-hclog"
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

// GOGC and GOMEMLIMIT are left as Go has them. In the lab (agent userspace idle,
// 500 MIPS, a minute without traffic) the choice makes no difference to memory:
//
//	GOGC=100 (Go's own)  10.6 MB resident  0.08 % CPU
//	GOGC=50              10.7 MB           0.07 %
//	GOGC=200             10.6 MB           0.06 %
//	GOMEMLIMIT=10MiB     10.5 MB           0.08 %
//
// Most of what is resident is the program's text, not its heap, and a limit
// close to what is needed makes the collector burn CPU when there is much to do.
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
	case o.printKey:
		if err := printKey(os.Stdout, o); err != nil {
			fmt.Fprintln(os.Stderr, "cakefleet-agent:", err)
			return exitFailed
		}
		return exitOK
	case o.importSQM != "":
		if err := importSQM(os.Stdout, o.importSQM); err != nil {
			fmt.Fprintln(os.Stderr, "cakefleet-agent:", err)
			return exitFailed
		}
		return exitOK
	}
	relaxTimers()
	log := hclog.New(&hclog.LoggerOptions{
		Name:       "cakefleet-agent",
		Level:      hclog.LevelFromString(o.logLevel),
		JSONFormat: o.logJSON,
		Output:     os.Stderr,
	})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	hangup := make(chan os.Signal, 1) // one that is not read yet stands for all
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	for {
		running, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- serve(running, o, log) }()
		err := follow(done, hangup, func() bool { return reload(&o, args, log) }, cancel)
		cancel()
		switch {
		case err != nil:
			log.Error("agent stopped", "error", err)
			return exitFailed
		case ctx.Err() != nil:
			log.Info("agent stopped, the link is unshaped")
			return exitOK
		}
	}
}
