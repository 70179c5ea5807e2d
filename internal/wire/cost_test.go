//go:build linux && amd64

package wire_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
)

// TestCostOnTheRouter: a report with four tins in use both ways takes at most
// 200 us of a router with 500 million instructions a second, and 2 kB. One of
// sixty is whole, and may have more of a home that has used every bucket.
func TestCostOnTheRouter(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program for mips")
	}
	for _, tool := range []string{"qemu-mips", "gcc", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s: %v", tool, err)
		}
	}
	dir := t.TempDir()
	plugin, err := insn.BuildPlugin(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "report")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./testdata/report")
	build.Env = append(os.Environ(), "GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	p, out, err := insn.Run(t.Context(), []string{"qemu-mips", "-cpu", "74Kf"}, plugin, program)
	if err != nil {
		t.Fatal(err)
	}
	var rounds, difference, whole uint64
	if _, err := fmt.Sscan(string(out), &rounds, &difference, &whole); err != nil {
		t.Fatalf("%q: %v", out, err)
	}
	if functions, err := p.Functions(program); err == nil {
		for f, n := range functions {
			if n/rounds > 1000 {
				t.Logf("%8d %s", n/rounds, f)
			}
		}
	}
	cost := p.Total() / rounds
	t.Logf("%d instructions; %d bytes as a difference, %d bytes whole", cost, difference, whole)
	if cost > 100_000 {
		t.Errorf("%d instructions, want at most 100000", cost)
	}
	if difference > 2000 {
		t.Errorf("%d bytes, want at most 2000", difference)
	}
}
