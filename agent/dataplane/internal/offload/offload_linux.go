// Package offload finds what takes forwarded connections past the shaper: flow
// tables of nftables, and the xtables target FLOWOFFLOAD that OpenWrt had before
// them (18.06 to 21.02).
//
// Both do the same. A software flow table takes packets at the ingress hook of
// the interface that they arrive on, rewrites them, and hands them to the queue
// of the one that they leave by: they pass netfilter's other hooks by, so the
// userspace data plane never sees them. Queueing disciplines see them all, and
// so does a redirect on arrival, which comes before the hook; all they lack is
// the firewall mark that rules would have given them. With hardware flow offload
// the device forwards by itself, and nothing of the kernel sees a packet.
package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
)

// From linux/netfilter/nf_tables.h.
const (
	subsysNFTables  = 10
	msgNewFlowTable = subsysNFTables<<8 | 22
	msgGetFlowTable = subsysNFTables<<8 | 23

	flowTableTable = 1
	flowTableName  = 2
	flowTableHook  = 3
	flowTableUse   = 4
	flowTableFlags = 7
	flowHookDevs   = 3
	flowDevName    = 1

	flowHardware = 1 // NFT_FLOWTABLE_HW_OFFLOAD

	nfHeader = 4
)

// every is how long the answer to what there is holds.
const every = time.Minute

// Table is a flow table.
type Table struct {
	// Table and Name are its names in nftables; one of the xtables target has
	// none, and has every interface.
	Table, Name string
	Devices     []string // whose arriving packets it takes
	Rules       uint32   // that put flows there
	Hardware    bool
}

// source is what a Watch asks: this machine's kernel, or a fake.
type source interface {
	tables() ([]Table, error)
	below() string
	close() error
}

// Watch knows what takes an interface's packets past it. It is safe for
// concurrent use.
type Watch struct {
	iface string

	mu     sync.Mutex // guards all below
	source source
	looked time.Time // zero: never
	found  []Table   // in use
	closed bool
}

// Open opens sockets in the network namespace of the calling thread.
func Open(iface string) (*Watch, error) {
	k, err := openKernel(iface)
	if err != nil {
		return nil, fmt.Errorf("look for flow offload: %w", err)
	}
	return &Watch{iface: iface, source: k}, nil
}

// Look returns the flow tables in use that may take packets of the interface,
// as they were at most a minute ago; with now, as they are. ppp says that it is
// a session, which runs on an interface that is not known here. An error leaves
// what was known.
func (w *Watch) Look(now, ppp bool) (tables []Table, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, os.ErrClosed
	}
	if !now && !w.looked.IsZero() && time.Since(w.looked) < every {
		return w.found, nil
	}
	w.looked = time.Now()
	all, err := w.source.tables()
	if err != nil {
		return w.found, err
	}
	w.found = concern(all, w.iface, w.source.below(), ppp)
	return w.found, nil
}

// Close closes the sockets. It is idempotent.
func (w *Watch) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	return w.source.close()
}

// concern returns those flow tables in use that take packets which arrive on the
// interface, or on another and may leave by it. Since a flow table looks into
// VLAN tags and PPPoE sessions, below names the interface whose VLAN it is. The
// devices of the returned ones are those of its own: none if only upload is
// taken.
func concern(all []Table, iface, below string, ppp bool) []Table {
	var some []Table
	for _, t := range all {
		if t.Rules == 0 || t.Name != "" && len(t.Devices) == 0 {
			continue
		}
		arrives := t.Name == "" || ppp || slices.Contains(t.Devices, iface) || below != "" && slices.Contains(t.Devices, below)
		if !arrives {
			t.Devices = nil
		}
		some = append(some, t)
	}
	return some
}

// PastHooks says for people what the flow tables take past netfilter's hooks;
// empty if there are none.
func PastHooks(tables []Table) string {
	if len(tables) == 0 {
		return ""
	}
	t := worst(tables)
	return fmt.Sprintf("%s: %s; turn off flow_offloading in the firewall's configuration (uci set firewall.@defaults[0].flow_offloading=0), or use the kernel data plane, which software flow offload does not pass by", t.what(), t.passes())
}

// PastQdiscs says for people what the flow tables take past queueing
// disciplines; empty if it is nothing. marks says that the upload's tins follow
// firewall marks.
func PastQdiscs(tables []Table, marks bool) string {
	if len(tables) == 0 {
		return ""
	}
	t := worst(tables)
	switch {
	case t.Hardware:
		return fmt.Sprintf("%s: %s; turn off flow_offloading_hw in the firewall's configuration (uci set firewall.@defaults[0].flow_offloading_hw=0), software flow offload may stay", t.what(), t.passes())
	case marks:
		return fmt.Sprintf("%s: established connections are shaped, but their upload has no firewall mark for fwmark to choose a tin by; turn off flow_offloading in the firewall's configuration, or leave out fwmark", t.what())
	}
	return ""
}

// worst returns one with hardware if there is one, else one that takes both
// directions.
func worst(tables []Table) *Table {
	rank := func(t Table) int {
		switch {
		case t.Hardware:
			return 2
		case t.down():
			return 1
		}
		return 0
	}
	most := &tables[0]
	for i := range tables {
		if rank(tables[i]) > rank(*most) {
			most = &tables[i]
		}
	}
	return most
}

// down tells whether packets that arrive on the interface are taken.
func (t *Table) down() bool { return t.Name == "" || len(t.Devices) > 0 }

