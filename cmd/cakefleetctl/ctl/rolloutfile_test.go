package ctl

import (
	"strings"
	"testing"
)

// TestRolloutFileOfNoOrManyRollouts has files that aren't one rollout: none of
// them may pass for one, or end the program.
func TestRolloutFileOfNoOrManyRollouts(t *testing.T) {
	const one = "id: a\nselector: {plan: gold}\nset: {down.rate: 200mbit}\n"
	for text, says := range map[string]string{
		"":                       "0 documents",
		"# later\n":              "0 documents",
		"---\n":                  "0 documents",
		"null\n":                 "one rollout",
		one + "---\n" + one:      "2 documents",
		one + "soak: 30m\nid: b": `"id" already set`,
	} {
		if m, err := readRollout(strings.NewReader(text), "-", ""); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: got %v, %v, want an error with %q", text, m, err, says)
		}
	}
	for _, text := range []string{one, "# mine\n---\n" + one + "---\n# end\n", "--- {id: a}\n", `{"id": "a"}`} {
		if m, err := readRollout(strings.NewReader(text), "-", ""); err != nil || m.GetId() != "a" {
			t.Errorf("%q: got %v, %v, want rollout a", text, m, err)
		}
	}
}
