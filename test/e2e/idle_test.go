package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestFault120_Idle counts how often an agent wakes up while its home sleeps, with a
// report each 10 s: each time that one of its threads has waited for something
// and goes on.
//
// The aim is 2 a second. What is above it is the runtime's monitor, which looks
// at a packet loop's system call some thirty times before it believes that it
// waits: for each packet of the agent's own session.
//
// It weighs the agent's memory as well, with its session and its reports. The
// budget of a router, 14 MB, is for 32-bit MIPS and is judged in the lab.
func TestFault120_Idle(t *testing.T) {
	f := newFleetThatReports(t, 10*time.Second)
	f.ctl(t, "plan", "set", planName, "--down", mbit(20), "--up", mbit(5))
	f.subscribe(t)
	const (
		span = 20 * time.Second
		aim  = 2.0 // a second
		most = 45.0

		mostMemory = 24_000_000 // bytes, on 64 bits
	)
	pid := f.Agents[0].PID()
	// What just happened goes on for a while: sessions settle, caches of
	// neighbours are asked about.
	time.Sleep(10 * time.Second)
	var perSecond float64
	for range tries {
		before := wakeups(t, pid)
		time.Sleep(span)
		after := wakeups(t, pid)
		var all int
		detail := ""
		for thread, n := range after {
			all += n - before[thread]
			detail += fmt.Sprintf(" %s:%d", thread, n-before[thread])
		}
		perSecond = float64(all) / span.Seconds()
		if rss := f.report(t, 0).Agent.ResidentBytes; rss == 0 || rss > mostMemory {
			t.Errorf("%.1f MB resident, want at most %.1f", float64(rss)/1e6, mostMemory/1e6)
		} else {
			t.Logf("%.1f MB resident", float64(rss)/1e6)
		}
		t.Logf("%.2f wakeups a second, aim %.0f, by thread in %v:%s", perSecond, aim, span, detail)
		if perSecond <= most {
			return
		}
	}
	t.Errorf("%.2f wakeups a second, want at most %.0f", perSecond, most)
}

// wakeups returns how often each thread of a process has waited.
func wakeups(t *testing.T, pid int) map[string]int {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	must(t, err)
	n := map[string]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread has just ended
		}
		must(t, err)
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:\t")
		value, _, _ := strings.Cut(rest, "\n")
		k, err := strconv.Atoi(value)
		must(t, err)
		n[filepath.Base(filepath.Dir(file))] = k
	}
	if len(n) == 0 {
		t.Fatalf("process %d has no threads", pid)
	}
	return n
}
