package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

const (
	// Memory that Linux doesn't know, for the frames and rings of the source.
	framesPhys = 64 << 20
	framesSize = 4 << 20
	frameRoom  = 2048

	fullFrame = 1514
	ackFrame4 = ethHeader + ip4Header + tcpHeader
	ackFrame6 = ethHeader + ip6Header + tcpHeader

	// tick is how often the source sends what is due, as a line card would
	// deliver it: full frames come in bursts of ten at 115 Mbit/s.
	tick = time.Millisecond

	// behind is how late a frame may be before it is left out.
	behind = 20 * time.Millisecond

	// dryTime is how long the source sends what nobody takes, to learn what it
	// costs itself.
	dryTime = 400 * time.Millisecond

	countersPath = "/tmp/counters"
)

// The cards that the source drives, by PCI address.
const lanSource, wanSource = "0000:00:0d.0", "0000:00:0e.0"

// counters are shared between the lab's processes.
type counters struct {
	downPackets, downBytes, upPackets, upBytes atomic.Uint64

	dryNanoseconds, dryPackets atomic.Uint64 // what the source cost without a router

	turns           atomic.Uint32 // of the soak; it wraps
	busyTurns       atomic.Uint32 // of the background process
	turnPicoseconds atomic.Uint64
}

func mapCounters() (*counters, error) {
	f, err := os.OpenFile(countersPath, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map counters: %w", err)
	}
	return (*counters)(unsafe.Pointer(&b[0])), nil
}

func (c *counters) down() row.Count {
	return row.Count{Packets: c.downPackets.Load(), Bytes: c.downBytes.Load()}
}

func (c *counters) up() row.Count {
	return row.Count{Packets: c.upPackets.Load(), Bytes: c.upBytes.Load()}
}

// stream sends the frames of one kind in turn.
type stream struct {
	nic      *nic
	bufs     [][]byte // one a flow
	phys     []uint32
	size     int
	tcp      int    // offset of the TCP header
	number   int    // offset of the number that grows: sequence or acknowledgement
	grow     uint32 // by so much each frame
	interval int64  // ns
	next     int64
	flow     int
	run      int // consecutive frames of a flow
	left     int

	packets, bytes *atomic.Uint64
}

// source sends bulk TCP flows' packets both ways, each with the
// acknowledgements that would come back. Nobody answers: the load stays what
// it was set to, whatever is dropped.
func source() error {
	if err := realTime(2); err != nil {
		return err
	}
	b, err := os.ReadFile("/etc/order.json")
	if err != nil {
		return err
	}
	var o row.Order
	if err := json.Unmarshal(b, &o); err != nil {
		return err
	}
	count, err := mapCounters()
	if err != nil {
		return err
	}
	streams, err := makeStreams(o, count)
	if err != nil {
		return err
	}
	debug.SetGCPercent(-1)
	if err := dryRun(streams, count); err != nil {
		return err
	}
	start := monotonic()
	sendFor(streams, start, int64(1)<<62)
	return nil
}

// dryRun sends for a while to an address that the router does not have.
func dryRun(streams []stream, count *counters) error {
	flip := func() {
		for i := range streams {
			for _, b := range streams[i].bufs {
				b[5] ^= 0x40
			}
		}
	}
	flip()
	start, cost := monotonic(), threadTime()
	sendFor(streams, start, start+int64(dryTime))
	packets := count.down().Packets + count.up().Packets
	if packets == 0 {
		return errors.New("nothing was sent")
	}
	count.dryNanoseconds.Store(uint64(threadTime() - cost))
	count.dryPackets.Store(packets)
	flip()
	return nil
}

// sendFor sends what is due in every tick until a time.
func sendFor(streams []stream, start, end int64) {
	for i := range streams {
		// Not all at the same moment, and acknowledgements first: they make
		// the router's NAT entries.
		streams[i].next = start + int64(i)*int64(tick)/4
	}
	for at := start + int64(tick); at < end; at += int64(tick) {
		sleepUntil(at)
		now := monotonic()
		for i := range streams {
			streams[i].send(now)
		}
	}
}

