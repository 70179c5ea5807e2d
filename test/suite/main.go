// Command suite is `make test`: it runs every kind of test that this machine
// can run, installs what they need when it may, and ends with what ran and
// what was skipped and why.
package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok := run(ctx)
	stop()
	if !ok {
		os.Exit(1)
	}
}

// step is one kind of test.
type step struct {
	name  string
	tools []tool        // without them it is skipped
	root  bool          // without root it is skipped
	env   []string      // for the go command
	args  []string      // of the go command
	ready []string      // of a go command before it: without its success it is skipped, for the reason that it prints
	limit time.Duration // for each package; 0: it runs no tests
}

// building is how long everything of a step may take that is not a test: on a
// machine without caches, compiling a step with the race detector takes minutes.
const building = 30 * time.Minute

// whole is how long the step may take. Tests have their own limit, and print
// their stacks when they are over it; this one is for what has none.
func (s step) whole() time.Duration { return building + 2*s.limit }

// tool is a program that a step needs, and the Debian package it is in.
type tool struct{ program, pkg string }

var (
	compiler = tool{"gcc", "gcc libc6-dev"} // the race detector links with it
	qemu     = tool{"qemu-mips", "qemu-user"}
	qemuLE   = tool{"qemu-mipsel", "qemu-user"}
	machines = tool{"qemu-system-x86_64", "qemu-system-x86"}
	malta    = tool{"qemu-system-mips", "qemu-system-mips"}
	squashfs = tool{"mksquashfs", "squashfs-tools"}
	promtool = tool{"promtool", "prometheus"}

	// Clusters that telemetry is sent to; which programs they are, the test knows.
	clusters = []tool{{"prometheus", "prometheus"}, {"victoria-metrics", "victoria-metrics"}}
)

// emulated tells tests that an emulator stands between them and the kernel.
const emulated = "CAKEFLEET_EMULATED=1"

// mips are the packages that have to be right on a 32-bit machine of either byte
// order. Tests that need something of the kernel that qemu-user lacks skip.
var mips = []string{
	"./engine/...", "./internal/plan/...", "./internal/wire/...",
	"./agent/state/...", "./agent/outbox/...", "./agent/identity/...", "./agent/session", "./agent/probe", "./agent/sqm", "./agent/dataplane/...",
}

// onRouter are the packages that routers run, the emulated one too. Those of
// servers would have their libraries compiled for machines that nobody runs them on.
var onRouter = []string{"./agent/...", "./cmd/cakefleet-agent/...", "./deploy/lab/guest/...", "./engine/...", "./internal/backoff", "./internal/plan/...", "./internal/wire/...", "./proto/..."}

func steps(pkgs packages) []step {
	router := []string{"GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0", emulated}
	routerLE := []string{"GOOS=linux", "GOARCH=mipsle", "GOMIPS=softfloat", "CGO_ENABLED=0", emulated}
	return []step{
		{name: "vet for mips", env: router, args: append([]string{"vet"}, onRouter...)},
		{name: "vet for mipsle", env: routerLE, args: append([]string{"vet"}, onRouter...)},
		// The engine has one caller and no goroutines: the race detector would
		// only make its long traces slower.
		{name: "engine", args: append([]string{"test"}, pkgs.engine...), limit: 10 * time.Minute},
		// Without the lab's machines, which take minutes.
		{name: "unit tests with the race detector", tools: []tool{compiler}, env: []string{"CGO_ENABLED=1", "CAKEFLEET_LAB_KERNEL="}, args: append([]string{"test", "-race"}, pkgs.unit...), limit: 10 * time.Minute},
		{name: "size of the agent on a router", tools: []tool{squashfs}, args: []string{"test", "-run", "Budget", "./deploy/router/build"}, limit: 10 * time.Minute},
		// Emulation is some thirty times slower; what is left out with -short are repetitions.
		{name: "big-endian 32-bit under qemu-mips", tools: []tool{qemu}, env: router, args: append([]string{"test", "-short", "-exec", qemu.program}, pkgs.mips...), limit: 15 * time.Minute},
		{name: "little-endian 32-bit under qemu-mipsel", tools: []tool{qemuLE}, env: routerLE, args: append([]string{"test", "-short", "-exec", qemuLE.program}, pkgs.mips...), limit: 15 * time.Minute},
		// Processes that are stopped and killed, and a judge of what came of it.
		{name: "a fleet under faults", args: append([]string{"test", "-count=1"}, pkgs.fleet...), limit: 15 * time.Minute},
		{name: "remote-write to Prometheus and VictoriaMetrics", tools: clusters, args: []string{"test", "-count=1", "-run", "TestRemoteWrite", "./controller/history"}, limit: 10 * time.Minute},
		{name: "rules and queries with promtool", tools: []tool{promtool}, args: []string{"test", "-count=1", "-run", "Promtool", "./deploy/prometheus", "./controller/promapi"}, limit: 10 * time.Minute},
		// Kernels that have what this one may lack. Where they are emulated, they
		// are some twenty times slower.
		onMachine("on Debian's kernel", "debian", machines, onDebian),
		onMachine("on the lab's big-endian kernel", "mips", malta, onMIPS),
		// One package at a time: they measure, and share the machine's cores.
		{name: "end to end on real packets", root: true, args: append([]string{"test", "-p=1", "-count=1"}, pkgs.netns...), limit: 20 * time.Minute},
	}
}

