package wan

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nic"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
)

const (
	ifinfoLen  = 16
	readLen    = 32 << 10 // the kernel's messages are never longer
	answerTime = 5 * time.Second

	// firstSeq sets our questions apart from those of others, whose numbers come
	// with the news of what they changed. ip(8) counts from the time.
	firstSeq = 0xca4e0000
)

// watch knows what the kernel says of one interface. Its goroutine sleeps until
// the kernel tells of a change of any interface; what the kernel tells is only
// the reason to ask, so that neither a lost message nor one of many alike
// matters.
type watch struct {
	name    string
	log     hclog.Logger
	file    *os.File
	changed chan struct{} // capacity 1: one that was not read yet stands for all
	known   chan struct{} // closed by the first answer
	done    chan struct{} // closed when the goroutine has ended
	device  atomic.Pointer[dataplane.Device]
	asked   atomic.Uint32 // questions
	missed  atomic.Uint32 // times that the kernel had more to tell than the socket holds

	seq    uint32 // of the last question; the rest is the goroutine's
	answer bool   // whether there was an answer
	index  uint32 // of the interface when it was there last
	downs  uint32 // how often the kernel had seen its carrier lost by then
	once   sync.Once
}

// newWatch opens a socket in the network namespace of the calling thread and
// waits for the first answer.
func newWatch(name string, log hclog.Logger) (*watch, error) {
	if name == "" || len(name) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("interface %q: the name must have 1 to %d characters", name, unix.IFNAMSIZ-1)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	// Non-blocking, it waits in the runtime's poller and takes no thread.
	w := &watch{
		name: name, log: log, file: os.NewFile(uintptr(fd), "rtnetlink"),
		seq:     firstSeq,
		changed: make(chan struct{}, 1), known: make(chan struct{}), done: make(chan struct{}),
	}
	w.device.Store(&dataplane.Device{Name: name})
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind rtnetlink socket: %w", err), w.file.Close())
	}
	if err := w.ask(); err != nil {
		return nil, errors.Join(err, w.file.Close())
	}
	go w.run() // ended and waited for by close
	select {
	case <-w.known:
		return w, nil
	case <-w.done:
		return nil, errors.Join(errors.New("rtnetlink socket: it ended"), w.close())
	case <-time.After(answerTime):
		return nil, errors.Join(fmt.Errorf("the kernel does not tell of interface %s within %v", name, answerTime), w.close())
	}
}

// Device returns the interface as it was told last.
func (w *watch) Device() dataplane.Device { return *w.device.Load() }

// Changed has a value when Device may return another than before.
func (w *watch) Changed() <-chan struct{} { return w.changed }

func (w *watch) close() error {
	var err error
	w.once.Do(func() { err = w.file.Close() })
	<-w.done
	return err
}

// ask sends a question for the interface of our name. Only one goroutine asks
// at a time.
func (w *watch) ask() error {
	w.seq++
	w.asked.Add(1)
	b := nlmsg.Builder{Order: nlmsg.Order{}}
	b.Begin(unix.RTM_GETLINK, unix.NLM_F_REQUEST, w.seq)
	b.Raw(make([]byte, ifinfoLen)...)
	b.Str(unix.IFLA_IFNAME, w.name)
	b.End()
	if _, err := w.file.Write(b.Bytes); err != nil {
		return fmt.Errorf("ask for interface %s: %w", w.name, err)
	}
	return nil
}

func (w *watch) run() {
	defer close(w.done)
	buf := make([]byte, readLen)
	for {
		n, err := w.file.Read(buf)
		ask := false
		switch {
		case err == nil:
			ask = w.read(buf[:n])
		case errors.Is(err, unix.ENOBUFS):
			w.missed.Add(1)
			w.drain()
			ask = true
		case errors.Is(err, unix.EINTR):
		default:
			if !errors.Is(err, os.ErrClosed) {
				w.log.Error("changes of the interface are not seen any more", "error", err)
			}
			return
		}
		if !ask {
			continue
		}
		if err := w.ask(); err != nil && !errors.Is(err, os.ErrClosed) {
			w.log.Warn("the interface may have changed", "error", err)
		}
	}
}

