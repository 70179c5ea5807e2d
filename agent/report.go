package agent

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/probe"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// reporter makes reports. It has the memory of one report, which the session
// uses up before it asks for the next.
type reporter struct {
	plane  dataplane.Dataplane
	iface  Interface     // nil: nothing is known of it
	prober *probe.Prober // nil: no delay is measured
	began  time.Time
	stats  dataplane.Stats
	probe  plan.ProbeStats
	wan    plan.LinkState
	report plan.Report

	skipped func() uint64 // reports; nil: none are counted
}

func newReporter(boot string, plane dataplane.Dataplane, iface Interface, prober *probe.Prober) *reporter {
	return &reporter{plane: plane, iface: iface, prober: prober, began: time.Now(), report: plan.Report{BootID: boot}}
}

// next makes a report. What it refers to stays as it is until the next call.
func (r *reporter) next() *plan.Report {
	p := &r.report
	p.Sequence++
	p.Uptime = time.Since(r.began)
	p.Down, p.Up = nil, nil
	if r.plane.Stats(&r.stats) {
		p.Down, p.Up = &r.stats.Down, &r.stats.Up
	}
	p.Agent = plan.AgentStats{
		CPUTime:         cpuTime(),
		ResidentBytes:   residentBytes(),
		BypassedPackets: r.stats.BypassedPackets,
		QueueOverflows:  r.stats.QueueOverflows,
	}
	if r.skipped != nil {
		p.Agent.SkippedReports = r.skipped()
	}
	if n := r.stats.Batches; n > 0 {
		p.Agent.BatchSizeMilli = uint32(r.stats.Packets * 1000 / n)
	}
	p.Probe = nil
	if r.prober != nil && r.prober.Stats(&r.probe) {
		p.Probe = &r.probe
	}
	if r.iface != nil {
		d := r.iface.Device()
		r.wan = plan.LinkState{
			Name: d.Name, Index: d.Index, Up: d.Up, Carrier: d.Carrier, Speed: d.Speed, MTU: d.MTU,
			Comings: d.Comings, CarrierLosses: d.CarrierLosses,
		}
		p.WAN = &r.wan
	}
	return p
}

// cpuTime returns the CPU time that this process used; 0 if it is not known.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// residentBytes returns the memory of this process; 0 if it is not known.
func residentBytes() uint64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := bytes.Fields(b)
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}
