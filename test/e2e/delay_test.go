package e2e

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
	"github.com/cakefleet/cakefleet/test/homes"
)

// report returns the latest report of a home's router.
func (f *fleet) report(t *testing.T, home int) plan.Report {
	t.Helper()
	var resp pb.GetRouterStatsResponse
	out := f.ask(t, "a report of "+routerID(home), func(string) bool { return true }, "stats", routerID(home), "-o", "json")
	must(t, protojson.Unmarshal([]byte(out), &resp))
	r, err := wire.ToReport(resp.GetReport())
	must(t, err)
	return r
}

// measured waits until a report fits and returns the delays in it.
func (f *fleet) measured(t *testing.T, home int, what string, fits func(*plan.ProbeStats) bool) plan.ProbeStats {
	t.Helper()
	var last plan.ProbeStats
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if p := f.report(t, home).Probe; p != nil {
			if last = *p; fits(p) {
				return last
			}
		}
	}
	t.Fatalf("%s: waited in vain; the last report has %+v", what, last)
	return last
}

// delayMeasured has a router tell of the delay to a host: idle, behind the
// provider's FIFO, and shaped. Another one does so because its subscriber has a
// label, through the controller.
func delayMeasured(t *testing.T, f *fleet) {
	f.setPlan(t, 20, 5)
	h := f.net.Homes[0]
	f.ctl(t, "subscriber", "set", f.net.Homes[1].Name, "--label", plan.ProbeLabel+"="+homes.Server6.String())
	f.ctl(t, "router", "set", routerID(0), "--subscriber", "", "--wait")
	must(t, f.Agents[0].Stop())
	must(t, f.StartAgent(0, "", "--probe", homes.Server4.String(), "--probe-interval", "1s"))
	must(t, h.Limit(22e6, 5.5e6, 250*time.Millisecond))
	defer func() {
		must(t, h.Open())
		f.ctl(t, "subscriber", "set", f.net.Homes[1].Name, "--label", plan.ProbeLabel+"=")
		must(t, f.Agents[0].Stop())
		must(t, f.StartAgent(0, ""))
		f.awaitSync(t, 0)
	}()

	const enough = 5
	from, waits := time.Now(), testnet.CoreWaits(t)
	idle := f.measured(t, 0, "idle", func(p *plan.ProbeStats) bool { return p.Idle.Delay.Total() >= enough })
	newLoad(t, f.net, 0)
	fifo := f.measured(t, 0, "behind a FIFO", func(p *plan.ProbeStats) bool {
		d := p.Loaded()
		return d.Delay.Total()+d.Lost >= 2*enough
	})
	f.ctl(t, "router", "set", routerID(0), "--subscriber", h.Name, "--wait")
	// TCP needs a while until the FIFO has drained.
	time.Sleep(settle)
	began := f.report(t, 0).Probe
	shaped := f.measured(t, 0, "shaped", func(p *plan.ProbeStats) bool {
		d, since := p.Loaded(), began.Loaded()
		return d.Delay.Total() >= since.Delay.Total()+2*enough
	})
	median := func(now, before plan.ProbeDelay) time.Duration {
		for i := range now.Delay {
			now.Delay[i] -= before.Delay[i]
		}
		return now.Delay.Quantile(1, 2)
	}
	atRest := median(idle.Idle, plan.ProbeDelay{})
	before, after := median(fifo.Loaded(), idle.Loaded()), median(shaped.Loaded(), began.Loaded())
	t.Logf("idle %v, loaded behind a FIFO %v, loaded and shaped %v", atRest, before, after)
	if before < 50*time.Millisecond || after > before/4 || atRest > before/4 {
		missed(t, testnet.Busy(t, from, waits), "idle %v, loaded behind a FIFO %v, loaded and shaped %v", atRest, before, after)
	}
	if r := f.report(t, 0); r.WAN == nil || r.WAN.Name != homes.WAN || r.WAN.Index == 0 || !r.WAN.Up || !r.WAN.Carrier || r.WAN.Speed != engine.BitsPerSecond(10e9) {
		t.Errorf("the interface is %+v", r.WAN)
	}
	byLabel := f.measured(t, 1, "by label", func(p *plan.ProbeStats) bool { return p.Idle.Delay.Total() > 0 })
	if byLabel.Host != homes.Server6.String() || byLabel.Address != homes.Server6.String() || byLabel.Error != "" {
		t.Errorf("by label: %+v", byLabel.Host)
	}
	if r := f.report(t, 2); r.Probe != nil {
		t.Errorf("a router that nobody asked measures the delay to %s", r.Probe.Host)
	}
}
