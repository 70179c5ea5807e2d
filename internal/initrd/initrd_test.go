package initrd

import (
	"bytes"
	"os/exec"
	"testing"
)

// TestWrite unpacks what Write wrote with the cpio of the system.
func TestWrite(t *testing.T) {
	if _, err := exec.LookPath("cpio"); err != nil {
		t.Skip("skipped: cpio is not installed")
	}
	var b bytes.Buffer
	err := Write(&b, []Entry{
		{Name: "bin", Mode: ModeDir},
		{"bin/a", ModeFile, []byte("hello")},
		{"bin/b", ModeFile, []byte("12345678")},
		{"bin/c", ModeLink, []byte("a")},
	})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("cpio", "--list", "--quiet")
	cmd.Stdin = &b
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "bin\nbin/a\nbin/b\nbin/c\n" {
		t.Errorf("cpio lists %q, error %v", out, err)
	}
}
