package testnet

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Session is one end of a PPPoE session; closing it is hanging up, with which
// the interface goes.
type Session struct {
	socket        int
	channel, unit *os.File
}

// PPPoE makes a PPPoE session between two Ethernet links that are up, with an
// interface at each end, both up. There is no discovery and no LCP: both ends
// know the session's number, and the kernel carries it.
func PPPoE(number uint16, a *Namespace, aEther, aLink string, b *Namespace, bEther, bLink string) (near, far *Session, err error) {
	aMAC, err := a.mac(aEther)
	if err != nil {
		return nil, nil, err
	}
	bMAC, err := b.mac(bEther)
	if err != nil {
		return nil, nil, err
	}
	if near, err = a.dial(number, aEther, bMAC, aLink); err != nil {
		return nil, nil, err
	}
	if far, err = b.dial(number, bEther, aMAC, bLink); err != nil {
		return nil, nil, errors.Join(err, near.Close())
	}
	return near, far, nil
}

func (n *Namespace) mac(link string) ([]byte, error) {
	l, err := n.link(link)
	if err != nil {
		return nil, err
	}
	return l.Attrs().HardwareAddr, nil
}

// dial makes one end, as pppd does when it has found the other.
func (n *Namespace) dial(number uint16, ether string, remote []byte, link string) (*Session, error) {
	s := &Session{socket: -1}
	var unit int
	err := n.Do(func() (err error) {
		if s.socket, err = unix.Socket(unix.AF_PPPOX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil { // PX_PROTO_OE
			return os.NewSyscallError("socket", err)
		}
		if err := unix.Connect(s.socket, &unix.SockaddrPPPoE{SID: number, Remote: remote, Dev: ether}); err != nil {
			return os.NewSyscallError("connect", err)
		}
		channel, err := unix.IoctlGetUint32(s.socket, unix.PPPIOCGCHAN)
		if err != nil {
			return os.NewSyscallError("PPPIOCGCHAN", err)
		}
		if s.channel, err = os.OpenFile("/dev/ppp", os.O_RDWR, 0); err != nil {
			return err
		}
		if err := unix.IoctlSetPointerInt(int(s.channel.Fd()), unix.PPPIOCATTCHAN, int(channel)); err != nil {
			return os.NewSyscallError("PPPIOCATTCHAN", err)
		}
		if s.unit, err = os.OpenFile("/dev/ppp", os.O_RDWR, 0); err != nil {
			return err
		}
		if unit, err = newUnit(int(s.unit.Fd())); err != nil {
			return os.NewSyscallError("PPPIOCNEWUNIT", err)
		}
		return os.NewSyscallError("PPPIOCCONNECT", unix.IoctlSetPointerInt(int(s.channel.Fd()), unix.PPPIOCCONNECT, unit))
	})
	if err == nil {
		err = n.nameSession(fmt.Sprint("ppp", unit), link)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("PPPoE session on %s/%s: %w", n.Name, ether, err), s.Close())
	}
	return s, nil
}

func (n *Namespace) nameSession(made, link string) error {
	const overhead = 8 // of PPPoE
	if err := n.Rename(made, link); err != nil {
		return err
	}
	return errors.Join(n.MTU(link, 1500-overhead), n.Up(link))
}

// Close hangs up. It is idempotent.
func (s *Session) Close() error {
	var errs []error
	if s.unit != nil {
		errs = append(errs, s.unit.Close())
	}
	if s.channel != nil {
		errs = append(errs, s.channel.Close())
	}
	if s.socket >= 0 {
		errs = append(errs, unix.Close(s.socket))
	}
	*s = Session{socket: -1}
	return errors.Join(errs...)
}

// newUnit makes an interface and returns its number.
func newUnit(fd int) (int, error) {
	unit := int32(-1) // any
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.PPPIOCNEWUNIT, uintptr(unsafe.Pointer(&unit)))
	if errno != 0 {
		return 0, errno
	}
	return int(unit), nil
}
