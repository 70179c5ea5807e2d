package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nic"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
)

// conn is an rtnetlink socket, or a fake kernel. It has one caller at a time.
type conn interface {
	// do sends one request and returns all answers to it but the
	// acknowledgement. An error of the kernel is a *kernelError.
	do(req []byte) ([]nlmsg.Message, error)
	// speed returns the speed of an interface; 0 where it has none.
	speed(iface string) engine.BitsPerSecond
	close() error
}

// kernelError is a refusal, in the kernel's words if it had any.
type kernelError struct {
	errno unix.Errno
	text  string
}

func (e *kernelError) Error() string {
	if e.text == "" {
		return e.errno.Error()
	}
	return e.errno.Error() + " (" + e.text + ")"
}

func (e *kernelError) Unwrap() error { return e.errno }

const (
	answerTime = 5 * time.Second
	readLen    = 32 << 10 // the kernel's answers are never longer
	tries      = 5        // of a listing that changed while it was read
)

// socket is the conn of this machine's kernel.
type socket struct {
	fd  int
	seq uint32
	buf []byte
}

// dial opens a socket in the network namespace of the calling thread.
func dial() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	s := &socket{fd: fd, buf: make([]byte, readLen)}
	if err := s.setUp(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *socket) setUp() error {
	if err := unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind rtnetlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(answerTime))
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("set receive timeout: %w", err)
	}
	// Reasons in words; kernels before 4.12 have none.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return nil
}

func (s *socket) speed(iface string) engine.BitsPerSecond { return nic.Speed(s.fd, iface) }

func (s *socket) close() error {
	if s.fd == -1 {
		return nil
	}
	fd := s.fd
	s.fd = -1
	return unix.Close(fd)
}

var errInterrupted = errors.New("the listing changed while it was read")

func (s *socket) do(req []byte) ([]nlmsg.Message, error) {
	if s.fd == -1 {
		return nil, os.ErrClosed
	}
	for try := 1; ; try++ {
		answers, err := s.once(req)
		if !errors.Is(err, errInterrupted) || try == tries {
			return answers, err
		}
	}
}

func (s *socket) once(req []byte) ([]nlmsg.Message, error) {
	s.seq++
	binary.NativeEndian.PutUint32(req[8:], s.seq)
	if err := unix.Sendto(s.fd, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("send to kernel: %w", err)
	}
	var answers []nlmsg.Message
	interrupted := false
	for {
		n, _, err := unix.Recvfrom(s.fd, s.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("the kernel does not answer within %v", answerTime)
		case err != nil:
			return nil, fmt.Errorf("receive from kernel: %w", err)
		}
		for b := s.buf[:n]; ; {
			m, rest, ok := nlmsg.Next(nlmsg.Order{}, b)
			if !ok {
				break
			}
			b = rest
			if m.Seq != s.seq { // the late answer to an earlier request
				continue
			}
			interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Type {
			case unix.NLMSG_ERROR:
				return answers, ackError(nlmsg.Order{}, m)
			case unix.NLMSG_DONE:
				if interrupted {
					return nil, errInterrupted
				}
				return answers, ackError(nlmsg.Order{}, m)
			default:
				m.Body = append([]byte(nil), m.Body...)
				answers = append(answers, m)
			}
		}
	}
}

// ackError returns the error in an acknowledgement or at the end of a listing.
func ackError(order nlmsg.Order, m nlmsg.Message) error {
	code := int32(nlmsg.Attr{Order: order, Bytes: m.Body}.U32())
	if code >= 0 {
		return nil
	}
	e := &kernelError{errno: unix.Errno(-code)}
	const (
		ackTLVs  = 0x200 // NLM_F_ACK_TLVS
		ackText  = 1     // NLMSGERR_ATTR_MSG
		ackFixed = 4 + unix.NLMSG_HDRLEN
	)
	if m.Type == unix.NLMSG_ERROR && m.Flags&ackTLVs != 0 && len(m.Body) >= ackFixed {
		if v, ok := (nlmsg.Attrs{Order: order, Bytes: m.Body[ackFixed:]}).Find(ackText); ok {
			e.text = v.Str()
		}
	}
	return e
}
