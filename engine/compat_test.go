package engine

import (
	"math/rand/v2"
	"testing"
	"time"
)

func newTest(t *testing.T, c Config, o Options) *Scheduler {
	t.Helper()
	s, err := New(0, c, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// flowPacket is a full-size packet of the flow with this hash, from a host of its own.
func flowPacket(hash uint32) *Packet {
	return &Packet{
		Len: 1514, Truesize: 2304, NetOff: 14, Proto: 0x0800, HasTOS: true, Writable: true,
		FlowHash: hash, SrcHash: hash, DstHash: hash,
	}
}

// TestCompatHeap: the heap is one, whatever shrinks and grows, except with the
// kernel's short sift.
func TestCompatHeap(t *testing.T) {
	for _, compat := range []Compat{0, CompatHeap} {
		r := rand.New(rand.NewPCG(7, 8))
		c := DefaultConfig()
		s := newTest(t, c, Options{Compat: compat})
		for i := range s.flows {
			s.flows[i].backlog = r.Uint32N(1000)
		}
		s.heapBuild()
		broken := 0
		for range 5000 {
			for i := 1; i < len(s.heap); i++ {
				if s.flows[s.heap[i]].backlog > s.flows[s.heap[(i-1)/2]].backlog {
					broken++
					break
				}
			}
			for i, e := range s.heap {
				if int(s.heapPos[e]) != i {
					t.Fatalf("compat %x: entry %d thinks it is at %d", compat, i, s.heapPos[e])
				}
			}
			e := r.IntN(len(s.flows))
			f := &s.flows[e]
			was := f.backlog
			if f.backlog = r.Uint32N(1000); f.backlog > was {
				s.heapUp(s.heapPos[e])
			} else {
				s.heapDown(s.heapPos[e])
			}
			if broken > 0 {
				break
			}
		}
		if want := compat == CompatHeap; (broken > 0) != want {
			t.Errorf("compat %x: heap broken: %v, want %v", compat, broken > 0, want)
		}
	}
}

// TestOverflowTakesFattest: each packet over the limit costs the queue that is
// the longest in bytes its head.
func TestOverflowTakesFattest(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	c := DefaultConfig()
	c.Tins, c.Rate, c.MemoryLimit = Diffserv4, 1e6, 200_000
	s := newTest(t, c, Options{Seed: 1})
	dropped := 0
	for i := range 20_000 {
		p := flowPacket(1 + r.Uint32N(40))
		p.TOS = []uint8{0, 8 << 2, 34 << 2, 46 << 2}[r.IntN(4)]
		p.Len = 60 + r.Uint32N(1455)
		before := make([]uint32, len(s.flows))
		for i := range s.flows {
			before[i] = s.flows[i].backlog
		}
		e := s.Enqueue(Time(i)*1e5, p)
		before[uint32(e.Tin)<<10|uint32(e.Flow)] += p.Len
		for _, d := range s.Drops() {
			dropped++
			fattest := uint32(0)
			for _, b := range before {
				fattest = max(fattest, b)
			}
			found := false
			for i, b := range before {
				if b == fattest && s.flows[i].backlog == b-d.Len {
					before[i] -= d.Len
					found = true
					break
				}
			}
			if !found {
				t.Fatalf("packet %d: the drop of %d bytes is not from a queue of %d", i, d.Len, fattest)
			}
		}
		if s.memUsed > s.memLimit {
			t.Fatalf("%d bytes used, limit %d", s.memUsed, s.memLimit)
		}
		if r.IntN(4) == 0 {
			s.Dequeue(Time(i) * 1e5)
		}
	}
	if dropped < 1000 {
		t.Errorf("only %d drops", dropped)
	}
}

// TestCompatClear: tins that a change has cleared are empty in every respect;
// the kernel leaves their flows in the rotations.
func TestCompatClear(t *testing.T) {
	for _, compat := range []Compat{0, CompatClear} {
		c := DefaultConfig()
		c.Tins = Precedence
		s := newTest(t, c, Options{Seed: 1, Compat: compat})
		for i := range uint32(64) {
			p := flowPacket(i + 1)
			p.TOS = uint8(i%8) << 5
			s.Enqueue(Time(i), p)
		}
		be := c
		be.Tins = BestEffort
		if err := s.Reconfigure(100, be); err != nil {
			t.Fatal(err)
		}
		if got := len(s.Drops()); got != 56 {
			t.Errorf("compat %x: %d packets cleared, want 56", compat, got)
		}
		if got := s.Len(); got != 8 {
			t.Errorf("compat %x: %d packets left, want 8", compat, got)
		}
		if err := s.Reconfigure(200, c); err != nil {
			t.Fatal(err)
		}
		listed := int32(0)
		for i := 1; i < MaxTins; i++ {
			listed += s.tins[i].sparse + s.tins[i].bulk + s.tins[i].decaying
		}
		want, cur := int32(0), uint32(0)
		if compat == CompatClear {
			want, cur = 56, MaxTins-1
		}
		if listed != want || s.curTin != cur {
			t.Errorf("compat %x: %d flows in rotations of cleared tins, tin %d is next; want %d and %d",
				compat, listed, s.curTin, want, cur)
		}
		for n := 0; ; n++ {
			if _, ok := s.Dequeue(Time(1000 + n)); !ok {
				if n != 8 {
					t.Errorf("compat %x: %d packets delivered, want 8", compat, n)
				}
				break
			}
		}
	}
}

// TestCompatAutorate: one change in 250 ms, or one at the end of each window.
func TestCompatAutorate(t *testing.T) {
	for _, compat := range []Compat{0, CompatAutorate} {
		c := DefaultConfig()
		c.Tins, c.Rate, c.Autorate, c.Ingress = BestEffort, 20e6, true, true
		s := newTest(t, c, Options{Seed: 1, Compat: compat})
		changes := 0
		r := rand.New(rand.NewPCG(11, 12))
		now := Time(0)
		for now < 10e9 {
			now += Time(r.ExpFloat64() * 1e6)
			was := s.auto.windowBegin
			rate := s.bytesPerSec
			s.Enqueue(now, flowPacket(1+r.Uint32N(8)))
			if s.bytesPerSec != rate && s.auto.windowBegin != was {
				changes++
			}
			for s.NextSend() <= now {
				s.Dequeue(now)
			}
		}
		if compat == 0 && (changes < 30 || changes > 40) {
			t.Errorf("%d changes of the rate in 10 s, want up to 40", changes)
		}
		if compat != 0 && changes < 200 {
			t.Errorf("kernel: %d changes of the rate in 10 s, want one at each window's end", changes)
		}
	}
}

// TestCompatMemoryLimit: the product is not cut to 32 bits.
func TestCompatMemoryLimit(t *testing.T) {
	c := DefaultConfig()
	c.RTT = time.Second
	const bytesPerSec = (1<<32 + 5_000_000) / 4
	if got := memoryLimit(&c, bytesPerSec, 0); got != 15503360 {
		t.Errorf("limit %d, want that of 10240 packets", got)
	}
	if got := memoryLimit(&c, bytesPerSec, Compat32Bit); got != 5_000_000 {
		t.Errorf("kernel: limit %d, want 5000000", got)
	}
}

// TestCompatFirstSignal: a queue that goes over target is signalled one
// interval later, also when it is over target from its first packet on; in the
// kernel the next packet is, when it never was before.
func TestCompatFirstSignal(t *testing.T) {
	for _, first := range []Time{0, 60e6} {
		for _, compat := range []Compat{0, CompatFirstSignal} {
			wait := firstMark(t, first, compat)
			rtt := DefaultConfig().RTT
			if compat == 0 && (wait < rtt || wait > rtt+2*time.Millisecond) {
				t.Errorf("first packet at %d ns: first mark %v after the queue went over target, want %v", first, wait, rtt)
			}
			if compat != 0 && wait > 2*time.Millisecond {
				t.Errorf("kernel, first packet at %d ns: first mark %v after the queue went over target, want it at the next packet", first, wait)
			}
		}
	}
	for _, compat := range []Compat{0, CompatFirstSignal} {
		s := newTest(t, DefaultConfig(), Options{Compat: compat})
		f := &signals{count: 2}
		s.setInvSqrt(f)
		if want := map[Compat]uint32{0: 3037000500, CompatFirstSignal: 3035289760}[compat]; f.invSqrt != want {
			t.Errorf("compat %x: 1/sqrt(2) = %d, want %d", compat, f.invSqrt, want)
		}
	}
}

// firstMark fills a queue at 0, serves it from first on, and returns how long
// after its sojourn time passed the target COBALT first marks a packet.
func firstMark(t *testing.T, first Time, compat Compat) time.Duration {
	c := DefaultConfig()
	c.Tins, c.Rate = BestEffort, 10e6
	s := newTest(t, c, Options{Seed: 1, Compat: compat})
	for range 200 {
		p := flowPacket(1)
		p.TOS = 2
		s.Enqueue(0, p)
	}
	var over Time
	for {
		now := max(s.NextSend(), first)
		d, ok := s.Dequeue(now)
		if !ok {
			t.Fatal("no signal at all")
		}
		if over == 0 && d.Sojourn > c.Target {
			over = now
		}
		if d.CE {
			return now.Sub(over)
		}
	}
}

// TestCompatDeficit: what a tin sent while it was shaped is not held against
// it in the round robin of unlimited mode; and host counts follow the flow mode.
func TestCompatDeficit(t *testing.T) {
	for _, compat := range []Compat{0, CompatDeficit} {
		c := DefaultConfig()
		c.Tins, c.Rate = Diffserv4, 100e6
		s := newTest(t, c, Options{Seed: 1, Compat: compat})
		for i := range uint32(400) {
			s.Enqueue(0, flowPacket(1+i%4))
		}
		for range 200 {
			s.Dequeue(s.NextSend())
		}
		if s.tins[0].deficit >= 0 {
			t.Fatal("no deficit to carry")
		}
		if s.tins[0].bulk != 4 {
			t.Fatalf("%d bulk flows, want 4", s.tins[0].bulk)
		}
		c.Rate, c.Flows = 0, Flows
		if err := s.Reconfigure(s.NextSend(), c); err != nil {
			t.Fatal(err)
		}
		counted := 0
		for i := range s.tins[0].hosts {
			counted += int(s.tins[0].hosts[i].srcBulk + s.tins[0].hosts[i].dstBulk)
		}
		if carried := s.tins[0].deficit < 0; carried != (compat != 0) {
			t.Errorf("compat %x: deficit %d after the change to unlimited", compat, s.tins[0].deficit)
		}
		if left := counted != 0; left != (compat != 0) {
			t.Errorf("compat %x: %d flows counted with hosts in a mode without", compat, counted)
		}
	}
}
