package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// report collects what the steps did.
type report struct {
	module   string // whose name is left out of its packages'
	ran      []string
	skipped  []reason
	failures []failure
	unsteady []failure // of tests that passed at once when they ran again
	failed   bool
}

// reason is why something was skipped.
type reason struct {
	why  string
	what []string // steps, or packages with their tests
}

func (r *report) skip(name, why string) {
	i := slices.IndexFunc(r.skipped, func(s reason) bool { return s.why == why })
	if i < 0 {
		i = len(r.skipped)
		r.skipped = append(r.skipped, reason{why: why})
	}
	// The same test may be skipped on every machine that is emulated.
	if !slices.Contains(r.skipped[i].what, name) {
		r.skipped[i].what = append(r.skipped[i].what, name)
	}
}

// skipTest is skip for a test, among others of its package.
func (r *report) skipTest(s skip) {
	r.skip(r.short(s.pkg)+" "+s.test, s.reason)
}

func (r *report) add(name string, took time.Duration, res result) {
	verdict := "ok"
	if res.err != nil || res.failed > 0 || len(res.failures) > 0 {
		verdict = "FAILED"
		r.failed = true
	}
	line := fmt.Sprintf("%-6s %s", verdict, name)
	if n := res.passed + res.failed; n > 0 {
		line += fmt.Sprintf(": %d tests", n)
		if res.failed > 0 {
			line += fmt.Sprintf(", %d failed", res.failed)
		}
	}
	if res.err != nil && res.failed == 0 {
		line += fmt.Sprintf(" (%v)", res.err)
	}
	r.ran = append(r.ran, fmt.Sprintf("%s, %s", line, took.Round(time.Second)))
	for _, s := range res.skips {
		r.skipTest(s)
	}
	r.failures = append(r.failures, r.of(name, res.failures)...)
	r.unsteady = append(r.unsteady, r.of(name, res.unsteady)...)
	if res.err != nil && len(res.failures) == 0 {
		r.failures = append(r.failures, failure{name, []string{res.err.Error()}})
	}
}

// of says of which step failures are.
func (r *report) of(step string, failures []failure) []failure {
	failures = slices.Clone(failures)
	for i := range failures {
		failures[i].name = step + ": " + r.short(failures[i].name)
	}
	return failures
}

func (r *report) short(name string) string { return strings.TrimPrefix(name, r.module+"/") }

// mostFailures are told with what they said; of more there is the name.
const mostFailures = 12

// print says what matters most last: some see only the end of it.
func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\n== summary, %s\n", machine())
	if len(r.skipped) == 0 {
		fmt.Fprintln(w, "skipped: nothing")
	} else {
		fmt.Fprintln(w, "skipped:")
		for _, s := range r.skipped {
			fmt.Fprintf(w, "  %s: %s\n", strings.Join(s.what, ", "), s.why)
		}
	}
	fmt.Fprintln(w, "ran:")
	for _, l := range r.ran {
		fmt.Fprintln(w, " ", l)
	}
	tell(w, "failed, then passed when run again; such a test is to be mended:", r.unsteady)
	tell(w, "failed:", r.failures)
	if r.failed {
		fmt.Fprintln(w, "FAIL")
	} else {
		fmt.Fprintln(w, "PASS")
	}
}

// tell prints failures under a title, if there are any.
func tell(w io.Writer, title string, failures []failure) {
	if len(failures) > 0 {
		fmt.Fprintln(w, title)
	}
	for i, f := range failures {
		fmt.Fprintln(w, " ", f.name)
		if i >= mostFailures {
			continue
		}
		for _, l := range f.said {
			fmt.Fprintln(w, "     ", l)
		}
	}
}
