package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/internal/initrd"
	"github.com/cakefleet/cakefleet/test/machine/order"
)

// machine is one boot.
type machine struct {
	kernel  kernel
	accel   string
	work    string
	console io.Writer     // nil: only what goes wrong is shown
	timeout time.Duration // of each package
	limit   time.Duration // of all
}

const kvm = "kvm"

// accelerator is how QEMU is to run a machine: as was asked for, or as it can.
// There are substitutes of KVM, in clouds, that run only kernels made for them.
func accelerator(asked string, a arch) string {
	if a.emulated {
		return "tcg"
	}
	if asked != "" {
		return asked
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return "tcg"
	}
	_ = f.Close()
	for _, real := range []string{"kvm_intel", "kvm_amd"} {
		if _, err := os.Stat("/sys/module/" + real); err == nil {
			return kvm
		}
	}
	return "tcg"
}

// port is the device in the machine that messages go to.
func (m *machine) port() string {
	if m.kernel.arch.emulated {
		return "/dev/ttyS1"
	}
	return "/dev/vport0p1"
}

// portModules are what the port needs.
func (m *machine) portModules() []string {
	if m.kernel.arch.emulated {
		return nil
	}
	return []string{"virtio_pci", "virtio_console"}
}

// messages is QEMU's name of the file that messages come by.
const messages = "/dev/fd/3"

// arguments of QEMU. A panic ends the machine, as does its restart.
func (m *machine) arguments(files string) []string {
	common := []string{
		"-nographic", "-nodefaults", "-no-reboot", "-no-user-config", "-monitor", "none",
		"-kernel", m.kernel.image, "-initrd", files, "-serial", "stdio",
		"-chardev", "file,id=messages,path=" + messages,
	}
	if m.kernel.arch.emulated {
		// As in the lab, deploy/lab/machine.go: a clock that counts
		// instructions, so that a test takes as long in every run.
		return append(common,
			"-M", "malta", "-cpu", "74Kf", "-m", "256", "-serial", "chardev:messages",
			"-icount", "shift=1,sleep=off", "-seed", "1", "-rtc", "base=2026-01-01T00:00:00,clock=vm",
			"-append", "console=ttyS0 panic=1 quiet nowait hpt_freq=166666667 lpj=2500000")
	}
	return append(common,
		"-M", "q35", "-accel", m.accel, "-cpu", "max", "-smp", "2", "-m", "1024",
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=messages",
		"-append", "console=ttyS0 panic=-1 oops=panic quiet random.trust_cpu=on")
}

// boot runs the tests in the machine and tells of them as they run.
func (m *machine) boot(ctx context.Context, tests []order.Test, files []initrd.Entry, o options) error {
	image := filepath.Join(m.work, "files")
	f, err := os.Create(image)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	if err := errors.Join(initrd.Write(w, files), w.Flush(), f.Close()); err != nil {
		return err
	}
	tell, err := newTeller(ctx, os.Stdout, tests, o.json)
	if err != nil {
		return err
	}
	begun, why := m.watch(ctx, image, tell)
	if !begun && m.accel == kvm && ctx.Err() == nil {
		fmt.Fprintf(os.Stderr, "kvm does not run it, tcg has to: %s\n", why)
		m.accel = "tcg"
		_, why = m.watch(ctx, image, tell)
	}
	return tell.end(why)
}

// booting is how long a machine may take to boot, which takes 10 s without kvm.
const booting = 2 * time.Minute

// watch runs QEMU to its end and returns whether a test was begun, and why it
// has ended; empty: everything was done.
func (m *machine) watch(ctx context.Context, image string, tell *teller) (begun bool, why string) {
	ctx, stop := context.WithTimeoutCause(ctx, m.limit, fmt.Errorf("the machine was not done within %v", m.limit))
	defer stop()
	ctx, silent := context.WithCancelCause(ctx)
	defer silent(nil)
	// A test that hangs is stopped in the machine; of a machine that hangs
	// nothing comes.
	quiet := time.AfterFunc(booting, func() { silent(errors.New("the machine says nothing")) })
	defer quiet.Stop()

	out, in, err := os.Pipe()
	if err != nil {
		return false, err.Error()
	}
	defer out.Close()
	var console lastLines
	cmd := exec.CommandContext(ctx, m.kernel.arch.program, m.arguments(image)...)
	cmd.ExtraFiles = []*os.File{in} // number 3
	cmd.Stdout, cmd.Stderr = &console, &console
	if m.console != nil {
		cmd.Stdout = io.MultiWriter(&console, m.console)
	}
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Start()
	_ = in.Close()
	if err != nil {
		return false, err.Error()
	}
	done := false
	lines := bufio.NewReader(out)
	for {
		line, readErr := lines.ReadBytes('\n')
		if readErr != nil {
			break
		}
		quiet.Reset(m.timeout + time.Minute)
		begun = true
		var msg order.Message
		if err := json.Unmarshal(line, &msg); err != nil {
			fmt.Fprintf(os.Stderr, "machine: not a message: %q\n", line)
			continue
		}
		done = done || msg.Done
		tell.take(msg)
	}
	err = cmd.Wait()
	switch {
	case done:
		return begun, ""
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err == nil:
		err = errors.New("the machine has ended too early")
	default:
		err = fmt.Errorf("%s: %w", m.kernel.arch.program, err)
	}
	return begun, fmt.Sprintf("%v; its last words:\n%s", err, console.String())
}

// lastLines keeps the end of what is written to it, from a panic on if there is
// one.
type lastLines struct {
	lines []string
	rest  []byte
}

const mostLines = 40

func (l *lastLines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, rest, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		l.lines = append(l.lines, strings.TrimRight(string(line), "\r"))
		l.rest = rest
		if len(l.lines) > mostLines && !strings.Contains(l.lines[0], "Kernel panic") {
			l.lines = slices.Delete(l.lines, 0, 1)
		}
	}
}

func (l *lastLines) String() string {
	lines := append(slices.Clip(l.lines), string(l.rest))
	if len(lines) > 2*mostLines {
		lines = append(lines[:2*mostLines], "... "+strconv.Itoa(len(lines)-2*mostLines)+" more lines")
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}
