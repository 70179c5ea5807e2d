package nfqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// MarkBit is the bit of the firewall mark that carries "set CE" from the
	// verdict to the chain behind the queue. It is ours on a shaped interface.
	MarkBit = uint32(1) << 31

	// Lifetime is how long the rules hold without Renew.
	Lifetime = 2 * time.Second
)

// Direction says what happens to the packets of one direction.
type Direction struct {
	On    bool   // packets go to Queue; else they pass
	Queue uint16 // number of the NFQUEUE
	Wash  bool   // clear the DSCP of packets that leave
}

// Rules are the nftables rules of one interface. They live in a table
// "cakefleet-IF" of the families ip and ip6.
type Rules struct {
	iface string

	mu     sync.Mutex // guards everything below
	fd     int
	out    builder
	in     []byte
	owner  bool      // the tables belong to the socket
	native bool      // the kernel has the queue expression
	up     bool      // the tables are there
	before [2]uint64 // what the counters had before the rules were last changed
}

// OpenRules opens a netlink socket in the network namespace of the calling
// thread. Nothing is changed before Install.
func OpenRules(iface string) (*Rules, error) {
	if iface == "" || len(iface) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("rules for interface %q: the name must have 1 to %d characters", iface, unix.IFNAMSIZ-1)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	r := &Rules{iface: iface, fd: fd, in: make([]byte, 16<<10)}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		// The kernel answers within the send; a lost answer must not hang us.
		tv := unix.NsecToTimeval(int64(5 * time.Second))
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bind netfilter socket: %w", err), unix.Close(fd))
	}
	return r, nil
}

// Install makes the tables in one transaction, in the place of what an agent
// that died may have left, and the rules alive for Lifetime. It tries what
// this kernel can: the queue expression or else the xtables target, tables
// owned by the socket or else plain ones.
func (r *Rules) Install(down, up Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = [2]uint64{}
	var first error
	if r.up { // as it went before
		if first = r.transaction(func(b *builder) { r.addTables(b, down, up) }); first == nil {
			return nil
		}
		r.up = false
	}
	for _, native := range []bool{true, false} {
		for _, owner := range []bool{true, false} {
			r.native, r.owner = native, owner
			err := r.transaction(func(b *builder) { r.addTables(b, down, up) })
			if err == nil {
				r.up = true
				return nil
			}
			if first == nil {
				first = err
			}
			if errors.Is(err, unix.EPERM) { // no right, or another process owns the tables
				return fmt.Errorf("install rules for %s: %w", r.iface, err)
			}
		}
	}
	return fmt.Errorf("install rules for %s: %w", r.iface, errors.Join(ErrUnsupported, first))
}

// ErrUnsupported means that the kernel lacks nf_tables, or both the queue
// expression and the xtables target NFQUEUE.
var ErrUnsupported = errors.New("the kernel can't queue packets from nftables")

// Set changes the rules in one transaction. The chains stay: taking a hook
// away would make the kernel drop every packet that it holds for any queue.
func (r *Rules) Set(down, up Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	down0, up0, err := r.countersLocked()
	if err != nil {
		return err
	}
	err = r.transaction(func(b *builder) {
		for _, f := range families {
			for _, d := range directions {
				for _, chain := range []string{d.queueChain, d.markChain} {
					b.begin(msgDelRule, unix.NLM_F_REQUEST|unix.NLM_F_ACK, f, 0)
					b.str(ruleTable, r.table())
					b.str(ruleChain, chain)
					b.end()
				}
			}
			r.addRules(b, f, down, up)
		}
	})
	if err != nil {
		return fmt.Errorf("change rules for %s: %w", r.iface, err)
	}
	r.before = [2]uint64{down0, up0}
	return nil
}

// Renew keeps the rules alive for a time from now on. os.ErrNotExist means that
// somebody has removed the tables.
func (r *Rules) Renew(life time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.transaction(func(b *builder) {
		for _, f := range families {
			// Old kernels can't change the timeout of an element that exists
			// and refuse to delete one that has expired: add it so that it
			// exists in any case, delete it, add it afresh.
			r.element(b, f, msgNewElem, life)
			r.element(b, f, msgDelElem, 0)
			r.element(b, f, msgNewElem, life)
		}
	})
	if err != nil {
		return fmt.Errorf("renew rules for %s: %w", r.iface, err)
	}
	return nil
}

