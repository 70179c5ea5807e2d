package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// author returns the name of the operator who calls; empty if it is not known.
func author(ctx context.Context) string { return identity.CallerFrom(ctx).Name }

// ListPlanRevisions returns what a plan was.
func (s *PlanService) ListPlanRevisions(ctx context.Context, req *pb.ListPlanRevisionsRequest) (*pb.ListPlanRevisionsResponse, error) {
	all, err := s.store.PlanHistory(ctx, req.GetName())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListPlanRevisionsResponse{}
	for _, p := range all {
		resp.Revisions = append(resp.Revisions, wire.FromPlan(p))
	}
	return resp, nil
}

// RollbackPlan makes a plan what it was at a revision.
func (s *PlanService) RollbackPlan(ctx context.Context, req *pb.RollbackPlanRequest) (*pb.RollbackPlanResponse, error) {
	all, err := s.store.PlanHistory(ctx, req.GetName())
	if err != nil {
		return nil, statusOf(err)
	}
	to := slices.IndexFunc(all, func(p plan.Plan) bool { return int64(p.Revision) == req.GetToRevision() })
	if to < 0 {
		return nil, statusOf(badField("to_revision", fmt.Errorf("plan %s: revision %d is not in its history, which goes back to %d", req.GetName(), req.GetToRevision(), all[len(all)-1].Revision)))
	}
	m := wire.FromPlan(all[to])
	m.Revision = req.GetRevision()
	resp, err := s.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: m, AllowMissing: req.GetRevision() == 0, ValidateOnly: req.GetValidateOnly(), OvertakeRollout: req.GetOvertakeRollout()})
	if err != nil {
		return nil, err
	}
	return &pb.RollbackPlanResponse{Plan: resp.GetPlan(), Changed: resp.GetChanged(), AffectedRouters: resp.GetAffectedRouters()}, nil
}

// tellConflict adds to a conflict who changed what since the revision that the
// caller had seen, as far as that is known.
func (s *PlanService) tellConflict(ctx context.Context, name string, err error) error {
	e, ok := errors.AsType[*store.Error](err)
	if !ok || !errors.Is(err, store.ErrConflict) {
		return err
	}
	all, failed := s.store.PlanHistory(ctx, name)
	if failed != nil {
		return err // which says enough
	}
	seen := slices.IndexFunc(all, func(p plan.Plan) bool { return p.Revision == e.Want })
	if seen < 1 {
		return err
	}
	var who []string
	for _, p := range all[:seen] {
		if p.Author != "" && !slices.Contains(who, p.Author) {
			who = append(who, p.Author)
		}
	}
	var what []string
	for _, c := range plan.Diff(all[seen].Link, all[0].Link) {
		what = append(what, c.String())
	}
	if len(what) == 0 {
		what = []string{"nothing in the end"}
	}
	by := ""
	if len(who) > 0 {
		by = strings.Join(who, " and ") + " changed "
	} else {
		by = "changed: "
	}
	return fmt.Errorf("%w; %s%s", err, by, strings.Join(what, ", "))
}
