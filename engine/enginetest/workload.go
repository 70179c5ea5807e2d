package enginetest

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cakefleet/cakefleet/engine"
)

// Start is when the first packet of a Workload arrives. A Scheduler that is to
// be compared with the figures of sch_cake is made at time 0.
const Start engine.Time = 1_000_000_000 // ns

// The DSCPs that the workloads use.
const (
	cs1  = 8
	af41 = 34
	cs5  = 40
	ef   = 46
	ect0 = 2 // in the two ECN bits below the DSCP
)

// Workload is traffic fixed to the nanosecond, and the configuration it is
// meant for. Its senders react to nothing.
type Workload struct {
	Name   string
	Config engine.Config
	// Standing packets arrive first, while nothing is dequeued, and remain as
	// a backlog, since afterwards as many leave as arrive.
	Standing int
	// Lockstep traffic is dequeued once at every arrival and at no other time.
	Lockstep bool
	// OwnPlacement leaves the flows in the queues for which their packets'
	// dissection has hashed them. Otherwise, once dissected, they go where they
	// went in the recorded runs of sch_cake, so that the same flows collide.
	OwnPlacement bool
	streams      []streamSpec
}

// streamSpec sends its k-th packet at Start + offset + k*interval for flow k mod
// len(flows).
type streamSpec struct {
	interval, offset engine.Time
	size             uint32
	acks             bool // the n-th packet of a flow acknowledges 2896 bytes more than the one before
	flows            []Flow
}

// Workloads returns the seven workloads that the engine's cost is measured
// with:
//
//	W1   115 Mbit/s, 64 bulk and 64 sparse flows, 1.1x overload
//	W1u  the same at 0.9x load
//	W2   unlimited, 128 flows, one packet in and one out
//	W2s  the same behind a standing backlog of one packet a flow
//	W3   12 Mbit/s, bulk, sparse and ACK flows, ACK filter
//	W3n  the same without the ACK filter
//	W4   115 Mbit/s, 4096 bulk flows, 2x overload
func Workloads() []Workload {
	shaped := func(rate engine.BitsPerSecond) engine.Config {
		c := engine.DefaultConfig()
		c.Tins, c.Rate = engine.Diffserv4, rate
		return c
	}
	fast, slow := shaped(115_000_000), shaped(12_000_000)
	filtered := slow
	filtered.AckFilter = engine.AckFilterNormal
	unlimited := engine.DefaultConfig()
	unlimited.Tins = engine.BestEffort

	sparse := streamSpec{interval: 312_500, offset: 7_000, size: 90, flows: flows(64, sparseFlow)}
	acks := streamSpec{interval: 125_000, offset: 13_000, size: 66, acks: true, flows: flows(16, ackFlow)}
	bulk := func(interval engine.Time, n int) streamSpec {
		return streamSpec{interval: interval, size: 1514, flows: flows(n, bulkFlow)}
	}
	plain := streamSpec{interval: 10_000, offset: 10_000, size: 1514, flows: flows(128, PlainFlow)}
	upload := []streamSpec{bulk(1_111_500, 64), sparse, acks}

	return []Workload{
		{Name: "W1", Config: fast, streams: []streamSpec{bulk(97_500, 64), sparse}},
		{Name: "W1u", Config: fast, streams: []streamSpec{bulk(119_700, 64), sparse}},
		{Name: "W2", Config: unlimited, Lockstep: true, streams: []streamSpec{plain}},
		{Name: "W2s", Config: unlimited, Lockstep: true, Standing: 128, streams: []streamSpec{plain}},
		{Name: "W3", Config: filtered, streams: upload},
		{Name: "W3n", Config: slow, streams: upload},
		{Name: "W4", Config: fast, streams: []streamSpec{bulk(52_660, 4096)}},
	}
}

// WorkloadByName returns one of Workloads.
func WorkloadByName(name string) (Workload, error) {
	for _, w := range Workloads() {
		if w.Name == name {
			return w, nil
		}
	}
	return Workload{}, fmt.Errorf("workload %q: no such workload", name)
}

func flows(n int, flow func(i int) Flow) []Flow {
	f := make([]Flow, n)
	for i := range f {
		f[i] = flow(i)
	}
	return f
}

func bulkFlow(i int) Flow {
	f := PlainFlow(i)
	if i%4 == 3 {
		f.Src = ipv6(1, 1+i%8)
		f.Dst = netip.MustParseAddr(fmt.Sprintf("2001:db8:ffff::%x", 1+i%32))
	}
	switch i % 8 {
	case 0:
		f.TOS = cs1 << 2
	case 1:
		f.TOS = af41 << 2
	}
	if i/8%2 == 1 {
		f.TOS |= ect0
	}
	return f
}

