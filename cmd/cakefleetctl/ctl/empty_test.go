package ctl_test

import "testing"

// A fleet in which nothing is yet says so, in words, wherever one looks: that is
// neither an error, nor an empty page, nor good news.
func TestFleet023_EmptyFleet(t *testing.T) {
	_, admin := realController(t)
	for _, c := range []struct {
		says string
		args []string
	}{
		{"no plans yet: make one with", []string{"plan", "list"}},
		{"no subscribers: make one with", []string{"subscriber", "list"}},
		{"no routers: make a join token", []string{"router", "list"}},
		{"no schedules: make one with", []string{"schedule", "list"}},
		{"no rollout goes on", []string{"rollout", "list"}},
		{"nobody waits", []string{"router", "pending"}},
		{"no tokens", []string{"token", "list"}},
		{"no plans yet", []string{"stats", "--by", "plan"}},
		{"nothing was counted", []string{"stats", "--by", "plan", "--last", "1h"}},
		{"no router has figures of the last minute", []string{"top"}},
		{"nothing is wrong", []string{"doctor"}},
	} {
		want(t, admin, 0, c.says, c.args...)
		if out := want(t, admin, 0, "{", append(c.args, "-o", "json")...); out[0] != '{' {
			t.Errorf("%v as JSON: %s", c.args, out)
		}
	}
}
