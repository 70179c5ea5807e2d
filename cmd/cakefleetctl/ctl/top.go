package ctl

import (
	"encoding/csv"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// worstWords are how operators say the ways to suffer.
var worstWords = map[string]pb.WorstBy{
	"delay":      pb.WorstBy_WORST_BY_DELAY,
	"drops":      pb.WorstBy_WORST_BY_DROPS,
	"saturation": pb.WorstBy_WORST_BY_SATURATION,
}

func (a *app) topCommand() *cobra.Command {
	req := &pb.ListWorstRequest{}
	var (
		by     string
		number int32
		asCSV  bool
	)
	c := &cobra.Command{
		Use:   "top [routers|plans|sites|models|versions|LABEL]",
		Short: "Show who suffers most now",
		Long: `Show who suffers most now, over the last minute.

--by delay orders by the 99th percentile of the delay times the load: who waits,
and how much waits. Then look at one of them:

  cakefleetctl top sites
  cakefleetctl top --site north-3
  cakefleetctl explain home-17`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.FixedCompletions([]string{"routers", "plans", "sites", "models", "versions"}, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(c *cobra.Command, args []string) error {
			kind := "routers"
			if len(args) == 1 {
				kind = args[0]
			}
			req.Kind = kind
			if one, ok := map[string]string{"routers": "router", "plans": "plan", "sites": "site", "models": "model", "versions": "version"}[kind]; ok {
				req.Kind = one
			}
			var ok bool
			if req.By, ok = worstWords[by]; !ok {
				return fmt.Errorf("--by %q: must be delay, drops or saturation", by)
			}
			if number < 1 || number > 1000 {
				return fmt.Errorf("-n %d: must be 1 to 1000", number)
			}
			req.Limit = number
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.telemetry.ListWorst, req)
			if err != nil {
				return err
			}
			a.silent(resp.GetSilentControllers())
			switch {
			case a.output == "json":
				return a.printJSON(resp)
			case asCSV:
				return a.worstCSV(resp)
			default:
				return a.worstTable(req.GetKind(), resp)
			}
		},
	}
	c.Flags().StringVar(&by, "by", "delay", "what is worst: delay (times load), drops or saturation")
	c.Flags().Int32VarP(&number, "number", "n", 20, "how many")
	c.Flags().StringVar(&req.Plan, "plan", "", "only routers with this `plan`")
	c.Flags().StringVar(&req.Site, "site", "", "only routers of this `site`")
	c.Flags().BoolVar(&asCSV, "csv", false, "print as CSV")
	must(c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"delay", "drops", "saturation"}, cobra.ShellCompDirectiveNoFileComp)))
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	return c
}

func (a *app) worstTable(kind string, resp *pb.ListWorstResponse) error {
	const empty = "no router has figures of the last minute that are above 0: nobody suffers, or none reports"
	worst := resp.GetWorst()
	most := 0.0
	for _, w := range worst {
		most = max(most, w.GetFigure())
	}
	if kind == "router" {
		t := a.table("ROUTER", "PLAN", "SITE", "WAY", "RATE", "OF", "P50", "P99", "DROPS/S", "WORST")
		for _, w := range worst {
			t.row(w.GetName(), w.GetPlan(), w.GetSite(), w.GetDirection(), rate(w.GetLoadBps()), rate(w.GetShapedBps()),
				maybeDelay(w.GetSojournP50()), maybeDelay(w.GetSojournP99()), rounded(w.GetDropsPerSecond()), bar(w.GetFigure()/most, 12))
		}
		return t.end(a, empty)
	}
	t := a.table("GROUP", "ROUTERS", "FULL", "WAY", "RATE", "OF", "DROPS/S", "WORST")
	for _, w := range worst {
		t.row(groupName(w.GetName()), u32(w.GetRouters()), u32(w.GetSaturatedRouters()), w.GetDirection(), rate(w.GetLoadBps()), rate(w.GetShapedBps()),
			rounded(w.GetDropsPerSecond()), bar(w.GetFigure()/most, 12))
	}
	return t.end(a, empty)
}

func (a *app) worstCSV(resp *pb.ListWorstResponse) error {
	w := csv.NewWriter(a.cfg.Stdout)
	errs := []error{w.Write([]string{"name", "plan", "site", "direction", "figure", "routers", "saturated_routers", "load_bps", "shaped_bps", "p50_seconds", "p99_seconds", "drops_per_second"})}
	seconds := func(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'g', 6, 64) }
	for _, m := range resp.GetWorst() {
		errs = append(errs, w.Write([]string{
			m.GetName(), m.GetPlan(), m.GetSite(), m.GetDirection(), strconv.FormatFloat(m.GetFigure(), 'g', 6, 64), u32(m.GetRouters()), u32(m.GetSaturatedRouters()),
			strconv.FormatUint(m.GetLoadBps(), 10), strconv.FormatUint(m.GetShapedBps(), 10),
			seconds(m.GetSojournP50().AsDuration()), seconds(m.GetSojournP99().AsDuration()), strconv.FormatFloat(m.GetDropsPerSecond(), 'g', 6, 64),
		}))
	}
	w.Flush()
	if err := errors.Join(append(errs, w.Error())...); err != nil {
		return failure{err}
	}
	return nil
}
