package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// fleet.md 82, the side of the agent: a clock that jumps by years changes nothing
// but a condition.
func TestFleet082_ClockStep(t *testing.T) {
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
		r := newReporter("boot", s.plane, nil, nil)
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

// A day of normal life writes nothing to flash: pushes that say what runs
// already, boosts, reports, a cable that is pulled and a PPPoE session that
// dials anew each hour, and a clock that is set.
func TestDayWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s, w := newCable(t, dir, there)
		defer s.stop()
		s.push(pushOf(1, 10e6))
		before := flash(t, dir)
		r := newReporter("boot", s.plane, w, nil)
		for hour := range 24 {
			again := pushOf(plan.Revision(2+hour), 10e6) // something else of the plan has changed
			s.push(again)
			boost := pushOf(plan.Revision(2+hour), 50e6)
			boost.ExpiresAfter, boost.Then = 20*time.Minute, at(10e6)
			s.push(boost)
			s.runner.clock.Compare(time.Now().Add(time.Duration(hour) * time.Minute))
			for range 360 {
				r.next()
				s.out.Take(1)
				time.Sleep(10 * time.Second)
			}
			s.expect("after the boost", 10e6, 10e6)
			w.become(gone)
			dialed := there
			dialed.Index += uint32(1 + hour)
			w.become(dialed)
			s.expect("dialed anew", 10e6, 10e6)
		}
		if diff := cmp.Diff(before, flash(t, dir)); diff != "" {
			t.Errorf("flash was written:\n%s", diff)
		}
		s.push(pushOf(99, 20e6))
		if cmp.Diff(before, flash(t, dir)) == "" {
			t.Error("a change was not written")
		}
	})
}

// flash returns what would be another after any write: each file's number and
// times, and those of the directory.
func flash(t *testing.T, dir string) map[string]string {
	t.Helper()
	names := []string{"."}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	found := map[string]string{}
	for _, name := range names {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		found[name] = fmt.Sprint(st.Ino, st.Size, st.Mtim, st.Ctim)
	}
	return found
}
