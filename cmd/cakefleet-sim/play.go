package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
)

const (
	// perSource is how many sessions come from one address of the loopback, below
	// the number of its ports.
	perSource = 20_000

	// newest is for how many revisions the lag is measured at once.
	newest = 64

	packetBytes = 1000 // of an average packet

	z99 = 2.3263478740408408 // the 99th percentile of the normal distribution
)

// manner is how a router is played.
type manner uint8

const (
	good manner = iota
	refuses
	clamps
	stays // away
)

// router is one of the fleet, between its sessions too.
type router struct {
	agent  *simagent.Agent
	number int
	manner manner

	mu    sync.Mutex
	link  *plan.Link // that it runs; guarded by mu
	began time.Time  // of the session; zero: none; guarded by mu
	told  time.Time  // up to when the traffic is counted; guarded by mu
	sent  [2]float64 // packets, down and up; guarded by mu
}

// player plays all of them and counts.
type player struct {
	o       *options
	fleet   simagent.Fleet
	routers []*router
	of      map[*simagent.Agent]*router // not changed any more
	buckets [engine.HistogramBuckets]float64
	started time.Time

	sessions, began, pushes, acks, clamped, refused, reports atomic.Int64

	mu      sync.Mutex
	first   map[plan.Revision]time.Time // when the first router got it; guarded by mu
	order   []plan.Revision             // the oldest first; guarded by mu
	lag     engine.Histogram            // guarded by mu
	slowest time.Duration               // guarded by mu
	most    int64                       // sessions at once; guarded by mu
	all     time.Duration               // until all had a session; 0: never; guarded by mu
	ends    map[string]int              // sessions and attempts by why they ended; guarded by mu
	reason  string                      // the newest; guarded by mu
	shown   counts                      // at the last line; guarded by mu
}

type counts struct {
	at                    time.Time
	pushes, acks, reports int64
}

func newPlayer(o *options, roots *x509.CertPool, members []member) *player {
	p := &player{o: o, of: map[*simagent.Agent]*router{}, first: map[plan.Revision]time.Time{}, ends: map[string]int{}}
	p.buckets = lognormal(o.sojourn, o.sojourn99)
	p.fleet = simagent.Fleet{
		TLS:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}},
		Version: o.version, Model: o.model, ReportEvery: o.reportEvery, Address: p.address,
		Hooks: simagent.Hooks{Apply: p.apply, Report: p.report, Began: p.sessionBegan, Ended: p.sessionEnded},
	}
	for i := range members {
		m := &members[i]
		r := &router{number: i, manner: o.mannerOf(m.Router)}
		r.agent = p.fleet.New(m.Router, bootID(), m.pair)
		p.routers = append(p.routers, r)
		p.of[r.agent] = r
	}
	return p
}

// hashOf is the same in every run.
func hashOf(id string, seed uint64) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(binary.BigEndian.AppendUint64(nil, seed)) // never fails
	_, _ = h.Write([]byte(id))                               // never fails
	// FNV's high bits hardly depend on the last characters, where ids differ.
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	return x ^ x>>33
}

// mannerOf divides the routers by a hash, so that each is the same in every run.
func (o *options) mannerOf(id string) manner {
	at := share(float64(hashOf(id, o.seed)>>11) / (1 << 53))
	switch {
	case at < o.refuse:
		return refuses
	case at < o.refuse+o.clamp:
		return clamps
	case at < o.refuse+o.clamp+o.offline:
		return stays
	}
	return good
}

// lognormal returns the share of packets in each bucket.
func lognormal(p50, p99 time.Duration) (b [engine.HistogramBuckets]float64) {
	sigma := max(math.Log(p99.Seconds()/p50.Seconds())/z99, 0.01)
	below := func(d time.Duration) float64 {
		if d <= 0 {
			return 0
		}
		return math.Erfc(-math.Log(d.Seconds()/p50.Seconds())/(sigma*math.Sqrt2)) / 2
	}
	for i := range b {
		low, high := engine.BucketBounds(i)
		b[i] = below(high) - below(low)
	}
	return b
}

