package engine

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

// MaxRate is the highest rate that ParseRate accepts.
const MaxRate BitsPerSecond = 100_000_000_000

// unit is a suffix and what it multiplies with.
type unit struct {
	name string // lower case
	mult uint64
}

// The units of tc(8). Decimal prefixes are powers of 1000, those with an i of
// 1024; "bps" is bytes per second there, and so it is here.
var (
	rateUnits = []unit{ // in bits per second
		{"bit", 1},
		{"kbit", 1e3},
		{"mbit", 1e6},
		{"gbit", 1e9},
		{"tbit", 1e12},
		{"kibit", 1 << 10},
		{"mibit", 1 << 20},
		{"gibit", 1 << 30},
		{"tibit", 1 << 40},
		{"bps", 8},
		{"kbps", 8e3},
		{"mbps", 8e6},
		{"gbps", 8e9},
		{"tbps", 8e12},
		{"kibps", 8 << 10},
		{"mibps", 8 << 20},
		{"gibps", 8 << 30},
		{"tibps", 8 << 40},
	}
	timeUnits = []unit{ // in nanoseconds
		{"s", 1e9},
		{"sec", 1e9},
		{"secs", 1e9},
		{"ms", 1e6},
		{"msec", 1e6},
		{"msecs", 1e6},
		{"us", 1e3},
		{"usec", 1e3},
		{"usecs", 1e3},
		{"", 1e3},
	}
	sizeUnits = []unit{ // in bits, because there is a kbit
		{"", 8},
		{"b", 8},
		{"k", 8 << 10},
		{"kb", 8 << 10},
		{"m", 8 << 20},
		{"mb", 8 << 20},
		{"g", 8 << 30},
		{"gb", 8 << 30},
		{"kbit", 1 << 10},
		{"mbit", 1 << 20},
		{"gbit", 1 << 30},
	}
)

// ParseRate reads a rate as tc(8) writes it: a decimal number with its unit
// ("115mbit", "1.5gbit", "512kbit"; "2mbps" is 2 megabytes per second), or
// "unlimited", which is 0. Case does not matter. What is no rate to shape to
// is refused with its reason: zero, negative, above 100 Gbit/s, without unit.
func ParseRate(s string) (BitsPerSecond, error) {
	if s == "" {
		return 0, fmt.Errorf("rate: empty, say for example 115mbit or unlimited")
	}
	if s == "unlimited" {
		return 0, nil
	}
	bad := func(why string) (BitsPerSecond, error) {
		return 0, fmt.Errorf("rate %q: %s", s, why)
	}
	mant, exp, suffix, err := parseDecimal(s)
	if err != nil {
		return bad(err.Error())
	}
	if mant == 0 && suffix == "" {
		return bad("zero, say unlimited to remove the limit")
	}
	if suffix == "" {
		return bad("unit missing, say for example " + s + "mbit or " + s + "kbit")
	}
	mult, ok := findUnit(rateUnits, suffix)
	if !ok {
		return bad("unknown unit " + strconv.Quote(suffix) + ", allowed are bit, kbit, mbit, gbit (bits) and bps, kbps, mbps, gbps (bytes)")
	}
	v, ok := scale(mant, exp, mult)
	switch {
	case mant == 0:
		return bad("zero, say unlimited to remove the limit")
	case !ok || BitsPerSecond(v) > MaxRate:
		return bad("above 100gbit")
	case v < 8:
		return bad("below 8bit (1 byte per second)")
	}
	return BitsPerSecond(v), nil
}

// String returns the rate exactly, in the largest unit that needs no
// fraction, so that ParseRate reads it back: "115Mbit", "11250Kbit",
// "unlimited" for 0. Reports that imitate tc round instead.
func (r BitsPerSecond) String() string {
	if r == 0 {
		return "unlimited"
	}
	i := 0
	for ; i < 4 && r%1000 == 0; i++ {
		r /= 1000
	}
	b := strconv.AppendUint(make([]byte, 0, 24), uint64(r), 10)
	return string(append(b, rateNames[i]...))
}

var rateNames = [5]string{"bit", "Kbit", "Mbit", "Gbit", "Tbit"}

// parseTime reads a time of tc(8): 100ms, 1.5s, 250us, or a bare number of
// microseconds. The result is in whole microseconds, rounded down, and fits the
// 32 bits that the kernel has for them.
func parseTime(s string) (time.Duration, error) {
	d, err := parseAnyTime(s)
	if err == nil && d > (1<<32-1)*time.Microsecond {
		return 0, fmt.Errorf("too long, at most 4294s")
	}
	return d, err
}

