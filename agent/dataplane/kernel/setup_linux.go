package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// job is one change on its way: what to undo if it can't be finished.
type job struct {
	d    *Dataplane
	w    *world
	undo []undoing

	newUp, newDown bool // a qdisc was made, whose counters begin at 0
}

type undoing struct {
	what string
	req  []byte
}

// do sends a request. Once it is done, undo undoes it.
func (j *job) do(what string, req []byte, undo ...[]byte) error {
	if err := j.d.request(what, req); err != nil {
		return err
	}
	for _, req := range undo {
		j.undo = append(j.undo, undoing{what, req})
	}
	return nil
}

// rollBack undoes everything, the last first.
func (j *job) rollBack() error {
	var errs []error
	for _, u := range slices.Backward(j.undo) {
		err := j.d.request("undo: "+u.what, u.req)
		if err != nil && !errors.Is(err, unix.ENODEV) { // what it was on is gone
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// apply makes the link run. First comes what shapes, then goes what is not
// needed any more, and in the end it is read back.
func (d *Dataplane) apply(l plan.Link) (dataplane.Effective, error) {
	var eff dataplane.Effective
	w, err := d.look()
	if err != nil {
		if errors.Is(err, dataplane.ErrNoDevice) {
			err = errors.Join(err, d.removeOrphans())
		}
		return eff, err
	}
	if d.index != w.wan.index { // it is another one under the old name
		d.running = nil
		if err := d.removeOrphans(); err != nil {
			return eff, err
		}
		d.index = w.wan.index
	}
	if d.passing > 0 { // it looks right and does nothing
		if err := d.removeDown(w); err != nil {
			return eff, err
		}
		if w, err = d.look(); err != nil {
			return eff, err
		}
	}
	j := &job{d: d, w: w}
	if err := j.setUp(l); err != nil {
		return eff, errors.Join(err, j.rollBack())
	}
	if !on(l.Down) {
		err = d.removeDown(w)
	}
	if !on(l.Up) {
		err = errors.Join(err, d.removeUp(w))
	}
	if err != nil {
		return eff, err
	}
	r, eff, err := d.readBack(l)
	if err != nil {
		return eff, errors.Join(err, j.rollBack())
	}
	if old := d.running; old != nil {
		if !j.newUp {
			r.up, r.queues = old.up, old.queues
		}
		if !j.newDown {
			r.down, r.received, r.shaped = old.down, old.received, old.shaped
		}
	}
	d.running = r
	if d.passing > 1 {
		return eff, fmt.Errorf("download passes by %s, although it was made anew", ifbName(w.wan.index))
	}
	return eff, nil
}

func (j *job) setUp(l plan.Link) error {
	if on(l.Down) {
		if err := j.setUpDown(l.Down); err != nil {
			return err
		}
	}
	if on(l.Up) {
		return j.setUpUp(l.Up)
	}
	return nil
}

// setUpUp makes cake the root qdisc of the interface.
func (j *job) setUpUp(c engine.Config) error {
	w, root := j.w, j.w.root
	kinds := []string{"cake"}
	if w.wan.txQueues > 1 && !c.Autorate && !j.d.noMQ { // cake_mq has no autorate-ingress
		kinds = []string{"cake_mq", "cake"}
	}
	switch {
	case isCake(root) && slices.Contains(kinds, root.kind):
		return j.change("up", w.wan.index, root, c)
	case isCake(root):
		old, _ := decodeOptions(root.options.Attrs())
		return j.cake("up", replace, w.wan.index, "cake", c, setCake(replace, w.wan.index, root.kind, old, !j.d.noNAT))
	case foreign(root):
		return j.takeOver(kinds, c)
	}
	return j.firstKind(kinds, create, c, nil)
}

// firstKind makes the root qdisc of the first kind that the kernel has.
func (j *job) firstKind(kinds []string, flags uint16, c engine.Config, undo []byte) error {
	for i, kind := range kinds {
		back := undo
		if back == nil {
			back = deleteRoot(j.w.wan.index, handleOf(kind))
		}
		err := j.cake("up", flags, j.w.wan.index, kind, c, back)
		if err == nil {
			return nil
		}
		var refused *kernelError
		if i == len(kinds)-1 || !errors.As(err, &refused) && !errors.As(err, new(*dataplane.RejectedError)) {
			return err
		}
		j.d.log.Info("cake_mq is not possible here, plain cake is used", "error", err)
		j.d.noMQ = true
	}
	return nil
}

func (j *job) takeOver(kinds []string, c engine.Config) error {
	d, root := j.d, j.w.root
	name := fmt.Sprintf("qdisc %s %x: on %s", root.kind, root.handle>>16, j.w.wan.name)
	if !d.cfg.Takeover {
		return &dataplane.RejectedError{Field: "up", Reason: name + " is somebody else's: stop what made it (sqm-scripts: /etc/init.d/sqm stop; /etc/init.d/sqm disable), or start the agent with --takeover"}
	}
	t, err := newTaken(j.w)
	if err != nil {
		return &dataplane.RejectedError{Field: "up", Reason: fmt.Sprintf("%s can't be taken over: %v: stop what made it, or remove it (tc qdisc del dev %s root)", name, err, j.w.wan.name)}
	}
	if err := d.noteTaken(t); err != nil {
		return err
	}
	if err := j.firstKind(kinds, replace, c, t.restore()); err != nil {
		return errors.Join(err, d.forgetTaken())
	}
	d.log.Warn("somebody else's root qdisc is replaced, it comes back in the end", "kind", root.kind)
	return nil
}

// change makes a qdisc of ours run c in place.
func (j *job) change(dir string, index uint32, q *qdisc, c engine.Config) error {
	have, _ := decodeOptions(q.options.Attrs())
	if same(have, c) && !q.stab { // a size table counts the overhead once more; any change drops it
		return nil
	}
	return j.cake(dir, ack, index, q.kind, c, setCake(ack, index, q.kind, have, !j.d.noNAT))
}

// cake makes or changes a root qdisc. A kernel that refuses the values gives a
// RejectedError.
func (j *job) cake(dir string, flags uint16, index uint32, kind string, c engine.Config, undo []byte) error {
	what := fmt.Sprintf("set %s for %s", kind, dir)
	err := j.do(what, setCake(flags, index, kind, c, !j.d.noNAT), undo)
	if errors.Is(err, unix.EOPNOTSUPP) && kind == "cake" && !j.d.noNAT {
		if err = j.do(what, setCake(flags, index, kind, c, false), undo); err == nil {
			j.d.noNAT = true
		}
	}
	if j.d.noNAT && c.NAT {
		return &dataplane.RejectedError{Field: dir + ".nat", Reason: "the kernel has no connection tracking", Unsupported: true}
	}
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE), errors.Is(err, unix.EOPNOTSUPP):
		return &dataplane.RejectedError{Field: dir, Reason: err.Error(), Unsupported: true}
	case errors.Is(err, unix.ENOENT):
		return errors.Join(dataplane.ErrUnsupported, err)
	case err == nil && flags != ack:
		j.newUp = j.newUp || dir == "up"
		j.newDown = j.newDown || dir == "down"
	}
	return err
}

// setUpDown makes the ifb with its cake, and only then sends packets there.
func (j *job) setUpDown(c engine.Config) error {
	w := j.w
	if err := j.setUpIFB(c); err != nil {
		return err
	}
	if err := j.setUpIngress(); err != nil {
		return err
	}
	want := filter{pref: prefPlain, target: w.ifb.index}
	if c.Fwmark != 0 { // marks live on connections, which are not known yet on arrival
		want.pref = prefMark
	}
	var old []filter
	found := false
	for _, f := range w.filters {
		switch {
		case !ours(f):
		case f.target == 0:
			// The ifb that it sent to is gone: it drops everything.
			if err := j.do("remove a dead redirect", deleteFilter(w.wan.index, f.kind, f.pref)); err != nil {
				return err
			}
		case f.target != w.ifb.index:
			return fmt.Errorf("filter with preference %d on %s is not ours: it sends to interface %d; remove it (tc filter del dev %s ingress pref %d)", f.pref, w.wan.name, f.target, w.wan.name, f.pref)
		case f.pref == want.pref:
			found = true
		default:
			old = append(old, f)
		}
	}
	if !found {
		if err := j.redirect(want); err != nil {
			return err
		}
	}
	for _, f := range old {
		back := newFilter(w.wan.index, f.kind, f.pref, f.target, f.marks)
		if err := j.do("remove the redirect before", deleteFilter(w.wan.index, f.kind, f.pref), back); err != nil {
			return err
		}
	}
	return nil
}

// redirect sends what arrives to the ifb.
func (j *job) redirect(f filter) error {
	how := []string{""}
	if f.pref == prefMark {
		how = []string{"connmark", "ctinfo"}
	}
	err := error(unix.ENOENT)
	for _, f.marks = range how {
		for _, f.kind = range []string{"matchall", "u32"} {
			if missing(err) {
				err = j.do("redirect download with "+strings.TrimSuffix(f.kind+" and "+f.marks, " and "),
					newFilter(j.w.wan.index, f.kind, f.pref, f.target, f.marks),
					deleteFilter(j.w.wan.index, f.kind, f.pref))
			}
		}
	}
	if missing(err) && f.pref == prefMark {
		return &dataplane.RejectedError{Field: "down.fwmark", Reason: fmt.Sprintf("the kernel can't restore marks of connections on arrival (OpenWrt: package kmod-sched-connmark or kmod-sched-ctinfo): %v", err), Unsupported: true}
	}
	if missing(err) {
		return errors.Join(dataplane.ErrUnsupported, err)
	}
	return err
}

// missing reports whether an error says that the kernel does not have it.
func missing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP)
}

