package traffic

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// at is a time on an invented clock, in ms.
func at(ms int64) time.Time { return time.Unix(1000, ms*1e6) }

func TestGoodput(t *testing.T) {
	r := NewRecord()
	for _, p := range []struct {
		ms    int64
		bytes uint64
	}{{0, 0}, {100, 1000}, {200, 5000}} {
		r.add(reading{At: at(p.ms).UnixNano(), Bytes: map[string]uint64{"a": p.bytes, "b": p.bytes / 2}})
	}
	for _, c := range []struct {
		from, to int64
		flows    []string
		want     float64
	}{
		{0, 200, []string{"a"}, 5000 * 8 / 0.2},
		{0, 200, []string{"a", "b"}, 7500 * 8 / 0.2},
		{50, 150, []string{"a"}, 2500 * 8 / 0.1}, // between readings
		{-100, 0, []string{"a"}, 0},              // before it began
		{200, 300, []string{"a"}, 0},             // after its end
		{0, 200, []string{"no"}, 0},
	} {
		if got := r.Goodput(at(c.from), at(c.to), c.flows...); got != c.want {
			t.Errorf("%v from %d to %d ms: %v bit/s, want %v", c.flows, c.from, c.to, got, c.want)
		}
	}
}

func TestLatencyAndGap(t *testing.T) {
	r := NewRecord()
	var sent, back []packet
	for i := range int64(100) {
		p := packet{Probe: "p", Seq: uint64(i + 1), At: at(i * 10).UnixNano()}
		sent = append(sent, p)
		if i >= 50 && i < 55 {
			continue // lost
		}
		p.RTT = (i + 1) * 1e5
		back = append(back, p)
	}
	r.add(reading{Sent: sent[:60]})
	r.add(reading{Echoed: back})
	r.add(reading{Sent: sent[60:]}) // a process may tell the echo before the sending
	ms := func(x float64) time.Duration { return time.Duration(x * 1e6) }

	got := r.Latency(at(0), at(1000), "p")
	want := Latency{Sent: 100, Lost: 5, Median: ms(4.8), P99: ms(9.9), Max: ms(10)}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("latency (-want +got):\n%s", d)
	}
	if got := r.Latency(at(0), at(100), "p"); got.Sent != 10 || got.Max != ms(1) {
		t.Errorf("of the first 10: %+v", got)
	}
	if got := r.Latency(at(0), at(1000), "no"); got != (Latency{}) {
		t.Errorf("of no probe: %+v", got)
	}
	// The 50th came back at 490+5 ms, the 56th at 550+5.6 ms.
	if got := r.Gap(at(100), at(900), "p"); got != ms(60.6) {
		t.Errorf("gap: %v, want 60.6 ms", got)
	}
	if got := r.Gap(at(510), at(540), "p"); got != ms(30) {
		t.Errorf("gap while nothing came: %v, want all of it", got)
	}
}
