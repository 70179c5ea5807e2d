package engine

import "testing"

// TestAutorateAfterAckFilter: acknowledgements filtered while nothing was being
// measured must not count in the window that autorate begins with.
func TestAutorateAfterAckFilter(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate, c.AckFilter = BestEffort, 10e6, AckFilterNormal
	s := newTest(t, c, Options{Seed: 1})
	ack := func(now Time, n uint32) {
		p := flowPacket(1)
		p.Len, p.Header = 66, segment{sport: 5, ack: n}.header()
		s.Enqueue(now, p)
	}
	now := Time(0)
	for n := range uint32(100) {
		now += 1e5
		ack(now, 1000+n*3000)
	}
	if s.tins[0].ackDrops == 0 {
		t.Fatal("no acknowledgement filtered")
	}
	c.Autorate = true
	if err := s.Reconfigure(now, c); err != nil {
		t.Fatal(err)
	}
	for i := range 4000 { // 1514 bytes in 2 ms are 6.06 Mbit/s, with a gap now and then
		now += 2e6
		if i%50 == 0 {
			now += 1e6
		}
		s.Enqueue(now, flowPacket(2))
		for s.NextSend() <= now {
			s.Dequeue(now)
		}
		if got := s.auto.peak * 8; got > 20e6 {
			t.Fatalf("after %d packets: %d bit/s estimated, 6 Mbit/s came in", i+1, got)
		}
	}
}

// TestAutorateShortAck: a short acknowledgement that ends a window and replaces
// a longer one of the window before leaves less than nothing in its own. That
// is no bytes, not 2^64 of them, except in the kernel.
func TestAutorateShortAck(t *testing.T) {
	for _, compat := range []Compat{0, CompatAutorate} {
		c := DefaultConfig()
		c.Tins, c.Rate, c.AckFilter, c.Autorate = BestEffort, 1e6, AckFilterNormal, true
		s := newTest(t, c, Options{Seed: 1, Compat: compat})
		now, huge := Time(0), false
		for n := range uint32(40) {
			now += Time(n+1) * 1e6 // each gap is longer than their average
			p := flowPacket(1)
			p.Len, p.Header = 90-30*(n/2%2), segment{sport: 5, ack: 1000 + n*3000}.header()
			s.Enqueue(now, p)
			huge = huge || s.auto.peak > 1e9
		}
		if s.tins[0].ackDrops < 30 {
			t.Fatalf("%d acknowledgements filtered", s.tins[0].ackDrops)
		}
		if huge != (compat != 0) {
			t.Errorf("compat %x: huge estimate: %v", compat, huge)
		}
	}
}
