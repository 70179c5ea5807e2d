// Command machine runs tests on another kernel than this machine's: it boots a
// machine under QEMU that has nothing but the tests, the modules of the kernel,
// and the few programs that they call.
//
//	go run ./test/machine [--kernel debian|sid|mips] [--json] PACKAGES[:REGEXP]...
//
// PACKAGES is what go list takes; REGEXP is for -run. What it prints is what
// `go test -v` prints, or with --json `go test -json`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// options are what the command line says.
type options struct {
	kernel    string
	json      bool
	prepare   bool
	console   bool
	accel     string
	timeout   time.Duration
	limit     time.Duration
	args, env []string // of each test binary
	packages  []string
}

func main() {
	var o options
	var short bool
	flag.StringVar(&o.kernel, "kernel", "debian", "`which`: debian (this release's), sid (the newest), mips (the lab's, 32-bit big-endian)")
	flag.BoolVar(&o.json, "json", false, "print events as go test -json does")
	flag.BoolVar(&o.prepare, "prepare", false, "only see to it that the kernel is there")
	flag.BoolVar(&o.console, "console", false, "show the kernel's messages on standard error")
	flag.StringVar(&o.accel, "accel", "", "`how` QEMU runs the machine: kvm or tcg (default: kvm if this machine has it)")
	flag.DurationVar(&o.timeout, "timeout", 10*time.Minute, "`limit` for each package")
	flag.DurationVar(&o.limit, "limit", 40*time.Minute, "`limit` for the whole machine")
	flag.BoolVar(&short, "short", false, "as go test -short")
	flag.Func("env", "`NAME=VALUE` for the tests, may be given again", func(s string) error {
		o.env = append(o.env, s)
		return nil
	})
	flag.Parse()
	o.packages = flag.Args()
	if short {
		o.args = append(o.args, "-test.short")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	switch {
	case errors.Is(err, errFailed): // and what failed was told
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "machine:", err)
		os.Exit(2)
	}
}

// errFailed says that tests have failed.
var errFailed = errors.New("tests have failed")

func run(ctx context.Context, o options) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	k, err := findKernel(ctx, o.kernel, filepath.Join(cache, "cakefleet", "machine"))
	if err != nil {
		return fmt.Errorf("kernel %s: %w", o.kernel, err)
	}
	if o.prepare {
		return nil
	}
	if len(o.packages) == 0 {
		return errors.New("no packages are named: machine PACKAGES[:REGEXP]..., such as ./agent/dataplane/... './test/netns:^TestVLAN$'")
	}
	work, err := os.MkdirTemp("", "cakefleet-machine-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	m := machine{kernel: k, accel: accelerator(o.accel, k.arch), work: work, limit: o.limit, timeout: o.timeout}
	if o.console {
		m.console = os.Stderr
	}
	tests, files, err := build(ctx, o, &m)
	if err != nil {
		return err
	}
	return m.boot(ctx, tests, files, o)
}
