// Package e2e tests the whole fleet on real packets: a controller, three
// agents and the command line as real programs, and homes full of traffic.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/homes"
	"github.com/cakefleet/cakefleet/test/traffic"
)

const (
	prefix     = "cfe2e-"
	homesCount = 3
	planName   = "standard"

	settle  = 3 * time.Second // until TCP has found a new rate
	measure = 5 * time.Second
	grace   = time.Second // until the last probes are back

	// patience is for what takes a moment unless something is broken; an agent
	// that has lost its controller tries again within a minute.
	patience = 90 * time.Second
)

func TestMain(m *testing.M) {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	interrupted := make(chan os.Signal, 1) // the first is enough
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-interrupted
		if claimed.Load() {
			_, _ = homes.RemoveLeftovers(prefix) // the next run tries again
		}
		os.Exit(1)
	}()
	os.Exit(m.Run())
}

// claimed is true while the names of the namespaces are this process's.
var claimed atomic.Bool

// fleet is a network with the whole fleet running in it.
type fleet struct {
	*homes.Fleet
	net  *homes.Network
	plan [2]float64 // rates down and up as setPlan left them
}

// newFleet starts a fleet with nothing desired yet.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	return newFleetThatReports(t, time.Second)
}

// newFleetThatReports is newFleet with another time between reports.
func newFleetThatReports(t *testing.T, interval time.Duration) *fleet {
	t.Helper()
	testnet.Require(t)
	release, left, err := homes.Claim(prefix, true)
	must(t, err)
	claimed.Store(true)
	t.Cleanup(func() {
		claimed.Store(false)
		if err := release(); err != nil {
			t.Error(err)
		}
	})
	if len(left) > 0 {
		t.Logf("removed what an earlier run has left: %v", left)
	}
	bin, dir := t.TempDir(), t.TempDir()
	build := exec.Command("go", "build", "-o", bin+"/", "./cmd/...")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	net, err := homes.Build(prefix, homesCount)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := net.Close(); err != nil {
			t.Error(err)
		}
	})
	hf, err := homes.NewFleet(net, bin, dir)
	if err != nil {
		t.Fatal(err)
	}
	hf.ReportInterval = interval
	f := &fleet{Fleet: hf, net: net}
	t.Cleanup(func() {
		if err := f.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			f.printLogs(t, dir)
		}
	})
	must(t, f.StartController())
	f.await(t, "the controller", f.AwaitController)
	for i := range net.Homes {
		token := f.ctl(t, "token", "create", "--router", routerID(i))
		must(t, f.StartAgent(i, strings.TrimSpace(token)))
	}
	f.await(t, "three agents", func(ctx context.Context) error {
		return f.Await(ctx, func(r homes.RouterState) bool { return r.Connected })
	})
	return f
}

func routerID(home int) string { return "router-" + strconv.Itoa(home+1) }

