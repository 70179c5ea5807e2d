package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/offload"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue/nfqueuetest"
	"github.com/cakefleet/cakefleet/engine"
)

const (
	testMaxRate = engine.BitsPerSecond(1_000_000_000)
	testSpeed   = engine.BitsPerSecond(500_000_000) // of the interface
)

// fakes are a data plane without a kernel.
type fakes struct {
	*Dataplane
	loop     *loop              // of the upload
	q        *nfqueuetest.Queue // of the upload
	qs       []*nfqueuetest.Queue
	down, up side
	rules    *nfqueuetest.Rules
	offload  *offloads
	closed   int
}

// offloads are an offload.Watch without a kernel.
type offloads struct {
	mu     sync.Mutex
	tables []offload.Table
	looks  int
}

func (o *offloads) Look(bool, bool) ([]offload.Table, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.looks++
	return slices.Clone(o.tables), nil
}

func (o *offloads) Close() error { return nil }

func (o *offloads) set(tables ...offload.Table) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tables = tables
}

// side is one direction of the queue.
type side struct {
	*nfqueuetest.Queue
	isUp bool
}

func (s side) Push(p nfqueue.Packet) uint32    { return s.Queue.Push(s.isUp, p).ID }
func (s side) Verdicts() []nfqueuetest.Verdict { return s.Queue.Verdicts(s.isUp) }
func (s side) Held() int                       { return s.Queue.Held(s.isUp) }

func newFakes(t testing.TB) *fakes {
	t.Helper()
	return newFakesOf(t, 1)
}

// newFakesOf has so many packet loops, each direction its own if there are two.
func newFakesOf(t testing.TB, loops int) *fakes {
	t.Helper()
	return newFakesWith(t, loops, loops)
}

// newFakesWith has loops for Config.Loops to choose among.
func newFakesWith(t testing.TB, there, chosen int) *fakes {
	t.Helper()
	f := &fakes{rules: new(nfqueuetest.Rules), offload: new(offloads)}
	p := parts{
		rules: f.rules, offload: f.offload,
		device: device{netOff: etherHeader, mtu: 1500},
		speed:  func() engine.BitsPerSecond { return testSpeed },
		close:  func() error { f.closed++; return nil },
	}
	for i := range uint16(there) {
		f.qs = append(f.qs, nfqueuetest.NewQueue())
		p.queues, p.numbers = append(p.queues, f.qs[i]), append(p.numbers, [2]uint16{7 + 10*i, 8 + 10*i})
	}
	f.q = f.qs[there-1]
	f.down, f.up = side{f.qs[0], false}, side{f.q, true}
	f.Dataplane = newDataplane(Config{Interface: "wan", MaxRate: testMaxRate, Seed: 1, Loops: chosen}, p)
	f.loop = f.loops[there-1]
	t.Cleanup(func() { f.Close() })
	return f
}

// forLoops runs a test with one packet loop for both directions, and with one
// for each.
func forLoops(t *testing.T, test func(t *testing.T, f *fakes)) {
	t.Helper()
	for n := 1; n <= MaxLoops; n++ {
		t.Run(fmt.Sprintf("loops=%d", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(t, newFakesOf(t, n)) })
		})
	}
}

func (f *fakes) shaping() bool {
	down, up, there := f.rules.State()
	return there && (down.On || up.On)
}

func (f *fakes) apply(t testing.TB, change func(c *engine.Config)) {
	t.Helper()
	l := dataplanetest.Link()
	change(&l.Down)
	change(&l.Up)
	if _, err := f.Apply(context.Background(), l); err != nil {
		t.Fatal(err)
	}
}

func TestContract(t *testing.T) {
	for n := 1; n <= MaxLoops; n++ {
		t.Run(fmt.Sprintf("loops=%d", n), func(t *testing.T) {
			dataplanetest.Run(t, func(t *testing.T) dataplanetest.Subject {
				f := newFakesOf(t, n)
				return dataplanetest.Subject{Dataplane: f, MaxRate: testMaxRate, Speed: testSpeed, Shaping: f.shaping}
			})
		})
	}
}

