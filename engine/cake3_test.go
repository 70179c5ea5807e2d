package engine

import (
	"testing"
	"time"
)

// TestCake3Intervals are the targets and intervals that the report of April
// 2015 shows: 105.0 ms for every class but the one at 3 Mbit/s.
func TestCake3Intervals(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate = Cake3, 12e6
	s := newTest(t, c, Options{})
	for i, want := range [][2]time.Duration{
		{5 * time.Millisecond, 105 * time.Millisecond},
		{5 * time.Millisecond, 105 * time.Millisecond},
		{5 * time.Millisecond, 105 * time.Millisecond},
		{6055999 * time.Nanosecond, 106055999 * time.Nanosecond},
	} {
		b := &s.tins[i]
		if got := [2]time.Duration{time.Duration(b.target), time.Duration(b.interval)}; got != want {
			t.Errorf("class %d: target and interval %v, want %v", i, got, want)
		}
	}
	c.Rate = 250e3
	s = newTest(t, c, Options{})
	if b := &s.tins[0]; b.interval != b.target*8 {
		t.Errorf("at 250 kbit/s: interval %d, want 8 targets of %d", b.interval, b.target)
	}
}

// TestCake3Classes: bulk is class 0 and best effort class 1.
func TestCake3Classes(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate = Cake3, 12e6
	s := newTest(t, c, Options{})
	for dscp, want := range map[uint8]uint8{
		0: 1, 8: 0, 1: 2, 4: 2, 16: 2, 18: 2, 24: 2, 26: 2, 34: 2, 32: 3, 40: 3, 44: 3, 46: 3, 48: 3, 56: 3, 63: 1,
	} {
		p := flowPacket(1)
		p.TOS = dscp << 2
		if got := s.Enqueue(0, p).Tin; got != want {
			t.Errorf("DSCP %d is in class %d, want %d", dscp, got, want)
		}
	}
}

// TestCake3Charge: a packet is charged to its class and to all lower ones.
func TestCake3Charge(t *testing.T) {
	c := DefaultConfig()
	c.Tins, c.Rate = Cake3, 12e6
	s := newTest(t, c, Options{})
	p := flowPacket(1)
	p.TOS = 34 << 2
	s.Enqueue(1000, p)
	if _, ok := s.Dequeue(1000); !ok {
		t.Fatal("nothing delivered")
	}
	for i, charged := range []bool{true, true, true, false} {
		b := &s.tins[i]
		want := Time(0)
		if charged {
			want = Time(b.rate.duration(1514))
		}
		if i == 2 {
			want += 1000 // its clock started when the packet came
		}
		if b.timeNext != want {
			t.Errorf("class %d: clock at %d, want %d", i, b.timeNext, want)
		}
	}
}

// TestCake3Shares: with every class backlogged, the classes share as their
// thresholds say, each with all lower ones below it; one alone gets all.
func TestCake3Shares(t *testing.T) {
	run := func(classes ...uint8) (share [4]float64) {
		c := DefaultConfig()
		c.Tins, c.Rate = Cake3, 12e6
		s := newTest(t, c, Options{})
		dscp := []uint8{8, 0, 34, 46}
		fill := func(class uint8) {
			p := flowPacket(uint32(class) + 1)
			p.TOS = dscp[class]<<2 | 2
			s.Enqueue(s.timeNext, p)
		}
		for range 20 {
			for _, k := range classes {
				fill(k)
			}
		}
		var sum float64
		for range 20_000 {
			d, ok := s.Dequeue(s.NextSend())
			if !ok {
				t.Fatal("idle with packets queued")
			}
			share[d.Tin] += float64(d.Len)
			sum += float64(d.Len)
			fill(d.Tin)
		}
		for i := range share {
			share[i] /= sum
		}
		return share
	}
	if got := run(2); got[2] != 1 {
		t.Errorf("video alone gets %.3f", got[2])
	}
	got := run(0, 1, 2, 3)
	// What each threshold adds to the one above it: 3, 9, 11.25 and 12 Mbit/s.
	for i, want := range [4]float64{1. / 16, 3. / 16, 1. / 2, 1. / 4} {
		if got[i] < want-0.005 || got[i] > want+0.005 {
			t.Errorf("class %d gets %.4f of the rate, want %.4f", i, got[i], want)
		}
	}
}
