package main

import (
	"fmt"
	"io"
	"os"

	"github.com/cakefleet/cakefleet/agent/sqm"
)

// importSQM prints what a configuration of sqm-scripts becomes here.
func importSQM(w io.Writer, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	queues, err := sqm.Parse(string(text))
	if err != nil {
		return fmt.Errorf("import %s: %w", path, err)
	}
	_, err = w.Write(sqm.AppendText(nil, queues))
	return err
}
