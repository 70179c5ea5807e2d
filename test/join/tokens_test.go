package join

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
)

// disk is where output goes; it is full after so many bytes.
type disk struct {
	bytes.Buffer
	room int
}

func (d *disk) Write(p []byte) (int, error) {
	if d.Len()+len(p) > d.room {
		return 0, errors.New("no space left on device")
	}
	return d.Buffer.Write(p)
}

// TestManyTokens makes a token for each line of a file, is interrupted, goes on
// as it was told to, and takes back what was not used.
func TestManyTokens(t *testing.T) {
	p := newISP(t)
	var b strings.Builder
	b.WriteString("router,subscriber,site\n")
	const n = 1300
	for i := range n {
		subscriber := "10001"
		if i == 7 || i == 1299 {
			subscriber = "nobody"
		}
		fmt.Fprintf(&b, "many-%d,%s,north\n", i, subscriber)
	}
	file := filepath.Join(t.TempDir(), "routers.csv")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := func(d *disk, args ...string) (code int, stderr string) {
		var e bytes.Buffer
		code = ctl.Run(t.Context(), ctl.Config{
			Args:   append([]string{"--controller", p.ready.Operators.String(), "--credentials", p.ready.Credentials}, args...),
			Stdout: d, Stderr: &e,
		})
		return code, e.String()
	}

	// The disk is full in the third call.
	d := &disk{room: 150_000}
	code, text := cmd(d, "token", "create", "--file", file, "--batch", "b1")
	for _, want := range []string{"stopped after 1000 of 1300 routers: print: no space left", "999 tokens were made and printed", "up to 500 more may be stored", "--batch b1 --ttl 24h0m0s --skip 1000", "token delete --batch b1", "line 9: "} {
		if code != 1 || !strings.Contains(text, want) {
			t.Fatalf("exit status %d, no %q in: %s", code, want, text)
		}
	}
	d.room = 1 << 20
	code, text = cmd(d, "token", "create", "--file", file, "--batch", "b1", "--skip", "1000")
	if code != 1 || !strings.Contains(text, "299 tokens made") || !strings.Contains(text, "line 1301: ") || !strings.Contains(text, "1 line without a token") {
		t.Fatalf("exit status %d: %s", code, text)
	}
	rows, err := csv.NewReader(&d.Buffer).ReadAll()
	if err != nil || len(rows) != 1+n-2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	seen := map[string]bool{}
	for _, r := range rows[1:] {
		if seen[r[0]] || seen[r[4]] {
			t.Errorf("twice: %s", r[0])
		}
		seen[r[0]], seen[r[4]] = true, true
	}

	// The last one opens the door.
	box := p.box()
	box.token = rows[len(rows)-1][4]
	box.start()
	p.inSync("many-1298")

	if code, text = cmd(d, "token", "delete", "--batch", "b1"); code != 0 {
		t.Errorf("exit status %d: %s", code, text)
	}
	d.Reset()
	if code, text = cmd(d, "token", "list"); code != 0 || !strings.Contains(text, "no tokens") {
		t.Errorf("exit status %d: %s%s", code, d.String(), text)
	}

	// Lines of JSON.
	if code, text = cmd(d, "token", "create", "--file", file, "-o", "json", "--skip", "1298"); code != 1 {
		t.Fatalf("exit status %d: %s", code, text)
	}
	var one struct{ Router, Subscriber, ID, Expires, Token string }
	if err := json.Unmarshal(d.Bytes(), &one); err != nil || one.Router != "many-1298" || one.Subscriber != "10001" || !strings.HasPrefix(one.Token, "cf1."+one.ID+".") {
		t.Errorf("%+v, %v", one, err)
	}
}
