package engine_test

import (
	"fmt"

	"github.com/cakefleet/cakefleet/engine"
)

// What `tc qdisc show` would say of some options, or what is wrong with them.
func ExampleParseKeywords() {
	for _, words := range []string{"bandwidth 100mbit diffserv4 nat", "bandwidth 100 nat"} {
		c, err := engine.ParseKeywords(engine.DefaultConfig(), words)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(c.Keywords())
	}
	// Output:
	// bandwidth 100Mbit diffserv4 triple-isolate nat nowash no-ack-filter split-gso rtt 100ms raw overhead 0
	// word 2 "100" after bandwidth: rate "100": unit missing, say for example 100mbit or 100kbit
}
