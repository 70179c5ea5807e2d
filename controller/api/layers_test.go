package api_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// runs returns what router r1 is to run now.
func runs(t *testing.T, s *store.Store) (d plan.Desired, owner func(string) string) {
	t.Helper()
	var owners [plan.NumFields]resolve.Word
	s.View(func(st *store.State) {
		d, _ = resolve.Router(st, "r1", time.Now(), nil)
		owners, _ = resolve.Owners(st, "r1", time.Now())
	})
	if d.Link == nil {
		t.Fatalf("nothing is desired: %s", d.Reason)
	}
	return d, func(name string) string {
		for i, o := range owners {
			if plan.FieldName(i) == name {
				return plan.FieldText(d.Link, i) + " by " + o.Owner.String()
			}
		}
		t.Fatalf("no field %s", name)
		return ""
	}
}

// served returns a store with plans gold (100 and 10 Mbit/s) and slow (1 and 1),
// and subscriber 1 with gold and router r1.
func served(t *testing.T) (*store.Store, pb.SubscriberServiceClient) {
	t.Helper()
	_, s, subs := withPlans(t, "gold", "slow")
	for name, rates := range map[string]int{"gold": 10, "slow": 1} {
		p := planMessage(name, rates*rates, rates)
		_, err := pb.NewPlanServiceClient(serve(t, s)).UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: p})
		noError(t, err)
	}
	importWith(t, subs, "id,plan\n1,gold\n", &pb.ImportSubscribersRequest{})
	_, err := s.PutRouter(t.Context(), plan.Router{ID: "r1", Subscriber: "1"}, 0)
	noError(t, err)
	return s, subs
}

// A boost names its end and what follows, so that the router ends it without a
// controller, and both agree what runs then.
func TestFleet001_BoostEndsOnTheRouter(t *testing.T) {
	s, subs := served(t)
	before, _ := runs(t, s)
	resp, err := subs.StartBoost(t.Context(), &pb.StartBoostRequest{Id: "1", Set: map[string]string{"down.rate": "300mbit"}, Duration: durationpb.New(2 * time.Hour)})
	noError(t, err)
	end := resp.GetSubscriber().GetLayers().GetBoostEnd().AsTime()
	d, owner := runs(t, s)
	if owner("down.rate") != "300Mbit by boost" || owner("up.rate") != "10Mbit by plan" || !resp.GetChanged() {
		t.Errorf("down %s, up %s", owner("down.rate"), owner("up.rate"))
	}
	if d.Then == nil || *d.Then != *before.Link || d.ExpiresAfter <= time.Hour || d.ExpiresAfter > 2*time.Hour || !d.Changes.Equal(end) {
		t.Errorf("then %v after %v, changes at %v, want the plan at %v", d.Then, d.ExpiresAfter, d.Changes, end)
	}
	// The controller desires the same at the end as the router does by itself.
	s.View(func(st *store.State) {
		after, _ := resolve.Router(st, "r1", end, nil)
		if after.Hash != d.Then.Hash() || after.ExpiresAfter != 0 {
			t.Errorf("after the end %+v is desired", after)
		}
	})
	// A longer boost is another state, though the link is the same.
	_, err = subs.StartBoost(t.Context(), &pb.StartBoostRequest{Id: "1", Set: map[string]string{"down.rate": "300mbit"}, Duration: durationpb.New(4 * time.Hour)})
	noError(t, err)
	if longer, _ := runs(t, s); longer.Hash == d.Hash || longer.EffectiveHash() != d.EffectiveHash() {
		t.Error("a longer boost has the same hash, or another link")
	}
	_, err = subs.EndBoost(t.Context(), &pb.EndBoostRequest{Id: "1"})
	noError(t, err)
	if d, _ := runs(t, s); d.Hash != before.Hash {
		t.Error("the boost has not ended")
	}
	for _, bad := range []*pb.StartBoostRequest{
		{Id: "1", Duration: durationpb.New(time.Hour)},
		{Id: "1", Set: map[string]string{"down.rate": "1mbit"}},
		{Id: "1", Set: map[string]string{"down.rate": "0"}, Duration: durationpb.New(time.Hour)},
	} {
		_, err := subs.StartBoost(t.Context(), bad)
		wantReason(t, err, "InvalidArgument INVALID")
	}
	_, err = subs.StartBoost(t.Context(), &pb.StartBoostRequest{Id: "2", Set: map[string]string{"down.rate": "1mbit"}, Duration: durationpb.New(time.Hour)})
	wantReason(t, err, "NotFound NOT_FOUND")
}

// A rate of 0 is refused wherever it may come from.
func TestFleet012_ZeroIsNotARate(t *testing.T) {
	s, subs := served(t)
	resp := importWith(t, subs, "id,plan,down,up\n1,gold,0,10mbit\n2,gold,0mbit,\n3,gold,500,\n", &pb.ImportSubscribersRequest{})
	if len(resp.Errors) != 3 || resp.Applied || resp.Errors[0].Line != 2 || resp.Errors[0].Column != "down" {
		t.Errorf("errors %v", resp.Errors)
	}
	_, err := subs.SetOverride(t.Context(), &pb.SetOverrideRequest{Id: "1", Set: map[string]string{"up.rate": "0"}})
	wantReason(t, err, "InvalidArgument INVALID")
	if _, owner := runs(t, s); owner("down.rate") != "100Mbit by plan" {
		t.Errorf("down is %s", owner("down.rate"))
	}
}

