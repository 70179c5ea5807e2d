//go:build linux

package insn_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
)

// TestCountsEveryRound counts a loop on MIPS: each round costs the same, what
// happens outside the marks costs nothing, and the loop's function has it all.
func TestCountsEveryRound(t *testing.T) {
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
	program := filepath.Join(dir, "loop")
	build := exec.Command("go", "build", "-o", program, "./testdata/loop")
	build.Env = append(os.Environ(), "GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	run := func(rounds string) (work, total uint64) {
		p, out, err := insn.Run(t.Context(), []string{"qemu-mips", "-cpu", "74Kf"}, plugin, program, rounds)
		if err != nil {
			t.Fatal(err)
		}
		if len(out) == 0 {
			t.Error("the program's output is lost")
		}
		functions, err := p.Functions(program)
		if err != nil {
			t.Fatal(err)
		}
		return functions["main.work"], p.Total()
	}
	one, _ := run("1000")
	two, _ := run("2000")
	three, total := run("3000")
	if two <= one || three-two != two-one || (two-one)%1000 != 0 {
		t.Errorf("1000, 2000 and 3000 rounds cost %d, %d and %d instructions", one, two, three)
	}
	if perRound := (two - one) / 1000; perRound < 3 || perRound > 20 {
		t.Errorf("%d instructions a round", perRound)
	}
	// The runtime may have preempted the loop once or twice.
	if total < three || total-three > 20_000 {
		t.Errorf("%d instructions in all, %d in the loop", total, three)
	}
}

// TestRunTellsWhatWentWrong: a program that fails, and one that never marks.
func TestRunTellsWhatWentWrong(t *testing.T) {
	if _, _, err := insn.Run(t.Context(), []string{"/nonexistent/qemu"}, "plugin", "program"); err == nil {
		t.Error("no error without an emulator")
	}
}
