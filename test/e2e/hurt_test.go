package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/test/homes"
)

// TestNeverHurts does to a real agent what may happen to one on a router. Each
// time the home is online, and the operator reads of it. What happens within a
// process is for TestLoopFaultsAreTold of package userspace.
func TestNeverHurts(t *testing.T) {
	f := newFleet(t)
	f.ctl(t, "plan", "set", planName, "--down", "20mbit", "--up", "5mbit")
	f.subscribe(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *fleet, *homes.Home)
	}{
		{"killed", killed},
		{"out of memory", outOfMemory},
		{"hotplug", hotplug},
		{"MTU", mtu},
		{"renamed", renamed},
		{"dialed anew", dialedAnew},
		{"queue full", queueFull},
		{"flood", flood},
		{"news overflow", newsOverflow},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, f, f.net.Homes[0]) })
	}
}

// shows waits until a command about the first router prints some words.
func (f *fleet) shows(t *testing.T, words string, args ...string) {
	t.Helper()
	f.ask(t, words, func(text string) bool { return strings.Contains(text, words) }, args...)
}

func (f *fleet) routerShows(t *testing.T, words string) {
	t.Helper()
	f.shows(t, words, "router", "show", routerID(0))
}

// online wants datagrams of a home's host to be answered by the server.
func online(t *testing.T, f *fleet, server netip.Addr, what string) {
	t.Helper()
	var far net.PacketConn
	var near net.Conn
	must(t, f.net.Server.Do(func() (err error) {
		far, err = net.ListenPacket("udp", netip.AddrPortFrom(server, 0).String())
		return err
	}))
	defer far.Close()
	go func() {
		b := make([]byte, 100)
		for {
			n, who, err := far.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = far.WriteTo(b[:n], who) // the host counts what comes back
		}
	}()
	must(t, f.net.Homes[0].Hosts[0].Do(func() (err error) { near, err = net.Dial("udp", far.LocalAddr().String()); return err }))
	defer near.Close()
	b := make([]byte, 100)
	answered := 0
	for end := time.Now().Add(patience); answered < 5; {
		if time.Now().After(end) {
			t.Fatalf("%s: the home is offline: %d of 5 datagrams were answered", what, answered)
		}
		if _, err := near.Write([]byte("hello")); err != nil {
			time.Sleep(10 * time.Millisecond) // refused, while the neighbour is not known
			continue
		}
		must(t, near.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		if _, err := near.Read(b); err == nil {
			answered++
		}
	}
}

// applied counts how often the first router's agent has made its data plane run
// something.
func (f *fleet) applied(t *testing.T) int {
	t.Helper()
	log, err := os.ReadFile(f.Agents[0].Log)
	must(t, err)
	return strings.Count(string(log), "state runs")
}

func killed(t *testing.T, f *fleet, _ *homes.Home) {
	for _, words := range []string{
		"Crashed is true: the agent has ended by itself and was started again: it was killed",
		"Crashed is true: the agent has ended by itself 2 times in a row and was started again; the last time: it was killed",
	} {
		must(t, f.Agents[0].Kill())
		online(t, f, homes.Server4, "without an agent")
		must(t, f.StartAgent(0, ""))
		f.awaitSync(t, 0)
		f.routerShows(t, words)
		online(t, f, homes.Server4, "with another agent")
	}
	must(t, f.Agents[0].Stop())
	online(t, f, homes.Server4, "after a stop")
	must(t, f.StartAgent(0, ""))
	f.awaitSync(t, 0)
	// In sync may still be what the agent before said.
	f.ask(t, "an agent that was not killed", func(shown string) bool { return !strings.Contains(shown, "Crashed") }, "router", "show", routerID(0))
}

// outOfMemory puts the agent where there is no memory: the kernel kills it when
// it needs another page.
func outOfMemory(t *testing.T, f *fleet, _ *homes.Home) {
	withoutMemory(t, f.Agents[0].PID())
	dead := false
	for i, end := 0, time.Now().Add(patience); !dead; i++ {
		if time.Now().After(end) {
			t.Fatal("the agent needs no memory")
		}
		// Something to do. Whether the routers follow is not asked.
		_, _ = f.Ctl(t.Context(), nil, "plan", "set", planName, "--down", mbit(float64(20+i%2)))
		select {
		case <-f.Agents[0].Done():
			dead = true
		case <-time.After(100 * time.Millisecond):
		}
	}
	online(t, f, homes.Server4, "after the kill")
	must(t, f.StartAgent(0, ""))
	f.setPlan(t, 25, 5) // after all changes that are on their way
	f.routerShows(t, "Crashed is true: the agent has ended by itself and was started again: the router ran out of memory, and the kernel killed it or another program")
	online(t, f, homes.Server4, "with another agent")
}

// withoutMemory moves a process to a control group that has one page. What it
// has already it keeps.
func withoutMemory(t *testing.T, pid int) {
	t.Helper()
	var dir, limit string
	for _, c := range []struct{ root, limit string }{
		{"/sys/fs/cgroup", "memory.max"},
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
	} {
		dir = filepath.Join(c.root, prefix+"no-memory")
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, c.limit)); err == nil {
			limit = filepath.Join(dir, c.limit)
			break
		}
		_ = os.Remove(dir) // groups here have nothing to do with memory
	}
	if limit == "" {
		t.Skip("skipped: there are no control groups of memory")
	}
	t.Cleanup(func() {
		for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			err := os.Remove(dir) // busy until the last process is gone
			if err == nil {
				return
			}
			if time.Now().After(end) {
				t.Error(err)
				return
			}
		}
	})
	// While nothing is in it: a limit below what is used may be refused.
	must(t, os.WriteFile(limit, []byte("4096"), 0))
	must(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0))
}

