package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue/nfqueuetest"
	"github.com/cakefleet/cakefleet/engine"
)

const testMaxRate = engine.BitsPerSecond(1_000_000_000)

// fakes are a data plane without a kernel.
type fakes struct {
	*Dataplane
	down, up *nfqueuetest.Queue
	rules    *nfqueuetest.Rules
	closed   int
}

func newFakes(t testing.TB) *fakes {
	t.Helper()
	f := &fakes{down: nfqueuetest.NewQueue(), up: nfqueuetest.NewQueue(), rules: new(nfqueuetest.Rules)}
	f.Dataplane = newDataplane(Config{Interface: "wan", MaxRate: testMaxRate, Seed: 1}, parts{
		rules: f.rules, queues: [2]queue{f.down, f.up}, numbers: [2]uint16{7, 8},
		device: device{netOff: etherHeader, mtu: 1500},
		speed:  func() engine.BitsPerSecond { return 0 },
		close:  func() error { f.closed++; return nil },
	})
	t.Cleanup(func() { f.Close() })
	return f
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
	dataplanetest.Run(t, func(t *testing.T) dataplanetest.Subject {
		f := newFakes(t)
		return dataplanetest.Subject{Dataplane: f, MaxRate: testMaxRate, Shaping: f.shaping}
	})
}

// packet is a UDP packet of n bytes of layer 3, of which 128 are there.
func packet(n int, tos byte, port uint16) nfqueue.Packet {
	b := make([]byte, min(n, nfqueue.CopyRange))
	b[0], b[1], b[8], b[9] = 0x45, tos, 64, 17
	binary.BigEndian.PutUint16(b[2:], uint16(n))
	copy(b[12:], []byte{10, 0, 0, 1, 192, 0, 2, 1})
	binary.BigEndian.PutUint16(b[20:], port)
	return nfqueue.Packet{Len: uint32(n), Data: b}
}

// TestPace wants packets to leave at the rate, counted with their Ethernet
// header, however late they are looked at.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
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

// TestStall wants a loop that could not run for a while to make up for no more
// than maxLate.
func TestStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		f.apply(t, func(c *engine.Config) { c.Rate = 1_000_000 })
		for range 3000 {
			f.up.Push(packet(986, 0, 1)) // 1000 bytes: 8 ms
		}
		synctest.Wait()
		goOn := make(chan struct{})
		inject := func() { f.up.Panic = func() { f.up.Panic = nil; <-goOn } }
		if err := f.Dataplane.up.do(context.Background(), inject); err != nil {
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
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
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
				case !v.SetMark:
					plain++
				case v.Mark != userMark|nfqueue.MarkBit:
					t.Fatalf("mark is %#x, want %#x", v.Mark, userMark|nfqueue.MarkBit)
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

// TestOurBit wants our bit cleared where somebody else has set it.
func TestOurBit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		f.apply(t, func(*engine.Config) {})
		p := packet(100, 0, 1)
		p.Mark = nfqueue.MarkBit | 5
		id := f.up.Push(p)
		synctest.Wait()
		want := nfqueuetest.Verdict{ID: id, Accept: true, SetMark: true, Mark: 5}
		if v := f.up.Verdicts(); len(v) != 1 || v[0] != want {
			t.Errorf("verdicts %+v, want %+v", v, want)
		}
		f.Close()
	})
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
			synctest.Test(t, func(t *testing.T) {
				f := newFakes(t)
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
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
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
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		f.apply(t, func(c *engine.Config) { c.Rate = 100_000 })
		f.up.Push(packet(986, 0, 1))
		f.up.Push(packet(986, 0, 1))
		synctest.Wait()
		panics := 0
		inject := func() { f.up.Panic = func() { f.up.Panic = nil; panics++; panic("injected") } }
		for i := range maxPanics {
			if f.up.Closed() {
				t.Fatalf("the queue is given up after %d panics", i)
			}
			// Only the loop's goroutine touches the hook.
			if err := f.Dataplane.up.do(context.Background(), inject); err != nil {
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
			}
		}
		if panics != maxPanics || !f.up.Closed() {
			t.Errorf("%d panics, queue closed: %v; want %d and true", panics, f.up.Closed(), maxPanics)
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
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
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
		inject := func() { f.up.Panic = func() { f.up.Panic = nil; <-goOn } }
		if err := f.Dataplane.up.do(context.Background(), inject); err != nil {
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
		if err := f.Health(); err == nil || !strings.Contains(err.Error(), "up packet loop") {
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

// TestQuietKeeper wants fewer renewals while there are few packets, none while
// a loop stands still, and rules that never live longer than Lifetime without
// one: that bounds what a stopped agent holds.
func TestQuietKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
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
		if n, want := renewals(time.Minute), int(time.Minute/quietEvery); n < want-1 || n > want+1 {
			t.Errorf("renewed %d times in a quiet minute, want %d", n, want)
		}

		goOn := make(chan struct{})
		inject := func() { f.up.Panic = func() { f.up.Panic = nil; <-goOn } }
		if err := f.Dataplane.up.do(context.Background(), inject); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2*quietEvery + renewEvery)
		if n := renewals(time.Minute); n != 0 {
			t.Errorf("renewed %d times while a loop stands still", n)
		}
		close(goOn)
		if n := renewals(2 * quietEvery); n == 0 {
			t.Error("not renewed when the loop moves again")
		}
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
func (s *stream) Accept(uint32, bool, uint32) error { return nil }
func (s *stream) Drop(uint32) error                 { return nil }
func (s *stream) Flush() error                      { return nil }

// newStream makes a loop at a rate below or above what the stream offers: a
// batch of 8 packets at each call, and a clock that moves by step.
func newStream(tb testing.TB, rate engine.BitsPerSecond, step time.Duration) *loop {
	s := &stream{}
	for i := range 8 {
		p := packet(1486, byte(i%2)*2, uint16(i%4))
		p.ID = uint32(i)
		s.batch = append(s.batch, p)
	}
	now := engine.Time(1)
	l := newLoop("up", s, device{netOff: etherHeader, mtu: 1500}, 1, func() engine.Time {
		now = now.Add(step)
		return now
	}, hclog.NewNullLogger())
	c := dataplanetest.Link().Up
	c.Rate = rate
	if err := l.apply(c); err != nil {
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
