package nfqueue

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// wire is two namespaces with a link between them. The side of the rules is
// "near", with the link "wan".
type wire struct{ near, far *testnet.Namespace }

func newWire(t testing.TB) wire {
	t.Helper()
	testnet.Require(t)
	w := wire{testnet.Make(t, "near"), testnet.Make(t, "far")}
	err := errors.Join(
		testnet.Veth(w.near, "wan", w.far, "eth0"),
		w.near.Addr("wan", "192.0.2.1/24", "2001:db8::1/64"),
		w.far.Addr("eth0", "192.0.2.2/24", "2001:db8::2/64"),
	)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// open opens a queue and rules in near.
func (w wire) open(t testing.TB, c Config) (*Queue, *Rules) {
	t.Helper()
	var q *Queue
	var r *Rules
	err := w.near.Do(func() (err error) {
		if q, err = Open(c); err != nil {
			return err
		}
		r, err = OpenRules("wan")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.Close(), q.Close()); err != nil {
			t.Error(err)
		}
	})
	return q, r
}

// udp returns connected sockets from near to far; both directions work.
func (w wire) udp(t testing.TB, nearAddr, farAddr string) (near, far *net.UDPConn) {
	t.Helper()
	a := net.UDPAddrFromAddrPort(mustAddr(nearAddr))
	b := net.UDPAddrFromAddrPort(mustAddr(farAddr))
	err := errors.Join(
		w.near.Do(func() (err error) { near, err = net.DialUDP("udp", a, b); return err }),
		w.far.Do(func() (err error) { far, err = net.DialUDP("udp", b, a); return err }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	// Before rules are there, so that neighbours know each other: solicitations
	// would be queued too.
	for _, ends := range [][2]*net.UDPConn{{near, far}, {far, near}} {
		for tries := 0; ; tries++ { // a link that was just made may lose some
			send(t, ends[0], 1)
			if !none(t, ends[1]) {
				break
			}
			if tries == 20 {
				t.Fatal("nothing passes without rules")
			}
		}
	}
	return near, far
}

// long is for how long rules live in tests that are not about that, however slow
// the machine is.
const long = time.Minute

func install(t *testing.T, r *Rules, down, up Direction) {
	t.Helper()
	if err := errors.Join(r.Install(down, up), r.Renew(long)); err != nil {
		t.Fatal(err)
	}
}

func set(t *testing.T, r *Rules, down, up Direction) {
	t.Helper()
	if err := errors.Join(r.Set(down, up), r.Renew(long)); err != nil {
		t.Fatal(err)
	}
}

// recv waits for n packets of a flow of ours; others, such as neighbour
// discovery, are accepted at once.
func recv(t testing.TB, q *Queue, n int) []Packet {
	t.Helper()
	var got []Packet
	var pkts [Batch]Packet
	for end := time.Now().Add(time.Minute); len(got) < n; {
		if time.Now().After(end) {
			t.Fatalf("%d of %d packets arrived", len(got), n)
		}
		m, err := q.Recv(pkts[:])
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pkts[:m] {
			if strings.Contains(string(p.Data), "cakefleet") {
				p.Data = append([]byte(nil), p.Data...)
				got = append(got, p)
			} else if err := q.Accept(p.Ref); err != nil {
				t.Fatal(err)
			}
		}
		if err := q.Flush(); err != nil {
			t.Fatal(err)
		}
		if m == 0 {
			if err := q.Wait(100*time.Millisecond, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	return got
}

// arrives reads one packet that has to come, or tells that none comes.
func arrives(t testing.TB, c *net.UDPConn) bool {
	t.Helper()
	return arrivesWithin(t, c, time.Minute)
}

// none tells that no packet comes, which takes a while.
func none(t testing.TB, c *net.UDPConn) bool {
	t.Helper()
	return !arrivesWithin(t, c, 200*time.Millisecond)
}

func arrivesWithin(t testing.TB, c *net.UDPConn, wait time.Duration) bool {
	t.Helper()
	var b [2000]byte
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	_, err := c.Read(b[:])
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	return err == nil
}

var text = []byte("cakefleet" + strings.Repeat(".", 991)) // 1000 bytes

func send(t testing.TB, c *net.UDPConn, n int) {
	t.Helper()
	for range n {
		if _, err := c.Write(text); err != nil {
			t.Fatal(err)
		}
	}
}

func TestVerdicts(t *testing.T) {
	w := newWire(t)
	q, r := w.open(t, Config{MaxLen: 1000, Copy: LongCopy})
	defer func() { t.Logf("dealing: %d, owned tables: %v", r.deal, r.owner) }()
	for _, c := range []struct {
		name, near, far string
		headers         uint32
	}{
		{"IPv4", "192.0.2.1:4000", "192.0.2.2:4000", 28},
		{"IPv6", "[2001:db8::1]:4000", "[2001:db8::2]:4000", 48},
	} {
		near, far := w.udp(t, c.near, c.far)
		install(t, r, Direction{}, Direction{On: true, Number: q.First})
		send(t, near, 3)
		pkts := recv(t, q, 3)
		for _, p := range pkts {
			if p.Len != uint32(len(text))+c.headers || len(p.Data) != LongCopy {
				t.Errorf("%s: %d of %d bytes, want %d of %d", c.name, len(p.Data), p.Len, LongCopy, uint32(len(text))+c.headers)
			}
		}
		if !none(t, far) {
			t.Errorf("%s: a packet passes without a verdict", c.name)
		}
		// Out of order, one of them dropped.
		err := errors.Join(q.Accept(pkts[2].Ref), q.Drop(pkts[1].Ref), q.Accept(pkts[0].Ref), q.Flush())
		if err != nil {
			t.Fatal(err)
		}
		if !arrives(t, far) || !arrives(t, far) || !none(t, far) { //nolint:staticcheck // each call reads another packet
			t.Errorf("%s: want two of three packets", c.name)
		}
		// A second verdict on a packet is counted and hurts nobody.
		before := q.Counters().Errors
		if err := errors.Join(q.Accept(pkts[0].Ref), q.Flush()); err != nil {
			t.Fatal(err)
		}
		send(t, near, 1)
		last := recv(t, q, 1)
		if err := errors.Join(q.Accept(last[0].Ref), q.Flush()); err != nil {
			t.Fatal(err)
		}
		if !arrives(t, far) {
			t.Errorf("%s: nothing passes after a wrong verdict", c.name)
		}
		if n := q.Counters().Errors - before; n != 1 {
			t.Errorf("%s: %d errors counted, want 1", c.name, n)
		}
		// The far end's packets are not ours.
		send(t, far, 1)
		if !arrives(t, near) {
			t.Errorf("%s: download is held although only upload is queued", c.name)
		}
		if err := r.Remove(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBypass wants packets to pass when nobody listens, when the rules are not
// renewed, and when they are gone.
func TestBypass(t *testing.T) {
	w := newWire(t)
	q, r := w.open(t, Config{MaxLen: 1000, Copy: LongCopy})
	near, far := w.udp(t, "192.0.2.1:4000", "192.0.2.2:4000")
	install := func() {
		t.Helper()
		if err := r.Install(Direction{}, Direction{On: true, Number: q.First}); err != nil {
			t.Fatal(err)
		}
	}
	install()
	for range 3 { // renewed, it outlives its lifetime
		time.Sleep(Lifetime / 2)
		if err := r.Renew(Lifetime); err != nil {
			t.Fatal(err)
		}
	}
	send(t, near, 1)
	recv(t, q, 1)
	time.Sleep(Lifetime + 100*time.Millisecond)
	send(t, near, WakeLen+1)
	if !arrives(t, far) || !none(t, far) { // each call reads another packet
		t.Errorf("want one of %d packets to pass after the rules' lifetime", WakeLen+1)
	}
	for _, p := range recv(t, q, WakeLen) {
		if !p.Wakes() {
			t.Errorf("packet %+v is not one that wakes", p.Ref)
		}
	}
	// An element that has expired is renewed as well.
	if err := r.Renew(Lifetime); err != nil {
		t.Fatal(err)
	}
	send(t, near, 1)
	recv(t, q, 1)
	if !none(t, far) {
		t.Error("a packet passes after renewal")
	}
	if err := q.Release(); err != nil {
		t.Fatal(err)
	}
	for i := range WakeLen + 2 {
		if !arrives(t, far) {
			t.Fatalf("%d packets after release, want the %d that are held", i, WakeLen+2)
		}
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	send(t, near, 1)
	if !arrives(t, far) {
		t.Error("a packet is held although nobody listens")
	}
	if err := r.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := r.Renew(Lifetime); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("renewing rules that are gone: %v, want %v", err, os.ErrNotExist)
	}
	install()
}

// TestFull wants packets to pass that the queue has no room for, in the
// kernel's queue and in the socket.
func TestFull(t *testing.T) {
	w := newWire(t)
	// What the machines say by themselves takes room, more the slower they are.
	if err := errors.Join(w.near.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"), w.far.Sysctl("net/ipv6/conf/all/disable_ipv6", "1")); err != nil {
		t.Fatal(err)
	}
	q, r := w.open(t, Config{MaxLen: 10, Copy: LongCopy})
	// Download: what a queue holds counts against the buffer of a local sender.
	far, near := w.udp(t, "192.0.2.1:4000", "192.0.2.2:4000")
	install(t, r, Direction{On: true, Number: q.First}, Direction{})
	room := 10
	if r.deal == inTurn {
		room *= Spread
	}
	send(t, near, room+5)
	passed := 0
	for !none(t, far) {
		passed++
	}
	if passed < 5 || passed > 8 { // a few of the room may be the machines' own
		t.Errorf("%d packets pass a full queue, want 5", passed)
	}
	if err := q.Release(); err != nil {
		t.Fatal(err)
	}
	for !none(t, far) {
	}
	if n := q.Counters().Down.Overflows; n != 0 {
		t.Errorf("%d overflows of the socket, want 0", n)
	}

	// Now the socket is the narrow place.
	const many = 10_000
	if err := q.Configure(false, Config{MaxLen: 10 * many, Copy: LongCopy}); err != nil {
		t.Fatal(err)
	}
	before := q.Counters().Down.Packets
	send(t, near, many)
	if err := q.Release(); err != nil {
		t.Fatal(err)
	}
	// The gaps at the end show with the next packets.
	send(t, near, Spread)
	for _, p := range recv(t, q, Spread) {
		if err := q.Accept(p.Ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.Flush(); err != nil {
		t.Fatal(err)
	}
	c := q.Counters().Down
	// A few packets may be the machines' own.
	if sum := c.Overflows + c.Packets - before; c.Overflows == 0 || sum < many+Spread || sum > many+Spread+20 {
		t.Errorf("%d overflows and %d packets of %d", c.Overflows, c.Packets-before, many+Spread)
	}
}

// TestMark wants CE in the packet and the user's bits of the mark untouched.
func TestMark(t *testing.T) {
	for _, c := range []struct {
		name, near, far string
		ce              func(head []byte) bool
	}{
		{"IPv4", "192.0.2.1:4000", "192.0.2.2:4000", func(b []byte) bool { return b[1] == 0xb8|3 }},
		{"IPv6", "[2001:db8::1]:4000", "[2001:db8::2]:4000", func(b []byte) bool { return b[0]<<4|b[1]>>4 == 0xb8|3 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWire(t)
			q, r := w.open(t, Config{MaxLen: 100, Copy: LongCopy})
			fq, fr := far(t, w)
			near, _ := w.udp(t, c.near, c.far)
			install(t, r, Direction{}, Direction{On: true, Number: q.First})
			install(t, fr, Direction{On: true, Number: fq.First}, Direction{})
			setTOS(t, near, 0xb8|2) // EF, ECT(0)
			send(t, near, 1)
			p := recv(t, q, 1)[0]
			if err := errors.Join(q.Change(p.Ref, p.Mark|MarkCE|0x1200), q.Flush()); err != nil {
				t.Fatal(err)
			}
			got := recv(t, fq, 1)[0]
			if !c.ce(got.Data) {
				t.Errorf("header begins %x: no CE, or another DSCP", got.Data[:2])
			}
			if c.name == "IPv4" && checksum(got.Data[:20]) != 0xffff {
				t.Errorf("header checksum of %x is wrong", got.Data[:20])
			}
			send(t, near, 1)
			p = recv(t, q, 1)[0]
			if err := errors.Join(q.Accept(p.Ref), q.Flush()); err != nil {
				t.Fatal(err)
			}
			if got := recv(t, fq, 1)[0]; c.ce(got.Data) {
				t.Error("CE although nothing was to be changed")
			}
			if err := fq.Release(); err != nil {
				t.Fatal(err)
			}
			_, up, err := r.Counters()
			if got := q.Counters(); err != nil || up < 2 || up > got.Down.Packets {
				t.Errorf("%d packets counted, error %v; want at least 2, and each once: %d were received", up, err, got.Down.Packets)
			}
		})
	}
}

// TestWash wants the DSCP gone and the ECN bits kept, and queued packets to
// survive the change of rules.
func TestWash(t *testing.T) {
	for _, c := range []struct {
		name, near, far string
		washed          func(head []byte) bool
	}{
		{"IPv4", "192.0.2.1:4000", "192.0.2.2:4000", func(b []byte) bool { return b[1] == 2 && checksum(b[:20]) == 0xffff }},
		{"IPv6", "[2001:db8::1]:4000", "[2001:db8::2]:4000", func(b []byte) bool { return b[0] == 0x60 && b[1]>>4 == 2 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWire(t)
			q, r := w.open(t, Config{MaxLen: 100, Copy: LongCopy})
			fq, fr := far(t, w)
			near, _ := w.udp(t, c.near, c.far)
			on := Direction{On: true, Number: q.First}
			install(t, r, Direction{}, on)
			install(t, fr, Direction{On: true, Number: fq.First}, Direction{})
			setTOS(t, near, 0xb8|2)
			send(t, near, 2)
			pkts := recv(t, q, 2)
			if err := errors.Join(q.Accept(pkts[1].Ref), q.Flush()); err != nil {
				t.Fatal(err)
			}
			if got := recv(t, fq, 1)[0]; c.washed(got.Data) {
				t.Error("washed although nothing was to be changed")
			}
			on.Wash = true
			set(t, r, Direction{}, on)
			if _, up, err := r.Counters(); err != nil || up == 0 {
				t.Errorf("%d packets counted after a change of rules, error %v", up, err)
			}
			if err := errors.Join(q.Change(pkts[0].Ref, MarkWash), q.Flush()); err != nil {
				t.Fatal(err)
			}
			if got := recv(t, fq, 1)[0]; !c.washed(got.Data) {
				t.Errorf("header begins %x: not washed", got.Data[:2])
			}
			// What is not queued is washed as well.
			on.On = false
			set(t, r, Direction{}, on)
			send(t, near, 1)
			if got := recv(t, fq, 1)[0]; !c.washed(got.Data) {
				t.Errorf("header begins %x: not washed where nothing is queued", got.Data[:2])
			}
		})
	}
}

// TestRestore wants packets without a mark to take the bits that were asked for
// from their connection's mark, and no others, in both directions; and one with
// a mark to keep it.
func TestRestore(t *testing.T) {
	for _, c := range []struct{ name, near, far string }{
		{"IPv4", "192.0.2.1:4000", "192.0.2.2:4000"},
		{"IPv6", "[2001:db8::1]:4000", "[2001:db8::2]:4000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWire(t)
			q, r := w.open(t, Config{MaxLen: 100, Copy: ShortCopy})
			near, far := w.udp(t, c.near, c.far)
			if err := w.near.MarkConnections(0x12345678); err != nil {
				testnet.Skip(t, fmt.Sprintf("this kernel can't mark connections: %v", err))
			}
			both := func(restore uint32) {
				t.Helper()
				on := func(number uint16) Direction { return Direction{On: true, Number: number, Restore: restore} }
				install(t, r, on(q.DownNumber()), on(q.UpNumber()))
			}
			setMark(t, near, 0x40)
			for _, want := range []struct{ restore, up, down uint32 }{
				{0, 0x40, 0},
				{0xff00, 0x5640, 0x5600},
				{0xf0, 0x40, 0x70}, // it has a bit of its own already
			} {
				both(want.restore)
				send(t, near, 1)
				if p := recv(t, q, 1)[0]; p.Mark != want.up || !p.Up() {
					t.Errorf("restore %#x: upload, up %v, has mark %#x, want %#x", want.restore, p.Up(), p.Mark, want.up)
				}
				send(t, far, 1)
				if p := recv(t, q, 1)[0]; p.Mark != want.down || p.Up() {
					t.Errorf("restore %#x: download, up %v, has mark %#x, want %#x", want.restore, p.Up(), p.Mark, want.down)
				}
				if err := q.Release(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestSuperPackets wants those up to the limit whole and longer ones in
// segments, each with its own verdict.
func TestSuperPackets(t *testing.T) {
	w := newWire(t)
	q, r := w.open(t, Config{MaxLen: 1000, Copy: ShortCopy})
	near, far := w.udp(t, "192.0.2.1:4000", "192.0.2.2:4000")
	setSegment(t, near, 1000)
	for _, c := range []struct {
		whole uint32
		want  int // packets of 10 segments
	}{{20_000, 1}, {9_000, 10}, {0, 10}} {
		install(t, r, Direction{}, Direction{On: true, Number: q.UpNumber(), Whole: c.whole})
		if _, err := near.Write(bytes.Repeat(text, 10)); err != nil {
			t.Fatal(err)
		}
		pkts := recv(t, q, c.want)
		total := 0
		for _, p := range pkts {
			total += int(p.Len) - 28
			if p.GSO != (c.want == 1) {
				t.Errorf("up to %d bytes whole: a packet of %d bytes, super-packet %v", c.whole, p.Len, p.GSO)
			}
			if err := q.Accept(p.Ref); err != nil {
				t.Fatal(err)
			}
		}
		if err := q.Flush(); err != nil {
			t.Fatal(err)
		}
		if total != 10*len(text) {
			t.Errorf("up to %d bytes whole: %d bytes came, want %d", c.whole, total, 10*len(text))
		}
		for i := range 10 {
			if !arrives(t, far) {
				t.Fatalf("up to %d bytes whole: %d of 10 segments arrive", c.whole, i)
			}
		}
	}
}

// TestOwner wants a second agent on the same interface refused, and tables
// that outlived their agent replaced.
func TestOwner(t *testing.T) {
	w := newWire(t)
	q, r := w.open(t, Config{MaxLen: 100, Copy: LongCopy})
	on := Direction{On: true, Number: q.First}
	if err := r.Install(Direction{}, on); err != nil {
		t.Fatal(err)
	}
	_, other := w.open(t, Config{MaxLen: 100, Copy: LongCopy})
	err := other.Install(Direction{}, on)
	switch {
	case r.owner && err == nil:
		t.Error("two agents on one interface")
	case !r.owner && err != nil: // a kernel before 5.12 can't tell
		t.Error(err)
	}
	if err := r.Install(on, on); err != nil {
		t.Errorf("replacing our own tables: %v", err)
	}
}

func TestWrongNames(t *testing.T) {
	for _, name := range []string{"", "a-name-of-16-byt"} {
		if r, err := OpenRules(name); err == nil {
			r.Close()
			t.Errorf("interface %q is taken", name)
		}
	}
}

// far opens a queue and rules in the far namespace, to look at what arrives.
func far(t *testing.T, w wire) (*Queue, *Rules) {
	t.Helper()
	var q *Queue
	var r *Rules
	err := w.far.Do(func() (err error) {
		if q, err = Open(Config{MaxLen: 100, Copy: LongCopy}); err != nil {
			return err
		}
		r, err = OpenRules("eth0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.Close(), q.Close()); err != nil {
			t.Error(err)
		}
	})
	return q, r
}
