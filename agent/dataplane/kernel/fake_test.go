package kernel

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
)

// fakeKernel has interfaces, qdiscs and filters, and treats requests as Linux
// does as far as this package makes a difference.
type fakeKernel struct {
	t     *testing.T
	lacks map[string]bool // kinds of links, qdiscs, filters and actions; "conntrack"
	links map[uint32]*fakeLink
	index uint32 // of the newest link

	// before is asked before each request; its error is the answer.
	before func(m nlmsg.Message) error
	// module makes these when the first ifb is made.
	module []string
}

type fakeLink struct {
	index    uint32
	name     string
	kind     string
	alias    string
	noIPv6   bool
	up       bool
	mtu      uint32
	txQueues uint32
	received uint64
	root     *fakeQdisc
	ingress  *fakeQdisc
	filters  map[uint32]*fakeFilter // by preference
}

type fakeQdisc struct {
	handle  uint32
	kind    string
	options map[uint16][]byte // of cake
	raw     []byte            // of others
	stab    bool
	packets uint32
	bytes   uint64
	queues  []uint32 // packets of the queues of cake_mq
}

type fakeFilter struct {
	kind   string
	target uint32
	marks  string
}

func newFakeKernel(t *testing.T) *fakeKernel {
	k := &fakeKernel{t: t, lacks: map[string]bool{"cake_mq": true}, links: map[uint32]*fakeLink{}}
	k.add("eth0", "")
	return k
}

func (k *fakeKernel) add(name, kind string) *fakeLink {
	k.index++
	l := &fakeLink{index: k.index, name: name, kind: kind, up: kind == "", mtu: 1500, txQueues: 1, filters: map[uint32]*fakeFilter{}}
	k.links[l.index] = l
	return l
}

func (k *fakeKernel) link(name string) *fakeLink {
	for _, l := range k.links {
		if l.name == name {
			return l
		}
	}
	return nil
}

func (k *fakeKernel) remove(l *fakeLink) {
	delete(k.links, l.index)
	for _, o := range k.links {
		for _, f := range o.filters {
			if f.target == l.index {
				f.target = 0
			}
		}
	}
}

// String is everything that there is.
func (k *fakeKernel) String() string {
	var b strings.Builder
	for _, i := range slices.Sorted(maps.Keys(k.links)) {
		l := k.links[i]
		fmt.Fprintf(&b, "%s kind=%s alias=%q up=%v mtu=%d noipv6=%v\n", l.name, l.kind, l.alias, l.up, l.mtu, l.noIPv6)
		for _, q := range []*fakeQdisc{l.root, l.ingress} {
			if q != nil {
				fmt.Fprintf(&b, "  %s %x: %v %x stab=%v\n", q.kind, q.handle>>16, q.options, q.raw, q.stab)
			}
		}
		for _, pref := range slices.Sorted(maps.Keys(l.filters)) {
			fmt.Fprintf(&b, "  filter %d %+v\n", pref, *l.filters[pref])
		}
	}
	return b.String()
}

func (k *fakeKernel) close() error { return nil }

func (k *fakeKernel) speed(string) engine.BitsPerSecond { return testSpeed }

func (k *fakeKernel) do(req []byte) ([]nlmsg.Message, error) {
	m, rest, ok := nlmsg.Next(native(), req)
	if !ok || len(rest) != 0 || len(req)%4 != 0 {
		k.t.Errorf("a request is not one whole message: %x", req)
		return nil, unix.EINVAL
	}
	if k.before != nil {
		if err := k.before(m); err != nil {
			return nil, err
		}
	}
	switch m.Type {
	case unix.RTM_GETLINK, unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return k.doLink(m)
	}
	return k.doTC(m)
}

func refuse(errno unix.Errno, text string) error { return &kernelError{errno: errno, text: text} }

