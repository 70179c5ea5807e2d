package ctl

import (
	"fmt"
	"math"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// sparks are the heights of a sparkline.
var sparks = []rune("▁▂▃▄▅▆▇█")

// sparkline draws values between 0 and the largest, at most width of them: of
// those that fall together the largest counts. NaN is a gap.
func sparkline(values []float64, width int) string {
	if len(values) > width {
		merged := make([]float64, width)
		for i := range merged {
			merged[i] = math.NaN()
		}
		for i, v := range values {
			at := i * width / len(values)
			if !(v <= merged[at]) { // also over a gap
				merged[at] = v
			}
		}
		values = merged
	}
	top := 0.0
	for _, v := range values {
		if v > top { // NaN isn't
			top = v
		}
	}
	var b strings.Builder
	for _, v := range values {
		switch {
		case math.IsNaN(v):
			b.WriteByte(' ')
		case top == 0:
			b.WriteRune(sparks[0])
		default:
			b.WriteRune(sparks[min(int(v/top*float64(len(sparks))), len(sparks)-1)])
		}
	}
	return b.String()
}

// bar draws a share of width in eighths of a character.
func bar(share float64, width int) string {
	eighths := int(math.Round(share * float64(8*width)))
	full := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		full += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return full
}

// maxLines is how many lines of a plot people can tell apart.
const maxLines = 7

// plotSeries draws the 99th percentile of series over time as SVG, those of the
// largest ones if there are many.
func plotSeries(path, title string, series []*pb.StatsSeries) error {
	p := plot.New()
	p.Title.Text = title
	p.Y.Label.Text = "sojourn, 99th percentile [ms]"
	p.Y.Min = 0
	p.X.Tick.Marker = plot.TimeTicks{Format: "2 Jan\n15:04"}
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	for i, s := range series[:min(len(series), maxLines)] {
		var points plotter.XYs
		for _, at := range s.GetPoints() {
			if at.GetP99() != nil {
				points = append(points, plotter.XY{X: float64(at.GetTime().GetSeconds()), Y: at.GetP99().AsDuration().Seconds() * 1e3})
			}
		}
		if len(points) == 0 {
			continue
		}
		l, err := plotter.NewLine(points)
		if err != nil {
			return failure{fmt.Errorf("draw %s: %w", seriesName(s), err)}
		}
		l.Color = plotutil.Color(i)
		l.Width = vg.Points(1.5)
		p.Add(l)
		p.Legend.Add(seriesName(s), l)
	}
	if err := p.Save(24*vg.Centimeter, 12*vg.Centimeter, path); err != nil {
		return failure{fmt.Errorf("write %s: %w", path, err)}
	}
	return nil
}

func seriesName(s *pb.StatsSeries) string {
	return strings.Join(strings.Fields(groupName(s.GetGroup())+" "+s.GetDirection()+" "+s.GetTin()+" "+s.GetLoad()), " ")
}

// groupName returns a group for people.
func groupName(group string) string {
	if group == "" {
		return "(none)"
	}
	return group
}

// histogramLines prints a histogram with one line for each octave of time, so
// that it fits on a screen.
func (a *app) histogramLines(buckets []*pb.StatsBucket) {
	type octave struct {
		upper   time.Duration
		packets float64
	}
	var all []octave
	var total, most float64
	for _, b := range buckets {
		upper := time.Microsecond
		for upper < b.GetUpper().AsDuration() {
			upper *= 2
		}
		for len(all) > 0 && all[len(all)-1].upper*2 < upper {
			all = append(all, octave{upper: all[len(all)-1].upper * 2})
		}
		if len(all) == 0 || all[len(all)-1].upper != upper {
			all = append(all, octave{upper: upper})
		}
		last := &all[len(all)-1]
		last.packets += b.GetPackets()
		total += b.GetPackets()
		most = max(most, last.packets)
	}
	for _, o := range all {
		fmt.Fprintf(a.cfg.Stdout, "  up to %8s  %5.1f %%  %s\n", delay(o.upper), 100*o.packets/total, bar(o.packets/most, 40))
	}
}
