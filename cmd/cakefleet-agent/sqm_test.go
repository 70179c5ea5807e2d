package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestImportSQM(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sqm")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("config queue\n option interface eth1\n option upload 5000\n option script layer_cake.qos\n option qdisc cake\n")
	var out strings.Builder
	if err := importSQM(&out, path); err != nil || !strings.Contains(out.String(), "upload    bandwidth 5Mbit diffserv3") {
		t.Errorf("%v:\n%s", err, out.String())
	}
	write("config queue\n option upload 5000\n")
	if err := importSQM(&out, path); err == nil || !strings.Contains(err.Error(), "sqm: line 1: the queue has no interface") {
		t.Errorf("error is %v", err)
	}
	if code := run([]string{"--import-sqm", path}); code != exitFailed {
		t.Errorf("exit status %d", code)
	}
}
