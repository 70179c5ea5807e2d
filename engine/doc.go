// Package engine is CAKE: a shaper, a fair queue and an active queue manager
// for one direction of a link, as one pure data structure.
//
// # What
//
// A Scheduler is given packets (Enqueue) and asked for them (Dequeue); NextSend
// says when asking is worth while. It decides which packet leaves when, which
// are marked and which are dropped. It reads no clock, opens nothing, locks
// nothing and logs nothing: time is an argument, packets are a few words about
// packets, and the bytes stay with the caller.
//
// # Words
//
// A packet is put into a tin by its DSCP, mark or priority (diffserv.go), and
// there into a flow queue by its hash (hash.go). Dequeue picks the tin by the
// virtual clocks (shaper.go, tin.go) and in it a flow by DRR++ (flow.go): flows
// that have just begun come first, the others share in turn, and hosts share
// before flows do (host.go). The packet at the head is judged by COBALT
// (cobalt.go): delivered, marked or dropped. What it is charged for is what it
// takes on the wire (overhead.go). Over the memory limit the fattest flow loses
// a packet (overflow.go); redundant acknowledgements can be thinned out
// (ackfilter.go); the rate can follow what arrives (autorate.go).
//
// The model is sch_cake of Linux. With CompatKernel and Stepwise every decision
// is Linux 6.1's, bit for bit, which recordings in testdata/vectors prove. The
// default does what was meant where the kernel errs (compat.go names each
// case), and computes in one step what the kernel does in many (flow.go,
// cobalt.go).
//
// # Concurrency
//
// One goroutine at a time. Nothing is allocated per packet. The packet table
// grows, rarely, to as many packets as the memory limit lets in, and what COBALT
// remembers to as many flows as have been signalled to at a time; the overflow
// heap is made when the limit is first met.
//
// # What the caller owes
//
// Time must not run backwards. Where it does, packets seem to have waited for
// ages, so that COBALT signals and the delays reported are wrong, but nothing is
// lost. Every packet given to Enqueue comes back exactly once: from Dequeue, or in
// Drops of this or any later call, which therefore must be read after each one.
//
// # Testing
//
// enginetest has sources, workloads and a simulated link; enginetest/cakevec
// and the command enginetest/replay replay recordings.
package engine
