package nfqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// MarkCE and MarkWash are the bits of the firewall mark that tell the rules
	// what to do with a packet that comes through the chain once more: set ECN
	// CE, clear the DSCP. They are ours on a shaped interface: a packet that
	// comes with one of them is not queued.
	MarkCE   = uint32(1) << 31
	MarkWash = uint32(1) << 30

	// Marks are the bits that are not the user's.
	Marks = MarkCE | MarkWash

	// Lifetime is how long the rules hold without Renew.
	Lifetime = 2 * time.Second
)

// Direction says what happens to the packets of one direction.
type Direction struct {
	On     bool   // packets go to the numbers from Number on; else they pass
	Number uint16 // Queue.DownNumber or UpNumber
	// Whole is the length, in bytes of layer 3, up to which a super-packet stays
	// whole. The kernel segments longer ones before it queues them.
	Whole uint32
	Wash  bool // clear the DSCP of all packets, if On is not; else of those whose marks say so
	// Restore are the bits of the firewall mark that a packet that has none of
	// them takes from its connection's mark before it is queued.
	Restore uint32
}

// Rules are the nftables rules of one interface. They live in a table
// "cakefleet-IF" of the families ip and ip6, and go by the interface's index:
// comparing it is much cheaper than comparing a name, and one that comes back
// after it went needs rules of its own.
type Rules struct {
	iface string
	index uint32

	mu     sync.Mutex // guards everything below
	fd     int
	out    builder
	in     []byte
	owner  bool      // the tables belong to the socket
	deal   dealing   // how packets get to the numbers
	up     bool      // the tables are there
	quick  bool      // the kernel was, the last time: see send
	before [2]uint64 // what the counters had before the rules were last changed
}

// dealing is how packets are dealt out to the numbers of a direction.
type dealing int

const (
	inTurn   dealing = iota // the queue expression, by a counter
	byHash                  // the queue expression, by addresses
	byTarget                // the xtables target, by addresses
	numDealings
)

// OpenRules opens a netlink socket in the network namespace of the calling
// thread, for the interface that has the name now. Nothing is changed before
// Install.
func OpenRules(iface string) (*Rules, error) {
	if iface == "" || len(iface) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("rules for interface %q: the name must have 1 to %d characters", iface, unix.IFNAMSIZ-1)
	}
	index, err := interfaceIndex(iface)
	if err != nil {
		return nil, fmt.Errorf("rules for interface %s: %w", iface, err)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	r := &Rules{iface: iface, index: index, fd: fd, in: make([]byte, 16<<10)}
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

func interfaceIndex(name string) (uint32, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req)
	return req.Uint32(), err
}

// Install makes the tables in one transaction, in the place of what an agent
// that died may have left, and the rules alive for Lifetime. It tries what
// this kernel can: the queue expression or else the xtables target, packets
// dealt out in turn or else by a hash, tables owned by the socket or else plain
// ones.
func (r *Rules) Install(down, up Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before, r.quick = [2]uint64{}, false
	var first error
	if r.up { // as it went before
		if first = r.transaction(func(b *builder) { r.addTables(b, down, up) }); first == nil {
			return nil
		}
		r.up = false
	}
	for r.deal = range numDealings {
		for _, owner := range []bool{true, false} {
			r.owner = owner
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

// Set changes the rules in one transaction and keeps them alive for Lifetime
// from now on: the kernel may take long for many changes. The chains stay: taking a hook
// away would make the kernel drop every packet that it holds for any queue.
func (r *Rules) Set(down, up Direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	down0, up0, err := r.countersLocked()
	if err != nil {
		return err
	}
	r.quick = false
	err = r.transaction(func(b *builder) {
		for _, f := range families {
			for _, d := range directions {
				for _, chain := range d.chains() {
					b.begin(msgDelRule, unix.NLM_F_REQUEST|unix.NLM_F_ACK, f, 0)
					b.str(ruleTable, r.table())
					b.str(ruleChain, chain)
					b.end()
				}
			}
			r.addRules(b, f, down, up)
			r.renew(b, f, Lifetime)
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
	start := time.Now()
	err := r.transaction(func(b *builder) {
		for _, f := range families {
			r.renew(b, f, life)
		}
	})
	r.quick = err == nil && time.Since(start) < quickTime
	if err != nil {
		return fmt.Errorf("renew rules for %s: %w", r.iface, err)
	}
	return nil
}

func (r *Rules) renew(b *builder, family uint8, life time.Duration) {
	// Old kernels can't change the timeout of an element that exists and refuse
	// to delete one that has expired: add it so that it exists in any case,
	// delete it, add it afresh.
	r.element(b, family, msgNewElem, life)
	r.element(b, family, msgDelElem, 0)
	r.element(b, family, msgNewElem, life)
}

// Counters returns how many packets have come in each direction since Install,
// shaped or not. A packet that was sent through the chain once more counts
// once.
func (r *Rules) Counters() (down, up uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.countersLocked()
}

func (r *Rules) countersLocked() (down, up uint64, err error) {
	n := r.before
	for _, f := range families {
		for i, d := range directions {
			packets, err := r.count(f, d.queueChain)
			if err != nil {
				return 0, 0, fmt.Errorf("read counter of chain %s of %s: %w", d.queueChain, r.iface, err)
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
	r.quick = false
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
	if err := r.send(b.Bytes); err != nil {
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
		n, err := r.recv()
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

// quickTime is how long a renewal may take for the next calls to do without the
// Go scheduler, which has to run nothing else meanwhile. Telling it wakes the
// runtime's monitor some times, and an idle agent does little but renew. A
// kernel of before 5.4 waits in it for some ticks.
const quickTime = time.Millisecond

func (r *Rules) send(b []byte) error {
	if !r.quick {
		return unix.Sendto(r.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(r.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
	return errnoErr(errno)
}

func (r *Rules) recv() (int, error) {
	if !r.quick {
		n, _, err := unix.Recvfrom(r.fd, r.in, 0)
		return n, err
	}
	// The answer is there when the send returns.
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(r.fd), uintptr(unsafe.Pointer(&r.in[0])), uintptr(len(r.in)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errnoErr(errno)
}

func errnoErr(errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
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
	if err := r.send(b.Bytes); err != nil {
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
