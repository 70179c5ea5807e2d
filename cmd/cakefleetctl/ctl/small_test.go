package ctl_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Who mistypes is told where to look, on every level.
func TestMistyped(t *testing.T) {
	for says, args := range map[string][]string{
		`cakefleetctl: unknown command "stat", did you mean stats; see cakefleetctl --help`:               {"stat"},
		`cakefleetctl plan: unknown command "histry", did you mean history; see cakefleetctl plan --help`: {"plan", "histry"},
		`cakefleetctl rollout: unknown command "xyzzy"; see cakefleetctl rollout --help`:                  {"rollout", "xyzzy"},
		`cakefleetctl plan list: takes no argument, but "gold" is given; see cakefleetctl plan list -`:    {"plan", "list", "gold"},
		`unknown flag: --bogus; see cakefleetctl top --help`:                                              {"top", "--bogus"},
		`unknown flag: --bogus; see cakefleetctl --help`:                                                  {"--bogus"},
		`--last: "5x" is no time such as 90s, 30m or 12h; see cakefleetctl stats --help`:                  {"stats", "--by", "plan", "--last", "5x"},
	} {
		want(t, nil, 2, says, args...)
	}
}

// What scripts and hasty fingers do, on a real controller.
func TestSmallThings(t *testing.T) {
	_, admin := realController(t)
	want(t, admin, 2, "unknown command", "completion", "foo")
	want(t, admin, 2, "completion what?", "completion")
	want(t, admin, 1, "router nope: not found\nsee cakefleetctl router list", "stats", "nope")
	nothing := filepath.Join(t.TempDir(), "empty.csv")
	if err := os.WriteFile(nothing, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	want(t, admin, 1, nothing+": file is empty", "subscriber", "import", nothing)
	want(t, admin, 0, "bash completion", "completion", "bash")
	want(t, admin, 1, "see cakefleetctl plan list", "router", "list", "--plan", "nope")
	want(t, admin, 1, "see cakefleetctl plan list", "subscriber", "list", "--plan", "nope")

	want(t, admin, 0, "", "plan", "set", "gold", "--down", "100mbit", "--up", "10mbit")
	want(t, admin, 0, "no routers", "router", "list", "--plan", "gold")
	for _, rate := range []string{"10 0mbit", "100mbps", "0", "fast"} {
		want(t, admin, 2, "--down", "override", "set", "1", "--down", rate)
		want(t, admin, 2, "--down", "boost", "1", "--down", rate, "--for", "2h")
	}

	// A list of any length is one JSON object, as a short one is.
	file := filepath.Join(t.TempDir(), "subscribers.csv")
	var csv strings.Builder
	csv.WriteString("id,plan,site\n")
	const n = 12_000 // more than two pages
	for i := range n {
		fmt.Fprintf(&csv, "%d,gold,north\n", 100_000+i)
	}
	if err := os.WriteFile(file, []byte(csv.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := want(t, admin, 0, `"subscribers": []`, "subscriber", "list", "-o", "json")
	want(t, admin, 0, "", "subscriber", "import", file)
	for text, count := range map[string]int{empty: 0, want(t, admin, 0, "", "subscriber", "list", "-o", "json"): n} {
		var list struct {
			Subscribers []struct {
				ID     string            `json:"id"`
				Labels map[string]string `json:"labels"`
			} `json:"subscribers"`
			Next string `json:"next_page_token"`
		}
		if err := json.Unmarshal([]byte(text), &list); err != nil || len(list.Subscribers) != count {
			t.Errorf("%d subscribers, want %d (%v)", len(list.Subscribers), count, err)
		}
	}
	// An import is one entry of the audit log.
	want(t, admin, 0, fmt.Sprintf("%d added, 0 changed, 0 removed", n), "audit", "list", "--who", "admin")

	// A file of an old spreadsheet.
	if err := os.WriteFile(file, []byte("id,plan,site\n1,gold,M\xfcnchen\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want(t, admin, 1, `:2: is not UTF-8 after "1,gold,M" (byte 0xfc): the file seems to be Latin-1 or Windows-1252; save it as UTF-8`, "subscriber", "import", file)
}
