package userspace

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/engine"
)

// These are named after the numbers of cake.md §6, as those of the engine are.

// TestFault047 changes both directions while packets come and others ask for
// statistics, and wants every packet to get one verdict.
func TestFault047(t *testing.T) {
	forLoops(t, func(t *testing.T, f *fakes) {
		f.apply(t, func(*engine.Config) {})
		const packets = 2000
		verdicts := map[nfqueue.Ref]int{}
		collect := func() {
			synctest.Wait()
			for _, v := range append(f.up.Verdicts(), f.down.Verdicts()...) {
				verdicts[v.Ref]++
			}
		}
		var others sync.WaitGroup
		others.Go(func() {
			for i := range packets {
				f.up.Push(packet(100+i%1300, byte(i), uint16(i%50)))
				f.down.Push(packet(100+i%1300, byte(i), uint16(i%50)))
				time.Sleep(100 * time.Microsecond)
			}
		})
		others.Go(func() {
			l := dataplanetest.Link()
			for i := range 100 {
				l.Up.Rate, l.Down.Rate = engine.BitsPerSecond(1+i%7)*1_000_000, engine.BitsPerSecond(1+i%5)*3_000_000
				l.Up.Tins, l.Down.Tins = engine.TinMode(i%6), engine.TinMode((i+3)%6)
				if _, err := f.Apply(context.Background(), l); err != nil {
					t.Error(err)
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
		others.Go(func() {
			var st dataplane.Stats
			for range 100 {
				if !f.Stats(&st) {
					t.Error("no statistics")
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
		others.Wait()
		if err := f.Clear(context.Background()); err != nil {
			t.Error(err)
		}
		collect()
		if len(verdicts) != 2*packets || f.up.Held()+f.down.Held() != 0 {
			t.Errorf("%d of %d packets got verdicts, %d wait", len(verdicts), 2*packets, f.up.Held()+f.down.Held())
		}
		for ref, n := range verdicts {
			if n != 1 {
				t.Fatalf("%d verdicts for packet %+v", n, ref)
			}
		}
		f.Close()
	})
}

// TestFault099 wants a super-packet to be charged for each of its segments, with
// the overhead of each, and to be shown as long as it is.
func TestFault099(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		const overhead, segments = 44, 10
		f.apply(t, func(c *engine.Config) {
			c.Rate, c.SplitGSO, c.AckFilter, c.Raw, c.Overhead = 10_000_000, false, engine.AckFilterOff, false, overhead
		})
		super := packet(52+segments*1448, 0, 1)
		super.GSO = true
		super.Data[9], super.Data[32] = 6, 8<<4 // TCP with 12 bytes of options
		f.up.Push(super)
		next := f.up.Push(packet(1000, 0, 1))
		start := time.Now()
		for {
			time.Sleep(10 * time.Microsecond)
			synctest.Wait()
			left := false
			for _, v := range f.up.Verdicts() {
				left = left || v.ID == next
			}
			if left {
				break
			}
			if time.Since(start) > time.Second {
				t.Fatal("it never left")
			}
		}
		// overhead counts from layer 3 on.
		want := time.Duration(segments*(1500+overhead)) * 8 * time.Second / 10_000_000
		if took := time.Since(start); took < want || took > want+2*tick {
			t.Errorf("the next packet left after %v, want %v", took, want)
		}
		var st dataplane.Stats
		if !f.Stats(&st) {
			t.Fatal("no statistics")
		}
		longest := uint32(0)
		for _, tin := range st.Up.Tins {
			longest = max(longest, tin.MaxLen)
		}
		if longest != segments*1514 || st.Up.SentPackets != segments+1 {
			t.Errorf("the longest has %d bytes, %d packets were sent; want %d and %d", longest, st.Up.SentPackets, segments*1514, segments+1)
		}
		f.Close()
	})
}

// TestFault100 wants packets dropped at the configured memory, and not at some
// number of packets.
func TestFault100(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakes(t)
		const limit = 4 << 20
		f.apply(t, func(c *engine.Config) {
			c.Rate, c.MemoryLimit, c.AckFilter = 100_000, limit, engine.AckFilterOff
		})
		push := func(n int) (dropped int) {
			for i := range n {
				f.up.Push(packet(100, 0, uint16(i)))
			}
			synctest.Wait()
			for _, v := range f.up.Verdicts() {
				if !v.Accept {
					dropped++
				}
			}
			return dropped
		}
		if n := push(2000); n != 0 {
			t.Errorf("%d packets dropped of 2000, which hold %d of %d bytes", n, 2000*smallSize, limit)
		}
		if n := push(limit / smallSize); n == 0 {
			t.Errorf("no packet dropped although more than %d bytes wait", limit)
		}
		var st dataplane.Stats
		if !f.Stats(&st) || st.Up.MemoryUsed > limit+smallSize {
			t.Errorf("%d bytes used of %d", st.Up.MemoryUsed, limit)
		}
		f.Close()
	})
}
