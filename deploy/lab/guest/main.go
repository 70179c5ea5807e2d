// Command guest is all that runs in the lab's machine beside the kernel and
// the agent: it is the first process, which sets the router up and measures,
// and as "guest WORD" it is the traffic's source, the sparse flow, the soak
// that takes what CPU time is left, the background process, and the controller.
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		boot()
		return
	}
	var err error
	switch os.Args[1] {
	case "source":
		err = source()
	case "ping":
		err = ping(os.Args[2])
	case "soak":
		err = soak()
	case "busy":
		err = busy()
	case "spin":
		err = spin()
	case "controller":
		err = controller()
	default:
		err = fmt.Errorf("no such part: %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "guest %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}
