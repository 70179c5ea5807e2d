package engine

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestParseRate(t *testing.T) {
	for s, want := range map[string]BitsPerSecond{
		"115mbit": 115e6, "1.5gbit": 1.5e9, "512kbit": 512e3, "8bit": 8, "100Gbit": 100e9,
		"115Mbit": 115e6, "11250Kbit": 11250e3, "2mbps": 16e6, "1kibit": 1024, "0.0005gbit": 5e5,
		"1e3kbit": 1e6, "1.25e-1gbit": 125e6, "+3mbit": 3e6, "1mibps": 8 << 20,
		"1.0000009kbit": 1000, "unlimited": 0, ".5mbit": 5e5, "64bps": 512,
	} {
		if got, err := ParseRate(s); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %d, %v, want %d", s, got, err, want)
		}
	}
	for s, want := range map[string]string{
		"": "empty", "0": "zero", "0mbit": "zero", "0.0gbit": "zero", "-5mbit": "negative",
		"nan": "not a number", "NaNmbit": "not a number", "inf": "not a number", "-inf": "negative",
		"1,5mbit": "comma", "115": "unit missing", "200gbit": "above", "100000000001bit": "above",
		"1e30mbit": "above", "1e-30mbit": "below", "7bit": "below", "12 mbit": "unknown unit",
		"12furlong": "unknown unit", "mbit": "not a number", ".mbit": "not a number",
		"0x10mbit": "unknown unit", "1.2.3mbit": "unknown unit", "99999999999999999999mbit": "digits",
		"1tbit": "above",
	} {
		got, err := ParseRate(s)
		if err == nil || !strings.Contains(err.Error(), want) || got != 0 {
			t.Errorf("ParseRate(%q) = %d, %v, want an error with %q", s, got, err, want)
		}
		if err != nil && s != "" && !strings.Contains(err.Error(), strconv.Quote(s)) {
			t.Errorf("ParseRate(%q): %q does not name the input", s, err)
		}
	}
}

func TestRateStringReadsBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		r := BitsPerSecond(8 + rng.Uint64N(uint64(MaxRate)-7))
		switch rng.IntN(3) {
		case 0:
			r = max(r/1e6*1e6, 8)
		case 1:
			r = max(r>>rng.UintN(30), 8)
		}
		if got, err := ParseRate(r.String()); err != nil || got != r {
			t.Fatalf("%d -> %q -> %d, %v", uint64(r), r.String(), uint64(got), err)
		}
	}
	for r, want := range map[BitsPerSecond]string{0: "unlimited", 8: "8bit", 115e6: "115Mbit", 1500e6: "1500Mbit", 2e9: "2Gbit", 12_000_001: "12000001bit"} {
		if r.String() != want {
			t.Errorf("%d: got %q, want %q", uint64(r), r.String(), want)
		}
	}
}

// The rates of tc's own output (cake.md 1.5, 2.1, 2.3): a rate that does not
// divide is cut down to the unit in which it has fewer than 7 digits.
func TestAppendRateLikeTC(t *testing.T) {
	for r, want := range map[BitsPerSecond]string{
		6250000: "6250Kbit", 115e6: "115Mbit", 12e6: "12Mbit", 11250e3: "11250Kbit", 107812500: "107812Kbit",
		7187496: "7187Kbit", 0: "0bit", 512: "512bit", 999: "999bit", 1000: "1Kbit", 1001: "1001bit",
		999999: "999999bit", 1000001: "1Mbit", 1999999: "1999Kbit", 76562496: "76562Kbit", 1e9: "1Gbit", 2e12: "2Tbit", 1500e6: "1500Mbit",
		5e15: "5000Tbit",
	} {
		if got := string(appendRate(nil, r)); got != want {
			t.Errorf("%d: got %q, want %q", uint64(r), got, want)
		}
	}
}

