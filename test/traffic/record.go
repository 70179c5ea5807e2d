package traffic

import (
	"slices"
	"sync"
	"time"
)

// Record is what all processes of one run have measured. Its methods may be
// called from any goroutine, also while the traffic runs.
type Record struct {
	mu     sync.Mutex // guards all below
	flows  map[string][]point
	probes map[string][]ping // in order of sequence number, from 1
	errs   []string
}

// point is a counter at a time.
type point struct {
	at    int64
	bytes uint64
}

// ping is one packet of a probe; rtt is 0 until it has come back.
type ping struct{ at, rtt int64 }

// NewRecord returns an empty one.
func NewRecord() *Record {
	return &Record{flows: map[string][]point{}, probes: map[string][]ping{}}
}

func (r *Record) add(x reading) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, n := range x.Bytes {
		r.flows[name] = append(r.flows[name], point{x.At, n})
	}
	for _, p := range x.Sent {
		r.probe(p).at = p.At
	}
	for _, p := range x.Echoed {
		r.probe(p).rtt = p.RTT
	}
	if x.Error != "" {
		r.errs = append(r.errs, x.Error)
	}
}

func (r *Record) probe(p packet) *ping {
	pings := r.probes[p.Probe]
	for uint64(len(pings)) < p.Seq {
		pings = append(pings, ping{at: p.At})
	}
	r.probes[p.Probe] = pings
	return &pings[p.Seq-1]
}

// Errors returns the flows that broke, each with why.
func (r *Record) Errors() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.errs)
}

// Goodput returns the payload that arrived between two times, of all the named
// flows together, in bits/s.
func (r *Record) Goodput(from, to time.Time, flows ...string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var bytes float64
	for _, f := range flows {
		bytes += bytesAt(r.flows[f], to.UnixNano()) - bytesAt(r.flows[f], from.UnixNano())
	}
	return bytes * 8 / to.Sub(from).Seconds()
}

// bytesAt interpolates between readings.
func bytesAt(points []point, at int64) float64 {
	i, _ := slices.BinarySearchFunc(points, at, func(p point, at int64) int {
		return int(min(max(p.at-at, -1), 1))
	})
	switch {
	case i == 0:
		return 0 // before its first reading a flow has nothing
	case i == len(points):
		return float64(points[i-1].bytes)
	}
	a, b := points[i-1], points[i]
	return float64(a.bytes) + float64(b.bytes-a.bytes)*float64(at-a.at)/float64(b.at-a.at)
}

// Latency sums up the packets that probes sent between two times. Those of
// the last moments of a run that goes on may still be on their way: give them
// a second.
type Latency struct {
	Sent, Lost       int
	Median, P99, Max time.Duration // of those that came back
}

// Latency returns what the named probes met, taken together.
func (r *Record) Latency(from, to time.Time, probes ...string) Latency {
	var l Latency
	var rtts []int64
	for _, name := range probes {
		for _, p := range r.between(name, from, to) {
			l.Sent++
			if p.rtt == 0 {
				l.Lost++
			} else {
				rtts = append(rtts, p.rtt)
			}
		}
	}
	if len(rtts) == 0 {
		return l
	}
	slices.Sort(rtts)
	l.Median = time.Duration(rtts[len(rtts)/2])
	l.P99 = time.Duration(rtts[(len(rtts)-1)*99/100])
	l.Max = time.Duration(rtts[len(rtts)-1])
	return l
}

// Gap returns the longest time between two times in which no packet of a
// probe came back.
func (r *Record) Gap(from, to time.Time, probe string) time.Duration {
	last, longest := from.UnixNano(), int64(0)
	var back []int64
	// One that was sent before may come back within.
	for _, p := range r.between(probe, from.Add(-time.Minute), to) {
		if arrived := p.at + p.rtt; p.rtt != 0 && arrived >= from.UnixNano() && arrived <= to.UnixNano() {
			back = append(back, arrived)
		}
	}
	slices.Sort(back)
	for _, at := range append(back, to.UnixNano()) {
		longest = max(longest, at-last)
		last = at
	}
	return time.Duration(longest)
}

func (r *Record) between(probe string, from, to time.Time) []ping {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []ping
	for _, p := range r.probes[probe] {
		if p.at >= from.UnixNano() && p.at < to.UnixNano() {
			found = append(found, p)
		}
	}
	return found
}