// hotplug has a hundred events that say nothing new. A change that comes of
// something else meanwhile, such as of a plan that was on its way, doesn't come
// each time.
func hotplug(t *testing.T, f *fleet, h *homes.Home) {
	for try := 1; ; try++ {
		n := hotplugged(t, f, h)
		if n == 1 {
			return
		}
		if try == tries {
			t.Errorf("100 events without news and one with: %d changes, also in try %d", n, try)
			return
		}
		t.Logf("try %d: %d changes", try, n)
	}
}

// hotplugged returns how many changes 100 events without news and one with make.
func hotplugged(t *testing.T, f *fleet, h *homes.Home) int {
	t.Helper()
	f.shows(t, "MTU 1500", "stats", routerID(0))
	f.awaitSync(t, 0)
	before := f.applied(t)
	for range 100 {
		must(t, h.Router.Up(homes.WAN))
		must(t, h.Router.MTU(homes.WAN, 1500))
	}
	online(t, f, homes.Server4, "after the events")
	// What comes later is a change that shows that the agent has seen the events.
	must(t, h.Router.MTU(homes.WAN, 1400))
	defer func() { must(t, h.Router.MTU(homes.WAN, 1500)) }()
	f.shows(t, "MTU 1400", "stats", routerID(0))
	f.await(t, "the change", func(ctx context.Context) error {
		for f.applied(t) == before {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	})
	return f.applied(t) - before
}

func mtu(t *testing.T, f *fleet, h *homes.Home) {
	must(t, h.Router.MTU(homes.WAN, 1492))
	defer func() { must(t, h.Router.MTU(homes.WAN, 1500)) }()
	online(t, f, homes.Server4, "after the change")
	f.shows(t, "MTU 1492", "stats", routerID(0))
	f.awaitSync(t, 0)
	online(t, f, homes.Server4, "when it was told")
}

func renamed(t *testing.T, f *fleet, h *homes.Home) {
	must(t, h.Rename(homes.WAN, "other"))
	online(t, f, homes.Server6, "under another name")
	f.routerShows(t, "InterfaceUp is false: there is no interface wan: nothing is shaped until it comes")
	online(t, f, homes.Server6, "when it was told")
	must(t, h.Rename("other", homes.WAN))
	online(t, f, homes.Server4, "under its name")
	f.ask(t, "the interface again", func(shown string) bool { return !strings.Contains(shown, "InterfaceUp") }, "router", "show", routerID(0))
	f.awaitSync(t, 0)
}

// dialedAnew takes the line away and makes another of the same name.
func dialedAnew(t *testing.T, f *fleet, h *homes.Home) {
	var comings uint64
	if r := f.report(t, 0); r.WAN != nil {
		comings = r.WAN.Comings
	}
	must(t, h.Unplug())
	must(t, h.Plug())
	online(t, f, homes.Server4, "on the new line")
	f.await(t, "a report of it", func(ctx context.Context) error {
		for {
			if w := f.report(t, 0).WAN; w != nil && w.Index != 0 && w.Comings > comings {
				return nil
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			time.Sleep(200 * time.Millisecond)
		}
	})
	f.awaitSync(t, 0)
	f.shows(t, "dialed anew", "explain", routerID(0))
	online(t, f, homes.Server4, "when it was told")
}

var unshaped = regexp.MustCompile(`; (\d+) passed unshaped`)

// queueFull stops the agent, so that packets come that nobody takes.
func queueFull(t *testing.T, f *fleet, _ *homes.Home) {
	before := f.report(t, 0)
	must(t, f.Agents[0].Signal(syscall.SIGSTOP))
	online(t, f, homes.Server4, "while the agent stands still")
	must(t, f.Agents[0].Signal(syscall.SIGCONT))
	online(t, f, homes.Server4, "when it goes on")
	var after plan.Report
	f.await(t, "what has passed unshaped", func(ctx context.Context) error {
		for {
			if after = f.report(t, 0); after.Agent.BypassedPackets > before.Agent.BypassedPackets {
				return nil
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			time.Sleep(200 * time.Millisecond)
		}
	})
	// Or more, if some of them were counted later.
	f.ask(t, "what has passed unshaped", func(shown string) bool {
		words := unshaped.FindStringSubmatch(shown)
		if words == nil {
			return false
		}
		n, err := strconv.ParseUint(words[1], 10, 64)
		return err == nil && n >= after.Agent.BypassedPackets
	}, "stats", routerID(0))
}

// flood sends more than the agent's socket holds while nobody reads it.
func flood(t *testing.T, f *fleet, h *homes.Home) {
	before := f.report(t, 0).Agent.QueueOverflows
	var near net.Conn
	must(t, h.Hosts[0].Do(func() (err error) {
		near, err = net.Dial("udp", netip.AddrPortFrom(homes.Server4, 9).String())
		return err
	}))
	defer near.Close()
	b := make([]byte, 32)
	var after plan.Report
	f.await(t, "packets that found the queue full", func(ctx context.Context) error {
		for {
			// The rules live on for a moment after the agent has stopped.
			must(t, f.Agents[0].Signal(syscall.SIGSTOP))
			for range 50_000 {
				_, _ = near.Write(b) // nobody listens there, which it may be told
			}
			must(t, f.Agents[0].Signal(syscall.SIGCONT))
			online(t, f, homes.Server4, "after the flood") // and the gap in the packets' numbers shows
			if after = f.report(t, 0); after.Agent.QueueOverflows > before {
				return nil
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(time.Second):
			}
		}
	})
	t.Logf("%d packets found the queue full", after.Agent.QueueOverflows-before)
	f.shows(t, "packets that found the queue full", "explain", routerID(0))
	f.awaitSync(t, 0)
}

// newsOverflow has more news of interfaces than the agent's socket holds
// (ENOBUFS) while nobody reads it, and among them one about the line.
func newsOverflow(t *testing.T, f *fleet, h *homes.Home) {
	before := lost(t, f.Agents[0].PID())
	must(t, f.Agents[0].Signal(syscall.SIGSTOP))
	goOn := func() { must(t, f.Agents[0].Signal(syscall.SIGCONT)) }
	for i, end := 0, time.Now().Add(patience); lost(t, f.Agents[0].PID()) == before; i++ {
		if time.Now().After(end) {
			goOn()
			t.Fatal("the socket holds everything")
		}
		must(t, h.Router.MTU("lo", 60000+i%2))
	}
	must(t, h.Router.MTU(homes.WAN, 1400))
	defer func() { must(t, h.Router.MTU(homes.WAN, 1500)) }()
	online(t, f, homes.Server4, "while the agent stands still")
	goOn()
	f.shows(t, "MTU 1400", "stats", routerID(0))
	f.awaitSync(t, 0)
	online(t, f, homes.Server4, "when it was told")
}

// lost returns how many messages did not fit into the netlink sockets of a
// process's network namespace that listen to news of interfaces.
func lost(t *testing.T, pid int) (n uint64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/netlink", pid))
	must(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, line := range lines[1:] {
		// sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
		w := strings.Fields(line)
		if len(w) < 10 || w[1] != "0" { // NETLINK_ROUTE
			continue
		}
		drops, err := strconv.ParseUint(w[8], 10, 64)
		must(t, err)
		n += drops
	}
	return n
}
