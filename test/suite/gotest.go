package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// event is one line of `go test -json`, see `go doc test2json`.
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	FailedBuild string
}

// result is what one go command had to say.
type result struct {
	passed, failed int // tests, subtests left out
	failures       []failure
	unsteady       []failure // of tests that passed when they ran again
	skips          []skip
	err            error

	again []test // what failed and may be due to a busy machine, subtests left out
	hard  bool   // something failed that is not
}

type test struct{ pkg, name string }

type skip struct{ pkg, test, reason string }

// failure is one test that failed, or a package that failed without one.
type failure struct {
	name string
	said []string // some of its lines, those that tell most
}

// goCommand runs the go command of a step. Of `go test` it prints what it
// prints without -v: the closing line of each package and everything of the
// tests that failed.
func goCommand(ctx context.Context, s step) result {
	limited, done := context.WithTimeout(ctx, s.whole())
	defer done()
	res := goUntil(limited, s, os.Stdout, func() syscall.Signal {
		// Interrupted tests get the time to take down what they set up; those
		// that hang where testing's own limit does not reach print their stacks.
		if ctx.Err() != nil {
			return syscall.SIGTERM
		}
		return syscall.SIGQUIT
	})
	if limited.Err() != nil && ctx.Err() == nil {
		res.err = fmt.Errorf("not done within %v, and stopped: %w", s.whole(), res.err)
	}
	return res
}

// goUntil runs the go command of a step until it or ctx ends; then it and what
// it has started get a signal.
func goUntil(ctx context.Context, s step, out io.Writer, with func() syscall.Signal) result {
	args := slices.Clone(s.args)
	isTest := args[0] == "test"
	if isTest {
		args = slices.Insert(args, 1, "-json", "-timeout="+s.limit.String())
	}
	hasEvents := isTest || slices.Contains(args, "--json")
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, with()) }
	cmd.WaitDelay = 30 * time.Second
	if !hasEvents {
		return result{err: cmd.Run()}
	}
	// Not cmd's own pipe: its reader would wait for whatever a test has left
	// behind.
	in, w := io.Pipe()
	cmd.Stdout = w
	read := make(chan result, 1)
	go func() { read <- readEvents(in, out) }()
	err := cmd.Run()
	_ = w.Close()
	res := <-read
	res.err = err
	return res
}

// position is what testing puts before the text of t.Skip.
var position = regexp.MustCompile(`^\s*\S+_test\.go:\d+: |^\s*\S+\.go:\d+: `)

// readEvents reads the events of `go test -json` from in and prints them to out.
func readEvents(in io.Reader, out io.Writer) result {
	r := reader{out: out, held: map[string]map[string][]string{}, built: map[string][]string{}}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			r.end()
			return r.result
		}
		var e event
		if json.Unmarshal(line, &e) != nil {
			_, _ = out.Write(line) // not of test2json, so it is for people
			continue
		}
		r.take(e)
	}
}

// reader has what was read of `go test -json`.
type reader struct {
	result
	out   io.Writer
	held  map[string]map[string][]string // by package and test: what tests wrote that have not ended, and under "" the package
	built map[string][]string            // by what was built: what the compiler said
}

func (r *reader) take(e event) {
	switch e.Action {
	case "build-output":
		r.built[e.ImportPath] = append(r.built[e.ImportPath], e.Output)
		_, _ = io.WriteString(r.out, e.Output)
	case "output":
		of := r.held[e.Package]
		if of == nil {
			of = map[string][]string{}
			r.held[e.Package] = of
		}
		of[e.Test] = append(of[e.Test], e.Output)
		if e.Test == "" && e.Output != "PASS\n" {
			_, _ = io.WriteString(r.out, e.Output)
		}
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.packageEnded(e)
			delete(r.held, e.Package)
			return
		}
		r.testEnded(e, r.held[e.Package][e.Test])
		delete(r.held[e.Package], e.Test)
	}
}

// testEnded counts a test that has ended and prints it if it failed.
func (r *reader) testEnded(e event, output []string) {
	sub := strings.Contains(e.Test, "/")
	switch e.Action {
	case "pass":
		if !sub {
			r.passed++
		}
	case "fail":
		if !sub {
			r.failed++
			r.again = append(r.again, test{e.Package, e.Test})
		}
		for _, o := range output {
			r.hard = r.hard || loud.MatchString(o)
			if !strings.HasPrefix(o, "=== ") {
				_, _ = io.WriteString(r.out, o)
			}
		}
		// Of one that failed because of its subtests, those tell.
		if said := telling(output); len(said) > 0 || !r.tells(e.Package+" "+e.Test+"/") {
			r.failures = append(r.failures, failure{e.Package + " " + e.Test, said})
		}
	case "skip":
		var reason []string
		for _, o := range output {
			if position.MatchString(o) {
				reason = append(reason, strings.TrimSpace(position.ReplaceAllString(o, "")))
			}
		}
		s := skip{pkg: e.Package, test: e.Test, reason: strings.Join(reason, "; ")}
		r.skips = append(r.skips, s)
		fmt.Fprintf(r.out, "--- SKIP: %s: %s\n", e.Test, s.reason)
	}
}

