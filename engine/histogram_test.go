package engine

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestHistogramBucketsAreContiguous(t *testing.T) {
	for i := range HistogramBuckets {
		low, high := BucketBounds(i)
		if got := histogramBucket(low); got != uint32(i) {
			t.Errorf("bucket of its own lower bound %v: got %d, want %d", low, got, i)
		}
		if got := histogramBucket(high - 1); got != uint32(i) {
			t.Errorf("bucket just below %v: got %d, want %d", high, got, i)
		}
		if _, err := relativeError(low, (low+high)/2); i > 3 && err > 125 {
			t.Errorf("bucket %d: middle is %d per mille off its lower bound", i, err)
		}
	}
	for _, tt := range []struct {
		in   time.Duration
		want uint32
	}{{-1, 0}, {0, 0}, {1<<63 - 1, HistogramBuckets - 1}, {time.Minute, HistogramBuckets - 1}} {
		if got := histogramBucket(tt.in); got != tt.want {
			t.Errorf("bucket of %d ns: got %d, want %d", tt.in, got, tt.want)
		}
	}
}

// relativeError returns the distance of got from want, and that in per mille
// of want.
func relativeError(want, got time.Duration) (time.Duration, int64) {
	d := (got - want).Abs()
	return d, int64(d * 1000 / max(want, 1))
}

func TestHistogramQuantilesOfMergedParts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var exact []time.Duration
	var merged Histogram
	for range 7 {
		var part Histogram
		for range 5000 {
			d := time.Duration(r.ExpFloat64() * float64(8*time.Millisecond))
			exact = append(exact, d)
			part.Observe(d)
		}
		merged.Merge(&part)
	}
	slices.Sort(exact)
	for _, q := range []uint64{1, 10, 50, 90, 99, 100} {
		want := exact[(uint64(len(exact))*q+99)/100-1]
		got := merged.Quantile(q, 100)
		if d, e := relativeError(want, got); e > 125 && d > 1024 {
			t.Errorf("quantile %d %%: got %v, want %v within 12.5 %%", q, got, want)
		}
	}
	if got := (&Histogram{}).Quantile(1, 2); got != 0 {
		t.Errorf("quantile of nothing: got %v, want 0", got)
	}
}