func parseAnyTime(s string) (time.Duration, error) {
	mant, exp, suffix, err := parseDecimal(s)
	if err != nil {
		return 0, err
	}
	mult, ok := findUnit(timeUnits, suffix)
	if !ok {
		return 0, fmt.Errorf("unknown unit %q, allowed are us, ms and s", suffix)
	}
	v, ok := scale(mant, exp, mult)
	if !ok || v > math.MaxInt64 {
		return 0, fmt.Errorf("too long")
	}
	return time.Duration(v).Truncate(time.Microsecond), nil
}

// parseSize reads a size of tc(8): 4mb, 512k, 100000b or a bare number of
// bytes, at most 32 bits wide. Kilo is 1024 here.
func parseSize(s string) (uint64, error) {
	mant, exp, suffix, err := parseDecimal(s)
	if err != nil {
		return 0, err
	}
	mult, ok := findUnit(sizeUnits, suffix)
	if !ok {
		return 0, fmt.Errorf("unknown unit %q, allowed are b, kb, mb and gb", suffix)
	}
	v, ok := scale(mant, exp, mult)
	if !ok {
		return 0, fmt.Errorf("too large")
	}
	return v / 8, nil
}

func findUnit(units []unit, name string) (uint64, bool) {
	for _, u := range units {
		if strings.EqualFold(u.name, name) {
			return u.mult, true
		}
	}
	return 0, false
}

// parseDecimal splits s into mant * 10^exp and what follows the number. It
// keeps all digits, so nothing is lost to floating point, which a router
// would have to emulate anyway.
func parseDecimal(s string) (mant uint64, exp int, rest string, err error) {
	switch {
	case s == "":
		return 0, 0, "", fmt.Errorf("number missing")
	case s[0] == '-':
		return 0, 0, "", fmt.Errorf("negative")
	case s[0] == '+':
		s = s[1:]
	}
	i, digits := 0, 0
	point := false
	for ; i < len(s); i++ {
		ch := s[i]
		if ch == '.' && !point {
			point = true
			continue
		}
		if ch < '0' || ch > '9' {
			break
		}
		digits++
		if mant > (1<<64-10)/10 {
			return 0, 0, "", fmt.Errorf("too many digits")
		}
		mant = mant*10 + uint64(ch-'0')
		if point {
			exp--
		}
	}
	if digits == 0 {
		return 0, 0, "", fmt.Errorf("not a number")
	}
	rest = s[i:]
	if strings.HasPrefix(rest, ",") {
		return 0, 0, "", fmt.Errorf("comma in a number, write 1.5 with a point")
	}
	// An exponent, which tc itself prints from 1000 s on ("1e+03s").
	if len(rest) > 1 && rest[0]|0x20 == 'e' {
		j := 1
		if rest[1] == '-' || rest[1] == '+' {
			j = 2
		}
		e, from := 0, j
		for ; j < len(rest) && rest[j] >= '0' && rest[j] <= '9'; j++ {
			e = min(e*10+int(rest[j]-'0'), 1000)
		}
		if j > from {
			if rest[1] == '-' {
				e = -e
			}
			exp += e
			rest = rest[j:]
		}
	}
	return mant, exp, rest, nil
}

// scale returns floor(mant * 10^exp * mult), and false if that does not fit.
func scale(mant uint64, exp int, mult uint64) (uint64, bool) {
	hi, lo := bits.Mul64(mant, mult)
	if mant == 0 {
		return 0, true
	}
	for ; exp > 0; exp-- {
		if hi != 0 {
			return 0, false
		}
		hi, lo = bits.Mul64(lo, 10)
	}
	// The floor of a floor: dividing digit by digit is exact.
	for ; exp < 0 && hi|lo != 0; exp++ {
		var r uint64
		hi, r = hi/10, hi%10
		lo, _ = bits.Div64(r, lo, 10)
	}
	return lo, hi == 0
}

// appendRate appends a rate as tc does: a whole number that goes up a unit
// while it is divisible by 1000 or has 7 digits.
func appendRate(b []byte, r BitsPerSecond) []byte {
	i := 0
	for ; i < len(rateNames)-1; i++ {
		if r < 1000 || r%1000 != 0 && r < 1_000_000 {
			break
		}
		r /= 1000
	}
	b = strconv.AppendUint(b, uint64(r), 10)
	return append(b, rateNames[i]...)
}

