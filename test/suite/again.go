package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// mostAgain is how many tests of a step may run again: more don't fail by bad
// luck.
const mostAgain = 3

// again runs the tests of a step that failed once more, each package by itself.
// Many tests here watch processes and packets in real time, on machines that do
// other work, too. One that fails there and passes at once when it runs again
// does not fail the suite; the report names it with what it said. Data races,
// panics, leaks, builds that fail and tests that never end are not luck: after
// those nothing runs again.
func again(ctx context.Context, s step, first result, run func(context.Context, step) result) result {
	if first.hard || len(first.again) == 0 || len(first.again) > mostAgain || ctx.Err() != nil {
		return first
	}
	tests := map[string][]string{}
	for _, t := range first.again {
		tests[t.pkg] = append(tests[t.pkg], regexp.QuoteMeta(t.name))
	}
	all := first
	all.err, all.failed, all.failures = nil, 0, nil
	all.unsteady = first.failures
	for _, t := range first.again {
		names, ok := tests[t.pkg]
		if !ok {
			continue // with one before it
		}
		delete(tests, t.pkg)
		fmt.Printf("\n== %s, again: %s of %s\n", s.name, strings.Join(names, ", "), t.pkg)
		one := s
		one.args = only(s.args, t.pkg, "^("+strings.Join(names, "|")+")$")
		res := run(ctx, one)
		if res.err == nil && res.passed < len(names) {
			res.err = fmt.Errorf("%d of %d tests of %s ran again and passed", res.passed, len(names), t.pkg)
		}
		if res.err != nil || res.failed > 0 || len(res.failures) > 0 {
			return first
		}
		all.passed += res.passed
	}
	return all
}

// only returns the arguments of a step's command that make it run some tests of
// one package. The packages are what comes last.
func only(args []string, pkg, tests string) []string {
	n := len(args)
	for n > 0 && strings.Contains(args[n-1], "/") {
		n--
	}
	args = slices.Clone(args[:n])
	if args[0] == "test" {
		return append(args, "-count=1", "-run", tests, pkg)
	}
	return append(args, pkg+":"+tests)
}
