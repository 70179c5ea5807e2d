package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// findKernel returns an uncompressed kernel image: the one that was named, one
// that lies beside the checkout, or one that was built here before.
func findKernel(o options) (string, error) {
	built := filepath.Join(o.out, "vmlinux")
	candidates := []string{"../shared/lab/vmlinux.xz", built}
	if o.kernel != "" {
		candidates = []string{o.kernel}
	}
	for _, path := range candidates {
		_, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) && o.kernel == "" {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("kernel: %w", err)
		}
		if !strings.HasSuffix(path, ".xz") {
			return path, nil
		}
		return unpack(path, filepath.Join(o.out, "vmlinux-given"))
	}
	return "", errors.New("there is no kernel yet: deploy/lab/kernel/build.sh makes one (22 minutes of CPU), or name one in CAKEFLEET_LAB_KERNEL")
}

func unpack(path, to string) (string, error) {
	cmd := exec.Command("xz", "--decompress", "--stdout", path)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	image, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("unpack %s: %w: %s", path, err, errs.Bytes())
	}
	return to, os.WriteFile(to, image, 0o644)
}
