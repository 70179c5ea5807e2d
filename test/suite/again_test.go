package main

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAgain(t *testing.T) {
	bad := func(names ...string) string {
		var b strings.Builder
		for _, n := range names {
			b.WriteString(events("m/p", n, "fail", "    p_test.go:7: too slow"))
		}
		return b.String()
	}
	end := events("m/p", "", "fail", "FAIL\tm/p\t0.1s")
	cases := []struct {
		name, first string
		runs        int
		steady      bool // what runs again passes
		failed      bool
	}{
		{name: "passes again", first: bad("TestBad") + end, runs: 1, steady: true},
		{name: "of several packages", first: bad("TestBad", "TestWorse") + end + strings.ReplaceAll(bad("TestBad")+end, "m/p", "m/q"), runs: 2, steady: true},
		{name: "fails again", first: bad("TestBad") + end, runs: 1, failed: true},
		{name: "too many", first: bad("TestA", "TestB", "TestC", "TestD") + end, failed: true, steady: true},
		{name: "race", first: events("m/p", "TestRace", "fail", "WARNING: DATA RACE", "    p_test.go:7: race detected") + end, failed: true, steady: true},
		{name: "panic", first: bad("TestBad") + events("m/p", "TestPanic", "", "panic: oh") + end, failed: true, steady: true},
		{name: "leak", first: events("m/p", "", "fail", "PASS", "goleak: found unexpected goroutines"), failed: true, steady: true},
		{name: "leak, too", first: bad("TestBad") + events("m/p", "", "fail", "goleak: found unexpected goroutines"), failed: true, steady: true},
		{name: "build", first: bad("TestBad") + end + "{\"Action\":\"fail\",\"Package\":\"m/b\",\"FailedBuild\":\"m/b.test\"}\n", failed: true, steady: true},
		{name: "no end", first: bad("TestBad") + events("m/p", "TestEndless", "", "    p_test.go:1: still here"), failed: true, steady: true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			first := readEvents(strings.NewReader(c.first), &strings.Builder{})
			first.err = errors.New("exit status 1")
			runs := 0
			res := again(t.Context(), step{args: []string{"test", "-race", "m/p", "m/q"}}, first, func(_ context.Context, s step) result {
				runs++
				if !c.steady {
					return result{failed: 1, err: errors.New("exit status 1")}
				}
				return result{passed: strings.Count(s.args[4], "|") + 1}
			})
			if failed := res.err != nil || res.failed > 0 || len(res.failures) > 0; failed != c.failed || runs != c.runs {
				t.Errorf("failed %v after %d runs; want %v, %d: %+v", failed, runs, c.failed, c.runs, res)
			}
			if unsteady := len(res.unsteady) > 0; unsteady == c.failed {
				t.Errorf("unsteady: %+v", res.unsteady)
			}
		})
	}
}

// TestNoneAgain: a run that finds nothing to run is no success.
func TestNoneAgain(t *testing.T) {
	first := result{failed: 1, err: errors.New("exit status 1"), again: []test{{"m/p", "TestBad"}}}
	res := again(t.Context(), step{args: []string{"test", "m/p"}}, first, func(context.Context, step) result { return result{} })
	if res.err == nil {
		t.Error("nothing ran, and that was taken for success")
	}
}

func TestOnly(t *testing.T) {
	cases := []struct{ args, want string }{
		{"test -race m/p m/q", "test -race -count=1 -run ^(TestA)$ m/p"},
		{"test -count=1 -run TestRemoteWrite ./controller/history", "test -count=1 -run TestRemoteWrite -count=1 -run ^(TestA)$ m/p"},
		{"run ./test/machine --json --env A=1 ./agent/... ./test/netns:^TestVLAN$", "run ./test/machine --json --env A=1 m/p:^(TestA)$"},
	}
	for _, c := range cases {
		if diff := cmp.Diff(c.want, strings.Join(only(strings.Fields(c.args), "m/p", "^(TestA)$"), " ")); diff != "" {
			t.Error(diff)
		}
	}
}
