package ctl_test

import (
	"context"
	"maps"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// edit changes the layers of a subscriber.
func (f *fleet) edit(id string, change func(*pb.Layers)) (*pb.Subscriber, error) {
	for _, s := range f.subscribers {
		if s.Id != id {
			continue
		}
		if s.Layers == nil {
			s.Layers = &pb.Layers{}
		}
		change(s.Layers)
		f.revision++
		s.Revision, s.UpdateTime = f.revision, before(0)
		return s, nil
	}
	return nil, status.Errorf(codes.NotFound, "subscriber %s: not found", id)
}

func (f *fleet) SetOverride(_ context.Context, r *pb.SetOverrideRequest) (*pb.SetOverrideResponse, error) {
	s, err := f.edit(r.Id, func(l *pb.Layers) {
		if r.ClearAll || l.Override == nil {
			l.Override = map[string]string{}
		}
		for _, name := range r.Clear {
			delete(l.Override, name)
		}
		maps.Copy(l.Override, r.Set)
	})
	return &pb.SetOverrideResponse{Subscriber: s, Changed: true}, err
}

func (f *fleet) StartBoost(_ context.Context, r *pb.StartBoostRequest) (*pb.StartBoostResponse, error) {
	s, err := f.edit(r.Id, func(l *pb.Layers) {
		l.Boost, l.BoostEnd = r.Set, timestamppb.New(noon.Add(r.Duration.AsDuration()))
	})
	return &pb.StartBoostResponse{Subscriber: s, Changed: true}, err
}

func (f *fleet) EndBoost(_ context.Context, r *pb.EndBoostRequest) (*pb.EndBoostResponse, error) {
	s, err := f.edit(r.Id, func(l *pb.Layers) { l.Boost, l.BoostEnd = nil, nil })
	return &pb.EndBoostResponse{Subscriber: s}, err
}

func (f *fleet) SuspendSubscriber(_ context.Context, r *pb.SuspendSubscriberRequest) (*pb.SuspendSubscriberResponse, error) {
	if r.Policy == "slow" {
		return nil, status.Error(codes.FailedPrecondition, "subscriber 10001: plan slow does not exist")
	}
	s, err := f.edit(r.Id, func(l *pb.Layers) { l.Suspension = r.Policy })
	return &pb.SuspendSubscriberResponse{Subscriber: s, Changed: true}, err
}

func (f *fleet) ResumeSubscriber(_ context.Context, r *pb.ResumeSubscriberRequest) (*pb.ResumeSubscriberResponse, error) {
	s, err := f.edit(r.Id, func(l *pb.Layers) { l.Suspension, l.BillingSuspension = "", "tarpit" })
	return &pb.ResumeSubscriberResponse{Subscriber: s, Changed: true}, err
}

// ListPlanRevisions has two revisions of every plan.
func (f *fleet) ListPlanRevisions(_ context.Context, r *pb.ListPlanRevisionsRequest) (*pb.ListPlanRevisionsResponse, error) {
	was := plan.Plan{Name: r.Name, Link: plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}, Revision: 7, Updated: noon.AddDate(0, 0, -2)}
	was.Link.Down.Rate, was.Link.Up.Rate = 100_000_000, 10_000_000
	is := was
	is.Link.Down.Rate, is.Link.Up.Wash, is.Revision, is.Updated, is.Author = 200_000_000, true, 9, noon.AddDate(0, 0, -1), "bob"
	return &pb.ListPlanRevisionsResponse{Revisions: []*pb.Plan{wire.FromPlan(is), wire.FromPlan(was)}}, nil
}

func (f *fleet) RollbackPlan(ctx context.Context, r *pb.RollbackPlanRequest) (*pb.RollbackPlanResponse, error) {
	all, _ := f.ListPlanRevisions(ctx, &pb.ListPlanRevisionsRequest{Name: r.Name})
	for _, p := range all.Revisions {
		if p.Revision == r.ToRevision {
			return &pb.RollbackPlanResponse{Plan: p, Changed: true, AffectedRouters: 3}, nil
		}
	}
	return nil, status.Errorf(codes.InvalidArgument, "plan %s: revision %d is not in its history, which goes back to 7", r.Name, r.ToRevision)
}
