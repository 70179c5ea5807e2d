package engine

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestRateTable are the fixed points, quanta, targets, intervals and memory
// limits of sch_cake at an MTU of 1514 bytes.
func TestRateTable(t *testing.T) {
	for _, c := range []struct {
		rate             BitsPerSecond
		ns               uint64
		shift, quantum   uint32
		mtuTime          uint64
		target, interval uint64 // µs
		limit            uint64
	}{
		{0, 0, 0, 1514, 0, 5000, 100000, 15503360},
		{512, 16000000000, 10, 300, 23656250000, 35484375, 70968750, 4194304},
		{64_000, 16384000000, 17, 300, 189250000, 283875, 567750, 4194304},
		{250_000, 16777216000, 19, 300, 48448000, 72672, 167672, 4194304},
		{625_000, 13421772800, 20, 300, 19379200, 29068, 124068, 4194304},
		{1_000_000, 16777216000, 21, 300, 12112000, 18168, 113168, 4194304},
		{2_500_000, 13421772800, 22, 300, 4844800, 7267, 102267, 4194304},
		{3_000_000, 11184810666, 22, 300, 4037333, 6055, 101055, 4194304},
		{3_633_600, 9234487010, 22, 300, 3333333, 5000, 100000, 4194304},
		{6_250_000, 10737418240, 23, 300, 1937920, 5000, 100000, 4194304},
		{10_000_000, 13421772800, 24, 305, 1211200, 5000, 100000, 4194304},
		{12_000_000, 11184810666, 24, 366, 1009333, 5000, 100000, 4194304},
		{25_000_000, 10737418240, 25, 762, 484480, 5000, 100000, 4194304},
		{50_000_000, 10737418240, 26, 1514, 242240, 5000, 100000, 4194304},
		{100_000_000, 10737418240, 27, 1514, 121120, 5000, 100000, 5000000},
		{115_000_000, 9336885426, 27, 1514, 105321, 5000, 100000, 5750000},
		{300_000_000, 14316557653, 29, 1514, 40373, 5000, 100000, 15000000},
		{1_000_000_000, 8589934592, 30, 1514, 12112, 5000, 100000, 15503360},
		{10_000_000_000, 13743895347, 34, 1514, 1211, 5000, 100000, 15503360},
	} {
		cfg := DefaultConfig()
		cfg.Tins, cfg.Rate = BestEffort, c.rate
		s, err := New(0, cfg, Options{})
		if err != nil {
			t.Fatal(err)
		}
		b := &s.tins[0]
		for _, v := range []struct {
			what      string
			got, want uint64
		}{
			{"ns", s.rate.ns, c.ns},
			{"shift", uint64(s.rate.shift), uint64(c.shift)},
			{"quantum", uint64(b.flowQuantum), uint64(c.quantum)},
			{"MTU time", b.mtuTime, c.mtuTime},
			{"target", b.target / 1000, c.target},
			{"interval", b.interval / 1000, c.interval},
			{"memory limit", s.memLimit, c.limit},
		} {
			if v.got != v.want {
				t.Errorf("%d bit/s: %s %d, want %d", c.rate, v.what, v.got, v.want)
			}
		}
	}
}

