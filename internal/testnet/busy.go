package testnet

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Standstill is the share of a measurement, in per cent, in which something on
// this machine waited for a core, from which on a miss says nothing about us:
// alone on two cores, the traffic and the agents of the tests have about 10.
// With another program on one of them it is 20 to 30, and a full line gets 87
// to 91 % of its rate instead of 95.
const Standstill = 20

// CoreWaits returns for how long something on this machine has waited for a
// core since it started (PSI, /proc/pressure/cpu); 0 where the kernel doesn't
// tell.
func CoreWaits(tb testing.TB) time.Duration {
	tb.Helper()
	text, err := os.ReadFile("/proc/pressure/cpu")
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	_, total, _ := strings.Cut(string(text), "total=")
	total, _, _ = strings.Cut(total, "\n")
	us, parseErr := strconv.ParseInt(total, 10, 64)
	if err = errors.Join(err, parseErr); err != nil {
		tb.Fatalf("read /proc/pressure/cpu: %v", err)
	}
	return time.Duration(us) * time.Microsecond
}

// Busy returns the share of the time since from in which something waited for
// a core, in per cent; waits is what CoreWaits said then.
func Busy(tb testing.TB, from time.Time, waits time.Duration) float64 {
	tb.Helper()
	return 100 * float64(CoreWaits(tb)-waits) / float64(time.Since(from))
}
