package userspace

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	// tick is how far apart the beginnings of rounds are at least, unless one has
	// read all that it could: what is due then leaves together, and what has
	// arrived is read together, for one wake-up. The shaper's clock makes up for
	// what is late. It bounds how long arrivals lie in the socket, too.
	tick = 900 * time.Microsecond

	// maxLate is how much the shaper makes up for at most when the loop could not
	// run: what a stall of its length or more leaves is a burst of this time
	// times the rate. A process that was stopped for seconds must not send
	// seconds' worth at once.
	maxLate = 250 * time.Millisecond

	// maxPanics is how often a loop starts afresh before it gives the queue up.
	maxPanics = 3
)

// queue is where a loop's packets come from and go to: an nfqueue.Queue, or a
// fake. Only Wake is called from other goroutines.
type queue interface {
	Recv(pkts []nfqueue.Packet) (int, error)
	Accept(p nfqueue.Ref) error
	Change(p nfqueue.Ref, mark uint32) error
	Drop(p nfqueue.Ref) error
	Flush() error
	Release() error
	Wait(d time.Duration, packets bool) error
	Wake()
	Configure(up bool, c nfqueue.Config) error
	Counters() nfqueue.Counters
	Close() error
}

// device is what a loop needs to know of the interface.
type device struct {
	netOff uint16 // bytes of link-layer header that the kernel's qdiscs count
	mtu    uint32 // of layer 3
	ppp    bool   // it is a PPP session, such as PPPoE
}

// loop is both directions or one: a queue, their schedulers, and the goroutine
// that owns them. Others talk to it by do. Only those lanes are used whose
// packets the rules send to its queue.
//
// One processor has one loop and not two because a wake-up is dear and the work
// between two is not: both directions' packets are read, sent and given verdicts
// together.
type loop struct {
	log    hclog.Logger
	q      queue
	clock  func() engine.Time
	device device

	// Owned by the goroutine.
	lanes   [2]lane // down, up
	pkts    [nfqueue.Batch]nfqueue.Packet
	packets [nfqueue.Batch]engine.Packet // what the schedulers see of pkts
	leaving [nfqueue.Batch]leaving
	panics  int
	stopped bool
	served  engine.Time   // when the last round was
	more    bool          // it has read all that it could, and there may be more
	due     engine.Time   // when the last round wanted to go on; Never if nothing was queued
	skipped time.Duration // by which the schedulers' clock is behind clock

	// woken is called when a packet met rules that had run out, and with many if
	// many moves have followed.
	woken   func(many bool)
	wokenAt engine.Time
	calm    uint32 // moves until then; 0: they are not counted

	own   func(bool)  // see ownThread
	calls chan func() // capacity 1: put there before the wake-up that makes the loop look
	done  chan struct{}
	err   error // why the loop has ended; read it after done

	// awake is held by the goroutine but while it sleeps without an end: who gets
	// it may look at what the goroutine owns.
	awake sync.Mutex

	// busy counts up when the goroutine goes to sleep and when it wakes: an odd
	// number that stays the same is a loop that hangs.
	busy atomic.Uint32

	// afresh is when it started afresh after a panic, by clock; 0: never. why is
	// what the panic was, and the how manieth.
	afresh atomic.Int64
	why    atomic.Pointer[string]

	// moved counts up with what changes statistics.
	moved atomic.Uint32
}

// lane is one direction.
type lane struct {
	up      bool
	seed    uint64
	sched   *engine.Scheduler // nil: packets pass as they come
	cfg     engine.Config     // as applied; what sched has differs in SplitGSO
	held    slots
	handled nfqueue.Config // how the queue was told to handle its packets
}

// leaving is a packet that the scheduler lets go.
type leaving struct {
	handle uint32
	change uint32 // bits of nfqueue.Marks
}

const down, up = 0, 1 // in arrays by direction

