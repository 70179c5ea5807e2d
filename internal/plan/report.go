package plan

import (
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Report is a router's cumulative statistics. A lost report costs resolution
// and no totals.
type Report struct {
	Sequence uint64 // from 1 within one boot
	BootID   string
	Uptime   time.Duration
	Down, Up *engine.Stats // nil while the direction is not shaped
	Agent    AgentStats
	Probe    *ProbeStats // nil while no delay is measured
	WAN      *LinkState  // nil if nothing is known of the interface

	// Again is the origin to which the report was sent on an earlier stream
	// already; empty if it is new. Whoever is of another origin begins to count
	// where it ends.
	Again string
}

// ProbeLabel is the label of a subscriber that names the host to which its
// routers measure the delay, in place of the fleet's; ProbeOff as its value is
// for none.
const (
	ProbeLabel = "probe"
	ProbeOff   = "off"
)

// Probe is a delay to measure.
type Probe struct {
	Host     string        // a name or an address; empty: none
	Interval time.Duration // between two echoes; 0: the agent's choice
}

// ProbeStats is the delay to a host and back, by how loaded the link was. The
// counters begin anew with the agent and with another host.
type ProbeStats struct {
	Host    string // as it was asked for
	Address string // that it has; empty while it is not known
	// Idle: both directions below an eighth of their rate. Down, Up and Both:
	// one or both at half their rate or above. Light: in between.
	Idle, Down, Up, Both, Light ProbeDelay
	Error                       string // why the newest try could not be made
}

// ProbeDelay counts echoes at one load of the link.
type ProbeDelay struct {
	Delay engine.Histogram // of those that were answered
	Lost  uint64           // without an answer in time
}

// Loaded returns what was measured while one direction or both were loaded.
func (p *ProbeStats) Loaded() ProbeDelay {
	all := p.Down
	for _, o := range []*ProbeDelay{&p.Up, &p.Both} {
		all.Delay.Merge(&o.Delay)
		all.Lost += o.Lost
	}
	return all
}

// LinkState is what the kernel says of the shaped interface.
type LinkState struct {
	Name          string
	Index         uint32               // 0: there is none of that name
	Up            bool                 // switched on
	Carrier       bool                 // something is at the other end
	Speed         engine.BitsPerSecond // of the cable; 0: not known, or it has none
	MTU           uint32               // of the network layer, bytes
	Comings       uint64               // with another index, since the agent started
	CarrierLosses uint64               // since the agent started
}

// AgentStats are the agent's own cost and the data plane's health.
type AgentStats struct {
	CPUTime         time.Duration
	ResidentBytes   uint64
	BypassedPackets uint64 // passed unshaped because the data plane was not ready
	QueueOverflows  uint64 // packets that the kernel could not queue to the data plane
	BatchSizeMilli  uint32 // packets read in one batch, average times 1000
	SkippedReports  uint64 // never made, as the controller did not take the one before in time
}