// Counters returns how many packets have left in each direction since
// Install, shaped or not.
func (r *Rules) Counters() (down, up uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.countersLocked()
}

func (r *Rules) countersLocked() (down, up uint64, err error) {
	n := r.before
	for _, f := range families {
		for i, d := range directions {
			packets, err := r.count(f, d.markChain)
			if err != nil {
				return 0, 0, fmt.Errorf("read counter of chain %s of %s: %w", d.markChain, r.iface, err)
			}
			n[i] += packets
		}
	}
	return n[0], n[1], nil
}

// Remove takes the tables away in one transaction. Packets that a queue holds
// are dropped by the kernel with the hooks, so empty the queues before.
func (r *Rules) Remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.up {
		return nil
	}
	err := r.transaction(func(b *builder) {
		for _, f := range families {
			r.deleteTable(b, f)
		}
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove rules for %s: %w", r.iface, err)
	}
	r.up = false
	return nil
}

// Close removes the tables and closes the socket. It is idempotent.
func (r *Rules) Close() error {
	err := r.Remove()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return nil
	}
	err = errors.Join(err, os.NewSyscallError("close", unix.Close(r.fd)))
	r.fd = -1
	return err
}

func (r *Rules) table() string { return "cakefleet-" + r.iface }

// transaction sends messages that take effect together or not at all.
func (r *Rules) transaction(messages func(*builder)) error {
	b := &r.out
	b.Bytes = b.Bytes[:0]
	b.begin(msgBatchBegin, unix.NLM_F_REQUEST, unix.AF_UNSPEC, subsysNFTables)
	b.end()
	first := b.seq
	messages(b)
	last := b.seq
	b.begin(msgBatchEnd, unix.NLM_F_REQUEST, unix.AF_UNSPEC, subsysNFTables)
	b.end()
	if err := unix.Sendto(r.fd, b.Bytes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	// Every message between begin and end is acknowledged in order. An error
	// of the commit itself is reported for the begin.
	var failed error
	return r.receive(func(typ uint16, seq uint32, body []byte) (done bool, err error) {
		if typ != unix.NLMSG_ERROR || seq-first > last-first {
			return false, nil // left from before
		}
		err = messageError(body)
		if failed == nil {
			failed = err
		}
		return seq == last || seq == first, failed
	})
}

// receive hands answers to f until it is done. An error that comes before the
// last answer leaves the others in the socket, where the next call skips them
// by their sequence numbers.
func (r *Rules) receive(f func(typ uint16, seq uint32, body []byte) (done bool, err error)) error {
	for {
		n, _, err := unix.Recvfrom(r.fd, r.in, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the kernel's answer: %w", err)
		}
		for b := r.in[:n]; ; {
			typ, seq, body, rest, ok := nextMessage(b)
			if !ok {
				break
			}
			b = rest
			if done, err := f(typ, seq, body); done {
				return err
			}
		}
	}
}

// count takes together the counters of a chain's rules.
func (r *Rules) count(family uint8, chain string) (packets uint64, err error) {
	b := &r.out
	b.Bytes = b.Bytes[:0]
	b.begin(msgGetRule, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, family, 0)
	b.str(ruleTable, r.table())
	b.str(ruleChain, chain)
	b.end()
	want := b.seq
	if err := unix.Sendto(r.fd, b.Bytes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, err
	}
	err = r.receive(func(typ uint16, seq uint32, body []byte) (bool, error) {
		switch {
		case seq != want:
		case typ == unix.NLMSG_DONE:
			return true, nil
		case typ == unix.NLMSG_ERROR:
			return true, messageError(body)
		case typ == msgNewRule && len(body) >= nfHeader:
			packets += rulePackets(body[nfHeader:])
		}
		return false, nil
	})
	return packets, err
}

// rulePackets reads a rule's counter; 0 if it has none.
func rulePackets(rule []byte) uint64 {
	for b, _ := findAttr(rule, ruleExprs); ; {
		_, expr, rest, ok := nextAttr(b)
		if !ok {
			return 0
		}
		b = rest
		if name, _ := findAttr(expr, exprName); string(name) != "counter\x00" {
			continue
		}
		data, _ := findAttr(expr, exprData)
		if v, ok := findAttr(data, counterPackets); ok && len(v) >= 8 {
			return binary.BigEndian.Uint64(v)
		}
	}
}
