package engine_test

import (
	"path/filepath"
	"testing"

	"github.com/cakefleet/cakefleet/engine/enginetest/cakevec"
)

// TestVectors replays what Linux 6.1 decided, packet by packet.
func TestVectors(t *testing.T) {
	files, err := filepath.Glob("testdata/vectors/*.gz")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 50 {
		t.Fatalf("%d recordings found", len(files))
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			t.Parallel()
			if _, err := cakevec.File(f); err != nil {
				t.Error(err)
			}
		})
	}
}
