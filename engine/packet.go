package engine

// Packet is what scheduling needs to know of one packet. The caller owns the
// bytes; the Scheduler copies what it keeps, so a Packet may be reused as soon
// as Enqueue has returned.
type Packet struct {
	Handle   uint32 // the caller's name of the packet (an NFQUEUE id); comes back in Delivery and Drop
	Len      uint32 // bytes of the frame, link-layer header included, at most 1 MiB (kernel: qdisc_pkt_len); for GSO the wire length of all segments
	Truesize uint32 // bytes of memory it holds while queued; counted against the memory limit
	NetOff   uint16 // offset of the network header in the frame: 14 on Ethernet, 0 where Len starts at layer 3
	Proto    uint16 // EtherType behind any VLAN tags, host order; 0 = unknown
	TOS      uint8  // DS field (DSCP << 2 | ECN) as it arrived
	HasTOS   bool   // the packet is IPv4 or IPv6 and long enough to have a DS field
	Writable bool   // its IP header is whole, so that wash and CE can change it

	// Hashes of the flow and of the two hosts (cake.md 1.6), filled in by
	// Scheduler.Dissect or injected by a replay.
	FlowHash, SrcHash, DstHash uint32

	Mark     uint32 // firewall mark, for Config.Fwmark
	Priority uint32 // skb priority, for the override by qdisc handle

	// A GSO or GRO super-packet has Segs > 1 segments of GSOSize payload bytes
	// (the last may be shorter) behind HeaderLen bytes of headers each.
	Segs      uint16
	GSOSize   uint16
	HeaderLen uint16

	// Header is the packet from its network header on, at least to the end of
	// the TCP options. Used by the ACK filter only, and only during Enqueue.
	Header []byte
}
