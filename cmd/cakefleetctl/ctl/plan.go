package ctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) planCommand() *cobra.Command {
	return group("plan", "Set and show plans: named rates and shaping options",
		a.planSet(), a.planGet(), a.planList(), a.planDelete(), a.planHistory(), a.planDiff(), a.planRollback())
}

// planFlags are the changes that plan set makes.
type planFlags struct {
	down, up               string
	both, downOnly, upOnly string
	dryRun, overtake       bool
	wait                   waitFlags
}

func (a *app) planSet() *cobra.Command {
	var f planFlags
	c := &cobra.Command{
		Use:   "set NAME [--down RATE] [--up RATE] [--options 'WORDS']",
		Short: "Make a plan or change it, for all its routers at once",
		Long: `Make a plan or change it, for all its routers at once. What is not said stays as
it is; a new plan needs both rates. It starts with tc's defaults, except that the
hosts of a home share the line equally, whatever number of flows each has, also
behind NAT: dual-dsthost nat for the download, dual-srchost nat for the upload.

  cakefleetctl plan set gold --down 115mbit --up 12mbit --options diffserv4
  cakefleetctl plan set gold --down 1.5gbit --dry-run

Rates are numbers with a unit (115mbit, 1.5gbit, 512kbit) or unlimited. Options
are the words of tc-cake(8): ` + engine.KeywordSyntax,
		Args:              exactly("NAME"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			return a.setPlan(c.Context(), args[0], f)
		},
	}
	s := c.Flags()
	s.StringVar(&f.down, "down", "", "`rate` from the provider to the subscriber")
	s.StringVar(&f.up, "up", "", "`rate` from the subscriber to the provider")
	s.StringVar(&f.both, "options", "", "CAKE `words` for both directions")
	s.StringVar(&f.downOnly, "down-options", "", "CAKE `words` for the download")
	s.StringVar(&f.upOnly, "up-options", "", "CAKE `words` for the upload")
	s.BoolVar(&f.dryRun, "dry-run", false, "only tell what would change")
	s.BoolVar(&f.overtake, "overtake-rollout", false, "also if a rollout changes the plan: it ends, and all routers get this at once")
	f.wait.add(s, true)
	return c
}

// change applies the flags to a link. An error is one of the command line.
func (f *planFlags) change(l plan.Link) (plan.Link, error) {
	for _, d := range []struct {
		name, rate, own string
		c               *engine.Config
	}{{"down", f.down, f.downOnly, &l.Down}, {"up", f.up, f.upOnly, &l.Up}} {
		var err error
		if *d.c, err = engine.ParseKeywords(*d.c, f.both); err != nil {
			return l, fmt.Errorf("--options: %w", err)
		}
		if *d.c, err = engine.ParseKeywords(*d.c, d.own); err != nil {
			return l, fmt.Errorf("--%s-options: %w", d.name, err)
		}
		if d.rate != "" {
			if saysRate(f.both) || saysRate(d.own) {
				return l, fmt.Errorf("--%s and a rate in the options: say one of them", d.name)
			}
			if d.c.Rate, err = parseRate(d.rate); err != nil {
				return l, fmt.Errorf("--%s: %w", d.name, err)
			}
		}
	}
	return l, l.Validate()
}

// parseRate reads a rate as people write it: spaces around it and before its
// unit don't count, and bps, which tc takes for bytes, is not taken for either.
func parseRate(text string) (engine.BitsPerSecond, error) {
	words := strings.Fields(text)
	joined := strings.Join(words, "")
	if len(words) > 2 || len(words) == 2 && (words[1][0] < 'A' || strings.ContainsAny(words[0], "bitBIT")) {
		return 0, fmt.Errorf("rate %q: must be one number and its unit", text)
	}
	if unit := strings.ToLower(joined); strings.HasSuffix(unit, "bps") {
		return 0, fmt.Errorf("rate %q: bps is bytes to tc and bits to most people, say it in kbit, mbit or gbit", text)
	}
	return engine.ParseRate(joined)
}

// saysRate returns whether words of options set a rate.
func saysRate(words string) bool {
	return slices.ContainsFunc(strings.Fields(words), func(w string) bool { return w == "bandwidth" || w == "unlimited" })
}

