package kernel

import (
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
)

// From linux/rtnetlink.h, if_link.h, pkt_sched.h, pkt_cls.h and tc_act/.
const (
	ifinfoLen = 16
	tcmsgLen  = 20

	parentRoot    = 0xffffffff // TC_H_ROOT
	parentIngress = 0xfffffff1 // TC_H_INGRESS, TC_H_CLSACT
	handleIngress = 0xffff0000
	blockIngress  = 0xfffffff2 // TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)
	blockEgress   = 0xfffffff3 // TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)

	tcaKind    = 1
	tcaOptions = 2
	tcaStats2  = 7
	tcaStab    = 8
	tcaChain   = 11

	iflaAFSpec      = 26
	iflaStats64     = 23
	iflaTxQueues    = 31
	inet6AddrGen    = 8
	addrGenNone     = 1
	linkInfoKind    = 1
	matchallActions = 2
	u32Selector     = 5
	u32Actions      = 7
	actKind         = 1
	actOptions      = 2
	connmarkParms   = 1
	ctinfoParms     = 3
	ctinfoCopyMark  = 7 // which bits of the mark
	mirredParms     = 2
	egressRedirect  = 1
	actPipe         = 3 // TC_ACT_PIPE: go on with the next action
	actStolen       = 4 // TC_ACT_STOLEN: the packet is gone
)

// native is the byte order of this machine's kernel.
func native() nlmsg.Order { return nlmsg.Order{} }

// link is what the kernel says of an interface.
type link struct {
	index    uint32
	name     string
	kind     string // such as "ifb"; empty for hardware
	alias    string
	typ      uint16 // ARPHRD_*
	up       bool
	mtu      uint32
	txQueues uint32
	received uint64 // packets
}

// headerLen returns the length of the link-layer header, which counts for the
// kernel as part of the MTU, and whether it is known.
func (l link) headerLen() (n uint32, known bool) {
	switch {
	case l.typ == unix.ARPHRD_ETHER && l.kind != "vlan": // a VLAN has 14 or 18
		return 14, true
	case l.typ == unix.ARPHRD_PPP:
		return 4, true
	case l.typ == unix.ARPHRD_NONE:
		return 0, true
	}
	return 0, false
}

func decodeLink(m nlmsg.Message) (l link, ok bool) {
	if m.Type != unix.RTM_NEWLINK || len(m.Body) < ifinfoLen {
		return l, false
	}
	o := native()
	l.typ = o.Uint16(m.Body[2:])
	l.index = o.Uint32(m.Body[4:])
	l.up = o.Uint32(m.Body[8:])&unix.IFF_UP != 0
	for typ, v := range (nlmsg.Attrs{Order: o, Bytes: m.Body[ifinfoLen:]}).All() {
		switch typ {
		case unix.IFLA_IFNAME:
			l.name = v.Str()
		case unix.IFLA_MTU:
			l.mtu = v.U32()
		case unix.IFLA_IFALIAS:
			l.alias = v.Str()
		case iflaTxQueues:
			l.txQueues = v.U32()
		case iflaStats64:
			l.received = v.U64() // rx_packets comes first
		case unix.IFLA_LINKINFO:
			if kind, ok := v.Attrs().Find(linkInfoKind); ok {
				l.kind = kind.Str()
			}
		}
	}
	return l, true
}

// qdisc is what the kernel says of one.
type qdisc struct {
	index          uint32
	handle, parent uint32
	refcnt         uint32
	kind           string
	stab           bool
	options        nlmsg.Attr
	stats          nlmsg.Attrs
}

func decodeQdisc(order nlmsg.Order, m nlmsg.Message) (q qdisc, ok bool) {
	if m.Type != unix.RTM_NEWQDISC || len(m.Body) < tcmsgLen {
		return q, false
	}
	q.index = order.Uint32(m.Body[4:])
	q.handle = order.Uint32(m.Body[8:])
	q.parent = order.Uint32(m.Body[12:])
	q.refcnt = order.Uint32(m.Body[16:])
	q.options.Order, q.stats.Order = order, order
	for typ, v := range (nlmsg.Attrs{Order: order, Bytes: m.Body[tcmsgLen:]}).All() {
		switch typ {
		case tcaKind:
			q.kind = v.Str()
		case tcaOptions:
			q.options = v
		case tcaStats2:
			q.stats = v.Attrs()
		case tcaStab:
			q.stab = true
		}
	}
	return q, true
}

// filter is what the kernel says of one.
type filter struct {
	pref   uint32
	chain  uint32
	kind   string
	target uint32 // ifindex that a mirred action sends to; 0 if there is none
	marks  string // the action that gives packets the mark of their connection: connmark, ctinfo, or empty
}

