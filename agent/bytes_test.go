package agent_test

import (
	"math"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// meter is a relay in front of a controller that counts what passes.
type meter struct {
	address  string
	up, down atomic.Int64 // bytes of TCP payload
	wg       sync.WaitGroup
	listener net.Listener
	mu       sync.Mutex // guards what follows
	conns    []net.Conn
}

func newMeter(t *testing.T, to string) *meter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &meter{address: l.Addr().String(), listener: l}
	m.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				return
			}
			m.mu.Lock()
			m.conns = append(m.conns, in, out)
			m.mu.Unlock()
			m.wg.Go(func() { relay(out, in, &m.up) })
			m.wg.Go(func() { relay(in, out, &m.down) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		m.mu.Lock()
		for _, c := range m.conns {
			c.Close()
		}
		m.mu.Unlock()
		m.wg.Wait()
	})
	return m
}

func relay(to, from net.Conn, n *atomic.Int64) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 64<<10)
	for {
		k, err := from.Read(b)
		n.Add(int64(k))
		if _, errWrite := to.Write(b[:k]); err != nil || errWrite != nil {
			return
		}
	}
}

func (m *meter) total() int64 { return m.up.Load() + m.down.Load() }

// busyPlane has the statistics of a home of four after a month.
type busyPlane struct{ *dataplanetest.Fake }

func (p busyPlane) Stats(st *dataplane.Stats) bool {
	if !p.Fake.Stats(st) {
		return false
	}
	packets := st.Down.SentPackets // one more for each report
	st.BypassedPackets, st.QueueOverflows, st.Batches, st.Packets = 1234, 56, 300e6, 900e6
	busy(&st.Down, 700e6+1000*packets, 1400)
	busy(&st.Up, 300e6+400*packets, 220)
	return true
}

func busy(s *engine.Stats, packets, size uint64) {
	s.SentPackets, s.SentBytes = packets, packets*size
	s.Drops, s.Overlimits = packets/500, packets*2
	s.MemoryUsed, s.MemoryLimit, s.Capacity = 1<<20, 4<<20, 115e6
	s.MinNetLen, s.MaxNetLen, s.MinAdjLen, s.MaxAdjLen, s.AvgNetOff = 28, 1500, 64, 1518, 14
	s.NumTins = 4
	shares := [4]uint64{20, 1000, 300, 50} // of 1370
	for i := range s.Tins[:s.NumTins] {
		t := &s.Tins[i]
		n := packets * shares[i] / 1370
		*t = engine.TinStats{
			Threshold: 115e6 >> i, Target: 5 * time.Millisecond, Interval: 100 * time.Millisecond,
			PeakDelay: 2345 * time.Microsecond, AvgDelay: 345 * time.Microsecond, BaseDelay: 12 * time.Microsecond,
			Packets: n, Bytes: n * size, WayDirect: n - n/300, WayInds: n / 2000, WayMiss: n / 400, WayCols: n / 100000,
			Drops: n / 500, DropBytes: n / 500 * size, Marks: n / 5000, MarkBytes: n / 5000 * size,
			SparseFlows: 3, DecayingFlows: 2, BulkFlows: 1, MaxLen: 1514, Quantum: 300, Index: uint8(i),
		}
		// From 10 us to 300 ms, most of it below 5 ms.
		for b := 12; b < 68; b++ {
			t.Sojourn[b] = uint64(float64(n) / 4 * math.Exp(-math.Pow(float64(b-25)/11, 2)))
		}
	}
}

// What a day of talk with the controller takes, both ways, with the headers of
// IPv4 and TCP with timestamps and an acknowledgement for each segment.
const (
	mega        = 1_000_000
	headers     = 52
	aimMinute   = 3 * mega  // with a report a minute
	aimTen      = 15 * mega // with one each 10 s
	keepalive   = 20 * time.Second
	pingPayload = 2 * (17 + 22) // a PING and its answer, each in a TLS record
)

