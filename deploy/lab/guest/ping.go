package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pingEvery is the sparse flow's interval.
const pingEvery = 20 * time.Millisecond

// ping sends an echo request every pingEvery and takes the time to the answer.
// On SIGTERM it writes a line "sent-ns round-trip-ns" for each, by the
// monotonic clock; the round trip is -1 where no answer came.
func ping(address string) error {
	addr, err := netip.ParseAddr(address)
	if err != nil {
		return err
	}
	if err := realTime(1); err != nil {
		return err
	}
	debug.SetGCPercent(-1)
	family, proto, request, reply, skip := unix.AF_INET, unix.IPPROTO_ICMP, byte(8), byte(0), ip4Header
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: as4(addr)}
	if addr.Is6() {
		family, proto, request, reply, skip = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128, 129, 0
		to = &unix.SockaddrInet6{Addr: addr.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	var stopped atomic.Bool
	go func() { <-stop; stopped.Store(true) }()

	type trip struct{ sent, took int64 }
	trips := make([]trip, 0, 4096)
	packet := make([]byte, 64)
	in := make([]byte, 512)
	for at := monotonic(); !stopped.Load(); at += int64(pingEvery) {
		clear(packet)
		packet[0] = request
		binary.BigEndian.PutUint16(packet[4:], 0xcafe)
		binary.BigEndian.PutUint16(packet[6:], uint16(len(trips)))
		binary.BigEndian.PutUint16(packet[2:], ^sum(packet, 0)) // ICMPv6: the kernel does it
		trips = append(trips, trip{monotonic(), -1})
		if err := unix.Sendto(fd, packet, 0, to); err != nil {
			return fmt.Errorf("send echo request: %w", err)
		}
		for {
			left := at + int64(pingEvery) - monotonic()
			if left <= 0 {
				break
			}
			tv := unix.NsecToTimeval(max(left, 1000))
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
				return err
			}
			got, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&in[0])), uintptr(len(in)), 0, 0, 0)
			if errno != 0 {
				break
			}
			now, n := monotonic(), int(got)
			if n < skip+8 || in[skip] != reply || binary.BigEndian.Uint16(in[skip+4:]) != 0xcafe {
				continue
			}
			seq := int(binary.BigEndian.Uint16(in[skip+6:]))
			if seq < len(trips) && trips[seq].took < 0 {
				trips[seq].took = now - trips[seq].sent
			}
		}
		runtime.Gosched()
	}
	var out []byte
	for _, t := range trips {
		out = fmt.Appendf(out, "%d %d\n", t.sent, t.took)
	}
	_, err = os.Stdout.Write(out)
	return err
}

func as4(a netip.Addr) (b [4]byte) {
	if a.Is4() {
		b = a.As4()
	}
	return b
}
