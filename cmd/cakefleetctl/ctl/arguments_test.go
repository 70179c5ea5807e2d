package ctl_test

import (
	"strings"
	"testing"
)

// What is wrong with a flag is said in words of this program.
func TestBadFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"rollout", "start", "--per-site", "abc"}, `--per-site: "abc" is no number from 0 on`},
		{[]string{"rollout", "start", "--per-site", "99999999999999999999"}, "of the size that is possible here"},
		{[]string{"rollout", "start", "--soak", "30"}, `--soak: "30" is no time such as 90s, 30m or 12h`},
		{[]string{"stats", "--last", "400d"}, "--last"},
		{[]string{"rollout", "start", "--per-site", "-4"}, `"-4" is no number from 0 on`},
	} {
		got := run(t, nil, c.args...)
		if got.code == 0 || !strings.Contains(got.stderr, c.want) || strings.Contains(got.stderr, "strconv") || strings.Contains(got.stderr, "time: ") {
			t.Errorf("%v: exit code %d, %q; want %q", c.args, got.code, got.stderr, c.want)
		}
	}
}
