package offload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/netfilter/x_tables.h and linux/netfilter_ipv4/ip_tables.h; the
// options of IPv6 have the same numbers.
const (
	optGetInfo    = 64 // IPT_SO_GET_INFO
	optGetEntries = 65 // IPT_SO_GET_ENTRIES

	tableNameLen  = 32
	targetNameLen = 29
	targetHeader  = 2 + targetNameLen + 1

	filterTable = "filter"
	targetName  = "FLOWOFFLOAD"
	hardware    = 1 // XT_FLOWOFFLOAD_HW
)

// xtables is where the rules of one family have their parts. The offsets are
// the same on all processors.
type xtables struct {
	family  string // as in names of files
	program string
	level   int
	// offsets of the target and of the next rule, 16 bits each, from the start of
	// a rule
	target, next int
}

var (
	xtables4 = xtables{family: "ip", program: "iptables", level: unix.SOL_IP, target: 88, next: 90}
	xtables6 = xtables{family: "ip6", program: "ip6tables", level: unix.SOL_IPV6, target: 140, next: 142}
)

// entries returns the rules of the filter table as the kernel has them.
func (f *xtables) entries(fd int) ([]byte, error) {
	var info struct {
		name       [tableNameLen]byte
		hooks      uint32
		hookEntry  [5]uint32
		underflow  [5]uint32
		count, len uint32
	}
	copy(info.name[:], filterTable)
	for range 5 { // the table may change between the two questions
		n := uint32(unsafe.Sizeof(info))
		if err := getsockopt(fd, f.level, optGetInfo, unsafe.Pointer(&info), &n); err != nil {
			return nil, err
		}
		const head = tableNameLen + 8 // name, length, and what aligns the rules
		b := make([]byte, head+info.len)
		copy(b, filterTable)
		binary.NativeEndian.PutUint32(b[tableNameLen:], info.len)
		n = uint32(len(b))
		err := getsockopt(fd, f.level, optGetEntries, unsafe.Pointer(&b[0]), &n)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return b[head:], nil
	}
	return nil, unix.EAGAIN
}

func getsockopt(fd, level, option int, p unsafe.Pointer, n *uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(p), uintptr(unsafe.Pointer(n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// find counts the rules with the target FLOWOFFLOAD.
func (f *xtables) find(b []byte) Table {
	t := Table{Table: f.program}
	for len(b) >= f.next+2 {
		target, next := int(binary.NativeEndian.Uint16(b[f.target:])), int(binary.NativeEndian.Uint16(b[f.next:]))
		if next < f.next+2 || next > len(b) {
			break
		}
		if target+targetHeader <= next && cString(b[target+2:target+2+targetNameLen]) == targetName {
			t.Rules++
			if flags := target + targetHeader; flags+4 <= next && binary.NativeEndian.Uint32(b[flags:])&hardware != 0 {
				t.Hardware = true
			}
		}
		b = b[next:]
	}
	return t
}

// cString is a text without the zero at its end.
func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}
