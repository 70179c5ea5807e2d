package engine_test

import (
	"testing"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// TestNoAllocationPerPacket lets each workload reach its steady state and then
// wants not one allocation in thousands of packets, statistics included.
func TestNoAllocationPerPacket(t *testing.T) {
	for _, w := range enginetest.Workloads() {
		t.Run(w.Name, func(t *testing.T) {
			s, err := engine.New(0, w.Config, engine.Options{Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			d := enginetest.NewDriver(s, w, enginetest.Watch{})
			// Long enough for the overloaded ones to meet their memory limit
			// and to have rebuilt the overflow heap.
			now := d.Run(60_000)
			var st engine.Stats
			if n := testing.AllocsPerRun(10, func() {
				now = d.Run(1000)
				s.Stats(now, &st)
			}); n != 0 {
				t.Errorf("%v allocations in 1000 packets and one Stats, want 0", n)
			}
		})
	}
}

// TestNoAllocationPerSuperPacket is the same for packets that are split.
func TestNoAllocationPerSuperPacket(t *testing.T) {
	s, err := engine.New(0, engine.DefaultConfig(), engine.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	const segments, segment, headers = 44, 1448, 66
	frame := enginetest.PlainFlow(0).AppendFrame(nil, headers+segments*segment)
	var now engine.Time
	if n := testing.AllocsPerRun(100, func() {
		p := engine.Packet{
			Len: segments * (headers + segment), Truesize: 66_000, NetOff: enginetest.EthernetHeader,
			Segs: segments, GSOSize: segment, HeaderLen: headers,
		}
		s.DissectEthernet(frame, &p)
		now++
		s.Enqueue(now, &p)
		for s.Len() > 0 {
			s.Dequeue(now)
		}
	}); n != 0 {
		t.Errorf("%v allocations for each super-packet, want 0", n)
	}
}
