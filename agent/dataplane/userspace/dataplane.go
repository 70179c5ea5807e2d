// Package userspace is the data plane that runs the engine on NFQUEUE: one
// packet loop for each direction, on kernels with or without sch_cake.
//
// A loop reads a batch of packets, sends what is due, gives its verdicts in a
// batch, and sleeps until the next packet is due or one arrives. It is the only
// one that touches its scheduler and its queue; changes and statistics are
// calls that it answers between two rounds.
//
// A direction without a rate is left alone: its packets don't go through the
// queue at all, and its statistics stand still. Only washing needs a rule
// there.
//
// What fails lets packets pass: see package nfqueue, and loop.guardedRound for
// our own faults. An agent that is stopped (SIGSTOP) or hangs holds the packets
// that were queued, and new ones pass after nfqueue.Lifetime. The kernel's queue
// is bounded at the scheduler's memory limit over 768 bytes, plus 4096 packets;
// what finds it full passes.
package userspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const (
	renewEvery = nfqueue.Lifetime / 4

	// While hardly a packet comes the keeper sleeps longer, as its waking up
	// is much of what an idle home costs: at most this many moves of the loops
	// between two renewals, for some renewals in a row. The rules live no
	// longer for it: an agent that is stopped holds packets for Lifetime at
	// most, in a quiet home too.
	quietEvery = nfqueue.Lifetime / 2
	quietMoves = 8
	quietTicks = 10

	// answerTime is how long Stats, Clear and Close wait for a packet loop.
	answerTime = 2 * time.Second
)

// Config is how a Dataplane is opened.
type Config struct {
	Interface string
	Logger    hclog.Logger
	MaxRate   engine.BitsPerSecond // what this router can shape; 0 = not known
	Seed      uint64               // randomness of the schedulers
}

// rules are the interface's packet rules: an nfqueue.Rules, or a fake.
type rules interface {
	Install(down, up nfqueue.Direction) error
	Set(down, up nfqueue.Direction) error
	Renew(life time.Duration) error
	Counters() (down, up uint64, err error)
	Remove() error
	Close() error
}

// Dataplane implements dataplane.Dataplane.
type Dataplane struct {
	cfg      Config
	log      hclog.Logger
	start    time.Time
	parts    parts
	down, up *loop

	stopKeeper chan struct{}
	keeper     sync.WaitGroup
	hung       atomic.Pointer[loop] // that stands still, as keeper sees it; nil: both move

	mu       sync.Mutex // guards what follows, and serializes the methods
	link     *plan.Link // what runs; nil if nothing
	dirs     [2]nfqueue.Direction
	bypassed [2]uint64
	closed   bool
	seen     [2]snapshot // by Stats, of each loop
}

// snapshot is what a loop said when moved had a value.
type snapshot struct {
	valid    bool
	moved    uint32
	counters nfqueue.Counters
	stats    engine.Stats
}

var _ dataplane.Dataplane = (*Dataplane)(nil)

// parts are what a Dataplane runs on.
type parts struct {
	rules   rules
	queues  [2]queue // down, up
	numbers [2]uint16
	device  device
	speed   func() engine.BitsPerSecond // of the interface; 0 = it has none
	close   func() error                // what is not closed otherwise
}

// Open opens the sockets in the network namespace of the calling thread and
// starts the packet loops. No packet is touched before the first Apply.
func Open(c Config) (*Dataplane, error) {
	p, err := openParts(c.Interface)
	if err != nil {
		return nil, fmt.Errorf("open data plane on %s: %w", c.Interface, err)
	}
	return newDataplane(c, p), nil
}

func openParts(iface string) (p parts, err error) {
	var closers []func() error
	defer func() {
		if err == nil {
			return
		}
		for _, c := range closers {
			err = errors.Join(err, c())
		}
	}()
	control, err := openControl()
	if err != nil {
		return p, err
	}
	closers = append(closers, control.close)
	p.close = control.close
	p.speed = func() engine.BitsPerSecond { return control.speed(iface) }
	if p.device, err = control.device(iface); err != nil {
		return p, err
	}
	r, err := nfqueue.OpenRules(iface)
	if err != nil {
		return p, err
	}
	p.rules = r
	closers = append(closers, r.Close)
	for i := range p.queues {
		q, err := nfqueue.Open(nfqueue.Config{MaxLen: slack})
		if err != nil {
			return p, err
		}
		p.queues[i], p.numbers[i] = q, q.Number
		closers = append(closers, q.Close)
	}
	return p, nil
}