// Billing suspends, the plan changes, billing resumes: the plan as it is then
// applies. A change of the policy reaches who is suspended, and a policy in use
// can't be removed.
func TestFleet013_SuspensionByBilling(t *testing.T) {
	s, subs := served(t)
	plans := pb.NewPlanServiceClient(serve(t, s))
	if resp := importWith(t, subs, "id,plan,suspended\n1,gold,yes\n", &pb.ImportSubscribersRequest{}); !resp.Applied || resp.Changed != 1 {
		t.Fatalf("not suspended: %v", resp)
	}
	if _, owner := runs(t, s); owner("down.rate") != "1Mbit by suspension" || owner("up.rate") != "1Mbit by suspension" {
		t.Errorf("suspended: down %s", owner("down.rate"))
	}
	for name, want := range map[string]string{"slow": "2Mbit by suspension", "gold": "2Mbit by suspension"} {
		rates := map[string]int{"slow": 2, "gold": 200}[name]
		resp, err := plans.UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: planMessage(name, rates, rates)})
		noError(t, err)
		if resp.GetAffectedRouters() != 1 {
			t.Errorf("plan %s reaches %d routers", name, resp.GetAffectedRouters())
		}
		if _, owner := runs(t, s); name == "slow" && owner("down.rate") != want {
			t.Errorf("after a change of the policy: %s", owner("down.rate"))
		}
	}
	_, err := plans.DeletePlan(t.Context(), &pb.DeletePlanRequest{Name: "slow"})
	wantReason(t, err, "FailedPrecondition IN_USE")
	// What the file doesn't speak about stays.
	importWith(t, subs, "id,plan\n1,gold\n", &pb.ImportSubscribersRequest{})
	if _, owner := runs(t, s); owner("down.rate") != "2Mbit by suspension" {
		t.Errorf("without the column: %s", owner("down.rate"))
	}
	importWith(t, subs, "id,plan,suspended\n1,gold,\n", &pb.ImportSubscribersRequest{})
	if _, owner := runs(t, s); owner("down.rate") != "200Mbit by plan" {
		t.Errorf("resumed: %s", owner("down.rate"))
	}
	if resp := importWith(t, subs, "id,plan,suspended\n1,gold,tarpit\n", &pb.ImportSubscribersRequest{}); len(resp.Errors) != 1 || resp.Errors[0].Column != "suspended" {
		t.Errorf("policy that does not exist: %v", resp.Errors)
	}
}

// Every writer changes its own layer and no other; every field shows whose it
// is.
func TestFleet019_FieldsShowTheirOwner(t *testing.T) {
	s, subs := served(t)
	_, err := subs.SetOverride(t.Context(), &pb.SetOverrideRequest{Id: "1", Set: map[string]string{"up.rate": "20mbit", "down.tins": "besteffort"}})
	noError(t, err)
	importWith(t, subs, "id,plan,down,up,site\n1,gold,90mbit,9mbit,north\n", &pb.ImportSubscribersRequest{})
	is := func(when string, want map[string]string) {
		t.Helper()
		_, owner := runs(t, s)
		for name, text := range want {
			if got := owner(name); got != text {
				t.Errorf("%s: %s is %s, want %s", when, name, got, text)
			}
		}
	}
	is("import after override", map[string]string{"down.rate": "90Mbit by billing", "up.rate": "20Mbit by override", "down.tins": "besteffort by override", "up.rtt": "50ms by plan"})
	_, err = subs.UpdateSubscriber(t.Context(), &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "gold", Labels: map[string]string{"site": "south"}}})
	noError(t, err)
	_, err = subs.SuspendSubscriber(t.Context(), &pb.SuspendSubscriberRequest{Id: "1"})
	noError(t, err)
	is("suspended", map[string]string{"down.rate": "1Mbit by suspension", "up.rate": "1Mbit by suspension", "down.tins": "besteffort by override"})
	_, err = subs.SuspendSubscriber(t.Context(), &pb.SuspendSubscriberRequest{Id: "1", Policy: "tarpit"})
	wantReason(t, err, "FailedPrecondition DANGLING")
	_, err = subs.ResumeSubscriber(t.Context(), &pb.ResumeSubscriberRequest{Id: "1"})
	noError(t, err)
	_, err = subs.SetOverride(t.Context(), &pb.SetOverrideRequest{Id: "1", Clear: []string{"up.rate"}})
	noError(t, err)
	is("one field cleared", map[string]string{"down.rate": "90Mbit by billing", "up.rate": "9Mbit by billing", "down.tins": "besteffort by override"})
	_, err = subs.SetOverride(t.Context(), &pb.SetOverrideRequest{Id: "1", ClearAll: true})
	noError(t, err)
	importWith(t, subs, "id,plan,down,up\n1,gold,,\n", &pb.ImportSubscribersRequest{})
	is("all cleared", map[string]string{"down.rate": "100Mbit by plan", "up.rate": "10Mbit by plan"})
	if resp, err := subs.SetOverride(t.Context(), &pb.SetOverrideRequest{Id: "1", ClearAll: true}); err != nil || resp.GetChanged() {
		t.Errorf("clearing nothing changed something: %v", err)
	}
}
