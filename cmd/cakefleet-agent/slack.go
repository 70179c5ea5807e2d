package main

import (
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// timerSlack is how late the timers of this program may be, but for those of
// the packet loop, which sets its own.
//
// The runtime's monitor thread sleeps for 20 µs at a time while anything runs,
// and again after each system call that it takes a processor from: on a router
// whose CPU needs a millisecond for what a server does at once it was most of
// what an idle agent's threads were woken for.
const timerSlack = time.Millisecond

// relaxTimers sets the slack of the threads that there are, the monitor among
// them; later ones have it from those that start them. Where it can't be set
// nothing but that saving is lost.
func relaxTimers() {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	slack := []byte(strconv.FormatInt(int64(timerSlack), 10))
	for _, t := range threads {
		_ = os.WriteFile(filepath.Join("/proc", t.Name(), "timerslack_ns"), slack, 0) // see above
	}
}
