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
}

// AgentStats are the agent's own cost and the data plane's health.
type AgentStats struct {
	CPUTime         time.Duration
	ResidentBytes   uint64
	BypassedPackets uint64 // passed unshaped because the data plane was not ready
	QueueOverflows  uint64 // packets that the kernel could not queue to the data plane
	BatchSizeMilli  uint32 // packets read in one batch, average times 1000
}
