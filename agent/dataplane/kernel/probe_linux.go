package kernel

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/engine"
)

// probe rehearses on a device of its own everything that shaping needs. What
// the kernel does not have is an error that says so, and dataplane.ErrUnsupported.
func probe(c conn, iface string) (err error) {
	// One agent an interface: the name is what an earlier one may have left.
	h := fnv.New32a()
	h.Write([]byte(iface))
	name := fmt.Sprintf("%s%08x", probePrefix, h.Sum32())
	if l, err := findLink(c, name); err != nil {
		return err
	} else if l != nil {
		if err := send(c, "remove "+name, deleteLink(l.index)); err != nil {
			return err
		}
	}
	before, err := strays(c)
	if err != nil {
		return err
	}
	if err := send(c, "make "+name, newIFB(name, 1500)); missing(err) {
		return lacks("ifb devices", "kmod-ifb", err)
	} else if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, send(c, "remove "+name, deleteLinkByName(name))) }()
	if err := removeStrays(c, before); err != nil {
		return err
	}
	l, err := findLink(c, name)
	if err != nil {
		return err
	}
	if l == nil {
		return fmt.Errorf("make %s: it is not there", name)
	}
	return rehearse(c, l.index)
}

func rehearse(c conn, index uint32) error {
	if err := send(c, "make a cake", setCake(create, index, "cake", engine.DefaultConfig(), false)); missing(err) {
		return lacks("sch_cake", "kmod-sched-cake", err)
	} else if err != nil {
		return err
	}
	var err error
	for _, kind := range []string{"clsact", "ingress"} {
		if err = send(c, "make a "+kind+" qdisc", newIngress(index, kind)); err == nil {
			break
		}
	}
	if missing(err) || errors.Is(err, unix.EINVAL) {
		return lacks("ingress qdisc", "kmod-sched-core", err)
	} else if err != nil {
		return err
	}
	for _, kind := range []string{"matchall", "u32"} {
		// To itself: no packet ever passes.
		if err = send(c, "make a redirect with "+kind, newFilter(index, kind, prefPlain, index, "")); !missing(err) {
			break
		}
	}
	if missing(err) {
		return lacks("a filter with a redirect (matchall or u32, mirred)", "kmod-sched-core", err)
	}
	return err
}

func lacks(what, pkg string, err error) error {
	return fmt.Errorf("%w: it has no %s (OpenWrt: package %s): %w", dataplane.ErrUnsupported, what, pkg, err)
}

// cleanName makes a file name of an interface's.
func cleanName(iface string) string { return strings.ReplaceAll(iface, "/", "_") }
