package nfqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// Batch is how many packets one Recv returns at most.
	Batch = 64

	// CopyRange is how many bytes of a packet are copied, counted from the
	// network header: an IPv6 header with some extensions and a TCP header with
	// all its options.
	CopyRange = 128

	// maxMessage is more than the attributes and the copy range can need.
	maxMessage = 512

	// maxVerdict is the size of one verdict with a mark.
	maxVerdict = nlHeader + nfHeader + atHeader + 8 + atHeader + 4

	// receiveBuffer holds the copied heads of packets that were not read yet.
	// The kernel doubles it and counts about 830 bytes for each: 2500 packets,
	// a quarter of a second of full-size ones at 115 Mbit/s. What comes on top
	// passes unshaped.
	receiveBuffer = 1 << 20

	firstQueue = 0xca00 // numbers that we try, so that others may have the low ones
	numQueues  = 256
)

// Message types and commands of linux/netfilter/nfnetlink_queue.h.
const (
	subsysQueue = 3 << 8

	msgPacket       = subsysQueue
	msgVerdict      = subsysQueue | 1
	msgConfig       = subsysQueue | 2
	msgVerdictBatch = subsysQueue | 3

	cfgCmd         = 1
	cfgParams      = 2
	cfgQueueMaxLen = 3
	cfgMask        = 4
	cfgFlags       = 5

	cmdBind = 1

	copyPacket = 2

	flagFailOpen = 1
	flagGSO      = 4

	attrVerdictHdr = 2

	verdictDrop   = 0
	verdictAccept = 1
)

// Config is how a Queue is opened.
type Config struct {
	MaxLen uint32 // packets that the kernel holds at most; beyond it they pass
	GSO    bool   // take super-packets whole instead of having them segmented
}

// Counters are a Queue's since it was opened.
type Counters struct {
	Packets   uint64 // packets that Recv returned
	Batches   uint64 // calls of Recv that returned packets
	Accepted  uint64 // accept verdicts given
	Overflows uint64 // packets that did not fit into the socket; they passed unshaped
	Errors    uint64 // verdicts that the kernel refused, as for packets that it has flushed
}

// Queue is one NFQUEUE. See the package comment on who may call what.
type Queue struct {
	Number uint16

	fd, wake int
	counters Counters
	lastID   uint32 // of the newest packet received

	out        builder // verdicts not sent yet
	verdictMsg verdictMsg

	// The receive side of recvmmsg points into itself, so it is made once and
	// never moves.
	recv *receiver
}

// mmsghdr is struct mmsghdr; the length is padded by the compiler as in C.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

type receiver struct {
	msgs [Batch]mmsghdr
	iovs [Batch]unix.Iovec
	bufs [Batch][maxMessage]byte
}

// Open binds a free queue number in the network namespace of the calling
// thread.
func Open(c Config) (*Queue, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter socket: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open eventfd: %w", err)
	}
	q := &Queue{fd: fd, wake: wake, recv: new(receiver)}
	q.out.Bytes = make([]byte, 0, Batch*maxVerdict)
	for i := range q.recv.msgs {
		q.recv.iovs[i].Base = &q.recv.bufs[i][0]
		q.recv.iovs[i].SetLen(maxMessage)
		q.recv.msgs[i].hdr.Iov = &q.recv.iovs[i]
		q.recv.msgs[i].hdr.SetIovlen(1)
	}
	if err := q.setUp(c); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}

func (q *Queue) setUp(c Config) error {
	if err := unix.Bind(q.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind netfilter socket: %w", err)
	}
	// Overflows are counted by the gaps they leave in the packet ids. Being
	// told by an error would also hold up delivery until the socket is empty.
	if err := unix.SetsockoptInt(q.fd, unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS, 1); err != nil {
		return fmt.Errorf("set no-enobufs: %w", err)
	}
	if err := unix.SetsockoptInt(q.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		return fmt.Errorf("set receive buffer: %w", err)
	}
	if err := q.bindNumber(); err != nil {
		return err
	}
	q.verdictMsg = newVerdict(q.Number)
	err := q.configure(func(b *builder) {
		b.attr(cfgParams, []byte{0, 0, 0, CopyRange, copyPacket})
	})
	if err != nil {
		return fmt.Errorf("set copy range of queue %d: %w", q.Number, err)
	}
	if err := q.configure(c.attrs); err != nil {
		return fmt.Errorf("configure queue %d: %w", q.Number, err)
	}
	return nil
}

