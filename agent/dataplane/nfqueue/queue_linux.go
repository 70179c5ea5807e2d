package nfqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// Batch is how many packets one Recv returns at most.
	Batch = 64

	// LongCopy and ShortCopy are how many bytes of a packet are copied, counted
	// from the network header: an IPv6 header with some extensions and a TCP
	// header with all its options, as the ACK filter wants to see it, or what
	// tells flows apart, also inside one tunnel.
	LongCopy, ShortCopy = 128, 64

	// maxMessage is more than the attributes and the copy range can need, and a
	// power of 2.
	maxMessage = 512

	// maxVerdict is the size of one verdict with a mark.
	maxVerdict = nlHeader + nfHeader + atHeader + 8 + atHeader + 4

	// receiveBuffer holds the copied heads of packets that were not read yet.
	// The kernel doubles it and counts about 830 bytes for each: 5000 packets,
	// a quarter of a second of full-size ones at 230 Mbit/s. What comes on top
	// passes unshaped.
	receiveBuffer = 2 << 20

	// Spread is over how many of the kernel's queues the packets of a direction
	// are dealt out. The kernel looks for the packet of a verdict along the list
	// of all that the queue holds, and ours leave in another order than they
	// came.
	Spread = 16

	// A direction has Spread numbers for packets that stay whole, behind them
	// Spread for super-packets that the kernel segments, and one for packets
	// that come when the rules have run out, see WakeLen.
	wakeOffset   = 2 * Spread
	perDirection = wakeOffset + 1
	numNumbers   = 2 * perDirection

	// WakeLen is how many packets a direction holds at most that came when the
	// rules had run out. They wake an agent that let them, because nothing came;
	// one that hangs holds no more than these.
	WakeLen = 8

	firstQueue = 0xca00 // numbers that we try, so that others may have the low ones
	numBlocks  = 200
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

	cmdBind   = 1
	cmdUnbind = 2

	copyPacket = 2

	flagFailOpen = 1
	flagGSO      = 4

	attrVerdictHdr = 2

	verdictDrop   = 0
	verdictAccept = 1
	verdictRepeat = 4
)

// Config is how the numbers of one direction handle packets.
type Config struct {
	MaxLen uint32 // packets that each of them holds at most; beyond it they pass
	Copy   uint32 // bytes of a packet that are copied, at most LongCopy
}

// Counters are a Queue's since it was opened.
type Counters struct {
	Down, Up Received
	Batches  uint64 // calls of Recv that returned packets
	Errors   uint64 // messages that were not understood, and verdicts that the kernel refused, as for packets that it has flushed
}

// Received is what has come for one direction.
type Received struct {
	Packets   uint64 // packets that Recv returned
	Overflows uint64 // packets that did not fit into the socket; they passed unshaped
}

// Queue is the NFQUEUE numbers of an interface, both directions, behind one
// socket. See the package comment on who may call what.
type Queue struct {
	// First is the first of its numbers.
	First uint16

	// Parked, if set, is called by a Wait that has no end, before and after: the
	// goroutine runs nothing meanwhile.
	Parked func(bool)

	fd, wake int
	closing  sync.Mutex // guards wake between Wake and Close
	parking  parking
	counters Counters
	parked   uint64             // batches so far when it waited for long the last time
	lastID   [numNumbers]uint32 // of the newest packet received

	out            []uint32 // verdicts not sent yet, messages one behind the other
	verdict, batch verdictMsg

	// The receive side of recvmmsg points into itself, so it is made once and
	// never moves.
	recv *receiver

	layouts [numLayouts]layout
}

// DownNumber and UpNumber are the first of the numbers that the rules of a
// direction send packets to.
func (q *Queue) DownNumber() uint16 { return q.First }

// UpNumber is described at DownNumber.
func (q *Queue) UpNumber() uint16 { return q.First + perDirection }

// mmsghdr is struct mmsghdr; the length is padded by the compiler as in C.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