// run plays until ctx ends.
func (p *player) run(ctx context.Context) {
	p.mu.Lock()
	p.started = time.Now()
	p.shown.at = p.started
	p.mu.Unlock()
	var running sync.WaitGroup
	for _, r := range p.routers {
		if r.manner != stays {
			running.Go(func() {
				if p.o.ramp > 0 {
					select {
					case <-time.After(rand.N(p.o.ramp)):
					case <-ctx.Done():
					}
				}
				r.agent.Run(ctx)
			})
		}
	}
	<-ctx.Done()
	running.Wait()
}

func (p *player) address(a *simagent.Agent) (string, net.Addr) {
	i := p.of[a].number
	// Several processes on one machine must not share the ports of one address.
	return p.o.agents[i%len(p.o.agents)], p.o.source(p.o.from+i, perSource)
}

func (p *player) sessionBegan(a *simagent.Agent) {
	now := time.Now()
	r := p.of[a]
	r.mu.Lock()
	r.began = now
	r.mu.Unlock()
	p.began.Add(1)
	n := p.sessions.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.most = max(p.most, n)
	if p.all == 0 && n == int64(len(p.routers)-p.away()) {
		p.all = now.Sub(p.started)
	}
}

func (p *player) sessionEnded(a *simagent.Agent, err error, _ time.Duration) {
	r := p.of[a]
	r.mu.Lock()
	had := !r.began.IsZero()
	r.began = time.Time{}
	r.mu.Unlock()
	if had {
		p.sessions.Add(-1)
	}
	why := reasonOf(err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends[why]++
	p.reason = why
}

// away returns how many routers stay away.
func (p *player) away() (n int) {
	for _, r := range p.routers {
		if r.manner == stays {
			n++
		}
	}
	return n
}

// apply is a router's answer to a push.
func (p *player) apply(a *simagent.Agent, push simagent.Push) (plan.Status, bool) {
	now := time.Now()
	r := p.of[a]
	p.pushes.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	p.late(push.Desired.Revision, now, r.began)
	if r.manner == refuses && push.Err == nil {
		push.Err = fmt.Errorf("this router is played as one that refuses (--refuse %v)", &p.o.refuse)
	}
	s := push.Applied()
	if s.Outcome == plan.OutcomeRejected {
		p.refused.Add(1)
		// What ran before still runs.
		s.Applied, s.AppliedHash, s.EffectiveHash = a.Runs()
		s.Effective = r.link
		return s, true
	}
	r.countLocked(p, now)
	if s.Effective != nil {
		p.limit(r, &s)
	}
	r.link = s.Effective
	p.acks.Add(1)
	if s.Outcome == plan.OutcomeClamped {
		p.clamped.Add(1)
	}
	return s, true
}

// limit lowers rates to what the router can do.
func (p *player) limit(r *router, s *plan.Status) {
	link := *s.Effective
	for _, d := range []struct {
		field string
		rate  *engine.BitsPerSecond
	}{{"down.rate", &link.Down.Rate}, {"up.rate", &link.Up.Rate}} {
		asked, why := *d.rate, ""
		if r.manner == clamps && asked >= 16 {
			*d.rate, why = asked/2, "this router is played as one that can do half"
		}
		if p.o.most > 0 && (*d.rate > p.o.most || *d.rate == 0) {
			*d.rate, why = p.o.most, "this router can do "+p.o.most.String()
		}
		if *d.rate != asked {
			s.Clamps = append(s.Clamps, plan.Clamp{Field: d.field, Desired: asked.String(), Effective: d.rate.String(), Reason: why})
		}
	}
	if len(s.Clamps) > 0 {
		s.Outcome, s.Effective, s.EffectiveHash = plan.OutcomeClamped, &link, link.Hash()
	}
}

// late measures how long after the first router this one got a revision. Who
// had no session when the first one got it has its own reason to be late.
func (p *player) late(rev plan.Revision, now, session time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first, known := p.first[rev]
	if !known {
		p.first[rev] = now
		if p.order = append(p.order, rev); len(p.order) > newest {
			delete(p.first, p.order[0])
			p.order = p.order[1:]
		}
		return
	}
	if session.Before(first) {
		p.lag.Observe(now.Sub(first))
		p.slowest = max(p.slowest, now.Sub(first))
	}
}

// countLocked adds the traffic up to now.
func (r *router) countLocked(p *player, now time.Time) {
	if r.link != nil && !r.told.IsZero() {
		seconds := now.Sub(r.told).Seconds()
		for i, c := range []*engine.Config{&r.link.Down, &r.link.Up} {
			r.sent[i] += float64(c.Rate) * float64(p.o.load) / 8 / packetBytes * seconds
		}
	}
	r.told = now
}

// report returns what a router counts.
func (p *player) report(a *simagent.Agent) *plan.Report {
	r := p.of[a]
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countLocked(p, time.Now())
	p.reports.Add(1)
	report := &plan.Report{Agent: plan.AgentStats{
		CPUTime: time.Duration((r.sent[0] + r.sent[1]) * 20e3), ResidentBytes: 11 << 20, // 20 µs for each packet
	}}
	if r.link != nil {
		report.Down, report.Up = p.direction(&r.link.Down, r.sent[0]), p.direction(&r.link.Up, r.sent[1])
	}
	return report
}

// direction returns the counters after a number of packets, all of them in the
// tin for what is not marked. None ever goes back, as each is a share of packets.
func (p *player) direction(c *engine.Config, packets float64) *engine.Stats {
	s := &engine.Stats{Config: *c, Capacity: c.Rate, MemoryUsed: 1 << 20, MemoryLimit: 4 << 20, MinNetLen: 64, MaxNetLen: 1500, MinAdjLen: 64, MaxAdjLen: 1500}
	place := 1
	switch c.Tins {
	case engine.BestEffort:
		s.NumTins, place = 1, 0
	case engine.Diffserv3:
		s.NumTins = 3
	case engine.Diffserv4, engine.Cake3:
		s.NumTins = 4
	default: // Diffserv8, Precedence
		s.NumTins = 8
	}
	t := &s.Tins[place]
	for i, part := range p.buckets {
		t.Sojourn[i] = uint64(packets * part)
		s.SentPackets += t.Sojourn[i]
	}
	s.SentBytes = s.SentPackets * packetBytes
	s.Drops = uint64(packets * float64(p.o.drop))
	t.Drops, t.DropBytes = s.Drops, s.Drops*packetBytes
	t.Packets, t.Bytes = s.SentPackets+s.Drops, s.SentBytes+s.Drops*packetBytes
	t.Threshold, t.Target, t.Interval = c.Rate, 5*time.Millisecond, 100*time.Millisecond
	t.AvgDelay, t.PeakDelay, t.BaseDelay = p.o.sojourn, p.o.sojourn99, p.o.sojourn/2
	t.MaxLen, t.Quantum = 1500, 1514
	return s
}

// line is the progress since the last one.
func (p *player) line() string {
	now := counts{time.Now(), p.pushes.Load(), p.acks.Load(), p.reports.Load()}
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.shown
	p.shown = now
	seconds := now.at.Sub(was.at).Seconds()
	rate := func(n, before int64) float64 { return math.Round(float64(n-before) / seconds) }
	line := fmt.Sprintf("%5.0fs  sessions %d of %d  pushes %.0f/s  acks %.0f/s  refused %d  clamped %d  reports %.0f/s  lag p99 %v",
		now.at.Sub(p.started).Seconds(), p.sessions.Load(), len(p.routers)-p.away(), rate(now.pushes, was.pushes), rate(now.acks, was.acks),
		p.refused.Load(), p.clamped.Load(), rate(now.reports, was.reports), p.lag.Quantile(99, 100).Round(time.Millisecond))
	if p.reason != "" {
		line += "  (newest end: " + p.reason + ")"
		p.reason = ""
	}
	return line
}

// ending is one reason for which sessions, or attempts, ended.
type ending struct {
	Count int    `json:"count"`
	Why   string `json:"why"`
}

func (p *player) endings() (all []ending) {
	for why, n := range p.ends {
		all = append(all, ending{n, why})
	}
	slices.SortFunc(all, func(a, b ending) int { return b.Count - a.Count })
	return all
}
