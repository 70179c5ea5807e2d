package engine

// Compat is a set of faults of Linux 6.1's sch_cake to reproduce. The zero
// value does what was meant in each case; CompatKernel takes exactly the
// kernel's decisions, which is what a replay of recorded runs needs.
type Compat uint16

// The faults, one bit each.
const (
	// CompatHeap moves an entry of the overflow heap down by one level at
	// most (the kernel compares the next level with the value of the child
	// that moved up), so that the victim is not always the fattest queue.
	// Meant: a whole sift, the victim is the fattest queue.
	CompatHeap Compat = 1 << iota

	// CompatClear leaves the flows of a cleared tin in its rotations, where
	// they are found again when a later change brings the tin back, and
	// leaves the round robin of unlimited mode standing at the last cleared
	// tin. Meant: a cleared tin is as new, apart from its counters.
	CompatClear

	// CompatAutorate reconfigures at the end of every measuring window,
	// because the time of the last reconfiguration is never written, and lets
	// a window that lost more bytes to the ACK filter than came in wrap around
	// to a huge one. Meant: at most once in 250 ms, and no bytes.
	CompatAutorate

	// Compat32Bit cuts COBALT's interval to 32 bits of nanoseconds in the
	// control law, and the automatic memory limit to 32 bits of bytes before
	// it is clamped. Meant: 64 bits.
	Compat32Bit

	// CompatFirstSignal starts the reciprocal square root of a queue that has
	// never signalled at 0, so that its first mark or drop comes at the first
	// packet over target; lets the time of an earlier signal, or none, cut the
	// wait of a queue that is over target from its first packet on; and uses
	// the slightly low table that 6.1 computes at start. Meant: the first
	// signal comes one interval after the queue went over target, and the table
	// is rounded exactly.
	CompatFirstSignal

	// CompatDeficit carries the tins' round-robin deficits, which only
	// unlimited mode repays, through shaped operation and changes of the
	// rate; and flows counted against their hosts keep the counts of another
	// flow mode. Meant: both are right after every change.
	CompatDeficit
)

// CompatKernel is every fault of Linux 6.1.
const CompatKernel = CompatHeap | CompatClear | CompatAutorate | Compat32Bit | CompatFirstSignal | CompatDeficit