func (k *fakeKernel) doLink(m nlmsg.Message) ([]nlmsg.Message, error) {
	o := native()
	attrs := nlmsg.Attrs{Order: o, Bytes: m.Body[ifinfoLen:]}
	name, _ := attrs.Find(unix.IFLA_IFNAME)
	l := k.links[o.Uint32(m.Body[4:])]
	if l == nil && name.Str() != "" {
		l = k.link(name.Str())
	}
	if m.Type == unix.RTM_GETLINK && m.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
		var all []nlmsg.Message
		for _, i := range slices.Sorted(maps.Keys(k.links)) {
			all = append(all, k.links[i].message())
		}
		return all, nil
	}
	if m.Type == unix.RTM_NEWLINK && m.Flags&unix.NLM_F_CREATE != 0 {
		return nil, k.newLink(l, name.Str(), attrs)
	}
	if l == nil {
		return nil, refuse(unix.ENODEV, "")
	}
	switch m.Type {
	case unix.RTM_GETLINK:
		return []nlmsg.Message{l.message()}, nil
	case unix.RTM_DELLINK:
		k.remove(l)
		return nil, nil
	}
	if o.Uint32(m.Body[12:])&unix.IFF_UP != 0 {
		l.up = o.Uint32(m.Body[8:])&unix.IFF_UP != 0
	}
	for typ, v := range attrs.All() {
		switch typ {
		case unix.IFLA_MTU:
			l.mtu = v.U32()
		case unix.IFLA_IFALIAS:
			l.alias = string(v.Bytes)
		case iflaAFSpec:
			l.noIPv6 = true
		}
	}
	return nil, nil
}

func (k *fakeKernel) newLink(l *fakeLink, name string, attrs nlmsg.Attrs) error {
	info, _ := attrs.Find(unix.IFLA_LINKINFO)
	kind, _ := info.Attrs().Find(linkInfoKind)
	switch {
	case k.lacks[kind.Str()]:
		return refuse(unix.EOPNOTSUPP, "Unknown device type")
	case l != nil:
		return refuse(unix.EEXIST, "")
	case name == "" || len(name) > 15:
		k.t.Errorf("interface name %q", name)
		return refuse(unix.EINVAL, "")
	}
	for _, stray := range k.module {
		k.add(stray, "ifb")
	}
	k.module = nil
	mtu, _ := attrs.Find(unix.IFLA_MTU)
	k.add(name, kind.Str()).mtu = mtu.U32()
	return nil
}

func (l *fakeLink) message() nlmsg.Message {
	b := nlmsg.Builder{Order: native()}
	flags := uint32(0)
	if l.up {
		flags = unix.IFF_UP
	}
	b.Bytes = b.Order.Append16(append(b.Bytes, 0, 0), unix.ARPHRD_ETHER)
	b.Raw32(l.index, flags, 0)
	b.Str(unix.IFLA_IFNAME, l.name)
	b.U32(unix.IFLA_MTU, l.mtu)
	b.U32(iflaTxQueues, l.txQueues)
	if l.alias != "" {
		b.Str(unix.IFLA_IFALIAS, l.alias)
	}
	if l.kind != "" {
		b.Nest(unix.IFLA_LINKINFO, func() { b.Str(linkInfoKind, l.kind) })
	}
	b.U64(iflaStats64, l.received)
	return nlmsg.Message{Type: unix.RTM_NEWLINK, Body: b.Bytes}
}

func (k *fakeKernel) doTC(m nlmsg.Message) ([]nlmsg.Message, error) {
	o := native()
	attrs := nlmsg.Attrs{Order: o, Bytes: m.Body[tcmsgLen:]}
	if m.Type == unix.RTM_GETQDISC {
		return k.listQdiscs(), nil
	}
	l := k.links[o.Uint32(m.Body[4:])]
	if l == nil {
		return nil, refuse(unix.ENODEV, "Cannot find device")
	}
	handle, parent, info := o.Uint32(m.Body[8:]), o.Uint32(m.Body[12:]), o.Uint32(m.Body[16:])
	kind, _ := attrs.Find(tcaKind)
	options, _ := attrs.Find(tcaOptions)
	switch m.Type {
	case unix.RTM_NEWQDISC:
		if parent == parentIngress {
			return nil, k.newIngress(l, kind.Str(), m.Flags)
		}
		return nil, k.setRoot(l, handle, kind.Str(), options.Attrs(), m.Flags)
	case unix.RTM_DELQDISC:
		slot := &l.root
		if parent == parentIngress {
			slot = &l.ingress
			clear(l.filters)
		}
		if *slot == nil || (*slot).handle == 0 || (*slot).handle != handle {
			return nil, refuse(unix.ENOENT, "")
		}
		*slot = nil
		return nil, nil
	case unix.RTM_GETTFILTER:
		if parent == blockEgress {
			return nil, nil
		}
		return l.listFilters(), nil
	}
	return nil, k.changeFilter(l, m, info, kind.Str(), options)
}

