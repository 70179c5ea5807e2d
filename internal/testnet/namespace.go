// Package testnet builds small networks out of network namespaces, for tests
// on real packets and for the demo. Everything goes through netlink, so that
// nothing needs to be installed; it needs root.
//
// Namespaces are named, so that "ip netns exec NAME" works on them from
// outside. Whoever makes one closes it; RemoveLeftovers clears what an earlier
// run that was killed has left.
package testnet

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// runDir is where ip-netns(8) keeps the names.
const runDir = "/run/netns"

// Namespace is one network namespace with its name. Its methods may be called
// from any goroutine.
type Namespace struct {
	Name string

	ns netns.NsHandle
	nl *netlink.Handle
}

// New makes a namespace with its loopback up and IPv6 duplicate address
// detection off. It fails if the name exists.
func New(name string) (*Namespace, error) {
	if _, err := os.Stat(filepath.Join(runDir, name)); err == nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, os.ErrExist)
	}
	if err := prepareRunDir(); err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	n := &Namespace{Name: name, ns: -1}
	err := onThread(func() error {
		var err error
		n.ns, err = netns.NewNamed(name) // moves this thread into it
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	n.nl, err = netlink.NewHandleAt(n.ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink in %s: %w", name, err), n.Close())
	}
	// Addresses are usable at once only without duplicate address detection.
	for _, which := range []string{"all", "default"} {
		if err := n.Sysctl("net/ipv6/conf/"+which+"/accept_dad", "0"); err != nil {
			return nil, errors.Join(err, n.Close())
		}
	}
	if err := n.Up("lo"); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// Open returns a handle on a namespace that exists, such as one that an
// earlier process has left running on purpose.
func Open(name string) (*Namespace, error) {
	ns, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink in %s: %w", name, err), ns.Close())
	}
	return &Namespace{Name: name, ns: ns, nl: nl}, nil
}

// Close removes the namespace. Its links go away with the last process and the
// last socket in it. It is idempotent.
func (n *Namespace) Close() error {
	if n.ns == -1 {
		return nil
	}
	if n.nl != nil {
		n.nl.Close()
	}
	err := n.ns.Close() // sets it to -1
	return errors.Join(err, remove(n.Name))
}

// Do runs f on a thread inside the namespace and returns its error. Sockets
// that f opens stay in the namespace, and so does a process that it starts,
// with one trap: the thread ends with f, so Pdeathsig would kill the process
// at once. A net.Dial in f needs a literal address, since name resolution and
// racing of addresses move to other goroutines.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(n.ns); err != nil {
			return fmt.Errorf("enter namespace %s: %w", n.Name, err)
		}
		return f()
	})
}

// Start starts cmd inside the namespace.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs cmd inside the namespace and waits for it.
func (n *Namespace) Run(cmd *exec.Cmd) error {
	if err := n.Start(cmd); err != nil {
		return err
	}
	return cmd.Wait()
}

// Sysctl sets a value below /proc/sys, such as "net/ipv4/ip_forward".
func (n *Namespace) Sysctl(key, value string) error {
	return n.Do(func() error {
		// net.* of the thread that opens the file, not of the process.
		if err := os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0o644); err != nil {
			return fmt.Errorf("set %s in %s: %w", key, n.Name, err)
		}
		return nil
	})
}

// Forward makes the namespace a router for IPv4 and IPv6.
func (n *Namespace) Forward() error {
	return errors.Join(
		n.Sysctl("net/ipv4/ip_forward", "1"),
		n.Sysctl("net/ipv6/conf/all/forwarding", "1"))
}

// RemoveLeftovers removes every namespace whose name begins with prefix and
// returns the names. Processes inside are the caller's business.
func RemoveLeftovers(prefix string) ([]string, error) {
	entries, err := os.ReadDir(runDir)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var names []string
	var errs []error
	for _, e := range entries {
		if prefix == "" || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		if err := remove(e.Name()); err != nil {
			errs = append(errs, err)
			continue
		}
		names = append(names, e.Name())
	}
	return names, errors.Join(errs...)
}

// prepareRunDir makes runDir a shared mount, as ip-netns(8) does before its
// first namespace. Were it done after ours, they would lie hidden below the
// new mount and could not be removed.
func prepareRunDir() error {
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return err
	}
	// The first ones may come at one moment; of two mounts the lower one would
	// keep names from being removed. ip-netns(8) takes the same lock.
	lock, err := os.Open(runDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", runDir, err)
	}
	const shared = unix.MS_SHARED | unix.MS_REC
	err = unix.Mount("", runDir, "none", shared, "")
	if errors.Is(err, unix.EINVAL) { // no mount yet
		if err = unix.Mount(runDir, runDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", runDir, "none", shared, "")
		}
	}
	if err != nil {
		return fmt.Errorf("mount %s: %w", runDir, err)
	}
	return nil
}

func remove(name string) error {
	path := filepath.Join(runDir, name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: a plain file
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

// onThread runs f on a thread of its own that is thrown away afterwards: one
// that has changed its namespace must not serve other goroutines.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := errors.New("the function has ended its goroutine")
		defer func() { done <- err }()
		err = f()
	}()
	return <-done
}