// packet is a UDP packet of n bytes of layer 3, of which 128 are there.
func packet(n int, tos byte, port uint16) nfqueue.Packet {
	b := make([]byte, min(n, nfqueue.LongCopy))
	b[0], b[1], b[8], b[9] = 0x45, tos, 64, 17
	binary.BigEndian.PutUint16(b[2:], uint16(n))
	copy(b[12:], []byte{10, 0, 0, 1, 192, 0, 2, 1})
	binary.BigEndian.PutUint16(b[20:], port)
	return nfqueue.Packet{Len: uint32(n), Data: b}
}

// TestPace wants packets to leave at the rate, counted with their Ethernet
// header, however late they are looked at.
func TestPace(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(c *engine.Config) { c.Rate = 1_000_000 })
		const n = 20
		for range n {
			f.up.Push(packet(986, 0, 1)) // 1000 bytes: 8 ms
		}
		start := time.Now()
		sent := 0
		for sent < n {
			time.Sleep(time.Millisecond)
			synctest.Wait()
			sent += len(f.up.Verdicts())
			if took := time.Since(start); sent > 1+int(took/(8*time.Millisecond)) {
				t.Fatalf("%d packets left within %v, one of 8 ms each may", sent, took)
			}
		}
		if took := time.Since(start); took > (n+1)*8*time.Millisecond {
			t.Errorf("%d packets took %v, want %v", n, took, n*8*time.Millisecond)
		}
		f.Close()
	})
}

// TestFault010 queues super-packets of one flow, each as long as the kernel
// leaves them whole, and wants a small packet of another flow to wait for no
// more than one of them: a millisecond.
func TestFault010(t *testing.T) {
	for _, rate := range []engine.BitsPerSecond{20_000_000, 115_000_000, 400_000_000} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakes(t)
			f.apply(t, func(c *engine.Config) { c.Rate, c.SplitGSO, c.AckFilter = rate, true, engine.AckFilterOff })
			_, upload, _ := f.rules.State()
			if at := time.Duration(upload.Whole) * 8 * time.Second / time.Duration(rate); at > time.Millisecond {
				t.Fatalf("%s: %d bytes stay whole, which take %v", rate, upload.Whole, at)
			}
			long := max(upload.Whole, 1500)
			for range 20 {
				p := packet(int(long), 0, 1)
				p.GSO = long > 1500
				f.up.Push(p)
			}
			synctest.Wait()
			f.up.Verdicts()
			time.Sleep(time.Millisecond) // of twenty
			small := f.up.Push(packet(60, 0, 2))
			start := time.Now()
			for {
				time.Sleep(100 * time.Microsecond)
				synctest.Wait()
				waited := time.Since(start)
				if slices.ContainsFunc(f.up.Verdicts(), func(v nfqueuetest.Verdict) bool { return v.ID == small }) {
					// One super-packet, its own time, and what the loop sleeps.
					if most := time.Millisecond + 2*tick; waited > most {
						t.Errorf("%s: it waited %v, want at most %v", rate, waited, most)
					}
					break
				}
				if waited > time.Second {
					t.Fatalf("%s: it never left", rate)
				}
			}
			f.Close()
		})
	}
}

// TestStall wants a loop that could not run for a while to make up for no more
// than maxLate.
func TestStall(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(c *engine.Config) { c.Rate = 1_000_000 })
		for range 3000 {
			f.up.Push(packet(986, 0, 1)) // 1000 bytes: 8 ms
		}
		synctest.Wait()
		goOn := make(chan struct{})
		inject := func() { f.q.Panic = func() { f.q.Panic = nil; <-goOn } }
		if err := f.loop.do(context.Background(), inject); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		f.up.Verdicts()
		close(goOn)
		time.Sleep(time.Second)
		synctest.Wait()
		n := 0
		for _, v := range f.up.Verdicts() {
			if v.Accept {
				n++
			}
		}
		if want := int((time.Second + maxLate) / (8 * time.Millisecond)); n < want-1 || n > want+2 {
			t.Errorf("%d packets left within a second after a stall, want about %d", n, want)
		}
		f.Close()
	})
}

