package main

import (
	"math/rand/v2"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/auto"
	"github.com/cakefleet/cakefleet/agent/dataplane/kernel"
	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/agent/dataplane/wan"
)

// openDataplane returns the data plane that was asked for, on an interface that
// may come and go.
func openDataplane(o options, log hclog.Logger) (*wan.Plane, error) {
	log = log.Named("dataplane")
	return wan.Open(wan.Config{
		Interface: o.iface,
		Logger:    log,
		Open: func() (dataplane.Dataplane, string, error) {
			d, err := auto.Open(candidates(o, log), log)
			if err != nil {
				return nil, "", err
			}
			return d, d.Name(), nil
		},
	})
}

// candidates are the data planes that may be opened, the best first.
func candidates(o options, log hclog.Logger) []auto.Candidate {
	var candidates []auto.Candidate
	if o.dataplane != "userspace" {
		candidates = append(candidates, auto.Candidate{Name: "kernel", Open: func() (dataplane.Dataplane, error) {
			return kernel.Open(kernel.Config{
				Interface: o.iface,
				Logger:    log,
				MaxRate:   o.maxRate,
				Takeover:  o.takeover,
				RunDir:    o.runDir,
			})
		}})
	}
	if o.dataplane != "kernel" {
		candidates = append(candidates, auto.Candidate{Name: "userspace", Open: func() (dataplane.Dataplane, error) {
			return userspace.Open(userspace.Config{
				Interface: o.iface,
				Logger:    log,
				MaxRate:   o.maxRate,
				Seed:      rand.Uint64(),
			})
		}})
	}
	return candidates
}
