package wan

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrInUse means that another agent has the interface.
var ErrInUse = errors.New("another cakefleet-agent shapes it: stop that one first")

// lock is held by whoever shapes an interface. It is a name that a network
// namespace has once, and that its kernel takes back from a process that dies.
type lock struct{ file *os.File }

// take takes the lock in the network namespace of the calling thread.
func take(iface string) (lock, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return lock{}, fmt.Errorf("lock interface %s: %w", iface, err)
	}
	l := lock{os.NewFile(uintptr(fd), "lock")}
	// The @ stands for a name that is in no file system.
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: "@cakefleet-agent/" + iface})
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		err = ErrInUse
	case err == nil:
		return l, nil
	}
	return lock{}, errors.Join(fmt.Errorf("interface %s: %w", iface, err), l.file.Close())
}

func (l lock) release() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}
