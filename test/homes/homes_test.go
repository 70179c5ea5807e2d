package homes_test

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/homes"
	"github.com/cakefleet/cakefleet/test/traffic"
)

func TestMain(m *testing.M) {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	os.Exit(m.Run())
}

func claim(t *testing.T, prefix string) {
	t.Helper()
	release, _, err := homes.Claim(prefix, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	})
}

func TestClaim(t *testing.T) {
	testnet.Require(t)
	const prefix = "cfclaim-"
	release, _, err := homes.Claim(prefix, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := homes.Claim(prefix, false); !errors.Is(err, homes.ErrClaimed) {
		t.Errorf("claimed twice: error %v, want %v", err, homes.ErrClaimed)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	claim(t, prefix)
}

// TestLine fills a limited line without any agent: it carries its rate, and
// its queue is as long as was asked for.
func TestLine(t *testing.T) {
	testnet.Require(t)
	const prefix = "cfline-"
	claim(t, prefix)
	net, err := homes.Build(prefix, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := net.Close(); err != nil {
			t.Error(err)
		}
		if left, err := homes.Namespaces(prefix); len(left) > 0 || err != nil {
			t.Errorf("left behind: %v (%v)", left, err)
		}
	})
	if err := net.Homes[0].Limit(20e6, 5e6, 200*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	load, err := homes.NewLoad(net)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := load.Stop(); err != nil {
			t.Error(err)
		}
	})
	down, up, err := load.Bulk(0, 0, 2, homes.Server4, homes.Server6)
	if err != nil {
		t.Fatal(err)
	}
	pings, err := load.Ping(0, 1, 10*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(6 * time.Second) // the flows fill the queue
	r := load.Record
	// The best of some windows counts: whatever else the machine does takes from
	// what the line carries.
	for try := 1; ; try++ {
		from, waits := time.Now(), testnet.CoreWaits(t)
		time.Sleep(3 * time.Second)
		to := time.Now()
		busy := testnet.Busy(t, from, waits)
		time.Sleep(time.Second) // the last probes come back
		d, u, l := r.Goodput(from, to, down...)/1e6, r.Goodput(from, to, up...)/1e6, r.Latency(from, to, pings...)
		miss := ""
		if d < 15 || d > 20 {
			miss += " Want a little under 20 Mbit/s down."
		}
		if u < 3 || u > 5 {
			miss += " Want a little under 5 Mbit/s up."
		}
		if l.Median < 50*time.Millisecond || l.P99 > 600*time.Millisecond {
			miss += " Want the latency of a full queue of 200 ms each way."
		}
		t.Logf("down %.1f, up %.1f Mbit/s, latency %+v.%s", d, u, l, miss)
		if miss == "" {
			break
		}
		if try == 6 && busy > testnet.Standstill {
			t.Skipf("skipped: this machine is too busy to judge it, something waited for a core %.0f %% of the time:%s", busy, miss)
		}
		if try == 6 {
			t.Errorf("also in window %d: down %.1f, up %.1f Mbit/s, latency %+v.%s", try, d, u, l, miss)
			break
		}
	}
	if errs := r.Errors(); len(errs) > 0 {
		t.Errorf("flows broke: %v", errs)
	}
	if err := net.Homes[0].Open(); err != nil {
		t.Error(err)
	}
}

// TestLeftovers removes a network that nobody closed, with what runs in it.
func TestLeftovers(t *testing.T) {
	testnet.Require(t)
	const prefix = "cfgone-"
	claim(t, prefix)
	net, err := homes.Build(prefix, 1)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	if err := net.Homes[0].Router.Start(cmd); err != nil {
		t.Fatal(err)
	}
	names, err := homes.RemoveLeftovers(prefix)
	if err != nil {
		t.Error(err)
	}
	if len(names) != 6 {
		t.Errorf("removed %v, want 6 namespaces", names)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process ended by itself")
	}
	if err := net.Close(); err != nil {
		t.Errorf("closed after that: %v", err)
	}
}