func (t *Table) what() string {
	what := "flow offload"
	if t.Hardware {
		what = "hardware flow offload"
	}
	if t.Name == "" {
		return what + " is on (target FLOWOFFLOAD of " + t.Table + ")"
	}
	return fmt.Sprintf("%s is on (flow table %s of table %s)", what, t.Name, t.Table)
}

func (t *Table) passes() string {
	if !t.down() {
		return "upload of established connections passes the shaper by"
	}
	return "established connections pass the shaper by"
}

// kernel is this machine's.
type kernel struct {
	iface         string
	fd, ip4, ip6  int
	seq           uint32
	targets, name string // files of what xtables has; "%s" is ip or ip6
}

func openKernel(iface string) (*kernel, error) {
	k := &kernel{iface: iface, fd: -1, ip4: -1, ip6: -1, targets: "/proc/net/%s_tables_targets", name: "/proc/net/%s_tables_names"}
	var err error
	if k.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	tv := unix.NsecToTimeval(int64(5 * time.Second)) // a lost answer must not hang us
	if err := unix.SetsockoptTimeval(k.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return nil, errors.Join(fmt.Errorf("set receive timeout: %w", err), k.close())
	}
	if k.ip4, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("open socket: %w", err), k.close())
	}
	// Without IPv6 there are no rules for it.
	if k.ip6, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		k.ip6 = -1
	}
	return k, nil
}

func (k *kernel) close() error {
	var errs []error
	for _, fd := range []int{k.fd, k.ip4, k.ip6} {
		if fd >= 0 {
			errs = append(errs, os.NewSyscallError("close", unix.Close(fd)))
		}
	}
	return errors.Join(errs...)
}

func (k *kernel) tables() ([]Table, error) {
	found, err := k.flowTables()
	for _, f := range []*xtables{&xtables4, &xtables6} {
		fd := k.ip4
		if f.level == unix.SOL_IPV6 {
			fd = k.ip6
		}
		if fd < 0 || !k.has(k.targets, f.family, targetName) || !k.has(k.name, f.family, filterTable) {
			continue // asking for a table that is not there makes the kernel make it
		}
		entries, e := f.entries(fd)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("read the rules of %s: %w", f.program, e))
			continue
		}
		if t := f.find(entries); t.Rules > 0 {
			found = append(found, t)
		}
	}
	return found, err
}

// has tells whether a file of /proc has a line.
func (k *kernel) has(file, family, line string) bool {
	b, err := os.ReadFile(fmt.Sprintf(file, family))
	return err == nil && slices.Contains(strings.Fields(string(b)), line)
}

// flowTables returns the flow tables of nftables. A kernel without them has
// none.
func (k *kernel) flowTables() ([]Table, error) {
	k.seq++
	b := nlmsg.Builder{Order: nlmsg.Order{}}
	b.Begin(msgGetFlowTable, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, k.seq)
	b.Raw(make([]byte, nfHeader)...)
	b.End()
	if err := unix.Sendto(k.fd, b.Bytes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("list flow tables: %w", err)
	}
	var found []Table
	buf := make([]byte, 16<<10)
	for {
		n, _, err := unix.Recvfrom(k.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list flow tables: %w", err)
		}
		for rest := buf[:n]; ; {
			m, after, ok := nlmsg.Next(nlmsg.Order{}, rest)
			if !ok {
				break
			}
			rest = after
			switch {
			case m.Seq != k.seq: // the late answer to an earlier question
			case m.Type == unix.NLMSG_DONE:
				return found, nil
			case m.Type == unix.NLMSG_ERROR:
				return found, refusal(m.Body)
			case m.Type == msgNewFlowTable && len(m.Body) >= nfHeader:
				found = append(found, parseFlowTable(m.Body[nfHeader:]))
			}
		}
	}
}

// refusal reads the body of an NLMSG_ERROR. A kernel that has no nftables, or no
// flow tables, is as good as one without any.
func refusal(body []byte) error {
	errno := unix.Errno(-int32(nlmsg.Attr{Order: nlmsg.Order{}, Bytes: body}.U32()))
	if errno == 0 || errno == unix.EINVAL || errno == unix.EOPNOTSUPP || errno == unix.ENOENT {
		return nil
	}
	return fmt.Errorf("list flow tables: %w", errno)
}

// parseFlowTable reads the attributes of an NFT_MSG_NEWFLOWTABLE, whose
// integers are big-endian.
func parseFlowTable(b []byte) (t Table) {
	for typ, v := range (nlmsg.Attrs{Order: nlmsg.Order{}, Bytes: b}).All() {
		switch typ {
		case flowTableTable:
			t.Table = v.Str()
		case flowTableName:
			t.Name = v.Str()
		case flowTableUse:
			t.Rules = be32(v.Bytes)
		case flowTableFlags:
			t.Hardware = be32(v.Bytes)&flowHardware != 0
		case flowTableHook:
			devs, _ := v.Attrs().Find(flowHookDevs)
			for typ, name := range devs.Attrs().All() {
				if typ == flowDevName {
					t.Devices = append(t.Devices, name.Str())
				}
			}
		}
	}
	return t
}

// be32 is 0 for an attribute that is too short.
func be32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// below returns the interface whose VLAN this one is, empty if it is none or is
// not there.
func (k *kernel) below() string {
	const getRealDevice = 8 // GET_VLAN_REALDEV_NAME_CMD
	var args struct {
		cmd     int32
		device1 [24]byte
		device2 [24]byte
		_       [8]byte
	}
	args.cmd = getRealDevice
	copy(args.device1[:len(args.device1)-1], k.iface)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(k.ip4), unix.SIOCGIFVLAN, uintptr(unsafe.Pointer(&args))); errno != 0 {
		return ""
	}
	return cString(args.device2[:])
}
