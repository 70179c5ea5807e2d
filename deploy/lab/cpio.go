package main

import (
	"fmt"
	"io"
	"slices"
)

// File modes in the archive.
const (
	modeDir  = 0o040755
	modeFile = 0o100755
)

// entry is one file or directory of the machine's file system.
type entry struct {
	name string // without a leading slash
	mode uint32
	body []byte
}

// writeCPIO writes an archive of the kind that Linux unpacks at boot ("newc").
// All times are 0: the same files give the same machine.
func writeCPIO(w io.Writer, entries []entry) error {
	for i, e := range append(slices.Clip(entries), entry{name: "TRAILER!!!"}) {
		head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
			i+1, e.mode, 0, 0, 1, 0, len(e.body), 0, 0, 0, 0, len(e.name)+1, 0)
		for _, part := range [][]byte{pad4([]byte(head + e.name + "\x00")), pad4(e.body)} {
			if _, err := w.Write(part); err != nil {
				return fmt.Errorf("write file system: %w", err)
			}
		}
	}
	return nil
}

// pad4 adds zeros up to a multiple of four bytes.
func pad4(b []byte) []byte { return append(slices.Clip(b), make([]byte, -len(b)&3)...) }
