package main

import (
	"fmt"
	"io"
	"time"
)

// report collects what the steps did.
type report struct {
	ran, skipped []string
	failed       bool
}

func (r *report) skip(name, why string) {
	r.skipped = append(r.skipped, name+": "+why)
}

func (r *report) add(name string, took time.Duration, res result) {
	verdict := "ok"
	if res.err != nil || res.failed > 0 {
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
		r.skip(s.name, s.reason)
	}
}

func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\n== summary, %s\nran:\n", machine())
	for _, l := range r.ran {
		fmt.Fprintln(w, " ", l)
	}
	if len(r.skipped) == 0 {
		fmt.Fprintln(w, "skipped: nothing")
	} else {
		fmt.Fprintln(w, "skipped:")
		for _, l := range r.skipped {
			fmt.Fprintln(w, " ", l)
		}
	}
	if r.failed {
		fmt.Fprintln(w, "FAIL")
	} else {
		fmt.Fprintln(w, "PASS")
	}
}
