// Package nfqueue reads packets from the kernel's NFQUEUE in batches, gives
// verdicts in batches, and has the nftables rules that send an interface's
// packets there and back.
//
// Only the first bytes of a packet are copied to user space; the packet itself
// waits in the kernel for its verdict. Upload is taken at postrouting just
// before source NAT and download at prerouting just after destination NAT, so
// that both directions show LAN addresses and no connection tracking lookup is
// needed. Traffic of the router itself is included. What a flow table
// (software or hardware flow offload) forwards never passes the hooks: flow
// offload must be off on a shaped interface, see package offload.
//
// # Fail open
//
// The customer must never be offline because of us:
//   - the rule bypasses a queue that nobody listens to (agent killed);
//   - the queue passes packets that find it full (agent too slow);
//   - the rule holds only while an element of a set with a timeout is alive,
//     which Rules.Renew renews. An agent that is stopped or hangs stops
//     renewing, and after Lifetime new packets pass unshaped, all but WakeLen a
//     direction. Those that were queued before wait until it goes on or dies;
//   - where the kernel can (5.12), the tables belong to our netlink socket and
//     vanish with it.
//
// An agent through which nothing goes may let the rules run out and sleep: the
// next packet goes to a number of its own (Ref.Wakes), which holds WakeLen
// packets and lets others pass, and wakes it.
//
// # Numbers
//
// One socket has many queue numbers, for both directions. The kernel keeps what
// a number holds in a list and walks along it for every verdict; a shaper gives
// verdicts in another order than that of arrival, so that with one number half
// of all that waits is walked past for each packet, each step a cache miss.
// Packets are dealt out to Spread numbers a direction, and there are as many
// for super-packets that the kernel is to segment: whether it does is a
// property of the number. The order of arrival is that of the socket.
//
// # Marks
//
// A verdict can't change a packet of which only the head was copied, but it can
// set the firewall mark and send the packet through the chain once more. There
// a packet with MarkCE or MarkWash gets ECN CE, loses its DSCP, or both, and
// the bits are cleared. So only packets that are to be changed pay for it. The
// other bits of the mark stay the user's.
//
// # Concurrency
//
// A Queue belongs to one goroutine, but Wake may be called from any. Rules is
// safe for concurrent use. Sockets belong to the network namespace of the
// thread that opens them.
package nfqueue
