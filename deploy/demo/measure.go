package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
)

// rates are a plan's, bits/s.
type rates struct{ down, up float64 }

func (r rates) String() string { return fmt.Sprintf("%g/%g Mbit/s", r.down/1e6, r.up/1e6) }

// home is one home with its traffic.
type home struct {
	*homes.Home
	index    int
	router   string   // its id in the fleet
	token    string   // with which its agent joins
	down, up []string // flows
	pings    []string
}

// phase is a stretch of time in which nothing changes, and what was measured.
type phase struct {
	name    string
	rates   rates
	to      time.Time
	results []homes.Result // by home
}

// printTable prints what each router did in each phase.
func printTable(w io.Writer, hs []*home, phases ...*phase) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "router\tphase\tdown\tof rate\tup\tof rate\tdelay median\t99 %\tlongest\tprobes lost\t")
	for i, h := range hs {
		for k, p := range phases {
			name := ""
			if k == 0 {
				name = h.router
			}
			r := p.results[i]
			fmt.Fprintf(t, "%s\t%s\t%.2f Mbit/s\t%.1f %%\t%.2f Mbit/s\t%.1f %%\t%s\t%s\t%s\t%d of %d\t\n", name, p.name,
				r.Down.Goodput/1e6, 100*r.Down.Share(p.rates.down), r.Up.Goodput/1e6, 100*r.Up.Share(p.rates.up),
				ms(r.Latency.Median), ms(r.Latency.P99), ms(r.Latency.Max), r.Latency.Lost, r.Latency.Sent)
		}
	}
	_ = t.Flush() // to standard output
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/1e6) }
