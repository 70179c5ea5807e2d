package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

type options struct {
	all               bool
	only, out, kernel string
	plugin            string
	verbose           bool
}

// line is one line of the table.
type line struct {
	name   string
	mips   int
	order  row.Order
	result *row.Result
	err    error
	search bool // look for the highest rate that is held
	extra  bool // only with --all
}

const mbit = 1_000_000

// The seed's link.
const seedDown, seedUp = 115 * mbit, 12 * mbit

// What is offered for what is shaped, per cent.
const overload = 110

func order(s row.Shaper, down, up uint64) row.Order {
	return row.Order{
		Kind: "traffic", Shaper: s,
		DownRate: down, UpRate: up,
		DownOffer: down * overload / 100, UpOffer: up * overload / 100,
		DownFlows: 16, UpFlows: 4, Run: 1,
		DownWords: "besteffort triple-isolate wash", UpWords: "diffserv3 triple-isolate",
		Settle: 1500 * time.Millisecond, Window: 2 * time.Second,
	}
}

var shaperNames = map[row.Shaper]string{
	row.None: "no shaping", row.FIFO: "fifo", row.HTB: "htb+fq_codel",
	row.Cake: "cake", row.Kernel: "agent kernel", row.Userspace: "agent userspace",
}

// lines are all rows of the table, in its order.
func lines() []line {
	var out []line
	for _, mips := range []int{500, 250} {
		for _, s := range []row.Shaper{row.None, row.FIFO, row.HTB, row.Cake, row.Kernel, row.Userspace} {
			for _, variant := range []struct {
				name  string
				set   func(*row.Order)
				extra bool
			}{
				{"", func(*row.Order) {}, false},
				{" v6", func(o *row.Order) { o.V6 = true }, true},
				{" busy", func(o *row.Order) { o.Busy = true }, true},
				{" gro", func(o *row.Order) { o.GRO, o.Run = true, 8 }, true},
			} {
				o := order(s, seedDown, seedUp)
				variant.set(&o)
				out = append(out, line{name: shaperNames[s] + variant.name, mips: mips, order: o, extra: variant.extra})
			}
		}
	}
	return out
}

func run(ctx context.Context, o options) error {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	kernel, err := findKernel(o)
	if err != nil {
		return err
	}
	if err := buildPrograms(ctx, o.out); err != nil {
		return err
	}
	files, err := fileSystem(o.out)
	if err != nil {
		return err
	}
	m := machine{kernel: kernel, files: files, work: o.out, plugin: o.plugin}
	if o.verbose {
		m.console = os.Stderr
	}
	printHead(os.Stdout)
	var errs []error
	for _, l := range lines() {
		if !only.MatchString(fmt.Sprintf("%s %d", l.name, l.mips)) || l.extra && !o.all && o.only == "" {
			continue
		}
		l.result, l.err = m.boot(ctx, l.order, l.mips)
		printLine(os.Stdout, &l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, l.err)
	}
	return errors.Join(errs...)
}

// buildPrograms builds the agent as it is for routers, and the guest's own
// program with and without the mended runtime.
func buildPrograms(ctx context.Context, out string) error {
	for _, args := range [][]string{
		{"--out", out, "mips"},
		{"--out", out, "--package", "./deploy/lab/guest", "mips"},
		{"--out", filepath.Join(out, "plain"), "--package", "./deploy/lab/guest", "--mend=false", "mips"},
	} {
		cmd := exec.CommandContext(ctx, "go", append([]string{"run", "./deploy/router/build"}, args...)...)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build for the machine: %w", err)
		}
	}
	return os.Rename(filepath.Join(out, "plain", "guest-mips"), filepath.Join(out, "guest-plain-mips"))
}
