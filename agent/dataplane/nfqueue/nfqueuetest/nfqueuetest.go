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
	ID      uint32
	Accept  bool
	SetMark bool
	Mark    uint32
}

// Queue is an nfqueue.Queue without a kernel. All methods are safe for
// concurrent use.
type Queue struct {
	// Panic, if set, is called by Recv.
	Panic func()

	mu       sync.Mutex
	arrived  []nfqueue.Packet
	held     []uint32 // received, without a verdict
	pending  []Verdict
	verdicts []Verdict
	counters nfqueue.Counters
	config   nfqueue.Config
	nextID   uint32
	closed   bool

	packets, woken chan struct{} // capacity 1: a signal that stays
}

// NewQueue returns an empty queue.
func NewQueue() *Queue {
	return &Queue{packets: make(chan struct{}, 1), woken: make(chan struct{}, 1)}
}

// Push lets a packet arrive; its ID is given by the queue and returned.
func (q *Queue) Push(p nfqueue.Packet) uint32 {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.nextID++
	p.ID = q.nextID
	p.Len = max(p.Len, uint32(len(p.Data)))
	q.arrived = append(q.arrived, p)
	signal(q.packets)
	return p.ID
}

// Verdicts returns those that were flushed since the last call.
func (q *Queue) Verdicts() []Verdict {
	q.mu.Lock()
	defer q.mu.Unlock()
	v := q.verdicts
	q.verdicts = nil
	return v
}

// Held returns how many packets have no verdict.
func (q *Queue) Held() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.held) + len(q.arrived)
}

// Config returns what was configured last.
func (q *Queue) Config() nfqueue.Config {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.config
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
		q.held = append(q.held, p.ID)
	}
	q.arrived = slices.Delete(q.arrived, 0, n)
	if n > 0 {
		q.counters.Batches++
		q.counters.Packets += uint64(n)
	}
	return n, nil
}

// Accept is like nfqueue.Queue.Accept.
func (q *Queue) Accept(id uint32, setMark bool, mark uint32) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.counters.Accepted++
	q.pending = append(q.pending, Verdict{ID: id, Accept: true, SetMark: setMark, Mark: mark})
	return nil
}

// Drop is like nfqueue.Queue.Drop.
func (q *Queue) Drop(id uint32) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pending = append(q.pending, Verdict{ID: id})
	return nil
}

// Flush is like nfqueue.Queue.Flush.
func (q *Queue) Flush() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, v := range q.pending {
		i := slices.Index(q.held, v.ID)
		if i < 0 { // a second verdict, or one on a packet that never came
			q.counters.Errors++
			continue
		}
		q.held = slices.Delete(q.held, i, i+1)
		q.verdicts = append(q.verdicts, v)
	}
	q.pending = nil
	return nil
}

// Release is like nfqueue.Queue.Release.
func (q *Queue) Release() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return os.ErrClosed
	}
	q.pending = nil
	for _, p := range q.arrived {
		q.held = append(q.held, p.ID)
	}
	for _, id := range q.held {
		q.verdicts = append(q.verdicts, Verdict{ID: id, Accept: true})
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
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-arrived:
	case <-q.woken:
	}
	return nil
}

// Wake is like nfqueue.Queue.Wake.
func (q *Queue) Wake() { signal(q.woken) }

// Configure is like nfqueue.Queue.Configure.
func (q *Queue) Configure(c nfqueue.Config) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.config = c
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
	life atomic.Int64 // of the last Renew, ns

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

// Counters is like nfqueue.Rules.Counters; it knows of no packets.
func (r *Rules) Counters() (down, up uint64, err error) { return 0, 0, nil }

// Remove is like nfqueue.Rules.Remove.
func (r *Rules) Remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.there = false
	return nil
}

// Close is like nfqueue.Rules.Close.
func (r *Rules) Close() error { return r.Remove() }
