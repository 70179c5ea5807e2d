package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cakefleet/cakefleet/deploy/lab/kernel"
	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

type options struct {
	all               bool
	only, out, kernel string
	agentEnv          []string
	jobs              int
	profile, verbose  bool
}

// line is one line of the table.
type line struct {
	name   string
	mips   int
	order  row.Order
	search bool // looks for the highest rate that is held
	extra  bool // only with --all

	result *row.Result // of the last rate that was held, if it is a search
	shares []share     // of the functions, if that was asked for
	err    error
}

const mbit = 1_000_000

// The seed's link.
const seedDown, seedUp = 115 * mbit, 12 * mbit

// What is offered for what is shaped, per cent.
const overload = 110

func order(s row.Shaper) row.Order {
	const down, up = uint64(seedDown), uint64(seedUp)
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

// speeds bracket the router's 74Kc at 720 MHz, in million instructions a second.
var speeds = []int{500, 250}

var shapers = []row.Shaper{row.None, row.FIFO, row.HTB, row.Cake, row.Kernel, row.Userspace}

var variants = []struct {
	name  string
	set   func(*row.Order)
	extra bool
}{
	{"", func(*row.Order) {}, false},
	{" v6", func(o *row.Order) { o.V6 = true }, true},
	{" busy", func(o *row.Order) { o.Busy = true }, true},
	{" gro", func(o *row.Order) { o.GRO, o.Run = true, 8 }, true},
	{" gro 300", func(o *row.Order) {
		o.GRO, o.Run = true, 8
		o.DownRate, o.DownOffer = 300*mbit, 300*mbit*overload/100
	}, true},
	// As a speed test does it: one direction at a time, and TCP has come down to
	// hardly more than there is.
	{" down", func(o *row.Order) {
		o.UpFlows, o.UpOffer = 0, 0
		o.DownOffer = o.DownRate * 101 / 100
	}, true},
}

// lines are all rows of the table, in its order.
func lines() []*line {
	var out []*line
	for _, mips := range speeds {
		for _, v := range variants {
			for _, s := range shapers {
				o := order(s)
				v.set(&o)
				out = append(out, &line{name: shaperNames[s] + v.name, mips: mips, order: o, extra: v.extra})
			}
		}
		for _, v := range variants[:2] { // v4 and v6
			for _, s := range shapers {
				o := order(s)
				v.set(&o)
				o.Settle, o.Window = time.Second, time.Second // it takes some boots
				out = append(out, &line{name: shaperNames[s] + v.name + " max", mips: mips, order: o, search: true, extra: true})
			}
		}
	}
	for _, s := range []row.Shaper{row.Kernel, row.Userspace} {
		o := order(s)
		o.Kind, o.Settle, o.Window = "idle", 10*time.Second, 60*time.Second
		out = append(out, &line{name: shaperNames[s] + " idle", mips: 500, order: o})
	}
	return append(out, &line{name: "runtime monitor", mips: 500, order: row.Order{Kind: "monitor"}})
}

// grid are the download rates that a search tries, Mbit/s. The upload goes
// with them.
var grid = []uint64{20, 30, 40, 50, 60, 70, 80, 90, 100, 115, 130, 150, 175, 200, 225, 250, 275, 300, 350, 400, 450, 500, 600, 700, 800}

// guess is the place in grid of about what the shapers hold at so many MIPS.
func guess(mips int) int {
	i, _ := slices.BinarySearch(grid, uint64(mips)*35/100)
	return min(i, len(grid)-1)
}

// heldShare of what was asked for makes a rate held, per cent.
const heldShare = 95

func held(o *row.Order, r *row.Result) bool {
	enough := func(got row.Count, rate, offer uint64) bool {
		if o.Shaper == row.None {
			rate = offer
		}
		return got.Mbit(r.Window)*1e6*100 >= float64(rate)*heldShare
	}
	return enough(r.DownDelivered, o.DownRate, o.DownOffer) && (o.UpFlows == 0 || enough(r.UpDelivered, o.UpRate, o.UpOffer))
}

// highest returns the last of n things, from the smallest, that holds, -1 if
// none does; what is above one that does not hold does not hold either. It asks
// for the first one at first, and the better the guess, the fewer it asks for.
func highest(n, first int, holds func(int) (bool, error)) (int, error) {
	low, high := -1, n // low holds, high does not
	for try, step := first, 1; high-low > 1; {
		ok, err := holds(try)
		if err != nil {
			return 0, err
		}
		if ok {
			low = try
		} else {
			high = try
		}
		switch {
		case high == n:
			try = min(low+step, n-1)
		case low < 0:
			try = max(high-step, 0)
		default:
			try = (low + high) / 2
		}
		step *= 2
	}
	return low, nil
}

// run fills in one line.
func (l *line) run(ctx context.Context, m *machine) {
	if !l.search {
		if m.profile != nil {
			m.symbols = nil // one boot at a time
		}
		if l.result, l.err = m.boot(ctx, l.order, l.mips); l.err == nil && m.profile != nil {
			l.shares, l.err = m.profile.read(kernelSymbols(m.symbols))
		}
		return
	}
	base := l.order
	var n int
	n, l.err = highest(len(grid), guess(l.mips), func(i int) (bool, error) {
		o := base
		o.DownRate, o.UpRate = grid[i]*mbit, grid[i]*mbit*seedUp/seedDown
		o.DownOffer, o.UpOffer = o.DownRate*overload/100, o.UpRate*overload/100
		r, err := m.boot(ctx, o, l.mips)
		if err != nil || !held(&o, r) {
			return false, err
		}
		l.order, l.result = o, r
		return true, nil
	})
	if l.err == nil && n < 0 {
		l.err = fmt.Errorf("holds not even %d Mbit/s", grid[0])
	}
}

func run(ctx context.Context, o options) error {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	image, err := kernel.Find(o.kernel, o.out)
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
	m := machine{kernel: image, files: files, work: o.out}
	if o.verbose {
		m.console = os.Stderr
	}
	if o.profile {
		if m.profile, err = newProfiler(ctx, o.out); err != nil {
			return err
		}
		o.jobs = 1 // there is one file for the counts
	}
	var chosen []*line
	for _, l := range lines() {
		if only.MatchString(fmt.Sprintf("%s %d", l.name, l.mips)) && (!l.extra || o.all || o.only != "") {
			l.order.Profile, l.order.AgentEnv = o.profile, o.agentEnv
			chosen = append(chosen, l)
		}
	}
	if err := m.runAll(ctx, chosen, o.jobs); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(o.out, "lab.svg"), func(w io.Writer) error { return writeChart(w, chosen) }); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(o.out, "lab.txt"), func(w io.Writer) error {
		printHead(w)
		for _, l := range chosen {
			printLine(w, l)
		}
		return nil
	}); err != nil {
		return err
	}
	fmt.Printf("table and picture: %s\n", filepath.Join(o.out, "lab.{txt,svg}"))
	return judge(os.Stdout, chosen)
}

// runAll boots several machines at a time: what they measure does not depend
// on what else the computer does. Lines are printed in their order.
func (m *machine) runAll(ctx context.Context, ls []*line, jobs int) error {
	printHead(os.Stdout)
	done := make([]chan struct{}, len(ls))
	for i := range done {
		done[i] = make(chan struct{})
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(jobs, 1) + 1) // and the one that prints
	g.Go(func() error {
		for i, l := range ls {
			select {
			case <-done[i]:
			case <-ctx.Done():
				return ctx.Err()
			}
			printLine(os.Stdout, l)
			if len(l.shares) > 0 {
				printProfile(os.Stdout, l.shares, l.result)
			}
		}
		return nil
	})
	for i, l := range ls {
		g.Go(func() error {
			l.run(ctx, m)
			close(done[i])
			return ctx.Err()
		})
	}
	return g.Wait()
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
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
