package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/test/machine/order"
)

// TestTell tells of a package that passes, of one that ends badly after its
// tests have passed, and of two that a machine did not come to the end of.
func TestTell(t *testing.T) {
	tests := []order.Test{{Package: "m/good"}, {Package: "m/leaks"}, {Package: "m/cut"}, {Package: "m/late"}}
	messages := []order.Message{
		{Test: 0, Begins: true},
		{Test: 0, Output: "=== RUN   TestA\n--- PASS: Te"},
		{Test: 0, Output: "stA (0.00s)\nPASS\n"},
		{Test: 0, Ended: true, Took: time.Second},
		{Test: 1, Begins: true},
		{Test: 1, Output: "\x16=== RUN   TestB\n\x16--- SKIP: TestB (0.00s)\n\x16PASS\ngoleak: found\n"},
		{Test: 1, Ended: true, Failed: "exit status 1", Took: time.Second},
		{Test: 2, Begins: true},
		{Test: 2, Output: "\x16=== RUN   TestC\n"},
	}
	var out strings.Builder
	tell, err := newTeller(t.Context(), &out, tests, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		tell.take(m)
	}
	if err := tell.end("the machine has ended"); !errors.Is(err, errFailed) {
		t.Errorf("error is %v", err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		var e event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Errorf("%q: %v", line, err)
		}
		switch {
		case e.Action != "output":
			got = append(got, strings.TrimSpace(e.Action+" "+e.Package+" "+e.Test))
		case e.Test == "" && e.Output != "PASS\n":
			got = append(got, e.Output)
		}
	}
	want := []string{
		"run m/good TestA", "pass m/good TestA", "ok  \tm/good\t1.000s\n", "pass m/good",
		"run m/leaks TestB", "skip m/leaks TestB", "goleak: found\n", "FAIL\tm/leaks\t1.000s: exit status 1\n", "fail m/leaks",
		"run m/cut TestC", "FAIL\tm/cut: the machine has ended\n", "fail m/cut",
		"FAIL\tm/late: not run, as the machine had ended\n", "fail m/late",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	out.Reset()
	text, err := newTeller(t.Context(), &out, tests[:1], false)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages[:4] {
		text.take(m)
	}
	if err := text.end(""); err != nil || out.String() != "=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS\nok  \tm/good\t1.000s\n" {
		t.Errorf("error %v, text %q", err, out.String())
	}
}

// TestLastWords keeps the end of a console, and all of a panic.
func TestLastWords(t *testing.T) {
	var l lastLines
	for i := range 100 {
		fmt.Fprintf(&l, "line %d\r\n", i)
	}
	if got := strings.Split(l.String(), "\n"); len(got) != mostLines || got[0] != "line 60" {
		t.Errorf("%d lines, the first is %q", len(got), got[0])
	}
	fmt.Fprintln(&l, "Kernel panic - not syncing: oops")
	for i := range 200 {
		fmt.Fprintf(&l, "frame %d\n", i)
	}
	if got := l.String(); !strings.HasPrefix(got, "Kernel panic") || !strings.Contains(got, "more lines") {
		t.Errorf("of a panic:\n%s", got)
	}
}

// TestWanted picks files from packages of both layouts that Debian has had.
func TestWanted(t *testing.T) {
	for name, want := range map[string]bool{
		"boot/vmlinuz-6.1.0-57-amd64":                                     true,
		"usr/lib/modules/7.2.13+deb14-amd64/vmlinuz":                      true,
		"boot/config-6.1.0-57-amd64":                                      false,
		"lib/modules/6.1.0-57-amd64/kernel/net/sched/sch_cake.ko":         true,
		"usr/lib/modules/7.2/kernel/drivers/net/ifb.ko.xz":                true,
		"lib/modules/6.1.0-57-amd64/kernel/drivers/net/wireless/x/ath.ko": false,
		"usr/share/doc/kernel/net/sched/sch_cake.ko":                      false,
	} {
		if got := wanted(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if diff := cmp.Diff([]string{"libc6", "libelf1t64", "debconf"}, needed("libc6 (>= 2.38), libelf1t64:any (>= 0.1), debconf (>= 0.5) | debconf-2.0")); diff != "" {
		t.Error(diff)
	}
}

// TestProgram takes a program of this machine and its libraries elsewhere and
// runs it there by its own loader.
func TestProgram(t *testing.T) {
	tr := tree{made: map[string]bool{}}
	if err := tr.program("/", "true"); err != nil {
		t.Skipf("skipped: this machine's programs are not where Debian has them: %v", err)
	}
	root := t.TempDir()
	loader := ""
	for _, e := range tr.entries {
		p := filepath.Join(root, e.Name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if e.Body == nil {
			continue
		}
		if err := os.WriteFile(p, e.Body, 0o755); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(filepath.Base(e.Name), "ld-linux") {
			loader = p
		}
	}
	if loader == "" {
		t.Fatalf("no loader among %d files", len(tr.entries))
	}
	if out, err := exec.Command(loader, "--inhibit-cache", "--library-path", filepath.Join(root, "lib"), filepath.Join(root, "bin/true")).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestSilentMachine boots what is no kernel, and wants to hear of it.
func TestSilentMachine(t *testing.T) {
	if _, err := exec.LookPath(x86.program); err != nil {
		t.Skipf("skipped: %s is missing", x86.program)
	}
	work := t.TempDir()
	image := filepath.Join(work, "image")
	if err := os.WriteFile(image, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	m := machine{kernel: kernel{arch: x86, image: image}, accel: "tcg", work: work, timeout: time.Minute, limit: time.Minute}
	tests := []order.Test{{Package: "m/p"}}
	var out strings.Builder
	tell, err := newTeller(t.Context(), &out, tests, false)
	if err != nil {
		t.Fatal(err)
	}
	begun, why := m.watch(t.Context(), image, tell)
	if err := tell.end(why); begun || !errors.Is(err, errFailed) || !strings.HasPrefix(out.String(), "FAIL\tm/p: "+x86.program) {
		t.Errorf("begun %v, error %v: %s", begun, err, out.String())
	}
}
