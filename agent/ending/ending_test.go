package ending

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// endEnv makes this program one that begins a record in the directory of
// dirEnv and ends as it says.
const (
	endEnv = "CAKEFLEET_END"
	dirEnv = "CAKEFLEET_END_DIR"
)

func TestMain(m *testing.M) {
	how := os.Getenv(endEnv)
	if how == "" {
		os.Exit(m.Run())
	}
	r, err := Begin(os.Getenv(dirEnv), "wan")
	if err != nil {
		panic(err)
	}
	switch how {
	case "stopped":
		err = r.End(nil)
	case "gave up":
		err = r.End(errors.New("close data plane:\nbusy"))
	case "panic":
		panic("index out of range in a goroutine of ours")
	case "panic of many words":
		panic(strings.Repeat("é", 5000))
	case "map":
		m := map[int]int{}
		for range 4 {
			go func() {
				for i := 0; ; i++ {
					m[i%8] = i
				}
			}()
		}
		select {}
	case "killed":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	if err != nil {
		panic(err)
	}
}

// after ends a process on the directory in a way and returns what the next one
// is told.
func after(t *testing.T, dir, how string) Previous {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), endEnv+"="+how, dirEnv+"="+dir, "GOTRACEBACK=all")
	out, err := cmd.CombinedOutput()
	if orderly := how == "stopped" || how == "gave up"; (err == nil) != orderly {
		t.Fatalf("%s: %v\n%s", how, err, out)
	}
	return look(t, dir)
}

// look returns what a process that begins now is told, and leaves the
// directory as it was.
func look(t *testing.T, dir string) Previous {
	t.Helper()
	kept := map[string][]byte{}
	for _, name := range []string{"wan.runs", "wan.crash"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
			kept[name] = b
		}
	}
	r, err := Begin(dir, "wan")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.End(nil); err != nil {
		t.Fatal(err)
	}
	for name, b := range kept {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return r.Previous()
}

// The next one is told how the one before has ended, and how many have done so
// in a row, until one is stopped.
func TestHowItEnded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if p := look(t, dir); p != (Previous{}) {
		t.Errorf("nobody was before: %+v", p)
	}
	for _, c := range []struct {
		how, reason, message string
		count                int
	}{
		{"stopped", "", "", 0},
		{"killed", Killed, "it was killed", 1},
		{"panic", Panic, "panic: index out of range in a goroutine of ours", 2},
		{"gave up", Error, "close data plane:; busy", 3},
		{"map", Panic, "a fatal error of the Go runtime", 4},
		{"panic of many words", Panic, "panic: éé", 5},
		{"killed", Killed, "it was killed", 6},
		{"stopped", "", "", 0},
		{"killed", Killed, "it was killed", 1},
	} {
		p := after(t, dir, c.how)
		if p.Count != c.count || p.Reason != c.reason || !strings.HasPrefix(p.Message, c.message) || len(p.Message) > maxReason+3 {
			t.Errorf("%s: told %+v, want %s %q, count %d", c.how, p, c.reason, c.message, c.count)
		}
	}
}

// The kernel's count of what it has killed for memory tells that from another
// kill. What is torn counts as one that ran.
func TestNotes(t *testing.T) {
	dir := t.TempDir()
	for note, want := range map[string]Previous{
		"4 0\n":    {5, OutOfMemory, ""},
		"4 99\n":   {5, Killed, ""},
		"":         {1, Killed, ""},
		"garbage":  {1, Killed, ""},
		"7\x00 12": {1, Killed, ""},
	} {
		r := &Record{crash: filepath.Join(dir, "crash")}
		got := r.read(note, 99)
		if got.Message == "" {
			t.Errorf("%q: nothing is said", note)
		}
		if got.Message = ""; got != want {
			t.Errorf("%q: %+v, want %+v", note, got, want)
		}
	}
	if _, err := Begin(filepath.Join(dir, "file", "below"), "wan"); err != nil {
		t.Errorf("a directory that is not there yet: %v", err)
	}
	var none *Record
	if none.Previous() != (Previous{}) || none.End(nil) != nil {
		t.Error("no record does something")
	}
}
