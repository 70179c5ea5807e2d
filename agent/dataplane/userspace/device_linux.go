package userspace

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/engine"
)

// etherHeader is what the kernel's qdiscs count on top of layer 3.
const etherHeader = 14

// control is a socket for questions about interfaces; it stays in the network
// namespace in which it was opened.
type control struct{ fd int }

func openControl() (control, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return control{}, fmt.Errorf("open socket: %w", err)
	}
	return control{fd}, nil
}

func (c control) close() error { return unix.Close(c.fd) }

// device asks for the interface's kind and MTU.
func (c control) device(name string) (device, error) {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return device{}, fmt.Errorf("interface %q: %w", name, err)
	}
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFHWADDR, req); err != nil {
		return device{}, fmt.Errorf("interface %s: %w", name, err)
	}
	var d device
	if req.Uint16() == unix.ARPHRD_ETHER {
		d.netOff = etherHeader
	}
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFMTU, req); err != nil {
		return device{}, fmt.Errorf("mtu of interface %s: %w", name, err)
	}
	d.mtu = req.Uint32()
	return d, nil
}

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

// speed asks for the interface's speed; 0 where it has none, such as a tunnel,
// or no carrier.
func (c control) speed(name string) engine.BitsPerSecond {
	cmd := ethtoolCmd{cmd: unix.ETHTOOL_GSET}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [24]byte
	}{data: unsafe.Pointer(&cmd)}
	copy(req.name[:unix.IFNAMSIZ-1], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	mbits := uint32(cmd.speedHigh)<<16 | uint32(cmd.speed)
	if errno != 0 || mbits > 1<<31-1 || mbits == 0xffff { // SPEED_UNKNOWN
		return 0
	}
	return engine.BitsPerSecond(mbits) * 1_000_000
}

// loopNice is the priority of the packet loops, -20 to 19: what a customer's
// packets wait for goes before what serves nobody at the moment.
const loopNice = -15

// prepareThread takes the default 50 µs of slack off the calling thread's
// timers and raises its priority. Both only make it better: where they fail,
// the shaper's clock makes up for what is late.
func prepareThread() {
	unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)   //nolint:errcheck // see above
	unix.Setpriority(unix.PRIO_PROCESS, 0, loopNice) //nolint:errcheck // see above; 0 is this thread
}