func (k *fakeKernel) newIngress(l *fakeLink, kind string, flags uint16) error {
	switch {
	case k.lacks[kind]:
		return refuse(unix.ENOENT, "Specified qdisc kind is unknown")
	case l.ingress != nil && flags&unix.NLM_F_EXCL != 0:
		return refuse(unix.EEXIST, "")
	}
	l.ingress = &fakeQdisc{handle: handleIngress, kind: kind}
	return nil
}

func (k *fakeKernel) setRoot(l *fakeLink, handle uint32, kind string, options nlmsg.Attrs, flags uint16) error {
	q := l.root
	if q != nil && q.handle == 0 {
		q = nil // the default
	}
	if k.lacks[kind] {
		return refuse(unix.ENOENT, "Specified qdisc kind is unknown")
	}
	if q != nil && q.handle == handle { // a change
		switch {
		case flags&unix.NLM_F_EXCL != 0:
			return refuse(unix.EEXIST, "Exclusivity flag on, cannot modify")
		case q.kind != kind:
			return refuse(unix.EINVAL, "Invalid qdisc name: must match existing qdisc")
		}
		return k.setOptions(q, options)
	}
	switch {
	case q != nil && flags&unix.NLM_F_REPLACE == 0:
		return refuse(unix.EEXIST, "NLM_F_REPLACE needed to override")
	case flags&unix.NLM_F_CREATE == 0:
		return refuse(unix.ENOENT, "Qdisc not found. To create specify NLM_F_CREATE flag")
	}
	fresh := &fakeQdisc{handle: handle, kind: kind}
	if strings.HasPrefix(kind, "cake") {
		fresh.options = map[uint16][]byte{}
		if err := k.setOptions(fresh, defaultOptions()); err != nil {
			return err
		}
	}
	if err := k.setOptions(fresh, options); err != nil {
		return err
	}
	if kind == "cake_mq" {
		fresh.queues = make([]uint32, l.txQueues)
	}
	l.root = fresh
	return nil
}

// defaultOptions are those of a cake that is made without any.
func defaultOptions() nlmsg.Attrs {
	b := nlmsg.Builder{Order: native()}
	b.U64(cakeRate, 0)
	for _, typ := range []uint16{cakeTins, cakeFraming, cakeOverhead, cakeRaw, cakeAutorate, cakeMemory, cakeWash, cakeMPU, cakeIngress, cakeAckFilter, cakeFwmark} {
		b.U32(typ, 0)
	}
	b.U32(cakeFlows, 7)
	b.U32(cakeRTT, 100_000)
	b.U32(cakeTarget, 5_000)
	b.U32(cakeSplitGSO, 1)
	return nlmsg.Attrs{Order: native(), Bytes: b.Bytes}
}

// setOptions changes what the request names and nothing else.
func (k *fakeKernel) setOptions(q *fakeQdisc, options nlmsg.Attrs) error {
	q.stab = false
	if !strings.HasPrefix(q.kind, "cake") {
		b := nlmsg.Builder{Order: native()}
		for typ, v := range options.All() {
			if typ == 1 && q.kind == "fq_codel" { // the target, as CoDel counts and lists it
				b.U32(typ, uint32(uint64(v.U32())*1000>>10<<10/1000))
				continue
			}
			b.Attr(typ, v.Bytes)
		}
		q.raw = b.Bytes
		return nil
	}
	set := maps.Clone(q.options)
	for typ, v := range options.All() {
		switch {
		case typ == cakeNAT && k.lacks["conntrack"]:
			return refuse(unix.EOPNOTSUPP, "No conntrack support in kernel")
		case typ == cakeAutorate && v.U32() != 0 && q.kind == "cake_mq":
			return refuse(unix.EOPNOTSUPP, "not supported")
		case typ > cakeFwmark:
			k.t.Errorf("option %d", typ)
		case typ == cakeOverhead:
			delete(set, cakeRaw)
		}
		set[typ] = slices.Clone(v.Bytes)
	}
	q.options = set
	return nil
}