// appendTime appends a time as tc does: whole microseconds below 1 ms, above
// that three significant digits of milliseconds or seconds (printf's %.3g).
func appendTime(b []byte, d time.Duration) []byte {
	us := uint64(max(d, 0)) / 1000
	switch {
	case us >= 1_000_000:
		return append(appendG3(b, us, 6), 's')
	case us >= 1000:
		return append(appendG3(b, us, 3), "ms"...)
	}
	b = strconv.AppendUint(b, us, 10)
	return append(b, "us"...)
}

// appendG3 appends v / 10^places as printf("%.3g", (double)v / 10^places)
// does, for v >= 10^places.
func appendG3(b []byte, v uint64, places int) []byte {
	digits := 1
	for t := v; t >= 10; t /= 10 {
		digits++
	}
	unit := uint64(1) // of the last digit that stays
	for i := 3; i < digits; i++ {
		unit *= 10
	}
	q, r := v/unit, v%unit
	switch half := unit / 2; {
	case r > half:
		q++
	case r == half && unit > 1:
		// printf rounds the double, which lies beside the decimal tie unless
		// the quotient is exact in binary.
		if side := doubleSide(v, places); side > 0 || side == 0 && q&1 == 1 {
			q++
		}
	}
	if q == 1000 {
		q = 100
		digits++
	}
	for digits < 3 { // fewer digits than asked for: pad the number, not the value
		q *= 10
		digits++
		places++
	}
	// q has three digits; the number is d.dd * 10^exp.
	exp := digits - 1 - places
	d := [3]byte{byte('0' + q/100), byte('0' + q/10%10), byte('0' + q%10)}
	n := 3 // without trailing zeros
	for n > 1 && d[n-1] == '0' {
		n--
	}
	point := 1 // digits before the point
	if exp < 3 {
		point = exp + 1
		n = max(n, point)
	}
	b = append(b, d[:point]...)
	if n > point {
		b = append(b, '.')
		b = append(b, d[point:n]...)
	}
	if exp >= 3 {
		b = appendExp(b, exp)
	}
	return b
}

// doubleSide says whether the double nearest to v / 10^places is above (1),
// below (-1) or equal to it.
func doubleSide(v uint64, places int) int {
	div := uint64(1)
	for range places {
		div *= 10
	}
	// The 53-bit mantissa is v * 2^k / div, rounded to nearest.
	k := 53 - bits.Len64(v/div)
	r := v % div
	for range k {
		r = r * 2 % div
	}
	switch {
	case r == 0:
		return 0
	case 2*r > div:
		return 1
	}
	return -1
}

// appendSize appends a number of bytes as tc does: in Kb or Mb (of 1024) when
// it is within a whisker of a whole one.
func appendSize(b []byte, n uint64) []byte {
	const kb, mb = 1 << 10, 1 << 20
	if n >= mb {
		if q := (n + mb/2) / mb; max(q*mb, n)-min(q*mb, n) < kb {
			return append(appendG6(b, q), "Mb"...)
		}
	}
	if n >= kb {
		if q := (n + kb/2) / kb; max(q*kb, n)-min(q*kb, n) < 16 {
			return append(appendG6(b, q), "Kb"...)
		}
	}
	b = strconv.AppendUint(b, n, 10)
	return append(b, 'b')
}

// appendG6 appends a whole number as printf's %g does: with six significant
// digits, and an exponent from a million on.
func appendG6(b []byte, v uint64) []byte {
	if v < 1_000_000 {
		return strconv.AppendUint(b, v, 10)
	}
	exp, unit := 6, uint64(10)
	for v/unit >= 1_000_000 {
		exp++
		unit *= 10
	}
	q, r := v/unit, v%unit
	if r > unit/2 || r == unit/2 && q&1 == 1 {
		q++
	}
	if q == 1_000_000 {
		q, exp = 100_000, exp+1
	}
	for q%10 == 0 {
		q /= 10
	}
	var buf [8]byte
	d := strconv.AppendUint(buf[:0], q, 10)
	b = append(b, d[0])
	if len(d) > 1 {
		b = append(b, '.')
		b = append(b, d[1:]...)
	}
	return appendExp(b, exp)
}

func appendExp(b []byte, exp int) []byte {
	b = append(b, "e+"...)
	if exp < 10 {
		b = append(b, '0')
	}
	return strconv.AppendInt(b, int64(exp), 10)
}