func (a *app) setPlan(ctx context.Context, name string, f planFlags) error {
	// What can be told without a controller is told first.
	fresh := plan.Plan{Name: name, Link: plan.DefaultLink()}
	if err := plan.ValidateName("plan", name); err != nil {
		return err
	}
	var err error
	if fresh.Link, err = f.change(fresh.Link); err != nil {
		return err
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	wanted, before := fresh, (*plan.Plan)(nil)
	old, err := call(ctx, a, conn.plans.GetPlan, &pb.GetPlanRequest{Name: name})
	switch {
	case isCode(err, codes.NotFound):
		if f.down == "" || f.up == "" {
			return fmt.Errorf("plan %s is new: say both --down RATE and --up RATE", name)
		}
	case err != nil:
		return err
	default:
		p, err := wire.ToPlan(old.GetPlan())
		if err != nil {
			return failure{fmt.Errorf("stored %w", err)}
		}
		before, wanted = &p, p
		if wanted.Link, err = f.change(p.Link); err != nil {
			return err
		}
	}
	began := time.Now()
	resp, err := call(ctx, a, conn.plans.UpdatePlan, &pb.UpdatePlanRequest{
		Plan:         wire.FromPlan(wanted),
		AllowMissing: before == nil,
		ValidateOnly: f.dryRun, OvertakeRollout: f.overtake,
	})
	if err != nil {
		return err
	}
	if a.output == "json" {
		if err := a.printJSON(resp); err != nil {
			return err
		}
	} else {
		a.tellPlan(before, wanted, resp, f.dryRun)
	}
	if f.dryRun || !resp.GetChanged() || resp.GetAffectedRouters() == 0 {
		return nil
	}
	return a.await(ctx, f.wait, began, target{
		revision: resp.GetPlan().GetRevision(),
		routers:  resp.GetAffectedRouters(),
		list:     a.routersOfPlan(name),
	})
}

// tellPlan prints what became, or would become, of a plan.
func (a *app) tellPlan(before *plan.Plan, after plan.Plan, resp *pb.UpdatePlanResponse, dryRun bool) {
	did := map[[2]bool]string{{false, false}: "changed", {false, true}: "would change", {true, false}: "made", {true, true}: "would be made"}[[2]bool{before == nil, dryRun}]
	switch {
	case !resp.GetChanged():
		fmt.Fprintf(a.cfg.Stdout, "plan %s: nothing changes, it is so already (revision %d)\n", after.Name, resp.GetPlan().GetRevision())
	case dryRun:
		fmt.Fprintf(a.cfg.Stdout, "plan %s %s, %s affected; nothing is stored\n", after.Name, did, count(resp.GetAffectedRouters(), "router"))
	default:
		fmt.Fprintf(a.cfg.Stdout, "plan %s %s: revision %d, %s affected\n", after.Name, did, resp.GetPlan().GetRevision(), count(resp.GetAffectedRouters(), "router"))
	}
	var was plan.Link
	if before != nil {
		was = before.Link
	}
	for _, d := range []struct {
		name    string
		was, is engine.Config
	}{{"down", was.Down, after.Link.Down}, {"up", was.Up, after.Link.Up}} {
		switch {
		case before == nil:
			fmt.Fprintf(a.cfg.Stdout, "  %-4s  %s  %s\n", d.name, rateOf(d.is), options(d.is))
		case d.was == d.is:
		default:
			if rateOf(d.was) != rateOf(d.is) {
				fmt.Fprintf(a.cfg.Stdout, "  %-4s  %s -> %s\n", d.name, rateOf(d.was), rateOf(d.is))
			}
			if was, is := options(d.was), options(d.is); was != is {
				fmt.Fprintf(a.cfg.Stdout, "  %-4s  %s\n     -> %s\n", d.name, was, is)
			}
		}
	}
}

func (a *app) planGet() *cobra.Command {
	return &cobra.Command{
		Use:               "get NAME",
		Short:             "Show one plan",
		Args:              exactly("NAME"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.plans.GetPlan, &pb.GetPlanRequest{Name: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp.GetPlan())
			}
			m := resp.GetPlan()
			p, err := wire.ToPlan(m)
			if err != nil {
				return failure{err}
			}
			t := a.table("plan", p.Name)
			t.row("down", rateOf(p.Link.Down)+"  "+options(p.Link.Down))
			t.row("up", rateOf(p.Link.Up)+"  "+options(p.Link.Up))
			t.row("reaches", count(m.GetSubscribers(), "subscriber")+", "+count(m.GetRouters(), "router"))
			t.row("revision", strconv.FormatInt(m.GetRevision(), 10)+", "+a.ago(m.GetUpdateTime()))
			return t.end(a, "")
		},
	}
}

func (a *app) planList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show all plans",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := a.listPlans(c.Context())
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListPlansResponse{Plans: all})
			}
			t := a.table("PLAN", "DOWN", "UP", "OPTIONS", "SUBSCRIBERS", "ROUTERS", "CHANGED")
			for _, m := range all {
				p, err := wire.ToPlan(m)
				if err != nil {
					return failure{err}
				}
				down, up := options(p.Link.Down), options(p.Link.Up)
				if down != up {
					down = "down: " + down + "; up: " + up
				}
				t.row(p.Name, rateOf(p.Link.Down), rateOf(p.Link.Up), down, u32(m.GetSubscribers()), u32(m.GetRouters()), a.ago(m.GetUpdateTime()))
			}
			return t.end(a, "no plans yet: make one with cakefleetctl plan set NAME --down RATE --up RATE")
		},
	}
}

func (a *app) listPlans(ctx context.Context) ([]*pb.Plan, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	var all []*pb.Plan
	for token := ""; ; {
		resp, err := call(ctx, a, conn.plans.ListPlans, &pb.ListPlansRequest{PageToken: token})
		if err != nil {
			return nil, err
		}
		all = append(all, resp.GetPlans()...)
		if token = resp.GetNextPageToken(); token == "" {
			return all, nil
		}
	}
}

func (a *app) planDelete() *cobra.Command {
	var replacement string
	c := &cobra.Command{
		Use:               "delete NAME [--replace-with OTHER]",
		Short:             "Remove a plan; its subscribers, if any, get another one",
		Args:              exactly("NAME"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.plans.DeletePlan, &pb.DeletePlanRequest{Name: args[0], Replacement: replacement})
			if isUsedBy(err, "subscriber") && replacement == "" {
				return failure{errors.Join(err, errors.New("say --replace-with OTHER to give them another plan"))}
			}
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "plan %s deleted", args[0])
			if n := resp.GetMovedSubscribers(); n > 0 {
				fmt.Fprintf(a.cfg.Stdout, ", %s moved to %s", count(n, "subscriber"), replacement)
			}
			fmt.Fprintln(a.cfg.Stdout)
			return nil
		},
	}
	c.Flags().StringVar(&replacement, "replace-with", "", "`plan` that its subscribers get instead")
	must(c.RegisterFlagCompletionFunc("replace-with", a.completeFlag(planNames)))
	return c
}

func u32(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
