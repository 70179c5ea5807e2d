package main

import (
	"fmt"
	"math/rand/v2"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
)

// openDataplane returns the data plane that was asked for, and its name.
func openDataplane(o options, log hclog.Logger) (dataplane.Dataplane, string, error) {
	if o.dataplane == "kernel" {
		return nil, "", fmt.Errorf("data plane %s: not in this build yet", o.dataplane)
	}
	d, err := userspace.Open(userspace.Config{
		Interface: o.iface,
		Logger:    log.Named("dataplane"),
		MaxRate:   o.maxRate,
		Seed:      rand.Uint64(),
	})
	if err != nil {
		return nil, "", err
	}
	return d, "userspace", nil
}
