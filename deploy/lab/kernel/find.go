// Package kernel finds the kernel of the lab's machines, which build.sh makes.
package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Env names the kernel that is to be used.
const Env = "CAKEFLEET_LAB_KERNEL"

// Find returns an uncompressed kernel image: the one that was named, one that
// was built in out or by another checkout, or one that lies beside the checkout.
// One that has to be unpacked first is then in out.
func Find(named, out string) (string, error) {
	candidates := []string{filepath.Join(out, "vmlinux"), newest(), "../shared/lab/vmlinux.xz"}
	if named != "" {
		candidates = []string{named}
	}
	for _, path := range candidates {
		if _, err := os.Stat(path); err != nil {
			if named != "" {
				return "", fmt.Errorf("kernel: %w", err)
			}
			continue
		}
		if !strings.HasSuffix(path, ".xz") {
			return path, nil
		}
		return unpack(path, filepath.Join(out, "vmlinux-given"))
	}
	return "", errors.New("there is no kernel yet: deploy/lab/kernel/build.sh makes one (22 minutes of CPU), or name one in " + Env)
}

// newest returns what build.sh has kept last; empty if there is none.
func newest() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	kept, _ := filepath.Glob(filepath.Join(cache, "cakefleet", "lab", "vmlinux-*")) // the pattern is good
	var last string
	var made int64
	for _, path := range kept {
		if fi, err := os.Stat(path); err == nil && fi.ModTime().UnixNano() > made {
			last, made = path, fi.ModTime().UnixNano()
		}
	}
	return last
}

func unpack(path, to string) (string, error) {
	cmd := exec.Command("xz", "--decompress", "--stdout", path)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	image, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("unpack %s: %w: %s", path, err, errs.Bytes())
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", err
	}
	return to, os.WriteFile(to, image, 0o644)
}
