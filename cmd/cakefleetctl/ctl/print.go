package ctl

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/engine"
)

// printJSON prints a message as JSON with the protocol's names. 64-bit numbers
// are strings there, as JSON numbers can't hold them.
func (a *app) printJSON(m proto.Message) error {
	b, err := marshal(m)
	if err != nil {
		return failure{err}
	}
	return a.printJSONText(b)
}

func marshal(m proto.Message) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
}

// printJSONText indents what protojson deliberately prints with changing
// blanks.
func (a *app) printJSONText(b []byte) error {
	var compact, out bytes.Buffer
	if err := json.Compact(&compact, b); err != nil {
		return failure{err}
	}
	if err := json.Indent(&out, compact.Bytes(), "", "  "); err != nil {
		return failure{err}
	}
	fmt.Fprintln(a.cfg.Stdout, out.String())
	return nil
}

// printJSONList prints what a list call answers, as printJSON does, while it
// comes: however long the list is, it is never in memory.
func printJSONList[M proto.Message](a *app, field string, all iter.Seq2[M, error]) error {
	out := bufio.NewWriter(a.cfg.Stdout)
	options := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}
	fmt.Fprintf(out, "{\n  %q: [", field)
	var indented, compact bytes.Buffer
	n := 0
	for m, err := range all {
		if err != nil {
			return errors.Join(err, out.Flush())
		}
		b, err := options.Marshal(m)
		if err != nil {
			return failure{err}
		}
		indented.Reset()
		compact.Reset()
		// protojson's blanks change from build to build.
		if err := json.Compact(&compact, b); err != nil {
			return failure{err}
		}
		if err := json.Indent(&indented, compact.Bytes(), "    ", "  "); err != nil {
			return failure{err}
		}
		if n++; n > 1 {
			fmt.Fprint(out, ",")
		}
		fmt.Fprintf(out, "\n    %s", indented.Bytes())
	}
	if n > 0 {
		fmt.Fprint(out, "\n  ")
	}
	fmt.Fprint(out, "],\n  \"next_page_token\": \"\"\n}\n")
	if err := out.Flush(); err != nil {
		return failure{err}
	}
	return nil
}

// table prints aligned columns.
type table struct {
	w    *tabwriter.Writer
	rows int
}

func (a *app) table(columns ...string) *table {
	t := &table{w: tabwriter.NewWriter(a.cfg.Stdout, 0, 8, 2, ' ', 0)}
	t.write(columns)
	return t
}

func (t *table) row(cells ...string) {
	t.rows++
	t.write(cells)
}

func (t *table) write(cells []string) {
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

// end prints the table, or what there is instead of an empty one.
func (t *table) end(a *app, empty string) error {
	if t.rows == 0 {
		a.note("%s", empty)
		return nil
	}
	if err := t.w.Flush(); err != nil {
		return failure{err}
	}
	return nil
}

// ago returns a time as people say it.
func (a *app) ago(m *timestamppb.Timestamp) string {
	if m == nil {
		return ""
	}
	d := a.now().Sub(m.AsTime())
	switch {
	case d < 0:
		return "in " + rough(-d)
	case d < time.Second:
		return "now"
	default:
		return rough(d) + " ago"
	}
}

// span returns how long it is since what ago said.
func span(ago string) string {
	if ago == "now" {
		return "0s"
	}
	return strings.TrimSuffix(ago, " ago")
}

// rough returns a duration in its largest unit, or the two largest if the
// second still matters.
func rough(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 10*time.Minute:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < day:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	default:
		return fmt.Sprintf("%dd%02dh", d/day, d%day/time.Hour)
	}
}

// rate returns bits per second rounded to three figures, for measurements.
// Settings are printed exactly instead.
func rate(bps uint64) string { return scaled(float64(bps), "bit/s") }

// size returns bytes rounded to three figures.
func size(n uint64) string { return scaled(float64(n), "B") }

func scaled(v float64, unit string) string {
	for _, prefix := range []string{"", "k", "M", "G", "T"} {
		switch {
		case v < 9.995 && prefix != "":
			return fmt.Sprintf("%.2f %s%s", v, prefix, unit)
		case v < 99.95 && prefix != "":
			return fmt.Sprintf("%.1f %s%s", v, prefix, unit)
		case v < 999.5:
			return fmt.Sprintf("%.0f %s%s", v, prefix, unit)
		}
		v /= 1000
	}
	return fmt.Sprintf("%.0f P%s", v, unit)
}

// delay returns a queueing delay rounded to three figures.
func delay(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d us", d/time.Microsecond)
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	default:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
	}
}

// count returns a number with a word in the right form.
func count[N ~uint32 | ~int | ~uint64](n N, word string) string {
	if n == 1 {
		return fmt.Sprintf("1 %s", word)
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// options returns a direction's settings without its rate.
func options(c engine.Config) string {
	c.Rate, c.Autorate = 0, false
	words := c.Keywords()
	for _, w := range []string{"unlimited ", "bandwidth unlimited "} {
		words = strings.TrimPrefix(words, w)
	}
	return strings.TrimSpace(words)
}

// rateOf returns a direction's rate as it is set.
func rateOf(c engine.Config) string {
	if c.Autorate {
		return exact(c.Rate) + " autorate"
	}
	return exact(c.Rate)
}

// exact returns a rate in its largest unit without losing a digit: 1.5Mbit.
func exact(r engine.BitsPerSecond) string {
	if r == 0 {
		return "unlimited"
	}
	units := []string{"bit", "Kbit", "Mbit", "Gbit"}
	unit, divisor := 0, engine.BitsPerSecond(1)
	for unit+1 < len(units) && r >= divisor*1000 {
		unit, divisor = unit+1, divisor*1000
	}
	text := strconv.FormatUint(uint64(r/divisor), 10)
	if rest := r % divisor; rest != 0 {
		text += "." + strings.TrimRight(fmt.Sprintf("%0*d", 3*unit, rest), "0")
	}
	return text + units[unit]
}