// bindNumber takes the first number that is free.
func (q *Queue) bindNumber() error {
	for i := range uint16(numQueues) {
		q.Number = firstQueue + i
		err := q.configure(func(b *builder) {
			b.attr(cfgCmd, []byte{cmdBind, 0, 0, 0})
		})
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EPERM) && i < numQueues-1:
			// Somebody else's. EPERM is also what a process without the right
			// gets, for every number.
		default:
			return fmt.Errorf("bind queue: %w", err)
		}
	}
	return fmt.Errorf("bind queue: all %d numbers from %d on are in use", numQueues, firstQueue)
}

// Configure changes the limit and the handling of super-packets in place. An
// error of the kernel, which knows no reason to refuse, would be counted in
// Counters.Errors: packets arrive on the same socket, so that it can't be
// waited for.
func (q *Queue) Configure(c Config) error {
	if err := q.request(c.attrs, 0); err != nil {
		return fmt.Errorf("configure queue %d: %w", q.Number, err)
	}
	return nil
}

func (c Config) attrs(b *builder) {
	flags := uint32(flagFailOpen)
	if c.GSO {
		flags |= flagGSO
	}
	b.u32(cfgQueueMaxLen, c.MaxLen)
	b.u32(cfgFlags, flags)
	b.u32(cfgMask, flagFailOpen|flagGSO)
}

// configure sends one configuration message and reads the acknowledgement. No
// packets may flow yet.
func (q *Queue) configure(attrs func(*builder)) error {
	if err := q.request(attrs, unix.NLM_F_ACK); err != nil {
		return err
	}
	var b [maxMessage]byte
	// The kernel handles a netlink request within the send: the answer is here.
	n, _, err := unix.Recvfrom(q.fd, b[:], 0)
	if err != nil {
		return err
	}
	typ, _, body, _, ok := nextMessage(b[:n])
	if !ok || typ != unix.NLMSG_ERROR {
		return fmt.Errorf("unexpected answer of type %d", typ)
	}
	return messageError(body)
}

