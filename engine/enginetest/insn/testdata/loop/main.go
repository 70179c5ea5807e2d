//go:build linux

// Command loop goes round as often as its argument says, between the marks.
package main

import (
	"fmt"
	"os"
	"strconv"

	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
)

func main() {
	n, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	work(10) // not counted
	insn.Begin()
	sum := work(n)
	insn.End()
	work(10)
	fmt.Println(sum)
}

//go:noinline
func work(n int) (sum uint32) {
	for i := range uint32(n) {
		sum = sum*31 + i
	}
	return sum
}