func newLoop(q queue, dev device, seed uint64, clock func() engine.Time, log hclog.Logger) *loop {
	return &loop{
		log: log, q: q, clock: clock, device: dev, due: engine.Never, woken: func(bool) {}, wokenAt: -engine.Time(nfqueue.Lifetime), own: ownThread(),
		lanes: [2]lane{{seed: seed}, {seed: ^seed, up: true}},
		calls: make(chan func(), 1), done: make(chan struct{}),
	}
}

// run is the goroutine. It ends by stop, or when the queue is beyond repair;
// then the queue is closed, and the kernel lets packets pass.
func (l *loop) run() {
	l.own(true) // and in the end: the thread ends with the goroutine
	l.awake.Lock()
	defer l.awake.Unlock()
	defer close(l.done)
	l.busy.Add(1)
	var err error
	for !l.stopped && err == nil {
		err = l.guardedRound()
	}
	l.err = errors.Join(err, l.q.Release(), l.q.Close())
	if !l.stopped {
		l.log.Error("packet loop ended, packets pass unshaped", "error", l.err)
	}
}

// guardedRound turns a panic into a fresh start: every packet that waits is
// let go and the schedulers are made anew, so that the customer stays online.
func (l *loop) guardedRound() (err error) {
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		l.panics++
		why := fmt.Sprintf("panic %d: %v", l.panics, r)
		l.why.Store(&why)
		l.afresh.Store(max(int64(l.clock()), 1))
		l.log.Error("packet loop starts afresh after a panic", "count", l.panics, "error", r, "stack", string(debug.Stack()))
		if err = l.release(); err != nil {
			return
		}
		if l.panics >= maxPanics {
			err = fmt.Errorf("%d panics in the packet loop, the last: %v", l.panics, r)
			return
		}
		for i := range l.lanes {
			if l.lanes[i].cfg != (engine.Config{}) {
				err = errors.Join(err, l.apply(i, l.lanes[i].cfg))
			}
		}
	}()
	return l.round()
}

// round does all that is due, answers one call, and sleeps.
func (l *loop) round() error {
	select {
	case f := <-l.calls:
		f()
	default:
	}
	if l.stopped {
		return nil
	}
	next, err := l.serve()
	if err != nil {
		return err
	}
	wait, packets := time.Duration(-1), true // for ever: packets and Wake end it
	if next != engine.Never {
		now := l.now()
		wait = next.Sub(now)
		packets = wait > tick
		if !l.more {
			wait = max(wait, l.served.Add(tick).Sub(now))
		}
		if wait <= 0 {
			l.busy.Add(2) // moves, and stays awake
			return nil
		}
	}
	l.busy.Add(1)
	err = l.sleep(wait, packets)
	l.busy.Add(1)
	return err
}

func (l *loop) sleep(wait time.Duration, packets bool) error {
	if wait < 0 {
		l.awake.Unlock()
		defer l.awake.Lock()
	}
	return l.q.Wait(wait, packets)
}

// serve reads one batch, sends what is due, and returns when the next packet
// will be; a time that is over means to come again at once.
func (l *loop) serve() (next engine.Time, err error) {
	n, err := l.q.Recv(l.pkts[:])
	if err != nil {
		return 0, err
	}
	if n > 0 || l.due != engine.Never {
		l.moved.Add(1)
		if l.calm > 0 {
			if l.calm--; l.calm == 0 {
				l.woken(true)
			}
		}
	}
	now := l.now()
	if l.due != engine.Never {
		if late := now.Sub(l.due); late > maxLate {
			l.skipped += late - maxLate
			now = l.due.Add(maxLate)
		}
	}
	if n > 0 && l.pkts[0].Wakes() {
		if now.Sub(l.wokenAt) >= nfqueue.Lifetime/2 { // else it came before the keeper had renewed them
			l.wokenAt, l.calm = now, quietMoves
		}
		l.woken(false)
	}
	if err := l.arrive(now, n); err != nil {
		return 0, err
	}
	next = engine.Never
	for i := range l.lanes {
		at, err := l.send(now, &l.lanes[i])
		if err != nil {
			return 0, err
		}
		next = min(next, at)
	}
	l.due = next
	if l.served, l.more = now, n == len(l.pkts); l.more {
		next = now
	}
	return next, l.q.Flush()
}

