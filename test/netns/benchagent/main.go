// Command benchagent measures what the userspace data plane costs on real
// packets in namespaces, and prints "name value unit" lines. Nothing is
// asserted: the figures are this machine's.
//
// CPU time is that of a process that does nothing but shape. Its system time
// has the rest of a packet's way in it, since a verdict carries the packet on
// through the kernel: forwarding, the link, and here even the receiver's TCP.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/traffic"
)

const (
	linkEnv  = "CAKEFLEET_BENCH_LINK"  // makes this program the shaping process
	loopsEnv = "CAKEFLEET_BENCH_LOOPS" // how many packet loops it has
	prefix   = "cfbench-"
	mbit     = engine.BitsPerSecond(1_000_000)
	warm     = 2 * time.Second
	window   = 5 * time.Second
)

var server = netip.MustParseAddrPort("192.0.2.2:5001")

// reading is what the shaping process says when it is asked.
type reading struct {
	User, System      time.Duration
	Mallocs           uint64
	Packets, Batches  uint64
	Segments, Bytes   uint64 // that left
	Bypassed, Dropped uint64
	Threads           map[string]time.Duration // CPU time of each thread
}

func main() {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	var err error
	if text := os.Getenv(linkEnv); text != "" {
		err = shape(text, os.Stdin, os.Stdout)
	} else {
		err = run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchagent:", err)
		os.Exit(1)
	}
}

