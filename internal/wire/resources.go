package wire

import (
	"fmt"

	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// FromPlan returns the message of p without the numbers that only a controller
// knows.
func FromPlan(p plan.Plan) *pb.Plan {
	return &pb.Plan{Name: p.Name, Link: FromLink(&p.Link), Revision: int64(p.Revision), UpdateTime: FromTime(p.Updated), Author: p.Author}
}

// ToPlan returns the plan of m. The error names the field.
func ToPlan(m *pb.Plan) (plan.Plan, error) {
	link, err := ToLink(m.GetLink())
	if err != nil {
		return plan.Plan{}, fmt.Errorf("plan %s: %w", m.GetName(), err)
	}
	if link == nil {
		return plan.Plan{}, fmt.Errorf("plan %s: link is missing", m.GetName())
	}
	return plan.Plan{Name: m.GetName(), Link: *link, Revision: plan.Revision(m.GetRevision()), Updated: ToTime(m.GetUpdateTime()), Author: m.GetAuthor()}, nil
}

// FromSubscriber returns the message of s without the numbers that only a
// controller knows.
func FromSubscriber(s plan.Subscriber) *pb.Subscriber {
	return &pb.Subscriber{
		Id: s.ID, Plan: s.Plan, Labels: s.Labels, Revision: int64(s.Revision), UpdateTime: FromTime(s.Updated),
		Layers: fromLayers(s.Layers),
	}
}

func fromLayers(l *plan.Layers) *pb.Layers {
	if l == nil {
		return nil
	}
	return &pb.Layers{
		Billing: l.Billing.Words(), BillingSuspension: l.BillingSuspension, Override: l.Override.Words(),
		Boost: l.Boost.Settings.Words(), BoostEnd: FromTime(l.Boost.Until), Suspension: l.Suspension,
	}
}

// ToSubscriber returns the subscriber of m, without the layers: each of them
// has its own call.
func ToSubscriber(m *pb.Subscriber) plan.Subscriber {
	return plan.Subscriber{
		ID:       m.GetId(),
		Plan:     m.GetPlan(),
		Labels:   m.GetLabels(),
		Revision: plan.Revision(m.GetRevision()),
		Updated:  ToTime(m.GetUpdateTime()),
	}
}
