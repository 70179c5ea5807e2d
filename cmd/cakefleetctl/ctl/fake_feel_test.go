package ctl_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// QueryStats has two sites, of which the north is worse from eleven o'clock on.
func (f *fleet) QueryStats(_ context.Context, r *pb.QueryStatsRequest) (*pb.QueryStatsResponse, error) {
	if r.GetGroupBy() != "site" {
		return &pb.QueryStatsResponse{}, nil
	}
	from, to := r.GetStartTime().AsTime(), r.GetEndTime().AsTime()
	step := to.Sub(from)
	if r.GetStep() != nil {
		step = r.GetStep().AsDuration()
	}
	resp := &pb.QueryStatsResponse{Step: durationpb.New(step)}
	for _, group := range []string{"", "north"} {
		if len(r.GetGroups()) > 0 && r.GetGroups()[0] != group {
			continue
		}
		names := []string{"down", "up"}
		if r.GetProbe() {
			names = []string{"idle", "both"}
		}
		for _, direction := range names {
			s := &pb.StatsSeries{Group: group, Direction: direction}
			if r.GetProbe() {
				s.Direction, s.Load = "", direction
			}
			for at := from.Add(step); !at.After(to); at = at.Add(step) {
				p99 := 3 * time.Millisecond
				if group == "north" && at.After(noon.Add(-time.Hour)) {
					p99 = 30 * time.Millisecond
				}
				if group == "" && at.Equal(noon.Add(-30*time.Minute)) && direction == "up" {
					continue // a gap
				}
				s.Points = append(s.Points, &pb.StatsPoint{
					Time: timestamppb.New(at), P50: durationpb.New(p99 / 4), P90: durationpb.New(p99 / 2), P99: durationpb.New(p99), Max: durationpb.New(2 * p99),
					RateBps: 123e6, PacketsPerSecond: 12e3, DropsPerSecond: 0.004, MarksPerSecond: 17, Utilisation: 0.31, SaturatedRouters: 1.5, Routers: 40,
					Sojourn: []*pb.StatsBucket{{Upper: durationpb.New(p99 / 4), Packets: 500}, {Upper: durationpb.New(p99), Packets: 400}, {Upper: durationpb.New(8 * p99), Packets: 10}},
				})
				if r.GetProbe() {
					p := s.Points[len(s.Points)-1]
					s.Points[len(s.Points)-1] = &pb.StatsPoint{Time: p.Time, P50: p.P50, P90: p.P90, P99: p.P99, Max: p.Max, Sojourn: p.Sojourn, Lost: 3}
				}
			}
			resp.Series = append(resp.Series, s)
		}
	}
	return resp, nil
}

// ListWorst has two routers or two groups.
func (f *fleet) ListWorst(_ context.Context, r *pb.ListWorstRequest) (*pb.ListWorstResponse, error) {
	switch {
	case r.GetSite() != "":
		return &pb.ListWorstResponse{}, nil
	case r.GetKind() == "router":
		return &pb.ListWorstResponse{Worst: []*pb.Worst{
			{Name: "home-1", Plan: "gold", Site: "north", Direction: "down", Figure: 4e6, SojournP50: durationpb.New(9 * time.Millisecond), SojournP99: durationpb.New(40 * time.Millisecond), LoadBps: 100e6, ShapedBps: 115e6, DropsPerSecond: 12.5, Routers: 1},
			{Name: "home-2", Plan: "gold", Direction: "up", Figure: 1e6, LoadBps: 10e6, ShapedBps: 12e6, Routers: 1, SaturatedRouters: 1},
		}}, nil
	default:
		return &pb.ListWorstResponse{Worst: []*pb.Worst{
			{Name: "north", Direction: "down", Figure: 0.5, LoadBps: 3e9, ShapedBps: 4e9, DropsPerSecond: 120, Routers: 40, SaturatedRouters: 20},
			{Name: "", Direction: "up", Figure: 0.1, LoadBps: 1e9, ShapedBps: 4e9, Routers: 10, SaturatedRouters: 1},
		}}, nil
	}
}

// ListRouterSamples has a line that fills and drains, with a reboot of its agent.
func (f *fleet) ListRouterSamples(context.Context, *pb.ListRouterSamplesRequest) (*pb.ListRouterSamplesResponse, error) {
	resp := &pb.ListRouterSamplesResponse{}
	for i := range 20 {
		s := &pb.RouterSample{Time: before(time.Duration(20-i) * 10 * time.Second), Span: durationpb.New(10 * time.Second), Rebooted: i == 7}
		if i != 7 {
			s.Down = &pb.DirectionSample{RateBps: 115e6, LoadBps: uint64(i) * 6e6, Packets: 1000, SojournP50: durationpb.New(time.Millisecond), SojournP99: durationpb.New(time.Duration(i) * time.Millisecond)}
		}
		resp.Samples = append(resp.Samples, s)
	}
	return resp, nil
}

// ExplainRouter knows one router.
func (f *fleet) ExplainRouter(_ context.Context, r *pb.ExplainRouterRequest) (*pb.ExplainRouterResponse, error) {
	if r.GetRouterId() != "home-1" {
		return nil, status.Errorf(codes.NotFound, "router %s does not exist", r.GetRouterId())
	}
	return &pb.ExplainRouterResponse{
		Window: durationpb.New(15 * time.Minute),
		Findings: []*pb.Finding{
			{Cause: "plan-full", Sentence: "The download is full.", Figures: []*pb.Figure{{Name: "full", Value: "80 % of 15 min"}, {Name: "wait in the queue, median", Value: "4ms"}}},
			{Cause: "of-tomorrow", Sentence: "Something new."},
		},
		Changes: []*pb.RecentChange{{Time: before(time.Hour), What: "plan gold changed by anna"}, {Time: before(50 * time.Hour), What: "subscriber 10001 changed"}},
	}, nil
}

func TestStatsPlot(t *testing.T) {
	address, creds := newFleet().serve(t)
	path := filepath.Join(t.TempDir(), "out.svg")
	got := run(t, map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}, "stats", "--by", "site", "--last", "1h", "--plot", path)
	if got.code != 0 {
		t.Fatalf("%+v", got)
	}
	svg, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<svg", "north down", "(none) up", "99th percentile"} {
		if !bytes.Contains(svg, []byte(want)) {
			t.Errorf("the plot has no %q", want)
		}
	}
	got = run(t, map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}, "stats", "--by", "site", "--plot", "/nonexistent/out.svg")
	if got.code != 1 || !bytes.Contains([]byte(got.stderr), []byte("/nonexistent/out.svg")) {
		t.Errorf("%+v", got)
	}
}
