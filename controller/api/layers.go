package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	// defaultPolicy is the plan whose rates a suspended subscriber gets if
	// nothing else is said.
	defaultPolicy = "slow"

	minBoost = time.Second
	maxBoost = 366 * 24 * time.Hour
)

// edit changes the layers of a subscriber, whatever else somebody changes of it
// at the same time.
func (s *SubscriberService) edit(ctx context.Context, id string, change func(*plan.Layers) error) (m *pb.Subscriber, changed bool, err error) {
	for try := 1; ; try++ {
		var sub plan.Subscriber
		var exists bool
		s.store.View(func(st *store.State) { sub, exists = st.Subscriber(id) })
		if !exists {
			return nil, false, statusOf(&store.Error{Kind: store.KindSubscriber, ID: id, Err: store.ErrNotFound})
		}
		l := sub.EditLayers()
		before := l
		if err := change(&l); err != nil {
			return nil, false, statusOf(err)
		}
		if l == before {
			return s.stored(sub), false, nil
		}
		if !time.Now().Before(l.Boost.Until) {
			l.Boost = plan.Boost{} // it is over and only takes room
		}
		next, err := s.store.PutSubscriber(ctx, sub.WithLayers(l), sub.Revision)
		if err == nil {
			return s.stored(next), true, nil
		}
		if !errors.Is(err, store.ErrConflict) || try == attempts {
			return nil, false, statusOf(err)
		}
	}
}

// SetOverride sets and clears single fields of an operator's override.
func (s *SubscriberService) SetOverride(ctx context.Context, req *pb.SetOverrideRequest) (*pb.SetOverrideResponse, error) {
	set, err := plan.ParseSettings(req.GetSet())
	if err != nil {
		return nil, statusOf(badField("set", err))
	}
	var clear uint64
	for _, name := range req.GetClear() {
		bit, err := plan.Mask(name)
		if err != nil {
			return nil, statusOf(badField("clear", err))
		}
		clear |= bit
	}
	m, changed, err := s.edit(ctx, req.GetId(), func(l *plan.Layers) error {
		if req.GetClearAll() {
			l.Override = plan.Settings{}
		}
		l.Override = l.Override.Without(clear).With(set)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &pb.SetOverrideResponse{Subscriber: m, Changed: changed}, nil
}

// StartBoost sets fields for a time.
func (s *SubscriberService) StartBoost(ctx context.Context, req *pb.StartBoostRequest) (*pb.StartBoostResponse, error) {
	set, err := plan.ParseSettings(req.GetSet())
	if err != nil {
		return nil, statusOf(badField("set", err))
	}
	if set.Fields == 0 {
		return nil, statusOf(badField("set", errors.New("boost: say what is to be faster")))
	}
	d := req.GetDuration().AsDuration()
	if d < minBoost || d > maxBoost {
		return nil, statusOf(badField("duration", fmt.Errorf("boost: %v is not between %v and %v", d, minBoost, maxBoost)))
	}
	until := time.Now().Add(d).UTC().Truncate(time.Microsecond)
	m, changed, err := s.edit(ctx, req.GetId(), func(l *plan.Layers) error {
		l.Boost = plan.Boost{Settings: set, Until: until}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &pb.StartBoostResponse{Subscriber: m, Changed: changed}, nil
}

// EndBoost ends a boost before its time.
func (s *SubscriberService) EndBoost(ctx context.Context, req *pb.EndBoostRequest) (*pb.EndBoostResponse, error) {
	m, changed, err := s.edit(ctx, req.GetId(), func(l *plan.Layers) error {
		l.Boost = plan.Boost{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &pb.EndBoostResponse{Subscriber: m, Changed: changed}, nil
}

// SuspendSubscriber gives a subscriber the rates of a plan.
func (s *SubscriberService) SuspendSubscriber(ctx context.Context, req *pb.SuspendSubscriberRequest) (*pb.SuspendSubscriberResponse, error) {
	policy := req.GetPolicy()
	if policy == "" {
		policy = defaultPolicy
	}
	m, changed, err := s.edit(ctx, req.GetId(), func(l *plan.Layers) error {
		l.Suspension = policy
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &pb.SuspendSubscriberResponse{Subscriber: m, Changed: changed}, nil
}

// ResumeSubscriber ends an operator's suspension.
func (s *SubscriberService) ResumeSubscriber(ctx context.Context, req *pb.ResumeSubscriberRequest) (*pb.ResumeSubscriberResponse, error) {
	m, changed, err := s.edit(ctx, req.GetId(), func(l *plan.Layers) error {
		l.Suspension = ""
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &pb.ResumeSubscriberResponse{Subscriber: m, Changed: changed}, nil
}
