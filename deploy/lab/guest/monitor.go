package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

// monitor counts how often the monitor thread of Go's runtime wakes while a
// goroutine runs: in this program built without the mend of runtime.usleep
// (/bin/guest-plain) and in this one.
func monitor() (*row.Result, error) {
	r := &row.Result{}
	for i, program := range []string{"/bin/guest-plain", self} {
		out, err := exec.Command(program, "spin").Output()
		if err != nil {
			return nil, fmt.Errorf("%s spin: %w", program, err)
		}
		if r.MonitorWakes[i], err = strconv.ParseFloat(strings.TrimSpace(string(out)), 64); err != nil {
			return nil, fmt.Errorf("%s spin: %w", program, err)
		}
	}
	return r, nil
}

// spin keeps one goroutine running for a second and writes how often a second
// the process' other threads were switched to meanwhile.
func spin() error {
	read := func() (n uint64, err error) {
		ts, err := threads(os.Getpid())
		for id, t := range ts {
			if id != strconv.Itoa(os.Getpid()) {
				n += t.Switches
			}
		}
		return n, err
	}
	time.Sleep(10 * time.Millisecond) // the runtime has started its threads
	before, err := read()
	if err != nil {
		return err
	}
	var turns atomic.Uint32
	start := time.Now()
	for time.Since(start) < time.Second {
		turn(&turns, 100_000)
	}
	took := time.Since(start)
	after, err := read()
	if err != nil {
		return err
	}
	fmt.Printf("%.1f\n", float64(after-before)/took.Seconds())
	return nil
}
