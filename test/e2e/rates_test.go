package e2e

import (
	"fmt"
	"testing"
	"time"
)

// TestRates compares, in one run, a line with a plain FIFO and the same line
// shaped by the fleet, at the rates that matter.
func TestRates(t *testing.T) {
	f := newFleet(t)
	for _, c := range []struct {
		down, up     float64 // Mbit/s
		wait, length time.Duration
		median, p99  time.Duration // bounds; 0 = none but the FIFO's
	}{
		{115, 12, settle, measure, 5 * time.Millisecond, 25 * time.Millisecond},
		{20, 5, settle, measure, 0, 0},
		{2, 0.5, 3 * settle, 3 * measure, 0, 0},
	} {
		t.Run(fmt.Sprintf("%v-%v", c.down, c.up), func(t *testing.T) {
			h := f.net.Homes[0]
			must(t, h.Limit(uint64(c.down*1e6), uint64(c.up*1e6), 250*time.Millisecond))
			f.ctl(t, "plan", "set", planName, "--down", mbit(c.down), "--up", mbit(c.up), "--options", "diffserv4 nat", "--up-options", "ack-filter")
			loads := newLoad(t, f.net, 0)
			fifo := measureAll(t, loads, 2*c.wait, c.length)[0]
			t.Logf("FIFO: %.2f down, %.2f up, %+v", fifo.Down.Goodput/1e6, fifo.Up.Goodput/1e6, fifo.Latency)

			f.ctl(t, "subscriber", "set", h.Name, "--plan", planName)
			f.ctl(t, "router", "set", routerID(0), "--subscriber", h.Name, "--wait")
			must(t, h.Open())
			// Far below the FIFO's, whatever else.
			bound := want{"shaped", c.down, c.up, fifo.Latency.Median / 4, fifo.Latency.P99 / 2}
			if c.median > 0 {
				bound.median, bound.p99 = min(bound.median, c.median), min(bound.p99, c.p99)
			}
			wantAll(t, loads, c.wait, c.length, bound)
			f.ctl(t, "router", "set", routerID(0), "--subscriber", "", "--wait")
		})
	}
}
