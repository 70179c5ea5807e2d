package controller

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/identity"
)

// watchCertificates tells every day of certificates that end soon, until ctx
// ends.
func watchCertificates(ctx context.Context, all []identity.Certificate, logger hclog.Logger) {
	day := time.NewTicker(24 * time.Hour)
	defer day.Stop()
	for {
		for _, c := range all {
			switch err := c.Ending(time.Now()); {
			case errors.Is(err, identity.ErrEnding):
				logger.Error("certificate", "kind", c.Purpose, "valid-until", c.Ends, "error", err)
			case err != nil:
				logger.Warn("certificate", "kind", c.Purpose, "valid-until", c.Ends, "error", err)
			}
		}
		select {
		case <-day.C:
		case <-ctx.Done():
			return
		}
	}
}