func TestAppendTimeLikePrintf(t *testing.T) {
	want := func(us uint64) string {
		switch v := float64(us); {
		case us >= 1_000_000:
			return fmt.Sprintf("%.3gs", v/1e6)
		case us >= 1000:
			return fmt.Sprintf("%.3gms", v/1e3)
		}
		return fmt.Sprintf("%dus", us)
	}
	check := func(us uint64) {
		t.Helper()
		got := string(appendTime(nil, time.Duration(us)*time.Microsecond))
		if w := want(us); got != w {
			t.Errorf("%d us: got %q, want %q", us, got, w)
		}
	}
	for us := range uint64(20_000) {
		check(us)
	}
	for us := uint64(20_000); us < 5_000_000; us += 5 { // every tie
		if us%500 != 5 && us%50 != 0 && us > 1_000_000 {
			continue
		}
		check(us)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 50_000 {
		check(rng.Uint64N(1 << (1 + rng.UintN(32))))
	}
	for _, us := range []uint64{999_499, 999_500, 999_999, 999_499_999, 999_500_000, 1e9, 3_567_587_328, 1<<32 - 1} {
		check(us)
	}
	if got := string(appendTime(nil, -5*time.Millisecond)); got != "0us" {
		t.Errorf("negative time: got %q", got)
	}
}

func TestAppendSizeLikeTC(t *testing.T) {
	want := func(n uint64) string { // as tc computes it, in floating point
		tmp := float64(n)
		switch {
		case n >= 1<<20 && math.Abs(1048576*math.RoundToEven(tmp/1048576)-tmp) < 1024:
			return gFormat(math.RoundToEven(tmp/1048576)) + "Mb"
		case n >= 1<<10 && math.Abs(1024*math.RoundToEven(tmp/1024)-tmp) < 16:
			return gFormat(math.RoundToEven(tmp/1024)) + "Kb"
		}
		return strconv.FormatUint(n, 10) + "b"
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 100_000 {
		n := rng.Uint64N(1 << (1 + rng.UintN(32)))
		switch rng.IntN(3) {
		case 0:
			n = n>>10<<10 + rng.Uint64N(40) // near a whole Kb
		case 1:
			n = n>>20<<20 + rng.Uint64N(2100)
		}
		if got := string(appendSize(nil, n)); got != want(n) {
			t.Fatalf("%d: got %q, want %q", n, got, want(n))
		}
	}
	for n, w := range map[uint64]string{0: "0b", 15503360: "15140Kb", 4195776: "4195776b", 4194304: "4Mb", 5000000: "5000000b", 10156: "10156b", 1<<32 - 1: "4096Mb"} {
		if got := string(appendSize(nil, n)); got != w {
			t.Errorf("%d: got %q, want %q", n, got, w)
		}
	}
}

// gFormat is C's %g.
func gFormat(f float64) string { return fmt.Sprintf("%g", mustFloat(fmt.Sprintf("%.6g", f))) }

func mustFloat(s string) float64 {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		panic(err)
	}
	return f
}

// time2015 is how tc printed times in 2015.
func time2015(us uint64) string {
	switch v := float64(us); {
	case us >= 1_000_000:
		return fmt.Sprintf("%.1fs", v/1e6)
	case us >= 1000:
		return fmt.Sprintf("%.1fms", v/1e3)
	}
	return fmt.Sprintf("%dus", us)
}

// TestFault015_RateThatIsNone wants what is no rate refused where it is read,
// and never taken for none, which would leave a line unshaped.
func TestFault015_RateThatIsNone(t *testing.T) {
	for _, s := range []string{"", " ", "0", "0mbit", "-1mbit", "fast", "mbit", "1 000mbit", "1e3", "10mbits/s", "1mbit;reboot", "\x001mbit", "７mbit"} {
		if got, err := ParseRate(s); err == nil || got != 0 {
			t.Errorf("%q is taken for %d bit/s, %v", s, got, err)
		}
	}
	c := DefaultConfig()
	c.Rate = MaxRate + 1
	if err := c.Validate(); err == nil {
		t.Errorf("a rate of %d is taken", c.Rate)
	}
}

// TestFault123_NotANumber wants no rate of what floating point calls numbers.
func TestFault123_NotANumber(t *testing.T) {
	for _, s := range []string{"NaN", "nan", "NaNmbit", "nanbit", "Inf", "inf", "+Inf", "-Inf", "Infmbit", "infinity", "1e400mbit", "0x1p-2mbit", "1e-400mbit", "99999999999999999999gbit"} {
		if got, err := ParseRate(s); err == nil || got != 0 {
			t.Errorf("%q is taken for %d bit/s, %v", s, got, err)
		}
	}
}