func decodeFilter(m nlmsg.Message) (f filter, ok bool) {
	if m.Type != unix.RTM_NEWTFILTER || len(m.Body) < tcmsgLen {
		return f, false
	}
	o := native()
	f.pref = o.Uint32(m.Body[16:]) >> 16
	for typ, v := range (nlmsg.Attrs{Order: o, Bytes: m.Body[tcmsgLen:]}).All() {
		switch typ {
		case tcaKind:
			f.kind = v.Str()
		case tcaChain:
			f.chain = v.U32()
		case tcaOptions:
			for typ, v := range v.Attrs().All() {
				if f.kind == "matchall" && typ == matchallActions || f.kind == "u32" && typ == u32Actions {
					f.target, f.marks = decodeActions(v.Attrs())
				}
			}
		}
	}
	return f, true
}

// decodeActions returns where a list of actions sends packets, and which one
// gives them their mark before.
func decodeActions(actions nlmsg.Attrs) (target uint32, marks string) {
	for _, action := range actions.All() {
		switch kind, _ := action.Attrs().Find(actKind); kind.Str() {
		case "mirred":
			options, _ := action.Attrs().Find(actOptions)
			if p, _ := options.Attrs().Find(mirredParms); target == 0 && len(p.Bytes) >= 28 {
				target = p.Order.Uint32(p.Bytes[24:])
			}
		case "connmark", "ctinfo":
			marks = kind.Str()
		}
	}
	return target, marks
}

// request makes one message. The sequence number is the connection's.
func request(typ, flags uint16, fill func(b *nlmsg.Builder)) []byte {
	b := nlmsg.Builder{Order: native(), Bytes: make([]byte, 0, 512)}
	b.Begin(typ, unix.NLM_F_REQUEST|flags, 0)
	fill(&b)
	b.End()
	return b.Bytes
}

func ifinfo(b *nlmsg.Builder, index, flags, change uint32) {
	b.Raw32(0, index, flags, change) // family and type are 0
}

func tcmsg(b *nlmsg.Builder, index, handle, parent, info uint32) {
	b.Raw32(0, index, handle, parent, info) // family is 0
}

const (
	ack     = unix.NLM_F_ACK
	create  = unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_EXCL
	replace = unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_REPLACE
)

func linkByName(name string) []byte {
	return request(unix.RTM_GETLINK, ack, func(b *nlmsg.Builder) {
		ifinfo(b, 0, 0, 0)
		b.Str(unix.IFLA_IFNAME, name)
	})
}

func allLinks() []byte {
	return request(unix.RTM_GETLINK, unix.NLM_F_DUMP, func(b *nlmsg.Builder) { ifinfo(b, 0, 0, 0) })
}

func newIFB(name string, mtu uint32) []byte {
	return request(unix.RTM_NEWLINK, create, func(b *nlmsg.Builder) {
		ifinfo(b, 0, 0, 0)
		b.Str(unix.IFLA_IFNAME, name)
		b.U32(unix.IFLA_MTU, mtu)
		b.Nest(unix.IFLA_LINKINFO, func() { b.Str(linkInfoKind, "ifb") })
	})
}

func deleteLink(index uint32) []byte {
	return request(unix.RTM_DELLINK, ack, func(b *nlmsg.Builder) { ifinfo(b, index, 0, 0) })
}

func deleteLinkByName(name string) []byte {
	return request(unix.RTM_DELLINK, ack, func(b *nlmsg.Builder) {
		ifinfo(b, 0, 0, 0)
		b.Str(unix.IFLA_IFNAME, name)
	})
}

func setLinkUp(index uint32) []byte {
	return request(unix.RTM_NEWLINK, ack, func(b *nlmsg.Builder) { ifinfo(b, index, unix.IFF_UP, unix.IFF_UP) })
}

func setLinkMTU(index, mtu uint32) []byte {
	return request(unix.RTM_NEWLINK, ack, func(b *nlmsg.Builder) {
		ifinfo(b, index, 0, 0)
		b.U32(unix.IFLA_MTU, mtu)
	})
}

func setLinkAlias(index uint32, alias string) []byte {
	return request(unix.RTM_NEWLINK, ack, func(b *nlmsg.Builder) {
		ifinfo(b, index, 0, 0)
		b.Attr(unix.IFLA_IFALIAS, []byte(alias))
	})
}

// setLinkNoIPv6 keeps the kernel from giving a device a link-local address
// when it comes up.
func setLinkNoIPv6(index uint32) []byte {
	return request(unix.RTM_NEWLINK, ack, func(b *nlmsg.Builder) {
		ifinfo(b, index, 0, 0)
		b.Nest(iflaAFSpec, func() {
			b.Nest(unix.AF_INET6, func() { b.U8(inet6AddrGen, addrGenNone) })
		})
	})
}

