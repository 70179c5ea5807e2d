// Command guest is the first process of a machine that runs tests, and what the
// kernel calls there to load a module.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/test/machine/order"
)

func main() {
	if filepath.Base(os.Args[0]) == "modprobe" {
		if err := load(os.Args[len(os.Args)-1]); err != nil {
			fmt.Fprintln(os.Stderr, "modprobe:", err)
			os.Exit(1)
		}
		return
	}
	boot()
}

// boot does what the order says and ends the machine.
func boot() {
	// The process that ends would take the kernel with it.
	defer func() {
		if r := recover(); r != nil {
			fmt.Println("guest:", r)
		}
		unix.Sync()
		// Everything that QEMU has ends on a restart; not everything can be
		// switched off.
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
		select {}
	}()
	// QEMU 7.2's timer of MIPS goes round in circles once Linux has not set it
	// for 25 s: something must always be about to happen.
	go func() {
		for range time.Tick(5 * time.Second) {
		}
	}()
	if err := perform(); err != nil {
		fmt.Println("guest:", err) // for the console: there is nobody else to tell
	}
}

func perform() error {
	if err := errors.Join(mountAll(), loopback()); err != nil {
		return err
	}
	b, err := os.ReadFile(order.File)
	if err != nil {
		return err
	}
	var o order.Order
	if err := json.Unmarshal(b, &o); err != nil {
		return fmt.Errorf("%s: %w", order.File, err)
	}
	for _, m := range o.Modules {
		if err := load(m); err != nil {
			return err
		}
	}
	p, err := openPort(o.Port)
	if err != nil {
		return err
	}
	for i := range o.Tests {
		p.run(i, &o.Tests[i], o.Env)
	}
	p.say(order.Message{Done: true})
	// What was written must be out before the machine ends; a port that is not
	// a terminal has nothing to wait for.
	if err := unix.IoctlSetInt(int(p.file.Fd()), unix.TCSBRK, 1); err != nil && !errors.Is(err, unix.ENOTTY) {
		return fmt.Errorf("drain %s: %w", o.Port, err)
	}
	return p.err
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

// loopback brings up "lo".
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}

// port is where messages go.
type port struct {
	file *os.File
	err  error // of the first that was not sent
}

// openPort opens the device, which a driver may make a moment after it was
// loaded.
func openPort(path string) (*port, error) {
	for end := time.Now().Add(10 * time.Second); ; {
		f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOCTTY, 0)
		if err == nil {
			return &port{file: f}, nil
		}
		if time.Now().After(end) {
			return nil, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (p *port) say(m order.Message) {
	b, err := json.Marshal(m)
	if err == nil {
		_, err = p.file.Write(append(b, '\n'))
	}
	if p.err == nil {
		p.err = err
	}
}

// output is what one test writes.
type output struct {
	port *port
	test int
}

func (o output) Write(b []byte) (int, error) {
	o.port.say(order.Message{Test: o.test, Output: string(b)})
	return len(b), nil
}

// run runs one test binary. One that is over its limit, as no test should be
// that has a smaller one of its own, prints its stacks and is killed.
func (p *port) run(i int, t *order.Test, env []string) {
	p.say(order.Message{Test: i, Begins: true})
	began := time.Now()
	cmd := exec.Command(t.Program, t.Args...)
	cmd.Dir = t.Dir
	cmd.Env = append([]string{"PATH=/bin:/sbin", "HOME=/tmp"}, env...)
	out := output{p, i}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = 10 * time.Second // what a test has left behind may hold the output
	err := cmd.Start()
	if err == nil {
		over := time.AfterFunc(t.Limit, func() {
			_ = cmd.Process.Signal(syscall.SIGQUIT)
			time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		})
		err = cmd.Wait()
		over.Stop()
	}
	m := order.Message{Test: i, Ended: true, Took: time.Since(began)}
	if err != nil {
		m.Failed = strings.TrimSpace(err.Error())
	}
	p.say(m)
}
