package main

import (
	"fmt"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
)

// openDataplane returns the data plane that was asked for, and its name.
func openDataplane(o options, _ hclog.Logger) (dataplane.Dataplane, string, error) {
	return nil, "", fmt.Errorf("data plane %s: not in this build yet", o.dataplane)
}
