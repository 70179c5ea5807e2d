package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Scheduling policies.
const (
	schedFIFO = 1
	schedIdle = 5
)

// realTime makes the calling thread go before all that is not real-time: a line
// does not wait for the router's CPU.
func realTime(priority int32) error { return setPolicy(schedFIFO, priority) }

func setPolicy(policy uintptr, priority int32) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, policy, uintptr(unsafe.Pointer(&priority))); errno != 0 {
		return fmt.Errorf("set scheduling policy: %w", errno)
	}
	return nil
}

func monotonic() int64 {
	var ts unix.Timespec
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// sleepUntil sleeps without a word to Go's scheduler, which would cost more
// than what the source does when it wakes.
func sleepUntil(at int64) {
	ts := unix.NsecToTimespec(at)
	unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
}

// soak takes the time that nobody else wants, so that its run time is the idle
// time, to the instruction.
func soak() error {
	runtime.LockOSThread()
	if err := setPolicy(schedIdle, 0); err != nil {
		return err
	}
	for n := uint32(0); ; n++ {
		soaked = n
	}
}

var soaked uint32 // keeps the loop

// busy takes 10 % of the CPU: 1 ms of every 10, as something on a router that
// never rests.
func busy() error {
	runtime.LockOSThread()
	for at := monotonic(); ; at += 10 * int64(time.Millisecond) {
		sleepUntil(at)
		for end := threadTime() + int64(time.Millisecond); threadTime() < end; {
			for range 2000 {
				soaked++
			}
		}
		if now := monotonic(); now-at > 100*int64(time.Millisecond) {
			at = now
		}
	}
}

func threadTime() int64 {
	var ts unix.Timespec
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&ts)), 0)
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
