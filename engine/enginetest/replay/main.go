// Command replay replays recorded runs of sch_cake (cakevec-1 files) against
// the engine. It prints one line a file, and ends with exit status 1 when the
// engine decided anything differently.
package main

import (
	"fmt"
	"os"

	"github.com/cakefleet/cakefleet/engine/enginetest/cakevec"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: replay FILE.gz ...")
		os.Exit(2)
	}
	status := 0
	for _, path := range os.Args[1:] {
		sum, err := cakevec.File(path)
		if err != nil {
			status = 1
			fmt.Printf("FAIL %s: %v\n", path, err)
			continue
		}
		fmt.Printf("ok   %s: %v\n", path, sum)
	}
	os.Exit(status)
}
