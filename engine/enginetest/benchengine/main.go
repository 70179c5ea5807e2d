//go:build linux

// Command benchengine measures what the engine costs: instructions per packet on
// big-endian MIPS, against what the C code of Linux's sch_cake executes for the
// same packets, and nanoseconds and allocations per packet on this machine. It
// prints one line a figure:
//
//	engine-mips-W1 <instructions per packet> <ratio to C>
//	engine-mips-memory <bytes> <ratio to C>
//	engine-native-W1 <nanoseconds per packet> <allocations per packet>
//
// The cost of making the traffic is measured by itself and subtracted; the
// dissection of the header bytes is part of the cost, as it is in C.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cakefleet/cakefleet/engine/enginetest"
	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
)

// The instructions per offered packet that sch_cake of Linux 6.1.192 executes
// over 1,000,000 packets of each workload: mips-linux-gnu-gcc 12.2 with the flags
// of a kernel (-O2 -march=74kc -mno-abicalls -fno-pic -G 0), run by qemu-mips
// -cpu 74Kf 7.2, three SipHash calls and a minimal dissector included, locks,
// timers and packet memory not.
var cInstructions = map[string]float64{
	"W1": 5644, "W1u": 5298, "W2": 4494, "W2s": 5543, "W3": 5567, "W3n": 5079, "W4": 18409,
}

// cMemory is the bytes of one sch_cake instance on 32-bit MIPS: 8 tins of 88,248
// and 16,648 for the rest. Packets are extra.
const cMemory = 722632

var qemu = []string{"qemu-mips", "-cpu", "74Kf"}

type options struct {
	packets, nativePackets int
	workloads              []string
	top                    int
	lines                  bool
	mips, native           bool
}

func main() {
	var o options
	flag.IntVar(&o.packets, "n", 200_000, "offered `packets` per workload when counting instructions")
	flag.IntVar(&o.nativePackets, "native-n", 1_000_000, "offered `packets` per workload when timing")
	names := flag.String("w", "", "comma-separated `workloads`; all when empty")
	flag.IntVar(&o.top, "top", 0, "also print the `N` functions of each workload with the most instructions")
	flag.BoolVar(&o.lines, "lines", false, "with -top: source lines instead of functions")
	flag.BoolVar(&o.mips, "mips", true, "count instructions")
	flag.BoolVar(&o.native, "native", true, "time on this machine")
	worker := flag.String("worker", "", "run one `measurement` and print it as JSON; what the other flags mean does not apply")
	flag.Parse()
	if *worker != "" {
		exitOn(work(os.Stdout, *worker, o.packets))
		return
	}
	for _, w := range enginetest.Workloads() {
		if *names == "" || slices.Contains(strings.Split(*names, ","), w.Name) {
			o.workloads = append(o.workloads, w.Name)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	exitOn(run(ctx, o))
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchengine:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	dir, err := os.MkdirTemp("", "benchengine")
	if err != nil {
		return fmt.Errorf("make working directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if o.mips {
		if err := countInstructions(ctx, dir, o); err != nil {
			return err
		}
	}
	if o.native {
		return timeNatively(ctx, o)
	}
	return nil
}

func countInstructions(ctx context.Context, dir string, o options) error {
	for _, tool := range []string{qemu[0], "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Printf("engine-mips skipped: %s is not installed\n", tool)
			return nil
		}
	}
	plugin, err := insn.BuildPlugin(ctx, dir)
	if err != nil {
		return err
	}
	program := filepath.Join(dir, "benchengine-mips")
	build := exec.CommandContext(ctx, "go", "build", "-o", program,
		"github.com/cakefleet/cakefleet/engine/enginetest/benchengine")
	build.Env = append(os.Environ(), "GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build for mips: %w: %s", err, out)
	}
	for _, name := range o.workloads {
		whole, err := count(ctx, plugin, program, name, o.packets)
		if err != nil {
			return err
		}
		traffic, err := count(ctx, plugin, program, name+generatorOnly, o.packets)
		if err != nil {
			return err
		}
		each := float64(whole.Total()-traffic.Total()) / float64(o.packets)
		fmt.Printf("engine-mips-%s %.0f %.3f\n", name, each, each/cInstructions[name])
		if o.top > 0 {
			if err := printTop(program, whole, traffic, o); err != nil {
				return err
			}
		}
	}
	cmd := exec.CommandContext(ctx, qemu[0], append(qemu[1:], program, "-worker", "memory", "-n", fmt.Sprint(o.packets))...)
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("measure memory: %w", err)
	}
	var m memory
	if err := json.Unmarshal(out, &m); err != nil {
		return fmt.Errorf("measure memory: %w", err)
	}
	fmt.Printf("engine-mips-memory %d %.3f\n", m.Diffserv4, float64(m.Diffserv4)/cMemory)
	fmt.Printf("engine-mips-memory-8tins %d %.3f\n", m.Diffserv8, float64(m.Diffserv8)/cMemory)
	fmt.Printf("engine-mips-memory-W1 %d %.3f\n", m.Loaded, float64(m.Loaded)/cMemory)
	return nil
}

func count(ctx context.Context, plugin, program, measurement string, n int) (insn.Profile, error) {
	p, _, err := insn.Run(ctx, qemu, plugin, program, "-worker", measurement, "-n", fmt.Sprint(n))
	return p, err
}

func printTop(program string, whole, traffic insn.Profile, o options) error {
	resolve := insn.Profile.Functions
	if o.lines {
		resolve = insn.Profile.Lines
	}
	in, err := resolve(whole, program)
	if err != nil {
		return err
	}
	less, err := resolve(traffic, program)
	if err != nil {
		return err
	}
	each := map[string]float64{}
	for name, n := range in {
		each[name] = (float64(n) - float64(less[name])) / float64(o.packets)
	}
	names := slices.SortedFunc(maps.Keys(each), func(a, b string) int {
		return cmp.Or(cmp.Compare(each[b], each[a]), cmp.Compare(a, b))
	})
	for _, name := range names[:min(o.top, len(names))] {
		fmt.Printf("    %8.1f %s\n", each[name], name)
	}
	return nil
}

// timeNatively runs each workload in a process of its own, so that one does not
// leave the next a heap to collect, and keeps the quickest of three runs.
func timeNatively(ctx context.Context, o options) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	for _, name := range o.workloads {
		whole, err := timeOf(ctx, self, name, o.nativePackets)
		if err != nil {
			return err
		}
		traffic, err := timeOf(ctx, self, name+generatorOnly, o.nativePackets)
		if err != nil {
			return err
		}
		n := float64(o.nativePackets)
		fmt.Printf("engine-native-%s %.0f %.6f\n", name, float64(whole.Nanoseconds-traffic.Nanoseconds)/n,
			(float64(whole.Allocations)-float64(traffic.Allocations))/n)
	}
	return nil
}

func timeOf(ctx context.Context, self, measurement string, n int) (timing, error) {
	var best timing
	for i := range 3 {
		out, err := exec.CommandContext(ctx, self, "-worker", measurement, "-n", fmt.Sprint(n)).Output()
		if err != nil {
			if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
				err = fmt.Errorf("%w: %s", err, exit.Stderr)
			}
			return best, fmt.Errorf("time %s: %w", measurement, err)
		}
		var t timing
		if err := json.Unmarshal(out, &t); err != nil {
			return best, fmt.Errorf("time %s: %w", measurement, err)
		}
		if i == 0 || t.Nanoseconds < best.Nanoseconds {
			best = t
		}
	}
	return best, nil
}