// TestMarks wants CE as our bit beside the user's mark, and only on packets
// that can have it.
func TestMarks(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(c *engine.Config) { c.Rate = 1_000_000 })
		const userMark = 0x00ab0000
		var marked, plain, dropped int
		capable := map[uint32]bool{}
		for i := range 2000 {
			p := packet(986, 2*byte(i%2), uint16(i%2)) // ECT(0) in one flow, Not-ECT in the other
			p.Mark = userMark
			capable[f.down.Push(p)] = i%2 == 1
			time.Sleep(4 * time.Millisecond) // twice the rate
			synctest.Wait()
			for _, v := range f.down.Verdicts() {
				switch {
				case !v.Accept:
					dropped++
				case !v.Change:
					plain++
				case v.Mark != userMark|nfqueue.MarkCE:
					t.Fatalf("mark is %#x, want %#x", v.Mark, userMark|nfqueue.MarkCE)
				case !capable[v.ID]:
					t.Fatalf("packet %d is marked CE but not capable of it", v.ID)
				default:
					marked++
				}
			}
		}
		if marked == 0 || plain == 0 || dropped == 0 {
			t.Errorf("%d marked, %d plain, %d dropped; want some of each", marked, plain, dropped)
		}
		f.Close()
	})
}

// TestWash wants only what has a DSCP sent through the rules once more, with
// the user's mark and the order to wash, and CE in the same way.
func TestWash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		f.apply(t, func(c *engine.Config) { c.Wash = true })
		for _, c := range []struct {
			tos  byte
			want nfqueuetest.Verdict
		}{
			{0, nfqueuetest.Verdict{Accept: true}},
			{2, nfqueuetest.Verdict{Accept: true}},
			{0xb8, nfqueuetest.Verdict{Accept: true, Change: true, Mark: 5 | nfqueue.MarkWash}},
		} {
			p := packet(100, c.tos, 1)
			p.Mark = 5
			c.want.Ref = f.q.Push(true, p)
			time.Sleep(time.Second)
			synctest.Wait()
			if v := f.up.Verdicts(); len(v) != 1 || v[0] != c.want {
				t.Errorf("DS field %#x: verdicts %+v, want %+v", c.tos, v, c.want)
			}
		}
		f.Close()
	})
}

// TestFwmark wants the mark's bits told to the rules, which restore them from
// the connection, and bits that are the data plane's own refused.
func TestFwmark(t *testing.T) {
	f := newFakes(t)
	f.apply(t, func(c *engine.Config) { c.Fwmark = 0xff00 })
	if down, up, _ := f.rules.State(); down.Restore != 0xff00 || up.Restore != 0xff00 {
		t.Errorf("the rules restore %#x and %#x, want 0xff00", down.Restore, up.Restore)
	}
	l := dataplanetest.Link()
	l.Up.Fwmark = 1 << 30
	var rejected *dataplane.RejectedError
	if _, err := f.Apply(context.Background(), l); !errors.As(err, &rejected) || rejected.Field != "up.fwmark" {
		t.Errorf("a mask with the data plane's own bits: %v", err)
	}
}

