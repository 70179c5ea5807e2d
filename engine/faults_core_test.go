package engine

// Faults that were reported of sch_cake, as the smallest check that the core of
// the engine does not have them. The numbers are those of the project's list of
// public reports; the report is named beside each.

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"
	"unsafe"
)

// dtaht/sch_cake#28: redirected packets were charged twice.
// gnuton/asuswrt-merlin.ng#146: half of the rate was delivered.
func TestFault001_ChargedOnce(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate, c.Raw, c.Overhead, c.Ingress = BestEffort, 100e6, false, 38, true
	s := newTest(t, c, Options{})
	for range 1000 {
		s.Enqueue(0, flowPacket(1))
	}
	n := 0
	for s.Len() > 0 && len(s.Drops()) == 0 {
		if _, ok := s.Dequeue(s.NextSend()); ok {
			n++
		}
		if n == 50 { // before the AQM has a say
			break
		}
	}
	if want := Time(50) * Time(s.rate.duration(1538)); s.timeNext != want {
		t.Errorf("50 packets of 1538 bytes on the wire took %d ns of the link, want %d", s.timeNext, want)
	}
}

func TestFault002_WholeRateDelivered(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate = BestEffort, 100e6
	s := newTest(t, c, Options{})
	const span = Time(1e9)
	var bits, arrive float64
	now := Time(0)
	for now < span {
		for next := s.NextSend(); next <= now; next = s.NextSend() {
			d, ok := s.Dequeue(now)
			if ok {
				bits += float64(d.Len) * 8
			}
		}
		s.Enqueue(now, flowPacket(1+uint32(arrive)%16))
		arrive++
		now += 100_000 // 121 Mbit/s
	}
	if bits < 0.99e8 || bits > 1.001e8 {
		t.Errorf("%.0f bits in a second, want 100 million", bits)
	}
}

// dtaht/sch_cake commit 42e87f1: segments of tunnelled super-packets were lost.
func TestFault008_TunnelledSuperPacket(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate, c.Raw, c.Ingress = BestEffort, 100e6, false, true
	s := newTest(t, c, Options{})
	inner := segment{v6: true, ack: 1, payload: 10 * 1400}.header()
	outer := make([]byte, 20)
	outer[0], outer[9] = 0x45, 41
	binary.BigEndian.PutUint16(outer[2:], uint16(20+len(inner)+10*1400))
	h := append(outer, inner...)
	p := Packet{
		Handle: 9, Len: uint32(10 * (14 + len(h) + 1400)), Truesize: 20000, NetOff: 14,
		Segs: 10, GSOSize: 1400, HeaderLen: uint16(14 + len(h)),
	}
	s.Dissect(h, &p)
	s.Enqueue(0, &p)
	for seg := range uint16(10) {
		d, ok := s.Dequeue(s.NextSend())
		if !ok || d.Handle != 9 || d.Seg != seg || d.Len != uint32(14+len(h)+1400) {
			t.Fatalf("segment %d: %v %+v", seg, ok, d)
		}
	}
	var st Stats
	s.Stats(0, &st)
	if want := uint16(len(h) + 1400); st.MaxNetLen != want || st.MinNetLen != want {
		t.Errorf("network layer %d to %d bytes, want %d", st.MinNetLen, st.MaxNetLen, want)
	}
}

// dtaht/sch_cake commit 8a8946b: the window of autorate was cut to 32 bits and
// could be 0 in a division.
func TestFault013_AutorateWindow(t *testing.T) {
	for _, rate := range []BitsPerSecond{8, 63 * 8, 64 * 8, 20e6} {
		c := DefaultConfig()
		c.Tins, c.Rate, c.Autorate, c.Ingress = BestEffort, rate, true, true
		s := newTest(t, c, Options{})
		now := Time(0)
		for _, gap := range []Time{0, 0, 1, 1e6, 0, 1 << 32, 0, 0, 1 << 32, 1<<32 + 1, 2e9, 0, 1} {
			now += gap
			s.Enqueue(now, flowPacket(1))
			s.Dequeue(now)
		}
	}
}

