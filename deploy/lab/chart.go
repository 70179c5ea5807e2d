package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

// Sizes of the picture in px.
const (
	chartLeft   = 240. // of the longest name
	chartBar    = 420.
	chartTop    = 96.
	chartRow    = 24.
	chartNumber = 110.
)

// part is a kind of bar.
type part struct {
	name, color string
	of          func(*row.Result) float64 // per cent of the CPU
}

var parts = []part{
	{"agent", "#7b3294", func(r *row.Result) float64 { return percentOf(r, r.Agent) }},
	{"rest of the router", "#2b83ba", func(r *row.Result) float64 { return percentOf(r, r.Router()-r.Agent) }},
	{"idle", "#d9ead3", func(r *row.Result) float64 { return percentOf(r, r.Soak) }},
	{"traffic's own", "#dddddd", func(r *row.Result) float64 { return percentOf(r, r.Source+r.Ping+r.Busy) }},
}

// writeChart draws where the CPU's time went, line by line, as SVG.
func writeChart(w io.Writer, ls []*line) error {
	var b strings.Builder
	var rows []*line
	for _, l := range ls {
		if l.err == nil && l.order.Kind == "traffic" {
			rows = append(rows, l)
		}
	}
	columns := []struct {
		title string
		text  func(l *line) string
	}{
		{"goodput Mbit/s", func(l *line) string {
			return fmt.Sprintf("%.1f / %.1f", l.result.DownDelivered.Mbit(l.result.Window), l.result.UpDelivered.Mbit(l.result.Window))
		}},
		{"insns/packet", func(l *line) string { return fmt.Sprintf("%.0f", instructions(l)) }},
		{"ping p50 / p99 ms", func(l *line) string {
			return fmt.Sprintf("%.1f / %.1f", l.result.Ping50.Seconds()*1000, l.result.Ping99.Seconds()*1000)
		}},
	}
	width := chartLeft + chartBar + 24 + chartNumber*float64(len(columns))
	height := chartTop + chartRow*float64(len(rows)) + 34
	text := func(x, y float64, attributes, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" %s>`, x, y, attributes)
		_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes all
		b.WriteString("</text>\n")
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%.0f" height="%.0f" fill="#fff"/>`+"\n", width, height)
	text(16, 28, `font-size="18" font-weight="bold"`, "What shaping costs a MIPS router")
	text(16, 48, `fill="#555"`, "per cent of a big-endian 74Kf, by instructions; 115/12 Mbit/s unless said, 10 % more offered")
	x := 16.
	for _, p := range parts {
		fmt.Fprintf(&b, `<rect x="%.1f" y="60" width="14" height="12" fill="%s"/>`+"\n", x, p.color)
		text(x+19, 70, "", p.name)
		x += 40 + 6.5*float64(len(p.name))
	}
	for i, c := range columns {
		text(chartLeft+chartBar+24+chartNumber*float64(i), chartTop-8, `fill="#333"`, c.title)
	}
	for i, l := range rows {
		y := chartTop + chartRow*float64(i)
		text(chartLeft-8, y+15, `text-anchor="end"`, fmt.Sprintf("%s, %d MIPS", l.name, l.mips))
		at := chartLeft
		for _, p := range parts {
			size := max(p.of(l.result), 0) / 100 * chartBar
			fmt.Fprintf(&b, `<rect x="%.1f" y="%.1f" width="%.1f" height="18" fill="%s"/>`+"\n", at, y+2, size, p.color)
			at += size
		}
		for j, c := range columns {
			text(chartLeft+chartBar+24+chartNumber*float64(j), y+15, "", c.text(l))
		}
	}
	bottom := chartTop + chartRow*float64(len(rows))
	for p := 0.; p <= 100; p += 25 {
		x := chartLeft + p/100*chartBar
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#888" stroke-dasharray="2 3"/>`+"\n", x, chartTop, x, bottom)
		text(x, bottom+16, `text-anchor="middle" fill="#333"`, fmt.Sprintf("%.0f %%", p))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