// TestClearReleases wants everything that waits to go on in the order of
// arrival, and what comes later to pass at once.
func TestClearReleases(t *testing.T) {
	for _, how := range []struct {
		name string
		end  func(*fakes) error
	}{
		{"Clear", func(f *fakes) error { return f.Clear(context.Background()) }},
		{"Close", func(f *fakes) error { return f.Close() }},
	} {
		t.Run(how.name, func(t *testing.T) {
			forLoops(t, func(t *testing.T, f *fakes) {
				f.apply(t, func(c *engine.Config) { c.Rate = 100_000 })
				const n = 100
				for i := range n {
					f.down.Push(packet(986, 0, uint16(i%3)))
				}
				synctest.Wait()
				f.down.Verdicts()
				if f.down.Held() < n-2 {
					t.Fatalf("%d packets wait, want nearly %d", f.down.Held(), n)
				}
				if err := how.end(f); err != nil {
					t.Fatal(err)
				}
				last := uint32(0)
				for _, v := range f.down.Verdicts() {
					if !v.Accept || v.ID <= last {
						t.Fatalf("verdict %+v after packet %d", v, last)
					}
					last = v.ID
				}
				if f.down.Held() != 0 || last != n {
					t.Errorf("%d packets wait, the last released is %d; want 0 and %d", f.down.Held(), last, n)
				}
				if how.name == "Clear" {
					f.down.Push(packet(986, 0, 1))
					f.down.Push(packet(986, 0, 1))
					synctest.Wait()
					if got := len(f.down.Verdicts()); got != 2 {
						t.Errorf("%d of 2 packets pass after Clear", got)
					}
				}
				f.Close()
			})
		})
	}
}

// TestChangeKeepsPackets changes rate and tins with a full queue, and wants
// every packet to come out and the rules untouched.
func TestChangeKeepsPackets(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(c *engine.Config) { c.Rate = 1_000_000 })
		const n = 50
		for i := range n {
			f.up.Push(packet(986, byte(i)<<2&0xfc, uint16(i)))
		}
		synctest.Wait()
		f.apply(t, func(c *engine.Config) { c.Rate = 2_000_000 })
		f.apply(t, func(c *engine.Config) { c.Rate, c.Tins = 10_000_000, engine.BestEffort })
		time.Sleep(time.Second)
		synctest.Wait()
		accepted := 0
		for _, v := range f.up.Verdicts() {
			if v.Accept {
				accepted++
			}
		}
		if accepted != n {
			t.Errorf("%d of %d packets came out", accepted, n)
		}
		if installs, _ := f.rules.Calls(); installs != 1 {
			t.Errorf("rules were installed %d times, want once", installs)
		}
		f.Close()
	})
}

// TestPanic wants the customer online: what waits is let go, the loop goes on,
// and gives the queue up only after maxPanics.
func TestPanic(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(c *engine.Config) { c.Rate = 100_000 })
		f.up.Push(packet(986, 0, 1))
		f.up.Push(packet(986, 0, 1))
		synctest.Wait()
		panics := 0
		inject := func() { f.q.Panic = func() { f.q.Panic = nil; panics++; panic("injected") } }
		if err := f.Health(); err != nil {
			t.Errorf("before any panic: %v", err)
		}
		for i := range maxPanics {
			if f.q.Closed() {
				t.Fatalf("the queue is given up after %d panics", i)
			}
			// Only the loop's goroutine touches the hook.
			if err := f.loop.do(context.Background(), inject); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if f.up.Held() != 0 {
				t.Errorf("%d packets wait after panic %d", f.up.Held(), i+1)
			}
			if i < maxPanics-1 {
				f.up.Push(packet(986, 0, 1))
				f.up.Push(packet(986, 0, 1))
				synctest.Wait()
				if f.up.Held() == 0 {
					t.Error("nothing is shaped after a panic")
				}
				if err := f.Health(); err == nil || !strings.Contains(err.Error(), "started afresh") {
					t.Errorf("after panic %d it is told: %v", i+1, err)
				}
				time.Sleep(afreshTold + time.Second)
				if err := f.Health(); err != nil {
					t.Errorf("long after panic %d: %v", i+1, err)
				}
			}
		}
		if panics != maxPanics || !f.q.Closed() {
			t.Errorf("%d panics, queue closed: %v; want %d and true", panics, f.q.Closed(), maxPanics)
		}
		var st dataplane.Stats
		if f.Stats(&st) {
			t.Error("statistics of a loop that has ended")
		}
		if _, err := f.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrEnded) {
			t.Errorf("Apply gives %v, want %v", err, dataplane.ErrEnded)
		}
		if err := f.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

