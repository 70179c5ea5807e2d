package engine

import (
	"encoding/binary"
	"testing"
)

// segment is a TCP segment to be put into headers.
type segment struct {
	v6      bool
	sport   uint16
	ack     uint32
	flags   byte // 0 is ACK
	payload int
	options []byte
	drop    bool // expected to be dropped by the last of its list
}

func (g segment) header() []byte {
	flags := g.flags
	if flags == 0 {
		flags = tcpACK
	}
	opts := append([]byte(nil), g.options...)
	for len(opts)%4 != 0 {
		opts = append(opts, optNop)
	}
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, g.sport)
	binary.BigEndian.PutUint16(tcp[2:], 443)
	binary.BigEndian.PutUint32(tcp[8:], g.ack)
	tcp[12] = byte((20 + len(opts)) / 4 << 4)
	tcp[13] = flags
	tcp = append(tcp, opts...)
	if g.v6 {
		ip := make([]byte, 40)
		ip[0], ip[6], ip[23], ip[39] = 0x60, 6, 1, 2
		binary.BigEndian.PutUint16(ip[4:], uint16(len(tcp)+g.payload))
		return append(ip, tcp...)
	}
	ip := make([]byte, 20)
	ip[0], ip[9], ip[15], ip[19] = 0x45, 6, 1, 2
	binary.BigEndian.PutUint16(ip[2:], uint16(20+len(tcp)+g.payload))
	return append(ip, tcp...)
}

func sackBlocks(blocks ...uint32) []byte {
	o := []byte{optSACK, byte(2 + 4*len(blocks))}
	for _, b := range blocks {
		o = binary.BigEndian.AppendUint32(o, b)
	}
	return o
}

func stamp(val, ecr uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32([]byte{optTimestamp, 10}, val), ecr)
}

// ackCase is a list of segments that come into one queue; the last may make the
// filter drop one of the others.
type ackCase struct {
	name       string
	aggressive bool
	list       []segment
}

const ece, cwr, syn, fin, rst, psh, urg = 0x40, 0x80, tcpSYN, tcpFIN, 4, 8, 0x20

func TestAckFilter(t *testing.T) {
	testAckFilter(t, []ackCase{
		{"three plain", false, []segment{{ack: 1, drop: true}, {ack: 2}, {ack: 3}}},
		{"three plain over IPv6", false, []segment{{v6: true, ack: 1, drop: true}, {v6: true, ack: 2}, {v6: true, ack: 3}}},
		{"one before is kept", false, []segment{{ack: 1}, {ack: 2}}},
		{"one before goes when aggressive", true, []segment{{ack: 1, drop: true}, {ack: 2}}},
		{"aggressive needs it to be next", true, []segment{{ack: 1}, {sport: 7, ack: 9}, {ack: 10}}},
		{"payload may trigger", false, []segment{{ack: 1, drop: true}, {ack: 2}, {ack: 3, payload: 100}}},
		{"payload is kept", true, []segment{{ack: 1, payload: 100}, {ack: 2}}},
		{"the last in order is kept", true, []segment{{ack: 5}, {ack: 4}}},
		{"serial order", true, []segment{{ack: 0xfffffff0, drop: true}, {ack: 5}}},
		{"another connection", true, []segment{{sport: 1, ack: 1}, {sport: 2, ack: 2}}},
		{"another family", true, []segment{{v6: true, ack: 1}, {ack: 2}}},
		{"a duplicate is kept", true, []segment{{ack: 1}, {ack: 1}}},
	})
}

// dtaht/sch_cake#82, #84: only plain acknowledgements are dropped.
func TestFault071_OtherFlagsAreKept(t *testing.T) {
	testAckFilter(t, []ackCase{
		{"SYN", true, []segment{{ack: 1, flags: syn}, {ack: 2}}},
		{"SYN ACK", true, []segment{{ack: 1, flags: syn | tcpACK}, {ack: 2}}},
		{"SYN ACK triggers nothing", true, []segment{{ack: 1}, {ack: 2, flags: syn | tcpACK}}},
		{"FIN", true, []segment{{ack: 1, flags: fin | tcpACK}, {ack: 2}}},
		{"RST", true, []segment{{ack: 1, flags: rst | tcpACK}, {ack: 2}}},
		{"PSH", true, []segment{{ack: 1, flags: psh | tcpACK}, {ack: 2}}},
		{"URG", true, []segment{{ack: 1, flags: urg | tcpACK}, {ack: 2}}},
		{"FIN may trigger", true, []segment{{ack: 1, drop: true}, {ack: 2, flags: fin | tcpACK}}},
	})
}

