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

	keyMark    = 3
	keyIIFName = 6
	keyOIFName = 7

	typeIFName = 41 // what nft(8) shows the key as

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
	download              bool
	queueChain, markChain string
	hook                  uint32
	priority              int32 // of the queue chain; the mark chain is one behind
	ifKey                 uint32
}

// directions: download right behind destination NAT (-100), upload right before
// source NAT (100). The kernel puts a later chain of the same priority in
// front, so each of ours has a number of its own.
var directions = []direction{
	{true, "down", "down-out", hookPrerouting, -99, keyIIFName},
	{false, "up", "up-out", hookPostrouting, 98, keyOIFName},
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
			r.addChain(b, f, d.queueChain, d.hook, d.priority)
			r.addChain(b, f, d.markChain, d.hook, d.priority+1)
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
	b.u32(setKeyType, typeIFName)
	b.u32(setKeyLen, unix.IFNAMSIZ)
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
			b.nest(elemKey, func() { b.attr(dataValue, r.ifname()) })
			if life != 0 {
				b.u64(elemTimeout, uint64(life/time.Millisecond))
			}
		})
	})
	b.end()
}

func (r *Rules) addChain(b *builder, family uint8, name string, hook uint32, priority int32) {
	b.begin(msgNewChain, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE, family, 0)
	b.str(chainTable, r.table())
	b.str(chainName, name)
	b.nest(chainHook, func() {
		b.u32(hookNum, hook)
		b.u32(hookPriority, uint32(priority))
	})
	b.u32(chainPolicy, verdictAccept)
	b.str(chainType, "filter")
	b.end()
}

// addRules fills the chains.
func (r *Rules) addRules(b *builder, family uint8, down, up Direction) {
	for _, d := range directions {
		dir := up
		if d.download {
			dir = down
		}
		if dir.On {
			r.rule(b, family, d.queueChain, func(e exprs) {
				e.matchInterface(d.ifKey, r.ifname())
				e.lookup(setAlive, aliveSetID)
				if r.native {
					e.queue(dir.Queue)
				} else {
					e.queueTarget(dir.Queue)
				}
			})
		}
		r.rule(b, family, d.markChain, func(e exprs) {
			e.matchInterface(d.ifKey, r.ifname())
			e.count()
		})
		if dir.Wash {
			r.rule(b, family, d.markChain, func(e exprs) {
				e.matchInterface(d.ifKey, r.ifname())
				if family == unix.AF_INET {
					e.rewrite(0xff03, 0, true)
				} else {
					e.rewrite(0xf03f, 0, false)
				}
			})
		}
		if dir.On {
			// The bit is looked at before the name: it is rarely set.
			r.rule(b, family, d.markChain, func(e exprs) {
				e.matchMark(MarkBit)
				e.matchInterface(d.ifKey, r.ifname())
				e.clearMark(MarkBit)
				if family == unix.AF_INET {
					e.rewrite(0xfffc, 0x0003, true)
				} else {
					e.rewrite(0xffcf, 0x0030, false)
				}
			})
		}
	}
}

// rule appends one rule to a chain.
func (r *Rules) rule(b *builder, family uint8, chain string, add func(exprs)) {
	b.begin(msgNewRule, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_APPEND, family, 0)
	b.str(ruleTable, r.table())
	b.str(ruleChain, chain)
	b.nest(ruleExprs, func() { add(exprs{b}) })
	b.end()
}

// ifname is the name as the kernel compares it.
func (r *Rules) ifname() []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, r.iface)
	return b
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

// cmp ends the rule unless register 1 compares so (0: equal, 1: not equal).
func (e exprs) cmp(op uint32, v []byte) {
	e.add("cmp", func(b *builder) {
		b.u32(1, reg1)
		b.u32(2, op)
		b.nest(3, func() { b.attr(dataValue, v) })
	})
}

func (e exprs) matchInterface(key uint32, name []byte) {
	e.meta(key)
	e.cmp(0, name)
}

// matchMark ends the rule unless bit is set. Marks are in the machine's order.
func (e exprs) matchMark(bit uint32) {
	e.meta(keyMark)
	e.bitwise(native32(bit), native32(0))
	e.cmp(1, native32(0))
}

func (e exprs) clearMark(bit uint32) {
	e.meta(keyMark)
	e.bitwise(native32(^bit), native32(0))
	e.add("meta", func(b *builder) {
		b.u32(2, keyMark)
		b.u32(3, reg1) // SREG
	})
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

// queue is the nftables expression: to a queue, or on if nobody listens.
func (e exprs) queue(number uint16) {
	e.add("queue", func(b *builder) {
		b.u16(1, number)
		b.u16(2, 1) // one queue
		b.u16(3, 1) // bypass
	})
}

// queueTarget is the same with the xtables target NFQUEUE, revision 3, whose
// parameters are in the machine's order.
func (e exprs) queueTarget(number uint16) {
	info := binary.NativeEndian.AppendUint16(nil, number)
	info = binary.NativeEndian.AppendUint16(info, 1) // one queue
	info = binary.NativeEndian.AppendUint16(info, 1) // bypass
	info = append(info, 0, 0)
	e.add("target", func(b *builder) {
		b.str(1, "NFQUEUE")
		b.u32(2, 3)
		b.attr(3, info)
	})
}

func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
