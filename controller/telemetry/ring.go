package telemetry

import (
	"encoding/binary"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	// ringTime is how far back a ring goes.
	ringTime = 15 * time.Minute

	// ringMost is how many bytes it holds at most.
	ringMost = 10 << 10
)

// Event says what happened between two reports.
type Event uint8

// Events, as bits.
const (
	Rebooted  Event = 1 << iota // the agent started
	Restarted                   // counters began again within one boot
	Lost                        // reports in between didn't come
	upset                       // there are Upsets
)

// Upsets are counts of what should not happen between two reports.
type Upsets struct {
	CarrierLosses uint64 // of the interface
	Comings       uint64 // of the interface, with another index
	Bypassed      uint64 // packets that passed unshaped
	Overflows     uint64 // of them, those that found the queue full
}

// Sample is what a router counted between two reports, and what it said with
// the later one.
type Sample struct {
	Time   time.Time     // when it arrived, by the controller's clock
	Span   time.Duration // since the report before, by the router's clock; 0: not known
	CPU    time.Duration // used by the agent
	Events Event
	Upsets

	Directions [2]SampleDirection
}

// SampleDirection is one direction of a Sample.
type SampleDirection struct {
	Shaped       bool
	Rate         engine.BitsPerSecond // that it is shaped to
	BacklogBytes uint64
	rollup.Counters
	Tins    [engine.MaxTins]rollup.Counters // in display order
	Sojourn engine.Histogram
}

// Load returns the rate of delivery.
func (s *Sample) Load(direction int) engine.BitsPerSecond {
	if s.Span <= 0 {
		return 0
	}
	return engine.BitsPerSecond(float64(s.Directions[direction].Bytes) * 8 / s.Span.Seconds())
}

// ring has the samples of one router as bytes: each a length and then integers
// of variable length, most of them one byte. What is the same in all samples of
// an idle line takes no bytes.
type ring struct {
	buf   []byte
	head  int       // where the oldest begins
	first time.Time // of the report before the oldest
	last  time.Time // of the newest
	rates [2]uint64 // as they were before the oldest
	now   [2]uint64 // as they are with the newest
}

// Bits of the second byte of an entry.
const (
	shapedDown = 1 << iota
	shapedUp
	rateDown
	rateUp
	eventShift = iota
)

// add appends a sample, and drops what is too old or too much.
func (r *ring) add(now time.Time, span time.Duration, cpu uint64, events Event, u Upsets, d *[2]rollup.Delta, s *[2]*engine.Stats) {
	if r.head == len(r.buf) {
		r.first, r.head, r.buf, r.rates = now, 0, r.buf[:0], r.now
		r.last = now
	}
	var space [4096]byte
	b := space[:0]
	b = binary.AppendUvarint(b, uint64(max(now.Sub(r.last), 0)/time.Millisecond))
	if u != (Upsets{}) {
		events |= upset
	}
	flags := byte(events) << eventShift
	for i := range s {
		if s[i] == nil {
			continue
		}
		flags |= shapedDown << i
		if uint64(s[i].Config.Rate) != r.now[i] {
			flags |= rateDown << i
		}
	}
	b = append(b, flags)
	for i := range s {
		if flags&(rateDown<<i) != 0 {
			r.now[i] = uint64(s[i].Config.Rate)
			b = binary.AppendUvarint(b, r.now[i])
		}
	}
	b = binary.AppendUvarint(b, uint64(span/time.Millisecond))
	b = binary.AppendUvarint(b, cpu)
	if events&upset != 0 {
		for _, n := range []uint64{u.CarrierLosses, u.Comings, u.Bypassed, u.Overflows} {
			b = binary.AppendUvarint(b, n)
		}
	}
	for i := range s {
		if s[i] != nil {
			b = binary.AppendUvarint(b, s[i].Backlog)
			b = appendDelta(b, &d[i])
		}
	}
	r.last = r.last.Add(max(now.Sub(r.last), 0) / time.Millisecond * time.Millisecond)
	r.append(b)
	r.trim(now)
}

// appendDelta appends what a direction counted: a bit for each tin that counted
// something, and the histogram of all tins as gaps and counts.
func appendDelta(b []byte, d *rollup.Delta) []byte {
	b = appendCounters(b, &d.Counters)
	var mask byte
	var h engine.Histogram
	used := 0
	for i := range d.Tins[:d.N] {
		t := &d.Tins[i]
		if t.Counters != (rollup.Counters{}) {
			mask |= 1 << i
		}
		for _, n := range t.Sojourn {
			if h[n.Index] == 0 {
				used++
			}
			h[n.Index] += n.Count
		}
	}
	b = append(b, mask)
	for i := range d.Tins[:d.N] {
		if mask&(1<<i) != 0 {
			b = appendCounters(b, &d.Tins[i].Counters)
		}
	}
	b = append(b, byte(used))
	at := 0
	for i, n := range h {
		if n == 0 {
			continue
		}
		if i == at {
			b = binary.AppendUvarint(b, n<<1)
		} else {
			b = append(binary.AppendUvarint(b, n<<1|1), byte(i-at))
		}
		at = i + 1
	}
	return b
}

