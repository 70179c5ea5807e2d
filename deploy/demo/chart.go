package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// chart is a picture: panels in rows and columns over one time axis.
type chart struct {
	title, subtitle string
	seconds         float64  // length of the time axis
	width           float64  // of a panel; 0: panelWidth
	marks           []mark   // moments, drawn through all panels
	spans           []span   // stretches of time, shaded in all panels
	legend          []style  // one entry for each kind of line
	rows            []row    // panels of a row share an axis
	columns         []string // headings
}

// mark is a moment.
type mark struct {
	at    float64 // seconds
	label string
}

// span is a stretch of time.
type span struct {
	from, to float64 // seconds
	label    string
}

// style is how the lines of one kind look.
type style struct {
	name, color string
	dashed      bool
	width       float64
}

// row is one row of panels.
type row struct {
	axis   string    // label with the unit
	ticks  []float64 // also its range: first to last
	log    bool
	panels [][]line // by column
}

// line is a line in a panel. A point that is NaN interrupts it.
type line struct {
	style int // of chart.legend
	x, y  []float64
}

// Sizes in px.
const (
	panelWidth  = 330.
	panelHeight = 190.
	gapX        = 28.
	gapY        = 34.
	left        = 74.
	top         = 122.
	right       = 20.
	bottom      = 56.
)

// write draws the chart as SVG.
func (c *chart) write(w io.Writer) error {
	var b strings.Builder
	width := left + float64(len(c.columns))*(c.panel()+gapX) - gapX + right
	height := top + float64(len(c.rows))*(panelHeight+gapY) - gapY + bottom
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" font-family="sans-serif" font-size="12">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, `<rect width="%.0f" height="%.0f" fill="#fff"/>`+"\n", width, height)
	text(&b, left, 28, "start", `font-size="18" font-weight="bold"`, c.title)
	text(&b, left, 48, "start", `fill="#555"`, c.subtitle)
	c.drawLegend(&b)
	for i, heading := range c.columns {
		text(&b, c.panelX(i)+c.panel()/2, top-24, "middle", `font-weight="bold"`, heading)
	}
	for r := range c.rows {
		for col := range c.columns {
			c.drawPanel(&b, r, col)
		}
	}
	bottomAxis := top + float64(len(c.rows))*(panelHeight+gapY) - gapY
	for i := range c.columns {
		text(&b, c.panelX(i)+c.panel()/2, bottomAxis+38, "middle", "", "time (s)")
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// panel returns the width of a panel.
func (c *chart) panel() float64 {
	if c.width > 0 {
		return c.width
	}
	return panelWidth
}

func (c *chart) panelX(col int) float64 { return left + float64(col)*(c.panel()+gapX) }

func (c *chart) drawLegend(b *strings.Builder) {
	x := left
	for _, s := range c.legend {
		fmt.Fprintf(b, `<line x1="%.1f" y1="68" x2="%.1f" y2="68" %s/>`+"\n", x, x+28, stroke(s))
		text(b, x+34, 72, "start", "", s.name)
		x += 60 + 6.6*float64(len(s.name))
	}
}

func (c *chart) drawPanel(b *strings.Builder, r, col int) {
	row := c.rows[r]
	x0, y0 := c.panelX(col), top+float64(r)*(panelHeight+gapY)
	xAt := func(s float64) float64 { return x0 + s/c.seconds*c.panel() }
	yAt := func(v float64) float64 { return y0 + panelHeight*(1-row.fraction(v)) }

	for _, p := range c.spans {
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="#f4f6f8"/>`+"\n", xAt(p.from), y0, xAt(p.to)-xAt(p.from), panelHeight)
		if r == 0 {
			text(b, xAt(p.from), y0-24, "start", `font-weight="bold"`, p.label)
		}
	}
	for _, v := range row.ticks {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#e4e4e4"/>`+"\n", x0, yAt(v), x0+c.panel(), yAt(v))
		if col == 0 {
			text(b, x0-7, yAt(v)+4, "end", `fill="#333"`, fmt.Sprintf("%g", v))
		}
	}
	for s := 0.; s <= c.seconds; s += 10 {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#888"/>`+"\n", xAt(s), y0+panelHeight, xAt(s), y0+panelHeight+4)
		if r == len(c.rows)-1 {
			text(b, xAt(s), y0+panelHeight+19, "middle", `fill="#333"`, fmt.Sprintf("%g", s))
		}
	}
	for _, m := range c.marks {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#444" stroke-dasharray="2 3"/>`+"\n", xAt(m.at), y0-2, xAt(m.at), y0+panelHeight)
		if r == 0 {
			text(b, xAt(m.at), y0-6, "middle", `font-size="11" fill="#444"`, m.label)
		}
	}
	for _, l := range row.panels[col] {
		fmt.Fprintf(b, `<path fill="none" %s d="%s"/>`+"\n", stroke(c.legend[l.style]), path(l, xAt, yAt))
	}
	fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="none" stroke="#888"/>`+"\n", x0, y0, c.panel(), panelHeight)
	if col == 0 {
		fmt.Fprintf(b, `<g transform="translate(%.1f %.1f) rotate(-90)">`, x0-48, y0+panelHeight/2)
		text(b, 0, 0, "middle", "", row.axis)
		b.WriteString("</g>\n")
	}
}

// fraction returns where a value is on the axis, 0 at the bottom and 1 at the
// top; what is outside is drawn at the edge.
func (r row) fraction(v float64) float64 {
	low, high := r.ticks[0], r.ticks[len(r.ticks)-1]
	v = min(max(v, low), high)
	if r.log {
		return math.Log(v/low) / math.Log(high/low)
	}
	return (v - low) / (high - low)
}

func path(l line, xAt, yAt func(float64) float64) string {
	var b strings.Builder
	command := "M"
	for i, x := range l.x {
		if math.IsNaN(l.y[i]) {
			command = "M"
			continue
		}
		fmt.Fprintf(&b, "%s%.1f %.1f", command, xAt(x), yAt(l.y[i]))
		command = "L"
	}
	return b.String()
}

func stroke(s style) string {
	dash := ""
	if s.dashed {
		dash = ` stroke-dasharray="5 3"`
	}
	return fmt.Sprintf(`stroke="%s" stroke-width="%g"%s`, s.color, s.width, dash)
}

func text(b *strings.Builder, x, y float64, anchor, attributes, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" %s>`, x, y, anchor, attributes)
	_ = xml.EscapeText(b, []byte(s)) // a strings.Builder takes everything
	b.WriteString("</text>\n")
}

// linearTicks returns about four round ticks from 0 to above the largest value.
func linearTicks(largest float64) []float64 {
	step := math.Pow(10, math.Floor(math.Log10(max(largest, 1e-9)/4)))
	for _, f := range []float64{1, 2, 2.5, 5, 10} {
		if 4*step*f >= largest {
			step *= f
			break
		}
	}
	ticks := []float64{0}
	for v := step; ; v += step {
		ticks = append(ticks, v)
		if v >= largest {
			return ticks
		}
	}
}
