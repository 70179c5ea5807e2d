package userspace

import (
	"testing"

	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

func TestMeasure(t *testing.T) {
	tcp := make([]byte, 128)
	tcp[0], tcp[9], tcp[32] = 0x45, 6, 8<<4 // 20 + 32
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
	a, b := h.put(10, 1), h.put(11, 2)
	if id, mark := h.take(a); id != 10 || mark != 1 {
		t.Errorf("first slot holds %d, %d", id, mark)
	}
	c, d := h.put(12, 3), h.put(13, 4)
	if c != a || d == b {
		t.Errorf("slots %d %d %d %d: want the third to be the first, the rest different", a, b, c, d)
	}
	for slot, want := range map[uint32]uint32{b: 11, c: 12, d: 13} {
		if id, _ := h.take(slot); id != want {
			t.Errorf("slot %d holds %d, want %d", slot, id, want)
		}
	}
	if len(h.s) != 3 {
		t.Errorf("%d slots for at most 3 packets at once", len(h.s))
	}
}

func TestMaxLen(t *testing.T) {
	l := &loop{clock: func() engine.Time { return 0 }}
	for _, c := range []struct {
		rate engine.BitsPerSecond
	}{{500_000}, {115_000_000}, {1_000_000_000}} {
		cfg := engine.DefaultConfig()
		cfg.Rate = c.rate
		var err error
		if l.sched, err = engine.New(0, cfg, engine.Options{}); err != nil {
			t.Fatal(err)
		}
		var st engine.Stats
		l.sched.Stats(0, &st)
		if n := uint64(l.maxLen()); n*smallSize <= st.MemoryLimit {
			t.Errorf("at %s the kernel's queue holds %d packets, and the scheduler's memory is enough for %d", c.rate, n, st.MemoryLimit/smallSize)
		}
	}
}
