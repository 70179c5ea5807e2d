// Package wan is the data plane of an interface that comes and goes: it opens
// one of the others when the interface is there, and another in its place when
// the interface has come back with a new index, or has changed.
//
// While the interface is missing, Apply returns dataplane.ErrNoDevice and
// changes nothing. Whoever holds the Plane waits for Changed and applies again.
// Until then packets of a new interface of the old name pass unshaped.
package wan

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Config is how a Plane is opened.
type Config struct {
	Interface string
	// Open opens a data plane on the interface as it is, and returns its name.
	Open   func() (dataplane.Dataplane, string, error)
	Logger hclog.Logger
}

// watcher knows the interface: a watch, or a fake.
type watcher interface {
	Device() dataplane.Device
	Changed() <-chan struct{}
	close() error
}

// Plane implements dataplane.Dataplane.
type Plane struct {
	cfg   Config
	log   hclog.Logger
	watch watcher
	lock  lock

	mu     sync.Mutex // guards all below
	inner  dataplane.Dataplane
	name   string           // of inner, or of the one before it
	on     dataplane.Device // that inner was opened on
	closed bool
}

var _ dataplane.Dataplane = (*Plane)(nil)

// Open opens the data plane, or waits for the interface if that is not there.
// It is an error if the interface is there and no data plane opens on it, and
// ErrInUse if another agent has the interface.
func Open(c Config) (*Plane, error) {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	l, err := take(c.Interface)
	if err != nil {
		return nil, err
	}
	w, err := newWatch(c.Interface, c.Logger.Named("wan"))
	if err != nil {
		return nil, errors.Join(err, l.release())
	}
	p, err := open(c, w)
	if err != nil {
		return nil, errors.Join(err, l.release())
	}
	p.lock = l
	return p, nil
}

func open(c Config, w watcher) (*Plane, error) {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	p := &Plane{cfg: c, log: c.Logger.Named("wan"), watch: w}
	err := p.follow()
	switch {
	case errors.Is(err, dataplane.ErrNoDevice):
		p.log.Warn("interface is not there yet, nothing is shaped until it comes", "interface", c.Interface)
	case err != nil:
		return nil, errors.Join(err, w.close())
	}
	return p, nil
}

// follow makes inner one that was opened on the interface as it is now.
func (p *Plane) follow() error {
	now := p.watch.Device()
	if now.Index == 0 {
		p.lost()
		return fmt.Errorf("%s: %w", p.cfg.Interface, dataplane.ErrNoDevice)
	}
	if p.inner != nil && p.on.Same(now) {
		return nil
	}
	if p.inner != nil {
		p.log.Info("interface has changed", "interface", p.cfg.Interface, "index", now.Index, "mtu", now.MTU)
	}
	p.leave()
	inner, name, err := p.cfg.Open()
	if err != nil {
		return err
	}
	p.inner, p.name, p.on = inner, name, now
	return nil
}

// lost tells inner, if it cares, that there is no interface.
func (p *Plane) lost() {
	l, ok := p.inner.(interface{ Lost() error })
	if !ok {
		return
	}
	if err := l.Lost(); err != nil {
		p.log.Warn("interface is not left in order", "interface", p.cfg.Interface, "error", err)
	}
}

// leave closes inner. What that can't undo went with the interface, or is
// undone by the next one's start.
func (p *Plane) leave() {
	if p.inner == nil {
		return
	}
	if err := p.inner.Close(); err != nil {
		p.log.Warn("data plane is not closed in order", "interface", p.cfg.Interface, "error", err)
	}
	p.inner = nil
}

// Name returns what shapes, such as "kernel"; empty if nothing was opened yet.
func (p *Plane) Name() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n, ok := p.inner.(interface{ Name() string }); ok {
		return n.Name()
	}
	return p.name
}

// Device returns the interface as it is now.
func (p *Plane) Device() dataplane.Device { return p.watch.Device() }

// Changed has a value when Device may return another than before.
func (p *Plane) Changed() <-chan struct{} { return p.watch.Changed() }

// Apply implements dataplane.Dataplane. The error is dataplane.ErrNoDevice
// while there is no interface.
func (p *Plane) Apply(ctx context.Context, link plan.Link) (dataplane.Effective, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return dataplane.Effective{}, os.ErrClosed
	}
	if err := p.follow(); err != nil {
		return dataplane.Effective{}, err
	}
	effective, err := p.inner.Apply(ctx, link)
	if errors.Is(err, dataplane.ErrEnded) {
		p.leave() // the next Apply opens another
	}
	return effective, err
}

// Clear implements dataplane.Dataplane.
func (p *Plane) Clear(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return os.ErrClosed
	case p.inner == nil:
		return nil
	}
	err := p.inner.Clear(ctx)
	if errors.Is(err, dataplane.ErrEnded) {
		p.leave()
		err = nil
	}
	return err
}

// Stats implements dataplane.Dataplane. ok is false, too, while what was
// applied is not for the interface that is there.
func (p *Plane) Stats(st *dataplane.Stats) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inner != nil && p.on.Same(p.watch.Device()) && p.inner.Stats(st)
}

// Health returns why packets pass unshaped at the moment, by the data plane's
// own account; nil if it knows of no reason.
func (p *Plane) Health() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h, ok := p.inner.(interface{ Health() error }); ok {
		return h.Health()
	}
	return nil
}

// Bypass says what takes packets past the data plane that only somebody else
// can turn off; empty if nothing does that it knows of.
func (p *Plane) Bypass() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.inner.(interface{ Bypass() string }); ok {
		return b.Bypass()
	}
	return ""
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	err := p.watch.close()
	if p.inner != nil {
		err = errors.Join(p.inner.Close(), err)
		p.inner = nil
	}
	return errors.Join(err, p.lock.release())
}
