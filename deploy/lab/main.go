// Command lab is "make lab": it boots big-endian MIPS machines whose clocks
// count instructions, sends traffic through each with another shaper, and
// prints what it costs them.
//
//	go run ./deploy/lab [--all] [--only REGEXP] [--profile]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/cakefleet/cakefleet/deploy/lab/kernel"
)

func main() {
	var o options
	flag.BoolVar(&o.all, "all", false, "every row, not only the essential ones")
	flag.StringVar(&o.only, "only", "", "only rows whose names match this `regexp`")
	flag.StringVar(&o.out, "out", "out/lab", "`directory` for the table, the picture and what is built")
	flag.StringVar(&o.kernel, "kernel", os.Getenv(kernel.Env), "kernel image `file`, vmlinux or vmlinux.xz (env "+kernel.Env+")")
	flag.Func("agent-env", "`NAME=VALUE` for the agent, may be given again", func(s string) error {
		o.agentEnv = append(o.agentEnv, s)
		return nil
	})
	flag.IntVar(&o.jobs, "jobs", runtime.NumCPU(), "`machines` at a time")
	flag.BoolVar(&o.profile, "profile", false, "tell for each row which functions its instructions went to (needs gcc)")
	flag.BoolVar(&o.verbose, "v", false, "show the machines' consoles")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}