type receiver struct {
	msgs [Batch]mmsghdr
	iovs [Batch]unix.Iovec
	bufs [Batch]message
}

// Open binds free queue numbers in the network namespace of the calling thread.
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
	q := &Queue{fd: fd, wake: wake, recv: new(receiver), verdict: newVerdict(msgVerdict), batch: newVerdict(msgVerdictBatch)}
	if err := q.parking.open(wake); err != nil {
		unix.Close(fd)
		unix.Close(wake)
		return nil, err
	}
	q.out = make([]uint32, 0, Batch*maxVerdict/4)
	for i := range q.recv.msgs {
		q.recv.iovs[i].Base = (*byte)(unsafe.Pointer(&q.recv.bufs[i]))
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
	if err := q.bindNumbers(); err != nil {
		return err
	}
	for i := range uint16(numNumbers) {
		if err := q.configure(q.First+i, c.attrs(i)); err != nil {
			return fmt.Errorf("configure queue %d: %w", q.First+i, err)
		}
	}
	return nil
}

// bindNumbers takes the first block of numbers that is free.
func (q *Queue) bindNumbers() error {
	for i := range uint16(numBlocks) {
		q.First = firstQueue + i*numNumbers
		err := q.bindBlock()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EPERM) && i < numBlocks-1:
			// Somebody else's. EPERM is also what a process without the right
			// gets, for every number.
		default:
			return fmt.Errorf("bind queue: %w", err)
		}
	}
	return fmt.Errorf("bind queue: all numbers from %d on are in use", firstQueue)
}

// bindBlock takes all numbers of a block or none. The kernel finds the newest
// first, so those that get most packets come last.
func (q *Queue) bindBlock() error {
	command := func(number uint16, cmd byte) error {
		return q.configure(number, func(b *builder) { b.attr(cfgCmd, []byte{cmd, 0, 0, 0}) })
	}
	end := q.First + numNumbers
	for number := end; number > q.First; number-- {
		if err := command(number-1, cmdBind); err != nil {
			for ; number < end; number++ {
				err = errors.Join(err, command(number, cmdUnbind))
			}
			return err
		}
	}
	return nil
}

// Configure changes one direction's limit and copy range in place. An error of
// the kernel, which knows no reason to refuse, would be counted in
// Counters.Errors: packets arrive on the same socket, so that it can't be
// waited for.
func (q *Queue) Configure(up bool, c Config) error {
	first := uint16(0)
	if up {
		first = perDirection
	}
	for i := first; i < first+perDirection; i++ {
		if err := q.request(q.First+i, c.attrs(i), 0); err != nil {
			return fmt.Errorf("configure queue %d: %w", q.First+i, err)
		}
	}
	return nil
}

// attrs are those for the number at an offset. All that is not asked for, such
// as conntrack's view of the packet, is off.
func (c Config) attrs(offset uint16) func(*builder) {
	return func(b *builder) {
		flags, most := uint32(flagFailOpen), c.MaxLen
		switch place := offset % perDirection; {
		case place == wakeOffset:
			flags, most = flags|flagGSO, min(most, WakeLen)
		case place < Spread:
			flags |= flagGSO
		}
		b.attr(cfgParams, append(binary.BigEndian.AppendUint32(nil, min(c.Copy, LongCopy)), copyPacket))
		b.u32(cfgQueueMaxLen, most)
		b.u32(cfgFlags, flags)
		b.u32(cfgMask, flagFailOpen|flagGSO)
	}
}

