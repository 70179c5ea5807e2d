package api

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// attempts is how often a change without a revision is made anew from what is
// stored when somebody else was faster.
const attempts = 8

// PlanService keeps the plans.
type PlanService struct {
	pb.UnimplementedPlanServiceServer
	store *store.Store
}

// NewPlanService returns the service on s.
func NewPlanService(s *store.Store) *PlanService { return &PlanService{store: s} }

// GetPlan returns one plan.
func (s *PlanService) GetPlan(_ context.Context, req *pb.GetPlanRequest) (*pb.GetPlanResponse, error) {
	m := s.message(req.GetName())
	if m == nil {
		return nil, statusOf(&store.Error{Kind: store.KindPlan, ID: req.GetName(), Err: store.ErrNotFound})
	}
	return &pb.GetPlanResponse{Plan: m}, nil
}

// ListPlans returns a page of plans.
func (s *PlanService) ListPlans(_ context.Context, req *pb.ListPlansRequest) (*pb.ListPlansResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListPlansResponse{}
	s.store.View(func(st *store.State) {
		resp.Plans, resp.NextPageToken = collect(p, st.Plans(p.after),
			func(p plan.Plan) string { return p.Name }, nil,
			func(p plan.Plan) *pb.Plan { return planMessage(st, p) })
	})
	return resp, nil
}

// CreatePlan adds a plan.
func (s *PlanService) CreatePlan(ctx context.Context, req *pb.CreatePlanRequest) (*pb.CreatePlanResponse, error) {
	p, err := wire.ToPlan(req.GetPlan())
	if err != nil {
		return nil, statusOf(badField("plan", err))
	}
	p.Author = author(ctx)
	if p, err = s.store.PutPlan(ctx, p, 0); err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreatePlanResponse{Plan: s.stored(p)}, nil
}

// UpdatePlan changes the fields in the mask.
func (s *PlanService) UpdatePlan(ctx context.Context, req *pb.UpdatePlanRequest) (*pb.UpdatePlanResponse, error) {
	if req.GetPlan() == nil {
		return nil, statusOf(badField("plan", errors.New("plan is missing")))
	}
	expect := plan.Revision(req.GetPlan().GetRevision())
	for try := 1; ; try++ {
		resp, err := s.updatePlan(ctx, req, expect)
		// Without a revision the caller wants the fields changed, whatever
		// else somebody changes at the same time.
		raced := errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrExists) || errors.Is(err, store.ErrNotFound) && req.GetAllowMissing()
		if expect == 0 && raced && try < attempts {
			continue
		}
		return resp, statusOf(s.tellConflict(ctx, req.GetPlan().GetName(), err))
	}
}

func (s *PlanService) updatePlan(ctx context.Context, req *pb.UpdatePlanRequest, expect plan.Revision) (*pb.UpdatePlanResponse, error) {
	name := req.GetPlan().GetName()
	var current plan.Plan
	var exists bool
	resp := &pb.UpdatePlanResponse{}
	s.store.View(func(st *store.State) {
		current, exists = st.Plan(name)
		resp.AffectedRouters = uint32(st.CountRouters(name))
	})
	switch {
	case !exists && (!req.GetAllowMissing() || expect != 0):
		return nil, &store.Error{Kind: store.KindPlan, ID: name, Err: store.ErrNotFound}
	case !exists:
		current.Name = name
		current.Link = plan.DefaultLink()
	case expect != 0 && expect != current.Revision:
		return nil, &store.Error{Kind: store.KindPlan, ID: name, Err: store.ErrConflict, Want: expect, Have: current.Revision, Updated: current.Updated}
	}
	next, err := merge(current, req.GetPlan(), req.GetUpdateMask().GetPaths())
	if err != nil {
		return nil, err
	}
	if err := next.Validate(); err != nil {
		return nil, badField("plan", err)
	}
	resp.Changed = !exists || next.Link != current.Link
	if !resp.Changed {
		resp.AffectedRouters = 0
	}
	if resp.Changed && exists && !req.GetOvertakeRollout() {
		if err := s.free(name, current.Revision); err != nil {
			return nil, err
		}
	}
	if resp.Changed && !req.GetValidateOnly() {
		next.Author = author(ctx)
		if next, err = s.store.PutPlan(ctx, next, current.Revision); err != nil {
			return nil, err
		}
	}
	resp.Plan = s.stored(next)
	return resp, nil
}

