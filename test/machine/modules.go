package main

import (
	"debug/elf"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cakefleet/cakefleet/internal/initrd"
	"github.com/cakefleet/cakefleet/test/machine/order"
)

// modules returns the kernel's modules as files of a machine.
func modules(dir string) ([]initrd.Entry, error) {
	in := strings.TrimPrefix(order.ModuleDir, "/")
	files := []initrd.Entry{{Name: in, Mode: initrd.ModeDir}}
	var index []order.Module
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".ko") {
			return err
		}
		m, err := readModule(path)
		if err != nil {
			return fmt.Errorf("module %s: %w", path, err)
		}
		body, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		index = append(index, m)
		files = append(files, initrd.Entry{Name: in + "/" + m.Name + ".ko", Mode: initrd.ModeFile, Body: body})
		return nil
	})
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(index)
	if err != nil {
		return nil, err
	}
	return append(files, initrd.Entry{Name: in + "/" + order.IndexFile, Mode: initrd.ModeFile, Body: b}), nil
}

// readModule reads what a module says of itself: strings NAME=VALUE that end
// with a zero byte.
func readModule(path string) (m order.Module, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return m, err
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return m, fmt.Errorf("it has no .modinfo")
	}
	b, err := section.Data()
	if err != nil {
		return m, err
	}
	m.Name = strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
	for line := range strings.SplitSeq(string(b), "\x00") {
		switch name, value, _ := strings.Cut(line, "="); name {
		case "depends":
			for needed := range strings.SplitSeq(value, ",") {
				if needed != "" {
					m.Needs = append(m.Needs, strings.ReplaceAll(needed, "-", "_"))
				}
			}
		case "alias":
			m.Aliases = append(m.Aliases, value)
		}
	}
	return m, nil
}
