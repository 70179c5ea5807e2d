// Package userspace is the data plane that runs the engine on NFQUEUE, on
// kernels with or without sch_cake: one packet loop for both directions, or one
// for each where the link is fast and there are processors for two.
//
// A loop reads a batch of packets, sends what is due, gives its verdicts in a
// batch, and sleeps until the next packet is due or one arrives. It is the only
// one that touches its schedulers and its queue; changes and statistics are
// calls that it answers between two rounds.
//
// A direction without a rate is left alone: its packets don't go through the
// queue at all, and its statistics stand still. Only washing needs a rule
// there.
//
// CAKE decides on all packets of a direction in one place, so there are MaxLoops at
// most. Two on one processor would wait for each other's turn. On several they
// share the dearest part of a packet's way: three quarters of what it costs a
// loop's thread is the kernel that sends it within the verdict (BenchmarkThread of
// package nfqueue). What a router can shape ends where the busiest thread has no
// time left, and that one has a quarter less to do with two loops, at 115/12 and at
// 400/400 Mbit/s. But both together cost half as much again, as two wake up for
// what one did (test/netns/benchagent: "busiest" and "cpu"). So the second begins
// with the first link of apartFrom or more, where the slowest router with two
// processors has half of one left.
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
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/offload"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const (
	renewEvery = nfqueue.Lifetime / 4

	// While hardly a packet comes, at most this many moves of the loop between
	// two renewals, for some renewals in a row, the keeper sleeps and the rules
	// run out: its waking up is most of what an idle home costs. The next packet
	// wakes both. It stays awake if many moves follow before they run out again.
	quietMoves = 8
	quietTicks = 10

	// offloadEvery is how often it is looked whether somebody has turned on flow
	// offload.
	offloadEvery = time.Minute

	// afreshTold is how long it is told that a packet loop has started afresh:
	// longer than what asks for it may sleep.
	afreshTold = time.Minute

	// answerTime is how long Stats, Clear and Close wait for a packet loop.
	answerTime = 2 * time.Second
)

// MaxLoops is one packet loop for each direction.
const MaxLoops = 2

// apartFrom is the rate, both directions together, from which on each direction has
// its own packet loop where there are processors for two. One loop holds 225/23 Mbit/s
// on 500 MIPS (deploy/lab).
const apartFrom engine.BitsPerSecond = 125_000_000

