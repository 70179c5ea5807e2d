package userspace

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	// blindWait bounds how long arrivals may lie in the socket while the shaper
	// could not send them anyway. Reading them together when it can costs one
	// wake-up instead of one each.
	blindWait = time.Millisecond

	// maxLate is how much the shaper makes up for at most when the loop could not
	// run: what a stall of its length or more leaves is a burst of this time
	// times the rate. A process that was stopped for seconds must not send
	// seconds' worth at once.
	maxLate = 250 * time.Millisecond

	// maxWait is how long a loop sleeps at most. It could be for ever: Wake and
	// packets end it.
	maxWait = 10 * time.Minute

	// maxPanics is how often a loop starts afresh before it gives the queue up.
	maxPanics = 3
)

// queue is where a loop's packets come from and go to: an nfqueue.Queue, or a
// fake. Only Wake is called from other goroutines.
type queue interface {
	Recv(pkts []nfqueue.Packet) (int, error)
	Accept(id uint32, setMark bool, mark uint32) error
	Drop(id uint32) error
	Flush() error
	Release() error
	Wait(d time.Duration, packets bool) error
	Wake()
	Configure(c nfqueue.Config) error
	Counters() nfqueue.Counters
	Close() error
}

// device is what a loop needs to know of the interface.
type device struct {
	netOff uint16 // bytes of link-layer header that the kernel's qdiscs count
	mtu    uint32 // of layer 3
}

// loop is one direction: a queue, a scheduler, and the goroutine that owns
// both. Others talk to it by do.
type loop struct {
	name   string
	log    hclog.Logger
	q      queue
	clock  func() engine.Time
	seed   uint64
	device device

	// Owned by the goroutine.
	sched   *engine.Scheduler // nil: packets pass as they come
	cfg     engine.Config     // as applied; what sched has differs in SplitGSO
	held    slots
	pkts    [nfqueue.Batch]nfqueue.Packet
	packet  engine.Packet
	panics  int
	stopped bool
	due     engine.Time   // when the last round wanted to go on; Never if nothing was queued
	skipped time.Duration // by which the scheduler's clock is behind clock

	calls chan func() // capacity 1: put there before the wake-up that makes the loop look
	done  chan struct{}
	err   error // why the loop has ended; read it after done

	// busy counts up when the goroutine goes to sleep and when it wakes: an odd
	// number that stays the same is a loop that hangs.
	busy atomic.Uint32

	// moved counts up with what changes statistics, so that those who ask for
	// them need not wake a loop that has slept since.
	moved atomic.Uint32
}

func newLoop(name string, q queue, dev device, seed uint64, clock func() engine.Time, log hclog.Logger) *loop {
	return &loop{
		name: name, log: log, q: q, clock: clock, seed: seed, device: dev, due: engine.Never,
		calls: make(chan func(), 1), done: make(chan struct{}),
	}
}

// run is the goroutine. It ends by stop, or when the queue is beyond repair;
// then the queue is closed, and the kernel lets packets pass.
func (l *loop) run() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	prepareThread()
	defer close(l.done)
	l.busy.Add(1)
	var err error
	for !l.stopped && err == nil {
		err = l.guardedRound()
	}
	l.err = errors.Join(err, l.q.Release(), l.q.Close())
	if !l.stopped {
		l.log.Error("packet loop ended, packets pass unshaped", "direction", l.name, "error", l.err)
	}
}

// guardedRound turns a panic into a fresh start: every packet that waits is
// let go and the scheduler is made anew, so that the customer stays online.
func (l *loop) guardedRound() (err error) {
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		l.panics++
		l.log.Error("packet loop starts afresh after a panic", "direction", l.name, "count", l.panics, "error", r, "stack", string(debug.Stack()))
		if err = l.release(); err != nil {
			return
		}
		if l.panics >= maxPanics {
			err = fmt.Errorf("%d panics in the packet loop, the last: %v", l.panics, r)
			return
		}
		err = l.apply(l.cfg)
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
	wait, packets := maxWait, true
	if next != engine.Never {
		wait = next.Sub(l.now())
		packets = wait > blindWait
	}
	if wait <= 0 {
		l.busy.Add(2) // moves, and stays awake
		return nil
	}
	l.busy.Add(1)
	err = l.q.Wait(min(wait, maxWait), packets)
	l.busy.Add(1)
	return err
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
	}
	now := l.now()
	if l.due != engine.Never {
		if late := now.Sub(l.due); late > maxLate {
			l.skipped += late - maxLate
			now = l.due.Add(maxLate)
		}
	}
	for i := range l.pkts[:n] {
		if err := l.arrive(now, &l.pkts[i]); err != nil {
			return 0, err
		}
	}
	next, err = l.send(now)
	if err != nil {
		return 0, err
	}
	l.due = next
	if n == len(l.pkts) {
		next = now
	}
	return next, l.q.Flush()
}

