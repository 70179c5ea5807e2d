package state

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrInUse means that another agent has the state directory.
var ErrInUse = errors.New("another cakefleet-agent uses it: stop that one first, or give this one its own with --state-dir")

// Lock keeps other agents out of a state directory until the result is closed
// or the process ends, however it ends. It writes nothing. A file system that
// knows no locks is no error.
func Lock(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	err = unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.Join(fmt.Errorf("state directory %s: %w", dir, ErrInUse), d.Close())
	}
	return d, nil
}