// TestTinTable are the thresholds and flow quanta of each mode.
func TestTinTable(t *testing.T) {
	type row struct {
		rate    BitsPerSecond
		quantum uint32
		order   uint8 // internal index of the tin
	}
	for _, c := range []struct {
		mode TinMode
		rate BitsPerSecond
		tins []row
	}{
		{BestEffort, 100_000_000, []row{{100_000_000, 1514, 0}}},
		{Diffserv3, 115_000_000, []row{{7187496, 300, 1}, {115_000_000, 1514, 0}, {28_750_000, 877, 2}}},
		{Diffserv4, 12_000_000, []row{{750_000, 300, 1}, {12_000_000, 366, 0}, {6_000_000, 300, 2}, {3_000_000, 300, 3}}},
		{Diffserv8, 100_000_000, []row{
			{100000000, 1514, 0},
			{87500000, 1514, 1},
			{76562496, 1514, 2},
			{66992184, 1514, 3},
			{58618160, 1514, 4},
			{51290888, 1514, 5},
			{44879520, 1369, 6},
			{39269576, 1198, 7},
		}},
		{Precedence, 100_000_000, []row{
			{100000000, 1514, 0},
			{87500000, 1514, 1},
			{76562496, 1514, 2},
			{66992184, 1514, 3},
			{58618160, 1514, 4},
			{51290888, 1514, 5},
			{44879520, 1369, 6},
			{39269576, 1198, 7},
		}},
		{Cake3, 12_000_000, []row{{12_000_000, 366, 0}, {11_250_000, 343, 1}, {9_000_000, 300, 2}, {3_000_000, 300, 3}}},
		{Cake3, 115_000_000, []row{{115_000_000, 1514, 0}, {107_812_504, 1514, 1}, {86_250_000, 1514, 2}, {28_750_000, 877, 3}}},
	} {
		cfg := DefaultConfig()
		cfg.Tins, cfg.Rate = c.mode, c.rate
		s, err := New(0, cfg, Options{})
		if err != nil {
			t.Fatal(err)
		}
		var st Stats
		s.Stats(0, &st)
		if st.NumTins != len(c.tins) {
			t.Errorf("mode %d: %d tins, want %d", c.mode, st.NumTins, len(c.tins))
			continue
		}
		for i, want := range c.tins {
			got := row{st.Tins[i].Threshold, st.Tins[i].Quantum, st.Tins[i].Index}
			if got != want {
				t.Errorf("mode %d at %d bit/s, column %d: %+v, want %+v", c.mode, c.rate, i, got, want)
			}
		}
	}
}

// TestTinQuanta are the weights of the round robin in unlimited mode.
func TestTinQuanta(t *testing.T) {
	for mode, want := range map[TinMode][]int32{
		BestEffort: {65535},
		Diffserv3:  {1024, 64, 256},
		Diffserv4:  {1024, 64, 512, 256},
		Diffserv8:  {256, 224, 196, 171, 149, 130, 113, 98},
		Precedence: {256, 224, 196, 171, 149, 130, 113, 98},
		Cake3:      {64, 256, 1024, 4096},
	} {
		cfg := DefaultConfig()
		cfg.Tins = mode
		s, err := New(0, cfg, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for i, q := range want {
			if got := s.tins[i].quantum; got != q {
				t.Errorf("mode %d, tin %d: quantum %d, want %d", mode, i, got, q)
			}
		}
	}
}

// TestOverheadTable are lengths on the wire for layer 3 lengths of 28, 40, 52,
// 576, 1492 and 1500 bytes.
func TestOverheadTable(t *testing.T) {
	lengths := [6]uint32{28, 40, 52, 576, 1492, 1500}
	for _, c := range []struct {
		overhead int16
		mpu      uint16
		framing  Framing
		want     [6]uint32
	}{
		{18, 64, NoATM, [6]uint32{64, 64, 70, 594, 1510, 1518}},
		{38, 84, NoATM, [6]uint32{84, 84, 90, 614, 1530, 1538}},
		{44, 84, NoATM, [6]uint32{84, 84, 96, 620, 1536, 1544}},
		{-64, 0, NoATM, [6]uint32{0, 0, 0, 512, 1428, 1436}},
		{48, 0, ATM, [6]uint32{106, 106, 159, 689, 1749, 1749}},
		{10, 0, ATM, [6]uint32{53, 106, 106, 689, 1696, 1696}},
		{40, 0, ATM, [6]uint32{106, 106, 106, 689, 1696, 1749}},
		{30, 0, PTM, [6]uint32{59, 72, 84, 616, 1546, 1554}},
		{22, 0, PTM, [6]uint32{51, 63, 76, 608, 1538, 1546}},
	} {
		cfg := DefaultConfig()
		cfg.Raw, cfg.Overhead, cfg.MPU, cfg.Framing = false, c.overhead, c.mpu, c.framing
		s, err := New(0, cfg, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time from memory
			for i, l := range lengths {
				got := s.adjustPacket(&Packet{Len: l + 14, NetOff: 14})
				if again := s.adjustPacket(&Packet{Len: l + 14, NetOff: 14}); got != c.want[i] || again != got {
					t.Errorf("overhead %d mpu %d framing %d: %d bytes take %d, then %d, want %d",
						c.overhead, c.mpu, c.framing, l, got, again, c.want[i])
				}
			}
		}
	}
}

// TestDuration compares the 32-bit multiplication, and what is remembered of
// the last length, with plain 64-bit arithmetic.
func TestDuration(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		v := rateOf(r.Uint64N(1 << r.UintN(37)))
		for range 10 {
			n := uint32(r.Uint64N(1 << r.UintN(18)))
			want := uint64(n) * v.ns >> v.shift
			if got, again := v.duration(n), v.duration(n); got != want || again != want {
				t.Fatalf("%d bytes at %d>>%d: %d, then %d, want %d", n, v.ns, v.shift, got, again, want)
			}
		}
	}
}

