package agent

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// A clock that jumps by years changes nothing but a condition.
func TestClockStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		p := pushOf(2, 50e6)
		p.ExpiresAfter, p.Then = 2*time.Hour, at(10e6)
		s.push(p)
		applied := len(s.plane.History())
		for _, years := range []int{0, 10, -10, 0} {
			s.out.Take(1)
			s.runner.clock.Compare(time.Now().AddDate(years, 0, 0))
			time.Sleep(checkEvery)
			synctest.Wait()
			if c := s.condition("ClockOK"); c.Status != (years == 0) {
				t.Errorf("%d years: %+v", years, c)
			}
		}
		s.expect("boost", 50e6, 10e6)
		if n := len(s.plane.History()); n != applied {
			t.Errorf("applied %d times, want %d", n, applied)
		}
		time.Sleep(2 * time.Hour)
		s.expect("after the boost", 10e6, 10e6)
	})
}

// A day of reports and ten thousand changes leave the memory as it was.
func TestMemoryStaysFlat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, t.TempDir())
		defer s.stop()
		s.push(pushOf(1, 10e6))
		written := s.runner.store.Generation()
		r := newReporter("boot", s.plane)
		before := wire.FromReport(r.next())
		life := func(changes, reports int) {
			for i := range max(changes, reports) {
				if i < changes {
					p := pushOf(2, engine.BitsPerSecond(20e6+i%7*1e6))
					p.Desired.Revision = plan.Revision(2 + i)
					p.ExpiresAfter, p.Then = 48*time.Hour, at(10e6) // flash has what follows already
					s.push(p)
				}
				if i < reports {
					m := wire.FromReport(r.next())
					if _, err := proto.Marshal(wire.Difference(m, before)); err != nil {
						t.Fatal(err)
					}
					before = m
				}
				s.out.Take(1)
				time.Sleep(10 * time.Second)
			}
			s.plane.Forget()
		}
		life(1000, 1000)
		first := heap()
		life(10_000, 8640)
		const bound = 256 << 10
		last := heap()
		t.Logf("heap: %d kB after 1000 changes and reports, %d kB after 10000 more", first>>10, last>>10)
		if last > first+bound {
			t.Errorf("the heap grew from %d to %d bytes", first, last)
		}
		if g := s.runner.store.Generation(); g != written {
			t.Errorf("flash was written %d times", g-written)
		}
	})
}

// heap returns the bytes in use after a collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // what had finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
