package door

import (
	"testing"
	"time"
)

// cpu is a machine that answers hellos one after another.
type cpu struct {
	each  time.Duration
	queue []time.Time // when they came
	free  time.Time
}

// run admits at the pace's rate for a time while everybody waits, and returns
// how many were answered and the longest queue of the second half.
func (c *cpu) run(p *pace, now time.Time, whole time.Duration) (end time.Time, answered, longest int) {
	bucket := NewBucket(p.rate, 1)
	const tick = time.Millisecond
	for end = now.Add(whole); now.Before(end); now = now.Add(tick) {
		p.look(now)
		bucket.SetRate(p.rate, 1)
		for {
			if _, ok := bucket.Take(now, 1); !ok {
				p.hold(0)
				break
			}
			p.heard()
			c.queue = append(c.queue, now)
		}
		for len(c.queue) > 0 {
			begin := c.free
			if begin.Before(c.queue[0]) {
				begin = c.queue[0]
			}
			done := begin.Add(c.each)
			if done.After(now) {
				break
			}
			p.answered(done.Sub(c.queue[0]), true)
			c.free, c.queue = done, c.queue[1:]
			answered++
		}
		if end.Sub(now) < whole/2 {
			longest = max(longest, len(c.queue))
		}
	}
	return now, answered, longest
}

// breaks loses those who wait.
func (c *cpu) breaks(p *pace) {
	for range c.queue {
		p.answered(0, false)
	}
	c.queue = nil
}

// A machine that does fewer handshakes than the most is sent about as many as
// it does, and those wait for little; when it is faster again, more.
func TestPace(t *testing.T) {
	p, now := newPace(1000), time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	slow := &cpu{each: 10 * time.Millisecond, free: now}
	now, answered, longest := slow.run(&p, now, time.Minute)
	slow.breaks(&p)
	if answered < 80*60 || longest > 100 {
		t.Errorf("a machine for 6000 did %d, with up to %d in its queue", answered, longest)
	}
	fast := &cpu{each: 100 * time.Microsecond, free: now}
	now, _, longest = fast.run(&p, now, 15*time.Second)
	fast.breaks(&p)
	if p.rate != 1000 || longest > 10 {
		t.Errorf("a fast machine is sent %v a second, with up to %d in its queue", p.rate, longest)
	}
	// Calm: what was found grows old, as fast as if somebody had looked all the time.
	now = now.Add(paceEvery)
	p.look(now)
	p.rate = 500
	now = now.Add(3 * time.Second)
	p.look(now)
	if want := 500 + 3*1000*paceStep*float64(time.Second/paceEvery); p.rate != want {
		t.Errorf("three calm seconds changed the rate from 500 to %v, want %v", p.rate, want)
	}
	now = now.Add(time.Hour)
	p.look(now)
	if p.rate != 1000 {
		t.Errorf("after a calm hour the rate is %v", p.rate)
	}
	// A machine that stands still: the rate has a floor, and those who hang up
	// while they wait count as nothing.
	for range 100 {
		p.heard()
		now = now.Add(time.Second)
		p.look(now)
	}
	if want := 1000 * paceLeast; p.rate != want {
		t.Errorf("a machine that stands still is sent %v a second, want %v", p.rate, want)
	}
	for range 100 {
		p.answered(0, false)
	}
	if p.unanswered != 0 {
		t.Errorf("%d are waited for", p.unanswered)
	}
}

// What was offered is the rate over time, whenever somebody asks.
func TestAdmissionTotals(t *testing.T) {
	p, now := newPace(1000), time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	p.total(now)
	later := func(d time.Duration) float64 {
		now = now.Add(d)
		return p.total(now).Offered
	}
	for _, want := range []float64{10_000, 20_000} {
		if got := later(10 * time.Second); got != want {
			t.Errorf("offered %v, want %v", got, want)
		}
	}
	p.heard()
	now = now.Add(time.Second)
	p.look(now)
	now = now.Add(time.Second)
	p.look(now) // nobody was answered: less from here on
	if p.rate >= 1000 {
		t.Fatalf("the rate is %v", p.rate)
	}
	before := p.total(now).Offered
	if got, want := later(2*time.Second)-before, 2*p.rate; got < want-1 || got > want+1 {
		t.Errorf("%v offered in two seconds at %v a second", got, p.rate)
	}
	if got := later(-time.Hour); got != p.totals.Offered || got < before {
		t.Errorf("a clock that goes back: %v", got)
	}
	p.hold(time.Second)
	p.hold(time.Millisecond)
	if got := p.total(now).Limited; got != 1001*time.Millisecond {
		t.Errorf("limited for %v", got)
	}
}