func (s *stream) send(now int64) {
	if now-s.next > int64(behind) {
		s.next = now - int64(behind)
	}
	for s.next <= now {
		b := s.bufs[s.flow]
		s.nic.send(s.phys[s.flow], s.size)
		advance(b, s.number, s.tcp+16, s.grow)
		s.packets.Add(1)
		s.bytes.Add(uint64(s.size))
		if s.left--; s.left <= 0 {
			s.left = s.run
			if s.flow++; s.flow == len(s.bufs) {
				s.flow = 0
			}
		}
		s.next += s.interval
	}
}

func makeStreams(o row.Order, count *counters) ([]stream, error) {
	mem, err := openMemory(framesPhys, framesSize)
	if err != nil {
		return nil, err
	}
	lan, err := openNIC(lanSource, mem, framesPhys)
	if err != nil {
		return nil, err
	}
	wan, err := openNIC(wanSource, mem[ringSize*16:], framesPhys+ringSize*16)
	if err != nil {
		return nil, err
	}
	room := 4096
	make1 := func(flows, first int, down, ack bool) stream {
		s := stream{run: max(o.Run, 1), size: fullFrame, number: 4, grow: uint32(fullFrame - ackFrame4)}
		ip := ip4Header
		if o.V6 {
			ip, s.grow = ip6Header, uint32(fullFrame-ackFrame6)
		}
		if ack {
			s.size, s.number, s.grow, s.run = ethHeader+ip+tcpHeader, 8, 2*s.grow, 1
		}
		s.left = s.run
		for i := first; i < first+flows; i++ {
			f := frame{size: s.size, ect: !ack && i%2 == 1}
			host, remote := netip.AddrPortFrom(host4(i%numHosts), uint16(40000+i)), netip.AddrPortFrom(server(i, o.V6), 443)
			if o.V6 {
				host = netip.AddrPortFrom(host6(i%numHosts), uint16(40000+i))
			}
			if down {
				f.src, f.dst, f.from, f.to = gatewayMAC, wanMAC, remote, host
				if !o.V6 { // behind NAT, which keeps the port
					f.to = netip.AddrPortFrom(netip.MustParseAddr(wanRouter4), host.Port())
				}
			} else {
				f.src, f.dst, f.from, f.to = hostMAC(i%numHosts), lanMAC, host, remote
			}
			b := mem[room : room+frameRoom]
			s.tcp = f.build(b)
			s.bufs, s.phys = append(s.bufs, b), append(s.phys, framesPhys+uint32(room))
			room += frameRoom
		}
		s.number += s.tcp
		if down {
			s.nic, s.packets, s.bytes = wan, &count.downPackets, &count.downBytes
		} else {
			s.nic, s.packets, s.bytes = lan, &count.upPackets, &count.upBytes
		}
		return s
	}
	rate := func(s *stream, bits float64) float64 {
		s.interval = int64(float64(s.size) * 8 / bits * 1e9)
		return bits / 8 / float64(s.size)
	}
	upAcks, downAcks := make1(o.DownFlows, 0, false, true), make1(o.UpFlows, o.DownFlows, true, true)
	downData, upData := make1(o.DownFlows, 0, true, false), make1(o.UpFlows, o.DownFlows, false, false)

	// One acknowledgement for two full frames that get through.
	through := func(offer, limit uint64) float64 {
		if limit != 0 {
			offer = min(offer, limit)
		}
		return float64(offer) / 8 / fullFrame
	}
	upAckRate := through(o.DownOffer, o.DownRate) / 2
	upBits := float64(o.UpOffer) - upAckRate*8*float64(upAcks.size)
	downAckRate := through(uint64(max(upBits, 0)), o.UpRate) / 2
	downBits := float64(o.DownOffer) - downAckRate*8*float64(downAcks.size)

	var streams []stream
	add := func(s stream, bits float64) {
		if len(s.bufs) > 0 && bits > 0 {
			rate(&s, bits)
			streams = append(streams, s)
		}
	}
	add(upAcks, upAckRate*8*float64(upAcks.size))
	add(upData, upBits)
	add(downAcks, downAckRate*8*float64(downAcks.size))
	add(downData, downBits)
	return streams, nil
}

func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
