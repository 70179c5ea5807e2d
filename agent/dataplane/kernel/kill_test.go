package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// killEnv makes this program a process that shapes "wan" and dies at the step
// that it names.
const killEnv = "CAKEFLEET_KILL_AT"

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

// deadly is a conn that kills its process before or after a change.
type deadly struct {
	conn
	at, steps int
}

func (d *deadly) step() {
	if d.steps++; d.steps == d.at {
		// Nothing of ours runs after it.
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}

func (d *deadly) do(req []byte) ([]nlmsg.Message, error) {
	if m, _, _ := nlmsg.Next(native(), req); m.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP || m.Type == unix.RTM_GETLINK {
		return d.conn.do(req)
	}
	d.step()
	answers, err := d.conn.do(req)
	d.step()
	return answers, err
}

// shapeAndDie starts, changes in ways that take other parts, stops, starts again
// and ends. It says how many steps that were.
func shapeAndDie(at string) error {
	sock, err := dial()
	if err != nil {
		return err
	}
	die := &deadly{conn: sock}
	switch err := probe(sock, "wan"); {
	case errors.Is(err, dataplane.ErrUnsupported): // the rest is real all the same
		die.conn = &standIn{conn: sock, options: map[uint32][]byte{}}
	case err != nil:
		return err
	}
	if die.at, err = strconv.Atoi(at); err != nil {
		return err
	}
	d, err := open(Config{Interface: "wan"}, die)
	if err != nil {
		return err
	}
	ctx := context.Background()
	all := dataplanetest.Link()
	one, washed := all, all
	one.Down.Rate = 0
	washed.Up.Wash, washed.Down.Wash = true, true
	for _, act := range []func() error{
		func() error { _, err := d.Apply(ctx, all); return err },
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
	fmt.Println(die.steps)
	return nil
}

// TestKernelKilledAnywhere kills a process before and after every change that it
// asks the kernel for. The customer is online each time, and the next process
// takes over and leaves nothing.
func TestKernelKilledAnywhere(t *testing.T) {
	h := newHome(t)
	var server, client net.PacketConn
	err := errors.Join(
		h.isp.Do(func() (err error) { server, err = net.ListenPacket("udp4", "192.0.2.1:5000"); return err }),
		h.router.Do(func() (err error) { client, err = net.ListenPacket("udp4", "192.0.2.2:5000"); return err }),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	defer client.Close()
	go echo(server)
	online := func(what string) {
		t.Helper()
		b := make([]byte, 100)
		answered := 0
		for end := time.Now().Add(time.Minute); answered < 5; {
			if time.Now().After(end) {
				t.Fatalf("%s: the customer is offline: %d of 5 datagrams were answered", what, answered)
			}
			if _, err := client.WriteTo(b, server.LocalAddr()); err != nil {
				continue // no buffer, or the neighbour is not known
			}
			if err := client.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := client.ReadFrom(b); err == nil {
				answered++
			}
		}
	}
	run := func(at int) (steps int, killed bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), killEnv+"="+strconv.Itoa(at))
		var out, complaint strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &complaint
		err := h.router.Run(cmd)
		if err == nil {
			steps, err = strconv.Atoi(strings.TrimSpace(out.String()))
		} else if cmd.ProcessState != nil && cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
			return 0, true
		}
		if err != nil {
			if strings.Contains(complaint.String(), dataplane.ErrUnsupported.Error()) {
				testnet.Skip(t, complaint.String())
			}
			t.Fatalf("to be killed at %d: %v\n%s", at, err, &complaint)
		}
		return steps, false
	}
	online("before")
	steps, _ := run(0)
	if steps < 40 {
		t.Fatalf("a whole life has %d steps", steps)
	}
	t.Logf("a whole life has %d steps", steps)
	stride := 1
	if testing.Short() {
		stride = 5 // which comes to every one of the four cases below
	}
	for at := 1; at <= steps; at += stride {
		// One that meets what others have left may have fewer steps of its own.
		_, killed := run(at)
		online(fmt.Sprint("killed at ", at))
		if killed && at%4 != 0 {
			continue // the next one meets what two have left
		}
		if _, killed := run(0); killed {
			t.Errorf("after %d: the next one was killed", at)
		}
		online("after the next one")
		h.wantNothing(t)
	}
	if _, killed := run(0); killed {
		t.Error("the last one was killed")
	}
	h.wantNothing(t)
}
