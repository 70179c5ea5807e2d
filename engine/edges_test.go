package engine

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Faults at the edges of the engine: what the words and the bytes of a packet
// come to once a Scheduler acts on them.

func scheduler(t testing.TB, words string) *Scheduler {
	t.Helper()
	c, err := ParseKeywords(DefaultConfig(), words)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(0, c, Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// enqueueFrame enqueues an Ethernet frame at time 0.
func enqueueFrame(s *Scheduler, frame []byte, change func(p *Packet)) Enqueued {
	p := Packet{Len: uint32(len(frame)), Truesize: 768}
	s.DissectEthernet(frame, &p)
	if change != nil {
		change(&p)
	}
	return s.Enqueue(0, &p)
}

// displayed returns the index, in display order, of the only tin that has
// packets.
func displayed(t *testing.T, s *Scheduler) int {
	t.Helper()
	var st Stats
	s.Stats(0, &st)
	found := -1
	for i := range st.NumTins {
		if st.Tins[i].Packets != 0 {
			if found >= 0 {
				t.Fatalf("packets in tins %d and %d", found, i)
			}
			found = i
		}
	}
	return found
}

func frame4(tos byte, n int) []byte {
	return ether(ip4(a4, b4, ipUDP, tos, append(udp(1, 2), make([]byte, n-28)...)), etherIPv4)
}

// Fault 3: on Ethernet both the overhead of 38 and the minimum of 84 count.
func TestFault003_EthernetOverheadAndMPU(t *testing.T) {
	s := scheduler(t, "bandwidth 10mbit ethernet")
	enqueueFrame(s, frame4(0, 40), nil)
	enqueueFrame(s, frame4(0, 1500), nil)
	var st Stats
	s.Stats(0, &st)
	if st.MinNetLen != 40 || st.MaxNetLen != 1500 || st.MinAdjLen != 84 || st.MaxAdjLen != 1538 {
		t.Errorf("network %d to %d, adjusted %d to %d, want 40 to 1500 and 84 to 1538", st.MinNetLen, st.MaxNetLen, st.MinAdjLen, st.MaxAdjLen)
	}
}

// Fault 5: the offset of the network header is the device's, and overhead
// counts from layer 3 on each.
func TestFault005_NetworkHeaderOffset(t *testing.T) {
	for _, c := range []struct {
		name string
		off  uint16
	}{{"Ethernet", 14}, {"tun", 0}} {
		s := scheduler(t, "bandwidth 10mbit overhead 20")
		frame := frame4(0, 1000)[14-c.off:]
		for range 5000 {
			p := Packet{Len: uint32(len(frame)), Truesize: 2304}
			if c.off != 0 {
				s.DissectEthernet(frame, &p)
			} else {
				s.Dissect(frame, &p)
			}
			s.Enqueue(0, &p)
		}
		var st Stats
		s.Stats(0, &st)
		if st.AvgNetOff != c.off || st.MinNetLen != 1000 || st.MaxAdjLen != 1020 {
			t.Errorf("%s: offset %d, network %d, adjusted %d, want %d, 1000, 1020", c.name, st.AvgNetOff, st.MinNetLen, st.MaxAdjLen, c.off)
		}
	}
}

// Fault 48, all the way: EF behind a tag goes to Voice.
func TestFault048_EFBehindVLANIsVoice(t *testing.T) {
	for _, types := range [][]uint16{{etherVLAN, etherIPv4}, {etherQinQ, etherVLAN, etherIPv4}, {etherQinQ, etherIPv4}} {
		for words, voice := range map[string]int{"diffserv3": 2, "diffserv4": 3} {
			s := scheduler(t, "bandwidth 10mbit "+words)
			enqueueFrame(s, ether(ip4(a4, b4, ipUDP, 46<<2, udp(1, 2)), types...), nil)
			if got := displayed(t, s); got != voice {
				t.Errorf("%s, types %04x: tin %d, want %d", words, types, got, voice)
			}
		}
	}
}

// Fault 51, all the way: a frame with a broken header goes to the tin of DSCP 0.
func TestFault051_BrokenHeaderIsBestEffort(t *testing.T) {
	for _, frame := range [][]byte{
		ether([]byte{0x45}, etherIPv4), ether(nil, etherIPv6), ether([]byte{0, 100, 8}, etherVLAN), make([]byte, 5), ether(make([]byte, 50), 0x1234),
	} {
		s := scheduler(t, "bandwidth 10mbit diffserv3 wash")
		enqueueFrame(s, frame, nil)
		if got := displayed(t, s); got != 1 {
			t.Errorf("% x: tin %d, want 1", frame, got)
		}
		if d, ok := s.Dequeue(0); !ok || d.Changed {
			t.Errorf("% x: delivered %v, changed %v", frame, ok, d.Changed)
		}
	}
}

// Fault 52: where neither tins nor wash need the DSCP, it has no say: every
// value, and a broken header, share one tin and leave unchanged.
func TestFault052_DSCPNotNeeded(t *testing.T) {
	s := scheduler(t, "besteffort nowash")
	for dscp := range byte(64) {
		if e := enqueueFrame(s, frame4(dscp<<2, 40), nil); e.Tin != 0 {
			t.Fatalf("DSCP %d: tin %d", dscp, e.Tin)
		}
		if d, ok := s.Dequeue(0); !ok || d.Changed || d.TOS != dscp<<2 {
			t.Fatalf("DSCP %d: delivered %v as %02x, changed %v", dscp, ok, d.TOS, d.Changed)
		}
	}
}

// Fault 53, all the way: which tin is which.
func TestFault053_TinOrder(t *testing.T) {
	for _, c := range []struct {
		name, words string
		dscp        byte
		change      func(p *Packet)
		want        int // display order
	}{
		{"mark 1 in diffserv4 is Bulk", "diffserv4 fwmark 0xff", 46, func(p *Packet) { p.Mark = 1 }, 0},
		{"mark 2 in diffserv4 is Best Effort", "diffserv4 fwmark 0xff", 46, func(p *Packet) { p.Mark = 2 }, 1},
		{"mark 4 in diffserv4 is Voice", "diffserv4 fwmark 0xff", 0, func(p *Packet) { p.Mark = 4 }, 3},
		{"mark 5 in diffserv4 is none", "diffserv4 fwmark 0xff", 46, func(p *Packet) { p.Mark = 5 }, 3},
		{"LE in diffserv8 is tin 0", "diffserv8", 1, nil, 0},
		{"CS7 in diffserv8 is tin 7", "diffserv8", 56, nil, 7},
		{"CS1 in diffserv3 is Bulk", "diffserv3", 8, nil, 0},
		{"CS0 in diffserv3 is Best Effort", "diffserv3", 0, nil, 1},
		{"EF in diffserv4 is Voice", "diffserv4", 46, nil, 3},
	} {
		s := scheduler(t, "bandwidth 10mbit "+c.words)
		enqueueFrame(s, frame4(c.dscp<<2, 40), c.change)
		if got := displayed(t, s); got != c.want {
			t.Errorf("%s: tin %d, want %d", c.name, got, c.want)
		}
	}
	// The priority of the packet, when it names this qdisc.
	c := parse(t, "bandwidth 10mbit diffserv4")
	s, err := New(0, c, Options{Handle: 0x80010000})
	if err != nil {
		t.Fatal(err)
	}
	enqueueFrame(s, frame4(46<<2, 40), func(p *Packet) { p.Priority = 0x80010001 })
	if got := displayed(t, s); got != 0 {
		t.Errorf("priority 8001:1: tin %d, want 0", got)
	}
}

// Fault 54: the mark is shifted by the zeros at the end of the mask.
func TestFault054_FwmarkShift(t *testing.T) {
	for _, c := range []struct {
		mask string
		mark uint32
		want int
	}{
		{"0xff00", 0x0100, 0},
		{"0xff00", 0x0300, 2},
		{"0xff00", 0x0001, 1},
		{"0xff", 1, 0},
		{"0x80000000", 0x80000000, 0},
		{"0xe0000000", 0x60000000, 2},
		{"0x1", 3, 0},
		{"0", 3, 1},
	} {
		s := scheduler(t, "bandwidth 10mbit diffserv3 fwmark "+c.mask)
		enqueueFrame(s, frame4(0, 40), func(p *Packet) { p.Mark = c.mark })
		if got := displayed(t, s); got != c.want {
			t.Errorf("mask %s mark %#x: tin %d, want %d", c.mask, c.mark, got, c.want)
		}
	}
}

// Fault 68, all the way: two flows in a PPPoE session have a queue each.
func TestFault068_PPPoEQueues(t *testing.T) {
	s := scheduler(t, "besteffort")
	queue := func(port uint16) uint16 {
		return enqueueFrame(s, ether(pppoeSession(pppIPv4, ip4(a4, b4, ipTCP, 0, tcp(port, 443))), etherPPPoE), nil).Flow
	}
	if queue(1) == queue(2) {
		t.Error("both flows are in one queue")
	}
}

// Fault 37: a negative deficit is printed as one. Fault 82: so are the times of
// a class.
func TestFault037_NegativeClassValues(t *testing.T) {
	now := Time(time.Second)
	f := FlowStats{
		Deficit: -100, Count: 3, Dropping: true, DropNext: now.Add(5 * time.Millisecond), PDrop: 1 << 24,
		BlueTime: now.Add(-1500 * time.Microsecond), Qlen: 2, Backlog: 3028, Drops: 7,
	}
	const want = "class cake 8001:402 parent 8001: \n" +
		" (dropped 7, overlimits 0 requeues 0) \n" +
		" backlog 3028b 2p requeues 0\n" +
		"  deficit -100 count 3 dropping drop_next -5ms blue_prob 16777216 blue_timer 1.5ms\n"
	minor := ClassMinor(1, 1)
	if diff := cmp.Diff(want, string(f.AppendText(nil, now, "8001:", minor))); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
	const wantJSON = `{"class":"cake","handle":"8001:402","parent":"8001:","stats":{"drops":7,"overlimits":0,"requeues":0,"backlog":3028,"qlen":2},` +
		`"deficit":-100,"count":3,"dropping":true,"blue_prob":16777216,"blue_timer":1500}`
	if diff := cmp.Diff(wantJSON, string(f.AppendJSON(nil, now, "8001:", minor))); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
	idle := FlowStats{Deficit: 1514, DropNext: now, BlueTime: now}
	if got := string(idle.AppendText(nil, now, "8001:", 1)); got != "class cake 8001:1 parent 8001: \n (dropped 0, overlimits 0 requeues 0) \n backlog 0b 0p requeues 0\n  deficit 1514 count 0 blue_prob 0\n" {
		t.Errorf("idle class:\n%s", got)
	}
}

// Changing the flow mode must not move flows: the key of the hash stays.
func TestReconfigureKeepsHashes(t *testing.T) {
	s := scheduler(t, "bandwidth 10mbit flows")
	var before, after Packet
	frame := frame4(0, 100)
	s.DissectEthernet(frame, &before)
	if err := s.Reconfigure(0, parse(t, "bandwidth 12mbit triple-isolate ack-filter")); err != nil {
		t.Fatal(err)
	}
	s.DissectEthernet(frame, &after)
	if before.FlowHash != after.FlowHash || after.SrcHash == 0 || before.SrcHash != 0 || after.Header == nil {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// FuzzConfig: any Config that Validate accepts makes a Scheduler that takes
// packets, delivers or drops each of them, can be reconfigured, and can be
// shown and read back.
func FuzzConfig(f *testing.F) {
	type args struct {
		rate                      uint64
		tins, flows, acks, frames uint8
		flags                     uint8
		overhead                  int16
		mpu, mtu                  uint16
		rtt, target               uint32
		memory, mark              uint32
	}
	for _, a := range []args{
		{mtu: 1514, rtt: 100000, target: 5000, flows: 7, flags: 0x30},
		{rate: 8, mtu: 68, rtt: 1, target: 1, tins: 4, flows: 3, acks: 1, frames: 1, flags: 0xff, overhead: -64},
		{rate: 115e6, mtu: 65535, rtt: 1<<32 - 1, target: 1<<32 - 1, tins: 5, flows: 4, acks: 2, frames: 2, overhead: 256, mpu: 256, memory: 1, mark: 1 << 31},
		{rate: 1<<64 - 1, mtu: 1514, rtt: 1e9, target: 5e7, tins: 2, flows: 5, flags: 0x08, memory: 1<<32 - 1},
	} {
		f.Add(a.rate, a.tins, a.flows, a.acks, a.frames, a.flags, a.overhead, a.mpu, a.mtu, a.rtt, a.target, a.memory, a.mark)
	}
	f.Fuzz(func(t *testing.T, rate uint64, tins, flows, acks, frames, flags uint8, overhead int16, mpu, mtu uint16, rtt, target, memory, mark uint32) {
		c := Config{
			Rate: BitsPerSecond(rate), Tins: TinMode(tins), Flows: FlowMode(flows), AckFilter: AckFilter(acks), Framing: Framing(frames),
			NAT: flags&1 != 0, Wash: flags&2 != 0, Ingress: flags&4 != 0, Autorate: flags&8 != 0, SplitGSO: flags&16 != 0, Raw: flags&32 != 0,
			Overhead: overhead, MPU: mpu, MTU: mtu, RTT: time.Duration(rtt) * time.Microsecond, Target: time.Duration(target) * time.Microsecond,
			MemoryLimit: memory, Fwmark: mark,
		}
		s, err := New(0, c, Options{Seed: 3})
		if (err == nil) != (c.Validate() == nil) {
			t.Fatalf("New: %v, Validate: %v", err, c.Validate())
		}
		if err != nil {
			return
		}
		now, in, out := Time(0), 0, 0
		dropped := func() {
			for range s.Drops() {
				out++
			}
		}
		pass := func() {
			for i := range 40 {
				frame := ether(ip4(a4, b4, ipTCP, byte(i*8), tcp(uint16(i%5), 443)), etherIPv4)
				p := Packet{Handle: uint32(i), Len: uint32(len(frame) + i*30), Truesize: 2304, Mark: uint32(i)}
				if i%8 == 7 {
					p.Segs, p.GSOSize, p.HeaderLen = 3, 400, 54
					p.Len = 3*454 - 7
				}
				s.DissectEthernet(frame, &p)
				s.Enqueue(now, &p)
				dropped()
				if p.Segs > 1 && c.SplitGSO {
					in += int(p.Segs)
				} else {
					in++
				}
				now += Time(i) * 100_000
				if _, ok := s.Dequeue(now); ok {
					out++
				}
				dropped()
			}
		}
		pass()
		other := c
		other.Tins, other.Rate = (c.Tins+1)%(Cake3+1), c.Rate/16*8
		if err := s.Reconfigure(now, other); err != nil {
			t.Fatal(err)
		}
		dropped()
		pass()
		for range 10_000 {
			if s.Len() == 0 {
				break
			}
			if next := s.NextSend(); next > now {
				now = next
			}
			if _, ok := s.Dequeue(now); ok {
				out++
			}
			dropped()
		}
		if s.Len() != 0 || s.Backlog() != 0 || in != out {
			t.Fatalf("%d packets in, %d out, %d left with %d bytes, next at %d, now %d", in, out, s.Len(), s.Backlog(), s.NextSend(), now)
		}
		var st Stats
		s.Stats(now, &st)
		text := st.AppendText(nil, Header{Handle: "8001:"})
		reports, err := ParseText(text)
		if err != nil || len(reports) != 1 || reports[0].Stats.SentPackets != st.SentPackets {
			t.Fatalf("%s\nread back: %v %v", text, reports, err)
		}
		if _, err := ParseJSON(st.AppendJSON(nil, Header{Handle: "8001:"})); err != nil {
			t.Fatal(err)
		}
	})
}

// A Scheduler in mode cake3 shows the rates, targets and intervals that cake3
// showed on the links where it began.
func TestCake3ReportOfScheduler(t *testing.T) {
	for name, words := range map[string]string{
		"cake3-upload.txt":   "bandwidth 12mbit cake3 flows",
		"cake3-download.txt": "bandwidth 115mbit cake3 flows",
	} {
		s := scheduler(t, words)
		var st Stats
		s.Stats(0, &st)
		want := strings.Split(string(golden(t, name)), "\n")
		got := strings.Split(string(st.AppendText(nil, Header{Handle: "8020:", Refcnt: 9})), "\n")
		if len(got) != len(want) {
			t.Fatalf("%s: %d lines, want %d", name, len(got), len(want))
		}
		if _, options, _ := strings.Cut(want[0], "refcnt "); !strings.HasSuffix(got[0], options[1:]) {
			t.Errorf("%s: options %q, want those of %q", name, got[0], want[0])
		}
		for i := 3; i < 7; i++ { // header, rate, target, interval
			if got[i] != want[i] {
				t.Errorf("%s: got %q, want %q", name, got[i], want[i])
			}
		}
	}
}

// What is queued may be over the memory limit and yet have no length, or lengths
// that wrap to none: something must go nevertheless.
func TestOverflowWithoutLength(t *testing.T) {
	for _, compat := range []Compat{0, CompatKernel} {
		for _, lens := range [][]uint32{{0}, {1 << 31, 1 << 31}} {
			c := DefaultConfig()
			c.Tins, c.Rate, c.MemoryLimit = Diffserv8, 1e6, 50_000
			s, err := New(0, c, Options{Seed: 1, Compat: compat, Stepwise: compat != 0})
			if err != nil {
				t.Fatal(err)
			}
			drops := 0
			for i := range uint32(200) {
				p := flowPacket(i / 2)
				p.Len = lens[int(i)%len(lens)]
				s.Enqueue(Time(i), p)
				drops += len(s.Drops())
			}
			if s.memUsed > s.memLimit || drops != 200-s.Len() {
				t.Errorf("compat %x, lengths %d: %d bytes used of %d; %d dropped, %d queued of 200", compat, lens, s.memUsed, s.memLimit, drops, s.Len())
			}
		}
	}
}

// After hours of shaped operation, a change to a mode in which the tins take
// turns must not wait until each has paid back what it sent meanwhile: that
// would be millions of rounds.
func TestTurnsAfterShaping(t *testing.T) {
	changes := map[string]string{
		"diffserv4":                  "unlimited diffserv4",
		"diffserv3":                  "cake3",
		"diffserv4 autorate-ingress": "unlimited diffserv4",
		"bandwidth 1gbit diffserv8 autorate-ingress": "cake3",
	}
	for from, to := range changes {
		s := scheduler(t, "bandwidth 1gbit "+from)
		if !s.inTurn {
			for i := range s.tins {
				s.tins[i].deficit = -2e9
			}
		}
		c, err := ParseKeywords(s.Config(), "bandwidth 1gbit "+to)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Reconfigure(1, c); err != nil {
			t.Fatal(err)
		}
		for i := range s.tins {
			if d := s.tins[i].deficit; s.inTurn && d < -100_000 {
				t.Errorf("%s to %s: tin %d begins %d bytes in debt", from, to, i, -d)
			}
		}
	}
}