// now is the scheduler's time: it stands still during what a stall has beyond
// maxLate.
func (l *loop) now() engine.Time { return l.clock().Add(-l.skipped) }

// arrive takes in one packet.
func (l *loop) arrive(now engine.Time, in *nfqueue.Packet) error {
	if l.sched == nil {
		return l.q.Accept(in.ID, false, 0)
	}
	p := &l.packet
	*p = engine.Packet{
		Handle:   l.held.put(in.ID, in.Mark),
		NetOff:   l.device.netOff,
		Mark:     in.Mark,
		Priority: in.Priority,
		Segs:     1,
	}
	l.measure(in, p)
	l.sched.Dissect(in.Data, p)
	l.sched.Enqueue(now, p)
	return l.drop()
}

// send delivers what is due at now.
func (l *loop) send(now engine.Time) (next engine.Time, err error) {
	if l.sched == nil {
		return engine.Never, nil
	}
	for {
		next = l.sched.NextSend()
		if next > now {
			return next, nil
		}
		d, ok := l.sched.Dequeue(now)
		if err := l.drop(); err != nil {
			return 0, err
		}
		if !ok {
			return l.sched.NextSend(), nil
		}
		id, mark := l.held.take(d.Handle)
		out := mark &^ nfqueue.MarkBit
		if d.CE {
			out |= nfqueue.MarkBit
		}
		if err := l.q.Accept(id, out != mark, out); err != nil {
			return 0, err
		}
	}
}

// drop gives the verdict on what the scheduler has dropped. What was in a tin
// that a new configuration doesn't have is let go: a change loses nothing.
func (l *loop) drop() error {
	for _, d := range l.sched.Drops() {
		id, _ := l.held.take(d.Handle)
		var err error
		if d.Reason == engine.DropCleared {
			err = l.q.Accept(id, false, 0)
		} else {
			err = l.q.Drop(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// apply makes the loop run c, in place if it runs already.
func (l *loop) apply(c engine.Config) error {
	run := c
	whole := takeWhole(c)
	if whole {
		run.SplitGSO = false // one verdict is for all of a super-packet
	}
	sched := l.sched
	if sched == nil {
		var err error
		if sched, err = engine.New(l.now(), run, engine.Options{Seed: l.seed}); err != nil {
			return err
		}
	} else if err := sched.Reconfigure(l.now(), run); err != nil {
		return err
	}
	l.sched, l.cfg = sched, c
	l.moved.Add(1)
	if err := l.drop(); err != nil { // tins that are not in use any more
		return err
	}
	return l.q.Configure(nfqueue.Config{MaxLen: l.maxLen(), GSO: whole})
}

// release lets every packet go, in the order of arrival, and forgets the
// scheduler: what comes now passes as it comes.
func (l *loop) release() error {
	l.moved.Add(1)
	l.sched = nil
	l.held = slots{}
	return l.q.Release()
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
		return fmt.Errorf("wait for the %s packet loop: %w", l.name, context.Cause(ctx))
	}
	l.q.Wake()
	select {
	case <-finished:
	case <-l.done:
		return l.ended()
	case <-ctx.Done():
		select {
		case <-l.calls: // taken back
			return fmt.Errorf("wait for the %s packet loop: %w", l.name, context.Cause(ctx))
		case <-finished: // it was under way
		case <-l.done:
			return l.ended()
		}
	}
	if !ran {
		return fmt.Errorf("the %s packet loop has panicked", l.name)
	}
	return nil
}

// errEnded means that a loop has given up.
var errEnded = fmt.Errorf("packet loop has ended: %w", dataplane.ErrEnded)

func (l *loop) ended() error { return fmt.Errorf("%s: %w: %w", l.name, errEnded, l.err) }

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
