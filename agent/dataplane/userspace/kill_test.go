package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// killEnv makes this program a process that shapes "wan" and dies at the step
// that it names, or of want of memory.
const killEnv = "CAKEFLEET_KILL_AT"

const outOfMemory = "memory"

func TestMain(m *testing.M) {
	at := os.Getenv(killEnv)
	if at == "" {
		os.Exit(m.Run())
	}
	if err := shapeAndDie(at); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// deadly are rules that kill their process at a step: before or after one of
// the kernel's transactions.
type deadly struct {
	rules
	at, steps int
}

func (d *deadly) step() {
	if d.steps++; d.steps == d.at {
		// Nothing of ours runs after it.
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}

func (d *deadly) do(act func() error) error {
	d.step()
	err := act()
	d.step()
	return err
}

func (d *deadly) Install(down, up nfqueue.Direction) error {
	return d.do(func() error { return d.rules.Install(down, up) })
}

func (d *deadly) Set(down, up nfqueue.Direction) error {
	return d.do(func() error { return d.rules.Set(down, up) })
}
func (d *deadly) Remove() error { return d.do(d.rules.Remove) }
func (d *deadly) Close() error  { return d.do(d.rules.Close) }

// shapeAndDie starts, changes in ways that take other rules, stops, starts again
// and ends. It says how many steps that were.
func shapeAndDie(at string) error {
	p, err := openParts("wan", MaxLoops)
	if err != nil {
		return err
	}
	r := &deadly{rules: p.rules}
	if at != outOfMemory {
		if r.at, err = strconv.Atoi(at); err != nil {
			return err
		}
	}
	p.rules = r
	d := newDataplane(Config{Interface: "wan", Seed: 1, Loops: MaxLoops}, p)
	ctx := context.Background()
	all := dataplanetest.Link()
	one, washed := all, all
	one.Down.Rate = 0
	washed.Up.Wash, washed.Down.Wash = true, true
	if _, err := d.Apply(ctx, all); err != nil {
		return err
	}
	if at == outOfMemory {
		return runOut()
	}
	for _, act := range []func() error{
		func() error { _, err := d.Apply(ctx, one); return err },
		func() error { _, err := d.Apply(ctx, washed); return err },
		func() error { return d.Clear(ctx) },
		func() error { _, err := d.Apply(ctx, washed); return err },
		d.Close,
	} {
		if err := act(); err != nil {
			return err
		}
	}
	fmt.Println(r.steps)
	return nil
}

// runOut takes memory until there is none, which ends a Go program.
func runOut() error {
	var used [][]byte
	now, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return err
	}
	pages, err := strconv.ParseUint(strings.Fields(string(now))[0], 10, 64)
	if err != nil {
		return err
	}
	most := pages*uint64(os.Getpagesize()) + 64<<20
	if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: most, Max: most}); err != nil {
		return err
	}
	for {
		used = append(used, bytes.Repeat([]byte{1}, 1<<20))
		if len(used) == math.MaxInt32 {
			return errors.New("there is always more memory")
		}
	}
}

// TestKilled kills a shaping process at every step of start, change and stop,
// and lets one run out of memory. The customer is online each time, and the
// next process takes over and leaves nothing.
func TestKilled(t *testing.T) {
	testnet.Require(t)
	host, router, far := testnet.Make(t, "host"), testnet.Make(t, "router"), testnet.Make(t, "far")
	err := errors.Join(
		testnet.Veth(host, "eth0", router, "lan"), testnet.Veth(router, "wan", far, "eth0"),
		host.Addr("eth0", "10.1.0.2/24"), router.Addr("lan", "10.1.0.1/24"), router.Addr("wan", "198.51.100.1/24"), far.Addr("eth0", "198.51.100.2/24"),
		router.Forward(), host.Route("0.0.0.0/0", "10.1.0.1"), far.Route("10.1.0.0/24", "198.51.100.1"),
	)
	if err != nil {
		t.Fatal(err)
	}
	online := echo(t, host, far, "198.51.100.2:7")
	online("before")
	run := func(at string) (steps int, err error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), killEnv+"="+at)
		var out, complaint strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &complaint
		err = router.Run(cmd)
		if err == nil {
			steps, err = strconv.Atoi(strings.TrimSpace(out.String()))
		}
		if status := cmd.ProcessState.Sys().(syscall.WaitStatus); err != nil && !status.Signaled() && !outOf(complaint.String()) {
			t.Fatalf("killed at %s: %v\n%s", at, err, &complaint)
		}
		return steps, err
	}
	steps, err := run("0")
	if err != nil || steps < 12 {
		t.Fatalf("a whole life has %d steps: %v", steps, err)
	}
	online("after a whole life")
	for at := range steps + 1 {
		name := strconv.Itoa(at)
		if at == 0 {
			name = outOfMemory
		}
		if _, err := run(name); err == nil {
			t.Errorf("killed at %s: it lives", name)
		}
		online("killed at " + name)
		if at%4 != 0 {
			continue // the next one meets what two have left
		}
		if _, err := run("0"); err != nil {
			t.Errorf("killed at %s: the next one: %v", name, err)
		}
		online("after the next one")
	}
	tables, err := router.Tables()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range tables {
		if strings.HasPrefix(name, "cakefleet-") {
			t.Errorf("left behind: %s", name)
		}
	}
}

// outOf reports whether a process said that memory was what it died of. With the
// race detector Go puts it in other words.
func outOf(complaint string) bool {
	return strings.Contains(complaint, "out of memory") || strings.Contains(complaint, "too many address space collisions for -race mode")
}

// echo returns a test of whether datagrams of a host are answered at an address.
func echo(t *testing.T, from, at *testnet.Namespace, address string) func(what string) {
	t.Helper()
	var server net.PacketConn
	var client net.Conn
	err := errors.Join(
		at.Do(func() (err error) { server, err = net.ListenPacket("udp", address); return err }),
		from.Do(func() (err error) { client, err = net.Dial("udp", address); return err }),
	)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 100)
		for {
			n, who, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = server.WriteTo(b[:n], who) // the client counts what comes back
		}
	}()
	t.Cleanup(func() {
		if err := errors.Join(server.Close(), client.Close()); err != nil {
			t.Error(err)
		}
		<-done
	})
	return func(what string) {
		t.Helper()
		b := make([]byte, 100)
		answered := 0
		for end := time.Now().Add(time.Minute); answered < 5; {
			if time.Now().After(end) {
				t.Fatalf("%s: the customer is offline: %d of 5 datagrams were answered", what, answered)
			}
			if _, err := client.Write([]byte("hello")); err != nil {
				continue // refused, while the neighbour is not known
			}
			if err := client.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, err := client.Read(b); err == nil {
				answered++
			}
		}
	}
}
