package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// events makes what `go test -json` says of what each test, or "" for the
// package, wrote and how it ended.
func events(pkg, test, how string, output ...string) string {
	var b strings.Builder
	for _, o := range output {
		fmt.Fprintf(&b, "{\"Action\":\"output\",\"Package\":%q,\"Test\":%q,\"Output\":%q}\n", pkg, test, o+"\n")
	}
	if how != "" {
		fmt.Fprintf(&b, "{\"Action\":%q,\"Package\":%q,\"Test\":%q}\n", how, pkg, test)
	}
	return b.String()
}

func TestReadEvents(t *testing.T) {
	in := events("m/p", "TestGood", "pass", "=== RUN   TestGood", "    good_test.go:3: quiet") +
		events("m/p", "TestBad", "fail", "=== RUN   TestBad", "    bad_test.go:7: got 1, want 2", "--- FAIL: TestBad (0.00s)") +
		events("m/p", "TestMany/one", "fail", "    many_test.go:9: one", "    --- FAIL: TestMany/one (0.00s)") +
		events("m/p", "TestMany", "fail", "=== RUN   TestMany", "--- FAIL: TestMany (0.00s)") +
		events("m/p", "TestRoot", "skip", "    root_test.go:9: needs root", "--- SKIP: TestRoot (0.00s)") +
		events("m/p", "TestHangs", "", "=== RUN   TestHangs", "panic: test timed out") +
		events("m/p", "", "fail", "FAIL\tm/p\t0.1s") +
		events("m/q", "", "pass", "PASS", "ok  \tm/q\t0.2s") +
		events("m/leaks", "", "fail", "PASS", "goleak: found unexpected goroutines", "FAIL\tm/leaks\t0.2s") +
		"{\"Action\":\"build-output\",\"ImportPath\":\"m/broken.test\",\"Output\":\"broken.go:1: syntax error\\n\"}\n" +
		"{\"Action\":\"fail\",\"Package\":\"m/broken\",\"FailedBuild\":\"m/broken.test\"}\n" +
		events("m/cut", "TestEndless", "", "=== RUN   TestEndless", "    endless_test.go:1: still here")
	var out strings.Builder
	res := readEvents(strings.NewReader(in), &out)
	if res.passed != 1 || res.failed != 3 {
		t.Errorf("passed %d, failed %d; want 1 and 3", res.passed, res.failed)
	}
	if len(res.skips) != 1 || res.skips[0] != (skip{"m/p", "TestRoot", "needs root"}) {
		t.Errorf("skips: %+v", res.skips)
	}
	const want = `    bad_test.go:7: got 1, want 2
--- FAIL: TestBad (0.00s)
    many_test.go:9: one
    --- FAIL: TestMany/one (0.00s)
--- FAIL: TestMany (0.00s)
--- SKIP: TestRoot: needs root
FAIL	m/p	0.1s
=== RUN   TestHangs
panic: test timed out
ok  	m/q	0.2s
goleak: found unexpected goroutines
FAIL	m/leaks	0.2s
broken.go:1: syntax error
=== RUN   TestEndless
    endless_test.go:1: still here
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}

	r := report{module: "m"}
	r.add("unit tests", 3*time.Second, res)
	r.add("vet", time.Second, result{err: errors.New("exit status 1")})
	r.add("another", 0, result{skips: []skip{{"m/p", "TestRoot", "needs root"}, {"m/p", "TestOther", "needs root"}}})
	out.Reset()
	r.print(&out)
	_, summary, _ := strings.Cut(out.String(), "CPUs\n")
	const wantSummary = `skipped:
  p TestRoot, p TestOther: needs root
ran:
  FAILED unit tests: 4 tests, 3 failed, 3s
  FAILED vet (exit status 1), 1s
  ok     another, 0s
failed:
  unit tests: p TestBad
          bad_test.go:7: got 1, want 2
  unit tests: p TestMany/one
          many_test.go:9: one
  unit tests: p TestHangs
      panic: test timed out
  unit tests: leaks
      goleak: found unexpected goroutines
  unit tests: broken, which can't be built
      broken.go:1: syntax error
  unit tests: cut TestEndless, which has not ended
          endless_test.go:1: still here
  vet
      exit status 1
FAIL
`
	if diff := cmp.Diff(wantSummary, summary); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
}

// Of a long output the summary has what tells most.
func TestTelling(t *testing.T) {
	var log []string
	for i := range 100 {
		log = append(log, fmt.Sprintf("    x_test.go:1: line %d of the log\n", i))
	}
	got := telling(append(log, "    x_test.go:2: got 1, want 2\n"))
	if len(got) != mostSaid+1 || !strings.Contains(got[0], "line 0 ") || !strings.HasSuffix(got[len(got)-1], "got 1, want 2") {
		t.Errorf("an error after a long log:\n%s", strings.Join(got, "\n"))
	}
	stack := append([]string{}, log...)
	stack = append(stack, "panic: test timed out after 10m0s\n", "\trunning tests:\n", "\t\tTestX (9m)\n", "\n", "goroutine 1 [running]:\n")
	for range 100 {
		stack = append(stack, "\t/x.go:1\n")
	}
	got = telling(stack)
	if len(got) != mostSaid || !strings.HasPrefix(got[0], "panic: ") || !strings.Contains(got[2], "TestX") {
		t.Errorf("a panic:\n%s", strings.Join(got, "\n"))
	}
	if got = telling([]string{strings.Repeat("ä", mostLine) + "\n"}); len(got) != 1 || len(got[0]) > mostLine+3 {
		t.Errorf("a long line has %d bytes", len(got[0]))
	}
}

// A step that hangs where no limit of testing reaches is stopped, and what it
// ran says where it hangs; so does a test that runs out of time.
func TestHangs(t *testing.T) {
	for _, c := range []struct {
		name, main string
		limit      time.Duration
		failure    string
	}{
		{"before tests", "go tell(); hang()", time.Hour, "hangs"},
		{"in a test", "m.Run()", time.Second, "hangs TestIt"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			for name, text := range map[string]string{
				"go.mod": "module hangs\n\ngo 1.26\n",
				"hangs_test.go": "package hangs\n\n" +
					"import (\n\t\"bytes\"\n\t\"runtime\"\n\t\"testing\"\n\t\"time\"\n)\n\n" +
					"func TestMain(m *testing.M) { " + c.main + " }\n\n" +
					"func TestIt(*testing.T) { hang() }\n\n" +
					"func hang() { select {} }\n\n" +
					// Only a goroutine that already sleeps has a stack for sure when the
					// signal comes, and one that waits for a timer keeps the runtime from
					// calling it a deadlock.
					"func tell() {\n" +
					"\tall := make([]byte, 1<<16)\n" +
					"\tfor !bytes.Contains(all[:runtime.Stack(all, true)], []byte(\"[select (no cases)]\")) {\n" +
					"\t\truntime.Gosched()\n\t}\n" +
					"\tprintln(\"begun\")\n\ttime.Sleep(time.Hour)\n}\n",
			} {
				if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			out := &stopper{on: "begun", stop: stop}
			res := goUntil(ctx, step{env: []string{"GOFLAGS=", "GOWORK=off"}, args: []string{"test", "."}, limit: c.limit}, out, func() syscall.Signal { return syscall.SIGQUIT })
			if res.err == nil || len(res.failures) != 1 || res.failures[0].name != c.failure || !strings.Contains(strings.Join(res.failures[0].said, "\n"), "hangs_test.go:") {
				t.Errorf("error %v, failures %+v; printed:\n%s", res.err, res.failures, out)
			}
		})
	}
}

// stopper stops something when it is told a word.
type stopper struct {
	strings.Builder
	on   string
	stop func()
}

func (s *stopper) Write(b []byte) (int, error) {
	n, err := s.Builder.Write(b)
	if strings.Contains(s.String(), s.on) {
		s.stop()
	}
	return n, err
}

func (s *stopper) WriteString(text string) (int, error) { return s.Write([]byte(text)) }

// A step that can't be got ready is skipped for the reason that it gives, and
// one whose command prints events is read as tests are.
func TestReady(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("GOFLAGS", "")
	t.Setenv("GOWORK", "off")
	for name, text := range map[string]string{
		"go.mod": "module ready\n\ngo 1.26\n",
		"main.go": "package main\n\nimport \"os\"\n\nfunc main() {\n" +
			"\tif os.Args[1] == \"--json\" {\n\t\tprint := os.Stdout.WriteString\n" +
			"\t\tprint(`" + events("m/p", "TestGood", "pass") + "`)\n\t\treturn\n\t}\n" +
			"\tif os.Args[1] == \"--prepare\" {\n\t\tprintln(\"fetching it\")\n\t\tprintln(\"machine: kernel x: there is none\")\n\t\tos.Exit(2)\n\t}\n}\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if why := getReady(t.Context(), step{ready: []string{"run", ".", "--prepare"}}); why != "kernel x: there is none" {
		t.Errorf("the reason is %q", why)
	}
	for _, ready := range [][]string{nil, {"run", ".", "--fine"}} {
		if why := getReady(t.Context(), step{ready: ready}); why != "" {
			t.Errorf("%v: %q", ready, why)
		}
	}
	var out strings.Builder
	res := goUntil(t.Context(), step{args: []string{"run", ".", "--json"}}, &out, func() syscall.Signal { return syscall.SIGTERM })
	if res.err != nil || res.passed != 1 {
		t.Errorf("%d tests passed, error %v:\n%s", res.passed, res.err, &out)
	}
}
