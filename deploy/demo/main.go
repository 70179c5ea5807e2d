// Command demo is `make demo`: a provider with a controller and three homes on
// this machine, real packets, and a plan that is changed in one place while
// they flow. It measures what every router does, draws it, and succeeds only
// if what it shows holds. With --rollout it is `make demo ROLLOUT=1`: twelve
// homes, whose plan is changed in stages, well and badly.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/cakefleet/cakefleet/test/homes"
	"github.com/cakefleet/cakefleet/test/traffic"
)

// prefix is how the names of the demo's namespaces begin.
const prefix = "cfdemo-"

// errNotShown means that everything ran, but not as it should.
var errNotShown = errors.New("what the demo shows does not hold")

func main() {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	os.Exit(run())
}

func run() int {
	bin := flag.String("bin", "bin", "folder with the three programs")
	svg := flag.String("svg", "out/demo.svg", "where the picture goes")
	staged := flag.Bool("rollout", false, "show rollouts on twelve routers instead")
	keep := flag.Bool("keep", false, "leave the fleet running")
	end := flag.Bool("end", false, "end a fleet that was left running")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unexpected argument %q\n", flag.Arg(0))
		return 2
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "demo: network namespaces need root: run it as root, such as with sudo")
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()

	// A run that was killed, or left running, is in the way of this one.
	release, names, err := homes.Claim(prefix, false)
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	defer func() { _ = release() }() // it ends with the process anyway
	if len(names) > 0 {
		fmt.Printf("Ended an earlier demo: its processes and %d namespaces are gone.\n\n", len(names))
	}
	if *end {
		if len(names) == 0 {
			fmt.Println("No demo is running.")
		}
		if err := os.RemoveAll(stateDir); err != nil {
			fmt.Fprintln(os.Stderr, "demo:", err)
			return 1
		}
		return 0
	}

	play := demo
	if *staged {
		play = rolloutDemo
	}
	err = play(ctx, options{bin: *bin, svg: *svg, keep: *keep})
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "\ndemo: interrupted; everything is taken down")
		return 130
	default:
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		return 1
	}
}