// now is the schedulers' time: it stands still during what a stall has beyond
// maxLate.
func (l *loop) now() engine.Time { return l.clock().Add(-l.skipped) }

// arrive takes in the first n of pkts. It goes through all of them with one part
// of the work and one direction and then with the next, and so does send: a
// router's processor knows 16 to 32 pairs of pages at a time, and with all of
// the code and the tables at once there would be a miss every 60 instructions.
func (l *loop) arrive(now engine.Time, n int) error {
	for i := range l.pkts[:n] {
		in, p := &l.pkts[i], &l.packets[i]
		d := l.lane(in)
		if d.sched == nil {
			if err := l.q.Accept(in.Ref); err != nil {
				return err
			}
			continue
		}
		// Each field: clearing all of it first costs as much as Dissect.
		p.Handle = d.held.put(in.Ref, in.Mark)
		p.NetOff, p.Mark, p.Priority = l.device.netOff, in.Mark, in.Priority
		l.measure(in, p)
		d.sched.Dissect(in.Data, p)
	}
	for i := range l.lanes {
		if err := l.enqueue(now, n, &l.lanes[i]); err != nil {
			return err
		}
	}
	return nil
}

// enqueue hands d's scheduler its part of the first n of packets.
func (l *loop) enqueue(now engine.Time, n int, d *lane) error {
	if d.sched == nil {
		return nil
	}
	for i := range l.pkts[:n] {
		if l.pkts[i].Up() != d.up {
			continue
		}
		d.sched.Enqueue(now, &l.packets[i])
		if len(d.sched.Drops()) > 0 {
			if err := l.drop(d); err != nil {
				return err
			}
		}
	}
	return nil
}

// lane is that of a packet's direction.
func (l *loop) lane(p *nfqueue.Packet) *lane {
	if p.Up() {
		return &l.lanes[up]
	}
	return &l.lanes[down]
}

// send delivers what is due at now.
func (l *loop) send(now engine.Time, d *lane) (next engine.Time, err error) {
	if d.sched == nil {
		return engine.Never, nil
	}
	for {
		n, err := l.dequeue(now, d)
		if err != nil {
			return 0, err
		}
		if err := l.deliver(d, l.leaving[:n]); err != nil {
			return 0, err
		}
		if n < len(l.leaving) {
			return d.sched.NextSend(), nil
		}
	}
}

// dequeue fills leaving with what is due, and returns how many there are.
func (l *loop) dequeue(now engine.Time, d *lane) (n int, err error) {
	var p engine.Delivery
	for n < len(l.leaving) && d.sched.NextSend() <= now {
		ok := d.sched.DequeueTo(now, &p)
		if len(d.sched.Drops()) > 0 {
			if err := l.drop(d); err != nil {
				return 0, err
			}
		}
		if !ok {
			break
		}
		change := uint32(0)
		if p.CE {
			change = nfqueue.MarkCE
		}
		if p.Changed && d.cfg.Wash {
			change |= nfqueue.MarkWash
		}
		l.leaving[n] = leaving{p.Handle, change}
		n++
	}
	return n, nil
}

