package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/traffic"
)

// childEnv makes this program a process that shapes the interface it names.
const childEnv = "CAKEFLEET_NETNS_AGENT"

// agentChild shapes 20/5 Mbit/s until its standard input ends.
func agentChild() bool {
	name := os.Getenv(childEnv)
	if name == "" {
		return false
	}
	d, err := userspace.Open(userspace.Config{Interface: name, Seed: 1})
	if err == nil {
		if _, err = d.Apply(context.Background(), link(20*mbit, 5*mbit)); err == nil {
			fmt.Println("ready")
			_, _ = io.Copy(io.Discard, os.Stdin)
		}
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// agent is a shaping process of its own.
type agent struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func (h *home) startAgent(t *testing.T) *agent {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=wan")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.router.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the shaping process says %q, error %v", line, err)
	}
	return &agent{cmd, stdin}
}

// left returns what is left of a data plane in the router's namespace.
func (h *home) left(t *testing.T) string {
	t.Helper()
	var queues []byte
	err := h.router.Do(func() (err error) {
		queues, err = os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	tables, err := h.router.Tables()
	if err != nil {
		t.Fatal(err)
	}
	var ours []string
	for _, name := range tables {
		if strings.HasPrefix(name, "cakefleet-") {
			ours = append(ours, name)
		}
	}
	return strings.TrimSpace(string(queues) + strings.Join(ours, " "))
}

// TestContract runs every data plane's suite on the kernel.
func TestContract(t *testing.T) {
	h := newHome(t)
	dataplanetest.Run(t, func(t *testing.T) dataplanetest.Subject {
		return dataplanetest.Subject{
			Dataplane: h.open(t),
			MaxRate:   10_000 * mbit, // a veth says that it has 10 Gbit/s
			Shaping: func() bool {
				down, err := h.router.Rules("cakefleet-wan", "down")
				if err != nil {
					t.Fatal(err)
				}
				up, err := h.router.Rules("cakefleet-wan", "up")
				if err != nil {
					t.Fatal(err)
				}
				return down+up > 0
			},
		}
	})
	if left := h.left(t); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

func TestWrongInterface(t *testing.T) {
	h := newHome(t)
	for _, name := range []string{"", "nosuch", "a-name-of-16-byt"} {
		err := h.router.Do(func() error {
			d, err := userspace.Open(userspace.Config{Interface: name})
			if err == nil {
				d.Close()
			}
			return err
		})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("interface %q: error is %v, want one that names it", name, err)
		}
	}
	if left := h.left(t); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

// tries is how often a measurement may miss: whatever else the machine does
// takes from what passes, or makes it stand still for a moment.
const tries = 4

// missed fails the test, or skips the rest of it where the machine was too busy
// for the last measurement to mean anything.
func missed(t *testing.T, busy float64, format string, args ...any) {
	t.Helper()
	if busy > testnet.Standstill {
		t.Skipf("skipped: this machine is too busy to judge it, something waited for a core %.0f %% of the time: "+format, append([]any{busy}, args...)...)
	}
	t.Errorf(format, args...)
}

// TestKill kills the shaping process; traffic goes on at once, and a new
// process takes over.
func TestKill(t *testing.T) {
	h := newHome(t)
	rec := traffic.NewRecord()
	start(t, h.far, traffic.Spec{Serve: port}, rec)
	for try := 1; ; try++ {
		began, waits := time.Now(), testnet.CoreWaits(t)
		miss := h.kill(t, rec, fmt.Sprint("kill", try, "-"))
		if miss == "" {
			break
		}
		if try == tries {
			missed(t, testnet.Busy(t, began, waits), "also after %d kills:%s", try, miss)
			break
		}
		t.Logf("try %d:%s", try, miss)
	}
	if left := h.left(t); left != "" {
		t.Logf("left for the next process to replace: %s", left)
	}

	b := h.startAgent(t)
	fs, names := flows("again", 4, false)
	start(t, h.hosts[0], traffic.Spec{Flows: fs}, rec)
	wantGoodput(t, rec, names, 10, 20)
	b.stdin.Close()
	if err := b.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if left := h.left(t); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

// kill measures flows while a shaping process is killed, and says what was not
// as it should be.
func (h *home) kill(t *testing.T, rec *traffic.Record, prefix string) (miss string) {
	t.Helper()
	a := h.startAgent(t)
	fs, names := flows(prefix, 4, false)
	probe := prefix + "probe"
	p := start(t, h.hosts[0], traffic.Spec{Flows: fs, Probes: []traffic.Probe{
		{Name: probe, Server: far4, Interval: 10 * time.Millisecond},
	}}, rec)
	time.Sleep(2 * time.Second)
	before := time.Now()
	time.Sleep(2 * time.Second)
	killed := time.Now()
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = a.cmd.Wait() // killed
	time.Sleep(3 * time.Second)
	to := time.Now()
	// Away from the kill by more than the readings are apart.
	shaped, free := rec.Goodput(before, killed.Add(-300*time.Millisecond), names...)/1e6, rec.Goodput(killed.Add(time.Second), to, names...)/1e6
	gap := rec.Gap(killed, to, probe)
	t.Logf("%.1f Mbit/s before, %.1f after; longest gap %v", shaped, free, gap)
	stop(t, p)
	if shaped > 20 {
		miss += fmt.Sprintf(" %.1f Mbit/s before the kill, want at most 20.", shaped)
	}
	if free < 40 {
		miss += fmt.Sprintf(" %.1f Mbit/s from a second after the kill, want it unshaped.", free)
	}
	if gap > time.Second {
		miss += fmt.Sprintf(" Traffic was cut for %v, want at most a second.", gap)
	}
	return miss
}

// wantGoodput measures windows until flows get what they should, Mbit/s.
func wantGoodput(t *testing.T, rec *traffic.Record, names []string, least, most float64) {
	t.Helper()
	time.Sleep(2 * time.Second)
	for try := 1; ; try++ {
		from, waits := time.Now(), testnet.CoreWaits(t)
		time.Sleep(2 * time.Second)
		to := time.Now()
		busy := testnet.Busy(t, from, waits)
		time.Sleep(500 * time.Millisecond) // until the readings are there
		got := rec.Goodput(from, to, names...) / 1e6
		t.Logf("%.1f Mbit/s", got)
		if got >= least && got <= most {
			return
		}
		if try == tries {
			missed(t, busy, "%.1f Mbit/s also in window %d, want %g to %g", got, try, least, most)
			return
		}
	}
}

// TestStop stops the shaping process for ten seconds; the traffic is cut for
// no longer than the rules live, and is shaped again afterwards.
func TestStop(t *testing.T) {
	h := newHome(t)
	a := h.startAgent(t)
	rec := traffic.NewRecord()
	start(t, h.far, traffic.Spec{Serve: port}, rec)
	fs, names := flows("down", 4, false)
	start(t, h.hosts[0], traffic.Spec{Flows: fs, Probes: []traffic.Probe{
		{Name: "probe", Server: far4, Interval: 10 * time.Millisecond},
	}}, rec)
	time.Sleep(2 * time.Second)
	for try := 1; ; try++ {
		stopped, waits := time.Now(), testnet.CoreWaits(t)
		if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		on, busy := time.Now(), testnet.Busy(t, stopped, waits)
		if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // until the readings are there
		gap, bound := rec.Gap(stopped, on, "probe"), nfqueue.Lifetime+500*time.Millisecond
		t.Logf("longest gap %v, %.1f Mbit/s while stopped", gap, rec.Goodput(stopped.Add(bound), on, names...)/1e6)
		if gap <= bound {
			break
		}
		if try == tries {
			missed(t, busy, "also after %d stops: traffic was cut for %v, want at most %v", try, gap, bound)
			break
		}
		time.Sleep(2 * time.Second)
	}
	// Gigabits while it was stopped have left holes that are filled now, which
	// counts as goodput too; and who overshot so much needs a while.
	wantGoodput(t, rec, names, 10, 100)
}

// TestRulesRemoved removes the tables behind our back; they come back.
func TestRulesRemoved(t *testing.T) {
	h := newHome(t)
	d := h.open(t)
	apply(t, d, link(20*mbit, 5*mbit))
	err := h.router.DeleteTables("cakefleet-")
	if errors.Is(err, syscall.EPERM) {
		t.Logf("nobody else can remove them on this kernel: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		left := h.left(t)
		if strings.Contains(left, "cakefleet-wan") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the tables have not come back: %s", left)
		}
	}
}
