// Package probe measures the delay to a host and back through the shaped
// interface, apart for an idle and a loaded link, so that what shaping does for
// a customer can be said in milliseconds.
//
// It is off until Set names a host. Then it sends one ICMP echo each interval,
// and looks at what passes the interface from a moment before the echo until a
// moment after its answer: that is the load of this sample. A direction is
// loaded at half the rate that it is shaped to. One that is not shaped has no
// rate that is known: there the highest that any sample saw stands in.
//
// Echoes leave by the shaped interface whatever the routes say, as those of any
// program on the router do, so that both directions queue them as a flow of its
// own. What the router's CPU is late counts.
package probe

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Bounds of the time between two echoes.
const (
	DefaultInterval = 10 * time.Second
	minInterval     = time.Second
	maxInterval     = time.Hour
)

const (
	lead   = 100 * time.Millisecond // before the echo
	window = 200 * time.Millisecond // in all, at least
	wait   = 3 * time.Second        // for an answer

	// lookUpEvery is how long an address of a name holds; lost is after how many
	// echoes in a row without an answer it holds no longer.
	lookUpEvery = 10 * time.Minute
	lost        = 3

	// leastPeak is the rate that an unshaped direction is taken to have.
	leastPeak = engine.BitsPerSecond(1_000_000)
)

// Config is what a Prober needs.
type Config struct {
	Interface string
	// Rates returns what the directions are shaped to; 0: one is not shaped.
	Rates  func() (down, up engine.BitsPerSecond)
	Logger hclog.Logger // nil: nothing is logged
}

// network is where echoes go, or a fake.
type network interface {
	// lookUp returns the address of a host.
	lookUp(ctx context.Context, host string) (netip.Addr, error)
	// echo sends one and waits for the answer; ok is false if none came in time.
	echo(ctx context.Context, to netip.Addr, wait time.Duration) (delay time.Duration, ok bool, err error)
	// passed returns the bytes that have passed the interface.
	passed() (down, up uint64, err error)
}

// Prober measures. Run has one caller; the other methods may be called from any
// goroutine.
type Prober struct {
	cfg Config
	log hclog.Logger
	net network
	set chan plan.Probe // capacity 1: only the newest counts
	// first is when, within the interval, the first echo goes out. A fleet that
	// was asked at one moment does not answer at one.
	first func(interval time.Duration) time.Duration

	mu    sync.Mutex // guards what follows
	on    bool
	stats plan.ProbeStats

	// Of Run.
	probe      plan.Probe
	address    netip.Addr
	lookedUp   time.Time
	losses     int
	echoed     time.Time
	peak       [2]engine.BitsPerSecond // of down and up, that samples saw
	complained bool
}

// New returns a Prober that is off.
func New(c Config) *Prober {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return &Prober{
		cfg: c, log: c.Logger, net: device(c.Interface), set: make(chan plan.Probe, 1),
		first: func(interval time.Duration) time.Duration { return rand.N(interval) },
	}
}

// Set says what to measure from now on; no host: nothing. Counters go on if the
// host is the same. It has one caller at a time.
func (p *Prober) Set(to plan.Probe) {
	for {
		select {
		case p.set <- to:
			return
		default:
		}
		select {
		case <-p.set:
		default:
		}
	}
}

// Stats fills st; ok is false while nothing is measured.
func (p *Prober) Stats(st *plan.ProbeStats) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.on {
		*st = p.stats
	}
	return p.on
}

// Run measures until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	var due <-chan time.Time // nil: off
	var timer *time.Timer
	stop := func() {
		if timer != nil {
			timer.Stop()
		}
		timer, due = nil, nil
	}
	next := func(in time.Duration) {
		stop()
		timer = time.NewTimer(in)
		due = timer.C
	}
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case to := <-p.set:
			to.Interval = interval(to.Interval)
			if to == p.probe || to.Host == "" && p.probe.Host == "" {
				continue
			}
			p.begin(to)
			if to.Host == "" {
				stop()
				continue
			}
			// Being asked often makes no more echoes.
			next(max(p.first(to.Interval), time.Until(p.echoed.Add(minInterval))))
		case <-due:
			began := time.Now()
			p.sample(ctx)
			next(max(p.probe.Interval-time.Since(began), 0))
		}
	}
}

