package testnet

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolValue is struct ethtool_value, ifreq a struct ifreq that points to it.
type (
	ethtoolValue struct{ cmd, data uint32 }
	ifreq        struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [24 - unsafe.Sizeof(uintptr(0))]byte
	}
)

// Offload switches the building of super-packets on a link on or off: TSO,
// GSO and GRO. With it off every packet on the link is one frame.
func (n *Namespace) Offload(link string, on bool) error {
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("offload of %s/%s: %w", n.Name, link, err)
		}
		defer unix.Close(fd)
		for _, cmd := range []uint32{unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SGRO} {
			v := ethtoolValue{cmd: cmd}
			if on {
				v.data = 1
			}
			var req ifreq
			copy(req.name[:unix.IFNAMSIZ-1], link)
			req.data = unsafe.Pointer(&v)
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
			if errno != 0 {
				return fmt.Errorf("set offload %#x of %s/%s: %w", cmd, n.Name, link, errno)
			}
		}
		return nil
	})
}
