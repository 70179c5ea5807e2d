package nfqueue

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// From linux/netfilter/nfnetlink.h and nf_tables.h.
const (
	subsysNFTables = 10

	msgBatchBegin = 0x10
	msgBatchEnd   = 0x11

	msgNewTable = subsysNFTables << 8
	msgDelTable = subsysNFTables<<8 | 2
	msgNewChain = subsysNFTables<<8 | 3
	msgNewRule  = subsysNFTables<<8 | 6
	msgGetRule  = subsysNFTables<<8 | 7
	msgDelRule  = subsysNFTables<<8 | 8
	msgNewSet   = subsysNFTables<<8 | 9
	msgNewElem  = subsysNFTables<<8 | 12
	msgDelElem  = subsysNFTables<<8 | 14

	tableName  = 1
	tableFlags = 2
	tableOwner = 2 // NFT_TABLE_F_OWNER

	chainTable   = 1
	chainName    = 3
	chainHook    = 4
	chainPolicy  = 5
	chainType    = 7
	hookNum      = 1
	hookPriority = 2

	ruleTable = 1
	ruleChain = 2
	ruleExprs = 4
	listElem  = 1
	exprName  = 1
	exprData  = 2

	setTable    = 1
	setName     = 2
	setFlags    = 3
	setKeyType  = 4
	setKeyLen   = 5
	setID       = 10
	setTimeout  = 11
	setUserData = 13
	setIsTimed  = 0x10 // NFT_SET_TIMEOUT

	elemsTable  = 1
	elemsSet    = 2
	elemsList   = 3
	elemKey     = 1
	elemTimeout = 4

	dataValue = 1

	counterPackets = 2

	reg1 = 1

	keyLen  = 0
	keyMark = 3
	keyIIF  = 4
	keyOIF  = 5

	keyCTMark = 3

	typeIFIndex = 40 // what nft(8) shows the key as

	equal, notEqual, greater = 0, 1, 4

	codeGoto = 1<<32 - 4
	codeJump = 1<<32 - 3

	hookPrerouting  = 0
	hookPostrouting = 4
)

const (
	setAlive   = "alive"
	aliveSetID = 1
)

// families are those of the two tables. The xtables target works in these, and
// a chain of its own family needs no look at a packet's protocol.
var families = []uint8{unix.AF_INET, unix.AF_INET6}

// direction is where a direction's packets are met.
type direction struct {
	download     bool
	queueChain   string
	changeChain  string // for packets that come once more
	restoreChain string // for packets whose connection has a mark
	hook         uint32
	priority     int32
	ifKey        uint32
}

func (d *direction) chains() []string {
	return []string{d.queueChain, d.changeChain, d.restoreChain}
}

// directions: download right behind destination NAT (-100), upload right before
// source NAT (100). The kernel puts a later chain of the same priority in
// front, so each of ours has a number of its own.
var directions = []direction{
	{true, "down", "down-change", "down-restore", hookPrerouting, -99, keyIIF},
	{false, "up", "up-change", "up-restore", hookPostrouting, 99, keyOIF},
}

// addTables makes both tables anew with everything in them.
func (r *Rules) addTables(b *builder, down, up Direction) {
	for _, f := range families {
		// Add, delete, add: whether or not there was one. The flags of one that
		// is there can't be changed, not even to be deleted then.
		there, flags := uint32(0), uint32(0)
		if r.owner {
			flags = tableOwner
		}
		if r.up {
			there = flags
		}
		r.newTable(b, f, there)
		r.deleteTable(b, f)
		r.newTable(b, f, flags)
		r.addSet(b, f)
		r.element(b, f, msgNewElem, 0)
		for _, d := range directions {
			r.addChain(b, f, d.queueChain, &d)
			r.addChain(b, f, d.changeChain, nil)
			r.addChain(b, f, d.restoreChain, nil)
		}
		r.addRules(b, f, down, up)
	}
}

func (r *Rules) newTable(b *builder, family uint8, flags uint32) {
	b.begin(msgNewTable, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE, family, 0)
	b.str(tableName, r.table())
	b.u32(tableFlags, flags)
	b.end()
}

