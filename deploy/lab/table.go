package main

import (
	"fmt"
	"io"
	"time"
)

const tableFormat = "%-22s %5s %11s %11s %7s %7s %7s %7s %8s %9s %9s %7s %7s\n"

func printHead(w io.Writer) {
	fmt.Fprintf(w, tableFormat, "configuration", "MIPS", "offered", "goodput", "router", "agent", "idle", "source", "insns", "ping p50", "ping p99", "drops", "marks")
	fmt.Fprintf(w, tableFormat, "", "", "Mbit/s", "Mbit/s", "CPU %", "CPU %", "%", "CPU %", "/packet", "ms", "ms", "/s", "/s")
}

func printLine(w io.Writer, l *line) {
	if l.err != nil {
		fmt.Fprintf(w, "%-22s %5d %v\n", l.name, l.mips, l.err)
		return
	}
	r := l.result
	percent := func(d time.Duration) string { return fmt.Sprintf("%.1f", 100*d.Seconds()/r.Window.Seconds()) }
	both := func(down, up float64) string { return fmt.Sprintf("%.1f/%.1f", down, up) }
	ms := func(d time.Duration) string { return fmt.Sprintf("%.1f", d.Seconds()*1000) }
	agent := "-"
	if l.order.Shaper.Agent() {
		agent = percent(r.Agent)
	}
	insns := r.Router().Seconds() * float64(l.mips) * 1e6 / float64(max(r.Packets(), 1))
	fmt.Fprintf(w, tableFormat, l.name, fmt.Sprint(l.mips),
		both(r.DownOffered.Mbit(r.Window), r.UpOffered.Mbit(r.Window)),
		both(r.DownDelivered.Mbit(r.Window), r.UpDelivered.Mbit(r.Window)),
		percent(r.Router()), agent, percent(r.Soak), percent(r.Source+r.Ping+r.Busy),
		fmt.Sprintf("%.0f", insns), ms(r.Ping50), ms(r.Ping99),
		fmt.Sprintf("%.0f", r.Drops), fmt.Sprintf("%.0f", r.Marks))
}
