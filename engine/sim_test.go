package engine_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// The size and the seed of the random runs can be set from outside:
//
//	ENGINE_STEPS=10000000 ENGINE_SEED=42 go test ./engine -run TestRandom
const (
	stepsVariable = "ENGINE_STEPS"
	seedVariable  = "ENGINE_SEED"
	defaultSteps  = 100_000
)

func newRand(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv(seedVariable); v != "" {
		var err error
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedVariable, err)
		}
	}
	t.Logf("%s=%d", seedVariable, seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func steps(t *testing.T) int {
	t.Helper()
	v := os.Getenv(stepsVariable)
	switch {
	case v == "" && testing.Short():
		return defaultSteps / 5
	case v == "":
		return defaultSteps
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s: %v", stepsVariable, err)
	}
	return n
}

// TestRandomOperations does anything that a caller may do, in any order, and
// keeps its own books: what went in comes out once, delivered or dropped, and
// all the scheduler's sums agree with the books and with each other.
func TestRandomOperations(t *testing.T) {
	r := newRand(t)
	b := newBooks(t, r)
	for step := range steps(t) {
		b.step(step)
		if b.t.Failed() {
			t.Fatalf("after step %d, with %q", step, b.s.Config().Keywords())
		}
	}
	b.drain()
	t.Logf("%d packets in, %d delivered, %d dropped, %d reconfigurations", b.in, b.delivered, b.dropped, b.reconfigured)
	if b.delivered == 0 || b.dropped == 0 || b.reconfigured == 0 {
		t.Error("the run did not meet everything it is meant to meet")
	}
}

// books is what a careful caller knows of a Scheduler.
type books struct {
	t   *testing.T
	r   *rand.Rand
	s   *engine.Scheduler
	now engine.Time

	queued  map[piece]inside
	backlog uint64
	handle  uint32
	largest uint32 // truesize of the largest packet so far

	in, delivered, dropped, reconfigured int
	st                                   engine.Stats
}

// inside is what there is to know of a queued packet.
type inside struct {
	bytes    uint32
	segments int // of an unsplit super-packet; else 1
}

// piece is a packet, or one segment of a super-packet.
type piece struct {
	handle uint32
	seg    uint16
}

func newBooks(t *testing.T, r *rand.Rand) *books {
	t.Helper()
	b := &books{t: t, r: r, queued: map[piece]inside{}, now: engine.Time(r.Int64N(1 << 50))}
	c := engine.DefaultConfig()
	c.Rate, c.Tins = 10_000_000, engine.Diffserv4
	var err error
	if b.s, err = engine.New(b.now, c, engine.Options{Seed: r.Uint64()}); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *books) step(step int) {
	switch n := b.r.IntN(1000); {
	case n < 3:
		b.reconfigure()
	case n == 3:
		b.s.Reset(b.now)
		b.takeDrops()
		if b.s.Len() != 0 || len(b.queued) != 0 {
			b.t.Errorf("reset leaves %d packets, %d by the books", b.s.Len(), len(b.queued))
		}
	case n < 100:
		b.now = b.now.Add(b.pause())
	case n < 550:
		b.enqueue()
	case n < 600 && b.s.NextSend() != engine.Never:
		b.now = max(b.now, b.s.NextSend())
		b.dequeue()
	default:
		b.dequeue()
	}
	if b.s.Len() != len(b.queued) || b.s.Backlog() != b.backlog {
		b.t.Errorf("%d packets, %d bytes queued; %d and %d by the books", b.s.Len(), b.s.Backlog(), len(b.queued), b.backlog)
	}
	if step%64 == 0 {
		b.checkSums()
	}
}

// pause is mostly the time of a few packets and sometimes minutes.
func (b *books) pause() time.Duration {
	return time.Duration(b.r.Uint64N(1 << (10 + b.r.UintN(28))))
}

func (b *books) enqueue() {
	f, size := b.flow()
	p := engine.Packet{
		Handle: b.handle, Len: uint32(size), Truesize: uint32(size) + 256, NetOff: enginetest.EthernetHeader,
		Mark: b.r.Uint32N(4) * b.r.Uint32N(3), Priority: b.r.Uint32N(8),
	}
	b.handle++
	b.in++
	c := b.s.Config()
	frame := f.AppendFrame(nil, size)
	pieces, whole := []uint32{p.Len}, 1
	if f.Proto == enginetest.TCPProto && size > 1000 && b.r.IntN(8) == 0 {
		segs, gso := 2+b.r.IntN(43), 500+b.r.IntN(948)
		p.Segs, p.GSOSize, p.HeaderLen = uint16(segs), uint16(gso), 66
		last := 1 + b.r.IntN(gso)
		p.Len = uint32(segs*66 + (segs-1)*gso + last)
		p.Truesize = p.Len + 1024
		pieces, whole = []uint32{p.Len}, segs
		if c.SplitGSO {
			b.largest = max(b.largest, uint32(segs)*2304)
			pieces, whole = pieces[:0], 1
			for range segs - 1 {
				pieces = append(pieces, uint32(66+gso))
			}
			pieces = append(pieces, uint32(66+last))
		}
	}
	b.largest = max(b.largest, p.Truesize)
	for i, n := range pieces {
		b.queued[piece{p.Handle, uint16(i)}] = inside{n, whole}
		b.backlog += uint64(n)
	}
	b.s.DissectEthernet(frame, &p)
	b.s.Enqueue(b.now, &p)
	b.takeDrops()
}

// flow draws a flow from a few thousand; some hosts and ports are met often.
func (b *books) flow() (enginetest.Flow, int) {
	few := func(n uint32) uint32 { return b.r.Uint32N(1 + b.r.Uint32N(n)) }
	f := enginetest.Flow{
		Src: ipv4(hostA + few(64)), Dst: ipv4(server + few(64)), Proto: enginetest.TCPProto,
		SrcPort: uint16(1024 + few(256)), DstPort: 443, TOS: uint8(b.r.Uint32N(256)),
	}
	if b.r.IntN(4) == 0 {
		f.Src = netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", few(64)))
		f.Dst = netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%x", few(64)))
	}
	switch b.r.IntN(4) {
	case 0:
		return f, 74 + b.r.IntN(20) // with a little payload, or an IPv6 ACK
	case 1:
		return f, 54 // an ACK
	case 2:
		f.Proto = enginetest.UDPProto
	}
	return f, 100 + b.r.IntN(1415)
}

func (b *books) dequeue() {
	next := b.s.NextSend()
	d, ok := b.s.Dequeue(b.now)
	if ok {
		if next > b.now {
			b.t.Errorf("delivered at %d, though NextSend said %d", b.now, next)
		}
		b.delivered += b.leave(piece{d.Handle, d.Seg}, "delivered")
	}
	b.takeDrops()
}

func (b *books) takeDrops() {
	for _, d := range b.s.Drops() {
		b.dropped++
		b.leave(piece{d.Handle, d.Seg}, "dropped")
	}
}

// leave takes a packet off the books and returns how many segments it has.
func (b *books) leave(p piece, how string) int {
	in, ok := b.queued[p]
	if !ok {
		b.t.Errorf("packet %d segment %d %s, which is not inside", p.handle, p.seg, how)
	}
	delete(b.queued, p)
	b.backlog -= uint64(in.bytes)
	return in.segments
}

// reconfigure changes anything. Packets may be lost only where tins go.
func (b *books) reconfigure() {
	before, old := b.s.Len(), b.s.Config()
	c := b.config(old)
	if err := b.s.Reconfigure(b.now, c); err != nil {
		b.t.Errorf("reconfigure to %+v: %v", c, err)
		return
	}
	b.reconfigured++
	drops := len(b.s.Drops())
	b.takeDrops()
	if drops != 0 && tins(c.Tins) >= tins(old.Tins) {
		b.t.Errorf("%d of %d packets dropped by a change from mode %d to %d", drops, before, old.Tins, c.Tins)
	}
	if got := b.s.Len() + drops; got != before {
		b.t.Errorf("%d packets before a change, %d after", before, got)
	}
}

func tins(m engine.TinMode) int {
	switch m {
	case engine.BestEffort:
		return 1
	case engine.Diffserv3:
		return 3
	case engine.Diffserv4, engine.Cake3:
		return 4
	default:
		return 8
	}
}

func (b *books) config(c engine.Config) engine.Config {
	r := b.r
	switch r.IntN(8) {
	case 0:
		c.Rate = 0
	case 1, 2, 3:
		c.Rate = 8 + engine.BitsPerSecond(r.Uint64N(1<<(8+r.UintN(26))))
	case 4:
		c.Tins = engine.TinMode(r.IntN(6))
	case 5:
		c.Flows = engine.FlowMode(r.IntN(8))
	case 6:
		c.Overhead, c.MPU = int16(r.IntN(321)-64), uint16(r.IntN(257))
		c.Framing, c.Raw = engine.Framing(r.IntN(3)), r.IntN(2) == 0
	case 7:
		c.AckFilter = engine.AckFilter(r.IntN(3))
		c.Ingress, c.Wash, c.SplitGSO = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(2) == 0
		c.Autorate = c.Ingress && r.IntN(4) == 0
		c.MemoryLimit = r.Uint32N(1 << 22)
		c.Fwmark = r.Uint32N(4)
		c.RTT = time.Duration(1+r.IntN(1<<20)) * time.Microsecond
		c.Target = max(c.RTT/20, time.Microsecond).Truncate(time.Microsecond)
	}
	return c
}

func (b *books) checkSums() {
	b.t.Helper()
	if err := engine.CheckInvariants(b.s); err != nil {
		b.t.Error(err)
	}
	st := &b.st
	b.s.Stats(b.now, st)
	var bytes, packets uint64
	for i := range st.Tins[:st.NumTins] {
		bytes += st.Tins[i].BacklogBytes
		packets += uint64(st.Tins[i].BacklogPackets)
	}
	if st.Backlog != b.backlog || bytes != b.backlog {
		b.t.Errorf("backlog %d, of the tins %d, by the books %d", st.Backlog, bytes, b.backlog)
	}
	if int(st.Qlen) != len(b.queued) || packets != uint64(len(b.queued)) {
		b.t.Errorf("queue length %d, of the tins %d, by the books %d", st.Qlen, packets, len(b.queued))
	}
	if int(st.SentPackets) != b.delivered {
		b.t.Errorf("%d sent, %d by the books", st.SentPackets, b.delivered)
	}
}

func (b *books) drain() {
	for b.s.Len() > 0 && !b.t.Failed() {
		next := b.s.NextSend()
		if next == engine.Never {
			b.t.Fatalf("%d packets queued and nothing to be sent ever", b.s.Len())
		}
		b.now = max(b.now, next)
		b.dequeue()
	}
	b.checkSums()
	if b.backlog != 0 || len(b.queued) != 0 {
		b.t.Errorf("%d packets and %d bytes never came out", len(b.queued), b.backlog)
	}
}

// TestRandomShaping backlogs the scheduler for a while at random rates, framings
// and packet sizes, dequeues when NextSend says so, and compares what has left
// with the rate: never ahead by more than one packet, never below 99.9 %.
func TestRandomShaping(t *testing.T) {
	r := newRand(t)
	for range max(10, steps(t)/5000) {
		c := engine.DefaultConfig()
		c.Rate = engine.BitsPerSecond(64_000 + r.Uint64N(1<<(12+r.UintN(20))))
		c.Tins = engine.TinMode(r.IntN(6))
		c.Raw, c.Framing = r.IntN(2) == 0, engine.Framing(r.IntN(3))
		c.Overhead, c.MPU = int16(r.IntN(60)), uint16(r.IntN(100))
		c.MemoryLimit = 256 << 20
		checkPace(t, r, c)
		if t.Failed() {
			t.Fatalf("with %q", c.Keywords())
		}
	}
}

func checkPace(t *testing.T, r *rand.Rand, c engine.Config) {
	t.Helper()
	start := engine.Time(r.Int64N(1 << 45))
	s, err := engine.New(start, c, engine.Options{Seed: r.Uint64()})
	if err != nil {
		t.Fatal(err)
	}
	const packets = 2000
	for i := range packets {
		f := tcpFlow(hostA, server, i%20)
		f.TOS = uint8(i % 20 * 13)
		offer(s, start, f, 60+r.IntN(1455))
	}
	nsPerByte := 8e9 / float64(c.Rate)
	var sent, largest float64 // adjusted bytes
	now := start
	for s.Len() > 0 {
		now = max(now, s.NextSend())
		d, ok := s.Dequeue(now)
		if !ok {
			continue
		}
		elapsed := float64(now - start)
		if ahead := sent*nsPerByte - elapsed; ahead > largest*nsPerByte+1000 {
			t.Errorf("%.0f ns ahead of the clock before a packet, more than one packet's %.0f", ahead, largest*nsPerByte)
			return
		}
		n := adjusted(c, d.Len)
		sent += n
		largest = max(largest, n)
		if due := elapsed / nsPerByte; sent < 0.999*due-largest {
			t.Errorf("%.0f bytes sent, %.0f due", sent, due)
			return
		}
	}
}

// adjusted is the length of a frame on the wire, by the book.
func adjusted(c engine.Config, frame uint32) float64 {
	n := float64(frame)
	if !c.Raw {
		n -= enginetest.EthernetHeader
	}
	n = max(n+float64(c.Overhead), float64(c.MPU))
	switch c.Framing {
	case engine.ATM:
		n = math.Ceil(n/48) * 53
	case engine.PTM:
		n += math.Ceil(n / 64)
	default: // engine.NoATM: as it is
	}
	return n
}

// TestRandomMemory fills queues with packets of all sizes, split or not: the
// memory in use may pass the limit by the packet that has just come and no more.
func TestRandomMemory(t *testing.T) {
	r := newRand(t)
	for range max(5, steps(t)/20_000) {
		c := engine.DefaultConfig()
		c.Rate, c.MemoryLimit = 1_000_000, 100_000+r.Uint32N(1<<21)
		c.SplitGSO = r.IntN(2) == 0
		b := newBooks(t, r)
		if err := b.s.Reconfigure(b.now, c); err != nil {
			t.Fatal(err)
		}
		for range 5000 {
			b.enqueue()
			if r.IntN(4) == 0 {
				b.dequeue()
			}
		}
		b.checkSums()
		if limit := b.st.MemoryLimit; b.st.MemoryUsed > limit+uint64(b.largest) {
			t.Errorf("%d bytes of memory used at a limit of %d", b.st.MemoryUsed, limit)
		}
		if b.dropped == 0 {
			t.Error("the limit was never met")
		}
	}
}

// TestNoStarvation keeps hundreds of flows of all sorts backlogged, some of them
// flooding, and wants every one to be served in every second, in the measure of
// its tin and host.
func TestNoStarvation(t *testing.T) {
	for _, mode := range []engine.FlowMode{engine.Flows, engine.DualSrcHost, engine.DualDstHost, engine.TripleIsolate} {
		c := engine.DefaultConfig()
		c.Rate, c.Flows, c.Tins = 100_000_000, mode, engine.Diffserv4
		sim := &enginetest.Sim{Scheduler: newScheduler(t, c, 1)}
		const flows = 120
		for i := range flows {
			f := tcpFlow(hostA+uint32(i%7), server+uint32(i%11), i)
			f.TOS = []uint8{0, 8 << 2, 34 << 2, 46 << 2}[i%4] | uint8(i/4%2)*2
			rate := engine.BitsPerSecond(2_000_000)
			if i < 8 {
				rate = 40_000_000
			}
			sim.Add(f, time.Millisecond, &enginetest.CBR{Rate: rate, Size: 200 + i*10})
		}
		seconds := 3
		if testing.Short() {
			seconds = 1
		}
		for second := range seconds {
			sim.ResetTotals()
			sim.Run(at(time.Duration(second+1) * time.Second))
			for i := range flows {
				// A bulk-tin flow's share is 6.25 Mbit/s among 30 flows.
				if got := sim.Totals(i).DeliveredBytes * 8; got < 50_000 {
					t.Errorf("mode %d: flow %d got %d bits in second %d", mode, i, got, second)
				}
			}
		}
	}
}

// TestBadInput offers what no network should send and what no caller should ask.
func TestBadInput(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*engine.Config)
	}{
		{"tin mode", func(c *engine.Config) { c.Tins = 6 }},
		{"flow mode", func(c *engine.Config) { c.Flows = 8 }},
		{"ack filter", func(c *engine.Config) { c.AckFilter = 3 }},
		{"framing", func(c *engine.Config) { c.Framing = 3 }},
		{"overhead too small", func(c *engine.Config) { c.Overhead = -65 }},
		{"overhead too large", func(c *engine.Config) { c.Overhead = 257 }},
		{"mpu too large", func(c *engine.Config) { c.MPU = 257 }},
		{"no rtt", func(c *engine.Config) { c.RTT = 0 }},
		{"negative target", func(c *engine.Config) { c.Target = -time.Second }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := engine.DefaultConfig()
			tt.change(&c)
			if _, err := engine.New(0, c, engine.Options{}); err == nil {
				t.Error("New accepts it")
			}
			s := newScheduler(t, engine.DefaultConfig(), 1)
			if err := s.Reconfigure(0, c); err == nil {
				t.Error("Reconfigure accepts it")
			}
			if got := s.Config(); got != engine.DefaultConfig() {
				t.Errorf("a refused change left %+v", got)
			}
		})
	}
	s := newScheduler(t, engine.DefaultConfig(), 1)
	for i, frame := range [][]byte{nil, {}, {0x45}, make([]byte, 14), make([]byte, 20)} {
		p := engine.Packet{Handle: uint32(i), Len: uint32(len(frame)), Truesize: 256}
		s.DissectEthernet(frame, &p)
		s.Enqueue(0, &p)
		p = engine.Packet{Handle: uint32(100 + i), Len: uint32(len(frame)), Truesize: 256}
		s.Dissect(frame, &p)
		s.Enqueue(0, &p)
	}
	huge := engine.Packet{Handle: 1000, Len: math.MaxUint32, Truesize: math.MaxUint32}
	s.Enqueue(0, &huge)
	liar := engine.Packet{Handle: 1001, Len: 100, Truesize: 100, Segs: 65535, GSOSize: 65535, HeaderLen: 65535}
	s.Enqueue(0, &liar)
	if err := engine.CheckInvariants(s); err != nil {
		t.Error(err)
	}
	for range 200_000 {
		if s.Len() == 0 {
			break
		}
		s.Dequeue(max(0, s.NextSend()))
	}
	if s.Len() != 0 || s.Backlog() != 0 {
		t.Errorf("%d packets, %d bytes stay inside", s.Len(), s.Backlog())
	}
	if _, ok := s.Dequeue(0); ok || s.NextSend() != engine.Never {
		t.Error("an empty scheduler has something to send")
	}
}