func (r *Rules) deleteTable(b *builder, family uint8) {
	b.begin(msgDelTable, unix.NLM_F_REQUEST|unix.NLM_F_ACK, family, 0)
	b.str(tableName, r.table())
	b.end()
}

// addSet makes the set whose one element says that we are alive.
func (r *Rules) addSet(b *builder, family uint8) {
	b.begin(msgNewSet, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE, family, 0)
	b.str(setTable, r.table())
	b.str(setName, setAlive)
	b.u32(setFlags, setIsTimed)
	b.u32(setKeyType, typeIFIndex)
	b.u32(setKeyLen, 4)
	b.u32(setID, aliveSetID)
	b.u64(setTimeout, uint64(Lifetime/time.Millisecond))
	// Only for nft(8): the keys are in the machine's order.
	b.attr(setUserData, append([]byte{0, 4}, native32(1)...))
	b.end()
}

// element adds or deletes the element that says that we are alive; a life of 0
// is the set's.
func (r *Rules) element(b *builder, family uint8, msg uint16, life time.Duration) {
	flags := uint16(unix.NLM_F_REQUEST | unix.NLM_F_ACK)
	if msg == msgNewElem {
		flags |= unix.NLM_F_CREATE
	}
	b.begin(msg, flags, family, 0)
	b.str(elemsTable, r.table())
	b.str(elemsSet, setAlive)
	b.nest(elemsList, func() {
		b.nest(listElem, func() {
			b.nest(elemKey, func() { b.attr(dataValue, native32(r.index)) })
			if life != 0 {
				b.u64(elemTimeout, uint64(life/time.Millisecond))
			}
		})
	})
	b.end()
}

// addChain adds a chain that is at a hook, or one that others go to.
func (r *Rules) addChain(b *builder, family uint8, name string, at *direction) {
	b.begin(msgNewChain, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE, family, 0)
	b.str(chainTable, r.table())
	b.str(chainName, name)
	if at != nil {
		b.nest(chainHook, func() {
			b.u32(hookNum, at.hook)
			b.u32(hookPriority, uint32(at.priority))
		})
		b.u32(chainPolicy, verdictAccept)
		b.str(chainType, "filter")
	}
	b.end()
}

// smallLen is above what is no super-packet on most links. It is compared by
// its bits: the kernel is quick at that, and wants other comparisons in
// network order.
const smallLen = 2048

// addRules fills the chains. Every packet of the machine meets the first rule,
// and nearly every packet of the interface the others of the first chain down
// to the one that queues it.
func (r *Rules) addRules(b *builder, family uint8, down, up Direction) {
	for _, d := range directions {
		dir := up
		if d.download {
			dir = down
		}
		if !dir.On && !dir.Wash {
			continue
		}
		r.rule(b, family, d.queueChain, func(e exprs) {
			e.meta(d.ifKey)
			e.cmp(notEqual, native32(r.index))
			e.verdict(verdictAccept, "")
		})
		if dir.On {
			if dir.Restore != 0 {
				r.rule(b, family, d.queueChain, func(e exprs) {
					e.meta(keyMark)
					e.bitwise(native32(dir.Restore), native32(0))
					e.cmp(equal, native32(0))
					e.matchConnMark(dir.Restore)
					e.verdict(codeJump, d.restoreChain)
				})
			}
			// One rule for nearly all packets, as a rule costs as much as two
			// expressions. Those with our marks are not counted: they were.
			r.rule(b, family, d.queueChain, func(e exprs) {
				e.mark(Marks)
				e.cmp(equal, native32(0))
				e.count()
				e.long()
				e.cmp(equal, native32(0))
				e.queue(r.deal, d.ifKey, dir.Number)
			})
			r.rule(b, family, d.queueChain, func(e exprs) {
				e.matchMark(Marks)
				e.verdict(codeGoto, d.changeChain)
			})
			r.rule(b, family, d.queueChain, func(e exprs) {
				e.long()
				e.cmp(notEqual, native32(0))
				if dir.Whole >= smallLen {
					e.meta(keyLen)
					e.networkOrder()
					e.cmp(greater, binary.BigEndian.AppendUint32(nil, dir.Whole))
				}
				e.queue(r.deal, d.ifKey, dir.Number+Spread)
			})
			r.rule(b, family, d.queueChain, func(e exprs) { e.queue(r.deal, d.ifKey, dir.Number) })
			r.rule(b, family, d.queueChain, func(e exprs) { e.queueTo(r.deal, dir.Number+wakeOffset, 1) })
			r.addChangeRules(b, family, d.changeChain)
			for bits := dir.Restore; bits != 0; bits &= bits - 1 {
				r.rule(b, family, d.restoreChain, func(e exprs) {
					e.matchConnMark(bits & -bits)
					e.setMark(bits & -bits)
				})
			}
		}
		if dir.Wash && !dir.On {
			r.rule(b, family, d.queueChain, func(e exprs) { e.wash(family) })
		}
	}
}

