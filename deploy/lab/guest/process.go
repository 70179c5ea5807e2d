package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Scheduling policies.
const (
	schedOther = 0
	schedFIFO  = 1
	schedIdle  = 5
)

// realTime makes this process, with the threads that Go's runtime starts, go
// before all that is not real-time: a line does not wait for the router's CPU.
// Only a program that starts so has all its threads so: it starts afresh.
func realTime(priority int32) error {
	if policy, _, _ := unix.RawSyscall(unix.SYS_SCHED_GETSCHEDULER, 0, 0, 0); policy == schedFIFO {
		return nil
	}
	if err := setPolicy(0, schedFIFO, priority); err != nil {
		return err
	}
	return unix.Exec(self, os.Args, os.Environ())
}

// urgent makes the threads that this process has real-time, or normal again.
func urgent(on bool) error {
	policy, priority := uintptr(schedOther), int32(0)
	if on {
		policy, priority = schedFIFO, 3
	}
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, e := range entries {
		tid, err := strconv.Atoi(e.Name())
		if err != nil {
			return err
		}
		if err := setPolicy(tid, policy, priority); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

func setPolicy(tid int, policy uintptr, priority int32) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, uintptr(tid), policy, uintptr(unsafe.Pointer(&priority))); errno != 0 {
		return fmt.Errorf("set scheduling policy: %w", errno)
	}
	return nil
}

func monotonic() int64 {
	var ts unix.Timespec
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// sleepUntil sleeps without a word to Go's scheduler, which would cost more
// than what the source does when it wakes.
func sleepUntil(at int64) {
	ts := unix.NsecToTimespec(at)
	_, _, _ = unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
}

// soak takes the time that nobody else wants, and counts it in turns of a loop:
// the kernel's own account of a thread is not good enough, since an interrupt
// that wakes somebody is billed to the thread that it interrupts.
func soak() error {
	shared, err := mapCounters()
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	shared.turnPicoseconds.Store(turnTime(&shared.turns))
	if err := setPolicy(0, schedIdle, 0); err != nil {
		return err
	}
	for {
		turn(&shared.turns, 1<<20)
	}
}

// turn counts n turns.
//
//go:noinline
func turn(turns *atomic.Uint32, n uint32) {
	for i := turns.Load() + 1; n > 0; i, n = i+1, n-1 {
		turns.Store(i)
	}
}

// turnTime is how long one turn takes, in picoseconds: it is the same number of
// instructions each time. What was disturbed is not the shortest.
func turnTime(turns *atomic.Uint32) uint64 {
	shortest := func(n uint32) int64 {
		best := int64(1) << 62
		for range 20 {
			start := monotonic()
			turn(turns, n)
			best = min(best, monotonic()-start)
		}
		return best
	}
	return uint64(shortest(20_000)-shortest(10_000)) * 1000 / 10_000
}

// busy takes 10 % of the CPU: 1 ms of every 10, as something on a router that
// never rests.
func busy() error {
	shared, err := mapCounters()
	if err != nil {
		return err
	}
	n := uint32(uint64(time.Millisecond/time.Nanosecond) * 1000 / turnTime(&shared.busyTurns))
	for at := monotonic(); ; at += 10 * int64(time.Millisecond) {
		sleepUntil(at)
		turn(&shared.busyTurns, n)
	}
}

func threadTime() int64 {
	var ts unix.Timespec
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// part starts this program as one of its parts.
func part(word string, args ...string) *exec.Cmd {
	cmd := exec.Command(self, append([]string{word}, args...)...)
	cmd.Stderr = os.Stderr
	// The runtime's own ticks stay away from threads that have a purpose.
	cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=1")
	return cmd
}

// bigEndian16 returns a number whose bytes in memory are v's in network order.
func bigEndian16(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}
