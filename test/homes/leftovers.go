package homes

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// ErrClaimed means that another process has claimed the names.
var ErrClaimed = errors.New("another run is going on")

// Claim makes the names that begin with prefix this process's own until it
// calls release or ends, and removes what an earlier run has left; it returns
// what that was. With wait it waits for another process that has them, else
// the error is ErrClaimed.
func Claim(prefix string, wait bool) (release func() error, removed []string, err error) {
	for {
		// An address without a file: it is free again when the process is gone.
		l, err := net.Listen("unix", "@cakefleet-"+prefix)
		switch {
		case err == nil:
			removed, err := RemoveLeftovers(prefix)
			if err != nil {
				return nil, removed, errors.Join(err, l.Close())
			}
			return l.Close, removed, nil
		case !errors.Is(err, syscall.EADDRINUSE):
			return nil, nil, fmt.Errorf("claim %s: %w", prefix, err)
		case !wait:
			return nil, nil, ErrClaimed
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// RemoveLeftovers ends every process in the namespaces that begin with prefix,
// such as those of a run that was killed, and removes them. It returns their
// names.
func RemoveLeftovers(prefix string) ([]string, error) {
	names, err := Namespaces(prefix)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, killInside(name))
	}
	removed, err := testnet.RemoveLeftovers(prefix)
	return removed, errors.Join(append(errs, err)...)
}

// Namespaces returns the named network namespaces that begin with prefix.
func Namespaces(prefix string) ([]string, error) {
	paths, err := filepath.Glob("/run/netns/" + prefix + "*")
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	for i, p := range paths {
		paths[i] = filepath.Base(p)
	}
	return paths, nil
}

// Inside returns the processes in a named namespace.
func Inside(name string) ([]int, error) {
	ns, err := os.Stat("/run/netns/" + name)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	}
	proc, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range proc {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// One that has just ended is not inside.
		its, err := os.Stat("/proc/" + e.Name() + "/ns/net")
		if err == nil && os.SameFile(ns, its) && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// killInside kills the processes in a namespace and waits until they are gone.
func killInside(name string) error {
	deadline := time.Now().Add(time.Minute)
	for {
		pids, err := Inside(name)
		if err != nil {
			return fmt.Errorf("end processes in %s: %w", name, err)
		}
		pids = slices.DeleteFunc(pids, isZombie)
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("end processes in %s: %v stay", name, pids)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // the next round sees whether it helped
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func isZombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// The name in brackets may contain anything.
	_, rest, ok := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), " ")
	return ok && strings.HasPrefix(rest, "Z")
}
