package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestMendKnowsThisGo(t *testing.T) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path, err := writeOverlay(strings.TrimSpace(string(out)), dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(b), "sys_linux_mipsx.s") {
		t.Errorf("overlay %s, %v", b, err)
	}
	for name := range mended {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || strings.Count(string(b), "$1000000, R4") < 2 {
			t.Errorf("%s is not mended: %v", name, err)
		}
	}
}

func TestMendRefusesAnotherFile(t *testing.T) {
	u := mended["sys_linux_mipsx.s"]
	for name, text := range map[string]string{
		"mended":         "\nTEXT runtime·usleep(SB),NOSPLIT,$28-4" + u.should + "\nTEXT runtime·gettid(SB)",
		"elsewhere":      "\nTEXT runtime·usleep(SB)\n\tRET\n\nTEXT runtime·other(SB)" + u.is + "\nTEXT x",
		"twice":          "\nTEXT runtime·usleep(SB)" + u.is + u.is + "\nTEXT x",
		"no such thing":  "",
		"no other after": "\nTEXT runtime·usleep(SB)" + u.is,
	} {
		if _, err := mend(text, u); err == nil {
			t.Errorf("%s: it was mended", name)
		}
	}
}