// TestKeeper wants the rules renewed while the loops move, not while one
// hangs, and made again when somebody removes them.
func TestKeeper(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		renewed := func() int {
			_, before := f.rules.Calls()
			time.Sleep(nfqueue.Lifetime)
			synctest.Wait()
			_, after := f.rules.Calls()
			return after - before
		}
		if n := renewed(); n != 0 {
			t.Errorf("renewed %d times before the first Apply", n)
		}
		f.apply(t, func(*engine.Config) {})
		if n := renewed(); n < 3 {
			t.Errorf("renewed %d times within a lifetime, want at least 3", n)
		}

		goOn := make(chan struct{})
		inject := func() { f.q.Panic = func() { f.q.Panic = nil; <-goOn } }
		if err := f.loop.do(context.Background(), inject); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * renewEvery)
		if n := renewed(); n != 0 {
			t.Errorf("renewed %d times while a loop hangs", n)
		}
		var st dataplane.Stats
		if f.Stats(&st) {
			t.Error("statistics while a loop hangs")
		}
		if err := f.Health(); err == nil || !strings.Contains(err.Error(), "stands still") {
			t.Errorf("health while a loop hangs: %v", err)
		}
		close(goOn)
		time.Sleep(2 * renewEvery)
		if n := renewed(); n < 3 {
			t.Errorf("renewed %d times after the loop moves again, want at least 3", n)
		}
		if err := f.Health(); err != nil {
			t.Errorf("health after the loop moves again: %v", err)
		}

		f.rules.Vanish()
		time.Sleep(2 * renewEvery)
		if !f.shaping() {
			t.Error("rules that somebody removed are not made again")
		}
		f.Close()
	})
}

// TestQuietKeeper wants no renewal while there are no packets, one at once when
// a packet meets rules that have run out, the usual ones while packets come,
// and rules that never live longer than Lifetime without one: that bounds what
// a stopped agent holds. A loop that hangs meanwhile is noticed by who asks.
func TestQuietKeeper(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(*engine.Config) {})
		renewals := func(d time.Duration) int {
			_, before := f.rules.Calls()
			time.Sleep(d)
			synctest.Wait()
			_, after := f.rules.Calls()
			if f.rules.Life() != nfqueue.Lifetime {
				t.Errorf("the rules live for %v, want %v", f.rules.Life(), nfqueue.Lifetime)
			}
			return after - before
		}
		time.Sleep((quietTicks + 2) * renewEvery)
		if n := renewals(time.Minute); n != 0 {
			t.Errorf("renewed %d times in a quiet minute", n)
		}
		f.q.Woken = true
		for range 3 {
			f.up.Push(packet(986, 0, 1))
			if n := renewals(time.Millisecond); n != 1 {
				t.Errorf("renewed %d times when a packet came, want once", n)
			}
			if n := renewals(time.Minute); n != 0 {
				t.Errorf("renewed %d times in the minute after a packet", n)
			}
		}
		_, once := f.rules.Calls() // an answer that is faster than the keeper
		f.up.Push(packet(986, 0, 1))
		f.up.Push(packet(986, 0, 1))
		time.Sleep(time.Minute)
		if _, n := f.rules.Calls(); n-once > 2 {
			t.Errorf("renewed %d times in the minute after two packets at once", n-once)
		}
		f.up.Push(packet(986, 0, 1))
		f.q.Woken = false
		_, before := f.rules.Calls()
		for range 2 * quietTicks {
			for range quietMoves + 1 {
				f.up.Push(packet(986, 0, 1))
				synctest.Wait()
			}
			time.Sleep(renewEvery)
		}
		if _, after := f.rules.Calls(); after-before < 2*quietTicks-2 {
			t.Errorf("renewed %d times while packets come, want %d", after-before, 2*quietTicks)
		}
		time.Sleep((quietTicks + 2) * renewEvery)

		goOn := make(chan struct{})
		inject := func() { f.q.Panic = func() { f.q.Panic = nil; <-goOn } }
		if err := f.loop.do(context.Background(), inject); err != nil {
			t.Fatal(err)
		}
		for i, want := range []bool{false, true} {
			if err := f.Health(); (err != nil) != want {
				t.Errorf("health at look %d at a loop that hangs: %v", i, err)
			}
			time.Sleep(5 * time.Second)
		}
		if n := renewals(time.Minute); n != 0 {
			t.Errorf("renewed %d times while the loop stands still", n)
		}
		close(goOn)
		synctest.Wait()
		if err := f.Health(); err != nil {
			t.Errorf("health after the loop moves again: %v", err)
		}
		f.Close()
	})
}

