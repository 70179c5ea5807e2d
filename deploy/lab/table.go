package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

const tableFormat = "%-22s %5s %11s %11s %7s %7s %7s %7s %8s %9s %9s %7s %7s\n"

func printHead(w io.Writer) {
	fmt.Fprintf(w, tableFormat, "configuration", "MIPS", "offered", "goodput", "router", "agent", "idle", "lab's", "insns", "ping p50", "ping p99", "drops", "marks")
	fmt.Fprintf(w, tableFormat, "", "", "Mbit/s", "Mbit/s", "CPU %", "CPU %", "%", "CPU %", "/packet", "ms", "ms", "/s", "/s")
}

func printLine(w io.Writer, l *line) {
	switch r := l.result; {
	case l.err != nil:
		fmt.Fprintf(w, "%-22s %5d %v\n", l.name, l.mips, l.err)
	case l.order.Kind == "idle":
		fmt.Fprintf(w, "%-22s %5d without traffic: %.1f MB resident, %.2f %% CPU, its threads woken %.2f times a second, %d reports in %.0f s\n",
			l.name, l.mips, float64(r.AgentRSS)/1e6, percentOf(r, r.Agent), wakes(r), r.Reports, r.Window.Seconds())
	case l.order.Kind == "monitor":
		fmt.Fprintf(w, "%-22s %5d wakes %.0f times a second while a goroutine runs, %.0f without the mend of runtime.usleep\n",
			l.name, l.mips, r.MonitorWakes[1], r.MonitorWakes[0])
	default:
		printTraffic(w, l)
	}
}

func printTraffic(w io.Writer, l *line) {
	r := l.result
	percent := func(d time.Duration) string { return fmt.Sprintf("%.1f", percentOf(r, d)) }
	both := func(down, up row.Count) string {
		return fmt.Sprintf("%.1f/%.1f", down.Mbit(r.Window), up.Mbit(r.Window))
	}
	ms := func(d time.Duration) string { return fmt.Sprintf("%.1f", d.Seconds()*1000) }
	agent := "-"
	if l.order.Shaper.Agent() {
		agent = percent(r.Agent)
	}
	fmt.Fprintf(w, tableFormat, l.name, fmt.Sprint(l.mips),
		both(r.DownOffered, r.UpOffered), both(r.DownDelivered, r.UpDelivered),
		percent(r.Router()), agent, percent(r.Soak), percent(r.Source+r.Ping+r.Busy),
		fmt.Sprintf("%.0f", instructions(l)), ms(r.Ping50), ms(r.Ping99),
		fmt.Sprintf("%.0f", r.Drops), fmt.Sprintf("%.0f", r.Marks))
}

// wakes is how often a second the agent's threads were switched to.
func wakes(r *row.Result) float64 { return float64(r.AgentSwitches) / r.Window.Seconds() }

func percentOf(r *row.Result, d time.Duration) float64 { return 100 * d.Seconds() / r.Window.Seconds() }

// instructions that the router executed for each packet it was given.
func instructions(l *line) float64 {
	return l.result.Router().Seconds() * float64(l.mips) * 1e6 / float64(max(l.result.Packets(), 1))
}

// What must hold.
const (
	mustIdle    = 5.0 // per cent, of agent userspace at 500 MIPS
	mustNear    = 2.0 // per cent of CPU between agent kernel and cake
	mustPing    = 25 * time.Millisecond
	mustMonitor = 200.0 // wakes a second

	// Of the agent without traffic, in a session with one report each 10 s.
	mustResident = 14_000_000 // bytes
	mustRest     = 1.0        // per cent of CPU
	mustWakes    = 2.0        // a second
)

// errMissed means that the project's own bounds are not kept.
var errMissed = errors.New("a bound is missed")

// judge compares the lines with what must hold, as far as they are there.
func judge(w io.Writer, ls []*line) error {
	var err error
	say := func(ok bool, format string, args ...any) {
		word := "kept  "
		if !ok {
			word, err = "MISSED", errMissed
		}
		fmt.Fprintf(w, "%s %s\n", word, fmt.Sprintf(format, args...))
	}
	find := func(name string, mips int) *row.Result {
		for _, l := range ls {
			if l.name == name && l.mips == mips && l.err == nil {
				return l.result
			}
		}
		return nil
	}
	for _, mips := range speeds {
		kernel, cake := find("agent kernel", mips), find("cake", mips)
		if kernel != nil && cake != nil {
			k, c := percentOf(kernel, kernel.Router()), percentOf(cake, cake.Router())
			say(k-c <= mustNear, "%d MIPS: agent kernel costs %.1f %%, cake set by hand %.1f %%", mips, k, c)
		}
	}
	for _, l := range ls {
		if l.err != nil || l.extra {
			continue
		}
		r := l.result
		switch {
		case l.order.Kind == "idle":
			want := int(r.Window/(10*time.Second)) - 1
			say(r.Reports >= want, "%s: the controller got %d reports in %.0f s, at least %d", l.name, r.Reports, r.Window.Seconds(), want)
			say(r.AgentRSS <= mustResident, "%s: %.1f MB resident, at most %.1f", l.name, float64(r.AgentRSS)/1e6, mustResident/1e6)
			say(percentOf(r, r.Agent) < mustRest, "%s: %.2f %% CPU, less than %.0f", l.name, percentOf(r, r.Agent), mustRest)
			say(wakes(r) <= mustWakes, "%s: its threads are woken %.2f times a second, at most %.0f", l.name, wakes(r), mustWakes)
		case l.order.Kind == "monitor":
			say(r.MonitorWakes[1] <= mustMonitor, "the runtime's monitor wakes %.0f times a second", r.MonitorWakes[1])
		case l.order.Kind == "traffic" && l.order.Shaper == row.Userspace && l.mips == 500:
			idle := percentOf(r, r.Soak)
			say(held(&l.order, r) && idle >= mustIdle, "500 MIPS: agent userspace delivers %.1f/%.1f Mbit/s with %.1f %% idle",
				r.DownDelivered.Mbit(r.Window), r.UpDelivered.Mbit(r.Window), idle)
			fallthrough
		case l.order.Kind == "traffic" && l.order.Shaper == row.Kernel && l.mips == 500:
			say(r.Ping99 <= mustPing, "500 MIPS: %s: 99 of 100 pings take at most %.1f ms", l.name, r.Ping99.Seconds()*1000)
		}
	}
	return err
}
