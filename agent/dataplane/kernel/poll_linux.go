package kernel

import (
	"errors"
	"fmt"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/engine"
)

// passingPackets is how many packets may arrive without one of them reaching
// the ifb before something must be wrong.
const passingPackets = 1000

// stats fills st. An error means that what Apply made is not there any more.
func (d *Dataplane) stats(st *dataplane.Stats) error {
	r := d.running
	w := &world{wan: link{index: r.index}}
	wan, err := findLink(d.conn, d.cfg.Interface)
	if err != nil {
		return err
	}
	if wan == nil || wan.index != r.index {
		return dataplane.ErrNoDevice
	}
	if r.downOn {
		if w.ifb, err = findLink(d.conn, ifbName(r.index)); err != nil {
			return err
		}
		if w.ifb == nil || w.ifb.index != r.ifb || !w.ifb.up {
			return fmt.Errorf("%s is gone or down", ifbName(r.index))
		}
	}
	if err := d.lookQdiscs(w); err != nil {
		return err
	}
	st.Down.Config, st.Up.Config = r.link.Down, r.link.Up
	if r.downOn {
		if err := unchanged(w.ifbRoot, r.link.Down); err != nil {
			return fmt.Errorf("download: %w", err)
		}
		decodeStats(w.ifbRoot.stats, &st.Down)
		if w.ingress == nil || wan.received-r.received > passingPackets && packets(w.ifbRoot) == r.shaped {
			d.passing++
			return fmt.Errorf("download passes by %s", w.ifb.name)
		}
		if packets(w.ifbRoot) != r.shaped {
			d.passing = 0
			r.received, r.shaped = wan.received, packets(w.ifbRoot)
		}
		r.down.widen(&st.Down)
	}
	if !r.upOn {
		return nil
	}
	if err := unchanged(w.root, r.link.Up); err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	r.pollUp(w, &st.Up)
	return nil
}

func unchanged(q *qdisc, c engine.Config) error {
	if !isCake(q) {
		return errors.New("the root qdisc is not ours any more")
	}
	have, _ := decodeOptions(q.options.Attrs())
	if !same(have, c) {
		return errors.New("somebody has changed the options of cake")
	}
	return nil
}

// packets returns what a cake has sent, modulo 2^32.
func packets(q *qdisc) uint64 {
	v, ok := q.stats.Find(statsBasic)
	if !ok || len(v.Bytes) < 12 {
		return 0
	}
	return uint64(v.Order.Uint32(v.Bytes[8:]))
}

// pollUp fills st from the root qdisc or, if that is cake_mq, from its queues,
// each of which counts alone.
func (r *running) pollUp(w *world, st *engine.Stats) {
	if w.root.kind == "cake" {
		decodeStats(w.root.stats, st)
		r.up.widen(st)
		return
	}
	if r.queues == nil {
		r.queues = make(map[uint32]*counters, len(w.queues))
	}
	var one engine.Stats
	for i := range w.queues {
		q := &w.queues[i]
		if q.kind != "cake" {
			continue
		}
		c := r.queues[q.parent]
		if c == nil {
			c = new(counters)
			r.queues[q.parent] = c
		}
		decodeStats(q.stats, &one)
		c.widen(&one)
		add(st, &one)
	}
}
