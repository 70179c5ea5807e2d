// Package initrd writes the file systems that machines for tests boot into.
package initrd

import (
	"fmt"
	"io"
	"slices"
)

// Modes of entries.
const (
	ModeDir  = 0o040755
	ModeFile = 0o100755
	ModeLink = 0o120777 // whose body is where it leads
)

// Entry is one file or directory of the machine's file system.
type Entry struct {
	Name string // without a leading slash; its directories come before
	Mode uint32
	Body []byte
}

// Write writes an archive of the kind that Linux unpacks at boot ("newc").
// All times are 0: the same files give the same machine.
func Write(w io.Writer, entries []Entry) error {
	for i, e := range append(slices.Clip(entries), Entry{Name: "TRAILER!!!"}) {
		head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
			i+1, e.Mode, 0, 0, 1, 0, len(e.Body), 0, 0, 0, 0, len(e.Name)+1, 0)
		for _, part := range [][]byte{pad4([]byte(head + e.Name + "\x00")), pad4(e.Body)} {
			if _, err := w.Write(part); err != nil {
				return fmt.Errorf("write file system: %w", err)
			}
		}
	}
	return nil
}

// pad4 adds zeros up to a multiple of four bytes.
func pad4(b []byte) []byte { return append(slices.Clip(b), make([]byte, -len(b)&3)...) }
