package probe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// device is the network interface of that name.
type device string

// lookUp prefers an IPv4 address: it is what a host without a word on the
// matter is measured by. An operator who wants the other names its address.
func (device) lookUp(ctx context.Context, host string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap(), nil
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range all {
		if a = a.Unmap(); a.Is4() {
			return a, nil
		}
	}
	if len(all) == 0 {
		return netip.Addr{}, errors.New("it has no address")
	}
	return all[0], nil
}

// What RFC 792 and RFC 4443 call these messages, and what Linux calls the
// options of raw sockets that let only some of them in.
const (
	echoRequest, echoReply   = 8, 0
	echoRequest6, echoReply6 = 128, 129

	solRaw                  = 255
	icmpFilter, icmp6Filter = 1, 1

	echoHeader = 8
	maxAnswer  = 512
)

// echo has a socket for each echo: nothing is left to follow an interface that
// goes and comes back with another index.
func (d device) echo(ctx context.Context, to netip.Addr, wait time.Duration) (time.Duration, bool, error) {
	file, raw, err := d.dial(to)
	if err != nil {
		return 0, false, err
	}
	defer file.Close() // nothing is lost with it
	cookie := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, rand.Uint64()), rand.Uint64())
	began := time.Now()
	if err := file.SetReadDeadline(began.Add(wait)); err != nil {
		return 0, false, err
	}
	stop := context.AfterFunc(ctx, func() { _ = file.SetReadDeadline(began) }) // an error: it is closed already
	defer stop()
	if _, err := file.Write(request(to, cookie)); err != nil {
		return 0, false, fmt.Errorf("send an echo to %s: %w", to, errno(err))
	}
	buf := make([]byte, maxAnswer)
	for {
		n, err := file.Read(buf)
		took := time.Since(began)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, false, ctx.Err()
		case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.ECONNREFUSED):
			return 0, false, nil // somebody on the way says so: it is lost
		case err != nil:
			return 0, false, fmt.Errorf("wait for the echo of %s: %w", to, errno(err))
		case answers(buf[:n], to, raw, cookie):
			return took, true, nil
		}
	}
}

// dial opens a socket that only sees answers of the host, and only by the
// interface. raw: an IPv4 header comes before them. A process without
// CAP_NET_RAW may have a socket of another kind, if its group is within
// net.ipv4.ping_group_range.
func (d device) dial(to netip.Addr) (file *os.File, raw bool, err error) {
	family, protocol := unix.AF_INET, unix.IPPROTO_ICMP
	if to.Is6() {
		family, protocol = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	const flags = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	fd, err := unix.Socket(family, unix.SOCK_RAW|flags, protocol)
	if raw = err == nil; !raw && errors.Is(err, unix.EPERM) {
		fd, err = unix.Socket(family, unix.SOCK_DGRAM|flags, protocol)
	}
	if err != nil {
		return nil, false, fmt.Errorf("open a socket for echoes: %w (it takes CAP_NET_RAW)", err)
	}
	file = os.NewFile(uintptr(fd), "icmp") // non-blocking, it takes no thread
	if err := d.prepare(fd, to, raw); err != nil {
		return nil, false, errors.Join(err, file.Close())
	}
	return file, raw && to.Is4(), nil
}

func (d device) prepare(fd int, to netip.Addr, raw bool) error {
	if err := unix.BindToDevice(fd, string(d)); err != nil {
		return fmt.Errorf("interface %s: %w", string(d), err)
	}
	var address unix.Sockaddr
	if to.Is6() {
		if raw {
			all := unix.ICMPv6Filter{}
			for i := range all.Data {
				all.Data[i] = ^uint32(0)
			}
			all.Data[echoReply6/32] &^= 1 << (echoReply6 % 32)
			if err := unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, icmp6Filter, &all); err != nil {
				return fmt.Errorf("choose ICMPv6 messages: %w", err)
			}
		}
		address = &unix.SockaddrInet6{Addr: to.As16()}
	} else {
		if raw {
			if err := unix.SetsockoptInt(fd, solRaw, icmpFilter, ^(1 << echoReply)); err != nil {
				return fmt.Errorf("choose ICMP messages: %w", err)
			}
		}
		address = &unix.SockaddrInet4{Addr: to.As4()}
	}
	if err := unix.Connect(fd, address); err != nil {
		return fmt.Errorf("reach %s by %s: %w", to, string(d), err)
	}
	return nil
}

// request returns an echo. The kernel fills in the checksum of ICMPv6, and the
// identifier where that says whose socket it is.
func request(to netip.Addr, cookie []byte) []byte {
	b := make([]byte, echoHeader, echoHeader+len(cookie))
	b[0] = echoRequest
	if to.Is6() {
		b[0] = echoRequest6
	}
	copy(b[4:], cookie[:2]) // identifier
	b = append(b, cookie...)
	if to.Is4() {
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
	return b
}

// checksum is RFC 1071's of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	return ^uint16(sum + sum>>16)
}

// answers tells whether a packet is the answer to the echo with the cookie.
func answers(b []byte, to netip.Addr, header bool, cookie []byte) bool {
	if header {
		if len(b) == 0 || len(b) < int(b[0]&15)*4 {
			return false
		}
		b = b[int(b[0]&15)*4:]
	}
	want := byte(echoReply)
	if to.Is6() {
		want = echoReply6
	}
	return len(b) >= echoHeader && b[0] == want && bytes.Equal(b[echoHeader:], cookie)
}

// errno returns what the kernel said of it.
func errno(err error) error {
	if e, ok := errors.AsType[unix.Errno](err); ok {
		return e
	}
	return err
}

// passed reads what the kernel counts for the interface.
func (d device) passed() (down, up uint64, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return 0, 0, err
	}
	return counted(string(text), string(d))
}

// counted finds an interface in /proc/net/dev: after its name eight columns of
// what was received, the bytes first, and the same of what was sent.
func counted(text, name string) (down, up uint64, err error) {
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(before) != name {
			continue
		}
		f := strings.Fields(after)
		if len(f) < 9 {
			break
		}
		down, err1 := strconv.ParseUint(f[0], 10, 64)
		up, err2 := strconv.ParseUint(f[8], 10, 64)
		return down, up, errors.Join(err1, err2)
	}
	return 0, 0, fmt.Errorf("interface %s: it is not there", name)
}
