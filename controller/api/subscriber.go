package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"

	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/subimport"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Limits of an import.
const (
	mostFile    = 256 << 20 // bytes
	mostChanges = 1000      // that are told
	mostErrors  = 10_000    // that are told: a message may have 4 MiB

	// massPercent is the share of subscribers that a file may change or remove
	// without being asked again.
	massPercent = 20
)

// SubscriberService keeps who is served with which plan.
type SubscriberService struct {
	pb.UnimplementedSubscriberServiceServer
	store *store.Store
}

// NewSubscriberService returns the service on s.
func NewSubscriberService(s *store.Store) *SubscriberService { return &SubscriberService{store: s} }

// GetSubscriber returns one subscriber.
func (s *SubscriberService) GetSubscriber(_ context.Context, req *pb.GetSubscriberRequest) (*pb.GetSubscriberResponse, error) {
	resp := &pb.GetSubscriberResponse{}
	s.store.View(func(st *store.State) {
		if sub, ok := st.Subscriber(req.GetId()); ok {
			resp.Subscriber = subscriberMessage(st, sub)
		}
	})
	if resp.Subscriber == nil {
		return nil, statusOf(&store.Error{Kind: store.KindSubscriber, ID: req.GetId(), Err: store.ErrNotFound})
	}
	return resp, nil
}

// ListSubscribers returns a page of subscribers.
func (s *SubscriberService) ListSubscribers(_ context.Context, req *pb.ListSubscribersRequest) (*pb.ListSubscribersResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListSubscribersResponse{}
	s.store.View(func(st *store.State) {
		items := st.Subscribers(p.after)
		if req.GetPlan() != "" {
			items = st.SubscribersOfPlan(req.GetPlan(), p.after)
		}
		resp.Subscribers, resp.NextPageToken = collect(p, items,
			func(sub plan.Subscriber) string { return sub.ID }, nil,
			func(sub plan.Subscriber) *pb.Subscriber { return subscriberMessage(st, sub) })
	})
	return resp, nil
}

// CreateSubscriber adds a subscriber.
func (s *SubscriberService) CreateSubscriber(ctx context.Context, req *pb.CreateSubscriberRequest) (*pb.CreateSubscriberResponse, error) {
	sub, err := s.store.PutSubscriber(ctx, wire.ToSubscriber(req.GetSubscriber()), 0)
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateSubscriberResponse{Subscriber: s.stored(sub)}, nil
}

// UpdateSubscriber replaces plan and labels.
func (s *SubscriberService) UpdateSubscriber(ctx context.Context, req *pb.UpdateSubscriberRequest) (*pb.UpdateSubscriberResponse, error) {
	next := wire.ToSubscriber(req.GetSubscriber())
	for try := 1; ; try++ {
		resp, err := s.updateSubscriber(ctx, next, req.GetAllowMissing())
		raced := errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrExists) || errors.Is(err, store.ErrNotFound) && req.GetAllowMissing()
		if next.Revision == 0 && raced && try < attempts {
			continue
		}
		return resp, statusOf(err)
	}
}

func (s *SubscriberService) updateSubscriber(ctx context.Context, next plan.Subscriber, allowMissing bool) (*pb.UpdateSubscriberResponse, error) {
	var current plan.Subscriber
	var exists bool
	s.store.View(func(st *store.State) { current, exists = st.Subscriber(next.ID) })
	next.Layers = current.Layers
	switch {
	case !exists && (!allowMissing || next.Revision != 0):
		return nil, &store.Error{Kind: store.KindSubscriber, ID: next.ID, Err: store.ErrNotFound}
	case exists && next.Revision != 0 && next.Revision != current.Revision:
		return nil, &store.Error{Kind: store.KindSubscriber, ID: next.ID, Err: store.ErrConflict, Want: next.Revision, Have: current.Revision, Updated: current.Updated}
	case exists && next.Plan == current.Plan && maps.Equal(next.Labels, current.Labels):
		return &pb.UpdateSubscriberResponse{Subscriber: s.stored(current)}, nil
	}
	sub, err := s.store.PutSubscriber(ctx, next, current.Revision)
	if err != nil {
		return nil, err
	}
	return &pb.UpdateSubscriberResponse{Subscriber: s.stored(sub), Changed: true}, nil
}

// DeleteSubscriber removes a subscriber.
func (s *SubscriberService) DeleteSubscriber(ctx context.Context, req *pb.DeleteSubscriberRequest) (*pb.DeleteSubscriberResponse, error) {
	if err := s.store.DeleteSubscriber(ctx, req.GetId(), expectation(req.GetRevision())); err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeleteSubscriberResponse{}, nil
}

