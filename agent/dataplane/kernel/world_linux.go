package kernel

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
)

// Our names in the kernel.
const (
	ourHandle   = 0xca4e0000 // of cake
	ourMQHandle = 0xca4f0000 // of cake_mq: a qdisc can be replaced by another kind only under another handle

	// Behind every preference that tc hands out by itself (49152 and less), so
	// that the filters of others see packets first.
	prefMark  = 0xca4d // with the connection's mark
	prefPlain = 0xca4e

	ifbPrefix   = "cfifb"   // and a number of at most 10 digits: 15 characters
	probePrefix = "cfprobe" // 8 hexadecimal digits fit behind it

	// What the ifb's alias says if the ingress qdisc on the WAN interface is ours.
	aliasIngress = "cakefleet made the ingress qdisc"
)

func ifbName(index uint32) string { return ifbPrefix + strconv.FormatUint(uint64(index), 10) }

// world is what the kernel has on our interfaces.
type world struct {
	wan     link
	root    *qdisc // of wan; nil: none that a listing shows
	ingress *qdisc
	filters []filter // of everybody, on arrival
	egress  bool     // somebody has filters on departure
	ifb     *link    // nil: none yet
	ifbRoot *qdisc
	queues  []qdisc // of the root if it is cake_mq
}

func isCake(q *qdisc) bool {
	return q != nil && (q.handle == ourHandle && q.kind == "cake" || q.handle == ourMQHandle && q.kind == "cake_mq")
}

// foreign reports whether somebody has put the qdisc there on purpose: those
// that the kernel chooses have no handle.
func foreign(q *qdisc) bool { return q != nil && q.handle != 0 && !isCake(q) }

func ours(f filter) bool { return f.pref == prefMark || f.pref == prefPlain }

// findLink returns the interface of that name; nil if there is none.
func findLink(c conn, name string) (*link, error) {
	answers, err := c.do(linkByName(name))
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	for _, m := range answers {
		if l, ok := decodeLink(m); ok && l.name == name {
			return &l, nil
		}
	}
	return nil, fmt.Errorf("look up %s: the kernel's answer makes no sense", name)
}

// look reads what there is. The error is dataplane.ErrNoDevice if the WAN
// interface is not there.
func (d *Dataplane) look() (*world, error) {
	wan, err := findLink(d.conn, d.cfg.Interface)
	if err != nil {
		return nil, err
	}
	if wan == nil {
		return nil, dataplane.ErrNoDevice
	}
	return d.lookAt(wan)
}

// lookAt reads what there is on an interface.
func (d *Dataplane) lookAt(wan *link) (w *world, err error) {
	w = &world{wan: *wan}
	if w.ifb, err = findLink(d.conn, ifbName(wan.index)); err != nil {
		return nil, err
	}
	if w.ifb != nil && w.ifb.kind != "ifb" {
		return nil, fmt.Errorf("interface %s is not ours: it is of kind %q", w.ifb.name, w.ifb.kind)
	}
	if err := d.lookQdiscs(w); err != nil {
		return nil, err
	}
	if w.ingress == nil {
		return w, nil
	}
	for _, parent := range []uint32{blockIngress, blockEgress} {
		answers, err := d.conn.do(allFilters(wan.index, parent))
		switch {
		case parent == blockEgress && errors.Is(err, unix.EINVAL), parent == blockEgress && errors.Is(err, unix.ENOENT):
			continue // a plain ingress qdisc has no such side
		case err != nil:
			return nil, fmt.Errorf("list filters: %w", err)
		}
		for _, m := range answers {
			f, ok := decodeFilter(m)
			if !ok {
				continue
			}
			if parent == blockEgress {
				// A plain ingress qdisc answers for both with the same ones.
				w.egress = w.egress || w.ingress.kind == "clsact"
				continue
			}
			w.add(f)
		}
	}
	return w, nil
}

// add notes a filter; the kernel lists some in several parts.
func (w *world) add(f filter) {
	for i := range w.filters {
		if o := &w.filters[i]; o.pref == f.pref && o.chain == f.chain {
			if f.target != 0 {
				o.target = f.target
			}
			return
		}
	}
	w.filters = append(w.filters, f)
}

func (d *Dataplane) lookQdiscs(w *world) error {
	answers, err := d.conn.do(allQdiscs())
	if err != nil {
		return fmt.Errorf("list qdiscs: %w", err)
	}
	for _, m := range answers {
		q, ok := decodeQdisc(native(), m)
		switch {
		case !ok:
		case q.index == w.wan.index && q.parent == parentRoot:
			w.root = &q
		case q.index == w.wan.index && q.parent == parentIngress:
			w.ingress = &q
		case q.index == w.wan.index && q.parent&0xffff0000 == ourMQHandle:
			w.queues = append(w.queues, q)
		case w.ifb != nil && q.index == w.ifb.index && q.parent == parentRoot:
			w.ifbRoot = &q
		}
	}
	return nil
}

// removeOrphans removes ifbs of ours whose interface is gone, such as that of
// a PPPoE session before the present one, and what is ours on the interface
// that had the name before, if that has another one now.
func (d *Dataplane) removeOrphans() error {
	answers, err := d.conn.do(allLinks())
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	for _, m := range answers {
		if l, ok := decodeLink(m); ok && l.index == d.index && l.name != d.cfg.Interface {
			if err := d.removeFrom(&l); err != nil {
				return err
			}
		}
	}
	indexes := make(map[uint32]bool, len(answers))
	var ifbs []link
	for _, m := range answers {
		l, ok := decodeLink(m)
		if !ok {
			continue
		}
		indexes[l.index] = true
		if l.kind == "ifb" && strings.HasPrefix(l.name, ifbPrefix) {
			ifbs = append(ifbs, l)
		}
	}
	for _, l := range ifbs {
		index, err := strconv.ParseUint(l.name[len(ifbPrefix):], 10, 32)
		if err != nil || indexes[uint32(index)] {
			continue
		}
		if err := d.request("remove "+l.name, deleteLink(l.index)); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
		d.log.Info("an ifb whose interface is gone is removed", "ifb", l.name)
	}
	return nil
}

func (d *Dataplane) removeFrom(l *link) error {
	w, err := d.lookAt(l)
	if err != nil {
		return err
	}
	d.log.Info("interface has another name now, it is left unshaped", "interface", l.name)
	return errors.Join(d.removeDown(w), d.removeUp(w))
}

// request sends one request whose answer doesn't matter.
func (d *Dataplane) request(what string, req []byte) error { return send(d.conn, what, req) }

func send(c conn, what string, req []byte) error {
	if _, err := c.do(req); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
