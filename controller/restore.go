package controller

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/store"
)

// RestoreConfig says what Restore does.
type RestoreConfig struct {
	File    string       // a backup that cakefleetctl backup has written
	DataDir string       // of a controller that does not run; made if it doesn't exist
	Replace bool         // move an etcd that is there out of the way
	Logger  hclog.Logger // nil: none
}

// Restore makes the store of a controller that does not run from a backup, and
// returns what was done and what is left to do, in words.
func Restore(ctx context.Context, c RestoreConfig) (done []string, err error) {
	if c.File == "" {
		return nil, errors.New("restore: which backup? say --from FILE")
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	held := &Controller{config: Config{DataDir: c.DataDir}, logger: c.Logger}
	unlock, err := held.lock()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	res, err := store.Restore(ctx, store.RestoreConfig{File: c.File, DataDir: c.DataDir, Replace: c.Replace, Logger: c.Logger.Named("store")})
	if err != nil {
		return nil, err
	}
	done = append(done, fmt.Sprintf("the store in %s is that of %s, revision %d", c.DataDir, c.File, res.Revision))
	if !res.Checked {
		done = append(done, "it was a bare database without a checksum, so that nobody knows whether it is whole")
	}
	if res.Moved != "" {
		done = append(done, "what was there is in "+res.Moved)
	}
	if _, err := os.Stat(filepath.Join(c.DataDir, "ca.key")); errors.Is(err, fs.ErrNotExist) {
		done = append(done, "there is no authority in "+c.DataDir+": put ca.pem and ca.key of the fleet there before the controller starts (or start it with --ca-cert and --ca-key), else every router has to join anew")
	}
	done = append(done, "routers that run something newer are not moved back: start the controller and look with cakefleetctl doctor")
	return done, nil
}
