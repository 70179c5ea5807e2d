package main

import (
	"encoding/json"
	"errors"
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
	goroot := strings.TrimSpace(string(out))
	for arch, want := range map[string]map[string]string{
		"mips":     {"sys_linux_mipsx.s": "$1000000, R4", "defs_linux_mipsx.go": "_       [4]byte\n\ttv_nsec int32"},
		"mipsle":   {"sys_linux_mipsx.s": "$1000000, R4"},
		"mips64":   {"sys_linux_mips64x.s": "$1000000, R4"},
		"mips64le": {"sys_linux_mips64x.s": "$1000000, R4"},
		"arm64":    nil,
	} {
		path, err := writeOverlay(goroot, t.TempDir(), arch, nil)
		if err != nil {
			t.Fatal(err)
		}
		var overlay struct{ Replace map[string]string }
		if want != nil {
			b, err := os.ReadFile(path)
			if err == nil {
				err = json.Unmarshal(b, &overlay)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if len(overlay.Replace) != len(want) {
			t.Errorf("%s: replaced are %v", arch, overlay.Replace)
		}
		for file, has := range want {
			source := filepath.Join(goroot, "src", "runtime", file)
			was, err1 := os.ReadFile(source)
			is, err2 := os.ReadFile(overlay.Replace[source])
			if err := errors.Join(err1, err2); err != nil || strings.Count(string(is), has) <= strings.Count(string(was), has) {
				t.Errorf("%s: %s is not mended: %v", arch, file, err)
			}
		}
	}
}

func TestMendRefusesAnotherFile(t *testing.T) {
	f := faults[0]
	for name, text := range map[string]string{
		"mended":         "\nTEXT runtime·usleep(SB),NOSPLIT,$28-4" + f.should + "\nTEXT runtime·gettid(SB)",
		"elsewhere":      "\nTEXT runtime·usleep(SB)\n\tRET\n\nTEXT runtime·other(SB)" + f.is + "\nTEXT x",
		"twice":          "\nTEXT runtime·usleep(SB)" + f.is + f.is + "\nTEXT x",
		"no such thing":  "",
		"no other after": "\nTEXT runtime·usleep(SB)" + f.is,
	} {
		if _, err := mend(text, f); err == nil {
			t.Errorf("%s: it was mended", name)
		}
	}
}