// onDebian and onMIPS are what machines of their own run, see test/machine:
// whatever has to do with a kernel and is not about speed.
var (
	onDebian = []string{
		"./agent/dataplane/...", "./agent/probe", "./internal/testnet:^TestRouter$",
		"./test/netns:^(TestPPPoE|TestFault108)$",
	}
	onMIPS = []string{"./agent/dataplane/kernel", "./agent/dataplane/internal/...", "./agent/dataplane/auto"}
)

// onMachine is a step of tests on another kernel, where nothing has to skip for
// want of something in it.
func onMachine(name, kernel string, qemu tool, pkgs []string) step {
	const limit = 20 * time.Minute
	command := []string{"run", "./test/machine", "--kernel", kernel}
	return step{
		name: name, tools: []tool{qemu}, limit: limit,
		ready: append(slices.Clip(command), "--prepare"),
		args: append(append(slices.Clip(command), "--json", "--short", "--limit", limit.String(),
			"--env", "CAKEFLEET_REQUIRE_CAKE=1", "--env", "CAKEFLEET_REQUIRE_NETNS=1"), pkgs...),
	}
}

func run(ctx context.Context) bool {
	pkgs, err := listPackages(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		return false
	}
	r := report{module: pkgs.module}
	for _, s := range steps(pkgs) {
		if ctx.Err() != nil {
			r.skip(s.name, "interrupted")
			r.failed = true
			continue
		}
		fmt.Printf("\n== %s\n", s.name)
		if why := cmp.Or(needsRoot(s), install(ctx, s.tools), getReady(ctx, s)); why != "" {
			if slices.Contains(s.args, "-race") {
				// The same tests still have something to say without it.
				r.skip(s.name, why+"; they ran without it")
				s.name, s.env, s.args = "unit tests", []string{"CAKEFLEET_LAB_KERNEL="}, slices.DeleteFunc(s.args, func(a string) bool { return a == "-race" })
			} else {
				fmt.Println("skipped:", why)
				r.skip(s.name, why)
				continue
			}
		}
		began := time.Now()
		res := again(ctx, s, goCommand(ctx, s), goCommand)
		r.add(s.name, time.Since(began), res)
	}
	r.print(os.Stdout)
	return !r.failed
}

func needsRoot(s step) string {
	if s.root && os.Geteuid() != 0 {
		return "needs root for network namespaces; run it as root"
	}
	return ""
}

// getReady returns why a step can't run, by the word of the command that gets
// it ready.
func getReady(ctx context.Context, s step) string {
	if s.ready == nil {
		return ""
	}
	ctx, done := context.WithTimeout(ctx, building)
	defer done()
	cmd := exec.CommandContext(ctx, "go", s.ready...)
	cmd.WaitDelay = 30 * time.Second
	out, err := cmd.CombinedOutput()
	if err == nil {
		return ""
	}
	for line := range strings.Lines(string(out)) {
		if why, ok := strings.CutPrefix(line, "machine: "); ok {
			return strings.TrimSpace(why)
		}
	}
	return fmt.Sprintf("%v: %s", err, bytes.TrimSpace(out))
}

// install makes sure that the tools are there and returns why they are not.
func install(ctx context.Context, tools []tool) string {
	for _, t := range tools {
		if _, err := exec.LookPath(t.program); err == nil {
			continue
		}
		if os.Geteuid() != 0 {
			return fmt.Sprintf("%s is missing; install %s, or run as root on Debian", t.program, t.pkg)
		}
		if _, err := exec.LookPath("apt-get"); err != nil {
			return fmt.Sprintf("%s is missing and this is not a Debian; install %s", t.program, t.pkg)
		}
		fmt.Printf("installing %s for %s\n", t.pkg, t.program)
		script := "apt-get update -q && apt-get install -yq --no-install-recommends " + t.pkg
		cmd := exec.CommandContext(ctx, "sh", "-c", script)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Printf("%s", out)
			return fmt.Sprintf("%s is missing and apt-get could not install %s: %v", t.program, t.pkg, err)
		}
	}
	return ""
}

// packages are ours by the step that tests them.
type packages struct {
	module                           string
	engine, unit, netns, fleet, mips []string
}

func listPackages(ctx context.Context) (packages, error) {
	list := func(args ...string) ([]string, error) {
		cmd := exec.CommandContext(ctx, "go", append([]string{"list"}, args...)...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		return strings.Fields(string(out)), nil
	}
	var p packages
	module, err := list("-m")
	if err != nil {
		return p, err
	}
	p.module = module[0]
	all, err := list("./...")
	if err != nil {
		return p, err
	}
	for _, pkg := range all {
		switch rel := strings.TrimPrefix(pkg, p.module+"/"); {
		case rel == "engine" || strings.HasPrefix(rel, "engine/"):
			p.engine = append(p.engine, pkg)
		case rel == "test/fleet":
			p.fleet = append(p.fleet, pkg)
		case rel == "test/e2e" || rel == "test/netns":
			p.netns = append(p.netns, pkg)
		default:
			p.unit = append(p.unit, pkg)
		}
	}
	p.mips, err = list(append([]string{"-e", "-f", `{{if .Dir}}{{.ImportPath}}{{end}}`}, mips...)...)
	return p, err
}

// machine says on what the numbers were made.
func machine() string {
	return fmt.Sprintf("%s %s/%s, %d CPUs", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
}
