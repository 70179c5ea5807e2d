package dataplanetest

import (
	"context"
	"errors"
	"sync"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Fake is a data plane without packets. The zero value is ready.
type Fake struct {
	mu      sync.Mutex // guards all below
	running *plan.Link
	history []plan.Link
	clears  int
	closed  bool
	onApply func(plan.Link) (dataplane.Effective, error)
	packets uint64
	stopped bool
}

// OnApply makes f decide what Apply does; nil: it runs the link as it is.
func (f *Fake) OnApply(decide func(plan.Link) (dataplane.Effective, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onApply = decide
}

// Apply runs the link.
func (f *Fake) Apply(_ context.Context, link plan.Link) (dataplane.Effective, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return dataplane.Effective{}, errors.New("closed")
	}
	effective := dataplane.Effective{Link: link}
	if f.onApply != nil {
		var err error
		if effective, err = f.onApply(link); err != nil {
			return dataplane.Effective{}, err
		}
	}
	f.running, f.stopped = &effective.Link, false
	f.history = append(f.history, effective.Link)
	return effective, nil
}

// Clear stops shaping.
func (f *Fake) Clear(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = nil
	f.clears++
	return nil
}

// Stats counts one packet per call.
func (f *Fake) Stats(st *dataplane.Stats) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running == nil || f.stopped {
		return false
	}
	f.packets++
	*st = dataplane.Stats{Batches: 2, Packets: 3}
	st.Down.Config, st.Up.Config = f.running.Down, f.running.Up
	st.Down.SentPackets, st.Up.SentPackets = f.packets, f.packets
	return true
}

// Close undoes everything.
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running, f.closed = nil, true
	return nil
}

// Stop makes it stop shaping by itself, as one that broke does.
func (f *Fake) Stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopped = true
}

// Running returns what runs; nil: nothing.
func (f *Fake) Running() *plan.Link {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return nil
	}
	return f.running
}

// History returns every link that was run, in order.
func (f *Fake) History() []plan.Link {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]plan.Link(nil), f.history...)
}

// Forget forgets the history.
func (f *Fake) Forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.history = nil
}

// Clears returns how often Clear was called.
func (f *Fake) Clears() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clears
}

// Closed returns whether it was closed.
func (f *Fake) Closed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}
