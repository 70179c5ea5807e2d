package engine

import (
	"math/rand/v2"
	"testing"
)

// TestRotation compares the rotation with the rule in words: a slot for each
// round to come, flows of a round in the order in which they were put down.
func TestRotation(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	flows := new([FlowsPerTin]flow)
	var rot rotation
	var rounds [][]uint32 // from the current one on
	put := func(q, n uint32) {
		for uint32(len(rounds)) <= n {
			rounds = append(rounds, nil)
		}
		rounds[n] = append(rounds[n], q)
	}
	in := 0
	for step := range 200_000 {
		if in < FlowsPerTin && r.IntN(3) == 0 {
			q, n := uint32(in), 1+r.Uint32N(maxGrants)
			rot.push(flows, q, n)
			put(q, n)
			in++
			continue
		}
		if in == 0 {
			continue
		}
		for len(rounds[0]) == 0 {
			rounds = rounds[1:]
		}
		want := rounds[0][0]
		got := rot.first()
		if got != want || rot.first() != got {
			t.Fatalf("step %d: flow %d is first, want %d", step, got, want)
		}
		if r.IntN(2) == 0 {
			n := 1 + r.Uint32N(maxGrants)
			rounds[0] = rounds[0][1:]
			rot.pop(flows)
			rot.push(flows, got, n)
			put(got, n)
		}
	}
}

// TestQuantumAverage: over many grants a flow gets its share, however many are
// granted at once.
func TestQuantumAverage(t *testing.T) {
	for _, rate := range []BitsPerSecond{1e6, 25e6, 115e6} {
		for _, load := range []uint16{1, 2, 7, 16, 150, 1024} {
			for _, stepwise := range []bool{false, true} {
				c := DefaultConfig()
				c.Tins, c.Rate, c.Flows = BestEffort, rate, DualSrcHost
				s := newTest(t, c, Options{Seed: 5, Stepwise: stepwise})
				b := &s.tins[0]
				for range 2 {
					s.Enqueue(0, flowPacket(1))
				}
				f := &b.flows[1]
				host := &b.hosts[f.srcHost]
				f.set, f.deficit = setBulk, 0
				b.sparse, b.bulk = 0, 1
				b.fresh = list{noFlow, noFlow}
				b.round.push(b.flows, 1, 1)
				host.srcBulk = load
				granted, rounds := int64(0), uint32(0)
				for range 3000 {
					f.deficit = -int32(s.rand() % 1514)
					was, cur := f.deficit, b.round.cur
					if q := s.pickFlow(b, 0, false); q != 1 || f.deficit <= 0 {
						t.Fatalf("flow %d with a deficit of %d was picked", q, f.deficit)
					}
					granted += int64(f.deficit - was)
					rounds += b.round.cur - cur
				}
				want := float64(b.flowQuantum*(65535/uint32(load))) / 65536 // as fine as the kernel divides
				if got := float64(granted) / float64(rounds); got < want*0.998 || got > want*1.002 {
					t.Errorf("%d bit/s, load %d, stepwise %v: %.3f bytes a round, want %.3f", rate, load, stepwise, got, want)
				}
			}
		}
	}
}

// TestDecaySleep: while a tin's decaying flows are left alone, none of them
// could have changed.
func TestDecaySleep(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	c := DefaultConfig()
	c.Tins, c.Rate, c.MemoryLimit = BestEffort, 20e6, 100_000
	s := newTest(t, c, Options{Seed: 3})
	b := &s.tins[0]
	now := Time(0)
	slept, decaying := 0, 0
	for range 300_000 {
		now += Time(r.ExpFloat64() * 7e5)
		if r.IntN(2000) == 0 {
			now += Time(r.Int64N(3e8))
		}
		n := 1
		if r.IntN(100) == 0 {
			n = r.IntN(200) // over target, and over the limit
		}
		hash := 1 + r.Uint32N(24)
		for range n {
			s.Enqueue(now, flowPacket(hash))
		}
		for s.NextSend() <= now {
			s.Dequeue(now)
		}
		if now < b.sleep.until {
			slept++
			for i := range b.flows {
				f := &b.flows[i]
				if f.set == setDecaying {
					decaying++
					due := f.dropNext
					if a := &s.signals[f.signals]; a.pDrop != 0 {
						due = min(due, a.blueTimer+Time(b.target)+1)
					}
					if due <= now {
						t.Fatalf("flow %d is due since %d ns, and all sleep for %d ns more", i, now-due, b.sleep.until-now)
					}
				}
			}
		}
	}
	if slept < 50_000 || decaying < 50_000 {
		t.Errorf("slept %d times, %d decaying flows: too few to tell", slept, decaying)
	}
}

// TestSearchFlow fills one set: eight hashes get a queue each, the ninth shares.
func TestSearchFlow(t *testing.T) {
	c := DefaultConfig()
	c.Tins = BestEffort
	s := newTest(t, c, Options{})
	seen := map[uint16]bool{}
	for i := range uint32(9) {
		e := s.Enqueue(0, flowPacket(3+i*FlowsPerTin))
		if e.Flow > 7 {
			t.Errorf("hash %d is in queue %d, outside of its set", i, e.Flow)
		}
		if i == 0 && e.Flow != 3 || i == 8 && e.Flow != 3 {
			t.Errorf("hash %d is in queue %d, want its own, 3", i, e.Flow)
		}
		if i < 8 && seen[e.Flow] {
			t.Errorf("hash %d shares queue %d", i, e.Flow)
		}
		seen[e.Flow] = true
	}
	b := &s.tins[0]
	if b.wayMiss != 8 || b.wayCols != 1 || b.wayInds != 0 {
		t.Errorf("miss %d, collisions %d, indirect %d; want 8, 1, 0", b.wayMiss, b.wayCols, b.wayInds)
	}
	s.Enqueue(0, flowPacket(3+1*FlowsPerTin))
	if b.wayInds != 1 {
		t.Errorf("indirect hits %d, want 1", b.wayInds)
	}
}