func newDataplane(c Config, p parts) *Dataplane {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	d := &Dataplane{cfg: c, log: c.Logger.Named("userspace"), start: time.Now(), parts: p, stopKeeper: make(chan struct{})}
	d.down = newLoop("down", p.queues[0], p.device, c.Seed, d.now, d.log)
	d.up = newLoop("up", p.queues[1], p.device, ^c.Seed, d.now, d.log)
	go d.down.run() // ended and waited for by Close
	go d.up.run()
	d.keeper.Go(d.keep)
	return d
}

// now is the schedulers' clock: monotonic, so that setting the wall clock does
// nothing.
func (d *Dataplane) now() engine.Time { return engine.Time(time.Since(d.start)) }

// Apply implements dataplane.Dataplane.
func (d *Dataplane) Apply(ctx context.Context, link plan.Link) (dataplane.Effective, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return dataplane.Effective{}, os.ErrClosed
	}
	if err := d.check("down", link.Down); err != nil {
		return dataplane.Effective{}, err
	}
	if err := d.check("up", link.Up); err != nil {
		return dataplane.Effective{}, err
	}
	if err := d.apply(ctx, link); err != nil {
		return dataplane.Effective{}, fmt.Errorf("shape %s: %w", d.cfg.Interface, err)
	}
	d.link = &link
	return dataplane.Effective{Link: link}, nil
}

// check refuses what this router can't run.
func (d *Dataplane) check(name string, c engine.Config) error {
	if err := c.Validate(); err != nil {
		return &dataplane.RejectedError{Field: name, Reason: err.Error()}
	}
	if limit := d.cfg.MaxRate; limit != 0 && c.Rate > limit {
		return &dataplane.RejectedError{Field: name + ".rate", Reason: fmt.Sprintf("%s is more than the %s that this router may shape", c.Rate, limit)}
	}
	if speed := d.parts.speed(); speed != 0 && c.Rate > speed {
		return &dataplane.RejectedError{Field: name + ".rate", Reason: fmt.Sprintf("%s is more than the speed of %s, %s", c.Rate, d.cfg.Interface, speed)}
	}
	return nil
}

func (d *Dataplane) apply(ctx context.Context, link plan.Link) error {
	dirs := [2]nfqueue.Direction{
		direction(link.Down, d.parts.numbers[0]),
		direction(link.Up, d.parts.numbers[1]),
	}
	// The schedulers come first where a direction begins, so that no packet
	// meets one without a configuration.
	if err := d.configure(ctx, d.down, link.Down); err != nil {
		return err
	}
	if err := d.configure(ctx, d.up, link.Up); err != nil {
		if d.link != nil {
			err = errors.Join(err, d.configure(ctx, d.down, d.link.Down))
		}
		return err
	}
	var err error
	switch {
	case d.link == nil:
		err = d.install(dirs)
	case dirs != d.dirs:
		err = d.parts.rules.Set(dirs[0], dirs[1])
	}
	if err != nil {
		return err
	}
	d.dirs = dirs
	return nil
}

func (d *Dataplane) install(dirs [2]nfqueue.Direction) error {
	err := d.parts.rules.Install(dirs[0], dirs[1])
	if errors.Is(err, nfqueue.ErrUnsupported) {
		return errors.Join(dataplane.ErrUnsupported, err)
	}
	return err
}

// direction leaves a direction alone that has no rate.
func direction(c engine.Config, queue uint16) nfqueue.Direction {
	return nfqueue.Direction{On: c.Rate != 0 || c.Autorate, Queue: queue, Wash: c.Wash}
}

func (d *Dataplane) configure(ctx context.Context, l *loop, c engine.Config) error {
	var err error
	if callErr := l.do(ctx, func() { err = l.apply(c) }); callErr != nil {
		return callErr
	}
	return err
}

// Clear implements dataplane.Dataplane.
func (d *Dataplane) Clear(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clear(ctx)
}

func (d *Dataplane) clear(ctx context.Context) error {
	if d.link == nil {
		return nil
	}
	// First no more packets come, then those that wait go, and only then the
	// hooks may go: the kernel drops with them what is still queued.
	err := d.parts.rules.Set(nfqueue.Direction{}, nfqueue.Direction{})
	if errors.Is(err, os.ErrNotExist) { // somebody was faster
		err = nil
	}
	for _, l := range []*loop{d.down, d.up} {
		var e error
		if callErr := l.do(ctx, func() { e = l.release() }); callErr != nil && !errors.Is(callErr, errEnded) {
			e = callErr
		}
		err = errors.Join(err, e)
	}
	err = errors.Join(err, d.parts.rules.Remove())
	if err != nil {
		return fmt.Errorf("stop shaping %s: %w", d.cfg.Interface, err)
	}
	d.link = nil
	d.bypassed = [2]uint64{}
	return nil
}