// addChangeRules are for packets with our bits in their marks.
func (r *Rules) addChangeRules(b *builder, family uint8, chain string) {
	r.rule(b, family, chain, func(e exprs) {
		e.matchMark(MarkWash)
		e.wash(family)
	})
	r.rule(b, family, chain, func(e exprs) {
		e.matchMark(MarkCE)
		if family == unix.AF_INET {
			e.rewrite(0xfffc, 0x0003, true)
		} else {
			e.rewrite(0xffcf, 0x0030, false)
		}
	})
	r.rule(b, family, chain, func(e exprs) { e.clearMark(Marks) })
}

// rule appends one rule to a chain.
func (r *Rules) rule(b *builder, family uint8, chain string, add func(exprs)) {
	b.begin(msgNewRule, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_APPEND, family, 0)
	b.str(ruleTable, r.table())
	b.str(ruleChain, chain)
	b.nest(ruleExprs, func() { add(exprs{b}) })
	b.end()
}

// exprs adds expressions to a rule.
type exprs struct{ b *builder }

func (e exprs) add(name string, attrs func(b *builder)) {
	e.b.nest(listElem, func() {
		e.b.str(exprName, name)
		e.b.nest(exprData, func() { attrs(e.b) })
	})
}

// meta loads a property of the packet into register 1.
func (e exprs) meta(key uint32) {
	e.add("meta", func(b *builder) {
		b.u32(1, reg1) // DREG
		b.u32(2, key)
	})
}

// cmp ends the rule unless register 1 compares so.
func (e exprs) cmp(op uint32, v []byte) {
	e.add("cmp", func(b *builder) {
		b.u32(1, reg1)
		b.u32(2, op)
		b.nest(3, func() { b.attr(dataValue, v) })
	})
}

// verdict ends the chain, or goes to another.
func (e exprs) verdict(code uint32, chain string) {
	e.add("immediate", func(b *builder) {
		b.u32(1, 0) // DREG: the verdict
		b.nest(2, func() {
			b.nest(2, func() { // the data is a verdict
				b.u32(1, code)
				if chain != "" {
					b.str(2, chain)
				}
			})
		})
	})
}

// networkOrder makes register 1 comparable by more than equality.
func (e exprs) networkOrder() {
	e.add("byteorder", func(b *builder) {
		b.u32(1, reg1) // SREG
		b.u32(2, reg1) // DREG
		b.u32(3, 1)    // hton
		b.u32(4, 4)    // length
		b.u32(5, 4)    // of each
	})
}

// matchMark ends the rule unless one of the bits is set. Marks are in the
// machine's order.
func (e exprs) matchMark(bits uint32) {
	e.mark(bits)
	e.cmp(notEqual, native32(0))
}

// mark loads some bits of the firewall mark.
func (e exprs) mark(bits uint32) {
	e.meta(keyMark)
	e.bitwise(native32(bits), native32(0))
}

// long loads what is 0 for packets shorter than smallLen.
func (e exprs) long() {
	e.meta(keyLen)
	e.bitwise(native32(^uint32(smallLen-1)), native32(0))
}

