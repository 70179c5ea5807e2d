package api_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// TestFeel has a router that fills its download and one that has never come.
func TestFeel(t *testing.T) {
	f := newFixture(t)
	tele := pb.NewTelemetryServiceClient(f.dial(f.operators, f.operatorCert()))
	gold := f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	f.setRouter("home-2", "gold")
	a := f.connect("home-1", &pb.Hello{AppliedHash: gold.Hash(), EffectiveHash: gold.Hash(), Effective: wire.FromLink(&gold)})
	for i := range uint64(3) {
		down, up := stats(2400*(i+1)), stats(10*(i+1)) // 2400 packets of 1000 bytes a second are 19.2 Mbit/s
		a.report(wire.FromReport(&plan.Report{
			Sequence: i + 1, BootID: "boot-1", Uptime: time.Duration(i+1) * time.Second, Down: down, Up: up,
			Agent: plan.AgentStats{CPUTime: time.Duration(i+1) * 100 * time.Millisecond},
			WAN:   &plan.LinkState{Name: "wan", Index: 2, Up: true, Carrier: true},
		}))
	}
	eventually(t, "all samples", func() bool {
		resp, err := tele.ListRouterSamples(t.Context(), &pb.ListRouterSamplesRequest{RouterId: "home-1"})
		if err != nil {
			t.Fatal(err)
		}
		n := len(resp.GetSamples())
		return n >= 2 && resp.GetSamples()[n-1].GetDown().GetLoadBps() == 19_200_000 && resp.GetSamples()[n-1].GetCpuTime().AsDuration() == 100*time.Millisecond
	})

	worst, err := tele.ListWorst(t.Context(), &pb.ListWorstRequest{By: pb.WorstBy_WORST_BY_SATURATION})
	if err != nil {
		t.Fatal(err)
	}
	if w := worst.GetWorst(); len(w) != 1 || w[0].GetName() != "home-1" || w[0].GetDirection() != "down" || w[0].GetPlan() != "gold" || w[0].GetSaturatedRouters() != 1 || w[0].GetLoadBps() != 19_200_000 {
		t.Errorf("worst router: %v", worst)
	}
	worst, err = tele.ListWorst(t.Context(), &pb.ListWorstRequest{Kind: "plan"})
	if err != nil {
		t.Fatal(err)
	}
	if w := worst.GetWorst(); len(w) != 1 || w[0].GetName() != "gold" || w[0].GetRouters() != 1 || w[0].GetShapedBps() != 20_000_000 {
		t.Errorf("worst plan: %v", worst)
	}
	worst, err = tele.ListWorst(t.Context(), &pb.ListWorstRequest{Plan: "silver"})
	if err != nil || len(worst.GetWorst()) != 0 {
		t.Errorf("of another plan: %v, %v", worst, err)
	}

	why, err := tele.ExplainRouter(t.Context(), &pb.ExplainRouterRequest{RouterId: "home-1"})
	if err != nil {
		t.Fatal(err)
	}
	if g := why.GetFindings(); len(g) != 1 || g[0].GetCause() != "plan-full" || !strings.Contains(g[0].GetSentence(), "download") {
		t.Errorf("explanation: %v", why)
	}
	if c := why.GetChanges(); len(c) < 3 || c[0].GetWhat() != "the router connected" {
		t.Errorf("changes: %v, want that it connected first", c)
	}
	why, err = tele.ExplainRouter(t.Context(), &pb.ExplainRouterRequest{RouterId: "home-2"})
	if err != nil || why.GetFindings()[0].GetCause() != "offline" {
		t.Errorf("a router that never came: %v, %v", why, err)
	}
}

// empty is a history in which there is nothing.
type empty struct{}

func (empty) Range(context.Context, string, time.Time, time.Time, time.Duration) (model.Matrix, error) {
	return nil, nil
}

// A group that was misspelt is not taken for one in which nothing happened.
func TestNoSuchGroup(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 20e6)
	f.setPlan("silver", 10e6)
	tele := api.NewTelemetryService(f.store, nil, telemetry.New(telemetry.Config{}), empty{})
	ask := func(by string, groups ...string) error {
		_, err := tele.QueryStats(t.Context(), &pb.QueryStatsRequest{GroupBy: by, Groups: groups})
		return err
	}
	noError(t, ask("plan"))
	noError(t, ask("plan", "gold", "silver"))
	for want, err := range map[string]error{
		`no plan "glod"; there are gold, silver`:           ask("plan", "gold", "glod"),
		`no site "north": no router that reported has one`: ask("site", "north"),
	} {
		if wantReason(t, err, "InvalidArgument INVALID"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestFeelRefusals(t *testing.T) {
	f := newFixture(t)
	tele := pb.NewTelemetryServiceClient(f.dial(f.operators, f.operatorCert()))
	ctx := t.Context()
	for name, c := range map[string]struct {
		call func() error
		code codes.Code
		want string
	}{
		"samples of nobody": {func() error {
			_, err := tele.ListRouterSamples(ctx, &pb.ListRouterSamplesRequest{RouterId: "x"})
			return err
		}, codes.NotFound, "router x"},
		"explain nobody": {func() error {
			_, err := tele.ExplainRouter(ctx, &pb.ExplainRouterRequest{RouterId: "x"})
			return err
		}, codes.NotFound, "router x"},
		"worst of what": {func() error {
			_, err := tele.ListWorst(ctx, &pb.ListWorstRequest{Kind: "moon"})
			return err
		}, codes.InvalidArgument, `"moon" is not what routers are grouped by: all, plan, site, model, version`},
		"too many": {func() error {
			_, err := tele.ListWorst(ctx, &pb.ListWorstRequest{Limit: 1001})
			return err
		}, codes.InvalidArgument, "limit 1001: must be 1 to 1000"},
		"unknown way": {func() error {
			_, err := tele.ListWorst(ctx, &pb.ListWorstRequest{By: 99})
			return err
		}, codes.InvalidArgument, "value 99 is unknown"},
		"no group": {func() error {
			_, err := tele.QueryStats(ctx, &pb.QueryStatsRequest{})
			return err
		}, codes.InvalidArgument, "is not what routers are grouped by"},
		"step of nothing": {func() error {
			_, err := tele.QueryStats(ctx, &pb.QueryStatsRequest{GroupBy: "plan", Step: durationpb.New(-time.Second)})
			return err
		}, codes.InvalidArgument, "step -1s"},
		"without a history": {func() error {
			_, err := tele.QueryStats(ctx, &pb.QueryStatsRequest{GroupBy: "plan"})
			return err
		}, codes.FailedPrecondition, "keeps no history"},
	} {
		if err := c.call(); status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.want) {
			t.Errorf("%s: %v, want %v and %q", name, err, c.code, c.want)
		}
	}
}