func TestFault014_UnlimitedPassesAll(t *testing.T) {
	s := newTest(t, DefaultConfig(), Options{})
	b := &s.tins[0]
	if s.rate.ns != 0 || b.flowQuantum != 1514 {
		t.Errorf("duration of a byte %d, quantum %d; want 0 and 1514", s.rate.ns, b.flowQuantum)
	}
	for i := range Time(1000) {
		s.Enqueue(i, flowPacket(uint32(i)))
		if _, ok := s.Dequeue(i); !ok {
			t.Fatalf("packet %d does not pass", i)
		}
	}
}

// dtaht/sch_cake#100: one instance needed a block of 1 MiB.
func TestFault025_SmallMemory(t *testing.T) {
	if n := unsafe.Sizeof(flow{}); n != 40 {
		t.Errorf("a flow takes %d bytes, want 40", n)
	}
	if n := unsafe.Sizeof(queued{}); n != 32 && unsafe.Sizeof(uintptr(0)) == 4 {
		t.Errorf("a packet takes %d bytes, want one cache line", n)
	}
	const kernel = 722632
	for mode, most := range map[TinMode]int{Diffserv4: kernel / 3, Diffserv8: kernel * 5 / 8} {
		c := DefaultConfig()
		c.Tins, c.Rate, c.MemoryLimit = mode, 100e6, 1<<20
		s := newTest(t, c, Options{})
		size := func() int {
			n := int(unsafe.Sizeof(*s)) + len(s.flows)*int(unsafe.Sizeof(flow{})) + cap(s.pkts)*int(unsafe.Sizeof(queued{})) +
				2*len(s.heap) + 2*len(s.heapPos) + cap(s.signals)*int(unsafe.Sizeof(signals{}))
			for i := range s.tins {
				if s.tins[i].hosts != nil {
					n += int(unsafe.Sizeof(*s.tins[i].hosts))
				}
			}
			return n
		}
		if n := size(); n > most {
			t.Errorf("tin mode %d: a scheduler takes %d bytes, want at most %d; sch_cake %d", mode, n, most, kernel)
		}
		// All tins overloaded; the packets themselves do not count.
		for i := range uint32(20_000) {
			p := flowPacket(1 + i%100)
			p.TOS = uint8(i * 4)
			s.Enqueue(Time(i)*1e5, p)
			if i%2 == 0 {
				s.Dequeue(Time(i) * 1e5)
			}
		}
		if n := size() - cap(s.pkts)*int(unsafe.Sizeof(queued{})); n > kernel*3/4 || s.heap == nil {
			t.Errorf("tin mode %d: a busy scheduler takes %d bytes, want at most three quarters of sch_cake's %d", mode, n, kernel)
		}
	}
}

// ttgapers/cakeqos-merlin#62: memory used is above the limit.
func TestFault026_MemoryLimit(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate, c.MemoryLimit = BestEffort, 1e6, 100_000
	s := newTest(t, c, Options{})
	for i := range uint32(10_000) {
		s.Enqueue(0, flowPacket(i%50))
		if s.memUsed > s.memLimit {
			t.Fatalf("%d bytes used, limit %d", s.memUsed, s.memLimit)
		}
	}
	var st Stats
	s.Stats(0, &st)
	if st.MemoryUsed > st.MemoryLimit+2304 || st.MemoryUsed <= st.MemoryLimit {
		t.Errorf("high water %d, want up to a packet over %d", st.MemoryUsed, st.MemoryLimit)
	}
}

// Linux dc48c97e7c69: the memory in use wrapped at 32 bits.
func TestFault028_MemoryDoesNotWrap(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate, c.MemoryLimit = BestEffort, 1e6, 1<<32-1
	s := newTest(t, c, Options{})
	p := flowPacket(1)
	p.Truesize = 1 << 30
	for range 4 {
		s.Enqueue(0, p)
		p.FlowHash++
	}
	if got := len(s.Drops()); got != 1 {
		t.Errorf("4 GiB queued: %d drops, want 1", got)
	}
	if s.memUsed != 3<<30 || s.memMax != 4<<30 {
		t.Errorf("memory used %d, most %d", s.memUsed, s.memMax)
	}
}

