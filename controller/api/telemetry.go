package api

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/query"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// TelemetryService answers how routers and plans feel.
type TelemetryService struct {
	pb.UnimplementedTelemetryServiceServer

	store  *store.Store
	hub    *fleet.Hub
	table  *telemetry.Table
	source query.Source
	peers  *Peers // nil: this controller is alone
}

// NewTelemetryService returns the service. Without a source it knows nothing of
// the past.
func NewTelemetryService(s *store.Store, hub *fleet.Hub, table *telemetry.Table, source query.Source) *TelemetryService {
	return &TelemetryService{store: s, hub: hub, table: table, source: source}
}

// GetRouterStats returns the latest statistics of one router.
func (s *TelemetryService) GetRouterStats(ctx context.Context, req *pb.GetRouterStatsRequest) (*pb.GetRouterStatsResponse, error) {
	id := req.GetRouterId()
	var exists bool
	s.store.View(func(st *store.State) { _, exists = st.Router(id) })
	if !exists {
		return nil, statusOf(&store.Error{Kind: store.KindRouter, ID: id, Err: store.ErrNotFound})
	}
	holder, silent := s.holder(ctx, id)
	if holder != nil {
		resp, err := forward(ctx, s.peers, *holder, req, pb.TelemetryServiceClient.GetRouterStats)
		if err != nil {
			return nil, err
		}
		resp.SilentControllers = silent
		return resp, nil
	}
	raw, received, ok := s.table.Latest(id)
	if !ok && len(silent) > 0 {
		return nil, status.Errorf(codes.Unavailable, "router %s: has not reported here, and controllers that may know more do not answer: %s", id, strings.Join(silent, ", "))
	}
	if !ok {
		return nil, status.Errorf(codes.NotFound, "router %s: has not reported since the controller started", id)
	}
	report := &pb.Report{}
	if err := proto.Unmarshal(raw, report); err != nil {
		return nil, statusOf(fmt.Errorf("report of router %s: %w", id, err))
	}
	connected, _ := s.hub.Sync(id, plan.Desired{})
	return &pb.GetRouterStatsResponse{Report: report, ReceivedTime: wire.FromTime(received), Connected: connected, SilentControllers: silent}, nil
}

// ListPlanStats returns sums over the routers of each plan.
func (s *TelemetryService) ListPlanStats(ctx context.Context, _ *pb.ListPlanStatsRequest) (*pb.ListPlanStatsResponse, error) {
	moved := s.moved(ctx)
	theirs := askAll(ctx, s.peers, sumTime, func(ctx context.Context, c pb.PeerServiceClient, m lead.Member) (*pb.SumPlansResponse, error) {
		return c.SumPlans(ctx, &pb.SumPlansRequest{Elsewhere: moved.from(m.ID)})
	})
	all := s.sumPlans(moved.from(s.peers.self()))
	resp := &pb.ListPlanStatsResponse{SilentControllers: moved.silent}
	for _, a := range theirs() {
		if a.err != nil {
			resp.SilentControllers = include(resp.GetSilentControllers(), a.member.ID)
			continue
		}
		for _, p := range a.resp.GetPlans() {
			addPlan(all, p)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		resp.Plans = append(resp.Plans, all[name])
	}
	return resp, nil
}

// sumPlans returns the sums of the routers that are connected here, by plan;
// routers counts all, as the store has them. Those that are elsewhere by now
// don't count.
func (s *TelemetryService) sumPlans(elsewhere []string) map[string]*pb.PlanStats {
	gone := s.leave(elsewhere)
	all := map[string]*pb.PlanStats{}
	of := func(name string) *pb.PlanStats {
		if all[name] == nil {
			all[name] = &pb.PlanStats{Plan: name, Down: &pb.DirectionSums{}, Up: &pb.DirectionSums{}}
		}
		return all[name]
	}
	s.store.View(func(st *store.State) {
		for p := range st.Plans("") {
			of(p.Name)
		}
	})
	for m := range members(s.store, "", "") {
		p := of(m.plan)
		p.Routers++
		if gone[m.router.ID] {
			continue
		}
		connected, sync := s.hub.Sync(m.router.ID, m.desired)
		if connected {
			p.Connected++
		}
		if sync == fleet.InSync {
			p.InSync++
		}
	}
	gauges := s.table.Gauges(time.Now())
	for _, g := range s.table.Groups().Groups() {
		p := all[g.Value]
		if g.By != rollup.ByPlan || p == nil {
			continue
		}
		sums, now := g.Sums(), gauges[g.Key]
		if now == nil {
			now = &telemetry.Gauges{}
		}
		p.Down = fromSums(&sums.Directions[rollup.Down], &now.Directions[rollup.Down])
		p.Up = fromSums(&sums.Directions[rollup.Up], &now.Directions[rollup.Up])
	}
	return all
}

func fromSums(s *rollup.Sum, now *telemetry.DirectionGauges) *pb.DirectionSums {
	return &pb.DirectionSums{
		SentBytes:   s.Bytes,
		SentPackets: s.Packets,
		Drops:       s.Drops,
		Marks:       s.Marks,
		RateBps:     uint64(now.Load),
		CapacityBps: uint64(now.Shaped),
		Sojourn:     wire.FromHistogram(&s.Sojourn),
	}
}
