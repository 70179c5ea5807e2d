// Package nic asks the kernel what it knows of a network interface beyond what
// rtnetlink tells.
package nic

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/engine"
)

// ethtoolCmd is struct ethtool_cmd.
type ethtoolCmd struct {
	cmd                    uint32
	supported, advertising uint32
	speed                  uint16
	_                      [6]uint8
	maxTx, maxRx           uint32
	speedHigh              uint16
	_                      [2]uint8
	_                      [3]uint32
}

// Speed returns the speed of an interface; 0 where it has none, such as a
// tunnel, or no carrier. fd is a socket of any family, netlink's too, in the
// interface's network namespace.
func Speed(fd int, name string) engine.BitsPerSecond {
	cmd := ethtoolCmd{cmd: unix.ETHTOOL_GSET}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [24]byte
	}{data: unsafe.Pointer(&cmd)}
	copy(req.name[:unix.IFNAMSIZ-1], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	mbits := uint32(cmd.speedHigh)<<16 | uint32(cmd.speed)
	if errno != 0 || mbits > 1<<31-1 || mbits == 0xffff { // SPEED_UNKNOWN
		return 0
	}
	return engine.BitsPerSecond(mbits) * 1_000_000
}
