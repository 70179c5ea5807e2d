package door

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// errAgain means that there is nothing to read now. TLS takes a temporary error
// for what it is and goes on where it was at the next call.
var errAgain net.Error = again{}

type again struct{}

func (again) Error() string   { return "nothing to read now" }
func (again) Timeout() bool   { return true }
func (again) Temporary() bool { return true }

// errStuck means that the other end hasn't read for too long.
var errStuck = errors.New("the other end does not read")

// maxUnsent is how much may wait for a peer that doesn't read, bytes: what the
// windows of its streams allow, and answers to its pings.
const maxUnsent = 256 << 10

// socket is one end of TCP under a tls.Conn. It blocks during the handshake and
// never after detach.
type socket struct {
	addr net.Addr

	mu     sync.Mutex // guards the rest, and that the descriptor is not closed in use
	conn   net.Conn   // during the handshake; nil after
	fd     int        // after detach; -1: closed
	unsent []byte
	empty  bool // the last read took all that there was
	ending bool // the other end has said that nothing more comes
}

func newSocket(conn net.Conn) *socket { return &socket{addr: conn.RemoteAddr(), conn: conn, fd: -1} }

// detach takes the descriptor out of the hands of the runtime's poller.
func (s *socket) detach() error {
	conn, ok := s.conn.(*net.TCPConn)
	if g, is := s.conn.(*greeting); is {
		conn, ok = g.Conn.(*net.TCPConn)
	}
	if !ok {
		return errors.New("not a TCP connection")
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	fd := -1
	var errDup error
	if err := raw.Control(func(old uintptr) {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		if fd, errDup = syscall.Dup(int(old)); errDup == nil {
			syscall.CloseOnExec(fd)
		}
	}); err != nil {
		return err
	}
	if errDup != nil {
		return os.NewSyscallError("dup", errDup)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fd, s.conn = fd, nil
	_ = conn.Close() // Stop may have done so
	return nil
}

// Read reads what there is; errAgain: nothing.
func (s *socket) Read(p []byte) (int, error) {
	if conn := s.blocking(); conn != nil {
		return conn.Read(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if s.fd < 0 {
			return 0, net.ErrClosed
		}
		if s.empty {
			return 0, errAgain
		}
		n, err := syscall.Read(s.fd, p)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EAGAIN):
			return 0, errAgain
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			// What comes from now on is another event, but the end is none if
			// it was there already.
			s.empty = n < len(p) && !s.ending
			return n, nil
		}
	}
}

// Write writes p, or keeps what doesn't go out now for flush.
func (s *socket) Write(p []byte) (int, error) {
	if conn := s.blocking(); conn != nil {
		return conn.Write(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := 0
	if len(s.unsent) == 0 {
		n, err := s.writeLocked(p)
		if err != nil {
			return n, err
		}
		sent = n
	}
	if rest := p[sent:]; len(rest) > 0 {
		if len(s.unsent)+len(rest) > maxUnsent {
			return sent, errStuck
		}
		s.unsent = append(s.unsent, rest...)
	}
	return len(p), nil
}

func (s *socket) writeLocked(p []byte) (n int, err error) {
	for n < len(p) {
		if s.fd < 0 {
			return n, net.ErrClosed
		}
		k, err := syscall.Write(s.fd, p[n:])
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EAGAIN):
			return n, nil
		case err != nil:
			return n, os.NewSyscallError("write", err)
		default:
			n += k
		}
	}
	return n, nil
}

// event begins what an event asks for: reads find something again, and what was
// kept is written, as far as it goes.
func (s *socket) event() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.empty = false
	if len(s.unsent) == 0 {
		return nil
	}
	n, err := s.writeLocked(s.unsent)
	if s.unsent = s.unsent[n:]; len(s.unsent) == 0 {
		s.unsent = nil
	}
	return err
}

func (s *socket) blocking() net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn
}

// ends notes that after what is there nothing more comes.
func (s *socket) ends() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
}

// Close closes the socket. A watched descriptor leaves epoll with it.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.conn != nil:
		return s.conn.Close()
	case s.fd >= 0:
		fd := s.fd
		s.fd, s.unsent = -1, nil
		return os.NewSyscallError("close", syscall.Close(fd))
	}
	return nil
}

// LocalAddr is not asked for.
func (s *socket) LocalAddr() net.Addr { return s.addr }

// RemoteAddr returns the other end.
func (s *socket) RemoteAddr() net.Addr { return s.addr }

// SetDeadline bounds the handshake.
func (s *socket) SetDeadline(t time.Time) error {
	if conn := s.blocking(); conn != nil {
		return conn.SetDeadline(t)
	}
	return nil
}

// SetReadDeadline bounds reads of the handshake.
func (s *socket) SetReadDeadline(t time.Time) error {
	if conn := s.blocking(); conn != nil {
		return conn.SetReadDeadline(t)
	}
	return nil
}

// SetWriteDeadline bounds writes of the handshake. After it nothing blocks.
func (s *socket) SetWriteDeadline(t time.Time) error {
	if conn := s.blocking(); conn != nil {
		return conn.SetWriteDeadline(t)
	}
	return nil
}

// poller watches descriptors.
type poller struct {
	epoll int
	wake  [2]int // a pipe; its end ends wait
}

func newPoller() (*poller, error) {
	p := &poller{}
	var err error
	if p.epoll, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := syscall.Pipe2(p.wake[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		_ = syscall.Close(p.epoll) // the pipe's error says more
		return nil, os.NewSyscallError("pipe2", err)
	}
	if err := p.add(p.wake[0]); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

// add watches a descriptor: an event for every time that something new can be
// read or written.
func (p *poller) add(fd int) error {
	const edge = 1 << 31 // EPOLLET, which package syscall has as a negative number
	e := syscall.EpollEvent{Events: syscall.EPOLLIN | syscall.EPOLLOUT | syscall.EPOLLRDHUP | edge, Fd: int32(fd)}
	return os.NewSyscallError("epoll_ctl", syscall.EpollCtl(p.epoll, syscall.EPOLL_CTL_ADD, fd, &e))
}

// wait calls fn with the descriptors that have an event, until stop; ends: it is
// or may be the other end's last one.
func (p *poller) wait(fn func(fd int, ends bool)) error {
	var events [256]syscall.EpollEvent
	for {
		n, err := syscall.EpollWait(p.epoll, events[:], -1)
		if err != nil {
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			return os.NewSyscallError("epoll_wait", err)
		}
		for i := range events[:n] {
			if int(events[i].Fd) == p.wake[0] {
				return nil
			}
			fn(int(events[i].Fd), events[i].Events&(syscall.EPOLLRDHUP|syscall.EPOLLHUP|syscall.EPOLLERR) != 0)
		}
	}
}

// stop ends wait.
func (p *poller) stop() { _, _ = syscall.Write(p.wake[1], []byte{0}) } // the pipe is empty and takes it

// close frees the poller after wait has returned.
func (p *poller) close() error {
	return errors.Join(syscall.Close(p.wake[0]), syscall.Close(p.wake[1]), syscall.Close(p.epoll))
}