// drain throws away what the socket holds. The kernel says that it had more to
// tell only once until the socket is empty again (NETLINK_S_CONGESTED): what
// was asked before that could be lost without a word.
func (w *watch) drain() {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return // closed; the next read tells
	}
	_ = raw.Read(func(fd uintptr) (done bool) { // the same
		var b [1]byte
		for {
			_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
			if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
				return true
			}
		}
	})
}

// read takes in what the kernel says, and returns whether to ask.
func (w *watch) read(b []byte) (ask bool) {
	for {
		m, rest, ok := nlmsg.Next(nlmsg.Order{}, b)
		if !ok {
			return ask
		}
		b = rest
		if ours := m.Seq - firstSeq; ours != 0 && ours < w.seq-firstSeq {
			continue // the answer to a later question is on its way
		}
		switch d, isLink := decode(m); {
		case m.Seq == w.seq && m.Type == unix.NLMSG_ERROR:
			if errno := unix.Errno(-int32(nlmsg.Attr{Order: nlmsg.Order{}, Bytes: m.Body}.U32())); errno == unix.ENODEV {
				w.set(dataplane.Device{Name: w.name}, 0, false)
			} else {
				w.log.Warn("the kernel does not tell of the interface", "error", errno)
			}
		case !isLink:
		case m.Seq == w.seq && m.Type == unix.RTM_NEWLINK && d.Name == w.name:
			downs, counts := carrierDowns(m)
			w.set(w.more(d), downs, counts)
		case m.Seq == w.seq && m.Type == unix.RTM_NEWLINK: // found by another name that it has, too
			w.set(dataplane.Device{Name: w.name}, 0, false)
		default:
			ask = ask || d.Name == w.name || d.Index == w.Device().Index
		}
	}
}

// set notes the answer to a question.
func (w *watch) set(d dataplane.Device, downs uint32, counts bool) {
	first := !w.answer
	w.answer = true
	was := w.Device()
	d.Comings, d.CarrierLosses = was.Comings, was.CarrierLosses
	if d.Index != 0 {
		switch {
		case d.Index != w.index && !first:
			d.Comings++
		case d.Index != w.index:
		case counts:
			d.CarrierLosses += uint64(downs - w.downs)
		case was.Carrier && !d.Carrier: // before Linux 4.16 some may be missed
			d.CarrierLosses++
		}
		w.index, w.downs = d.Index, downs
	}
	if d != was {
		w.device.Store(&d)
		if !first {
			select {
			case w.changed <- struct{}{}:
			default:
			}
		}
	}
	if first {
		close(w.known)
	}
}

// decode reads a message that tells of an interface.
func decode(m nlmsg.Message) (d dataplane.Device, ok bool) {
	if m.Type != unix.RTM_NEWLINK && m.Type != unix.RTM_DELLINK || len(m.Body) < ifinfoLen {
		return d, false
	}
	var o nlmsg.Order
	d.Type = o.Uint16(m.Body[2:])
	d.Index = o.Uint32(m.Body[4:])
	d.Up = o.Uint32(m.Body[8:])&unix.IFF_UP != 0
	for typ, v := range (nlmsg.Attrs{Order: o, Bytes: m.Body[ifinfoLen:]}).All() {
		switch typ {
		case unix.IFLA_IFNAME:
			d.Name = v.Str()
		case unix.IFLA_MTU:
			d.MTU = v.U32()
		case unix.IFLA_CARRIER:
			d.Carrier = len(v.Bytes) > 0 && v.Bytes[0] != 0
		}
	}
	return d, true
}

// carrierDowns returns how often the carrier was lost since the interface was
// made; ok is false if the kernel does not count it.
func carrierDowns(m nlmsg.Message) (n uint32, ok bool) {
	v, ok := nlmsg.Attrs{Order: nlmsg.Order{}, Bytes: m.Body[ifinfoLen:]}.Find(unix.IFLA_CARRIER_DOWN_COUNT)
	return v.U32(), ok
}

// more adds what rtnetlink does not tell.
func (w *watch) more(d dataplane.Device) dataplane.Device {
	if raw, err := w.file.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { d.Speed = nic.Speed(int(fd), d.Name) }) // closed: the next read tells
	}
	return d
}
