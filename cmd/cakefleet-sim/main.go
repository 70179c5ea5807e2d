// The cakefleet-sim program plays the routers of a fleet against a real
// controller, so that operators can size it before there are homes behind it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cakefleet-sim:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	o, err := parse(args, stdout)
	if err != nil || o == nil {
		return err
	}
	if err := o.resources(); err != nil {
		return err
	}
	routers, fleet, err := join(ctx, o, stdin, stderr)
	if fleet != nil {
		defer fleet.close()
	}
	if err != nil {
		return err
	}
	p := newPlayer(o, fleet.roots, routers)
	play(ctx, o, p, stderr)
	s := p.summary()
	err = errors.Join(fleet.remove(stderr), s.print(stdout, o.output))
	if s.Began == 0 && s.Routers > s.Offline {
		err = errors.Join(err, fmt.Errorf("no router had a session with %v: %s", o.agents, s.why()))
	}
	return err
}

// play runs the routers for the time that was asked for, or until ctx ends.
func play(ctx context.Context, o *options, p *player, stderr io.Writer) {
	if o.time > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.time)
		defer cancel()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.run(ctx)
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			if line := p.line(); !o.quiet {
				fmt.Fprintln(stderr, line)
			}
		}
	}
}

// print writes the summary.
func (s *summary) print(w io.Writer, output string) error {
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(s)
	}
	return s.table(w)
}
