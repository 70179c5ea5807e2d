package userspace

import (
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nic"
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
	d.ppp = req.Uint16() == unix.ARPHRD_PPP
	if req.Uint16() == unix.ARPHRD_ETHER {
		d.netOff = etherHeader
	}
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFMTU, req); err != nil {
		return device{}, fmt.Errorf("mtu of interface %s: %w", name, err)
	}
	d.mtu = req.Uint32()
	return d, nil
}

// speed asks for the interface's speed; 0 where it has none.
func (c control) speed(name string) engine.BitsPerSecond { return nic.Speed(c.fd, name) }

// loopNice is the priority of the packet loops, -20 to 19: what a customer's
// packets wait for goes before what serves nobody at the moment.
const loopNice = -15

// loopSlack is how late timers of the packet loop's thread may be.
const loopSlack = time.Nanosecond

// thread is how a thread is scheduled.
type thread struct {
	nice  int
	slack uintptr // of its timers, ns
}

func currentThread() thread {
	nice, _, _ := unix.RawSyscall(unix.SYS_GETPRIORITY, unix.PRIO_PROCESS, 0, 0) // 20 less the nice value
	slack, _, _ := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_GET_TIMERSLACK, 0, 0)
	return thread{20 - int(nice), slack}
}

// set makes the calling thread so. It only makes things better: where it fails,
// the shaper's clock makes up for what is late. Go's scheduler is not told of
// these calls, see nfqueue.Queue.
func (t thread) set() {
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, t.slack, 0)          // see above
	_, _, _ = unix.RawSyscall(unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, uintptr(t.nice)) // see above; 0 is this thread
}

// ownThread returns what makes the calling thread the packet loop's own, without
// slack and with a higher priority, and what lets it go again as it was. A loop
// that is parked has none: if it had, each packet of an idle router would wake
// two threads more.
func ownThread() func(own bool) {
	var was thread
	return func(own bool) {
		if !own {
			was.set()
			runtime.UnlockOSThread()
			return
		}
		runtime.LockOSThread()
		was = currentThread()
		thread{loopNice, uintptr(loopSlack)}.set()
	}
}