func (k *fakeKernel) listQdiscs() []nlmsg.Message {
	var all []nlmsg.Message
	for _, i := range slices.Sorted(maps.Keys(k.links)) {
		l := k.links[i]
		if q := l.root; q != nil {
			all = append(all, q.message(l.index, q.handle, parentRoot, q.kind, q.packets, q.bytes))
			for n, packets := range q.queues {
				all = append(all, q.message(l.index, uint32(0x8000+n)<<16, q.handle|uint32(n+1), "cake", packets, uint64(packets)))
			}
		}
		if q := l.ingress; q != nil {
			all = append(all, q.message(l.index, q.handle, parentIngress, q.kind, 0, 0))
		}
	}
	return all
}

func (q *fakeQdisc) message(index, handle, parent uint32, kind string, packets uint32, bytes uint64) nlmsg.Message {
	b := nlmsg.Builder{Order: native()}
	b.Raw32(0, index, handle, parent, 2)
	b.Str(tcaKind, kind)
	b.Nest(tcaOptions, func() {
		b.Raw(q.raw...)
		for _, typ := range slices.Sorted(maps.Keys(q.options)) {
			b.Attr(typ, q.options[typ])
		}
	})
	if q.stab {
		b.Attr(tcaStab, nil)
	}
	b.Nest(tcaStats2, func() {
		basic := nlmsg.Builder{Order: native()}
		basic.Bytes = basic.Order.Append64(basic.Bytes, bytes)
		basic.Raw32(packets, 0)
		b.Attr(statsBasic, basic.Bytes)
		b.Nest(statsApp, func() {
			b.Nest(cakeStatsTins, func() {
				for i := range uint16(3) {
					b.Nest(i+1, func() { b.U32(tinPackets, packets) })
				}
			})
		})
	})
	return nlmsg.Message{Type: unix.RTM_NEWQDISC, Body: b.Bytes}
}

func (l *fakeLink) listFilters() []nlmsg.Message {
	var all []nlmsg.Message
	for _, pref := range slices.Sorted(maps.Keys(l.filters)) {
		f := l.filters[pref]
		// The kernel lists the filter as it would be asked for.
		req, _, _ := nlmsg.Next(native(), newFilter(l.index, f.kind, pref, f.target, f.marks))
		all = append(all, nlmsg.Message{Type: unix.RTM_NEWTFILTER, Body: req.Body})
	}
	return all
}

func (k *fakeKernel) changeFilter(l *fakeLink, m nlmsg.Message, info uint32, kind string, options nlmsg.Attr) error {
	pref := info >> 16
	if l.ingress == nil {
		return refuse(unix.EINVAL, "Parent Qdisc doesn't exists")
	}
	old := l.filters[pref]
	if m.Type == unix.RTM_DELTFILTER {
		if old == nil || old.kind != kind {
			return refuse(unix.ENOENT, "")
		}
		delete(l.filters, pref)
		return nil
	}
	b := nlmsg.Builder{Order: native()}
	b.Raw32(0, l.index, 0, blockIngress, info)
	b.Str(tcaKind, kind)
	b.Attr(tcaOptions, options.Bytes)
	f, _ := decodeFilter(nlmsg.Message{Type: unix.RTM_NEWTFILTER, Body: b.Bytes})
	target := k.links[f.target]
	switch {
	case k.lacks[kind]:
		return refuse(unix.ENOENT, "TC classifier not found")
	case k.lacks["mirred"], k.lacks[f.marks]:
		return refuse(unix.ENOENT, "Failed to load TC action module")
	case old != nil:
		return refuse(unix.EEXIST, "Filter already exists")
	case target == nil:
		return refuse(unix.ENODEV, "")
	case !target.up && !strings.HasPrefix(target.name, probePrefix):
		k.t.Errorf("packets are sent to %s, which is down: they are dropped", target.name)
	}
	l.filters[pref] = &fakeFilter{kind: kind, target: f.target, marks: f.marks}
	return nil
}

var errKilled = errors.New("killed")