// packageEnded prints, of a package that failed, what tests wrote that never
// ended, such as on a panic or when time ran out. A package may also fail
// without a test that does: when it can't be built, or leaves something behind.
func (r *reader) packageEnded(e event) {
	if e.Action != "fail" {
		return
	}
	of := r.held[e.Package]
	r.hard = r.hard || slices.ContainsFunc(of[""], loud.MatchString)
	for _, test := range slices.Sorted(maps.Keys(of)) {
		if test == "" {
			continue
		}
		r.hard = true
		r.failed++
		_, _ = io.WriteString(r.out, strings.Join(of[test], ""))
		if said := telling(of[test]); len(said) > 0 {
			r.failures = append(r.failures, failure{e.Package + " " + test, said})
		}
	}
	switch {
	case e.FailedBuild != "":
		r.hard = true
		r.failures = append(r.failures, failure{e.Package + ", which can't be built", telling(r.built[e.FailedBuild])})
	case !r.tells(e.Package + " "):
		r.hard = true
		r.failures = append(r.failures, failure{e.Package, telling(of[""])})
	}
}

// tells reports whether there is a failure whose name begins so.
func (r *reader) tells(prefix string) bool {
	return slices.ContainsFunc(r.failures, func(f failure) bool { return strings.HasPrefix(f.name, prefix) })
}

// end prints what is left of packages that never ended, because go itself was
// stopped.
func (r *reader) end() {
	for _, pkg := range slices.Sorted(maps.Keys(r.held)) {
		for _, test := range slices.Sorted(maps.Keys(r.held[pkg])) {
			if said := telling(r.held[pkg][test]); test != "" {
				r.hard = true
				_, _ = io.WriteString(r.out, strings.Join(r.held[pkg][test], ""))
				r.failures = append(r.failures, failure{strings.TrimSpace(pkg+" "+test) + ", which has not ended", said})
			}
		}
	}
}

const (
	mostSaid = 14  // lines of a failure in the summary
	mostLine = 300 // bytes of each
)

// loud is how lines begin that say more than those around them.
var loud = regexp.MustCompile(`^(panic:|fatal error:|SIGQUIT:|WARNING: DATA RACE|goleak: )`)

// telling returns the lines of a failure that tell most: from a panic on; else
// the first ones and the last ones, as what is wrong often comes after what was
// logged.
func telling(output []string) []string {
	var said []string
	from := -1
	for line := range strings.SplitSeq(strings.Join(output, ""), "\n") {
		line = strings.TrimRight(line, " \t\r")
		switch bare := strings.TrimLeft(line, " "); {
		case line == "", line == "FAIL", line == "PASS", strings.HasPrefix(line, "FAIL\t"), strings.Trim(line, "=") == "",
			strings.HasPrefix(line, "=== "), strings.HasPrefix(bare, "--- FAIL: "), strings.HasPrefix(bare, "--- PASS: "):
			continue
		}
		if len(line) > mostLine {
			line = strings.ToValidUTF8(line[:mostLine], "") + "..."
		}
		if from < 0 && loud.MatchString(line) {
			from = len(said)
		}
		said = append(said, line)
	}
	switch {
	case len(said) <= mostSaid:
		return said
	case from >= 0 && (strings.HasPrefix(said[from], "panic: test timed out") || strings.HasPrefix(said[from], "SIGQUIT:")):
		return waiting(said[from:])
	case from >= 0:
		return said[from:min(from+mostSaid, len(said))]
	}
	half := mostSaid / 2
	left := fmt.Sprintf("    ... %d lines ...", len(said)-2*half)
	return slices.Concat(said[:half], []string{left}, said[len(said)-half:])
}

// waiting returns, of what a test binary says that ran out of time or was told
// to quit, which tests were running and where: of all goroutines those in code
// of tests, if there are any.
func waiting(said []string) []string {
	isHead := func(line string) bool { return strings.HasPrefix(line, "goroutine ") }
	i := slices.IndexFunc(said, isHead)
	if i < 0 {
		i = len(said)
	}
	head := min(i, mostSaid)
	picked := slices.Clone(said[:head])
	for i < len(said) && len(picked) < 3*mostSaid {
		end := i + 1
		for end < len(said) && !isHead(said[end]) {
			end++
		}
		stack := strings.Join(said[i:end], "\n")
		if strings.Contains(stack, "_test.go:") && !strings.Contains(stack, "testing.(*M).Run") {
			picked = append(picked, said[i:end]...)
		}
		i = end
	}
	if len(picked) == head {
		return said[:min(len(said), mostSaid)]
	}
	return picked[:min(len(picked), 3*mostSaid)]
}