// ctl runs cakefleetctl, which has to succeed, and returns its result.
func (f *fleet) ctl(t *testing.T, args ...string) string {
	t.Helper()
	if len(args) > 1 && args[1] == "set" {
		args = append(args, "--wait-timeout", patience.String()) // where it waits for routers
	}
	out, err := f.Ctl(t.Context(), nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ask runs cakefleetctl until what it says fits, and returns that. It may fail
// meanwhile: of a router that has only just come, the controller has nothing to
// show yet.
func (f *fleet) ask(t *testing.T, what string, fits func(out string) bool, args ...string) string {
	t.Helper()
	var out string
	f.await(t, what, func(ctx context.Context) error {
		for {
			said, err := f.Ctl(ctx, nil, args...)
			if err == nil && fits(said) {
				out = said
				return nil
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%w; the last was:\n%s", errors.Join(context.Cause(ctx), err), said)
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	return out
}

// setPlan sets the plan's rates, Mbit/s, and waits until all routers run it.
func (f *fleet) setPlan(t *testing.T, down, up float64) {
	t.Helper()
	if f.plan == [2]float64{down, up} {
		return
	}
	f.plan = [2]float64{down, up}
	before := f.newest(t)
	f.ctl(t, "plan", "set", planName, "--down", mbit(down), "--up", mbit(up),
		"--options", "diffserv4 nat", "--up-options", "ack-filter")
	f.awaitSync(t, before)
}

// subscribe gives every home the plan.
func (f *fleet) subscribe(t *testing.T) {
	t.Helper()
	for i, h := range f.net.Homes {
		f.ctl(t, "subscriber", "set", h.Name, "--plan", planName)
		f.ctl(t, "router", "set", routerID(i), "--subscriber", h.Name)
	}
	f.awaitSync(t, 0)
}

// newest returns the newest revision that any router should run.
func (f *fleet) newest(t *testing.T) int64 {
	t.Helper()
	var newest int64
	for _, r := range f.routers(t) {
		newest = max(newest, r.Desired)
	}
	return newest
}

func (f *fleet) routers(t *testing.T) []homes.RouterState {
	t.Helper()
	var states []homes.RouterState
	f.await(t, "the routers", func(ctx context.Context) error {
		for {
			all, err := f.Routers(ctx)
			if err == nil {
				states = all
				return nil
			}
			select {
			case <-ctx.Done():
				return errors.Join(context.Cause(ctx), err)
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	return states
}

func (f *fleet) router(t *testing.T, home int) homes.RouterState {
	t.Helper()
	states := f.routers(t)
	i := slices.IndexFunc(states, func(r homes.RouterState) bool { return r.ID == routerID(home) })
	if i < 0 {
		t.Fatalf("%s is not in %+v", routerID(home), states)
	}
	return states[i]
}

// awaitSync waits until every router runs something newer than a revision.
func (f *fleet) awaitSync(t *testing.T, after int64) {
	t.Helper()
	f.await(t, "all routers in sync", func(ctx context.Context) error {
		return f.Await(ctx, func(r homes.RouterState) bool { return r.Sync && r.Desired > after })
	})
}

func (f *fleet) await(t *testing.T, what string, wait func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("waited in vain for %s", what))
	defer cancel()
	if err := wait(ctx); err != nil {
		t.Fatalf("wait for %s: %v", what, err)
	}
}

func (f *fleet) printLogs(t *testing.T, dir string) {
	logs, _ := filepath.Glob(dir + "/*.log") // the pattern is right
	for _, l := range logs {
		text, err := os.ReadFile(l)
		if err != nil {
			t.Log(err)
		}
		t.Logf("%s ends with:\n%s", filepath.Base(l), text[max(0, len(text)-3000):])
	}
}

// load is traffic of one home.
type load struct {
	*homes.Load
	home     *homes.Home
	down, up []string
	pings    []string
}

// newLoad starts four flows each way and a probe in each of these homes. It
// ends with the test.
func newLoad(t *testing.T, net *homes.Network, in ...int) []load {
	t.Helper()
	l := startServer(t, net)
	var all []load
	for _, i := range in {
		x := load{Load: l, home: net.Homes[i]}
		for host := range homes.HostsPerHome {
			down, up, err := l.Bulk(i, host, 2, homes.Server4, homes.Server6)
			must(t, err)
			x.down, x.up = append(x.down, down...), append(x.up, up...)
		}
		var err error
		x.pings, err = l.Ping(i, 0, 10*time.Millisecond)
		must(t, err)
		all = append(all, x)
	}
	return all
}

func startServer(t *testing.T, net *homes.Network) *homes.Load {
	t.Helper()
	l, err := homes.NewLoad(net)
	must(t, err)
	t.Cleanup(func() {
		for _, e := range l.Record.Errors() {
			t.Error("flow broke:", e)
		}
		if err := l.Stop(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// measureAll measures all homes at once, after a while.
func measureAll(t *testing.T, loads []load, wait, d time.Duration) []homes.Result {
	t.Helper()
	time.Sleep(wait)
	var hs []*homes.Home
	for _, l := range loads {
		hs = append(hs, l.home)
	}
	m, err := homes.NewMeter(hs...)
	must(t, err)
	time.Sleep(d)
	must(t, m.End())
	time.Sleep(grace)
	var all []homes.Result
	for i, l := range loads {
		all = append(all, m.Result(i, l.Record, l.down, l.up, l.pings))
	}
	return all
}

// want is what a home should get, Mbit/s; 0 = any.
type want struct {
	who         string
	down, up    float64
	median, p99 time.Duration // of the delay; 0 = any
}

// tries is how often a measurement may miss: whatever else the machine does
// takes from what homes get, and receivers that waited for a lost segment read
// at once what came while the line was not shaped.
const tries = 4

// wantAll measures until every home gets what it should.
func wantAll(t *testing.T, loads []load, wait, d time.Duration, wants ...want) {
	t.Helper()
	for try := 1; ; try++ {
		from, waits := time.Now(), testnet.CoreWaits(t)
		all := measureAll(t, loads, wait, d)
		busy := testnet.Busy(t, from, waits)
		t.Logf("something waited for a core %.0f %% of the time", busy)
		miss := ""
		for i, w := range wants {
			miss += w.miss(t, all[i])
		}
		if miss == "" {
			return
		}
		if try == tries && busy > testnet.Standstill {
			t.Skipf("skipped: this machine is too busy to judge it, something waited for a core %.0f %% of the time:%s", busy, miss)
		}
		if try == tries {
			t.Errorf("also after %d tries:%s", tries, miss)
			return
		}
		t.Logf("try %d:%s", try, miss)
		wait = 0
	}
}

// missed fails the test, or skips the rest of it where the machine was too busy
// for the last measurement to mean anything.
func missed(t *testing.T, busy float64, format string, args ...any) {
	t.Helper()
	if busy > testnet.Standstill {
		t.Skipf("skipped: this machine is too busy to judge it, something waited for a core %.0f %% of the time: "+format, append([]any{busy}, args...)...)
	}
	t.Errorf(format, args...)
}

// miss says what a home did not get as it should.
func (w want) miss(t *testing.T, r homes.Result) (miss string) {
	t.Helper()
	for _, d := range []struct {
		name string
		got  homes.Direction
		rate float64
	}{{"down", r.Down, w.down * 1e6}, {"up", r.Up, w.up * 1e6}} {
		if d.rate == 0 {
			continue
		}
		share := 100 * d.got.Share(d.rate)
		t.Logf("%s: %s %.2f Mbit/s, %.2f beside it, %.1f %%", w.who, d.name, d.got.Goodput/1e6, d.got.Beside/1e6, share)
		if share < 92 || share > 100 {
			miss += fmt.Sprintf(" %s: goodput %s is %.1f %% of the rate less acknowledgements and probes, want 92 to 100 %%.", w.who, d.name, share)
		}
	}
	t.Logf("%s: delay %+v", w.who, r.Latency)
	if w.median > 0 && r.Latency.Median > w.median || w.p99 > 0 && r.Latency.P99 > w.p99 {
		miss += fmt.Sprintf(" %s: delay %+v, want median at most %v and 99th percentile at most %v.", w.who, r.Latency, w.median, w.p99)
	}
	return miss
}

func mbit(rate float64) string { return fmt.Sprintf("%gmbit", rate) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// nothingLeft checks a router on which no agent runs.
func nothingLeft(t *testing.T, h *homes.Home) {
	t.Helper()
	tables, err := h.Router.Tables()
	must(t, err)
	tables = slices.DeleteFunc(tables, func(s string) bool { return strings.Contains(s, " testnet-") }) // the home's own
	if len(tables) > 0 {
		t.Errorf("%s: nftables tables are left: %q", h.Name, tables)
	}
	pids, err := homes.Inside(h.Router.Name)
	if err != nil || len(pids) > 0 {
		t.Errorf("%s: processes are left: %v (%v)", h.Name, pids, err)
	}
}