// A change of the ECN echo is news.
func TestAckFilterECN(t *testing.T) {
	testAckFilter(t, []ackCase{
		{"ECE alike", true, []segment{{ack: 1, flags: ece | tcpACK, drop: true}, {ack: 2, flags: ece | tcpACK}}},
		{"ECE begins", true, []segment{{ack: 1}, {ack: 2, flags: ece | tcpACK}}},
		{"ECE ends", true, []segment{{ack: 1, flags: ece | tcpACK}, {ack: 2}}},
		{"CWR", true, []segment{{ack: 1, flags: cwr | tcpACK}, {ack: 2}}},
		{"change in between", false, []segment{{ack: 1}, {ack: 2, flags: ece | tcpACK}, {ack: 3, flags: ece | tcpACK}}},
		{"two after a change", false, []segment{
			{ack: 1}, {ack: 2, flags: ece | tcpACK, drop: true}, {ack: 3, flags: ece | tcpACK}, {ack: 4, flags: ece | tcpACK},
		}},
	})
}

// dtaht/sch_cake#63, #64, #65, #94: what only a SACK tells is kept.
func TestFault070_SACKIsKept(t *testing.T) {
	testAckFilter(t, []ackCase{
		{"SACK is not covered", true, []segment{{ack: 1, options: sackBlocks(10, 20)}, {ack: 2}}},
		{"SACK is covered", true, []segment{{ack: 1, options: sackBlocks(10, 20), drop: true}, {ack: 2, options: sackBlocks(10, 30)}}},
		{"same SACK, later ack", true, []segment{{ack: 1, options: sackBlocks(10, 20), drop: true}, {ack: 2, options: sackBlocks(10, 20)}}},
		{"same SACK, same ack", true, []segment{{ack: 1, options: sackBlocks(10, 20)}, {ack: 1, options: sackBlocks(10, 20)}}},
		{"more SACK, same ack", true, []segment{{ack: 1, options: sackBlocks(10, 20), drop: true}, {ack: 1, options: sackBlocks(10, 30)}}},
		{"one block of two covered", true, []segment{{ack: 1, options: sackBlocks(10, 20, 40, 50)}, {ack: 2, options: sackBlocks(10, 30)}}},
		{"first SACK", true, []segment{{ack: 1, drop: true}, {ack: 1, options: sackBlocks(10, 30)}}},
		{"DSACK", true, []segment{{ack: 15, options: sackBlocks(10, 20)}, {ack: 16, options: sackBlocks(10, 20)}}},
	})
}

func TestAckFilterOptions(t *testing.T) {
	testAckFilter(t, []ackCase{
		{"newer timestamp", true, []segment{{ack: 1, options: stamp(5, 6), drop: true}, {ack: 2, options: stamp(6, 6)}}},
		{"older timestamp", true, []segment{{ack: 1, options: stamp(5, 6)}, {ack: 2, options: stamp(4, 6)}}},
		{"older echo", true, []segment{{ack: 1, options: stamp(5, 6)}, {ack: 2, options: stamp(5, 5)}}},
		{"timestamp before one without", true, []segment{{ack: 1, options: stamp(5, 6)}, {ack: 2}}},
		{"timestamp after one without", true, []segment{{ack: 1, drop: true}, {ack: 2, options: stamp(5, 6)}}},
		{"unknown option", true, []segment{{ack: 1, options: []byte{30, 4, 0, 0}}, {ack: 2}}},
		{"malformed SACK", true, []segment{{ack: 1, options: []byte{optSACK, 4, 0, 0}}, {ack: 2}}},
	})
}

func testAckFilter(t *testing.T, cases []ackCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Tins, cfg.AckFilter = BestEffort, AckFilterNormal
			if c.aggressive {
				cfg.AckFilter = AckFilterAggressive
			}
			s := newTest(t, cfg, Options{})
			want := -1
			for i, g := range c.list {
				p := flowPacket(1)
				h := g.header()
				p.Handle, p.Len, p.Header = uint32(i), uint32(14+len(h)+g.payload), h
				e := s.Enqueue(0, p)
				if i < len(c.list)-1 && len(s.Drops()) != 0 {
					t.Fatalf("segment %d already drops %+v", i, s.Drops())
				}
				if e.Congested {
					t.Error("congested")
				}
				if g.drop {
					want = i
				}
			}
			got := -1
			for _, d := range s.Drops() {
				got = int(d.Handle)
				if d.Reason != DropAck {
					t.Errorf("dropped by %v", d.Reason)
				}
			}
			if got != want {
				t.Errorf("segment %d dropped, want %d", got, want)
			}
			left := len(c.list)
			if want >= 0 {
				left--
			}
			next := -1
			for range left {
				d, ok := s.Dequeue(1)
				if !ok || int(d.Handle) <= next || int(d.Handle) == want {
					t.Fatalf("delivered %v %d after %d", ok, d.Handle, next)
				}
				next = int(d.Handle)
			}
			if s.Len() != 0 || s.Backlog() != 0 || s.memUsed != 0 {
				t.Errorf("%d packets, %d bytes, %d of memory left", s.Len(), s.Backlog(), s.memUsed)
			}
			var st Stats
			s.Stats(1, &st)
			if n := uint64(len(c.list) - left); st.Tins[0].AckDrops != n || st.Drops != n || st.Tins[0].Drops != 0 {
				t.Errorf("ack drops %d, drops %d, of the tin %d; want %d, %d, 0",
					st.Tins[0].AckDrops, st.Drops, st.Tins[0].Drops, n, n)
			}
		})
	}
}