// free returns an error if a rollout changes a plan, which the change of it
// would end.
func (s *PlanService) free(name string, rev plan.Revision) (err error) {
	s.store.View(func(st *store.State) {
		for l := range st.Rollouts("") {
			if l.Active() && l.Base == rev && l.Selector.Plan == name {
				err = fmt.Errorf("plan %s: %w: rollout %s changes it and has not ended; end that, or say that it is to be overtaken (overtake_rollout, with cakefleetctl --overtake-rollout), so that all routers get this at once", name, errBusyRouters, l.ID)
			}
		}
	})
	return err
}

// DeletePlan removes a plan, and moves its subscribers to the replacement.
func (s *PlanService) DeletePlan(ctx context.Context, req *pb.DeletePlanRequest) (*pb.DeletePlanResponse, error) {
	moved, err := s.store.DeletePlan(ctx, req.GetName(), req.GetReplacement(), expectation(req.GetRevision()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeletePlanResponse{MovedSubscribers: uint32(moved)}, nil
}

// message returns the message of a stored plan; nil if there is none.
func (s *PlanService) message(name string) (m *pb.Plan) {
	s.store.View(func(st *store.State) {
		if p, ok := st.Plan(name); ok {
			m = planMessage(st, p)
		}
	})
	return m
}

// stored returns the message of a plan that need not be the stored one.
func (s *PlanService) stored(p plan.Plan) (m *pb.Plan) {
	s.store.View(func(st *store.State) { m = planMessage(st, p) })
	return m
}

func planMessage(st *store.State, p plan.Plan) *pb.Plan {
	m := wire.FromPlan(p)
	m.Subscribers = uint32(st.CountSubscribers(p.Name))
	m.Routers = uint32(st.CountRouters(p.Name))
	return m
}

// expectation returns what a revision in a request to delete means.
func expectation(revision int64) plan.Revision {
	if revision == 0 {
		return store.Any
	}
	return plan.Revision(revision)
}

// merge returns the current plan with the fields of the paths taken from m;
// no paths mean the whole link.
func merge(current plan.Plan, m *pb.Plan, paths []string) (plan.Plan, error) {
	if len(paths) == 0 {
		paths = []string{"link"}
	}
	merged := wire.FromPlan(current)
	for _, path := range paths {
		if len(paths) > 1 && (path == "name" || path == "revision") {
			continue // they say which plan is meant, and REST finds them in the body too
		}
		if path != "link" && !strings.HasPrefix(path, "link.") {
			return plan.Plan{}, badField("update_mask", fmt.Errorf("update mask: %q can't be changed; link and what is in it can", path))
		}
		if err := copyPath(merged.ProtoReflect(), m.ProtoReflect(), path); err != nil {
			return plan.Plan{}, badField("update_mask", err)
		}
	}
	next, err := wire.ToPlan(merged)
	if err != nil {
		return plan.Plan{}, badField("plan", err)
	}
	return next, nil
}

// copyPath sets the field at path in to as it is in from, which may be unset.
func copyPath(to, from protoreflect.Message, path string) error {
	name, rest, deeper := strings.Cut(path, ".")
	field := to.Descriptor().Fields().ByName(protoreflect.Name(name))
	if field == nil {
		return fmt.Errorf("update mask: %s has no field %q", strings.ToLower(string(to.Descriptor().Name())), name)
	}
	if deeper {
		if field.Message() == nil {
			return fmt.Errorf("update mask: field %q has no fields", name)
		}
		return copyPath(to.Mutable(field).Message(), from.Get(field).Message(), rest)
	}
	if !from.Has(field) {
		to.Clear(field)
		return nil
	}
	v := from.Get(field)
	if field.Message() != nil {
		v = protoreflect.ValueOfMessage(proto.Clone(v.Message().Interface()).ProtoReflect())
	}
	to.Set(field, v)
	return nil
}
