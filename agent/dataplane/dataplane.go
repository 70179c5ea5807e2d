// Package dataplane says what shapes a router's link. There are two
// implementations: userspace runs the engine on NFQUEUE, kernel drives
// sch_cake. Both take the same configuration and give the same statistics.
package dataplane

import (
	"context"
	"errors"
	"fmt"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// ErrUnsupported means that this machine's kernel can't carry the data plane.
var ErrUnsupported = errors.New("not supported by this kernel")

// ErrNoDevice means that the interface is not there: it comes with PPPoE or a
// modem, and may go again. Nothing is shaped until it comes.
var ErrNoDevice = errors.New("no such interface")

// ErrEnded means that a data plane has given up for good. Packets pass
// unshaped; another one may be opened in its place.
var ErrEnded = errors.New("data plane has given up")

// RejectedError is a link that the router can't run. What ran before still
// runs. Any other error of Apply means that the data plane itself is broken.
type RejectedError struct {
	Field  string // such as "down.rate"
	Reason string // for people, with the value and the limit
	// Unsupported: it is the kernel that has not what this data plane needs for
	// the link; another data plane may run it. The error is ErrUnsupported, too.
	Unsupported bool
}

// Error returns the field and the reason.
func (e *RejectedError) Error() string { return fmt.Sprintf("%s: %s", e.Field, e.Reason) }

// Unwrap returns ErrUnsupported if it is that, too.
func (e *RejectedError) Unwrap() error {
	if e.Unsupported {
		return ErrUnsupported
	}
	return nil
}

// TooFast returns why a link is faster than its interface; nil if it is not.
// speed is 0 if the interface has none. name is the direction.
func TooFast(name string, rate, speed engine.BitsPerSecond, iface string) error {
	if speed == 0 || rate <= speed {
		return nil
	}
	return &RejectedError{Field: name + ".rate", Reason: fmt.Sprintf("%s is more than the speed of %s, %s", rate, iface, speed)}
}

// Effective is what a data plane runs, read back from it.
type Effective struct {
	Link   plan.Link
	Clamps []plan.Clamp // values that differ from the desired ones, and why
}

// Stats are a data plane's counters since it was opened.
type Stats struct {
	Down, Up        engine.Stats
	BypassedPackets uint64 // passed unshaped because the data plane was not ready
	QueueOverflows  uint64 // packets that the kernel could not queue
	Batches         uint64 // reads that returned packets
	Packets         uint64 // packets in those reads
}

// Device is what the kernel says of a network interface.
type Device struct {
	Name  string
	Index uint32 // 0: there is none of that name
	MTU   uint32
	Type  uint16 // ARPHRD_*
	Up    bool   // by whoever configures it; what the cable says is another matter

	Carrier       bool                 // what the cable says
	Speed         engine.BitsPerSecond // of the cable; 0: not known, or it has none
	Comings       uint64               // with another index, since somebody looks
	CarrierLosses uint64               // since somebody looks
}

// Same tells whether nothing has changed that a data plane depends on.
func (d Device) Same(o Device) bool {
	return d.Name == o.Name && d.Index == o.Index && d.MTU == o.MTU && d.Type == o.Type
}

// Dataplane shapes one WAN interface. Apply, Stats and Close may be called
// from different goroutines.
type Dataplane interface {
	// Apply makes the link run, in place where something runs already: no
	// packet is lost and none passes unshaped because of the change. A
	// *RejectedError leaves everything as it was.
	Apply(ctx context.Context, link plan.Link) (Effective, error)
	// Clear stops shaping; packets pass as if there were no data plane.
	Clear(ctx context.Context) error
	// Stats fills st; ok is false while nothing is shaped.
	Stats(st *Stats) (ok bool)
	// Close undoes everything and releases the descriptors. It is idempotent.
	Close() error
}
