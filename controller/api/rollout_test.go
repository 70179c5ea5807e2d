package api_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rollouts is a store with 20 routers of plan gold at two sites, and the
// service on it; nobody leads.
func rollouts(t *testing.T) (*store.Store, *api.RolloutService) {
	t.Helper()
	s, _ := served(t)
	for i := range 19 {
		id := fmt.Sprint("x", i)
		_, err := s.PutSubscriber(t.Context(), plan.Subscriber{ID: id, Plan: "gold", Labels: map[string]string{"site": fmt.Sprint("s", i%2)}}, 0)
		noError(t, err)
		_, err = s.PutRouter(t.Context(), plan.Router{ID: id, Subscriber: id}, 0)
		noError(t, err)
	}
	hub := fleet.NewHub()
	return s, api.NewRolloutService(s, hub, conduct.New(s, hub, conduct.Alone{}, hclog.NewNullLogger()))
}

func faster(id string) *pb.Rollout {
	return &pb.Rollout{
		Id: id, Selector: &pb.RolloutSelector{Plan: "gold"}, Set: map[string]string{"down.rate": "200mbit"},
		Gates: []string{"nack < 1%"}, Soak: durationpb.New(time.Minute), OnFailure: "rollback",
	}
}

func refused(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	for _, w := range words {
		if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), w) {
			t.Errorf("%v, want %v and %q", err, code, w)
		}
	}
}

// A rollout is tried and started; a second one of the same routers is refused or
// queued; what was rolled back is held until it is edited.
func TestStartRollout(t *testing.T) {
	s, svc := rollouts(t)
	ctx := t.Context()
	tried, err := svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: faster(""), ValidateOnly: true})
	noError(t, err)
	if tried.GetTargets() != 20 || fmt.Sprint(tried.GetRollout().GetSizes()) != "[1 2 10 20]" || strings.Join(tried.GetChanges(), ",") != "down.rate 100Mbit -> 200Mbit" || !strings.HasPrefix(tried.GetRollout().GetId(), "gold-") {
		t.Errorf("dry run: %v", tried)
	}
	if all, err := svc.ListRollouts(ctx, &pb.ListRolloutsRequest{}); err != nil || len(all.GetRollouts()) != 0 {
		t.Fatalf("a dry run has stored %v, %v", all, err)
	}
	made, err := svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: faster("a")})
	noError(t, err)
	if r := made.GetRollout(); r.GetPhase() != pb.RolloutPhase_ROLLOUT_PHASE_WAITING || r.GetWave() != 0 || r.GetSeed() == 0 {
		t.Errorf("made %v", r)
	}
	got, err := svc.GetRollout(ctx, &pb.GetRolloutRequest{Id: "a"})
	noError(t, err)
	if got.GetReport().GetControl().GetMembers() != 20 {
		t.Errorf("report %v", got.GetReport())
	}

	north := faster("b")
	north.Selector = &pb.RolloutSelector{Labels: map[string]string{"site": "s1"}}
	_, err = svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: north})
	refused(t, err, codes.FailedPrecondition, "another rollout is in the way", "rollout a changes the same routers")
	north.Queued = true
	queued, err := svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: north})
	noError(t, err)
	if queued.GetQueuedBehind() != "a" || queued.GetTargets() != 9 {
		t.Errorf("queued: %v", queued)
	}
	_, err = svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: faster("a")})
	refused(t, err, codes.FailedPrecondition, "in the way")

	// A hot fix must say that it overtakes.
	plans := api.NewPlanService(s)
	fix := planMessage("gold", 50, 5)
	_, err = plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: fix})
	refused(t, err, codes.FailedPrecondition, "rollout a changes it", "overtaken", "--overtake-rollout")

	routers, err := svc.ListRolloutRouters(ctx, &pb.ListRolloutRoutersRequest{Id: "a", PageSize: 7})
	noError(t, err)
	if len(routers.GetRouters()) != 7 || routers.GetNextPageToken() == "" || routers.GetRouters()[0].GetState() != "unreachable" {
		t.Errorf("routers: %v", routers)
	}
	back, err := svc.CommandRollout(ctx, &pb.CommandRolloutRequest{Id: "a", Command: pb.RolloutCommand_ROLLOUT_COMMAND_ROLLBACK})
	noError(t, err)
	if back.GetRollout().GetPhase() != pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK {
		t.Errorf("nothing was changed yet, and after the rollback it is %v", back.GetRollout().GetPhase())
	}
	_, err = svc.CommandRollout(ctx, &pb.CommandRolloutRequest{Id: "a", Command: pb.RolloutCommand_ROLLOUT_COMMAND_RESUME})
	refused(t, err, codes.FailedPrecondition, "is rolled back", "can't be done now")
	_, err = svc.CommandRollout(ctx, &pb.CommandRolloutRequest{Id: "b", Command: pb.RolloutCommand_ROLLOUT_COMMAND_ABORT})
	noError(t, err)
	_, err = svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: faster("c")})
	refused(t, err, codes.FailedPrecondition, "the same was rolled back before", "rollout a")
	edited := faster("c")
	edited.Set["up.rate"] = "20mbit"
	_, err = svc.StartRollout(ctx, &pb.StartRolloutRequest{Rollout: edited})
	noError(t, err)
	_, err = plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: fix, OvertakeRollout: true})
	noError(t, err)
}