func (j *job) setUpIFB(c engine.Config) error {
	w := j.w
	name := ifbName(w.wan.index)
	mtu := max(uint32(c.MTU), ifbHeader+68) - ifbHeader
	if w.ifb == nil {
		if err := j.newIFB(name, mtu); err != nil {
			return err
		}
	}
	l := w.ifb
	if l.mtu != mtu {
		if err := j.do("set mtu of "+name, setLinkMTU(l.index, mtu), setLinkMTU(l.index, l.mtu)); err != nil {
			return err
		}
	}
	var err error
	switch root := w.ifbRoot; {
	case isCake(root) && root.kind == "cake":
		err = j.change("down", l.index, root, c)
	case foreign(root):
		err = j.cake("down", replace, l.index, "cake", c, deleteRoot(l.index, ourHandle))
	default:
		err = j.cake("down", create, l.index, "cake", c, deleteRoot(l.index, ourHandle))
	}
	if err != nil || l.up {
		return err
	}
	return j.do("bring up "+name, setLinkUp(l.index))
}

// ifbHeader is the link-layer header of an ifb.
const ifbHeader = 14

func (j *job) newIFB(name string, mtu uint32) error {
	before, err := strays(j.d.conn)
	if err != nil {
		return err
	}
	err = j.do("make "+name, newIFB(name, mtu), deleteLinkByName(name))
	if missing(err) {
		return errors.Join(dataplane.ErrUnsupported, err)
	}
	if err != nil {
		return err
	}
	if err := removeStrays(j.d.conn, before); err != nil {
		return err
	}
	l, err := findLink(j.d.conn, name)
	if err != nil {
		return err
	}
	if l == nil {
		return fmt.Errorf("make %s: it is not there", name)
	}
	j.w.ifb = l
	if err := j.do("keep IPv6 off "+name, setLinkNoIPv6(l.index)); err != nil {
		j.d.log.Debug("the ifb may get an address", "error", err) // it hurts nobody
	}
	return nil
}

