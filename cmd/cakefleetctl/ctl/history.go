package ctl

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) planHistory() *cobra.Command {
	return &cobra.Command{
		Use:               "history NAME",
		Short:             "Show what a plan was, who changed it, and what",
		Args:              exactly("NAME"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			resp, err := a.revisions(c.Context(), args[0])
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			t := a.table("REVISION", "CHANGED", "BY", "WHAT")
			all := resp.GetRevisions()
			for i, m := range all {
				p, err := wire.ToPlan(m)
				if err != nil {
					return failure{err}
				}
				what := fmt.Sprintf("down.rate %v, up.rate %v", p.Link.Down.Rate, p.Link.Up.Rate)
				if i+1 < len(all) {
					before, err := wire.ToPlan(all[i+1])
					if err != nil {
						return failure{err}
					}
					what = changesText(plan.Diff(before.Link, p.Link))
				}
				t.row(strconv.FormatInt(int64(p.Revision), 10), a.ago(m.GetUpdateTime()), orDash(p.Author), what)
			}
			return t.end(a, "")
		},
	}
}

func changesText(changes []plan.FieldChange) string {
	if len(changes) == 0 {
		return "nothing"
	}
	words := make([]string, len(changes))
	for i, c := range changes {
		words[i] = c.String()
	}
	return strings.Join(words, ", ")
}

func (a *app) revisions(ctx context.Context, name string) (*pb.ListPlanRevisionsResponse, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	return call(ctx, a, conn.plans.ListPlanRevisions, &pb.ListPlanRevisionsRequest{Name: name})
}

func (a *app) planDiff() *cobra.Command {
	return &cobra.Command{
		Use:   "diff A B",
		Short: "Show in which fields two plans, or two revisions of one, differ",
		Long: `Show in which fields two plans differ. Each is NAME for the plan as it is, or
NAME@REVISION for what it was (see plan history).

  cakefleetctl plan diff gold@1234 gold`,
		Args:              exactly("A", "B"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			var links [2]plan.Link
			for i, arg := range args {
				p, err := a.planAt(c.Context(), arg)
				if err != nil {
					return err
				}
				links[i] = p.Link
			}
			changes := plan.Diff(links[0], links[1])
			if a.output == "json" {
				return a.printJSONText(diffJSON(changes))
			}
			t := a.table("FIELD", args[0], args[1])
			for _, d := range changes {
				t.row(d.Field, d.Before, d.After)
			}
			return t.end(a, args[0]+" and "+args[1]+" are the same")
		},
	}
}

func diffJSON(changes []plan.FieldChange) []byte {
	b := []byte("[")
	for i, d := range changes {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"field":%q,"before":%q,"after":%q}`, d.Field, d.Before, d.After)
	}
	return append(b, ']')
}

// planAt returns the plan that NAME or NAME@REVISION stands for.
func (a *app) planAt(ctx context.Context, arg string) (plan.Plan, error) {
	name, at, old := strings.Cut(arg, "@")
	if !old {
		conn, err := a.connect()
		if err != nil {
			return plan.Plan{}, err
		}
		resp, err := call(ctx, a, conn.plans.GetPlan, &pb.GetPlanRequest{Name: name})
		if err != nil {
			return plan.Plan{}, err
		}
		return wire.ToPlan(resp.GetPlan())
	}
	revision, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return plan.Plan{}, fmt.Errorf("%q: must be NAME or NAME@REVISION", arg)
	}
	resp, err := a.revisions(ctx, name)
	if err != nil {
		return plan.Plan{}, err
	}
	for _, m := range resp.GetRevisions() {
		if m.GetRevision() == revision {
			return wire.ToPlan(m)
		}
	}
	return plan.Plan{}, failure{fmt.Errorf("plan %s has no revision %d in its history: see cakefleetctl plan history %s", name, revision, name)}
}

func (a *app) planRollback() *cobra.Command {
	var to int64
	var dryRun, overtake bool
	var wait waitFlags
	c := &cobra.Command{
		Use:               "rollback NAME --to REVISION [--dry-run]",
		Short:             "Make a plan what it was at a revision",
		Long:              "Make a plan what it was at a revision (see plan history). That is a new revision,\nand can be rolled back as well.",
		Args:              exactly("NAME"),
		ValidArgsFunction: a.complete(planNames),
		RunE: func(c *cobra.Command, args []string) error {
			if to <= 0 {
				return errors.New("say which revision: --to REVISION")
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.plans.RollbackPlan, &pb.RollbackPlanRequest{Name: args[0], ToRevision: to, ValidateOnly: dryRun, OvertakeRollout: overtake})
			if err != nil {
				return err
			}
			m := resp.GetPlan()
			switch {
			case a.output == "json":
				if err := a.printJSON(resp); err != nil {
					return err
				}
			case !resp.GetChanged():
				fmt.Fprintf(a.cfg.Stdout, "plan %s: nothing changes, it is so already (revision %d)\n", args[0], m.GetRevision())
			case dryRun:
				fmt.Fprintf(a.cfg.Stdout, "plan %s would be what it was at revision %d: %s affected; nothing is stored (dry run)\n", args[0], to, count(resp.GetAffectedRouters(), "router"))
			default:
				fmt.Fprintf(a.cfg.Stdout, "plan %s is what it was at revision %d: revision %d, %s affected\n", args[0], to, m.GetRevision(), count(resp.GetAffectedRouters(), "router"))
			}
			if !resp.GetChanged() || dryRun || resp.GetAffectedRouters() == 0 {
				return nil
			}
			return a.await(c.Context(), wait, began, target{revision: m.GetRevision(), routers: resp.GetAffectedRouters(), list: a.routersOfPlan(args[0])})
		},
	}
	c.Flags().Int64Var(&to, "to", 0, "`revision` to go back to")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only tell what would change")
	c.Flags().BoolVar(&overtake, "overtake-rollout", false, "also if a rollout changes the plan: it ends, and all routers get this at once")
	wait.add(c.Flags(), false)
	return c
}
