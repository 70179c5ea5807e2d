// Package traffic makes real traffic and measures what it gets: bulk TCP
// flows in both directions and a flow of small packets that come back, like
// ping. Each end is a process of its own, started in whatever network
// namespace the caller likes, so that nothing is shared but the wire and the
// machine's clock.
//
// The program that uses it runs itself again for those processes: its main,
// or TestMain, begins with
//
//	if traffic.IsChild() {
//		os.Exit(traffic.ChildMain())
//	}
package traffic

import (
	"net/netip"
	"time"
)

// Spec is what one process does until its standard input ends.
type Spec struct {
	// Serve accepts flows and echoes probes on this port, on all addresses;
	// 0 = no.
	Serve uint16 `json:",omitempty"`
	// Flows are opened at once.
	Flows []Flow `json:",omitempty"`
	// Probes are started at once.
	Probes []Probe `json:",omitempty"`
	// Congestion is the congestion control of the flows that this process sends,
	// such as "cubic"; empty = the system's.
	Congestion string `json:",omitempty"`
	// Nice is the priority of the process, -20 to 19: what stands for a machine
	// of its own must not wait for the others' bulk traffic.
	Nice int `json:",omitempty"`
}

// Flow is one TCP flow that sends as fast as it may. Its bytes are counted where they arrive.
type Flow struct {
	Name   string // unique in one Record
	Up     bool   // sent to the server; else from it
	Server netip.AddrPort
}

// Probe sends a small UDP packet at a steady pace and measures how long each
// takes to the server and back.
type Probe struct {
	Name     string // unique in one Record
	Server   netip.AddrPort
	Interval time.Duration
}

// tick is the time between two readings of the counters.
const tick = 100 * time.Millisecond

// reading is what a process writes to its standard output, one JSON object a
// line.
type reading struct {
	At     int64             // wall clock, ns; one machine, so one clock
	Bytes  map[string]uint64 `json:",omitempty"` // arrived since the start, by flow
	Sent   []packet          `json:",omitempty"` // probes since the last reading
	Echoed []packet          `json:",omitempty"` // those that came back since the last reading
	Error  string            `json:",omitempty"` // a flow that broke
}

// packet is one packet of a probe.
type packet struct {
	Probe string `json:"P"`
	Seq   uint64 `json:"S"`
	At    int64  `json:"A"` // when it was sent, ns
	RTT   int64  `json:"R,omitempty"`
}
