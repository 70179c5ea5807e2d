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
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) statsCommand() *cobra.Command {
	var by string
	c := &cobra.Command{
		Use:   "stats ROUTER | stats --by plan",
		Short: "Show a router's statistics as tc prints them, or sums by plan",
		Args: func(c *cobra.Command, args []string) error {
			switch {
			case by == "" && len(args) == 1, by == "plan" && len(args) == 0:
				return nil
			case by != "" && by != "plan":
				return fmt.Errorf("--by %q: must be plan", by)
			default:
				return fmt.Errorf("say one router, or --by plan; see %s --help", c.CommandPath())
			}
		},
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			if by == "plan" {
				return a.statsByPlan(c.Context())
			}
			return a.routerStats(c.Context(), args[0])
		},
	}
	c.Flags().StringVar(&by, "by", "", "sum over the routers of each `group`: plan")
	must(c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"plan"}, cobra.ShellCompDirectiveNoFileComp)))
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
			return failure{errors.Join(err, fmt.Errorf("see cakefleetctl router show %s", id))}
		}
		return err
	}
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
	}
	g := report.Agent
	fmt.Fprintf(out, "\nagent\n cpu %v, %s; memory %s\n", g.CPUTime.Round(time.Millisecond), share(g.CPUTime, report.Uptime), size(g.ResidentBytes))
	fmt.Fprintf(out, " %d.%02d packets a batch; %d passed unshaped, %d lost before the queue\n",
		g.BatchSizeMilli/1000, g.BatchSizeMilli%1000/10, g.BypassedPackets, g.QueueOverflows)
	return nil
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