// TestStatsOfSleeper wants a loop that sleeps looked at and not woken, unless
// there is something that it has not received.
func TestStatsOfSleeper(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(*engine.Config) {})
		stats := func(came, packets, bypassed uint64, wakes int64) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			f.rules.Count(came)
			before := f.q.Wakes()
			var st dataplane.Stats
			if !f.Stats(&st) || st.Packets != packets || st.Up.SentPackets != packets || st.BypassedPackets != bypassed {
				t.Errorf("%d packets of the queue, %d sent, %d bypassed; want %d, %d and %d", st.Packets, st.Up.SentPackets, st.BypassedPackets, packets, packets, bypassed)
			}
			if n := f.q.Wakes() - before; n != wakes {
				t.Errorf("the loop is woken %d times, want %d", n, wakes)
			}
		}
		stats(0, 0, 0, 0)
		f.up.Push(packet(986, 0, 1))
		stats(1, 1, 0, 0)
		stats(3, 1, 2, 1) // two that are not there: it is asked
		stats(3, 1, 2, 0)
		f.up.Push(packet(986, 0, 1))
		stats(4, 2, 2, 0)
		f.Close()
	})
}

// TestFlowOffload wants a flow table that takes packets past the shaper told,
// when a link is applied and when it comes later.
func TestFlowOffload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		table := offload.Table{Table: "fw4", Name: "ft", Devices: []string{"lan", "wan"}, Rules: 1}
		f.offload.set(table)
		f.apply(t, func(*engine.Config) {})
		if why := f.Bypass(); !strings.Contains(why, "flow table ft of table fw4") || strings.Contains(why, "hardware") {
			t.Errorf("with a flow table on the interface: %q", why)
		}
		after := func(want string) {
			t.Helper()
			for range int(2*offloadEvery/renewEvery) + 2 { // with packets, so that the keeper is awake
				for range quietMoves + 1 {
					f.up.Push(packet(986, 0, 1))
					synctest.Wait()
				}
				time.Sleep(renewEvery)
			}
			if why := f.Bypass(); want == "" && why != "" || !strings.Contains(why, want) {
				t.Errorf("%q, want %q", why, want)
			}
		}
		f.offload.set()
		after("")
		table.Hardware = true
		f.offload.set(table)
		after("hardware flow offload")
		f.Close()
	})
}

// TestApart changes to a fast link and back while packets wait, and wants upload
// to have the second loop from then on until nothing runs, no packet lost, and
// those in the first loop not to be waited for.
func TestApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakesWith(t, MaxLoops, 0)
		first, second := side{f.qs[0], true}, side{f.qs[1], true}
		apply := func(rate engine.BitsPerSecond) {
			t.Helper()
			f.apply(t, func(c *engine.Config) { c.Rate, c.AckFilter = rate, engine.AckFilterOff })
			synctest.Wait()
		}
		numbers := func(down, up uint16) {
			t.Helper()
			if d, u, _ := f.rules.State(); d.Number != down || u.Number != up {
				t.Errorf("the rules send packets to %d and %d, want %d and %d", d.Number, u.Number, down, up)
			}
		}
		var st dataplane.Stats
		sent := func(packets, up uint64) {
			t.Helper()
			f.rules.Count(packets)
			if !f.Stats(&st) || st.Packets != packets || st.Up.SentPackets != up || st.BypassedPackets != 0 {
				t.Errorf("%d packets came, %d were sent, %d passed by; want %d, %d and 0", st.Packets, st.Up.SentPackets, st.BypassedPackets, packets, up)
			}
		}
		apply(1_000_000)
		numbers(7, 8)
		const n = 20
		for i := range n {
			first.Push(packet(986, 0, uint16(i%3)))
		}
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if first.Held() < n/4 {
			t.Fatalf("%d of %d packets wait", first.Held(), n)
		}
		apply(apartFrom / 2)
		numbers(7, 18)
		if got := len(first.Verdicts()); got != n || first.Held() != 0 {
			t.Errorf("%d of %d packets of the first loop have gone, %d wait", got, n, first.Held())
		}
		sent(n, 0)
		first.Push(packet(986, 0, 1)) // it was on its way when the rules changed
		synctest.Wait()
		if first.Held() != 0 {
			t.Error("the first loop shapes upload although the second does")
		}
		apply(1_000_000)
		numbers(7, 18)
		for i := range n {
			second.Push(packet(986, 0, uint16(i%3)))
		}
		synctest.Wait()
		if second.Held() < n-2 {
			t.Errorf("%d of %d packets wait in the second loop", second.Held(), n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		sent(2*n+1, n)
		if err := f.Clear(context.Background()); err != nil {
			t.Fatal(err)
		}
		apply(1_000_000)
		numbers(7, 8)
		f.Close()
	})
}

