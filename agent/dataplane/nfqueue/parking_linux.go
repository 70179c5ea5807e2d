package nfqueue

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// parking is where a goroutine waits without end. A thread that sleeps in a
// system call keeps its processor of Go's scheduler until the runtime's monitor
// takes it away, and each such call wakes the monitor: most of what an idle
// router's agent would be woken for. The runtime's poller gives the processor
// up at once.
//
// What it polls is an epoll set of our own, in which the queue's socket is only
// meanwhile: no packet wakes the poller while there is traffic, and a socket
// that nobody waits at spares each packet the way through its waiters.
// Nothing here tells the scheduler of its system calls, none of which waits.
type parking struct {
	set   *os.File
	conn  syscall.RawConn
	fds   [1]unix.PollFd // the set
	ready func(uintptr) bool
}

// open makes the set, which has the eventfd wake in it for ever.
func (p *parking) open(wake int) error {
	set, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open epoll set: %w", err)
	}
	err = errors.Join(
		unix.EpollCtl(set, unix.EPOLL_CTL_ADD, wake, &unix.EpollEvent{Events: unix.EPOLLIN}),
		unix.SetNonblock(set, true)) // else NewFile doesn't give it to the poller
	if err != nil {
		return errors.Join(fmt.Errorf("set up epoll set: %w", err), unix.Close(set))
	}
	p.set = os.NewFile(uintptr(set), "nfqueue")
	if p.conn, err = p.set.SyscallConn(); err != nil {
		return errors.Join(fmt.Errorf("set up epoll set: %w", err), p.set.Close())
	}
	p.fds[0] = unix.PollFd{Fd: int32(set), Events: unix.POLLIN}
	p.ready = func(uintptr) bool { // made once: a closure of wait would be an allocation each time
		n, errno := poll(p.fds[:], 0, false)
		return n > 0 || errno != 0
	}
	return nil
}

// wait returns when fd or the eventfd can be read, and sometimes before; false
// means that the poller can't be used.
func (p *parking) wait(fd int) bool {
	if !p.hear(unix.EPOLL_CTL_ADD, fd) {
		return false
	}
	err := p.conn.Read(p.ready)
	return p.hear(unix.EPOLL_CTL_DEL, fd) && err == nil
}

// hear puts fd into the set, or takes it out.
func (p *parking) hear(op, fd int) bool {
	e := unix.EpollEvent{Events: unix.EPOLLIN}
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.fds[0].Fd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&e)), 0, 0)
	return errno == 0
}