// ImportSubscribers reads a file and makes the store like it, all at once.
func (s *SubscriberService) ImportSubscribers(stream grpc.ClientStreamingServer[pb.ImportSubscribersRequest, pb.ImportSubscribersResponse]) error {
	data, options, err := receiveFile(stream)
	if err != nil {
		return statusOf(err)
	}
	if options.GetMassChangePercent() > 100 {
		return statusOf(badField("mass_change_percent", fmt.Errorf("mass change: %d %% is more than all", options.GetMassChangePercent())))
	}
	file := subimport.Parse(data)
	for try := 1; ; try++ {
		d, held := s.compare(file, options)
		resp := importMessage(d)
		resp.Held = held
		if len(d.Errors) > 0 && (!options.GetKeepGoing() || file.Broken) || held != "" || options.GetDryRun() {
			return stream.SendAndClose(resp)
		}
		_, err := s.store.WriteSubscribers(stream.Context(), writes(d))
		if err == nil {
			resp.Applied = true
			return stream.SendAndClose(resp)
		}
		// What others changed meanwhile is compared anew.
		if !overtaken(err) || try == attempts {
			return statusOf(fmt.Errorf("import: nothing is stored: %w", err))
		}
	}
}

// compare returns what a file changes, and why that is held back; empty if it
// isn't.
func (s *SubscriberService) compare(file subimport.File, options *pb.ImportSubscribersRequest) (d subimport.Diff, held string) {
	s.store.View(func(st *store.State) {
		d = subimport.Compare(file, st, subimport.Options{RemoveMissing: options.GetRemoveMissing(), KeepGoing: options.GetKeepGoing()})
		if options.GetAllowMassChange() {
			return
		}
		percent := options.GetMassChangePercent()
		if percent == 0 {
			percent = massPercent
		}
		_, stored, _ := st.Len()
		held = d.Mass(stored, percent)
	})
	return d, held
}

// overtaken tells whether a write was refused because the state had changed.
func overtaken(err error) bool {
	for _, e := range []error{store.ErrConflict, store.ErrExists, store.ErrNotFound, store.ErrDangling, store.ErrInUse} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// receiveFile returns the file and its first piece, which has the options.
func receiveFile(stream grpc.ClientStreamingServer[pb.ImportSubscribersRequest, pb.ImportSubscribersResponse]) (data []byte, options *pb.ImportSubscribersRequest, err error) {
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return data, options, nil
		}
		if err != nil {
			return nil, nil, err
		}
		if options == nil {
			options = piece
		}
		if data = append(data, piece.GetChunk()...); len(data) > mostFile {
			return nil, nil, badField("chunk", fmt.Errorf("file is longer than %d MiB", mostFile>>20))
		}
	}
}

func writes(d subimport.Diff) []store.SubscriberWrite {
	ws := make([]store.SubscriberWrite, len(d.Changes))
	for i, c := range d.Changes {
		if c.Kind == subimport.Removed {
			ws[i] = store.SubscriberWrite{Subscriber: c.Before, Remove: true, Expect: c.Before.Revision}
			continue
		}
		ws[i] = store.SubscriberWrite{Subscriber: c.After, Expect: c.Before.Revision}
	}
	return ws
}

// importMessage returns what is told of an import.
func importMessage(d subimport.Diff) *pb.ImportSubscribersResponse {
	m := &pb.ImportSubscribersResponse{
		Added: uint32(d.Added), Changed: uint32(d.Changed), Removed: uint32(d.Removed), Unchanged: uint32(d.Unchanged),
	}
	for i, e := range d.Errors {
		if i == mostErrors {
			m.Errors = append(m.Errors, &pb.ImportError{Message: fmt.Sprintf("and %d more", len(d.Errors)-i)})
			break
		}
		m.Errors = append(m.Errors, &pb.ImportError{Line: uint32(e.Line), Record: uint32(e.Record), Column: e.Column, Message: e.Message})
	}
	for _, c := range d.Changes[:min(len(d.Changes), mostChanges)] {
		m.Changes = append(m.Changes, changeMessage(c))
	}
	return m
}

func changeMessage(c subimport.Change) *pb.ImportChange {
	switch c.Kind {
	case subimport.Added:
		return &pb.ImportChange{Kind: pb.ImportChange_KIND_ADDED, Id: c.After.ID, After: subimport.Describe(c.After)}
	case subimport.Removed:
		return &pb.ImportChange{Kind: pb.ImportChange_KIND_REMOVED, Id: c.Before.ID, Before: subimport.Describe(c.Before)}
	default:
		return &pb.ImportChange{Kind: pb.ImportChange_KIND_CHANGED, Id: c.After.ID, Before: subimport.Describe(c.Before), After: subimport.Describe(c.After)}
	}
}

// stored returns the message of a subscriber that is stored.
func (s *SubscriberService) stored(sub plan.Subscriber) (m *pb.Subscriber) {
	s.store.View(func(st *store.State) { m = subscriberMessage(st, sub) })
	return m
}

func subscriberMessage(st *store.State, sub plan.Subscriber) *pb.Subscriber {
	m := wire.FromSubscriber(sub)
	for r := range st.RoutersOfSubscriber(sub.ID) {
		m.Routers = append(m.Routers, r.ID)
	}
	return m
}