func interval(asked time.Duration) time.Duration {
	if asked <= 0 {
		return DefaultInterval
	}
	return min(max(asked, minInterval), maxInterval)
}

// begin takes over what to measure.
func (p *Prober) begin(to plan.Probe) {
	same := to.Host == p.probe.Host
	p.probe = to
	if same {
		return
	}
	p.address, p.losses, p.complained = netip.Addr{}, 0, false
	p.log.Info("delay to a host is measured", "peer", to.Host, "wait", to.Interval)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.on, p.stats = to.Host != "", plan.ProbeStats{Host: to.Host}
}

// sample sends one echo and counts what became of it.
func (p *Prober) sample(ctx context.Context) {
	delay, answered, load, err := p.measure(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil && !p.complained {
		p.log.Warn("delay is not measured", "peer", p.probe.Host, "error", err)
	}
	p.complained = err != nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Error, p.stats.Address = "", ""
	if p.address.IsValid() {
		p.stats.Address = p.address.String()
	}
	if err != nil {
		p.stats.Error = err.Error()
		return
	}
	d := load.of(&p.stats)
	if !answered {
		d.Lost++
		return
	}
	d.Delay.Observe(delay)
}

func (p *Prober) measure(ctx context.Context) (delay time.Duration, answered bool, l load, err error) {
	if !p.address.IsValid() || time.Since(p.lookedUp) >= lookUpEvery || p.losses >= lost {
		if p.address, err = p.find(ctx); err != nil {
			return 0, false, l, err
		}
		p.lookedUp, p.losses = time.Now(), 0
	}
	began := time.Now()
	before, err := p.bytes()
	if err != nil {
		return 0, false, l, err
	}
	if sleep(ctx, lead) != nil {
		return 0, false, l, ctx.Err()
	}
	p.echoed = time.Now()
	delay, answered, err = p.net.echo(ctx, p.address, wait)
	if err != nil {
		return 0, false, l, err
	}
	if answered {
		p.losses = 0
	} else {
		p.losses++
	}
	if sleep(ctx, window-time.Since(began)) != nil {
		return 0, false, l, ctx.Err()
	}
	after, err := p.bytes()
	if err != nil {
		return 0, false, l, err
	}
	return delay, answered, p.load(before, after, time.Since(began)), nil
}

// find returns the address of the host.
func (p *Prober) find(ctx context.Context) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	a, err := p.net.lookUp(ctx, p.probe.Host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look up %s: %w", p.probe.Host, err)
	}
	if a.IsMulticast() || a.IsUnspecified() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return netip.Addr{}, fmt.Errorf("%s is %s, which is not the address of a host", p.probe.Host, a)
	}
	return a, nil
}

func (p *Prober) bytes() (b [2]uint64, err error) {
	b[0], b[1], err = p.net.passed()
	return b, err
}

// load is how much of the link was in use, down and up, in eighths of the rate.
type load [2]int

// load returns what passed within a time, compared with what may.
func (p *Prober) load(before, after [2]uint64, within time.Duration) (l load) {
	var rates [2]engine.BitsPerSecond
	rates[0], rates[1] = p.cfg.Rates()
	for i := range l {
		if after[i] < before[i] { // another interface of that name
			continue
		}
		rate := engine.BitsPerSecond(float64(after[i]-before[i]) * 8 / within.Seconds())
		p.peak[i] = max(p.peak[i], rate, leastPeak)
		may := rates[i]
		if may == 0 {
			may = p.peak[i]
		}
		l[i] = int(rate * 8 / may)
	}
	return l
}

// of returns where a sample of the load is counted.
func (l load) of(st *plan.ProbeStats) *plan.ProbeDelay {
	down, up := l[0] >= 4, l[1] >= 4
	switch {
	case down && up:
		return &st.Both
	case down:
		return &st.Down
	case up:
		return &st.Up
	case l[0] == 0 && l[1] == 0:
		return &st.Idle
	default:
		return &st.Light
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return ctx.Err()
}