// PlainFlow is the i-th bulk flow without IPv6, DSCP or ECN: TCP from 8 hosts to
// 32, no two of the first 25,000 alike.
func PlainFlow(i int) Flow {
	return Flow{
		Src:   netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i%8)}),
		Dst:   netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + i%32)}),
		Proto: TCPProto, SrcPort: uint16(40000 + i), DstPort: 443,
	}
}

func sparseFlow(i int) Flow {
	f := Flow{
		Src:   netip.AddrFrom4([4]byte{10, 0, 1, byte(1 + i%16)}),
		Dst:   netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i%16)}),
		Proto: UDPProto, SrcPort: uint16(50000 + i), DstPort: 3478,
	}
	if i%4 == 3 {
		f.Src = ipv6(2, 1+i%16)
		f.Dst = netip.MustParseAddr(fmt.Sprintf("2001:db8:ffff::%x", 0x100+1+i%16))
	}
	switch i % 4 {
	case 0:
		f.TOS = ef << 2
	case 1:
		f.TOS = cs5 << 2
	}
	if i%2 == 1 {
		f.TOS |= ect0
	}
	return f
}

func ackFlow(i int) Flow {
	return Flow{
		Src:   netip.AddrFrom4([4]byte{10, 0, 2, byte(1 + i%4)}),
		Dst:   netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}),
		Proto: TCPProto, SrcPort: uint16(30000 + i), DstPort: 443,
		Options: []byte{1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0}, // NOP NOP timestamp
	}
}

func ipv6(net, host int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("2001:db8:0:%x::%x", net, host))
}

// Generator makes the packets of one run of a Workload. Every header is written
// anew from its flow's template, as a network card would.
type Generator struct {
	streams []stream
	next    int // the stream whose packet is next: smallest time, then first listed
	own     bool
	place   Placement // of the packet made last
	handle  uint32
	frame   [128]byte
}

type stream struct {
	at, interval   engine.Time
	size, truesize uint32
	acks           bool
	flow           int
	round          uint32 // packets that the current flow has sent before
	flows          []template
}

type template struct {
	n     int
	place Placement
	hdr   [96]byte
}

// Generator returns a new generator at the workload's beginning.
func (w Workload) Generator() *Generator {
	g := &Generator{streams: make([]stream, len(w.streams)), own: w.OwnPlacement}
	for i, spec := range w.streams {
		s := stream{
			at: Start + spec.offset, interval: spec.interval,
			size: spec.size, truesize: truesize(spec.size), acks: spec.acks,
			flows: make([]template, len(spec.flows)),
		}
		for j, f := range spec.flows {
			b := f.AppendFrame(s.flows[j].hdr[:0], int(spec.size))
			s.flows[j].n, s.flows[j].place = len(b), kernelPlacement(b)
		}
		g.streams[i] = s
	}
	g.choose()
	return g
}

// truesize is the memory that a packet of this length holds in the kernel.
func truesize(length uint32) uint32 {
	if length <= 256 {
		return 768
	}
	return 2304
}

// At returns when the next packet arrives.
func (g *Generator) At() engine.Time { return g.streams[g.next].at }

// Next makes the next packet. It sets Handle, Len, Truesize and NetOff of p,
// leaves to Dissect what Dissect fills in, and returns the frame's header bytes
// from the Ethernet header on. They are good until the next call.
func (g *Generator) Next(p *engine.Packet) []byte {
	s := &g.streams[g.next]
	t := &s.flows[s.flow]
	frame := g.frame[:t.n]
	copy(frame, t.hdr[:t.n])
	if s.acks {
		const tcp = EthernetHeader + 20
		binary.BigEndian.PutUint32(frame[tcp+8:], 1000+2896*(s.round+1))
		binary.BigEndian.PutUint32(frame[tcp+24:], s.round)
		binary.BigEndian.PutUint32(frame[tcp+28:], s.round)
	}
	if s.flow++; s.flow == len(s.flows) {
		s.flow = 0
		s.round++
	}
	s.at += s.interval
	g.choose()
	g.place = t.place
	p.Handle = g.handle
	p.Len, p.Truesize, p.NetOff = s.size, s.truesize, EthernetHeader
	g.handle++
	return frame
}

// Place is for the packet that Next made last, once it has been dissected; see
// Workload.OwnPlacement.
func (g *Generator) Place(p *engine.Packet) {
	if !g.own {
		g.place.apply(p)
	}
}

func (g *Generator) choose() {
	next := 0
	for i := 1; i < len(g.streams); i++ {
		if g.streams[i].at < g.streams[next].at {
			next = i
		}
	}
	g.next = next
}
