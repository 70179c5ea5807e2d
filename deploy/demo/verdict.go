package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
)

// What has to hold. Shares are of the plan's rate less what acknowledgements of
// the other direction and probes take of it.
const (
	leastShare = 0.92
	mostShare  = 1.00
	mostMedian = 5 * time.Millisecond  // median delay beside full lines
	mostP99    = 25 * time.Millisecond // 99th percentile
)

// check notes a failure unless ok.
func (s *show) check(ok bool, format string, args ...any) {
	if !ok {
		s.failures = append(s.failures, "not so: "+fmt.Sprintf(format, args...))
	}
}

// tell prints the summary, draws the picture and judges.
func (s *show) tell(context.Context) error {
	say("Summary. Rates are TCP payload that arrived. \"of rate\" is their part of the plan's rate (the FIFO's before) less what the")
	say("acknowledgements of the other direction and the probes take of it; a packet's headers are 5 %% of it.")
	say("Delays are of a small packet there and back beside full lines.")
	say("")
	printTable(os.Stdout, s.homes, s.baseline, s.before, s.after)
	say("")
	if err := s.draw(); err != nil {
		return err
	}
	say("Picture: %s", s.svg)
	say("")

	for i, h := range s.homes {
		fifo, shaped := s.baseline.results[i].Latency, s.before.results[i].Latency
		s.check(shaped.Median < fifo.Median, "%s: shaped, the delay (%s) is below the FIFO's (%s)", h.router, ms(shaped.Median), ms(fifo.Median))
		around := s.load.Record.Latency(s.changedAt.Add(-time.Second), s.changedAt.Add(2*time.Second), h.pings...)
		s.check(around.Sent > 0 && around.Lost == 0, "%s: no probe lost while the plan changed (%d of %d)", h.router, around.Lost, around.Sent)
	}
	for _, e := range s.load.Record.Errors() {
		s.check(false, "every flow lives to the end: %s", e)
	}
	if len(s.failures) > 0 {
		for _, f := range s.failures {
			say("  %s", f)
		}
		return nil
	}
	say("All of this holds:")
	say("  - shaped, TCP gets %.0f to %.0f %% of the rate, both ways at once, before and after the change", 100*leastShare, 100*mostShare)
	say("  - the delay beside full lines is below %v, and below %v for 99 of 100 packets", mostMedian, mostP99)
	say("  - the change was one write to etcd, all three routers acknowledged it, and no probe was lost")
	return nil
}

// misses says what in a shaped phase is not as it should be.
func (s *show) misses(p *phase) (misses []string) {
	check := func(ok bool, format string, args ...any) {
		if !ok {
			misses = append(misses, "not so: "+fmt.Sprintf(format, args...))
		}
	}
	for i, h := range s.homes {
		r := p.results[i]
		for _, d := range []struct {
			name string
			got  homes.Direction
			rate float64
		}{{"down", r.Down, p.rates.down}, {"up", r.Up, p.rates.up}} {
			share := d.got.Share(d.rate)
			check(share >= leastShare && share <= mostShare, "%s %s: goodput %s is %.0f to %.0f %% of %g Mbit/s less %.2f for acknowledgements and probes (it is %.1f %%)",
				h.router, p.name, d.name, 100*leastShare, 100*mostShare, d.rate/1e6, d.got.Beside/1e6, 100*share)
		}
		check(r.Latency.Median < mostMedian, "%s %s: median delay %s is below %v", h.router, p.name, ms(r.Latency.Median), mostMedian)
		check(r.Latency.P99 < mostP99, "%s %s: delay of 99 %% %s is below %v", h.router, p.name, ms(r.Latency.P99), mostP99)
	}
	return misses
}

// draw writes the picture of the whole run.
func (s *show) draw() (err error) {
	const bin = 500 * time.Millisecond
	end := s.after.to
	c := chart{
		title:    fmt.Sprintf("One plan change on three routers: %v to %v", oldRates, newRates),
		subtitle: "4 TCP flows down and 4 up in each home, IPv4 and IPv6; a small packet there and back every 10 ms beside them; every point is half a second",
		seconds:  end.Sub(s.began).Seconds(),
		marks:    []mark{{s.shapedAt.Sub(s.began).Seconds(), "agents start"}, {s.changedAt.Sub(s.began).Seconds(), "plan changed"}},
		legend: []style{
			{name: "down", color: "#1f6fb4", width: 1.8},
			{name: "up", color: "#d9731a", width: 1.8},
			{name: "plan (FIFO's rate before)", color: "#777", dashed: true, width: 1},
			{name: "delay, median", color: "#2b8a3e", width: 1.8},
			{name: "delay, 99 %", color: "#b02a6f", width: 1.2},
		},
	}
	rateRow := row{axis: "TCP goodput (Mbit/s)", ticks: linearTicks(newRates.down / 1e6)}
	delayRow := row{axis: "delay there and back (ms)", ticks: []float64{0.1, 1, 10, 100, 1000}, log: true}
	for _, h := range s.homes {
		c.columns = append(c.columns, h.router)
		down, up := line{style: 0}, line{style: 1}
		median, p99 := line{style: 3}, line{style: 4}
		for from := s.began; from.Before(end); from = from.Add(bin) {
			to := from.Add(bin)
			x := from.Add(bin / 2).Sub(s.began).Seconds()
			down.add(x, s.load.Record.Goodput(from, to, h.down...)/1e6)
			up.add(x, s.load.Record.Goodput(from, to, h.up...)/1e6)
			if l := s.load.Record.Latency(from, to, h.pings...); l.Sent > l.Lost {
				median.add(x, float64(l.Median)/1e6)
				p99.add(x, float64(l.P99)/1e6)
			}
		}
		changed := s.changedAt.Sub(s.began).Seconds()
		planLine := func(before, after float64) line {
			return line{style: 2, x: []float64{0, changed, changed, c.seconds}, y: []float64{before / 1e6, before / 1e6, after / 1e6, after / 1e6}}
		}
		rateRow.panels = append(rateRow.panels, []line{planLine(oldRates.down, newRates.down), planLine(oldRates.up, newRates.up), down, up})
		delayRow.panels = append(delayRow.panels, []line{p99, median})
	}
	c.rows = []row{rateRow, delayRow}

	if err := os.MkdirAll(filepath.Dir(s.svg), 0o755); err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	f, err := os.Create(s.svg)
	if err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return c.write(f)
}

func (l *line) add(x, y float64) { l.x, l.y = append(l.x, x), append(l.y, y) }
