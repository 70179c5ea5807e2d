package api

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// TelemetryService answers how routers and plans feel.
type TelemetryService struct {
	pb.UnimplementedTelemetryServiceServer

	store *store.Store
	hub   *fleet.Hub
	table *telemetry.Table
}

// NewTelemetryService returns the service.
func NewTelemetryService(s *store.Store, hub *fleet.Hub, table *telemetry.Table) *TelemetryService {
	return &TelemetryService{store: s, hub: hub, table: table}
}

// GetRouterStats returns the latest statistics of one router.
func (s *TelemetryService) GetRouterStats(_ context.Context, req *pb.GetRouterStatsRequest) (*pb.GetRouterStatsResponse, error) {
	id := req.GetRouterId()
	var exists bool
	s.store.View(func(st *store.State) { _, exists = st.Router(id) })
	if !exists {
		return nil, statusOf(&store.Error{Kind: store.KindRouter, ID: id, Err: store.ErrNotFound})
	}
	raw, received, ok := s.table.Latest(id)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "router %s: has not reported since the controller started", id)
	}
	report := &pb.Report{}
	if err := proto.Unmarshal(raw, report); err != nil {
		return nil, statusOf(fmt.Errorf("report of router %s: %w", id, err))
	}
	connected, _ := s.hub.Sync(id, plan.Desired{})
	return &pb.GetRouterStatsResponse{Report: report, ReceivedTime: wire.FromTime(received), Connected: connected}, nil
}

// planSums adds up the routers of one plan.
type planSums struct {
	routers, connected, inSync uint32
	down, up                   telemetry.Sums
}

// ListPlanStats returns sums over the routers of each plan.
func (s *TelemetryService) ListPlanStats(context.Context, *pb.ListPlanStatsRequest) (*pb.ListPlanStatsResponse, error) {
	sums := map[string]*planSums{}
	s.store.View(func(st *store.State) {
		for p := range st.Plans("") {
			sums[p.Name] = &planSums{}
		}
	})
	now := time.Now()
	for m := range members(s.store, "", "") {
		p := sums[m.plan]
		if p == nil {
			p = &planSums{}
			sums[m.plan] = p
		}
		connected, sync := s.hub.Sync(m.router.ID, m.desired)
		p.routers++
		if connected {
			p.connected++
		}
		if sync == fleet.InSync {
			p.inSync++
		}
		s.table.Add(m.router.ID, connected, now, &p.down, &p.up)
	}
	resp := &pb.ListPlanStatsResponse{}
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		p := sums[name]
		resp.Plans = append(resp.Plans, &pb.PlanStats{
			Plan: name, Routers: p.routers, Connected: p.connected, InSync: p.inSync,
			Down: fromSums(&p.down), Up: fromSums(&p.up),
		})
	}
	return resp, nil
}

func fromSums(s *telemetry.Sums) *pb.DirectionSums {
	return &pb.DirectionSums{
		SentBytes:   s.Bytes,
		SentPackets: s.Packets,
		Drops:       s.Drops,
		Marks:       s.Marks,
		RateBps:     uint64(s.Rate),
		CapacityBps: uint64(s.Capacity),
		Sojourn:     wire.FromHistogram(&s.Sojourn),
	}
}