// Linux d7010be1ba23: the parents' backlog was wrong after tins were cleared.
func TestFault030_BacklogAfterClearing(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate = Diffserv8, 1e6
	s := newTest(t, c, Options{})
	for i := range uint32(64) {
		p := flowPacket(i)
		p.TOS = uint8(i) << 2
		s.Enqueue(0, p)
	}
	before := s.Backlog()
	c.Tins = BestEffort
	if err := s.Reconfigure(0, c); err != nil {
		t.Fatal(err)
	}
	var cleared, queues uint64
	for _, d := range s.Drops() {
		cleared += uint64(d.Len)
	}
	for i := range s.flows {
		queues += uint64(s.flows[i].backlog)
	}
	if s.Backlog() != queues || before != queues+cleared || cleared == 0 {
		t.Errorf("backlog %d before, %d after, %d in queues, %d cleared", before, s.Backlog(), queues, cleared)
	}
}

// dtaht/sch_cake commit 331ac70: the queue length was wrong after a split.
// Linux 90fabae8a2c2: a split packet was reported as stolen.
func TestFault031_SplitCounts(t *testing.T) {
	c := DefaultConfig()
	c.Rate = 1e6
	s := newTest(t, c, Options{})
	p := flowPacket(1)
	p.Segs, p.GSOSize, p.HeaderLen = 10, 1448, 66
	p.Len = 10*66 + 9*1448 + 100
	s.Enqueue(0, p)
	if s.Len() != 10 || s.Backlog() != uint64(p.Len) {
		t.Errorf("%d packets, %d bytes; want 10 and %d", s.Len(), s.Backlog(), p.Len)
	}
}

func TestFault032_SplitIsSuccess(t *testing.T) {
	s := newTest(t, DefaultConfig(), Options{})
	p := flowPacket(1)
	p.Segs, p.GSOSize, p.HeaderLen, p.Len = 2, 1448, 66, 2*1514
	if e := s.Enqueue(0, p); e.Congested || len(s.Drops()) != 0 {
		t.Errorf("split: %+v, drops %v", e, s.Drops())
	}
}

// dtaht/sch_cake#14: single queues could not be looked at.
func TestFault036_FlowsByIndex(t *testing.T) {
	c := DefaultConfig()
	c.Rate = 1e6
	s := newTest(t, c, Options{})
	e := s.Enqueue(0, flowPacket(77))
	s.Enqueue(0, flowPacket(77))
	var f FlowStats
	if !s.FlowStats(int(e.Tin), int(e.Flow), &f) {
		t.Fatal("no such flow")
	}
	if f.Qlen != 2 || f.Backlog != 2*1514 || f.State != FlowSparse || f.Tag != 77 || f.SrcHash != 77 || f.DstHash != 77 {
		t.Errorf("%+v", f)
	}
	for _, bad := range [][2]int{{-1, 0}, {0, -1}, {MaxTins, 0}, {0, FlowsPerTin}, {7, 0}} {
		if s.FlowStats(bad[0], bad[1], &f) {
			t.Errorf("tin %d flow %d exists", bad[0], bad[1])
		}
	}
}

// LibreQoS commit 4a013e98: counters were narrowed on their way.
func TestFault041_WideCounters(t *testing.T) {
	s := newTest(t, DefaultConfig(), Options{})
	const before = 1<<40 - 1514
	s.tins[0].bytes, s.tins[0].packets = before, 1<<33 // as after a year
	s.Enqueue(0, flowPacket(1))
	if _, ok := s.Dequeue(0); !ok {
		t.Fatal("not delivered")
	}
	var st Stats
	s.Stats(0, &st)
	if st.SentBytes != 1<<40 || st.Tins[1].Bytes != 1<<40 || st.SentPackets != 1<<33+1 {
		t.Errorf("sent %d bytes, %d packets, tin %d; want 2^40, 2^33+1, 2^40", st.SentBytes, st.SentPackets, st.Tins[1].Bytes)
	}
}

// Linux 301f935be9e0: the order of tins in reports was ignored.
func TestFault044_DisplayOrder(t *testing.T) {
	c := DefaultConfig()
	c.Tins = Diffserv4
	s := newTest(t, c, Options{})
	p := flowPacket(1)
	p.TOS = 46 << 2
	s.Enqueue(0, p)
	var st Stats
	s.Stats(0, &st)
	for i, want := range []uint64{0, 0, 0, 1} {
		if st.Tins[i].Packets != want {
			t.Errorf("column %d: %d packets, want %d", i+1, st.Tins[i].Packets, want)
		}
	}
}