// deliver gives the verdicts.
func (l *loop) deliver(d *lane, ps []leaving) error {
	for _, p := range ps {
		ref, mark := d.held.take(p.handle)
		var err error
		if p.change == 0 {
			err = l.q.Accept(ref)
		} else {
			err = l.q.Change(ref, mark&^nfqueue.Marks|p.change)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// drop gives the verdict on what the scheduler has dropped. What was in a tin
// that a new configuration doesn't have is let go: a change loses nothing.
func (l *loop) drop(d *lane) error {
	for _, p := range d.sched.Drops() {
		ref, _ := d.held.take(p.Handle)
		var err error
		if p.Reason == engine.DropCleared {
			err = l.q.Accept(ref)
		} else {
			err = l.q.Drop(ref)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// apply makes a direction run c, in place if it runs already.
func (l *loop) apply(direction int, c engine.Config) error {
	d := &l.lanes[direction]
	run := c
	run.SplitGSO = false // one verdict is for all of a super-packet; see wholeLen
	sched := d.sched
	if sched == nil {
		var err error
		if sched, err = engine.New(l.now(), run, engine.Options{Seed: d.seed}); err != nil {
			return err
		}
	} else if err := sched.Reconfigure(l.now(), run); err != nil {
		return err
	}
	d.sched, d.cfg = sched, c
	l.moved.Add(1)
	if err := l.drop(d); err != nil { // tins that are not in use any more
		return err
	}
	handle := nfqueue.Config{MaxLen: maxLen(sched, l.now()), Copy: nfqueue.ShortCopy}
	if c.AckFilter != engine.AckFilterOff {
		handle.Copy = nfqueue.LongCopy
	}
	if handle == d.handled {
		return nil
	}
	d.handled = handle
	return l.q.Configure(d.up, handle)
}

// release lets every packet go, in the order of arrival, and forgets the
// schedulers: what comes now passes as it comes.
func (l *loop) release() error {
	l.due = engine.Never
	var err error
	for i := range l.lanes {
		err = errors.Join(err, l.leave(i))
	}
	return errors.Join(err, l.q.Release())
}

// leave is release for one direction, which another loop has now.
func (l *loop) leave(direction int) error {
	l.moved.Add(1)
	var err error
	d := &l.lanes[direction]
	for _, ref := range d.held.all() {
		err = errors.Join(err, l.q.Accept(ref))
	}
	d.sched, d.held = nil, slots{}
	return errors.Join(err, l.q.Flush())
}

// do runs f on the loop's goroutine between two rounds and waits for it.
func (l *loop) do(ctx context.Context, f func()) error {
	finished, ran := make(chan struct{}), false
	call := func() {
		defer close(finished)
		f()
		ran = true
	}
	select {
	case l.calls <- call:
	case <-l.done:
		return l.ended()
	case <-ctx.Done():
		return fmt.Errorf("wait for the packet loop: %w", context.Cause(ctx))
	}
	l.q.Wake()
	select {
	case <-finished:
	case <-l.done:
		return l.ended()
	case <-ctx.Done():
		select {
		case <-l.calls: // taken back
			return fmt.Errorf("wait for the packet loop: %w", context.Cause(ctx))
		case <-finished: // it was under way
		case <-l.done:
			return l.ended()
		}
	}
	if !ran {
		return errors.New("the packet loop has panicked")
	}
	return nil
}

// call is do for what can fail.
func (l *loop) call(ctx context.Context, f func() error) error {
	var err error
	if callErr := l.do(ctx, func() { err = f() }); callErr != nil {
		return callErr
	}
	return err
}

// errEnded means that a loop has given up.
var errEnded = fmt.Errorf("packet loop has ended: %w", dataplane.ErrEnded)

func (l *loop) ended() error { return fmt.Errorf("%w: %w", errEnded, l.err) }

// stop ends the goroutine and waits for it. It is no error if the loop has
// ended before, which was logged.
func (l *loop) stop(ctx context.Context) error {
	if err := l.do(ctx, func() { l.stopped = true }); err != nil && !errors.Is(err, errEnded) {
		return err
	}
	<-l.done
	if !l.stopped {
		return nil
	}
	return l.err
}

// hangs tells whether the loop has been busy with one round since a call that
// returned the same busy count.
func (l *loop) hangs(before uint32) (count uint32, hangs bool) {
	select {
	case <-l.done:
		return 0, true
	default:
	}
	count = l.busy.Load()
	return count, count == before && count%2 == 1
}
