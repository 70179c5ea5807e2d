package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

// self is this program's file in the machine.
const self = "/init"

// boot is the first process: it does what /etc/order.json says, prints the
// result on the console, and ends the machine.
func boot() {
	// The process that ends would take the kernel with it.
	defer func() {
		fmt.Println(row.EndPrefix)
		time.Sleep(50 * time.Millisecond) // the console is slow
		unix.Sync()
		// QEMU's Malta can't be switched off, but it ends on a restart.
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}()
	defer func() {
		if r := recover(); r != nil {
			fmt.Printf("%sthe lab's first process: %v\n", row.FailPrefix, r)
		}
	}()
	result, profiled, err := perform()
	if err != nil {
		fmt.Printf("%s%v\n", row.FailPrefix, err)
		return
	}
	if profiled {
		printSymbols()
	}
	b, err := json.Marshal(result)
	if err != nil {
		fmt.Printf("%s%v\n", row.FailPrefix, err)
		return
	}
	fmt.Printf("%s%s\n", row.ResultPrefix, b)
}

func perform() (r *row.Result, profiled bool, err error) {
	if err := mountAll(); err != nil {
		return nil, false, err
	}
	if err := seedRandom(); err != nil {
		return nil, false, fmt.Errorf("seed the kernel's random numbers: %w", err)
	}
	// QEMU 7.2's timer of this CPU goes round in circles once Linux has not set
	// it for 25 s: something must always be about to happen.
	go func() {
		for range time.Tick(5 * time.Second) {
		}
	}()
	b, err := os.ReadFile("/etc/order.json")
	if err != nil {
		return nil, false, err
	}
	var o row.Order
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, false, fmt.Errorf("order: %w", err)
	}
	switch o.Kind {
	case "traffic", "idle":
		r, err = traffic(o)
	case "monitor":
		r, err = monitor()
	default:
		err = fmt.Errorf("order of kind %q", o.Kind)
	}
	return r, o.Profile, err
}

// seedRandom gives the kernel what a router has after its first minute. Before
// that each random number costs thousands of instructions, and cake wants one a
// packet.
func seedRandom() error {
	fd, err := unix.Open("/dev/random", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	pool := struct { // struct rand_pool_info
		bits, size int32
		seed       [64]byte
	}{bits: 512, size: 64}
	for i := range pool.seed { // always the same: a boot is repeatable
		pool.seed[i] = byte(i * 37)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&pool))); errno != 0 {
		return errno
	}
	return nil
}

// printSymbols prints the addresses of the kernel's functions.
func printSymbols() {
	b, err := os.ReadFile("/proc/kallsyms")
	if err != nil {
		fmt.Printf("%s%v\n", row.FailPrefix, err)
		return
	}
	var out []byte
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 3 && strings.ContainsAny(f[1], "tTwW") {
			out = fmt.Appendf(out, "%s%s %s\n", row.SymbolPrefix, f[0], f[2])
		}
	}
	os.Stdout.Write(out)
}

func mountAll() error {
	var errs []error
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"},
	} {
		err := os.MkdirAll(m.at, 0o755)
		if err == nil {
			err = unix.Mount(m.kind, m.at, m.kind, 0, "")
		}
		if err != nil && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, fmt.Errorf("mount %s: %w", m.at, err))
		}
	}
	return errors.Join(errs...)
}
