package userspace

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

func TestMeasure(t *testing.T) {
	tcp := make([]byte, 128)
	tcp[0], tcp[9], tcp[32] = 0x45, 6, 8<<4 // 20 + 32
	udp := make([]byte, 64)
	udp[0], udp[9] = 0x46, 17 // 24 bytes of header
	udp6 := make([]byte, 64)
	udp6[0], udp6[6] = 0x60, 17
	tcp6 := make([]byte, 128)
	tcp6[0], tcp6[6], tcp6[52] = 0x60, 6, 5<<4 // 40 + 20
	for _, c := range []struct {
		name                   string
		netOff                 uint16
		in                     nfqueue.Packet
		len                    uint32
		segs, gsoSize, headers uint16
	}{
		{"Ethernet", 14, nfqueue.Packet{Len: 1500, Data: tcp}, 1514, 1, 0, 0},
		{"PPP", 0, nfqueue.Packet{Len: 1492, Data: tcp}, 1492, 1, 0, 0},
		{"super-packet", 14, nfqueue.Packet{Len: 52 + 10*1448, GSO: true, Data: tcp}, 10 * 1514, 10, 1448, 66},
		{"super-packet, short last", 14, nfqueue.Packet{Len: 52 + 1448 + 1, GSO: true, Data: tcp}, 1514 + 67, 2, 1448, 66},
		{"IPv6 super-packet", 14, nfqueue.Packet{Len: 60 + 2*1440, GSO: true, Data: tcp6}, 2 * 1514, 2, 1440, 74},
		{"GSO flag on a small packet", 14, nfqueue.Packet{Len: 900, GSO: true, Data: tcp}, 914, 1, 0, 0},
		{"unknown super-packet", 14, nfqueue.Packet{Len: 9000, GSO: true, Data: make([]byte, 128)}, 9014, 1, 0, 0},
		{"datagram in fragments", 14, nfqueue.Packet{Len: 24 + 4008, Data: udp}, 4008 + 3*38, 3, 1472, 38},
		{"IPv6 datagram in fragments", 14, nfqueue.Packet{Len: 40 + 4008, Data: udp6}, 4008 + 3*62, 3, 1448, 62},
		{"in fragments on PPP", 0, nfqueue.Packet{Len: 24 + 2000, Data: udp}, 2000 + 2*24, 2, 1472, 24},
		{"in fragments, not IP", 14, nfqueue.Packet{Len: 9000, Data: make([]byte, 64)}, 9014, 1, 0, 0},
		{"in fragments, without bytes", 14, nfqueue.Packet{Len: 9000}, 9014, 1, 0, 0},
		{"super-packet without bytes", 14, nfqueue.Packet{Len: 9000, GSO: true}, 9014, 1, 0, 0},
	} {
		l := &loop{device: device{netOff: c.netOff, mtu: 1500}}
		p := engine.Packet{Segs: 1}
		l.measure(&c.in, &p)
		if p.Len != c.len || p.Segs != c.segs || p.GSOSize != c.gsoSize || p.HeaderLen != c.headers {
			t.Errorf("%s: %d bytes in %d segments of %d behind %d, want %d in %d of %d behind %d", c.name,
				p.Len, p.Segs, p.GSOSize, p.HeaderLen, c.len, c.segs, c.gsoSize, c.headers)
		}
	}
}

func TestSlots(t *testing.T) {
	var h slots
	ref := func(id uint32) nfqueue.Ref { return nfqueue.Ref{ID: id, Number: uint8(id % 3)} }
	a, b := h.put(ref(10), 1), h.put(ref(11), 2)
	if got, mark := h.take(a); got != ref(10) || mark != 1 {
		t.Errorf("first slot holds %v, %d", got, mark)
	}
	c, d := h.put(ref(12), 3), h.put(ref(13), 4)
	if c != a || d == b {
		t.Errorf("slots %d %d %d %d: want the third to be the first, the rest different", a, b, c, d)
	}
	if diff := cmp.Diff([]nfqueue.Ref{ref(11), ref(12), ref(13)}, h.all()); diff != "" {
		t.Errorf("not in the order of arrival: %s", diff)
	}
	for slot, want := range map[uint32]uint32{b: 11, c: 12, d: 13} {
		if got, _ := h.take(slot); got != ref(want) {
			t.Errorf("slot %d holds %v, want %d", slot, got, want)
		}
	}
	if len(h.s) != 3 || len(h.all()) != 0 {
		t.Errorf("%d slots for at most 3 packets at once, %d left", len(h.s), len(h.all()))
	}
}

func TestMaxLen(t *testing.T) {
	for _, rate := range []engine.BitsPerSecond{500_000, 115_000_000, 1_000_000_000} {
		cfg := engine.DefaultConfig()
		cfg.Rate = rate
		sched, err := engine.New(0, cfg, engine.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var st engine.Stats
		sched.Stats(0, &st)
		if n := uint64(maxLen(sched, 0)); n*smallSize <= st.MemoryLimit {
			t.Errorf("at %s the kernel's queue holds %d packets, and the scheduler's memory is enough for %d", rate, n, st.MemoryLimit/smallSize)
		}
	}
}

// TestWholeLen wants no packet whole that a link sends for more than a
// millisecond.
func TestWholeLen(t *testing.T) {
	for _, c := range []struct {
		rate  engine.BitsPerSecond
		split bool
		want  uint32
	}{
		{1_000_000, true, 125},
		{115_000_000, true, 14375},
		{1_000_000_000, true, 125_000},
		{115_000_000, false, 1<<32 - 1},
		{0, true, 1<<32 - 1},
	} {
		cfg := engine.DefaultConfig()
		cfg.Rate, cfg.SplitGSO = c.rate, c.split
		if got := wholeLen(cfg); got != c.want {
			t.Errorf("at %s, split-gso %v: %d bytes stay whole, want %d", c.rate, c.split, got, c.want)
		}
	}
}