// tohojo/sqm-scripts#5: DSCPs were washed before they had chosen the tin.
func TestFault050_WashAfterChoice(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Wash = Diffserv4, true
	s := newTest(t, c, Options{})
	p := flowPacket(1)
	p.TOS = 46<<2 | 1
	if e := s.Enqueue(0, p); e.Tin != 3 {
		t.Errorf("EF is in tin %d, want Voice", e.Tin)
	}
	if d, ok := s.Dequeue(0); !ok || d.TOS != 1 || !d.Changed || d.CE {
		t.Errorf("%v: leaves with TOS %#x, changed %v; want 1, true", ok, d.TOS, d.Changed)
	}
	p.Writable = false
	if e := s.Enqueue(0, p); e.Tin != 0 {
		t.Errorf("EF that cannot be washed is in tin %d, want Best Effort", e.Tin)
	}
	if d, ok := s.Dequeue(0); !ok || d.TOS != p.TOS || d.Changed {
		t.Errorf("%v: leaves with TOS %#x, changed %v; want as it came", ok, d.TOS, d.Changed)
	}
}

// cake-autorate#194: upstream bleaches ECN. Only what is ECT is marked, the
// rest dropped, and the counters tell.
func TestFault076_MarkOnlyECT(t *testing.T) {
	for _, ecn := range []uint8{0, 1, 2, 3} {
		c := DefaultConfig()
		c.Tins, c.Rate = BestEffort, 10e6
		s := newTest(t, c, Options{Seed: 1})
		p := flowPacket(1)
		p.TOS = ecn
		now := Time(0)
		var marks, drops int
		for now < Time(2*time.Second) {
			for range 2 {
				s.Enqueue(now, p)
			}
			for s.NextSend() <= now {
				d, _ := s.Dequeue(now)
				if d.CE {
					marks++
					if d.TOS != 3 || d.Changed != (ecn != 3) {
						t.Fatalf("ECN %d: marked %+v", ecn, d)
					}
				}
				for _, x := range s.Drops() {
					if x.Reason == DropAQM {
						drops++
					}
				}
			}
			now += 2_400_000
		}
		var st Stats
		s.Stats(now, &st)
		if got := st.Tins[0].Marks; got != uint64(marks) || st.Tins[0].MarkBytes != uint64(marks)*1514 {
			t.Errorf("ECN %d: %d marks and %d bytes counted, want %d", ecn, got, st.Tins[0].MarkBytes, marks)
		}
		if got := st.Tins[0].Drops; got != uint64(drops) || st.Tins[0].DropBytes != uint64(drops)*1514 {
			t.Errorf("ECN %d: %d drops and %d bytes counted, want %d", ecn, got, st.Tins[0].DropBytes, drops)
		}
		if (marks > 0) != (ecn != 0) || (drops > 0) != (ecn == 0) {
			t.Errorf("ECN %d: %d marks, %d drops", ecn, marks, drops)
		}
	}
}

// TestFault125_ManyInstances wants a hundred schedulers, as a machine with many
// lines has, to take a hundred times what one does, idle and after load, within
// the size of sch_cake's.
func TestFault125_ManyInstances(t *testing.T) {
	const instances, kernel = 100, 722632
	inUse := func() int {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	c := DefaultConfig()
	c.Rate, c.MemoryLimit = 10e6, 1<<20
	before := inUse()
	var all []*Scheduler
	for i := range instances {
		s, err := New(0, c, Options{Seed: uint64(i)})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	fresh := (inUse() - before) / instances
	for _, s := range all {
		for i := range uint32(100) {
			s.Enqueue(Time(i)*1e6, flowPacket(1+i%10))
		}
		for now := Time(0); ; {
			if now = s.NextSend(); now == Never {
				break
			}
			s.Dequeue(now)
		}
	}
	used := (inUse() - before) / instances
	t.Logf("%d bytes each, %d after load", fresh, used)
	if most := kernel / 2; fresh > most || used > most {
		t.Errorf("%d bytes each, %d after load, want at most %d", fresh, used, most)
	}
	runtime.KeepAlive(all)
}
