package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// drawCourses draws all rollouts on one time axis: how many routers have them,
// and the gates' figures.
func (s *staged) drawCourses() (err error) {
	c := chart{
		title:    fmt.Sprintf("Changes of one plan on %d routers, in waves of 25, 50 and 100 %%", stagedHomes),
		subtitle: fmt.Sprintf("%d TCP flows down and %d up in each home; sojourn is the time in the routers' queues, of all packets, as they count it", stagedFlows, stagedFlows),
		width:    1000,
		columns:  []string{""},
		legend: []style{
			{name: "routers that may have it", color: "#777", dashed: true, width: 1},
			{name: "run it", color: "#1f6fb4", width: 1.8},
			{name: "refused it", color: "#c92a2a", width: 1.8},
			{name: "changed routers", color: "#b02a6f", width: 1.8},
			{name: "others, or the same before", color: "#2b8a3e", width: 1.4},
			{name: "limit of the gate", color: "#444", dashed: true, width: 1},
		},
	}
	routers := row{axis: "routers", ticks: []float64{0, 3, 6, 9, 12}, panels: make([][]line, 1)}
	used := row{axis: "utilisation (%)", ticks: []float64{0, 25, 50, 75, 100}, panels: make([][]line, 1)}
	delay := row{axis: "p99 sojourn (ms)", panels: make([][]line, 1)}
	began := s.courses[0].began
	most := 0.
	for _, k := range s.courses {
		x := func(t time.Time) float64 { return t.Sub(began).Seconds() }
		c.seconds = x(k.ended) + 5
		c.spans = append(c.spans, span{x(k.began), x(k.ended), k.heading})
		c.marks = append(c.marks, k.marks(x)...)
		routers.panels[0] = append(routers.panels[0], k.counts(x)...)
		figures := k.figures("p99_sojourn", 1e3, x)
		for _, l := range figures {
			for _, y := range l.y {
				if y > most { // not NaN
					most = y
				}
			}
		}
		delay.panels[0] = append(delay.panels[0], figures...)
		used.panels[0] = append(used.panels[0], k.figures("utilisation", 100, x)...)
	}
	delay.ticks = linearTicks(most)
	c.rows = []row{routers, delay, used}
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

// marks are the moments at which a course changed.
func (c *course) marks(x func(time.Time) float64) (all []mark) {
	wave := 0
	for _, l := range c.looks {
		switch at := x(l.at); {
		case l.Rollout.Wave > wave:
			wave = l.Rollout.Wave
			all = append(all, mark{at, fmt.Sprintf("wave %d", wave)})
		case l.phase() == "completed":
			return append(all, mark{at, "done"})
		case l.phase() == "rolling back" || l.phase() == "rolled back":
			// Where that is at once, there is no room for two words.
			if at-all[len(all)-1].at < 5 {
				all[len(all)-1].label = ""
			}
			return append(all, mark{at, "rolled back"})
		}
	}
	return all
}

// counts are how many routers may have it, run it and refused it.
func (c *course) counts(x func(time.Time) float64) []line {
	may, run, refused := line{style: 0}, line{style: 1}, line{style: 2}
	for _, l := range c.looks {
		open, has, not := 0, 0, 0
		n := l.Report.Changed
		switch {
		case l.phase() == "completed":
			open, has = stagedHomes, stagedHomes // it is the plan now
		case l.Rollout.Wave > 0:
			open, has, not = l.Rollout.Sizes[l.Rollout.Wave-1], n.Applied+n.Clamped+n.Already, n.Rejected
		}
		may.step(x(l.at), float64(open))
		run.step(x(l.at), float64(has))
		refused.step(x(l.at), float64(not))
	}
	all := []line{may, run}
	if slices.Max(refused.y) > 0 {
		all = append(all, refused)
	}
	return all
}

// figures are the values, references and limits of a gate.
func (c *course) figures(gate string, unit float64, x func(time.Time) float64) []line {
	value, reference, limit := line{style: 3}, line{style: 4}, line{style: 5}
	for _, l := range c.looks {
		at := x(l.at)
		v, ok := l.gate(gate)
		if !ok || v.Result == "inconclusive" {
			for _, to := range []*line{&value, &reference, &limit} {
				to.add(at, math.NaN())
			}
			continue
		}
		value.add(at, v.Value*unit)
		reference.add(at, v.Reference*unit)
		limit.add(at, v.Limit*unit)
	}
	return []line{limit, reference, value}
}

// step adds a point behind a step.
func (l *line) step(x, y float64) {
	if n := len(l.y); n > 0 && l.y[n-1] != y {
		l.add(x, l.y[n-1])
	}
	l.add(x, y)
}
