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
// offload must be off on a shaped interface.
//
// # Fail open
//
// The customer must never be offline because of us:
//   - the rule bypasses a queue that nobody listens to (agent killed);
//   - the queue passes packets that find it full (agent too slow);
//   - the rule holds only while an element of a set with a timeout is alive,
//     which Rules.Renew renews. An agent that is stopped or hangs stops
//     renewing, and after Lifetime new packets pass unshaped. Those that were
//     queued before wait until it goes on or dies;
//   - where the kernel can (5.12), the tables belong to our netlink socket and
//     vanish with it.
//
// # Marks
//
// A verdict can't change a packet of which only the head was copied, but it can
// set the firewall mark. A chain right behind the queue's sets ECN CE in
// packets with our bit in the mark and clears the bit. The other bits stay the
// user's.
//
// # Concurrency
//
// A Queue belongs to one goroutine, but Wake may be called from any. Rules is
// safe for concurrent use. Sockets belong to the network namespace of the
// thread that opens them.
package nfqueue
