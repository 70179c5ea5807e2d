package main

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestChart(t *testing.T) {
	c := chart{
		title: "a < b & c", seconds: 60, columns: []string{"one", "two"},
		marks: []mark{{30, "changed"}}, spans: []span{{10, 20, "a while"}},
		legend: []style{{name: "down", color: "#123456", width: 2}},
		rows: []row{
			{axis: "rate (Mbit/s)", ticks: []float64{0, 50, 100}, panels: [][]line{
				{{x: []float64{0, 30, 45, 60}, y: []float64{0, 100, math.NaN(), 200}}}, nil,
			}},
			{axis: "latency (ms)", log: true, ticks: []float64{1, 10, 100}, panels: make([][]line, 2)},
		},
	}
	var b strings.Builder
	if err := c.write(&b); err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(b.String()))
	texts := map[string]int{}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("not XML: %v\n%s", err, b.String())
		}
		if s, ok := token.(xml.CharData); ok {
			texts[string(s)]++
		}
	}
	for _, want := range []string{"a < b & c", "one", "two", "changed", "a while", "down", "rate (Mbit/s)", "latency (ms)", "time (s)", "100", "60"} {
		if texts[want] == 0 {
			t.Errorf("text %q is missing", want)
		}
	}
	if texts["changed"] != 2 || texts["a while"] != 2 {
		t.Errorf("%d marks and %d spans in two panels of the top row", texts["changed"], texts["a while"])
	}
	// From the bottom left over the middle; the gap, then the top right edge.
	if want := `d="M74.0 312.0L239.0 122.0M404.0 122.0"`; !strings.Contains(b.String(), want) {
		t.Errorf("path %s is missing in\n%s", want, b.String())
	}
}

func TestFraction(t *testing.T) {
	r := row{log: true, ticks: []float64{1, 10, 100}}
	for v, want := range map[float64]float64{0: 0, 1: 0, 10: 0.5, 100: 1, 1000: 1} {
		if got := r.fraction(v); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v is at %v, want %v", v, got, want)
		}
	}
}

func TestLinearTicks(t *testing.T) {
	for largest, want := range map[float64][]float64{
		50:  {0, 20, 40, 60},
		115: {0, 50, 100, 150},
		2:   {0, 0.5, 1, 1.5, 2},
	} {
		if d := cmp.Diff(want, linearTicks(largest)); d != "" {
			t.Errorf("for %v (-want +got):\n%s", largest, d)
		}
	}
}
