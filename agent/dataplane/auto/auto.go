// Package auto chooses the data plane that this machine's kernel can carry, and
// another one for a link that it can't.
package auto

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

// Candidate is a data plane that may be chosen.
type Candidate struct {
	Name string
	Open func() (dataplane.Dataplane, error)
}

// Plane implements dataplane.Dataplane: the best candidate that runs the link.
// One that opens and later says of a link that the kernel has not what it needs
// (dataplane.ErrUnsupported) stays open, for the next link, and the next
// candidate runs this one. It goes the other way as soon as a link allows it.
type Plane struct {
	log hclog.Logger

	mu      sync.Mutex // guards what follows, and serializes the methods
	planes  []choice
	running int // index in planes; none while nothing runs
	closed  bool
}

// choice is a candidate with what is known of it.
type choice struct {
	Candidate
	plane   dataplane.Dataplane // nil: not open
	dead    error               // why it can't be used here; nil: it may
	refused plan.Link           // what it said last that the kernel can't
	refusal error               // and how; nil: nothing
}

const none = -1

var _ dataplane.Dataplane = (*Plane)(nil)

// Open opens the first candidate that opens. One that the kernel can't carry is
// passed over quietly; another error is logged, because a customer is better off
// with the next one than with none. The error of none has all reasons.
func Open(candidates []Candidate, log hclog.Logger) (*Plane, error) {
	p := &Plane{log: log, planes: make([]choice, len(candidates)), running: none}
	var errs []error
	for i, c := range candidates {
		p.planes[i].Candidate = c
	}
	for i := range p.planes {
		err := p.open(&p.planes[i])
		if err == nil {
			return p, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", p.planes[i].Name, err))
	}
	return nil, errors.Join(errs...)
}

// open opens a candidate that is not open; the error is why it can't be used.
func (p *Plane) open(c *choice) error {
	if c.plane != nil || c.dead != nil {
		return c.dead
	}
	d, err := c.Open()
	if err != nil {
		if errors.Is(err, dataplane.ErrUnsupported) {
			p.log.Info("data plane is not possible here", "dataplane", c.Name, "error", err)
		} else {
			p.log.Warn("data plane does not open", "dataplane", c.Name, "error", err)
		}
		c.dead = err
		return err
	}
	c.plane = d
	return nil
}

// Apply implements dataplane.Dataplane. While it goes from one data plane to
// another both shape for a moment, so that nothing passes unshaped.
func (p *Plane) Apply(ctx context.Context, link plan.Link) (dataplane.Effective, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return dataplane.Effective{}, os.ErrClosed
	}
	var refusal error // of all so far
	for i := range p.planes {
		c := &p.planes[i]
		eff, err := p.try(ctx, c, link)
		if err == nil {
			p.runs(ctx, i)
			return eff, nil
		}
		var rejected *dataplane.RejectedError
		switch {
		case c.dead != nil, errors.Is(err, dataplane.ErrUnsupported):
		case errors.As(err, &rejected), errors.Is(err, dataplane.ErrNoDevice):
			return eff, err // another one would say the same
		case p.running == none, p.running == i:
			return eff, err // it is broken, and is to be tried again
		default:
			p.log.Warn("data plane does not run the link", "dataplane", c.Name, "error", err)
		}
		if refusal == nil {
			refusal = err
		} else {
			refusal = fmt.Errorf("%w; %s: %w", refusal, c.Name, err)
		}
	}
	return dataplane.Effective{}, refusal
}

// try applies a link to a candidate, unless it is known that it can't run it.
func (p *Plane) try(ctx context.Context, c *choice, link plan.Link) (dataplane.Effective, error) {
	if err := p.open(c); err != nil {
		return dataplane.Effective{}, err
	}
	if c.refusal != nil && c.refused == link {
		return dataplane.Effective{}, c.refusal
	}
	eff, err := c.plane.Apply(ctx, link)
	if errors.Is(err, dataplane.ErrUnsupported) {
		p.log.Info("data plane can't run this link here", "dataplane", c.Name, "error", err)
		c.refusal = nil
		if errors.As(err, new(*dataplane.RejectedError)) { // a module that is missing may come
			c.refused, c.refusal = link, err
		}
	}
	return eff, err
}

// runs notes that a candidate runs now, and that any other doesn't any more.
func (p *Plane) runs(ctx context.Context, now int) {
	was := p.running
	p.running = now
	if was == now || was == none {
		return
	}
	c := &p.planes[was]
	p.log.Info("another data plane shapes", "dataplane", p.planes[now].Name, "before", c.Name)
	if err := c.plane.Clear(ctx); err != nil {
		err = errors.Join(err, c.plane.Close())
		p.log.Warn("data plane is not left in order", "dataplane", c.Name, "error", err)
		c.plane = nil
	}
}

// current returns what runs; nil: nothing does.
func (p *Plane) current() dataplane.Dataplane {
	if p.running == none {
		return nil
	}
	return p.planes[p.running].plane
}

// Name returns what shapes, such as "kernel", or would.
func (p *Plane) Name() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running != none {
		return p.planes[p.running].Name
	}
	for _, c := range p.planes {
		if c.plane != nil {
			return c.Name
		}
	}
	return ""
}

// Clear implements dataplane.Dataplane.
func (p *Plane) Clear(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return os.ErrClosed
	}
	// All of them, as one that refused may have left something of an earlier
	// process.
	var errs []error
	for _, c := range p.planes {
		if c.plane != nil {
			errs = append(errs, c.plane.Clear(ctx))
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		p.running = none
	}
	return err
}

// Stats implements dataplane.Dataplane.
func (p *Plane) Stats(st *dataplane.Stats) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.current()
	return d != nil && d.Stats(st)
}

// Lost tells whatever runs that there is no interface at the moment.
func (p *Plane) Lost() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l, ok := p.current().(interface{ Lost() error }); ok {
		return l.Lost()
	}
	return nil
}

// Health returns why packets pass unshaped at the moment, by the data plane's
// own account; nil if it knows of no reason.
func (p *Plane) Health() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if h, ok := p.current().(interface{ Health() error }); ok {
		return h.Health()
	}
	return nil
}

// Bypass says what takes packets past the data plane that only somebody else can
// turn off; empty if nothing does that it knows of.
func (p *Plane) Bypass() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.current().(interface{ Bypass() string }); ok {
		return b.Bypass()
	}
	return ""
}

// Close implements dataplane.Dataplane.
func (p *Plane) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed, p.running = true, none
	var errs []error
	for i := range p.planes {
		if c := &p.planes[i]; c.plane != nil {
			errs = append(errs, c.plane.Close())
			c.plane = nil
		}
	}
	return errors.Join(errs...)
}
