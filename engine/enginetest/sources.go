package enginetest

import (
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// CBR sends packets of Size bytes at a constant Rate, whatever becomes of them.
type CBR struct {
	Rate  engine.BitsPerSecond // of whole frames
	Size  int                  // bytes of a frame
	Begin engine.Time          // when the first packet is sent

	sent int64
	next engine.Time // 0: not known yet
}

// Next implements Source.
func (c *CBR) Next() engine.Time {
	if c.next == 0 {
		bits := c.sent * int64(c.Size) * 8
		rate := int64(c.Rate)
		c.next = c.Begin + engine.Time(bits/rate*int64(time.Second)+bits%rate*int64(time.Second)/rate)
	}
	return c.next
}

// Act implements Source.
func (c *CBR) Act(_ engine.Time, send func(size int)) {
	c.sent++
	c.next = 0
	send(c.Size)
}

// Delivered implements Source.
func (c *CBR) Delivered(engine.Time, int, bool) {}

// Dropped implements Source.
func (c *CBR) Dropped(engine.Time, int) {}

// Voice is one direction of a call: a frame of 214 bytes (G.711 in RTP, IPv4 and
// Ethernet) every 20 ms.
func Voice(begin engine.Time) *CBR {
	return &CBR{Rate: 85_600, Size: 214, Begin: begin}
}

// TCP is a bulk sender with additive increase and multiplicative decrease: slow
// start, then one packet more a round trip, and half the window at most once a
// round trip for a loss or a CE mark. It sends as soon as its window allows.
// Losses are known a round trip later and repaired for nothing; there is no
// timeout.
type TCP struct {
	Size  int           // bytes of a frame
	RTT   time.Duration // as given to Sim.Add; reductions are at least this far apart
	Begin engine.Time   // when it starts with a window of 10 packets

	window    float64 // packets; 0 before it has begun
	threshold float64 // slow start ends here; 0 until the first reduction
	inFlight  int
	reduced   engine.Time
	wakes     engine.Time
}

// Next implements Source.
func (t *TCP) Next() engine.Time {
	if t.window == 0 {
		return t.Begin
	}
	if t.inFlight < int(t.window) {
		return t.wakes
	}
	return engine.Never
}

// Act implements Source.
func (t *TCP) Act(now engine.Time, send func(size int)) {
	if t.window == 0 {
		t.window, t.reduced = 10, now.Add(-t.RTT)
	}
	for t.inFlight < int(t.window) {
		t.inFlight++
		send(t.Size)
	}
	t.wakes = now
}

// Delivered implements Source.
func (t *TCP) Delivered(now engine.Time, _ int, ce bool) {
	t.inFlight--
	t.wakes = now
	if ce {
		t.reduce(now)
		return
	}
	if t.threshold == 0 || t.window < t.threshold {
		t.window++
	} else {
		t.window += 1 / t.window
	}
}

// Dropped implements Source.
func (t *TCP) Dropped(now engine.Time, _ int) {
	t.inFlight--
	t.wakes = now
	t.reduce(now)
}

func (t *TCP) reduce(now engine.Time) {
	if now.Sub(t.reduced) < t.RTT {
		return
	}
	t.reduced = now
	t.window = max(2, t.window/2)
	t.threshold = t.window
}
