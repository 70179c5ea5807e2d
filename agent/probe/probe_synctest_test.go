package probe

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// line is a network whose load and delay the test sets.
type line struct {
	mu      sync.Mutex
	at      [2]uint64 // bytes a second, down and up
	counted [2]uint64
	since   time.Time
	delay   time.Duration // 0: no answer
	err     error
	address string
	lookUps int
	echoes  []time.Time
}

func (l *line) lookUp(context.Context, string) (netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lookUps++
	if l.address == "" {
		return netip.Addr{}, errors.New("no such host")
	}
	return netip.ParseAddr(l.address)
}

func (l *line) echo(ctx context.Context, _ netip.Addr, wait time.Duration) (time.Duration, bool, error) {
	l.mu.Lock()
	delay, err := l.delay, l.err
	l.echoes = append(l.echoes, time.Now())
	l.mu.Unlock()
	switch {
	case err != nil:
		return 0, false, err
	case delay == 0:
		return 0, false, sleep(ctx, wait)
	}
	return delay, true, sleep(ctx, delay)
}

func (l *line) passed() (down, up uint64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pass()
	return l.counted[0], l.counted[1], nil
}

func (l *line) pass() {
	s := time.Since(l.since).Seconds()
	for i := range l.counted {
		l.counted[i] += uint64(float64(l.at[i]) * s)
	}
	l.since = time.Now()
}

// carry makes so many bits a second pass from now on.
func (l *line) carry(down, up uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pass()
	l.at = [2]uint64{down / 8, up / 8}
}

func (l *line) set(f func(*line)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l)
}

// seen returns what was asked of the line.
func (l *line) seen() (lookUps int, echoes []time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lookUps, l.echoes
}

// begin returns a prober on a line that is shaped to 100/20 Mbit/s.
func begin(t *testing.T) (*Prober, *line) {
	l := &line{since: time.Now(), delay: 12 * time.Millisecond, address: "192.0.2.1"}
	p := New(Config{Rates: func() (down, up engine.BitsPerSecond) { return 100e6, 20e6 }})
	p.net = l
	p.first = func(interval time.Duration) time.Duration { return interval / 2 } // no sample is under way at whole intervals
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p, l
}

func stats(t *testing.T, p *Prober) plan.ProbeStats {
	t.Helper()
	synctest.Wait()
	var st plan.ProbeStats
	if !p.Stats(&st) {
		t.Fatal("nothing is measured")
	}
	return st
}

// Samples are counted by the load that there was.
func TestLoads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, l := begin(t)
		p.Set(plan.Probe{Host: "far"})
		for _, c := range []struct {
			down, up uint64
			delay    time.Duration
			of       func(*plan.ProbeStats) *plan.ProbeDelay
		}{
			{1e6, 1e6, 12 * time.Millisecond, func(s *plan.ProbeStats) *plan.ProbeDelay { return &s.Idle }},
			{95e6, 1e6, 14 * time.Millisecond, func(s *plan.ProbeStats) *plan.ProbeDelay { return &s.Down }},
			{1e6, 19e6, 17 * time.Millisecond, func(s *plan.ProbeStats) *plan.ProbeDelay { return &s.Up }},
			{60e6, 11e6, 230 * time.Millisecond, func(s *plan.ProbeStats) *plan.ProbeDelay { return &s.Both }},
			{30e6, 1e6, 13 * time.Millisecond, func(s *plan.ProbeStats) *plan.ProbeDelay { return &s.Light }},
		} {
			l.carry(c.down, c.up)
			l.set(func(l *line) { l.delay = c.delay })
			before := stats(t, p)
			time.Sleep(10 * DefaultInterval)
			after := stats(t, p)
			d := *c.of(&after)
			for i, n := range c.of(&before).Delay {
				d.Delay[i] -= n
			}
			got := d.Delay.Quantile(1, 2)
			if n := d.Delay.Total(); n < 9 || n > 11 || got < c.delay*7/8 || got > c.delay*9/8 {
				t.Errorf("at %d/%d: %d samples, median %v, want 10 of %v", c.down, c.up, n, got, c.delay)
			}
		}
		st := stats(t, p)
		loaded := st.Loaded()
		if all := st.Idle.Delay.Total() + loaded.Delay.Total() + st.Light.Delay.Total(); all < 45 || all > 55 {
			t.Errorf("%d samples in all, want 50", all)
		}
	})
}

// Without shaping the most that was seen is what there is.
func TestUnshaped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, l := begin(t)
		p.cfg.Rates = func() (down, up engine.BitsPerSecond) { return 0, 0 }
		l.carry(80e6, 0)
		p.Set(plan.Probe{Host: "far"})
		time.Sleep(10 * DefaultInterval)
		l.carry(100e3, 0)
		l.set(func(l *line) { l.delay = 2 * time.Millisecond })
		time.Sleep(10 * DefaultInterval)
		st := stats(t, p)
		if n, idle := st.Down.Delay.Total(), st.Idle.Delay.Total(); n < 9 || idle < 9 || n+idle < 19 {
			t.Errorf("%d loaded and %d idle, want 10 each", n, idle)
		}
	})
}

