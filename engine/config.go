package engine

import "time"

// BitsPerSecond is a link rate. Inside the shaper a rate is nanoseconds per
// byte; the kernel's interfaces count bytes per second (rate / 8).
type BitsPerSecond uint64

// TinMode says how packets are divided into tins (priority lanes). The values
// 0..4 are those of TCA_CAKE_DIFFSERV_MODE.
type TinMode uint8

// The tin modes of sch_cake, and Cake3: the classes of April 2015, with their
// order, thresholds and interval rule.
const (
	Diffserv3 TinMode = iota
	Diffserv4
	Diffserv8
	BestEffort
	Precedence
	Cake3
)

// FlowMode says what shares the link fairly. The values are those of
// TCA_CAKE_FLOW_MODE.
type FlowMode uint8

// The flow modes of sch_cake.
const (
	FlowBlind FlowMode = iota
	SrcHost
	DstHost
	Hosts
	Flows
	DualSrcHost
	DualDstHost
	TripleIsolate
)

// AckFilter says which redundant TCP acknowledgements are thinned out. The
// values are those of TCA_CAKE_ACK_FILTER.
type AckFilter uint8

// The ACK filter modes of sch_cake.
const (
	AckFilterOff AckFilter = iota
	AckFilterNormal
	AckFilterAggressive
)

// Framing is the link layer's cell or block coding. The values are those of
// TCA_CAKE_ATM.
type Framing uint8

// The framings of sch_cake.
const (
	NoATM Framing = iota
	ATM
	PTM
)

// Config is everything that can be set on one shaped direction. It is plain
// comparable data; DefaultConfig is where to start from.
type Config struct {
	Rate        BitsPerSecond // 0 = unlimited
	Tins        TinMode
	Flows       FlowMode
	AckFilter   AckFilter
	Framing     Framing
	NAT         bool // keys are given by the data plane; kept for reports and the kernel data plane
	Wash        bool // clear the DSCP on the way out
	Ingress     bool // the bottleneck is upstream: dropped packets have used the link too
	Autorate    bool // autorate-ingress: follow the measured arrival rate
	SplitGSO    bool // schedule super-packets segment by segment
	Raw         bool // no overhead compensation: lengths count with their link-layer header
	Overhead    int16
	MPU         uint16
	MTU         uint16        // link MTU with the link-layer header, bytes (kernel: psched_mtu); 1514 on Ethernet
	RTT         time.Duration // the interval; whole microseconds, at least 1 µs
	Target      time.Duration // whole microseconds, at least 1 µs
	MemoryLimit uint32        // bytes; 0 = automatic (4 x bandwidth-delay, cake.md 1.10)
	Fwmark      uint32        // mask of the firewall mark that selects the tin; 0 = off
}

// DefaultConfig returns the defaults of sch_cake: unlimited, diffserv3,
// triple-isolate, split-gso, rtt 100ms, raw.
func DefaultConfig() Config {
	return Config{
		Flows:    TripleIsolate,
		SplitGSO: true,
		Raw:      true,
		MTU:      1514,
		RTT:      100 * time.Millisecond,
		Target:   5 * time.Millisecond,
	}
}
