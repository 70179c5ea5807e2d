package ctl

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) statsCommand() *cobra.Command {
	var (
		by string
		w  window
	)
	c := &cobra.Command{
		Use:   "stats ROUTER | stats --by plan|site|model|version|all|LABEL [--last 24h]",
		Short: "Show a router's statistics as tc prints them, or how groups of routers feel",
		Long: `Show a router's statistics as tc prints them, or how groups of routers feel.

  cakefleetctl stats home-1                               what tc -s qdisc prints
  cakefleetctl stats --by plan                            sums of now
  cakefleetctl stats --by plan --last 24h                 percentiles over all packets
  cakefleetctl stats --by site --last 24h --step 1h       over time; --csv, --plot FILE.svg
  cakefleetctl stats --by plan --group gold --around 20:15   before and after a change
  cakefleetctl stats --by plan --last 24h --probe         the delay to a host, idle and loaded

Percentiles are those of all packets of all routers of a group, within 12.5 %.
LABEL is a label of subscribers that the controller was told to sum by.

The delay to a host is measured where the controller (--probe-host), the
subscriber's label probe=HOST or the router's own --probe asks for it; the label
probe=off spares a subscriber. A direction counts as loaded from half its rate
on. To compare before and after, measure for a while with a plan whose rates are
0, which shapes nothing, and then with the plan:

  cakefleetctl subscriber set 10001 --label probe=192.0.2.1`,
		Args: func(c *cobra.Command, args []string) error {
			switch {
			case by == "" && w.given():
				return errors.New("flags about the past are for groups: say --by plan, site, model, version, all or a label")
			case (by == "") != (len(args) == 1):
				return fmt.Errorf("say one router, or --by GROUP; see %s --help", c.CommandPath())
			default:
				return nil
			}
		},
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case by == "plan" && !w.given():
				return a.statsByPlan(c.Context())
			case by != "":
				return a.statsOver(c.Context(), by, &w)
			default:
				return a.routerStats(c.Context(), args[0])
			}
		},
	}
	c.Flags().StringVar(&by, "by", "", "group routers by `what`: plan, site, model, version, all, or a label")
	must(c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"plan", "site", "model", "version", "all"}, cobra.ShellCompDirectiveNoFileComp)))
	w.define(c)
	return c
}

func (a *app) routerStats(ctx context.Context, id string) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	resp, err := call(ctx, a, conn.telemetry.GetRouterStats, &pb.GetRouterStatsRequest{RouterId: id})
	if err != nil {
		if isCode(err, codes.NotFound) {
			see := "router show " + id // it has not reported
			if _, e := call(ctx, a, conn.routers.GetRouter, &pb.GetRouterRequest{Id: id}); isCode(e, codes.NotFound) {
				see = "router list"
			}
			return failure{errors.Join(err, errors.New("see cakefleetctl "+see))}
		}
		return err
	}
	a.silent(resp.GetSilentControllers())
	if a.output == "json" {
		return a.printJSON(resp)
	}
	report, err := wire.ToReport(resp.GetReport())
	if err != nil {
		return failure{fmt.Errorf("report of %s: %w", id, err)}
	}
	out := a.cfg.Stdout
	head := fmt.Sprintf("router %s, reported %s, agent up %s", id, a.ago(resp.GetReceivedTime()), rough(report.Uptime))
	if !resp.GetConnected() {
		head += ", NOT CONNECTED"
	}
	fmt.Fprintln(out, head)
	for _, d := range []struct {
		name, handle string
		stats        *engine.Stats
	}{{"download", "1:", report.Down}, {"upload", "2:", report.Up}} {
		fmt.Fprintf(out, "\n%s\n", d.name)
		if d.stats == nil {
			fmt.Fprintln(out, " not shaped")
			continue
		}
		if _, err := out.Write(d.stats.AppendText(nil, engine.Header{Handle: d.handle})); err != nil {
			return failure{err}
		}
		a.printSojourn(d.stats)
	}
	a.printDelays(&report)
	a.printLink(report.WAN)
	g := report.Agent
	fmt.Fprintf(out, "\nagent\n cpu %v, %s; memory %s\n", g.CPUTime.Round(time.Millisecond), share(g.CPUTime, report.Uptime), size(g.ResidentBytes))
	fmt.Fprintf(out, " %d.%02d packets a batch; %d passed unshaped, %d of them as the queue was full\n",
		g.BatchSizeMilli/1000, g.BatchSizeMilli%1000/10, g.BypassedPackets, g.QueueOverflows)
	if g.SkippedReports > 0 {
		fmt.Fprintf(out, " %d reports skipped, as the controller was slow\n", g.SkippedReports)
	}
	return nil
}

// printSojourn prints percentiles where there are any. sch_cake has none, and
// zeros would look like a very good line.
func (a *app) printSojourn(s *engine.Stats) {
	var h engine.Histogram
	for i := range s.Tins[:s.NumTins] {
		h.Merge(&s.Tins[i].Sojourn)
	}
	switch {
	case h.Total() > 0:
		fmt.Fprintf(a.cfg.Stdout, " queueing delay %s\n", quantiles(&h))
	case s.SentPackets > 0:
		fmt.Fprintln(a.cfg.Stdout, " queueing delay: no histogram, as the kernel's cake has none; pk_delay, av_delay and sp_delay above are its averages")
	}
}