func run() error {
	if os.Geteuid() != 0 {
		fmt.Println("# benchagent: skipped, network namespaces need root")
		return nil
	}
	if _, err := testnet.RemoveLeftovers(prefix); err != nil {
		return err
	}
	c := engine.DefaultConfig()
	c.Tins = engine.Diffserv4
	for _, b := range []struct {
		name     string
		down, up engine.BitsPerSecond
	}{
		{"userspace-115-12", 115 * mbit, 12 * mbit},
		{"userspace-400-400", 400 * mbit, 400 * mbit}, // every segment by itself
		{"userspace-full", 10_000 * mbit, 10_000 * mbit},
	} {
		l := plan.Link{Down: c, Up: c}
		l.Down.Rate, l.Up.Rate = b.down, b.up
		for loops := 1; loops <= min(userspace.MaxLoops, runtime.NumCPU()); loops++ {
			name := b.name
			if loops > 1 {
				name = fmt.Sprintf("%s-%d-loops", name, loops)
			}
			if err := measure(name, l, loops); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// measure sends four flows each way through a link.
func measure(name string, l plan.Link, loops int) (err error) {
	var closers []func() error
	defer func() {
		for _, c := range slices.Backward(closers) {
			err = errors.Join(err, c())
		}
	}()
	var ns [3]*testnet.Namespace
	for i, n := range []string{"host", "router", "far"} {
		if ns[i], err = testnet.New(prefix + n); err != nil {
			return err
		}
		closers = append(closers, ns[i].Close)
	}
	host, router, far := ns[0], ns[1], ns[2]
	err = errors.Join(
		testnet.Veth(host, "eth0", router, "lan"),
		testnet.Veth(router, "wan", far, "eth0"),
		host.Addr("eth0", "10.9.1.2/24"),
		router.Addr("lan", "10.9.1.1/24"),
		router.Addr("wan", "192.0.2.1/24"),
		far.Addr("eth0", server.Addr().String()+"/24"),
		host.Route("0.0.0.0/0", "10.9.1.1"),
		router.Forward(),
		router.Masquerade("wan", false),
	)
	if err != nil {
		return err
	}
	ask, stop, err := startShaper(router, l, loops)
	if err != nil {
		return err
	}
	closers = append(closers, stop)
	rec := traffic.NewRecord()
	var flows []traffic.Flow
	for i := range 4 {
		flows = append(flows,
			traffic.Flow{Name: fmt.Sprint("down", i), Server: server},
			traffic.Flow{Name: fmt.Sprint("up", i), Server: server, Up: true})
	}
	for _, end := range []struct {
		n    *testnet.Namespace
		spec traffic.Spec
	}{{far, traffic.Spec{Serve: server.Port()}}, {host, traffic.Spec{Flows: flows}}} {
		p, err := traffic.Start(end.n.Start, end.spec, rec)
		if err != nil {
			return err
		}
		closers = append(closers, p.Stop)
	}
	time.Sleep(warm)
	a, err := ask()
	if err != nil {
		return err
	}
	time.Sleep(window)
	b, err := ask()
	if err != nil {
		return err
	}
	packets := float64(b.Packets - a.Packets)
	if packets == 0 {
		return errors.New("no packets")
	}
	user, system := (b.User - a.User).Nanoseconds(), (b.System - a.System).Nanoseconds()
	show := func(what string, value float64, unit string) { fmt.Printf("%s/%s %.4g %s\n", name, what, value, unit) }
	show("packets", packets/window.Seconds(), "packets/s")
	show("segments", float64(b.Segments-a.Segments)/window.Seconds(), "segments/s")
	show("sent", float64(b.Bytes-a.Bytes)*8/window.Seconds()/1e6, "Mbit/s")
	show("user", float64(user)/packets, "ns/packet")
	show("system", float64(system)/packets, "ns/packet")
	show("cpu", 100*float64(user+system)/float64(window), "%-of-a-core")
	show("busiest", 100*float64(busiest(a, b))/float64(window), "%-of-a-core")
	show("batch", packets/float64(b.Batches-a.Batches), "packets/read")
	show("allocations", float64(b.Mallocs-a.Mallocs)/packets, "allocs/packet")
	show("dropped", float64(b.Dropped-a.Dropped)/window.Seconds(), "packets/s")
	show("bypassed", float64(b.Bypassed-a.Bypassed)/window.Seconds(), "packets/s")
	return nil
}

// busiest is what the thread used that used most between two readings.
func busiest(a, b reading) (most time.Duration) {
	for id, used := range b.Threads {
		most = max(most, used-a.Threads[id])
	}
	return most
}

// threads are the CPU times of this process's threads (proc_pid_schedstat(5)).
func threads() (map[string]time.Duration, error) {
	files, err := filepath.Glob("/proc/self/task/*/schedstat")
	if err != nil {
		return nil, err
	}
	used := map[string]time.Duration{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil { // it has ended
			continue
		}
		var ns int64
		if _, err := fmt.Sscan(string(text), &ns); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		used[f] = time.Duration(ns)
	}
	return used, nil
}

// startShaper starts this program as a process that shapes wan. ask takes a
// reading, stop ends the process.
func startShaper(n *testnet.Namespace, l plan.Link, loops int) (ask func() (reading, error), stop func() error, err error) {
	text, err := json.Marshal(l)
	if err != nil {
		return nil, nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), linkEnv+"="+string(text), loopsEnv+"="+strconv.Itoa(loops))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := n.Start(cmd); err != nil {
		return nil, nil, err
	}
	answers := json.NewDecoder(stdout)
	ask = func() (r reading, err error) {
		if _, err := io.WriteString(stdin, "\n"); err != nil {
			return r, err
		}
		return r, answers.Decode(&r)
	}
	stop = func() error { return errors.Join(stdin.Close(), cmd.Wait()) }
	if _, err := ask(); err != nil { // it shapes
		return nil, nil, errors.Join(err, stop())
	}
	return ask, stop, nil
}

// shape is the shaping process: it answers each line with a reading.
func shape(text string, in io.Reader, out io.Writer) (err error) {
	var l plan.Link
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return err
	}
	loops, err := strconv.Atoi(os.Getenv(loopsEnv))
	if err != nil {
		return fmt.Errorf("%s: %w", loopsEnv, err)
	}
	d, err := userspace.Open(userspace.Config{Interface: "wan", Seed: 1, Loops: loops})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if _, err := d.Apply(context.Background(), l); err != nil {
		return err
	}
	answers := json.NewEncoder(out)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var st dataplane.Stats
		if !d.Stats(&st) {
			return errors.New("no statistics")
		}
		var use syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
			return err
		}
		var mem runtime.MemStats
		runtime.ReadMemStats(&mem)
		used, err := threads()
		if err != nil {
			return err
		}
		err = answers.Encode(reading{
			Threads: used,
			User:    time.Duration(use.Utime.Nano()), System: time.Duration(use.Stime.Nano()),
			Mallocs: mem.Mallocs, Packets: st.Packets, Batches: st.Batches,
			Segments: st.Down.SentPackets + st.Up.SentPackets, Bytes: st.Down.SentBytes + st.Up.SentBytes,
			Bypassed: st.BypassedPackets + st.QueueOverflows, Dropped: st.Down.Drops + st.Up.Drops,
		})
		if err != nil {
			return err
		}
	}
	return nil
}
