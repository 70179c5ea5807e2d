package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
}

// result is what one go command had to say.
type result struct {
	passed, failed int // tests, subtests left out
	skips          []skip
	err            error
}

type skip struct{ name, reason string }

// goCommand runs the go command of a step. Of `go test` it prints what it
// prints without -v: the closing line of each package and everything of the
// tests that failed.
func goCommand(ctx context.Context, s step) result {
	args := slices.Clone(s.args)
	isTest := args[0] == "test"
	if isTest {
		args = slices.Insert(args, 1, "-json", "-timeout="+s.limit.String())
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stderr = os.Stderr
	// Interrupted tests get the time to take down what they set up.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	if !isTest {
		cmd.Stdout = os.Stdout
		return result{err: cmd.Run()}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return result{err: err}
	}
	if err := cmd.Start(); err != nil {
		return result{err: err}
	}
	res := readEvents(out, os.Stdout)
	res.err = cmd.Wait()
	return res
}

// position is what testing puts before the text of t.Skip.
var position = regexp.MustCompile(`^\s*\S+_test\.go:\d+: |^\s*\S+\.go:\d+: `)

// readEvents reads the events of `go test -json` from in and prints them to out.
func readEvents(in io.Reader, out io.Writer) result {
	var res result
	held := map[string][]string{} // output of tests that have not ended
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return res
		}
		var e event
		if json.Unmarshal(line, &e) != nil {
			_, _ = out.Write(line) // not of test2json, so it is for people
			continue
		}
		id := e.Package + " " + e.Test
		switch e.Action {
		case "build-output":
			_, _ = io.WriteString(out, e.Output)
		case "output":
			if e.Test != "" {
				held[id] = append(held[id], e.Output)
			} else if e.Output != "PASS\n" {
				_, _ = io.WriteString(out, e.Output)
			}
		case "pass", "fail", "skip":
			if e.Test == "" {
				res.flush(held, e, out)
				continue
			}
			res.ended(e, held[id], out)
			delete(held, id)
		}
	}
}

// ended counts a test that has ended and prints it if it failed.
func (r *result) ended(e event, output []string, out io.Writer) {
	sub := strings.Contains(e.Test, "/")
	switch e.Action {
	case "pass":
		if !sub {
			r.passed++
		}
	case "fail":
		if !sub {
			r.failed++
		}
		for _, o := range output {
			if !strings.HasPrefix(o, "=== ") {
				_, _ = io.WriteString(out, o)
			}
		}
	case "skip":
		var reason []string
		for _, o := range output {
			if position.MatchString(o) {
				reason = append(reason, strings.TrimSpace(position.ReplaceAllString(o, "")))
			}
		}
		s := skip{name: e.Package + " " + e.Test, reason: strings.Join(reason, "; ")}
		r.skips = append(r.skips, s)
		fmt.Fprintf(out, "--- SKIP: %s: %s\n", e.Test, s.reason)
	}
}

// flush prints what tests of a package wrote that never ended, such as on a
// panic or when time ran out.
func (r *result) flush(held map[string][]string, e event, out io.Writer) {
	for id, output := range held {
		if !strings.HasPrefix(id, e.Package+" ") {
			continue
		}
		if e.Action == "fail" {
			r.failed++
			_, _ = io.WriteString(out, strings.Join(output, ""))
		}
		delete(held, id)
	}
}