// configure sends one configuration message and reads the acknowledgement. No
// packets may flow yet.
func (q *Queue) configure(number uint16, attrs func(*builder)) error {
	if err := q.request(number, attrs, unix.NLM_F_ACK); err != nil {
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

func (q *Queue) request(number uint16, attrs func(*builder), flags uint16) error {
	var b builder
	b.begin(msgConfig, unix.NLM_F_REQUEST|flags, unix.AF_UNSPEC, number)
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
		return 0, fmt.Errorf("receive from queue %d: %w", q.First, errno)
	}
	got := 0
	for i := range int(n) {
		b, size := &r.bufs[i], min(r.msgs[i].n, maxMessage)
		if b[wordLen] > size || b[wordLen] < nlHeader+nfHeader || typeOf(b[wordType]) != msgPacket ||
			!b.parse(b[wordLen], &q.layouts[b[wordLen]/4%numLayouts], &pkts[got]) {
			q.other(unsafe.Slice((*byte)(unsafe.Pointer(b)), size))
			continue
		}
		number := uint16(bigEndian(b[wordNumber])) - q.First
		if number >= numNumbers {
			q.counters.Errors++
			continue
		}
		pkts[got].Number = uint8(number)
		q.count(pkts[got].Ref)
		got++
	}
	if got > 0 {
		q.counters.Batches++
		if q.counters.Batches-q.parked == lingerAfter {
			// A call that the scheduler is told of wakes the runtime's monitor,
			// which sees to it that others run as well while the loop has no
			// time to park.
			_, _, _ = unix.Syscall(unix.SYS_GETPID, 0, 0, 0)
		}
	}
	return got, nil
}

// other is what arrives that is no packet.
func (q *Queue) other(b []byte) {
	if typ, _, body, _, ok := nextMessage(b); ok && typ == unix.NLMSG_ERROR && messageError(body) == nil {
		return // an acknowledgement that nobody asked for
	}
	q.counters.Errors++
}

// count notices ids that never arrived: the kernel gives an id before it finds
// that the socket is full.
func (q *Queue) count(ref Ref) {
	to := &q.counters.Down
	if ref.Up() {
		to = &q.counters.Up
	}
	to.Packets++
	last := &q.lastID[ref.Number]
	if gap := ref.ID - *last - 1; gap < 1<<31 { // ids of a queue begin with 1
		to.Overflows += uint64(gap)
	}
	*last = ref.ID
}

// Accept lets a packet go on as it is. The verdict waits until Flush, or until
// a batch is full.
func (q *Queue) Accept(p Ref) error {
	q.put(&q.verdict, p.Number, verdictAccept, p.ID)
	return q.flushFull()
}

// Change gives a packet a firewall mark and sends it through the chain once
// more, where the rules do what MarkCE and MarkWash in it say and take these
// bits away. It waits like Accept.
func (q *Queue) Change(p Ref, mark uint32) error {
	m := q.put(&q.verdict, p.Number, verdictRepeat, p.ID)
	m[wordLen] += atHeader + 4
	q.out = append(q.out, attrWord(attrMark), bigEndian(mark))
	return q.flushFull()
}

// Drop drops a packet; it waits like Accept.
func (q *Queue) Drop(p Ref) error {
	q.put(&q.verdict, p.Number, verdictDrop, p.ID)
	return q.flushFull()
}

// put appends a message, for which there is room. There is one a packet, so it
// is copied, and only what differs is put in. None has a sequence number: no
// answer is asked for.
func (q *Queue) put(like *verdictMsg, number uint8, verdict, id uint32) *verdictMsg {
	at := len(q.out)
	q.out = q.out[:at+len(like)]
	m := (*verdictMsg)(q.out[at:])
	// By hand: a MIPS would call a function that copies.
	m[wordLen], m[wordType], m[wordSeq], m[wordPort], m[wordVerdictHead] = like[wordLen], like[wordType], 0, 0, like[wordVerdictHead]
	m[wordNumber] = bigEndian(uint32(q.First) + uint32(number))
	m[wordVerdict], m[wordID] = bigEndian(verdict), bigEndian(id)
	return m
}

func (q *Queue) flushFull() error {
	if len(q.out)+maxVerdict/4 > cap(q.out) {
		return q.Flush()
	}
	return nil
}

// Flush sends the verdicts that wait, in their order.
func (q *Queue) Flush() error {
	if len(q.out) == 0 {
		return nil
	}
	b := q.out
	q.out = b[:0]
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(q.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(4*len(b)), 0, 0, 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("send verdicts to queue %d: %w", q.First, errno)
		}
	}
}

