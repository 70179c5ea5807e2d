package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
	"github.com/cakefleet/cakefleet/test/traffic"
)

// rates are a plan's, bits/s.
type rates struct{ down, up float64 }

func (r rates) String() string { return fmt.Sprintf("%g/%g Mbit/s", r.down/1e6, r.up/1e6) }

// home is one home with its traffic.
type home struct {
	*homes.Home
	index    int
	router   string   // its id in the fleet
	down, up []string // flows
	pings    []string
}

// phase is a stretch of time in which nothing changes, and what was measured.
type phase struct {
	name     string
	rates    rates
	from, to time.Time
	results  []result // by home
}

// result is what one home got in a phase.
type result struct {
	down, up float64 // TCP payload that arrived, bits/s
	latency  traffic.Latency
}

// judge works out a phase from the record.
func judge(p *phase, rec *traffic.Record, hs []*home) {
	for _, h := range hs {
		p.results = append(p.results, result{
			down:    rec.Goodput(p.from, p.to, h.down...),
			up:      rec.Goodput(p.from, p.to, h.up...),
			latency: rec.Latency(p.from, p.to, h.pings...),
		})
	}
}

// printTable prints what each router did in each phase.
func printTable(w io.Writer, hs []*home, phases ...*phase) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "router\tphase\tdown\tup\tdelay median\t99 %\tlongest\tprobes lost\t")
	for i, h := range hs {
		for k, p := range phases {
			name := ""
			if k == 0 {
				name = h.router
			}
			r := p.results[i]
			fmt.Fprintf(t, "%s\t%s\t%.2f Mbit/s\t%.2f Mbit/s\t%s\t%s\t%s\t%d of %d\t\n", name, p.name,
				r.down/1e6, r.up/1e6, ms(r.latency.Median), ms(r.latency.P99), ms(r.latency.Max), r.latency.Lost, r.latency.Sent)
		}
	}
	_ = t.Flush() // to standard output
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/1e6) }
