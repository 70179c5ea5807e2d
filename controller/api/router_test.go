package api_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestListRouters(t *testing.T) {
	f := newFixture(t)
	routers := pb.NewRouterServiceClient(f.dial(f.operators, f.operatorCert()))
	f.setPlan("gold", 20e6)
	f.setPlan("silver", 10e6)
	var all, gold []string
	for i := range 7 {
		id, planName := fmt.Sprintf("home-%d", i), "silver"
		if all = append(all, id); i%2 == 0 {
			planName, gold = "gold", append(gold, id)
		}
		f.setRouter(id, planName)
	}
	list := func(req *pb.ListRoutersRequest) (ids []string) {
		t.Helper()
		for {
			resp, err := routers.ListRouters(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if req.GetPageSize() != 0 && len(resp.GetRouters()) > int(req.GetPageSize()) {
				t.Errorf("%d routers on a page of %d", len(resp.GetRouters()), req.GetPageSize())
			}
			for _, r := range resp.GetRouters() {
				ids = append(ids, r.GetId())
			}
			if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
				return ids
			}
		}
	}
	a := f.connect("home-2", &pb.Hello{})
	a.desired()
	for name, c := range map[string]struct {
		req  *pb.ListRoutersRequest
		want []string
	}{
		"all":               {&pb.ListRoutersRequest{}, all},
		"all, pages":        {&pb.ListRoutersRequest{PageSize: 3}, all},
		"all, exact page":   {&pb.ListRoutersRequest{PageSize: 7}, all},
		"of a plan":         {&pb.ListRoutersRequest{Plan: "gold"}, gold},
		"of a plan, pages":  {&pb.ListRoutersRequest{Plan: "gold", PageSize: 1}, gold},
		"of no plan":        {&pb.ListRoutersRequest{Plan: "bronze"}, nil},
		"pending":           {&pb.ListRoutersRequest{Sync: pb.SyncState_SYNC_STATE_PENDING}, []string{"home-2"}},
		"pending in silver": {&pb.ListRoutersRequest{Plan: "silver", Sync: pb.SyncState_SYNC_STATE_PENDING}, nil},
		"offline in gold":   {&pb.ListRoutersRequest{Plan: "gold", Sync: pb.SyncState_SYNC_STATE_OFFLINE}, []string{"home-0", "home-4", "home-6"}},
	} {
		if diff := cmp.Diff(c.want, list(c.req)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for name, req := range map[string]*pb.ListRoutersRequest{"sync": {Sync: 99}, "page token": {PageToken: "x"}} {
		if _, err := routers.ListRouters(t.Context(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUpdateRouter(t *testing.T) {
	f := newFixture(t)
	routers := pb.NewRouterServiceClient(f.dial(f.operators, f.operatorCert()))
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	f.setRouter("home-2", "gold")
	update := func(r *pb.Router) (*pb.Router, codes.Code) {
		t.Helper()
		resp, err := routers.UpdateRouter(t.Context(), &pb.UpdateRouterRequest{Router: r})
		return resp.GetRouter(), status.Code(err)
	}
	first, code := update(&pb.Router{Id: "home-1", Subscriber: "sub-home-2"})
	if code != codes.OK || first.GetSubscriber() != "sub-home-2" {
		t.Fatalf("%v: %v", code, first)
	}
	// What changes nothing writes nothing.
	before := f.store.Revision()
	if _, code := update(&pb.Router{Id: "home-1", Subscriber: "sub-home-2", Revision: first.GetRevision()}); code != codes.OK {
		t.Error(code)
	}
	if f.store.Revision() != before {
		t.Error("an equal router was written")
	}
	for name, c := range map[string]struct {
		r    *pb.Router
		want codes.Code
	}{
		"old revision":         {&pb.Router{Id: "home-1", Revision: first.GetRevision() - 1}, codes.Aborted},
		"old revision, equal":  {&pb.Router{Id: "home-1", Subscriber: "sub-home-2", Revision: first.GetRevision() - 1}, codes.Aborted},
		"unknown router":       {&pb.Router{Id: "home-3"}, codes.NotFound},
		"unknown subscriber":   {&pb.Router{Id: "home-1", Subscriber: "nobody"}, codes.FailedPrecondition},
		"impossible":           {&pb.Router{Id: "home-1", Subscriber: "a b"}, codes.InvalidArgument},
		"nothing in a request": {nil, codes.NotFound},
	} {
		if _, code := update(c.r); code != c.want {
			t.Errorf("%s: %v, want %v", name, code, c.want)
		}
	}
}

func stats(n uint64) *engine.Stats {
	s := &engine.Stats{Config: engine.DefaultConfig(), SentBytes: 1000 * n, SentPackets: n, Drops: 3, NumTins: 1}
	s.Config.Rate = 20e6
	s.Tins[0].Marks = 5
	s.Tins[0].Sojourn[7] = n
	return s
}

func TestTelemetry(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	tele := pb.NewTelemetryServiceClient(ops)
	gold := f.setPlan("gold", 20e6)
	f.setPlan("empty", 10e6)
	f.setRouter("home-1", "gold")
	f.setRouter("home-2", "gold")
	if _, err := tele.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: "nobody"}); status.Code(err) != codes.NotFound {
		t.Errorf("unknown router: %v", err)
	}
	if _, err := tele.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: "home-1"}); status.Code(err) != codes.NotFound {
		t.Errorf("silent router: %v", err)
	}

	a := f.connect("home-1", &pb.Hello{AppliedHash: gold.Hash(), EffectiveHash: gold.Hash()})
	var sent, before *pb.Report
	for i := range uint64(2) {
		sent = wire.FromReport(&plan.Report{
			Sequence: i + 1, BootID: "boot-1", Uptime: time.Duration(i+1) * time.Second, Down: stats(1000 * (i + 1)), Up: stats(10 * (i + 1)),
			Agent: plan.AgentStats{CPUTime: time.Second, ResidentBytes: 1 << 20},
		})
		if before == nil {
			a.report(sent)
		} else {
			a.report(wire.Difference(sent, before))
		}
		before = sent
	}
	var got *pb.GetRouterStatsResponse
	eventually(t, "second report", func() bool {
		resp, err := tele.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: "home-1"})
		got = resp
		return err == nil && resp.GetReport().GetSequence() == 2
	})
	if diff := cmp.Diff(sent, got.GetReport(), protocmp.Transform()); diff != "" {
		t.Errorf("report (-sent +got):\n%s", diff)
	}
	if !got.GetConnected() || time.Since(got.GetReceivedTime().AsTime()) > time.Minute {
		t.Errorf("connected %v, received %v", got.GetConnected(), got.GetReceivedTime())
	}

	// One that is late, from an earlier life, or the difference from another
	// report than the last changes nothing.
	a.report(wire.Difference(sent, &pb.Report{Sequence: 1, BootId: "boot-1"}))
	a.report(wire.FromReport(&plan.Report{Sequence: 1, BootID: "boot-1", Uptime: time.Second, Down: stats(1)}))
	a.report(wire.FromReport(&plan.Report{Sequence: 9, BootID: "boot-0", Uptime: time.Second, Down: stats(1)}))
	a.report(wire.FromReport(&plan.Report{Sequence: 3, BootID: "boot-1", Uptime: 3 * time.Second, Down: stats(3000), Up: stats(30)}))
	eventually(t, "third report", func() bool {
		resp, err := tele.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: "home-1"})
		return err == nil && resp.GetReport().GetSequence() == 3
	})
	sums, err := tele.ListPlanStats(t.Context(), &pb.ListPlanStatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &pb.ListPlanStatsResponse{Plans: []*pb.PlanStats{
		{Plan: "empty", Down: &pb.DirectionSums{}, Up: &pb.DirectionSums{}},
		{
			Plan: "gold", Routers: 2, Connected: 1, InSync: 1,
			Down: &pb.DirectionSums{SentBytes: 3e6, SentPackets: 3000, Drops: 3, Marks: 5, RateBps: 8e6, CapacityBps: 20e6, Sojourn: &pb.Histogram{Counts: []uint64{0, 0, 0, 0, 0, 0, 0, 3000}}},
			Up:   &pb.DirectionSums{SentBytes: 30e3, SentPackets: 30, Drops: 3, Marks: 5, RateBps: 80e3, CapacityBps: 20e6, Sojourn: &pb.Histogram{Counts: []uint64{0, 0, 0, 0, 0, 0, 0, 30}}},
		},
	}}
	if diff := cmp.Diff(want, sums, protocmp.Transform()); diff != "" {
		t.Errorf("sums (-want +got):\n%s", diff)
	}
}
