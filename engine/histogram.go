package engine

import (
	"math/bits"
	"time"
)

// HistogramBuckets is the number of buckets of a Histogram.
const HistogramBuckets = 92

// histogramShift turns nanoseconds into the units of a Histogram, 1024 ns,
// without a division.
const histogramShift = 10

// Histogram counts sojourn times. Times are counted in units of 1024 ns; up to
// 3 units have a bucket each, and above that each power of two is divided into
// four, so that the middle of a bucket is at most 12.5 % away from anything in
// it. The last bucket ends at 17.2 s and takes everything beyond. Histograms of
// different routers add up bucket by bucket.
type Histogram [HistogramBuckets]uint64

// histogramBucket returns the bucket of a sojourn time; negative ones count as 0.
func histogramBucket(sojourn time.Duration) uint32 {
	units := uint64(sojourn) >> histogramShift
	if units >= 1<<24 {
		if sojourn < 0 {
			return 0
		}
		return HistogramBuckets - 1
	}
	v := uint32(units)
	if v < 4 {
		return v
	}
	octave := uint32(bits.Len32(v)) - 1
	return (octave-1)*4 + (v>>(octave-2))&3
}

// Observe counts one sojourn time.
func (h *Histogram) Observe(sojourn time.Duration) { h[histogramBucket(sojourn)]++ }

// Merge adds the counts of o.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o {
		h[i] += n
	}
}

// Total returns the number of sojourn times counted.
func (h *Histogram) Total() uint64 {
	var total uint64
	for _, n := range h {
		total += n
	}
	return total
}

// BucketBounds returns the sojourn times that bucket i counts: from low, up to
// but not including high.
func BucketBounds(i int) (low, high time.Duration) {
	bound := func(i int) time.Duration {
		if i < 4 {
			return time.Duration(i) << histogramShift
		}
		octave, quarter := i/4+1, i%4
		return time.Duration(4+quarter) << (octave - 2) << histogramShift
	}
	return bound(i), bound(i + 1)
}

// Quantile returns the sojourn time below which the share num/den of the
// counted ones lies, at most 12.5 % off; 0 if nothing was counted. num/den is
// 1/2 for the median, 99/100 for the 99th percentile.
func (h *Histogram) Quantile(num, den uint64) time.Duration {
	total := h.Total()
	if total == 0 {
		return 0
	}
	// The smallest rank that has the share below or at it, computed as
	// quotient and remainder so that no product overflows.
	rank := total/den*num + (total%den*num+den-1)/den
	rank = max(rank, 1)
	var seen uint64
	for i, n := range h {
		if seen += n; seen >= rank {
			low, high := BucketBounds(i)
			return (low + high) / 2
		}
	}
	panic("engine: histogram rank beyond its total")
}