func TestBytesPerDay(t *testing.T) {
	const interval, skipped, counted = 20 * time.Millisecond, 10, 60 // as often as one is whole
	c := sessiontest.Start(t, sessiontest.Config{Interval: interval, Differences: true})
	m := newMeter(t, c.Address)
	r := newRouter(t, m.address, c.AddToken("r-1"))
	r.startWith(func(cfg *agent.Config, fake *dataplanetest.Fake) {
		cfg.Dataplane, cfg.Interface = busyPlane{fake}, loopback{}
	})
	s := next(t, "session", c.Sessions)
	l := link(115e6, 12e6)
	s.Push(desired(1, 1, &l))
	answer(t, s, 1)
	last := next(t, "report", s.Reports)
	if last.GetSince() != 0 {
		t.Fatal("the first report is a difference")
	}
	for range skipped {
		d := next(t, "report", s.Reports)
		sum, err := wire.Sum(d, last)
		if err != nil {
			t.Fatal(err)
		}
		last = sum
	}
	// What passed unshaped and what overflowed is told.
	if g := last.GetAgent(); g.GetBypassedPackets() != 1234 || g.GetQueueOverflows() != 56 || g.GetBatchSizeMilli() != 3000 {
		t.Errorf("the agent tells of itself: %v", g)
	}
	if packets := last.GetSequence(); last.GetDown().GetSentPackets() != 700e6+1000*packets {
		t.Errorf("report %d comes to %d packets", packets, last.GetDown().GetSentPackets())
	}
	before, unread := m.total(), len(s.Reports)
	for range counted {
		next(t, "report", s.Reports)
	}
	// Those that came meanwhile and were not looked at have passed, too.
	report := (m.total() - before) / int64(counted+len(s.Reports)-unread)
	const day = int64(24 * time.Hour)
	pings := day / int64(keepalive) * (pingPayload + 3*headers)
	perDay := func(interval time.Duration) int64 { return day/int64(interval)*(report+2*headers) + pings }
	t.Logf("a report takes %d bytes; a day %.1f MB with one a minute (aim %.0f), %.1f MB with one each 10 s (aim %.0f), of it %.1f MB to keep the connection",
		report, float64(perDay(time.Minute))/mega, float64(aimMinute)/mega, float64(perDay(10*time.Second))/mega, float64(aimTen)/mega, float64(pings)/mega)
	if n := perDay(time.Minute); n > aimMinute {
		t.Errorf("%d bytes a day with a report a minute, want at most %d", n, aimMinute)
	}
	if n := perDay(10 * time.Second); n > aimTen {
		t.Errorf("%d bytes a day with a report each 10 s, want at most %d", n, aimTen)
	}
}

// TestBeginsWhereItEnded: to another controller the agent sends again what it
// sent last, from which that one counts on.
func TestBeginsWhereItEnded(t *testing.T) {
	first := sessiontest.Start(t, sessiontest.Config{Interval: 5 * time.Millisecond, Differences: true, Origin: "one"})
	r := newRouter(t, first.Address, first.AddToken("r1"))
	r.startWith(func(cfg *agent.Config, fake *dataplanetest.Fake) { cfg.Dataplane = busyPlane{fake} })
	s := next(t, "session", first.Sessions)
	l := link(115e6, 12e6)
	s.Push(desired(1, 1, &l))
	answer(t, s, 1)
	last := next(t, "report", s.Reports)
	for range 5 {
		sum, err := wire.Sum(next(t, "report", s.Reports), last)
		if err != nil {
			t.Fatal(err)
		}
		last = sum
	}
	first.Stop()
	next(t, "end of the session", s.Done())
	second := sessiontest.Start(t, sessiontest.Config{Authority: first.Authority, Address: first.Address, Interval: 5 * time.Millisecond, Differences: true, Origin: "two"})
	s = next(t, "session", second.Sessions)
	again := next(t, "report", s.Reports)
	if again.GetAgain() != "one" || again.GetSince() != 0 || again.GetSequence() < last.GetSequence() || again.GetDown() == nil {
		t.Errorf("the first report of the second stream is %d, again %q", again.GetSequence(), again.GetAgain())
	}
	sum, err := wire.Sum(next(t, "report", s.Reports), again)
	if err != nil {
		t.Fatal(err)
	}
	if sum.GetAgain() != "" || sum.GetSequence() != again.GetSequence()+1 || sum.GetDown().GetSentPackets() <= again.GetDown().GetSentPackets() {
		t.Errorf("then comes report %d with %d packets, after %d with %d", sum.GetSequence(), sum.GetDown().GetSentPackets(), again.GetSequence(), again.GetDown().GetSentPackets())
	}
}