func (q *Queue) request(attrs func(*builder), flags uint16) error {
	var b builder
	b.begin(msgConfig, unix.NLM_F_REQUEST|flags, unix.AF_UNSPEC, q.Number)
	attrs(&b)
	b.end()
	return unix.Sendto(q.fd, b.Bytes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// messageError reads the body of an NLMSG_ERROR; nil is an acknowledgement.
func messageError(body []byte) error {
	if len(body) < 4 {
		return errors.New("short netlink error message")
	}
	if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}

// Recv fills pkts, at most Batch of them, with what waits, and returns how
// many there are; it never blocks. The Data of earlier packets becomes invalid.
func (q *Queue) Recv(pkts []Packet) (int, error) {
	r := q.recv
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(q.fd), uintptr(unsafe.Pointer(&r.msgs[0])),
		uintptr(min(len(pkts), Batch)), unix.MSG_DONTWAIT, 0, 0)
	switch errno {
	case 0:
	case unix.EAGAIN, unix.EINTR:
		return 0, nil
	case unix.ENOBUFS: // not with NO_ENOBUFS set; and the gap in the ids tells
		return 0, nil
	default:
		return 0, fmt.Errorf("receive from queue %d: %w", q.Number, errno)
	}
	got := 0
	for i := range int(n) {
		typ, _, body, _, ok := nextMessage(r.bufs[i][:r.msgs[i].n])
		switch {
		case !ok:
			q.counters.Errors++
		case typ == msgPacket && parsePacket(body, &pkts[got]):
			q.count(pkts[got].ID)
			got++
		case typ == unix.NLMSG_ERROR && messageError(body) == nil:
			// an acknowledgement that nobody asked for
		default:
			q.counters.Errors++
		}
	}
	if got > 0 {
		q.counters.Batches++
		q.counters.Packets += uint64(got)
	}
	return got, nil
}

// count notices ids that never arrived: the kernel gives an id before it finds
// that the socket is full.
func (q *Queue) count(id uint32) {
	if gap := id - q.lastID - 1; gap < 1<<31 { // ids of a queue begin with 1
		q.counters.Overflows += uint64(gap)
	}
	q.lastID = id
}

// Accept lets a packet go on. With setMark its firewall mark becomes mark. The
// verdict waits until Flush, or until a batch is full.
func (q *Queue) Accept(id uint32, setMark bool, mark uint32) error {
	q.verdict(id, verdictAccept)
	if setMark {
		q.out.u32(attrMark, mark)
		q.out.end()
	}
	q.counters.Accepted++
	return q.flushFull()
}

// Drop drops a packet; it waits like Accept.
func (q *Queue) Drop(id uint32) error {
	q.verdict(id, verdictDrop)
	return q.flushFull()
}

// verdict appends a whole message without a mark. There is one a packet, so it
// is copied, and only what differs is put in.
func (q *Queue) verdict(id, verdict uint32) {
	q.out.again(&q.verdictMsg)
	at := q.out.Bytes[len(q.out.Bytes)-8:]
	binary.BigEndian.PutUint32(at, verdict)
	binary.BigEndian.PutUint32(at[4:], id)
}

func (q *Queue) flushFull() error {
	if len(q.out.Bytes)+maxVerdict > cap(q.out.Bytes) {
		return q.Flush()
	}
	return nil
}

// Flush sends the verdicts that wait, in their order.
func (q *Queue) Flush() error {
	if len(q.out.Bytes) == 0 {
		return nil
	}
	b := q.out.Bytes
	q.out.Bytes = b[:0]
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(q.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("send verdicts to queue %d: %w", q.Number, errno)
		}
	}
}

// Release accepts every packet that the kernel holds, in the order of arrival:
// those that were received, and those that still wait to be. Their marks stay.
func (q *Queue) Release() error {
	q.out.Bytes = q.out.Bytes[:0]
	var pkts [Batch]Packet
	for {
		n, err := q.Recv(pkts[:])
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
	}
	if q.counters.Packets == 0 {
		return nil
	}
	q.out.begin(msgVerdictBatch, unix.NLM_F_REQUEST, unix.AF_UNSPEC, q.Number)
	q.out.u64(attrVerdictHdr, verdictAccept<<32|uint64(q.lastID))
	q.out.end()
	return q.Flush()
}

// Wait blocks until a packet can be received, Wake was called, or the time is
// over; a negative time never is. With packets false arriving packets don't
// end it.
func (q *Queue) Wait(d time.Duration, packets bool) error {
	fds := [2]unix.PollFd{
		{Fd: int32(q.wake), Events: unix.POLLIN},
		{Fd: int32(q.fd), Events: unix.POLLIN},
	}
	n := uintptr(1)
	if packets {
		n = 2
	}
	var ts *unix.Timespec
	if d >= 0 {
		t := unix.NsecToTimespec(int64(d))
		ts = &t
	}
	_, _, errno := unix.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), n, uintptr(unsafe.Pointer(ts)), 0, 0, 0)
	if errno != 0 && errno != unix.EINTR {
		return fmt.Errorf("wait for queue %d: %w", q.Number, errno)
	}
	if fds[0].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(q.wake, b[:]) // nothing to read is fine too
	}
	return nil
}

// Wake ends a Wait of another goroutine, or the next one.
func (q *Queue) Wake() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(q.wake, one[:]) // it only fails when a wake is pending already
}

// Counters returns the counters; only the goroutine that owns q may ask.
func (q *Queue) Counters() Counters { return q.counters }

// Close gives the number back. The kernel drops what it still holds, see
// Release. It is idempotent, and the caller makes sure that nobody is in
// another method.
func (q *Queue) Close() error {
	if q.fd < 0 {
		return nil
	}
	err := errors.Join(os.NewSyscallError("close", unix.Close(q.fd)), os.NewSyscallError("close", unix.Close(q.wake)))
	q.fd, q.wake = -1, -1
	return err
}
