// Package order has what the two sides of a machine that runs tests say to each
// other: the program outside, and the first process inside.
package order

import "time"

// File is where the order lies in the machine.
const File = "/etc/order.json"

// Order is what a machine is to do.
type Order struct {
	Port    string   // device that messages are written to
	Modules []string // that the port needs
	Env     []string // of the tests
	Tests   []Test
}

// Test is the test binary of one package.
type Test struct {
	Package string
	Program string
	Dir     string // where it runs
	Args    []string
	Limit   time.Duration // from which on it is told to quit
}

// Message is one line of JSON from the machine.
type Message struct {
	Test   int           `json:",omitempty"` // index of the test that it is about
	Begins bool          `json:",omitempty"` // it was started
	Output string        `json:",omitempty"` // what it wrote
	Ended  bool          `json:",omitempty"`
	Failed string        `json:",omitempty"` // how it ended; empty: well
	Took   time.Duration `json:",omitempty"`

	Broken string `json:",omitempty"` // why the machine can't do what it is to
	Done   bool   `json:",omitempty"` // nothing comes any more
}

// Where modules lie in the machine: NAME.ko, and a list of Module as JSON.
const (
	ModuleDir = "/lib/modules"
	IndexFile = "index.json"
)

// Module is a part of the kernel that is loaded when it is asked for.
type Module struct {
	Name    string
	Needs   []string // modules that have to be there before
	Aliases []string // patterns that the kernel asks by
}