// Stats implements dataplane.Dataplane.
func (d *Dataplane) Stats(st *dataplane.Stats) (ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.link == nil {
		return false
	}
	// Before the loops' counters, so that what passes in between does not look
	// like bypassed.
	passed := [2]uint64{}
	var err error
	if passed[0], passed[1], err = d.parts.rules.Counters(); err != nil {
		d.log.Debug("counters can't be read", "error", err)
	}
	*st = dataplane.Stats{}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	for i, l := range []*loop{d.down, d.up} {
		out := &st.Down
		if l == d.up {
			out = &st.Up
		}
		if err := l.look(ctx, &d.seen[i]); err != nil {
			d.log.Debug("a packet loop gives no statistics", "error", err)
			return false
		}
		*out = d.seen[i].stats
		c := d.seen[i].counters
		st.Batches += c.Batches
		st.Packets += c.Packets
		st.QueueOverflows += c.Overflows
		if accepted := c.Accepted - c.Errors; d.dirs[i].On && passed[i] > accepted {
			d.bypassed[i] = max(d.bypassed[i], passed[i]-accepted)
		}
		st.BypassedPackets += d.bypassed[i]
	}
	return true
}

// look brings a snapshot up to date. A loop that sleeps and has not moved is not
// woken: waking is most of what an idle home costs.
func (l *loop) look(ctx context.Context, s *snapshot) error {
	select {
	case <-l.done:
		return l.ended()
	default:
	}
	if s.valid && s.moved == l.moved.Load() && l.busy.Load()%2 == 0 {
		return nil
	}
	s.valid = false
	return l.do(ctx, func() {
		*s = snapshot{valid: true, moved: l.moved.Load(), counters: l.q.Counters()}
		if l.sched != nil {
			l.sched.Stats(l.now(), &s.stats)
			s.stats.Config = l.cfg
		}
	})
}

// Close implements dataplane.Dataplane.
func (d *Dataplane) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	close(d.stopKeeper)
	d.keeper.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	return errors.Join(d.clear(ctx), d.down.stop(ctx), d.up.stop(ctx), d.parts.rules.Close(), d.parts.close())
}

// keep renews the rules as long as both loops move. Without it they run out
// and packets pass unshaped.
func (d *Dataplane) keep() {
	every := renewEvery
	t := time.NewTimer(every)
	defer t.Stop()
	var busy [2]uint32
	var moved uint32
	quiet := 0
	for {
		select {
		case <-d.stopKeeper:
			return
		case <-t.C:
		}
		var hung *loop
		for i, l := range []*loop{d.down, d.up} {
			var h bool
			if busy[i], h = l.hangs(busy[i]); h {
				hung = l
			}
		}
		switch before := d.hung.Swap(hung); {
		case hung != nil && before == nil:
			d.log.Error("a packet loop stands still, packets pass unshaped", "direction", hung.name)
		case hung == nil && before != nil:
			d.log.Info("the packet loops move again")
		}
		before := moved
		moved = d.down.moved.Load() + d.up.moved.Load()
		quiet++
		if moved-before > quietMoves || hung != nil {
			quiet = 0
		}
		every = renewEvery
		if quiet >= quietTicks {
			every = quietEvery
		}
		if hung == nil {
			d.renew()
		}
		t.Reset(every)
	}
}

// Health returns an error while a packet loop stands still: packets pass
// unshaped until it moves again. One that has ended is no matter of health:
// Apply tells.
func (d *Dataplane) Health() error {
	l := d.hung.Load()
	if l == nil {
		return nil
	}
	select {
	case <-l.done:
		return nil
	default:
		return fmt.Errorf("the %s packet loop stands still: packets pass unshaped until it moves", l.name)
	}
}

// renew lets the rules live for Lifetime from now on.
func (d *Dataplane) renew() {
	// A method that is at work may wait for a loop; the rules outlive that.
	if !d.mu.TryLock() {
		return
	}
	defer d.mu.Unlock()
	if d.link == nil || d.closed {
		return
	}
	err := d.parts.rules.Renew(nfqueue.Lifetime)
	if errors.Is(err, os.ErrNotExist) {
		d.log.Warn("somebody has removed the rules, they are made again")
		err = d.install(d.dirs)
	}
	if err != nil {
		d.log.Warn("rules are not renewed", "error", err)
	}
}