// TestObserve compares the averages in 32 bits with those in 64.
func TestObserve(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var b tin
	var avg, peak, base uint64
	for range 200_000 {
		x := r.Uint64N(1 << (1 + r.UintN(36)))
		avg = ewma(avg, x, 8)
		peak = ewma2(peak, x, x > peak)
		base = ewma2(base, x, x < base)
		b.observe(x)
		if b.avgDelay != avg || b.peakDelay != peak || b.baseDelay != base {
			t.Fatalf("after %d ns: %d %d %d, want %d %d %d", x, b.avgDelay, b.peakDelay, b.baseDelay, avg, peak, base)
		}
	}
	if n := b.sojourn.Total(); n != 200_000 {
		t.Errorf("histogram counts %d", n)
	}
}

// TestPickTin compares the choice from the bit set with the rule in words: the
// highest tin whose clock has been reached, else the one with the earliest.
func TestPickTin(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	cfg := DefaultConfig()
	cfg.Tins, cfg.Rate = Diffserv8, 1e8
	s, err := New(0, cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 20_000 {
		s.busyTins = 0
		best, wait := -1, Time(0)
		now := Time(r.Int64N(20))
		for i := range s.tins {
			b := &s.tins[i]
			b.sparse, b.bulk = int32(r.IntN(2)), int32(r.IntN(2))
			b.timeNext = Time(r.Int64N(20))
			if b.sparse+b.bulk == 0 {
				continue
			}
			s.busyTins |= 1 << i
			if d := b.timeNext - now; best < 0 || d <= 0 || d <= wait {
				best, wait = i, d
			}
		}
		got := -1
		if b := s.pickTinByClock(now); b != nil {
			got = int(b.index)
		}
		if got != best {
			t.Fatalf("tin %d, want %d", got, best)
		}
	}
}

// TestControlLaw: the interval is used whole, unless the kernel's 32 bits are
// asked for. 1000 s are 3.567587328 s there.
func TestControlLaw(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Tins = BestEffort
	cfg.RTT, cfg.Target = 1000*time.Second, 50*time.Second
	for compat, want := range map[Compat]time.Duration{0: 1000 * time.Second, Compat32Bit: 3567587328} {
		s, err := New(0, cfg, Options{Compat: compat})
		if err != nil {
			t.Fatal(err)
		}
		got := s.control(0, &s.tins[0], 1<<32-1)
		if diff := want - time.Duration(got); diff < 0 || diff > 240 {
			t.Errorf("compat %x: first interval %v, want %v", compat, time.Duration(got), want)
		}
		if got, want := s.control(0, &s.tins[0], 1<<31), Time(want/2); got != want {
			t.Errorf("compat %x: interval at count 4 %d, want %d", compat, got, want)
		}
	}
}