// Config is how a Dataplane is opened.
type Config struct {
	Interface string
	Logger    hclog.Logger
	MaxRate   engine.BitsPerSecond // what this router can shape; 0 = not known
	Seed      uint64               // randomness of the schedulers
	Loops     int                  // packet loops, at most MaxLoops; 0 = as the link's rate and the processors want it
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

// looker knows what takes packets past netfilter's hooks: an offload.Watch, or a
// fake.
type looker interface {
	Look(now, ppp bool) ([]offload.Table, error)
	Close() error
}

// Dataplane implements dataplane.Dataplane.
type Dataplane struct {
	cfg   Config
	log   hclog.Logger
	start time.Time
	parts parts
	loops []*loop // the second sleeps until the directions are apart

	stopKeeper chan struct{}
	wakeKeeper chan struct{} // capacity 1
	begins     atomic.Bool   // the keeper shall stay awake for a while
	asleep     atomic.Bool   // the keeper is, and somebody else has to look whether a loop hangs
	keeper     sync.WaitGroup
	hung       atomic.Bool            // a loop stands still, as keeper sees it
	bypass     atomic.Pointer[string] // what takes packets past us, as it was last looked; nil: nothing

	healthMu sync.Mutex // guards the next
	sights   []sight    // of loops

	mu       sync.Mutex // guards what follows, and serializes the methods
	link     *plan.Link // what runs; nil if nothing
	apart    bool       // upload has the second loop; it stays so until nothing runs
	dirs     [2]nfqueue.Direction
	bypassed [2]uint64
	before   [2]uint64 // packets that the loops had got when the rules were made
	closed   bool
	seen     []snapshot // of loops, by Stats
}

// sight is a loop's busy count, and since when it has been so.
type sight struct {
	busy uint32
	at   time.Time
}

// snapshot is what the loop knows at a moment.
type snapshot struct {
	counters nfqueue.Counters
	stats    [2]engine.Stats
}

var _ dataplane.Dataplane = (*Dataplane)(nil)

// parts are what a Dataplane runs on.
type parts struct {
	rules   rules
	offload looker
	queues  []queue     // of the loops
	numbers [][2]uint16 // down, up of each queue
	device  device
	speed   func() engine.BitsPerSecond // of the interface; 0 = it has none
	close   func() error                // what is not closed otherwise
}

// Open opens the sockets in the network namespace of the calling thread and
// starts the packet loops. No packet is touched before the first Apply.
func Open(c Config) (*Dataplane, error) {
	loops := c.Loops
	if loops == 0 {
		loops = min(runtime.NumCPU(), MaxLoops)
	}
	if loops < 1 || loops > MaxLoops {
		return nil, fmt.Errorf("open data plane on %s: %d packet loops are asked for, there can be 1 or %d", c.Interface, loops, MaxLoops)
	}
	p, err := openParts(c.Interface, loops)
	if err != nil {
		return nil, fmt.Errorf("open data plane on %s: %w", c.Interface, err)
	}
	return newDataplane(c, p), nil
}

func openParts(iface string, loops int) (p parts, err error) {
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
	look, err := offload.Open(iface)
	if err != nil {
		return p, err
	}
	p.offload = look
	closers = append(closers, look.Close)
	r, err := nfqueue.OpenRules(iface)
	if err != nil {
		return p, err
	}
	p.rules = r
	closers = append(closers, r.Close)
	for range loops {
		q, err := nfqueue.Open(nfqueue.Config{MaxLen: slack, Copy: nfqueue.ShortCopy})
		if err != nil {
			return p, err
		}
		closers = append(closers, q.Close)
		p.queues = append(p.queues, q)
		p.numbers = append(p.numbers, [2]uint16{q.DownNumber(), q.UpNumber()})
	}
	return p, nil
}

func newDataplane(c Config, p parts) *Dataplane {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	d := &Dataplane{cfg: c, log: c.Logger.Named("userspace"), start: time.Now(), parts: p, stopKeeper: make(chan struct{}), wakeKeeper: make(chan struct{}, 1)}
	d.sights, d.seen = make([]sight, len(p.queues)), make([]snapshot, len(p.queues))
	for _, q := range p.queues {
		l := newLoop(q, p.device, c.Seed, d.now, d.log)
		l.woken = d.woken
		if q, ok := q.(*nfqueue.Queue); ok {
			q.Parked = func(parked bool) { l.own(!parked) }
		}
		d.loops = append(d.loops, l)
		go l.run() // ended and waited for by Close
	}
	d.keeper.Go(d.keep)
	return d
}

// carrier is the number of the loop that a direction's packets go through.
func (d *Dataplane) carrier(direction int) int {
	if direction == up && d.apart {
		return 1
	}
	return 0
}

// wantsApart tells whether each direction of a link is to have its own loop.
func (d *Dataplane) wantsApart(link plan.Link) bool {
	return len(d.loops) == MaxLoops && (d.cfg.Loops == MaxLoops || link.Down.Rate+link.Up.Rate >= apartFrom)
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
	if c.Fwmark&nfqueue.Marks != 0 {
		return &dataplane.RejectedError{Field: name + ".fwmark", Reason: fmt.Sprintf("0x%x has bits of 0x%x, which the data plane itself needs", c.Fwmark, nfqueue.Marks)}
	}
	if limit := d.cfg.MaxRate; limit != 0 && c.Rate > limit {
		return &dataplane.RejectedError{Field: name + ".rate", Reason: fmt.Sprintf("%s is more than the %s that this router may shape", c.Rate, limit)}
	}
	return dataplane.TooFast(name, c.Rate, d.parts.speed(), d.cfg.Interface)
}

// apply runs a link, and moves upload to the second loop if it is to have it: what
// waits in the first goes at once, a few milliseconds' worth, and its statistics
// begin anew.
func (d *Dataplane) apply(ctx context.Context, link plan.Link) error {
	if d.apart || !d.wantsApart(link) {
		return d.run(ctx, link)
	}
	d.apart = true
	if err := d.run(ctx, link); err != nil {
		d.apart = false
		return err
	}
	first := d.loops[0]
	return first.call(ctx, func() error { return first.leave(up) })
}

func (d *Dataplane) run(ctx context.Context, link plan.Link) error {
	dirs := [2]nfqueue.Direction{
		direction(link.Down, d.parts.numbers[d.carrier(down)][down]),
		direction(link.Up, d.parts.numbers[d.carrier(up)][up]),
	}
	// The schedulers come first where a direction begins, so that no packet
	// meets one without a configuration.
	if err := d.configure(ctx, down, link.Down); err != nil {
		return err
	}
	if err := d.configure(ctx, up, link.Up); err != nil {
		if d.link != nil {
			err = errors.Join(err, d.configure(ctx, down, d.link.Down))
		}
		return err
	}
	var err error
	switch {
	case d.link == nil:
		err = d.install(ctx, dirs)
	case dirs != d.dirs:
		err = d.parts.rules.Set(dirs[down], dirs[up])
	}
	if err != nil {
		return err
	}
	d.dirs = dirs
	d.lookForOffload()
	d.begins.Store(true)
	d.wake()
	return nil
}

// lookForOffload notes what takes packets past the shaper.
func (d *Dataplane) lookForOffload() {
	tables, err := d.parts.offload.Look(true, d.parts.device.ppp)
	if err != nil {
		d.log.Debug("flow offload can't be seen", "error", err)
	}
	why := offload.PastHooks(tables)
	var found *string
	if why != "" {
		found = &why
	}
	switch before := d.bypass.Swap(found); {
	case found != nil && before == nil:
		d.log.Warn("packets pass the shaper by", "reason", why)
	case found == nil && before != nil:
		d.log.Info("flow offload is off again")
	}
}

// Bypass says what takes packets past the shaper that only somebody else can
// turn off; empty if nothing does. It looks at most every minute.
func (d *Dataplane) Bypass() string {
	if why := d.bypass.Load(); why != nil {
		return *why
	}
	return ""
}

// install makes the rules, whose counters begin with 0.
func (d *Dataplane) install(ctx context.Context, dirs [2]nfqueue.Direction) error {
	got := make([]nfqueue.Counters, len(d.loops))
	for i, l := range d.loops {
		if err := l.do(ctx, func() { got[i] = l.q.Counters() }); err != nil {
			return err
		}
	}
	err := d.parts.rules.Install(dirs[down], dirs[up])
	if errors.Is(err, nfqueue.ErrUnsupported) {
		return errors.Join(dataplane.ErrUnsupported, err)
	}
	d.before = [2]uint64{}
	for _, c := range got {
		d.before[down] += c.Down.Packets
		d.before[up] += c.Up.Packets
	}
	return err
}

// direction leaves a direction alone that has no rate.
func direction(c engine.Config, number uint16) nfqueue.Direction {
	return nfqueue.Direction{
		On: c.Rate != 0 || c.Autorate, Number: number, Whole: wholeLen(c), Wash: c.Wash, Restore: c.Fwmark,
	}
}

func (d *Dataplane) configure(ctx context.Context, direction int, c engine.Config) error {
	l := d.loops[d.carrier(direction)]
	return l.call(ctx, func() error { return l.apply(direction, c) })
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
	for _, l := range d.loops {
		if e := l.call(ctx, l.release); !errors.Is(e, errEnded) {
			err = errors.Join(err, e)
		}
	}
	err = errors.Join(err, d.parts.rules.Remove())
	if err != nil {
		return fmt.Errorf("stop shaping %s: %w", d.cfg.Interface, err)
	}
	d.link, d.apart = nil, false
	d.bypassed = [2]uint64{}
	d.bypass.Store(nil)
	return nil
}

// Stats implements dataplane.Dataplane.
func (d *Dataplane) Stats(st *dataplane.Stats) (ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.link == nil {
		return false
	}
	// Before the loops' counters, so that what comes in between does not look
	// like bypassed.
	var came [2]uint64
	var err error
	if came[down], came[up], err = d.parts.rules.Counters(); err != nil {
		d.log.Debug("counters can't be read", "error", err)
	}
	due := d.known(came)
	for i, l := range d.loops {
		var received [2]uint64
		for direction := range received {
			if i == d.carrier(direction) {
				received[direction] = due[direction]
			}
		}
		if err := l.look(received, &d.seen[i]); err != nil {
			d.log.Debug("the packet loop gives no statistics", "error", err)
			return false
		}
		// What this loop has had before another carried the direction.
		c := d.seen[i].counters
		due[down] -= min(due[down], c.Down.Packets)
		due[up] -= min(due[up], c.Up.Packets)
	}
	*st = dataplane.Stats{Down: d.seen[d.carrier(down)].stats[down], Up: d.seen[d.carrier(up)].stats[up]}
	var received [2]uint64
	for _, s := range d.seen {
		c := s.counters
		received[down] += c.Down.Packets
		received[up] += c.Up.Packets
		st.Batches += c.Batches
		st.QueueOverflows += c.Down.Overflows + c.Up.Overflows
	}
	st.Packets = received[down] + received[up]
	for i, got := range received {
		if got -= d.before[i]; d.dirs[i].On && came[i] > got {
			d.bypassed[i] = max(d.bypassed[i], came[i]-got)
		}
		st.BypassedPackets += d.bypassed[i]
	}
	return true
}

// known are the packets that the loops have received, or that are known to have
// passed them, if that is all that has come.
func (d *Dataplane) known(came [2]uint64) (received [2]uint64) {
	for i, n := range came {
		if received[i] = d.before[i]; d.dirs[i].On {
			received[i] += n - min(d.bypassed[i], n)
		}
	}
	return received
}

// look brings a snapshot up to date. received is what there is to receive, as
// far as it is known. A loop that sleeps and has received that is not woken:
// waking is most of what an idle home costs, and so is a timer that waits for
// the answer, even if it is stopped.
func (l *loop) look(received [2]uint64, s *snapshot) error {
	select {
	case <-l.done:
		return l.ended()
	default:
	}
	if l.awake.TryLock() {
		got := l.q.Counters()
		all := got.Down.Packets >= received[down] && got.Up.Packets >= received[up]
		if all {
			l.fill(s)
		}
		l.awake.Unlock()
		if all {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	return l.call(ctx, func() (err error) {
		// What has come so far is in the socket, at most.
		for range maxReads {
			before := l.q.Counters().Batches
			if _, err = l.serve(); err != nil || l.q.Counters().Batches == before {
				break
			}
		}
		l.fill(s)
		return err
	})
}

func (l *loop) fill(s *snapshot) {
	*s = snapshot{counters: l.q.Counters()}
	for i := range l.lanes {
		if d := &l.lanes[i]; d.sched != nil {
			d.sched.Stats(l.now(), &s.stats[i])
			s.stats[i].Config = d.cfg
		}
	}
}

// maxReads bounds the reads before statistics are taken: more than the socket
// holds.
const maxReads = 200

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
	err := d.clear(ctx)
	for _, l := range d.loops {
		err = errors.Join(err, l.stop(ctx))
	}
	return errors.Join(err, d.parts.rules.Close(), d.parts.offload.Close(), d.parts.close())
}

// wake makes the keeper look and renew now.
func (d *Dataplane) wake() {
	select {
	case d.wakeKeeper <- struct{}{}:
	default:
	}
}

// woken is described at loop.
func (d *Dataplane) woken(many bool) {
	if many {
		d.begins.Store(true)
	}
	d.wake()
}

// keep renews the rules as long as the loops move. Without it they run out and
// packets pass unshaped.
func (d *Dataplane) keep() {
	t := time.NewTimer(renewEvery)
	defer t.Stop()
	busy := make([]uint32, len(d.loops))
	var moved uint32
	quiet, looked := 0, time.Now()
	for {
		ticked := false
		select {
		case <-d.stopKeeper:
			return
		case <-d.wakeKeeper:
			if d.begins.Swap(false) {
				quiet = 0
			}
		case <-t.C:
			ticked = true
		}
		d.asleep.Store(false)
		var hung bool
		if ticked || quiet >= quietTicks { // not twice within a moment
			for i, l := range d.loops {
				var hangs bool
				busy[i], hangs = l.hangs(busy[i])
				hung = hung || hangs
			}
			switch before := d.hung.Swap(hung); {
			case hung && !before:
				d.log.Error("a packet loop stands still, packets pass unshaped")
			case !hung && before:
				d.log.Info("the packet loop moves again")
			}
		}
		if ticked {
			before := moved
			moved = 0
			for _, l := range d.loops {
				moved += l.moved.Load()
			}
			quiet++
			if moved-before > quietMoves {
				quiet = 0
			}
		}
		if hung {
			quiet = 0
		}
		if !hung && (quiet < quietTicks || !ticked) {
			if d.renew(time.Since(looked) >= offloadEvery) {
				looked = time.Now()
			}
		}
		if quiet >= quietTicks {
			d.asleep.Store(true)
			continue // until a packet comes
		}
		t.Reset(renewEvery)
	}
}

// Health returns an error while a packet loop stands still: packets pass
// unshaped until it moves again; and for a while after one has started afresh,
// so that somebody hears of it. One that has ended is no matter of health: Apply
// tells.
func (d *Dataplane) Health() error {
	hangs := d.hung.Load() || d.hangsUnseen()
	var afresh engine.Time
	why := ""
	for _, l := range d.loops {
		select {
		case <-l.done:
			return nil
		default:
		}
		if at := engine.Time(l.afresh.Load()); at > afresh {
			afresh, why = at, *l.why.Load()
		}
	}
	switch {
	case hangs:
		return errors.New("the packet loop stands still: packets pass unshaped until it moves")
	case afresh != 0 && d.now().Sub(afresh) < afreshTold:
		return fmt.Errorf("the packet loop has panicked and started afresh, what waited has passed unshaped: %s; the agent's log says more", why)
	}
	return nil
}

// hangsUnseen looks whether a loop hangs while the keeper sleeps: it has been
// in one round since a call at least renewEvery ago.
func (d *Dataplane) hangsUnseen() bool {
	d.healthMu.Lock()
	defer d.healthMu.Unlock()
	hangs := false
	for i, l := range d.loops {
		s := &d.sights[i]
		count, same := l.hangs(s.busy)
		if !d.asleep.Load() || !same {
			*s = sight{count, time.Now()}
			continue
		}
		hangs = hangs || time.Since(s.at) >= renewEvery
	}
	return hangs
}

// renew lets the rules live for Lifetime from now on, and looks for flow offload
// if that is due.
func (d *Dataplane) renew(look bool) (looked bool) {
	// A method that is at work may wait for the loop; the rules outlive that.
	if !d.mu.TryLock() {
		return false
	}
	defer d.mu.Unlock()
	if d.link == nil || d.closed {
		return false
	}
	err := d.parts.rules.Renew(nfqueue.Lifetime)
	if errors.Is(err, os.ErrNotExist) {
		d.log.Warn("somebody has removed the rules, they are made again")
		ctx, cancel := context.WithTimeout(context.Background(), answerTime)
		defer cancel()
		err = d.install(ctx, d.dirs)
	}
	if err != nil {
		d.log.Warn("rules are not renewed", "error", err)
	}
	if look {
		d.lookForOffload()
	}
	return look
}
