// Command replay replays recorded runs of sch_cake (cakevec-1 files) against
// the engine. It prints one line a file, and ends with exit status 1 when the
// engine decided anything differently or a file can't be read, and with 2 when
// it is called wrongly.
package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/cakefleet/cakefleet/engine/enginetest/cakevec"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, out, complaints io.Writer) (status int) {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		fmt.Fprintln(complaints, "usage: replay FILE.gz ...")
		return 2
	}
	for _, path := range args {
		sum, err := cakevec.File(path)
		if err != nil {
			status = 1
			fmt.Fprintf(out, "FAIL %s: %v\n", path, err)
			continue
		}
		fmt.Fprintf(out, "ok   %s: %v\n", path, sum)
	}
	return status
}