func allQdiscs() []byte {
	return request(unix.RTM_GETQDISC, unix.NLM_F_DUMP, func(b *nlmsg.Builder) { tcmsg(b, 0, 0, 0, 0) })
}

// setCake makes or changes a root qdisc, as flags say.
func setCake(flags uint16, index uint32, kind string, c engine.Config, withNAT bool) []byte {
	return request(unix.RTM_NEWQDISC, flags, func(b *nlmsg.Builder) {
		tcmsg(b, index, handleOf(kind), parentRoot, 0)
		b.Str(tcaKind, kind)
		b.Nest(tcaOptions, func() { appendOptions(b, c, withNAT) })
	})
}

// setRoot makes the root qdisc what it was.
func setRoot(index, handle uint32, kind string, options []byte) []byte {
	return request(unix.RTM_NEWQDISC, replace, func(b *nlmsg.Builder) {
		tcmsg(b, index, handle, parentRoot, 0)
		b.Str(tcaKind, kind)
		if options != nil {
			b.Attr(tcaOptions, options)
		}
	})
}

func deleteRoot(index, handle uint32) []byte {
	return request(unix.RTM_DELQDISC, ack, func(b *nlmsg.Builder) { tcmsg(b, index, handle, parentRoot, 0) })
}

func handleOf(kind string) uint32 {
	if kind == "cake_mq" {
		return ourMQHandle
	}
	return ourHandle
}

func newIngress(index uint32, kind string) []byte {
	return request(unix.RTM_NEWQDISC, create, func(b *nlmsg.Builder) {
		tcmsg(b, index, handleIngress, parentIngress, 0)
		b.Str(tcaKind, kind)
	})
}

func deleteIngress(index uint32) []byte {
	return request(unix.RTM_DELQDISC, ack, func(b *nlmsg.Builder) { tcmsg(b, index, handleIngress, parentIngress, 0) })
}

func allFilters(index, parent uint32) []byte {
	return request(unix.RTM_GETTFILTER, unix.NLM_F_DUMP, func(b *nlmsg.Builder) { tcmsg(b, index, 0, parent, 0) })
}

// protoAll is ETH_P_ALL in network order, as it stands in the low half of
// tcm_info.
func protoAll() uint32 {
	return uint32(native().Uint16([]byte{0, unix.ETH_P_ALL}))
}

// newFilter sends everything that arrives on index to target. Unless marks is
// empty, packets get the firewall mark of their connection first, by the action
// of that name: connmark, or ctinfo, which Linux has since 5.3.
func newFilter(index uint32, kind string, pref, target uint32, marks string) []byte {
	return request(unix.RTM_NEWTFILTER, create, func(b *nlmsg.Builder) {
		tcmsg(b, index, 0, blockIngress, pref<<16|protoAll())
		b.Str(tcaKind, kind)
		actions := func() {
			n := uint16(1)
			if marks != "" {
				b.Nest(n, func() {
					b.Str(actKind, marks)
					b.Nest(nlmsg.Nested(actOptions), func() { // ctinfo refuses it without the flag
						p := nlmsg.Builder{Order: native()}
						p.Raw32(0, 0, actPipe, 0, 0) // index, capab, action, refcnt, bindcnt
						if marks == "ctinfo" {
							b.Attr(ctinfoParms, p.Bytes)
							b.U32(ctinfoCopyMark, 1<<32-1)
							return
						}
						p.Raw32(0) // zone
						b.Attr(connmarkParms, p.Bytes)
					})
				})
				n++
			}
			b.Nest(n, func() {
				b.Str(actKind, "mirred")
				b.Nest(actOptions, func() {
					p := nlmsg.Builder{Order: native()}
					p.Raw32(0, 0, actStolen, 0, 0, egressRedirect, target)
					b.Attr(mirredParms, p.Bytes)
				})
			})
		}
		b.Nest(tcaOptions, func() {
			if kind == "matchall" {
				b.Nest(matchallActions, actions)
				return
			}
			// One key with an empty mask, which everything matches; what it
			// matches is final.
			sel := make([]byte, 16+16)
			sel[0], sel[2] = 1, 1 // TC_U32_TERMINAL, number of keys
			b.Attr(u32Selector, sel)
			b.Nest(u32Actions, actions)
		})
	})
}

func deleteFilter(index uint32, kind string, pref uint32) []byte {
	return request(unix.RTM_DELTFILTER, ack, func(b *nlmsg.Builder) {
		tcmsg(b, index, 0, blockIngress, pref<<16|protoAll())
		b.Str(tcaKind, kind)
	})
}