// Release accepts every packet that the kernel holds. Those that still wait to
// be received go last and in the order of arrival; who wants an order among the
// others has given their verdicts before.
func (q *Queue) Release() error {
	err := q.Flush()
	var pkts [Batch]Packet
	for err == nil {
		var n int
		n, err = q.Recv(pkts[:])
		if n == 0 {
			break
		}
		for i := range pkts[:n] {
			err = errors.Join(err, q.Accept(pkts[i].Ref))
		}
	}
	q.out = q.out[:0]
	for i, last := range q.lastID {
		if last == 0 {
			continue
		}
		q.put(&q.batch, uint8(i), verdictAccept, last)
		err = errors.Join(err, q.flushFull())
	}
	return errors.Join(err, q.Flush())
}

// rawWait is how long a Wait may be that the Go scheduler is not told of, which
// has to run nothing else meanwhile. Telling it costs more than such a wait,
// because on one CPU the runtime's monitor then takes the processor from a
// thread that sleeps for 20 µs already, and wakes 10 000 times a second to do
// so.
const rawWait = 2 * time.Millisecond

// lingerAfter is how many batches there must have been since the last long wait
// for the next to begin with a short one of its own: on an idle router each would
// keep the runtime's monitor awake.
const lingerAfter = 4

// Wait blocks until a packet can be received, Wake was called, or the time is
// over; a negative time never is. With packets false arriving packets don't
// end it.
func (q *Queue) Wait(d time.Duration, packets bool) error {
	fds := [2]unix.PollFd{
		{Fd: int32(q.wake), Events: unix.POLLIN},
		{Fd: int32(q.fd), Events: unix.POLLIN},
	}
	n := 1
	if packets {
		n = 2
	}
	wait := d
	if d < 0 { // where packets came, more may follow soon
		wait = 0
		if q.counters.Batches-q.parked >= lingerAfter {
			wait = rawWait
		}
	}
	ready, errno := poll(fds[:n], wait, wait > rawWait)
	if d < 0 && errno == 0 && ready == 0 {
		q.parked = q.counters.Batches
		_, errno = q.park(fds[:n])
	}
	if errno != 0 && errno != unix.EINTR {
		return fmt.Errorf("wait for queue %d: %w", q.First, errno)
	}
	if fds[0].Revents != 0 {
		var b [8]byte
		_, _, _ = unix.RawSyscall(unix.SYS_READ, uintptr(q.wake), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b))) // nothing to read is fine too
	}
	return nil
}

// park waits without end.
func (q *Queue) park(fds []unix.PollFd) (int, unix.Errno) {
	if len(fds) < 2 {
		return poll(fds, -1, true)
	}
	if q.Parked != nil {
		q.Parked(true)
		defer q.Parked(false)
	}
	if !q.parking.wait(q.fd) {
		return poll(fds, -1, true)
	}
	return poll(fds, 0, false)
}

// poll is ppoll; a negative time has no end. If not told, the Go scheduler keeps
// the thread's processor for it.
func poll(fds []unix.PollFd, d time.Duration, tell bool) (ready int, errno unix.Errno) {
	ts := unix.NsecToTimespec(int64(d))
	at := &ts
	if d < 0 {
		at = nil
	}
	var n uintptr
	if tell {
		n, _, errno = unix.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), uintptr(unsafe.Pointer(at)), 0, 0, 0)
	} else {
		n, _, errno = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), uintptr(unsafe.Pointer(at)), 0, 0, 0)
	}
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Wake ends a Wait of another goroutine, or the next one.
func (q *Queue) Wake() {
	q.closing.Lock()
	defer q.closing.Unlock()
	if q.wake < 0 {
		return
	}
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
	q.closing.Lock()
	defer q.closing.Unlock()
	err := errors.Join(os.NewSyscallError("close", unix.Close(q.fd)), os.NewSyscallError("close", unix.Close(q.wake)), q.parking.set.Close())
	q.fd, q.wake = -1, -1
	return err
}
