// Package row has what the lab's host and guest say to each other: what one
// boot of the machine shall do, and what it measured.
package row

import "time"

// Shaper is what shapes the guest's WAN link.
type Shaper string

// The shapers. Rates are the same everywhere; the rest is set as sqm-scripts
// sets it.
const (
	None      Shaper = "none"      // routing and NAT alone
	FIFO      Shaper = "fifo"      // a rate and one queue, as a modem has
	HTB       Shaper = "htb"       // HTB and fq_codel, as simple.qos
	Cake      Shaper = "cake"      // sch_cake, as layer_cake.qos
	Userspace Shaper = "userspace" // cakefleet-agent --dataplane userspace
	Kernel    Shaper = "kernel"    // cakefleet-agent --dataplane kernel
)

// Agent tells whether cakefleet-agent is the shaper.
func (s Shaper) Agent() bool { return s == Userspace || s == Kernel }

// Order is what one boot of the guest does.
type Order struct {
	Kind   string // "traffic", "idle" or "monitor"
	Shaper Shaper
	V6     bool // traffic is IPv6; else IPv4 through NAT
	GRO    bool // the router's interfaces build super-packets
	Busy   bool // a background process takes 10 % of the CPU

	DownRate, UpRate   uint64 // bits/s, layer 2
	DownOffer, UpOffer uint64 // bits/s, layer 2
	DownFlows, UpFlows int    // bulk flows
	Run                int    // consecutive frames of a flow

	DownWords, UpWords string // CAKE keywords, as tc has them, for Cake and agents

	AgentEnv []string // for cakefleet-agent, such as GOGC=50

	Settle, Window time.Duration // guest time
	Profile        bool          // print the kernel's symbols in the end
}

// Result is what one boot measured. CPU times are exact: by the guest's clock,
// which counts instructions.
type Result struct {
	Window time.Duration

	// Where the window went.
	Soak   time.Duration // nobody wanted it: idle
	Source time.Duration // made and sent the traffic
	Ping   time.Duration // the sparse flow's process
	Busy   time.Duration // the background process
	Agent  time.Duration // cakefleet-agent's threads

	DownOffered, UpOffered     Count // sent to the router
	DownDelivered, UpDelivered Count // sent by the router

	Ping50, Ping90, Ping99, PingMax time.Duration
	Pings, PingsLost                int

	Marks float64 // CE marks a second, both directions, in a window of its own
	Drops float64 // dropped packets a second, both directions

	AgentRSS      uint64   // bytes
	AgentSwitches uint64   // context switches of the agent's threads in the window
	Threads       []Thread // of the agent
	System        []Thread // of the kernel

	Reports int // Kind "idle": that the controller got

	MonitorWakes [2]float64 // Kind "monitor": a second, without and with the mend

	Shaping string // what the kernel or agent says it runs
}

// Thread is one thread in the window.
type Thread struct {
	Name     string
	CPU      time.Duration
	Switches uint64
}

// Count is of frames.
type Count struct{ Packets, Bytes uint64 }

// Sub returns what was added since d.
func (c Count) Sub(d Count) Count { return Count{c.Packets - d.Packets, c.Bytes - d.Bytes} }

// Mbit returns megabits a second.
func (c Count) Mbit(over time.Duration) float64 {
	return float64(c.Bytes) * 8 / over.Seconds() / 1e6
}

// Router is the time that was neither the traffic's own nor idle: all that the
// router's kernel and agent did.
func (r *Result) Router() time.Duration {
	return r.Window - r.Soak - r.Source - r.Ping - r.Busy
}

// Packets is how many the router was given.
func (r *Result) Packets() uint64 { return r.DownOffered.Packets + r.UpOffered.Packets }

// Prefixes of lines on the guest's console.
const (
	ResultPrefix = "LAB-RESULT "
	FailPrefix   = "LAB-FAIL "
	SymbolPrefix = "LAB-SYM "
	EndPrefix    = "LAB-END"
)
