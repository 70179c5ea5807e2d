// Package kernel is the data plane that drives sch_cake through rtnetlink.
//
// Upload has cake (or cake_mq, on devices with several transmit queues) as the
// root qdisc of the WAN interface. Download is redirected on arrival to an ifb
// of our own, whose root qdisc is cake. The kernel does all the work: packets
// stay shaped while the agent is stopped, hangs, is upgraded or is killed.
//
// What the kernel has is the truth. Every change begins by reading it, so that
// a second Apply of the same link changes nothing, one after a crash goes on
// from what is left, and Clear and Close remove what is there whoever made it
// with our names: the qdisc handles ca4e: and ca4f:, the ifb "cfifb" with the
// WAN interface's index, and the filter preferences 51789 and 51790. That an
// ingress qdisc is ours, too, stands in the ifb's alias, because it has no
// handle of its own. A change that can't be finished is undone.
//
// Somebody else's filters are left alone, and so is their root qdisc unless
// Config.Takeover says otherwise.
//
// The MTU of a configuration is the ifb's; in the upload direction it is what
// the interface has. A direction that neither has a rate nor washes is left
// alone: its statistics stand still. There is no histogram of sojourn times:
// sch_cake doesn't have one.
package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/offload"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Config is how a Dataplane is opened.
type Config struct {
	Interface string
	Logger    hclog.Logger
	MaxRate   engine.BitsPerSecond // what this router can shape; 0 = not known

	// Takeover allows to replace a root qdisc that somebody has put on the
	// interface. It is put back by Clear and Close.
	Takeover bool
	// RunDir is where a replaced qdisc is noted, so that it is put back even
	// after a crash. It should not survive a reboot, as qdiscs don't; empty:
	// it is remembered in memory only.
	RunDir string
}

// Dataplane implements dataplane.Dataplane.
type Dataplane struct {
	cfg Config
	log hclog.Logger

	mu     sync.Mutex // guards what follows, and serializes the methods
	conn   conn
	watch  looker // nil: what takes packets past us is not known
	bypass string // what does, as it was last said
	closed bool

	running *running // nil: nothing is shaped
	index   uint32   // of the interface, when it was seen last
	taken   *taken   // somebody else's root qdisc; nil: there was none
	noNAT   bool     // the kernel has no connection tracking
	noMQ    bool     // the kernel has no cake_mq, or not for this interface
	passing int      // how often in a row download was seen to pass by
}

// looker knows what takes packets past netfilter's hooks and queueing
// disciplines: an offload.Watch, or a fake.
type looker interface {
	Look(now, ppp bool) ([]offload.Table, error)
	Close() error
}

// running is what the last successful Apply made.
type running struct {
	link             plan.Link
	index, ifb       uint32 // of the interfaces; ifb is 0 while download is left alone
	upOn, downOn     bool
	ppp              bool // it is a PPP session, such as PPPoE
	up, down         counters
	queues           map[uint32]*counters // of cake_mq, by the parent of the queue
	received, shaped uint64               // packets when it was made: on the interface, and by the ifb
}

var _ dataplane.Dataplane = (*Dataplane)(nil)

// Open opens a socket in the network namespace of the calling thread and finds
// out whether the kernel has what it takes; if not, the error is
// dataplane.ErrUnsupported and names what is missing. No packet is touched
// before the first Apply.
func Open(c Config) (*Dataplane, error) {
	s, err := dial()
	if err != nil {
		return nil, fmt.Errorf("open data plane on %s: %w", c.Interface, err)
	}
	d, err := open(c, s)
	if err != nil {
		return nil, err
	}
	if w, err := offload.Open(c.Interface); err != nil {
		d.log.Info("flow offload can't be seen", "error", err) // shaping does without
	} else {
		d.watch = w
	}
	return d, nil
}

func open(c Config, conn conn) (*Dataplane, error) {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	d := &Dataplane{cfg: c, log: c.Logger.Named("kernel"), conn: conn}
	err := d.start()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open data plane on %s: %w", c.Interface, err), conn.close())
	}
	return d, nil
}

