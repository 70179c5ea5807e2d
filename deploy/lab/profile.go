package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"debug/gosym"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

//go:embed plugin/insnprofile.c
var profileSource []byte

// The guest's functions that begin and end what is profiled.
const beginFunc, endFunc = "main.profileBegin", "main.profileEnd"

// profiler counts the instructions of every function of the machine.
type profiler struct {
	plugin       string
	out          string
	agent, guest *program
	begin, end   uint64
}

// program is a Go program, whose functions are known even if it is stripped.
type program struct {
	name  string
	text  []byte
	start uint64
	funcs *gosym.Table
}

func openProgram(name, path string) (*program, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	section := func(name string) ([]byte, uint64, error) {
		s := f.Section(name)
		if s == nil {
			return nil, 0, fmt.Errorf("%s: no section %s", path, name)
		}
		b, err := s.Data()
		return b, s.Addr, err
	}
	text, start, err := section(".text")
	if err != nil {
		return nil, err
	}
	lines, _, err := section(".gopclntab")
	if err != nil {
		return nil, err
	}
	funcs, err := gosym.NewTable(nil, gosym.NewLineTable(lines, start))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &program{name: name, text: text, start: start, funcs: funcs}, nil
}

// has tells whether the program has these instructions at the address.
func (p *program) has(address uint64, words []uint32) bool {
	for i, w := range words {
		at := address - p.start + 4*uint64(i)
		if at+4 > uint64(len(p.text)) || binary.BigEndian.Uint32(p.text[at:]) != w {
			return false
		}
	}
	return true
}

func newProfiler(ctx context.Context, dir string) (*profiler, error) {
	p := &profiler{plugin: filepath.Join(dir, "insnprofile.so"), out: filepath.Join(dir, "blocks")}
	c := filepath.Join(dir, "insnprofile.c")
	if err := os.WriteFile(c, profileSource, 0o644); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "gcc", "-O2", "-Wall", "-fPIC", "-shared", "-o", p.plugin, c).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile plugin: %w: %s", err, bytes.TrimSpace(out))
	}
	var err error
	if p.agent, err = openProgram("agent", filepath.Join(dir, "cakefleet-agent-mips")); err != nil {
		return nil, err
	}
	if p.guest, err = openProgram("lab", filepath.Join(dir, "guest-mips")); err != nil {
		return nil, err
	}
	begin, end := p.guest.funcs.LookupFunc(beginFunc), p.guest.funcs.LookupFunc(endFunc)
	if begin == nil || end == nil {
		return nil, errors.New("the guest has no marks for the profile")
	}
	p.begin, p.end = begin.Entry, end.Entry
	return p, nil
}

func (p *profiler) argument() string {
	return fmt.Sprintf("%s,begin=%#x,end=%#x,out=%s", p.plugin, p.begin, p.end, p.out)
}

// symbol is a function of the kernel.
type symbol struct {
	address uint64
	name    string
}

// kernelSymbols reads what /proc/kallsyms said in the machine.
func kernelSymbols(lines []string) []symbol {
	var out []symbol
	for _, l := range lines {
		f := strings.Fields(l)
		if len(f) < 2 {
			continue
		}
		a, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil {
			continue
		}
		out = append(out, symbol{a & 0xffffffff, f[1]})
	}
	slices.SortStableFunc(out, func(a, b symbol) int { return cmp.Compare(a.address, b.address) })
	return out
}

// share is how many instructions a function has executed.
type share struct {
	name  string
	insns uint64
}

// read returns the functions by what they executed, most first.
func (p *profiler) read(kernel []symbol) ([]share, error) {
	f, err := os.Open(p.out)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sums := map[string]uint64{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var address, insns, executions uint64
		var w [4]uint32
		if _, err := fmt.Sscanf(sc.Text(), "%x %d %d %x %x %x %x", &address, &insns, &executions, &w[0], &w[1], &w[2], &w[3]); err != nil {
			return nil, fmt.Errorf("profile: line %q: %w", sc.Text(), err)
		}
		sums[p.function(kernel, address, w[:min(insns, 4)])] += insns * executions
	}
	var out []share
	for name, n := range sums {
		out = append(out, share{name, n})
	}
	slices.SortFunc(out, func(a, b share) int { return cmp.Compare(b.insns, a.insns) })
	return out, nil
}

func (p *profiler) function(kernel []symbol, address uint64, words []uint32) string {
	if address >= 0x80000000 {
		i, exact := slices.BinarySearchFunc(kernel, address, func(s symbol, a uint64) int { return cmp.Compare(s.address, a) })
		if !exact {
			i--
		}
		if i < 0 {
			return "kernel ?"
		}
		return "kernel " + kernel[i].name
	}
	for _, prog := range []*program{p.agent, p.guest} {
		if !prog.has(address, words) {
			continue
		}
		if f := prog.funcs.PCToFunc(address); f != nil {
			return prog.name + " " + f.Name
		}
		return prog.name + " ?"
	}
	return "user ?"
}

// printProfile prints the functions by what they cost a packet.
func printProfile(w io.Writer, shares []share, r *row.Result) {
	var total uint64
	parts := map[string]uint64{}
	for _, s := range shares {
		total += s.insns
		part, _, _ := strings.Cut(s.name, " ")
		parts[part] += s.insns
	}
	packets := float64(max(r.Packets(), 1))
	for part, n := range parts {
		fmt.Fprintf(w, "  %9.1f insns/packet %5.1f %%  all of %s\n", float64(n)/packets, 100*float64(n)/float64(total), part)
	}
	for _, s := range shares[:min(len(shares), profileLines)] {
		fmt.Fprintf(w, "  %9.1f insns/packet %5.1f %%  %s\n", float64(s.insns)/packets, 100*float64(s.insns)/float64(total), s.name)
	}
}

const profileLines = 100
