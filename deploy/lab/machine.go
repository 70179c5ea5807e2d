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

	"github.com/cakefleet/cakefleet/deploy/lab/row"
	"github.com/cakefleet/cakefleet/internal/initrd"
)

const (
	// routerMB is the memory that Linux has; the source has a hole in it,
	// since QEMU puts the file system at the end.
	routerMB, sourceMB, holeAt = 128, 8, 64

	// hostTime is how long one boot may take on the computer that runs it.
	hostTime = 15 * time.Minute

	qemuProgram = "qemu-system-mips"
)

// machine is what every boot has in common.
type machine struct {
	kernel  string
	files   []initrd.Entry
	work    string
	console io.Writer // nil: only what goes wrong is shown
	profile *profiler // nil: off
	symbols []string  // of the kernel in the last boot that was profiled
}

// cards are the network cards: the address on the PCI bus (those with a slot
// of 18 and more have an interrupt), the hub, the hardware address.
var cards = []struct{ slot, hub, mac string }{
	{"0x12", "1", "02:00:00:00:01:01"}, // the router's LAN
	{"0x13", "2", "02:00:00:00:02:01"}, // the router's WAN
	{"0x14", "1", "02:00:00:00:01:09"}, // who pings
	{"0x15", "2", "02:00:00:00:02:09"}, // who answers
	{"0x0d", "1", "02:00:00:00:01:fe"}, // the source, LAN side
	{"0x0e", "2", "02:00:00:00:02:fe"}, // the source, WAN side
}

// shift is QEMU's word for instructions a second: one takes 2^shift ns.
func shift(mips int) (int, error) {
	for s := range 4 {
		if mips == 1000>>s {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%d MIPS: must be 1000, 500, 250 or 125", mips)
}

// arguments of QEMU. The clock counts instructions (-icount) and starts at the
// same time and with the same randomness in every boot, so that a boot is
// repeatable. hpt_freq and lpj save Linux from measuring them, which takes
// minutes of the computer's time; nowait: QEMU 7.2 hangs in the wait
// instruction when its clock does not sleep.
func (m *machine) arguments(initrd string, mips int) ([]string, error) {
	s, err := shift(mips)
	if err != nil {
		return nil, err
	}
	args := []string{
		"-M", "malta", "-cpu", "74Kf", "-m", strconv.Itoa(routerMB + sourceMB),
		"-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-monitor", "none",
		"-icount", fmt.Sprintf("shift=%d,sleep=off", s), "-seed", "1", "-rtc", "base=2026-01-01T00:00:00,clock=vm",
		"-kernel", m.kernel, "-initrd", initrd,
		"-append", fmt.Sprintf("console=ttyS0 panic=1 quiet mem=%dM@0 mem=%dM@%dM nowait hpt_freq=166666667 lpj=%d", holeAt, routerMB-holeAt, holeAt+sourceMB, 5_000_000>>s),
	}
	for i, c := range cards {
		id := "n" + strconv.Itoa(i)
		args = append(args,
			"-netdev", "hubport,id="+id+",hubid="+c.hub,
			"-device", "e1000,netdev="+id+",mac="+c.mac+",addr="+c.slot+",romfile=")
	}
	if m.profile != nil {
		args = append(args, "-plugin", m.profile.argument())
	}
	return args, nil
}

// boot runs one order on a machine of so many million instructions a second.
func (m *machine) boot(ctx context.Context, o row.Order, mips int) (*row.Result, error) {
	order, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(m.work, "initrd-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	files := append(slices.Clip(m.files), initrd.Entry{Name: "etc/order.json", Mode: initrd.ModeFile, Body: order})
	if err := errors.Join(initrd.Write(f, files), f.Close()); err != nil {
		return nil, err
	}
	args, err := m.arguments(f.Name(), mips)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, hostTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, qemuProgram, args...)
	cmd.WaitDelay = 5 * time.Second
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", qemuProgram, err)
	}
	result, failure, ended := m.watch(out, &log)
	err = cmd.Wait()
	switch {
	case failure != "":
		return nil, fmt.Errorf("in the machine: %s\n%s", failure, tail(log.String(), 20))
	case result != nil && ended:
		return result, nil
	case ctx.Err() != nil:
		err = ctx.Err()
	}
	return nil, fmt.Errorf("the machine gave no result (%w); its last words:\n%s", err, tail(log.String(), 20))
}

// watch reads the console.
func (m *machine) watch(out io.Reader, log *bytes.Buffer) (result *row.Result, failure string, ended bool) {
	sc := bufio.NewScanner(out)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		line := strings.TrimRight(sc.Text(), "\r")
		if text, ok := strings.CutPrefix(line, row.SymbolPrefix); ok {
			m.symbols = append(m.symbols, text)
			continue
		}
		if m.console != nil {
			fmt.Fprintln(m.console, "  |", line)
		}
		if text, ok := strings.CutPrefix(line, row.ResultPrefix); ok {
			result = new(row.Result)
			if err := json.Unmarshal([]byte(text), result); err != nil {
				failure = fmt.Sprintf("result %q: %v", text, err)
			}
			continue
		}
		if text, ok := strings.CutPrefix(line, row.FailPrefix); ok {
			failure = text
			continue
		}
		if failure != "" && !ended && !strings.HasPrefix(line, row.EndPrefix) {
			failure += "\n" + line
		}
		ended = ended || strings.HasPrefix(line, row.EndPrefix)
		fmt.Fprintln(log, line)
	}
	return result, failure, ended
}

func tail(s string, lines int) string {
	l := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(l[max(0, len(l)-lines):], "\n")
}

// fileSystem is what the machine boots into.
func fileSystem(bin string) ([]initrd.Entry, error) {
	var files []initrd.Entry
	for _, d := range []string{"bin", "dev", "etc", "proc", "run", "sys", "tmp"} {
		files = append(files, initrd.Entry{Name: d, Mode: initrd.ModeDir})
	}
	for name, file := range map[string]string{
		"init": "guest-mips", "bin/guest-plain": "guest-plain-mips",
		"bin/cakefleet-agent": "cakefleet-agent-mips",
	} {
		b, err := os.ReadFile(filepath.Join(bin, file))
		if err != nil {
			return nil, err
		}
		files = append(files, initrd.Entry{Name: name, Mode: initrd.ModeFile, Body: b})
	}
	return files, nil
}