// strays returns the devices that the ifb module makes when it is loaded
// without numifbs=0, as our request for one of our own may load it.
func strays(c conn) (map[string]uint32, error) {
	found := make(map[string]uint32, 2)
	for _, name := range []string{"ifb0", "ifb1"} {
		l, err := findLink(c, name)
		if err != nil {
			return nil, err
		}
		if l != nil && l.kind == "ifb" && !l.up {
			found[name] = l.index
		} else if l != nil {
			found[name] = 0 // never ours to remove
		}
	}
	return found, nil
}

// removeStrays removes those that were not there before.
func removeStrays(c conn, before map[string]uint32) error {
	after, err := strays(c)
	if err != nil {
		return err
	}
	for name, index := range after {
		if _, old := before[name]; old || index == 0 {
			continue
		}
		if err := send(c, "remove "+name, deleteLink(index)); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

// setUpIngress makes the qdisc that filters on arrival hang on.
func (j *job) setUpIngress() error {
	w := j.w
	if w.ingress != nil {
		return nil
	}
	if w.ifb.alias != aliasIngress {
		if err := j.do("note that the ingress qdisc is ours", setLinkAlias(w.ifb.index, aliasIngress), setLinkAlias(w.ifb.index, w.ifb.alias)); err != nil {
			return err
		}
	}
	var err error
	for _, kind := range []string{"clsact", "ingress"} {
		err = j.do("make "+kind+" qdisc", newIngress(w.wan.index, kind), deleteIngress(w.wan.index))
		if !missing(err) && !errors.Is(err, unix.EINVAL) { // EINVAL: clsact before Linux 4.5
			break
		}
	}
	if missing(err) {
		return errors.Join(dataplane.ErrUnsupported, err)
	}
	return err
}

// removeAll removes whatever is ours.
func (d *Dataplane) removeAll() error {
	w, err := d.look()
	if errors.Is(err, dataplane.ErrNoDevice) { // and with it all but the ifb
		return errors.Join(d.removeOrphans(), d.forgetTaken())
	}
	if err != nil {
		return err
	}
	if d.index != w.wan.index { // the one before has another name now, or is gone
		err = d.removeOrphans()
	}
	return errors.Join(d.removeDown(w), d.removeUp(w), err)
}

// removeDown stops sending packets to the ifb before that goes.
func (d *Dataplane) removeDown(w *world) error {
	gone := func(err error) bool {
		return err == nil || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT)
	}
	others := w.egress
	for _, f := range w.filters {
		if !ours(f) || f.target != 0 && (w.ifb == nil || f.target != w.ifb.index) {
			others = true
			continue
		}
		if err := d.request("remove redirect", deleteFilter(w.wan.index, f.kind, f.pref)); !gone(err) {
			return err
		}
	}
	if w.ifb == nil {
		return nil
	}
	if w.ingress != nil && w.ifb.alias == aliasIngress && !others {
		if err := d.request("remove ingress qdisc", deleteIngress(w.wan.index)); !gone(err) && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	if err := d.request("remove "+w.ifb.name, deleteLink(w.ifb.index)); !gone(err) {
		return err
	}
	return nil
}

// removeUp puts back the root qdisc that was there, or the kernel's own.
func (d *Dataplane) removeUp(w *world) error {
	if !isCake(w.root) {
		return d.forgetTaken()
	}
	if t := d.taken; t != nil && t.Index == w.wan.index {
		if err := d.request("put back qdisc "+t.Kind, t.restore()); err != nil {
			// Without a qdisc of either kind the customer is online still.
			return errors.Join(err, d.request("remove cake", deleteRoot(w.wan.index, w.root.handle)))
		}
		return errors.Join(d.sameAsTaken(), d.forgetTaken())
	}
	err := d.request("remove cake", deleteRoot(w.wan.index, w.root.handle))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// readBack returns what the kernel runs.
func (d *Dataplane) readBack(want plan.Link) (*running, dataplane.Effective, error) {
	eff := dataplane.Effective{Link: want}
	w, err := d.look()
	if err != nil {
		return nil, eff, err
	}
	r := &running{index: w.wan.index, downOn: on(want.Down), upOn: on(want.Up), ppp: w.wan.typ == unix.ARPHRD_PPP}
	if r.downOn {
		if err := w.checkDown(); err != nil {
			return nil, eff, err
		}
		r.ifb, r.received = w.ifb.index, w.wan.received
		r.shaped = packets(w.ifbRoot)
		eff.Link.Down = d.effective("down", want.Down, w.ifbRoot, &eff.Clamps)
	}
	if r.upOn {
		if !isCake(w.root) {
			return nil, eff, fmt.Errorf("cake is not on %s after it was put there", w.wan.name)
		}
		eff.Link.Up = d.effective("up", want.Up, w.root, &eff.Clamps)
		clampMTU(w, want.Up, &eff)
	}
	r.link = eff.Link
	return r, eff, nil
}

// checkDown says what is missing for download to be shaped.
func (w *world) checkDown() error {
	if w.ifb == nil {
		return fmt.Errorf("%s is not there after it was made", ifbName(w.wan.index))
	}
	if !w.ifb.up {
		return fmt.Errorf("%s is down", w.ifb.name)
	}
	if !isCake(w.ifbRoot) {
		return fmt.Errorf("cake is not on %s", w.ifb.name)
	}
	for _, f := range w.filters {
		if ours(f) && f.target == w.ifb.index {
			return nil
		}
	}
	return fmt.Errorf("nothing sends what arrives on %s to %s", w.wan.name, w.ifb.name)
}

// effective returns what the qdisc runs and notes every difference.
func (d *Dataplane) effective(dir string, want engine.Config, q *qdisc, clamps *[]plan.Clamp) engine.Config {
	have, unknown := decodeOptions(q.options.Attrs())
	if len(unknown) > 0 {
		d.log.Debug("the kernel's cake has options that are not known", "options", unknown)
	}
	adopt(&have, want)
	for _, f := range fields {
		if w, h := f.value(want), f.value(have); w != h {
			*clamps = append(*clamps, plan.Clamp{Field: dir + "." + f.name, Desired: w, Effective: h, Reason: "the kernel runs another value"})
		}
	}
	return have
}

// adopt takes over from want what the kernel can't know or does not keep: the
// MTU, the bits of the rate below a byte per second, and the rate that
// autorate-ingress began with.
func adopt(have *engine.Config, want engine.Config) {
	have.MTU = want.MTU
	if have.Rate/8 == want.Rate/8 || want.Autorate && have.Autorate {
		have.Rate = want.Rate
	}
}

// same reports whether the kernel's configuration is the wanted one.
func same(have, want engine.Config) bool {
	adopt(&have, want)
	return have == want
}

// clampMTU notes that the interface has another MTU than was asked for, if that
// makes a difference: on slow links the target follows the MTU.
func clampMTU(w *world, want engine.Config, eff *dataplane.Effective) {
	header, known := w.wan.headerLen()
	if mtu := w.wan.mtu + header; known && mtu != uint32(want.MTU) && mtu <= 1<<16-1 && want.Rate > 0 {
		slowest := max(want.Rate/16, 8)
		if target(want, slowest, want.MTU) != target(want, slowest, uint16(mtu)) {
			eff.Link.Up.MTU = uint16(mtu)
			eff.Clamps = append(eff.Clamps, plan.Clamp{
				Field: "up.mtu", Desired: fmt.Sprint(want.MTU), Effective: fmt.Sprint(mtu),
				Reason: "it is what the interface has",
			})
		}
	}
}

// target returns a tin's target: at least the time of one and a half packets.
func target(c engine.Config, rate engine.BitsPerSecond, mtu uint16) time.Duration {
	return max(c.Target, time.Duration(uint64(mtu)*8*uint64(time.Second)*3/2/uint64(rate)))
}