// appendCounters appends counters; drops and marks, which most samples have
// none of, share a byte then.
func appendCounters(b []byte, c *rollup.Counters) []byte {
	b = binary.AppendUvarint(b, c.Bytes)
	if c.Drops == 0 && c.Marks == 0 {
		return binary.AppendUvarint(b, c.Packets<<1)
	}
	b = binary.AppendUvarint(b, c.Packets<<1|1)
	b = binary.AppendUvarint(b, c.Drops)
	return binary.AppendUvarint(b, c.Marks)
}

// append appends an entry. It moves what there is to the front where that makes
// room, and else grows by an eighth.
func (r *ring) append(entry []byte) {
	var length [binary.MaxVarintLen32]byte
	n := binary.PutUvarint(length[:], uint64(len(entry)))
	if need := len(r.buf) + n + len(entry); need > cap(r.buf) {
		live := len(r.buf) - r.head
		if want := live + n + len(entry); r.head > cap(r.buf)/8 && want <= cap(r.buf) {
			copy(r.buf, r.buf[r.head:])
			r.buf = r.buf[:live]
		} else {
			grown := make([]byte, live, want+want/8)
			copy(grown, r.buf[r.head:])
			r.buf = grown
		}
		r.head = 0
	}
	r.buf = append(append(r.buf, length[:n]...), entry...)
}

// trim drops the oldest entries while they are too old or too much.
func (r *ring) trim(now time.Time) {
	for r.head < len(r.buf) {
		c := cursor{b: r.buf[r.head:]}
		entry := c.take(int(c.uvarint()))
		e := cursor{b: entry}
		at := r.first.Add(time.Duration(e.uvarint()) * time.Millisecond)
		if now.Sub(at) <= ringTime && len(r.buf)-r.head <= ringMost {
			return
		}
		r.first = at
		e.readRates(e.byte(), &r.rates)
		r.head = len(r.buf) - len(c.b)
	}
	if len(r.buf) > 0 && now.Sub(r.last) > ringTime {
		r.buf, r.head = nil, 0 // it has gone silent
	}
}

// samples calls yield with each sample that came after from, oldest first. The
// sample is valid until yield returns.
func (r *ring) samples(from time.Time, yield func(*Sample)) {
	at, rates := r.first, r.rates
	var s Sample
	for c := (cursor{b: r.buf[r.head:]}); len(c.b) > 0; {
		e := cursor{b: c.take(int(c.uvarint()))}
		at = at.Add(time.Duration(e.uvarint()) * time.Millisecond)
		flags := e.byte()
		e.readRates(flags, &rates)
		if !at.After(from) {
			continue
		}
		s = Sample{Time: at, Events: Event(flags>>eventShift) &^ upset}
		s.Span = time.Duration(e.uvarint()) * time.Millisecond
		s.CPU = time.Duration(e.uvarint()) * time.Microsecond
		if Event(flags>>eventShift)&upset != 0 {
			s.Upsets = Upsets{e.uvarint(), e.uvarint(), e.uvarint(), e.uvarint()}
		}
		for i := range s.Directions {
			if flags&(shapedDown<<i) != 0 {
				s.Directions[i].Rate = engine.BitsPerSecond(rates[i])
				e.readDirection(&s.Directions[i])
			}
		}
		yield(&s)
	}
}

// cursor reads what this file wrote.
type cursor struct{ b []byte }

func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		panic("telemetry: ring is broken")
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) byte() byte { return c.take(1)[0] }

func (c *cursor) take(n int) []byte {
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) readRates(flags byte, rates *[2]uint64) {
	for i := range rates {
		if flags&(rateDown<<i) != 0 {
			rates[i] = c.uvarint()
		}
	}
}

func (c *cursor) readDirection(d *SampleDirection) {
	d.Shaped = true
	d.BacklogBytes = c.uvarint()
	c.readCounters(&d.Counters)
	mask := c.byte()
	for i := range d.Tins {
		if mask&(1<<i) != 0 {
			c.readCounters(&d.Tins[i])
		}
	}
	at := 0
	for range c.byte() {
		n := c.uvarint()
		if n&1 != 0 {
			at += int(c.byte())
		}
		d.Sojourn[at] = n >> 1
		at++
	}
}

func (c *cursor) readCounters(k *rollup.Counters) {
	k.Bytes = c.uvarint()
	packets := c.uvarint()
	k.Packets = packets >> 1
	if packets&1 != 0 {
		k.Drops = c.uvarint()
		k.Marks = c.uvarint()
	}
}
