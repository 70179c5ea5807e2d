// The benchcontrol program measures what a fleet costs its controllers: memory
// and CPU of very many sessions, how long a change of a plan takes to reach all
// of them, and a storm of reconnects; and the same job done by NATS and by etcd
// with one watch for each agent, in the same run. It prints one line a figure:
// name, value, unit. make bench-control runs it.
//
// Memory is resident bytes above those of a controller without a fleet, divided
// by the agents, with the history of their sites and their own; marginal is what
// each agent of the second half adds, and fixed is the rest, with what is stored
// of all. What a controller takes without a fleet is told, too; it is a few MB
// more or less from start to start.
//
// The controllers are the real program, the agents those of internal/simagent
// in processes of their own, over mTLS on the loopback. The peers get plain TCP
// and clients as light as ours.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "benchcontrol:", err)
		os.Exit(1)
	}
}

// options are what is measured.
type options struct {
	n        int
	rounds   int
	rate     float64
	peers    bool
	storm    bool
	program  string
	dir      string
	perGroup int // agents of one process, and of one controller
}

func run(args []string) error {
	if len(args) > 0 {
		// A part of the bench that needs a process of its own.
		switch part, args := args[0], args[1:]; part {
		case "agents":
			return agentsChild(args)
		case "nats":
			return natsChild(args)
		case "etcd":
			return etcdChild(args)
		case "etcd-server":
			return etcdServer(args)
		}
	}
	var o options
	f := flag.NewFlagSet("benchcontrol", flag.ExitOnError)
	f.IntVar(&o.n, "n", 5000, "how many agents (`number`)")
	f.IntVar(&o.rounds, "rounds", 5, "how many changes of the plan (`number`)")
	f.Float64Var(&o.rate, "admit-rate", 200, "agents that the controllers let in each second, together: they share a machine with each other and with the agents, whose side of a handshake costs more; 0: their default (`number`)")
	f.BoolVar(&o.peers, "peers", true, "measure NATS and etcd, too")
	f.BoolVar(&o.storm, "storm", true, "measure a storm of reconnects")
	f.StringVar(&o.program, "controller", "", "`program` to measure; empty: cakefleet-controller is built")
	f.IntVar(&o.perGroup, "group", 15000, "agents of one controller and of one process of agents, for the limit on open files (`number`)")
	if err := f.Parse(args); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp("", "benchcontrol-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // in the system's temporary directory
	o.dir = dir

	ours, err := benchFleet(ctx, o)
	if err != nil {
		return fmt.Errorf("cakefleet: %w", err)
	}
	if o.peers {
		for _, peer := range []struct {
			name  string
			bench func(context.Context, options) (pushed, error)
		}{{"nats", benchNATS}, {"etcd", benchEtcd}} {
			theirs, err := peer.bench(ctx, o)
			if err != nil {
				return fmt.Errorf("%s: %w", peer.name, err)
			}
			o.print(peer.name+"-memory", theirs.memory, "bytes-per-agent")
			o.print(peer.name+"-push-cpu", theirs.cpu, "us-per-agent")
			o.print(peer.name+"-push-p99", theirs.p99.Seconds()*1e3, "ms")
			o.print("control-push-p99-vs-"+peer.name, ours.p99.Seconds()/theirs.p99.Seconds(), "ratio")
		}
	}
	o.extrapolate(ours)
	return nil
}

// pushed is what a change to all costs.
type pushed struct {
	memory      float64       // resident bytes for each agent, after it
	cpu         float64       // of the server, microseconds for each agent
	p50, p99    time.Duration // until an agent has sent its answer
	last        time.Duration
	handshakeUS float64 // CPU of the server for each agent that connects; 0: not known
}

// label is n as it is said in names.
func (o options) label() string {
	if o.n%1000 == 0 {
		return fmt.Sprintf("%dk", o.n/1000)
	}
	return fmt.Sprint(o.n)
}

// print prints one figure.
func (o options) print(name string, value float64, unit string) {
	text := fmt.Sprintf("%.0f", value)
	if value < 100 {
		text = fmt.Sprintf("%.2f", value)
	}
	fmt.Printf("%s-%s %s %s\n", name, o.label(), text, unit)
}

// extrapolate says what a million agents take, with the arithmetic.
func (o options) extrapolate(p pushed) {
	const fleet, perController = 1_000_000, 50_000
	controllers := fleet / perController
	fmt.Printf("# 1,000,000 agents on %d controllers of %d: memory %d x %.1f kB = %.1f GB each;\n", controllers, perController, perController, p.memory/1e3, perController*p.memory/1e9)
	fmt.Printf("# a change to all %d x %.0f us = %.1f s of CPU on each, all at the same time;\n", perController, p.cpu, perController*p.cpu/1e6)
	if p.handshakeUS > 0 {
		fmt.Printf("# a full reconnect %d x %.0f us = %.0f s of CPU on each; if one of them dies its agents are %d more for each of the other %d.\n",
			perController, p.handshakeUS, perController*p.handshakeUS/1e6, perController/(controllers-1), controllers-1)
	}
}

// summary returns the quantiles of the times since began.
func summary(began time.Time, times []time.Time) (p50, p99, last time.Duration) {
	slices.SortFunc(times, time.Time.Compare)
	at := func(q float64) time.Duration {
		return times[min(len(times)-1, int(q*float64(len(times))))].Sub(began)
	}
	return at(0.5), at(0.99), at(1)
}

// median returns the middle of the rounds' values.
func median[T int | float64 | time.Duration](v []T) T {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[len(v)/2]
}

// groups returns how the agents are divided.
func (o options) groups() (from, count []int) {
	for at := 0; at < o.n; at += o.perGroup {
		from, count = append(from, at), append(count, min(o.perGroup, o.n-at))
	}
	return from, count
}

// half is how many agents come first: the half of each group.
func (o options) half() (n int) {
	_, count := o.groups()
	for _, c := range count {
		n += c / 2
	}
	return n
}

// routerID returns the id of the i-th router.
func routerID(i int) string { return fmt.Sprintf("router-%06d", i) }

// build builds one of the project's programs.
func (o options) build(ctx context.Context, pkg string) (string, error) {
	out := filepath.Join(o.dir, filepath.Base(pkg))
	cmd := command(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, pkg)
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("build %s: %w", pkg, err)
	}
	return out, nil
}
