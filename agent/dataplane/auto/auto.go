// Package auto chooses the data plane that this machine's kernel can carry.
package auto

import (
	"errors"
	"fmt"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
)

// Candidate is a data plane that may be chosen.
type Candidate struct {
	Name string
	Open func() (dataplane.Dataplane, error)
}

// Open opens the first candidate that opens, and returns its name. One that the
// kernel can't carry is passed over quietly; another error is logged, because a
// customer is better off with the next one than with none. The error of none
// has all reasons.
func Open(candidates []Candidate, log hclog.Logger) (dataplane.Dataplane, string, error) {
	var errs []error
	for _, c := range candidates {
		d, err := c.Open()
		if err == nil {
			return d, c.Name, nil
		}
		if errors.Is(err, dataplane.ErrUnsupported) {
			log.Info("data plane is not possible here", "dataplane", c.Name, "error", err)
		} else {
			log.Warn("data plane does not open", "dataplane", c.Name, "error", err)
		}
		errs = append(errs, fmt.Errorf("%s: %w", c.Name, err))
	}
	return nil, "", errors.Join(errs...)
}