func (d *Dataplane) start() error {
	if d.cfg.Interface == "" {
		return errors.New("the interface has no name")
	}
	if err := probe(d.conn, d.cfg.Interface); err != nil {
		return err
	}
	if err := d.removeOrphans(); err != nil {
		return err
	}
	return d.readTaken()
}

// Apply implements dataplane.Dataplane.
func (d *Dataplane) Apply(ctx context.Context, l plan.Link) (dataplane.Effective, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return dataplane.Effective{}, os.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return dataplane.Effective{}, err
	}
	for _, dir := range []struct {
		name string
		c    engine.Config
	}{{"down", l.Down}, {"up", l.Up}} {
		if err := d.check(dir.name, dir.c); err != nil {
			return dataplane.Effective{}, err
		}
	}
	eff, err := d.apply(l)
	if err != nil {
		return dataplane.Effective{}, fmt.Errorf("shape %s: %w", d.cfg.Interface, err)
	}
	return eff, nil
}

// check refuses what sch_cake or this router can't run.
func (d *Dataplane) check(name string, c engine.Config) error {
	if err := c.Validate(); err != nil {
		return &dataplane.RejectedError{Field: name, Reason: err.Error()}
	}
	if c.Tins > engine.Precedence {
		return &dataplane.RejectedError{Field: name + ".tins", Reason: fmt.Sprintf("sch_cake has no %s; the userspace data plane has", c.Tins), Unsupported: true}
	}
	if limit := d.cfg.MaxRate; limit != 0 && c.Rate > limit {
		return &dataplane.RejectedError{Field: name + ".rate", Reason: fmt.Sprintf("%s is more than the %s that this router may shape", c.Rate, limit)}
	}
	return dataplane.TooFast(name, c.Rate, d.conn.speed(d.cfg.Interface), d.cfg.Interface)
}

// on reports whether a direction needs a qdisc.
func on(c engine.Config) bool { return c.Rate != 0 || c.Autorate || c.Wash }

// Clear implements dataplane.Dataplane.
func (d *Dataplane) Clear(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return os.ErrClosed
	}
	return d.clear()
}

func (d *Dataplane) clear() error {
	d.running, d.passing = nil, 0
	if err := d.removeAll(); err != nil {
		return fmt.Errorf("stop shaping %s: %w", d.cfg.Interface, err)
	}
	return nil
}

// Lost tells that there is no interface of the name at the moment. What is left
// of the one that was there, or is on it under another name, is removed.
func (d *Dataplane) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.index == 0 {
		return nil
	}
	d.running, d.passing = nil, 0
	return d.removeOrphans()
}

// Stats implements dataplane.Dataplane. ok is false, too, when somebody has
// changed or removed what Apply made, or download is seen to pass by: the next
// Apply mends it.
func (d *Dataplane) Stats(st *dataplane.Stats) (ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == nil {
		return false
	}
	*st = dataplane.Stats{}
	if err := d.stats(st); err != nil {
		d.log.Error("what shapes has changed", "error", err)
		d.running = nil
		return false
	}
	return true
}

// Bypass says what takes packets past cake that only somebody else can turn off;
// empty if nothing does. It looks at most every minute.
func (d *Dataplane) Bypass() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.running == nil || d.watch == nil {
		return ""
	}
	tables, err := d.watch.Look(false, d.running.ppp)
	if err != nil {
		d.log.Debug("flow offload can't be seen", "error", err)
	}
	before := d.bypass
	d.bypass = offload.PastQdiscs(tables, d.running.upOn && d.running.link.Up.Fwmark != 0)
	switch {
	case d.bypass != "" && before == "":
		d.log.Warn("flow offload is in the way", "reason", d.bypass)
	case d.bypass == "" && before != "":
		d.log.Info("flow offload is not in the way any more")
	}
	return d.bypass
}

// Close implements dataplane.Dataplane.
func (d *Dataplane) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	err := errors.Join(d.clear(), d.conn.close())
	if d.watch != nil {
		err = errors.Join(err, d.watch.Close())
	}
	return err
}
