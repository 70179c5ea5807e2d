package agent

import (
	"errors"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/ending"
	"github.com/cakefleet/cakefleet/engine"
)

// Config is what an agent needs.
type Config struct {
	Controller string // host:port
	StateDir   string // on flash: identity and last known good state; made if its parent exists
	// Token returns the join token, or an empty string while there is none. It
	// is asked again for every attempt. Only a router without a valid
	// certificate uses it.
	Token func() (string, error)
	// Pin is that of the fleet's authority, for a router without a token: an
	// operator then approves it. Empty: a token is needed.
	Pin     string
	Serial  string // serial number, which operators can announce; empty: none
	Version string
	Model   string               // hardware model
	Built   time.Time            // when the program was built, which is before now whatever the router's clock says
	MaxRate engine.BitsPerSecond // what the router can shape, each direction; 0: no limit is known

	Dataplane     dataplane.Dataplane // the agent closes it
	DataplaneName func() string       // "userspace" or "kernel"; nil, or empty while none is open: not known
	// Interface tells of what the data plane shapes; nil: it never changes.
	Interface Interface

	// Probe is the host to measure the delay to, whatever the controller says;
	// plan.ProbeOff is for none; empty: as the controller says.
	Probe         string
	ProbeInterval time.Duration // between two echoes to it; 0: 10 s

	// Before is how the agents before this one ended.
	Before ending.Previous

	Logger hclog.Logger // nil: nothing is logged
}

// Interface tells of the network interface that a data plane shapes.
type Interface interface {
	Device() dataplane.Device // as it is now
	Changed() <-chan struct{} // has a value when Device may return another than before
}

func (c *Config) validate() error {
	switch {
	case c.Controller == "":
		return errors.New("controller address is empty")
	case c.StateDir == "":
		return errors.New("state directory is empty")
	case c.Dataplane == nil:
		return errors.New("data plane is missing")
	case c.Token == nil:
		c.Token = func() (string, error) { return "", nil }
	}
	if c.DataplaneName == nil {
		c.DataplaneName = func() string { return "" }
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return nil
}