// matchConnMark is the same for the mark of the packet's connection.
func (e exprs) matchConnMark(bits uint32) {
	e.add("ct", func(b *builder) {
		b.u32(1, reg1) // DREG
		b.u32(2, keyCTMark)
	})
	e.bitwise(native32(bits), native32(0))
	e.cmp(notEqual, native32(0))
}

func (e exprs) clearMark(bits uint32) { e.changeMark(^bits, 0) }
func (e exprs) setMark(bits uint32)   { e.changeMark(^bits, bits) }

func (e exprs) changeMark(mask, xor uint32) {
	e.meta(keyMark)
	e.bitwise(native32(mask), native32(xor))
	e.add("meta", func(b *builder) {
		b.u32(2, keyMark)
		b.u32(3, reg1) // SREG
	})
}

// wash clears the DSCP.
func (e exprs) wash(family uint8) {
	if family == unix.AF_INET {
		e.rewrite(0xff03, 0, true)
	} else {
		e.rewrite(0xf03f, 0, false)
	}
}

// lookup ends the rule unless register 1 is in the set.
func (e exprs) lookup(set string, id uint32) {
	e.add("lookup", func(b *builder) {
		b.str(1, set)
		b.u32(2, reg1)
		b.u32(4, id)
	})
}

func (e exprs) count() { e.add("counter", func(*builder) {}) }

// bitwise makes register 1 = register 1 & mask ^ xor.
func (e exprs) bitwise(mask, xor []byte) {
	e.add("bitwise", func(b *builder) {
		b.u32(1, reg1)
		b.u32(2, reg1)
		b.u32(3, uint32(len(mask)))
		b.nest(4, func() { b.attr(dataValue, mask) })
		b.nest(5, func() { b.attr(dataValue, xor) })
	})
}

// rewrite changes the first two bytes of the network header: & mask ^ xor. Two
// bytes, because the checksum of an IPv4 header is over 16-bit words.
func (e exprs) rewrite(mask, xor uint16, checksum bool) {
	payload := func(reg uint16) {
		e.add("payload", func(b *builder) {
			b.u32(reg, reg1)
			b.u32(2, 1) // base: network header
			b.u32(3, 0) // offset
			b.u32(4, 2) // length
			if reg == 5 && checksum {
				b.u32(6, 1)  // type: internet checksum
				b.u32(7, 10) // its offset in the IPv4 header
			}
		})
	}
	payload(1) // DREG: load
	e.bitwise(binary.BigEndian.AppendUint16(nil, mask), binary.BigEndian.AppendUint16(nil, xor))
	payload(5) // SREG: store
}

// queue sends a packet to one of Spread queues while we are alive.
func (e exprs) queue(how dealing, ifKey uint32, number uint16) {
	e.meta(ifKey)
	e.lookup(setAlive, aliveSetID)
	if how != inTurn {
		e.queueTo(how, number, Spread)
		return
	}
	e.add("numgen", func(b *builder) {
		b.u32(1, reg1)           // DREG
		b.u32(2, Spread)         // modulus
		b.u32(3, 0)              // incremental
		b.u32(4, uint32(number)) // offset
	})
	e.add("queue", func(b *builder) {
		b.u16(3, queueBypass)
		b.u32(4, reg1) // SREG: the number
	})
}

// queueBypass lets packets go on if nobody listens.
const queueBypass = 1

// queueTo sends a packet to one of some queues by its addresses.
func (e exprs) queueTo(how dealing, number, queues uint16) {
	if how != byTarget {
		e.add("queue", func(b *builder) {
			b.u16(1, number)
			b.u16(2, queues)
			b.u16(3, queueBypass)
		})
		return
	}
	// Revision 3, whose parameters are in the machine's order.
	info := binary.NativeEndian.AppendUint16(nil, number)
	info = binary.NativeEndian.AppendUint16(info, queues)
	info = binary.NativeEndian.AppendUint16(info, queueBypass)
	info = append(info, 0, 0)
	e.add("target", func(b *builder) {
		b.str(1, "NFQUEUE")
		b.u32(2, 3)
		b.attr(3, info)
	})
}

func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
