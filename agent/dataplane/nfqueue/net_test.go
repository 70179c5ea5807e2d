package nfqueue

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func mustAddr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// setTOS sets the DS field of what a socket sends.
func setTOS(t *testing.T, c *net.UDPConn, tos int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		if c.LocalAddr().(*net.UDPAddr).IP.To4() != nil {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, tos)
		} else {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, tos)
		}
	})
	if err != nil || set != nil {
		t.Fatal(err, set)
	}
}

// checksum is the sum of 16-bit words in ones' complement: 0xffff if right.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return uint16(sum>>16 + sum&0xffff)
}

// setMark gives what a socket sends a firewall mark.
func setMark(t *testing.T, c *net.UDPConn, mark int) {
	t.Helper()
	setOption(t, c, unix.SOL_SOCKET, unix.SO_MARK, mark)
}

// setSegment makes what a socket writes super-packets of such segments.
func setSegment(t *testing.T, c *net.UDPConn, size int) {
	t.Helper()
	setOption(t, c, unix.SOL_UDP, unix.UDP_SEGMENT, size)
}

func setOption(t *testing.T, c *net.UDPConn, level, option, value int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	err = raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, value) })
	if err != nil || set != nil {
		t.Fatal(err, set)
	}
}
