//go:build linux

// Package insn counts the instructions that a Go program built for another
// machine executes between two marks, with qemu-user and a plugin of its own.
// The counts repeat whatever else the computer does, which times do not: to the
// instruction for the program's own functions, to a few in a thousand in all,
// since the runtime still interrupts a long loop every 10 ms.
//
// The program under test calls Begin and End. The one that measures it calls
// BuildPlugin, Run and, to see where the instructions go, Profile.Functions or
// Profile.Lines.
package insn

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"debug/gosym"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// mark is the prctl operation that the plugin listens for. The kernel knows no
// such operation and refuses it, plugin or not.
const mark = 0x63616b65

//go:embed insncount.c
var source []byte

// Begin starts counting the calling goroutine's thread and binds the goroutine
// to it until End.
func Begin() {
	runtime.LockOSThread()
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, mark, 1, 0) // the kernel refuses it; the plugin has seen it
}

// End stops counting.
func End() {
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, mark, 0, 0)
	runtime.UnlockOSThread()
}

// BuildPlugin compiles the plugin into dir with the C compiler gcc and returns
// its path.
func BuildPlugin(ctx context.Context, dir string) (string, error) {
	c, so := filepath.Join(dir, "insncount.c"), filepath.Join(dir, "insncount.so")
	if err := os.WriteFile(c, source, 0o600); err != nil {
		return "", fmt.Errorf("write plugin: %w", err)
	}
	cmd := exec.CommandContext(ctx, "gcc", "-O2", "-Wall", "-fPIC", "-shared", "-o", so, c)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile plugin: %w: %s", err, bytes.TrimSpace(out))
	}
	return so, nil
}

// Profile is how often each address of a program was executed.
type Profile map[uint64]uint64

// Run runs program with args under qemu and returns what was executed between
// the marks, and what the program wrote to standard output. The runtime's
// background work is kept off the counted thread as far as settings can.
func Run(ctx context.Context, qemu []string, plugin, program string, args ...string) (Profile, []byte, error) {
	dir, err := os.MkdirTemp("", "insn")
	if err != nil {
		return nil, nil, fmt.Errorf("make directory for counts: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	counts := filepath.Join(dir, "counts")
	argv := slices.Concat(qemu[1:], []string{"-plugin", plugin + ",out=" + counts, program}, args)
	cmd := exec.CommandContext(ctx, qemu[0], argv...)
	cmd.Env = append(os.Environ(), "GOGC=off", "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, out, fmt.Errorf("run %s under %s: %w: %s", program, qemu[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	p, err := readCounts(counts)
	return p, out, err
}

// readCounts spreads the blocks' counts over their instructions, which are 4
// bytes long on the machines that are measured here.
func readCounts(path string) (Profile, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read counts: %w", err)
	}
	defer func() { _ = f.Close() }()
	p := Profile{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var pc, insns, execs uint64
		if _, err := fmt.Sscanf(sc.Text(), "%x %x %x", &pc, &insns, &execs); err != nil {
			return nil, fmt.Errorf("read counts: line %q: %w", sc.Text(), err)
		}
		for i := range insns {
			p[pc+4*i] += execs
		}
	}
	if len(p) == 0 {
		return nil, errors.New("read counts: nothing was executed between the marks")
	}
	return p, nil
}

// Total returns the number of instructions executed.
func (p Profile) Total() uint64 {
	var n uint64
	for _, execs := range p {
		n += execs
	}
	return n
}

// Functions returns the instructions executed in each function of the program
// that was run, without those of the functions it called. What the compiler has
// inlined counts for the function it was inlined into.
func (p Profile) Functions(program string) (map[string]uint64, error) {
	return p.by(program, func(_ string, _ int, f *gosym.Func) string { return f.Name })
}

// Lines returns the instructions executed for each source line, named
// file.go:line; inlined code counts for the line it was written on.
func (p Profile) Lines(program string) (map[string]uint64, error) {
	return p.by(program, func(file string, line int, _ *gosym.Func) string {
		return fmt.Sprintf("%s:%d", filepath.Base(file), line)
	})
}

func (p Profile) by(program string, name func(file string, line int, f *gosym.Func) string) (map[string]uint64, error) {
	table, err := lineTable(program)
	if err != nil {
		return nil, fmt.Errorf("symbols of %s: %w", program, err)
	}
	n := map[string]uint64{}
	for pc, execs := range p {
		file, line, f := table.PCToLine(pc)
		if f == nil {
			n["?"] += execs
			continue
		}
		n[strings.TrimPrefix(name(file, line, f), "github.com/cakefleet/cakefleet/")] += execs
	}
	return n, nil
}

func lineTable(program string) (*gosym.Table, error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	text, pcln := f.Section(".text"), f.Section(".gopclntab")
	if text == nil || pcln == nil {
		return nil, errors.New("not a Go program: no .text or .gopclntab")
	}
	b, err := pcln.Data()
	if err != nil {
		return nil, err
	}
	return gosym.NewTable(nil, gosym.NewLineTable(b, text.Addr))
}