// Off by default, and off again; the rate is bounded however often and however
// much is asked for.
func TestBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, l := begin(t)
		time.Sleep(24 * time.Hour)
		if lookUps, echoes := l.seen(); len(echoes) != 0 || lookUps != 0 || p.Stats(new(plan.ProbeStats)) {
			t.Errorf("%d echoes before anybody asked", len(echoes))
		}
		for i := range 3000 {
			p.Set(plan.Probe{Host: []string{"far", "farther"}[i%2], Interval: time.Millisecond})
			time.Sleep(10 * time.Millisecond)
		}
		p.Set(plan.Probe{Host: "far", Interval: time.Nanosecond})
		time.Sleep(time.Minute)
		_, echoes := l.seen()
		for i := range len(echoes) - 1 {
			if d := echoes[i+1].Sub(echoes[i]); d < minInterval {
				t.Fatalf("two echoes within %v", d)
			}
		}
		if n := len(echoes); n < 55 {
			t.Errorf("%d echoes", n)
		}
		p.Set(plan.Probe{})
		time.Sleep(time.Second) // what was begun is ended
		_, echoes = l.seen()
		time.Sleep(time.Hour)
		if _, now := l.seen(); len(now) != len(echoes) || p.Stats(new(plan.ProbeStats)) {
			t.Errorf("%d echoes after it was told to stop", len(now)-len(echoes))
		}
		p.Set(plan.Probe{Host: "far", Interval: 1000 * time.Hour})
		time.Sleep(10 * time.Hour)
		if _, now := l.seen(); len(now)-len(echoes) < 9 || len(now)-len(echoes) > 11 {
			t.Errorf("%d echoes in 10 hours, want one an hour at least", len(now)-len(echoes))
		}
	})
}

// What is lost is counted by its load, a name is looked up again, and what goes
// wrong is said and goes away.
func TestTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, l := begin(t)
		l.set(func(l *line) { l.address = "" })
		p.Set(plan.Probe{Host: "far"})
		time.Sleep(DefaultInterval)
		if st := stats(t, p); st.Error != "look up far: no such host" || st.Address != "" {
			t.Errorf("unknown: %+v", st)
		}
		l.set(func(l *line) { l.address = "224.0.0.1" })
		time.Sleep(DefaultInterval)
		if st := stats(t, p); st.Error != "far is 224.0.0.1, which is not the address of a host" {
			t.Errorf("multicast: %q", st.Error)
		}
		if _, echoes := l.seen(); len(echoes) != 0 {
			t.Errorf("%d echoes to nobody", len(echoes))
		}
		l.set(func(l *line) { l.address, l.err = "192.0.2.1", errors.New("no route") })
		time.Sleep(DefaultInterval)
		if st := stats(t, p); st.Error != "no route" || st.Address != "192.0.2.1" || st.Idle.Lost != 0 {
			t.Errorf("no route: %+v", st.Error)
		}
		l.set(func(l *line) { l.err, l.delay, l.lookUps = nil, 0, 0 })
		l.carry(90e6, 0)
		time.Sleep(9 * DefaultInterval)
		st := stats(t, p)
		if st.Error != "" || st.Down.Lost < 8 || st.Idle.Lost != 0 || st.Down.Delay.Total() != 0 {
			t.Errorf("no answers: %q, lost %d", st.Error, st.Down.Lost)
		}
		if n, _ := l.seen(); n < 2 || n > 4 {
			t.Errorf("looked up %d times, want each %d losses", n, lost)
		}
		l.set(func(l *line) { l.delay, l.lookUps = time.Millisecond, 0 })
		time.Sleep(time.Hour)
		if n, _ := l.seen(); n < 5 || n > 7 {
			t.Errorf("looked up %d times in an hour, want each %v", n, lookUpEvery)
		}
	})
}

// A new host begins anew, another interval goes on.
func TestChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := begin(t)
		p.Set(plan.Probe{Host: "far"})
		time.Sleep(10 * DefaultInterval)
		st := stats(t, p)
		before := st.Idle.Delay.Total()
		p.Set(plan.Probe{Host: "far", Interval: time.Minute})
		st = stats(t, p)
		if n := st.Idle.Delay.Total(); n != before || n < 9 {
			t.Errorf("%d samples became %d", before, n)
		}
		p.Set(plan.Probe{Host: "near", Interval: time.Minute})
		if st = stats(t, p); st.Host != "near" || st.Idle.Delay.Total() != 0 {
			t.Errorf("another host: %+v", st.Host)
		}
	})
}
