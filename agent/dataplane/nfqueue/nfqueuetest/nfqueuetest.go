// Package nfqueuetest has fakes of a queue and of its rules, for tests of what
// runs on them without root and in virtual time.
package nfqueuetest

import (
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
)

// Verdict is what was decided about one packet.
type Verdict struct {
	nfqueue.Ref
	Accept bool
	Change bool   // through the rules once more, with Mark
	Mark   uint32 // if Change
}

// Queue is an nfqueue.Queue without a kernel. All methods are safe for
// concurrent use.
type Queue struct {
	// Panic, if set, is called by Recv.
	Panic func()
	// Woken makes packets arrive as they do when the rules have run out.
	Woken bool

	mu       sync.Mutex
	arrived  []nfqueue.Packet
	held     []nfqueue.Ref // received, without a verdict
	pending  []Verdict
	verdicts [2][]Verdict // down, up
	counters nfqueue.Counters
	configs  [2]nfqueue.Config
	nextID   uint32
	closed   bool

	packets, woken chan struct{} // capacity 1: a signal that stays
	wakes          atomic.Int64
}

// NewQueue returns an empty queue.
func NewQueue() *Queue {
	return &Queue{packets: make(chan struct{}, 1), woken: make(chan struct{}, 1)}
}

func index(up bool) int {
	if up {
		return 1
	}
	return 0
}

// Push lets a packet arrive; its name is given by the queue and returned. IDs
// count up over all numbers.
func (q *Queue) Push(up bool, p nfqueue.Packet) nfqueue.Ref {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.nextID++
	p.ID = q.nextID
	p.Number = uint8(q.nextID % nfqueue.Spread)
	if q.Woken {
		p.Number = 2 * nfqueue.Spread
	}
	if up {
		p.Number += 2*nfqueue.Spread + 1
	}
	p.Len = max(p.Len, uint32(len(p.Data)))
	q.arrived = append(q.arrived, p)
	signal(q.packets)
	return p.Ref
}

// Verdicts returns those of a direction that were flushed since the last call.
func (q *Queue) Verdicts(up bool) []Verdict {
	q.mu.Lock()
	defer q.mu.Unlock()
	v := q.verdicts[index(up)]
	q.verdicts[index(up)] = nil
	return v
}

// Held returns how many packets of a direction have no verdict.
func (q *Queue) Held(up bool) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for _, p := range q.arrived {
		if p.Up() == up {
			n++
		}
	}
	for _, r := range q.held {
		if r.Up() == up {
			n++
		}
	}
	return n
}

// Config returns how a direction was configured last.
func (q *Queue) Config(up bool) nfqueue.Config {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.configs[index(up)]
}

// Recv is like nfqueue.Queue.Recv.
func (q *Queue) Recv(pkts []nfqueue.Packet) (int, error) {
	if q.Panic != nil {
		q.Panic()
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, os.ErrClosed
	}
	n := copy(pkts[:min(len(pkts), nfqueue.Batch)], q.arrived)
	for _, p := range q.arrived[:n] {
		q.held = append(q.held, p.Ref)
		if p.Up() {
			q.counters.Up.Packets++
		} else {
			q.counters.Down.Packets++
		}
	}
	q.arrived = slices.Delete(q.arrived, 0, n)
	if n > 0 {
		q.counters.Batches++
	}
	return n, nil
}

// Accept is like nfqueue.Queue.Accept.
func (q *Queue) Accept(p nfqueue.Ref) error {
	return q.verdict(Verdict{Ref: p, Accept: true})
}

// Change is like nfqueue.Queue.Change.
func (q *Queue) Change(p nfqueue.Ref, mark uint32) error {
	return q.verdict(Verdict{Ref: p, Accept: true, Change: true, Mark: mark})
}

// Drop is like nfqueue.Queue.Drop.
func (q *Queue) Drop(p nfqueue.Ref) error { return q.verdict(Verdict{Ref: p}) }

func (q *Queue) verdict(v Verdict) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pending = append(q.pending, v)
	return nil
}

// Flush is like nfqueue.Queue.Flush.
func (q *Queue) Flush() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.flushLocked()
	return nil
}

