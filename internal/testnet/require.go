package testnet

import (
	"os"
	"strconv"
	"testing"
)

// requireEnv makes tests fail where they would skip, so that continuous
// integration can't pass without having run them.
const requireEnv = "CAKEFLEET_REQUIRE_NETNS"

// emulatedEnv says that a program for another processor plays the kernel's part
// of the socket calls, and knows a few of them only.
const emulatedEnv = "CAKEFLEET_EMULATED"

// Require skips the test, with the reason, on a machine that can't make
// namespaces. With CAKEFLEET_REQUIRE_NETNS set it fails instead.
func Require(tb testing.TB) {
	tb.Helper()
	if os.Getenv(emulatedEnv) != "" {
		tb.Skip("skipped: the emulator has no sockets of netfilter")
	}
	if os.Geteuid() != 0 {
		Skip(tb, "network namespaces need root")
	}
	// Making and leaving a namespace is the one honest probe.
	n, err := New(tbName(tb, "probe"))
	if err != nil {
		Skip(tb, "network namespaces can't be made here: "+err.Error())
	}
	if err := n.Close(); err != nil {
		tb.Fatal(err)
	}
}

// Skip skips the test with the reason, or fails it if
// CAKEFLEET_REQUIRE_NETNS is set.
func Skip(tb testing.TB, reason string) {
	tb.Helper()
	if os.Getenv(requireEnv) != "" {
		tb.Fatalf("%s is set, but: %s", requireEnv, reason)
	}
	tb.Skip("skipped: " + reason)
}

// Make makes a namespace for one test and closes it at the test's end. The
// name is made unique by the process id.
func Make(tb testing.TB, name string) *Namespace {
	tb.Helper()
	n, err := New(tbName(tb, name))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := n.Close(); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// tbName is such as "cft-1234-home"; the prefix is the same for every test, so
// that what a killed run left can be found.
func tbName(tb testing.TB, name string) string {
	tb.Helper()
	return "cft-" + strconv.Itoa(os.Getpid()) + "-" + name
}
