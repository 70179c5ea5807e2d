package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/test/machine/order"
)

// load loads the modules of a name, which may be an alias: as modprobe(8) does,
// but from the few that the machine has.
func load(name string) error {
	b, err := os.ReadFile(filepath.Join(order.ModuleDir, order.IndexFile))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: this machine has no modules", name)
	}
	if err != nil {
		return err
	}
	var all []order.Module
	if err := json.Unmarshal(b, &all); err != nil {
		return fmt.Errorf("%s: %w", order.IndexFile, err)
	}
	m := modules{byName: map[string]*order.Module{}, loaded: map[string]bool{}}
	for i := range all {
		m.byName[all[i].Name] = &all[i]
	}
	plain := strings.ReplaceAll(name, "-", "_")
	if _, ok := m.byName[plain]; ok {
		return m.load(plain)
	}
	found := false
	for i := range all {
		for _, pattern := range all[i].Aliases {
			if ok, _ := path.Match(pattern, name); ok {
				found = true
				if err := m.load(all[i].Name); err != nil {
					return err
				}
			}
		}
	}
	if !found {
		return fmt.Errorf("%s: no such module", name)
	}
	return nil
}

type modules struct {
	byName map[string]*order.Module
	loaded map[string]bool
}

// load loads one module after those that it needs. What the kernel has built in
// is not in the index.
func (m modules) load(name string) error {
	mod := m.byName[name]
	if mod == nil || m.loaded[name] {
		return nil
	}
	m.loaded[name] = true
	for _, needed := range mod.Needs {
		if err := m.load(needed); err != nil {
			return err
		}
	}
	f, err := os.Open(filepath.Join(order.ModuleDir, name+".ko"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", name, err)
	}
	return nil
}