func (q *Queue) flushLocked() {
	for _, v := range q.pending {
		i := slices.Index(q.held, v.Ref)
		if i < 0 { // a second verdict, or one on a packet that never came
			q.counters.Errors++
			continue
		}
		q.held = slices.Delete(q.held, i, i+1)
		q.verdicts[index(v.Up())] = append(q.verdicts[index(v.Up())], v)
	}
	q.pending = nil
}

// Release is like nfqueue.Queue.Release.
func (q *Queue) Release() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return os.ErrClosed
	}
	q.flushLocked()
	for _, p := range q.arrived {
		q.held = append(q.held, p.Ref)
	}
	for _, r := range q.held {
		q.verdicts[index(r.Up())] = append(q.verdicts[index(r.Up())], Verdict{Ref: r, Accept: true})
	}
	q.arrived, q.held = nil, nil
	return nil
}

// Wait is like nfqueue.Queue.Wait.
func (q *Queue) Wait(d time.Duration, packets bool) error {
	var arrived chan struct{}
	if packets {
		arrived = q.packets
		q.mu.Lock()
		some := len(q.arrived) > 0
		q.mu.Unlock()
		if some {
			return nil
		}
	}
	var over <-chan time.Time // never, if d is negative
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-over:
	case <-arrived:
	case <-q.woken:
	}
	return nil
}

// Wake is like nfqueue.Queue.Wake.
func (q *Queue) Wake() {
	q.wakes.Add(1)
	signal(q.woken)
}

// Wakes returns how often Wake was called.
func (q *Queue) Wakes() int64 { return q.wakes.Load() }

// Configure is like nfqueue.Queue.Configure.
func (q *Queue) Configure(up bool, c nfqueue.Config) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.configs[index(up)] = c
	return nil
}

// Counters is like nfqueue.Queue.Counters.
func (q *Queue) Counters() nfqueue.Counters {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.counters
}

// Close is like nfqueue.Queue.Close.
func (q *Queue) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	return nil
}

// Closed tells whether Close was called.
func (q *Queue) Closed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Rules are nfqueue.Rules without a kernel.
type Rules struct {
	life  atomic.Int64  // of the last Renew, ns
	count atomic.Uint64 // see Count

	mu       sync.Mutex
	down, up nfqueue.Direction
	there    bool
	installs int
	renewals int
	err      error
}

// Fail makes the next changes fail with err; nil ends it.
func (r *Rules) Fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// Vanish is somebody removing the tables.
func (r *Rules) Vanish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.there = false
}

// State returns what is installed.
func (r *Rules) State() (down, up nfqueue.Direction, there bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.down, r.up, r.there
}

// Life returns for how long the rules were renewed last.
func (r *Rules) Life() time.Duration { return time.Duration(r.life.Load()) }

// Calls returns how often rules were installed and renewed.
func (r *Rules) Calls() (installs, renewals int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.installs, r.renewals
}

// Install is like nfqueue.Rules.Install.
func (r *Rules) Install(down, up nfqueue.Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	r.down, r.up, r.there = down, up, true
	r.installs++
	return nil
}

// Set is like nfqueue.Rules.Set.
func (r *Rules) Set(down, up nfqueue.Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	if !r.there {
		return os.ErrNotExist
	}
	r.down, r.up = down, up
	return nil
}

// Renew is like nfqueue.Rules.Renew.
func (r *Rules) Renew(life time.Duration) error {
	r.life.Store(int64(life))
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.there {
		return os.ErrNotExist
	}
	r.renewals++
	return nil
}

// Count says how many packets have met the rules upwards, which know of none by
// themselves.
func (r *Rules) Count(up uint64) { r.count.Store(up) }

// Counters is like nfqueue.Rules.Counters.
func (r *Rules) Counters() (down, up uint64, err error) { return 0, r.count.Load(), nil }

// Remove is like nfqueue.Rules.Remove.
func (r *Rules) Remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.there = false
	return nil
}

// Close is like nfqueue.Rules.Close.
func (r *Rules) Close() error { return r.Remove() }