// quantiles returns the percentiles of a histogram for people.
func quantiles(h *engine.Histogram) string {
	return fmt.Sprintf("median %s, p90 %s, p99 %s", delay(h.Quantile(1, 2)), delay(h.Quantile(9, 10)), delay(h.Quantile(99, 100)))
}

// printDelays prints the delay that the router measured, if it did.
func (a *app) printDelays(r *plan.Report) {
	p := r.Probe
	if p == nil {
		return
	}
	out := a.cfg.Stdout
	loaded := p.Loaded()
	fmt.Fprintf(out, "\ndelay to %s: idle %s, loaded %s\n", host(p), median(&p.Idle), median(&loaded))
	for _, d := range []struct {
		name string
		of   *plan.ProbeDelay
	}{{"idle", &p.Idle}, {"light load", &p.Light}, {"download loaded", &p.Down}, {"upload loaded", &p.Up}, {"both loaded", &p.Both}} {
		n := d.of.Delay.Total()
		if n+d.of.Lost == 0 {
			continue
		}
		fmt.Fprintf(out, " %-16s", d.name)
		if n > 0 {
			fmt.Fprintf(out, "%s; ", quantiles(&d.of.Delay))
		}
		fmt.Fprintf(out, "%d answered, %d lost\n", n, d.of.Lost)
	}
	if p.Error != "" {
		fmt.Fprintf(out, " not measured at the moment: %s\n", p.Error)
	}
}

// host returns the host that was measured, with its address if it has a name.
func host(p *plan.ProbeStats) string {
	if p.Address == "" || p.Address == p.Host {
		return p.Host
	}
	return fmt.Sprintf("%s (%s)", p.Host, p.Address)
}

// median returns the median delay for people.
func median(d *plan.ProbeDelay) string {
	if d.Delay.Total() == 0 {
		return "not measured yet"
	}
	return delay(d.Delay.Quantile(1, 2))
}

// printLink prints the state of the shaped interface, if it is known.
func (a *app) printLink(l *plan.LinkState) {
	if l == nil {
		return
	}
	out := a.cfg.Stdout
	fmt.Fprintf(out, "\ninterface %s: ", l.Name)
	switch {
	case l.Index == 0:
		fmt.Fprint(out, "it is not there")
	case !l.Up:
		fmt.Fprint(out, "down")
	case !l.Carrier:
		fmt.Fprintf(out, "up, no carrier, MTU %d", l.MTU)
	default:
		fmt.Fprintf(out, "up, MTU %d", l.MTU)
		if l.Speed > 0 {
			fmt.Fprintf(out, ", speed %s", l.Speed)
		}
	}
	fmt.Fprintf(out, "\n since the agent started: carrier lost %s, made anew %s\n", times(l.CarrierLosses), times(l.Comings))
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// share returns CPU time as a part of one core.
func share(cpu, uptime time.Duration) string {
	if uptime <= 0 {
		return "0 % of a core"
	}
	return fmt.Sprintf("%.2g %% of a core on average", float64(cpu)/float64(uptime)*100)
}

func (a *app) statsByPlan(ctx context.Context) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	resp, err := call(ctx, a, conn.telemetry.ListPlanStats, &pb.ListPlanStatsRequest{})
	if err != nil {
		return err
	}
	a.silent(resp.GetSilentControllers())
	if a.output == "json" {
		return a.printJSON(resp)
	}
	t := a.table("PLAN", "ROUTERS", "UP", "IN SYNC", "WAY", "RATE", "SHAPED TO", "SENT", "DROPS", "MARKS", "DELAY P50", "P99")
	for _, p := range resp.GetPlans() {
		name := p.GetPlan()
		if name == "" {
			name = "(none)"
		}
		lead := []string{name, u32(p.GetRouters()), u32(p.GetConnected()), u32(p.GetInSync())}
		for _, d := range []struct {
			name string
			sums *pb.DirectionSums
		}{{"down", p.GetDown()}, {"up", p.GetUp()}} {
			h, err := wire.ToHistogram(d.sums.GetSojourn())
			if err != nil {
				return failure{err}
			}
			p50, p99 := "", ""
			if h.Total() > 0 {
				p50, p99 = delay(h.Quantile(1, 2)), delay(h.Quantile(99, 100))
			}
			t.row(append(lead[:4:4], d.name, rate(d.sums.GetRateBps()), rate(d.sums.GetCapacityBps()), size(d.sums.GetSentBytes()),
				percent(d.sums.GetDrops(), d.sums.GetSentPackets()+d.sums.GetDrops()), percent(d.sums.GetMarks(), d.sums.GetSentPackets()), p50, p99)...)
			lead = []string{" ", " ", " ", " "}
		}
	}
	return t.end(a, "no plans yet")
}

// percent returns a count with its part of all.
func percent(n, of uint64) string {
	if n == 0 || of == 0 {
		return strconv.FormatUint(n, 10)
	}
	return fmt.Sprintf("%d (%.2g %%)", n, float64(n)/float64(of)*100)
}
