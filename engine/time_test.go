package engine

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAnyStart: a Scheduler decides the same wherever the caller's clock
// stands, below zero and when it passes zero too.
func TestAnyStart(t *testing.T) {
	type decision struct {
		d       Delivery
		ok      bool
		drops   []Drop
		wait    Time
		backlog uint64
	}
	run := func(start Time, stepwise bool) (all []decision) {
		c := DefaultConfig()
		c.Tins, c.Rate, c.MemoryLimit, c.AckFilter = Diffserv4, 8e6, 150_000, AckFilterNormal
		s, err := New(start, c, Options{Seed: 3, Stepwise: stepwise})
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		for now, n := Time(0), 0; now < 3e9; now, n = now+Time(r.Int64N(2.5e6)), n+1 {
			p := flowPacket(1 + r.Uint32N(30))
			p.TOS = uint8(r.UintN(256))
			s.Enqueue(start+now, p)
			all = append(all, decision{drops: append([]Drop(nil), s.Drops()...)})
			if s.NextSend() <= start+now || r.IntN(8) == 0 {
				d, ok := s.Dequeue(start + now)
				e := decision{d: d, ok: ok, drops: append([]Drop(nil), s.Drops()...), backlog: s.Backlog(), wait: Never}
				if s.Len() > 0 {
					e.wait = s.NextSend() - start
				}
				all = append(all, e)
			}
			if n%64 != 0 {
				continue
			}
			if err := CheckInvariants(s); err != nil {
				t.Fatalf("start %d, after %d ns: %v", start, now, err)
			}
		}
		return all
	}
	for _, stepwise := range []bool{false, true} {
		want := run(0, stepwise)
		delivered, overflow := 0, 0
		for _, e := range want {
			if e.ok {
				delivered++
			}
			for _, d := range e.drops {
				if d.Reason == DropOverflow {
					overflow++
				}
			}
		}
		if delivered < 1000 || overflow < 100 {
			t.Fatalf("%d delivered, %d lost to the limit: too few to tell", delivered, overflow)
		}
		for _, start := range []Time{-1, -1e9, -1.5e9, -1e18, 1e9, 1e18} {
			if start > 0 && stepwise {
				continue // the kernel's clocks begin at 0
			}
			if diff := cmp.Diff(want, run(start, stepwise), cmp.AllowUnexported(decision{})); diff != "" {
				t.Errorf("stepwise %v, start %d:\n%.600s", stepwise, start, diff)
			}
		}
	}
}