// A plan is rolled out to what it was.
func TestRolloutToRevision(t *testing.T) {
	s, svc := rollouts(t)
	var old plan.Plan
	s.View(func(st *store.State) { old, _ = st.Plan("gold") })
	_, err := api.NewPlanService(s).UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: planMessage("gold", 70, 7)})
	noError(t, err)
	m := faster("back")
	m.Set, m.ToRevision = nil, int64(old.Revision)
	resp, err := svc.StartRollout(t.Context(), &pb.StartRolloutRequest{Rollout: m})
	noError(t, err)
	if got := strings.Join(resp.GetChanges(), ", "); got != "down.rate 70Mbit -> 100Mbit, up.rate 7Mbit -> 10Mbit" || resp.GetRollout().GetNote() == "" {
		t.Errorf("changes %s, note %q", got, resp.GetRollout().GetNote())
	}
	// With the first step open, one router of 20 has it, by the rollout's word.
	var l *rollout.Live
	s.View(func(st *store.State) { l, _ = st.Rollout("back") })
	next := l.Rollout
	next.Opened, next.Touched, next.Phase = 1, 1, rollout.Answering
	_, err = s.PutRollout(t.Context(), next, l.Revision, true)
	noError(t, err)
	routers := api.NewRouterService(s, fleet.NewHub())
	all, err := routers.ListRouters(t.Context(), &pb.ListRoutersRequest{})
	noError(t, err)
	n := 0
	for _, r := range all.GetRouters() {
		if r.GetDesired().GetLink().GetDown().GetRateBps() == 100_000_000 {
			n++
			if f := r.GetDesired().GetFields(); len(f) != 2 || f[0].GetOwner() != "rollout" || f[0].GetRollout() != "back" {
				t.Errorf("fields of %s: %v", r.GetId(), f)
			}
			if r.GetDesired().GetRevision() <= int64(old.Revision) {
				t.Errorf("revision %d", r.GetDesired().GetRevision())
			}
		}
	}
	if n != 1 || len(all.GetRouters()) != 20 {
		t.Errorf("%d of %d routers have it", n, len(all.GetRouters()))
	}
}

func TestBadRollouts(t *testing.T) {
	_, svc := rollouts(t)
	for _, c := range []struct {
		change func(*pb.Rollout)
		code   codes.Code
		want   string
	}{
		{func(m *pb.Rollout) { m.Id = "A" }, codes.InvalidArgument, `rollout name "A"`},
		{func(m *pb.Rollout) { m.Selector = nil }, codes.InvalidArgument, "say a plan, labels, a model or routers"},
		{func(m *pb.Rollout) { m.Selector.Plan = "none" }, codes.NotFound, "plan none"},
		{func(m *pb.Rollout) { m.Set = nil }, codes.InvalidArgument, "is like that already"},
		{func(m *pb.Rollout) { m.ToRevision = 1 }, codes.InvalidArgument, "say one of them"},
		{func(m *pb.Rollout) { m.Set, m.ToRevision = nil, 1 }, codes.InvalidArgument, "revision 1 is not in its history"},
		{func(m *pb.Rollout) { m.Waves = []string{"10%", "5%"} }, codes.InvalidArgument, "is smaller than"},
		{func(m *pb.Rollout) { m.Waves = []string{"10%"} }, codes.InvalidArgument, "the last one must be 100%"},
		{func(m *pb.Rollout) { m.Gates = []string{"joy > 1%"} }, codes.InvalidArgument, `metric "joy" is unknown`},
		{func(m *pb.Rollout) { m.OnFailure = "cry" }, codes.InvalidArgument, "must be one of pause, rollback, abort"},
		{func(m *pb.Rollout) { m.Selector.Routers = []string{"nobody"} }, codes.InvalidArgument, "router nobody: does not exist"},
		{func(m *pb.Rollout) { m.Selector.Labels = map[string]string{"site": "moon"} }, codes.InvalidArgument, "no router is meant"},
		{func(m *pb.Rollout) { m.Soak = durationpb.New(0) }, codes.InvalidArgument, "soak time 0s"},
		{func(m *pb.Rollout) { m.Windows = []string{"mon 01:00-02:00"} }, codes.InvalidArgument, "zone is missing"},
	} {
		m := faster("x")
		c.change(m)
		_, err := svc.StartRollout(t.Context(), &pb.StartRolloutRequest{Rollout: m, ValidateOnly: true})
		refused(t, err, c.code, c.want)
	}
	_, err := svc.CommandRollout(t.Context(), &pb.CommandRolloutRequest{Id: "none", Command: pb.RolloutCommand_ROLLOUT_COMMAND_ABORT})
	refused(t, err, codes.NotFound, "rollout none")
	_, err = svc.CommandRollout(t.Context(), &pb.CommandRolloutRequest{Id: "none"})
	refused(t, err, codes.InvalidArgument, "unknown")
}