// TestInstallFails wants an error and no half set-up.
func TestInstallFails(t *testing.T) {
	f := newFakes(t)
	f.rules.Fail(nfqueue.ErrUnsupported)
	_, err := f.Apply(context.Background(), dataplanetest.Link())
	if !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("error %v, want %v", err, dataplane.ErrUnsupported)
	}
	var st dataplane.Stats
	if f.Stats(&st) {
		t.Error("statistics although nothing runs")
	}
	f.rules.Fail(nil)
	f.apply(t, func(*engine.Config) {})
	if err := f.Close(); err != nil || f.closed != 1 {
		t.Errorf("closed %d times, error %v", f.closed, err)
	}
}

// stream is a queue that always has the same packets, for measuring the loop.
type stream struct {
	nfqueuetest.Queue
	batch []nfqueue.Packet
}

func (s *stream) Recv(pkts []nfqueue.Packet) (int, error) {
	n := copy(pkts, s.batch)
	for i := range s.batch {
		s.batch[i].ID += uint32(n)
	}
	return n, nil
}
func (s *stream) Accept(nfqueue.Ref) error         { return nil }
func (s *stream) Change(nfqueue.Ref, uint32) error { return nil }
func (s *stream) Drop(nfqueue.Ref) error           { return nil }
func (s *stream) Flush() error                     { return nil }

// newStream makes a loop at a rate below or above what the stream offers: a
// batch of 8 packets at each call, and a clock that moves by step.
func newStream(tb testing.TB, rate engine.BitsPerSecond, step time.Duration) *loop {
	s := &stream{}
	for i := range 8 {
		p := packet(1486, byte(i%2)*2, uint16(i%4))
		p.ID, p.Number = uint32(i), 2*nfqueue.Spread+1 // up
		s.batch = append(s.batch, p)
	}
	now := engine.Time(1)
	l := newLoop(s, device{netOff: etherHeader, mtu: 1500}, 1, func() engine.Time {
		now = now.Add(step)
		return now
	}, hclog.NewNullLogger())
	c := dataplanetest.Link().Up
	c.Rate = rate
	if err := l.apply(up, c); err != nil {
		tb.Fatal(err)
	}
	return l
}

func TestAllocations(t *testing.T) {
	for _, rate := range []engine.BitsPerSecond{115_000_000, 10_000_000_000} {
		l := newStream(t, rate, 500*time.Microsecond)
		for range 20_000 { // tables have grown to their size
			if _, err := l.serve(); err != nil {
				t.Fatal(err)
			}
		}
		if n := testing.AllocsPerRun(2000, func() { _, _ = l.serve() }); n != 0 {
			t.Errorf("at %s %v allocations in a batch, want 0", rate, n)
		}
	}
}

func BenchmarkLoop(b *testing.B) {
	l := newStream(b, 115_000_000, 850*time.Microsecond)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := l.serve(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/8, "ns/packet")
}
