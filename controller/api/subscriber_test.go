package api_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func withPlans(t *testing.T, names ...string) (*storetest.KV, *store.Store, pb.SubscriberServiceClient) {
	t.Helper()
	kv := storetest.NewKV()
	s := storetest.Start(t, kv, store.Config{})
	for _, name := range names {
		_, err := s.PutPlan(t.Context(), storetest.Plan(name, 1, 1), 0)
		noError(t, err)
	}
	return kv, s, pb.NewSubscriberServiceClient(serve(t, s))
}

func TestSubscriberLife(t *testing.T) {
	ctx := t.Context()
	_, s, subs := withPlans(t, "gold", "silver")
	labels := map[string]string{"site": "north"}
	created, err := subs.CreateSubscriber(ctx, &pb.CreateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "gold", Labels: labels}})
	noError(t, err)
	_, err = s.PutRouter(ctx, plan.Router{ID: "r1", Subscriber: "1"}, 0)
	noError(t, err)
	got, err := subs.GetSubscriber(ctx, &pb.GetSubscriberRequest{Id: "1"})
	noError(t, err)
	want := &pb.Subscriber{Id: "1", Plan: "gold", Labels: labels, Revision: created.Subscriber.Revision, UpdateTime: created.Subscriber.UpdateTime, Routers: []string{"r1"}}
	if d := cmp.Diff(want, got.Subscriber, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	same, err := subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "gold", Labels: labels}})
	noError(t, err)
	if same.Changed || same.Subscriber.Revision != want.Revision {
		t.Errorf("an update without a change gave %v", same)
	}
	moved, err := subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "silver", Revision: want.Revision}})
	noError(t, err)
	if !moved.Changed || moved.Subscriber.Plan != "silver" || len(moved.Subscriber.Labels) != 0 {
		t.Errorf("update gave %v", moved)
	}
	_, err = subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "gold", Revision: want.Revision}})
	wantReason(t, err, "Aborted CONFLICT")
	_, err = subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "1", Plan: "brass"}})
	wantReason(t, err, "FailedPrecondition DANGLING")
	_, err = subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "2", Plan: "gold"}})
	wantReason(t, err, "NotFound NOT_FOUND")
	_, err = subs.UpdateSubscriber(ctx, &pb.UpdateSubscriberRequest{Subscriber: &pb.Subscriber{Id: "2", Plan: "gold"}, AllowMissing: true})
	noError(t, err)
	_, err = subs.CreateSubscriber(ctx, &pb.CreateSubscriberRequest{})
	wantReason(t, err, "InvalidArgument INVALID")
	_, err = subs.DeleteSubscriber(ctx, &pb.DeleteSubscriberRequest{Id: "1"})
	wantReason(t, err, "FailedPrecondition IN_USE")
	list, err := subs.ListSubscribers(ctx, &pb.ListSubscribersRequest{Plan: "silver"})
	noError(t, err)
	if len(list.Subscribers) != 1 || list.Subscribers[0].Id != "1" {
		t.Errorf("silver has %v", list.Subscribers)
	}
	noError(t, s.DeleteRouter(ctx, "r1", store.Any))
	_, err = subs.DeleteSubscriber(ctx, &pb.DeleteSubscriberRequest{Id: "1"})
	noError(t, err)
	_, err = subs.GetSubscriber(ctx, &pb.GetSubscriberRequest{Id: "1"})
	wantReason(t, err, "NotFound NOT_FOUND")
}

// Two services at one place stay two subscribers.
func TestFleet015_SameLabelsTwoSubscribers(t *testing.T) {
	_, s, subs := withPlans(t, "gold")
	resp := importFile(t, subs, "id,plan,site,name\nA-1,gold,mill road 1,Smith\nA-2,gold,mill road 1,Smith\n", false, false)
	s.View(func(st *store.State) {
		if n := st.CountSubscribers("gold"); resp.Added != 2 || n != 2 {
			t.Errorf("%d added, %d stored, want 2", resp.Added, n)
		}
	})
}

func importFile(t *testing.T, subs pb.SubscriberServiceClient, file string, dryRun, removeMissing bool) *pb.ImportSubscribersResponse {
	t.Helper()
	stream, err := subs.ImportSubscribers(t.Context())
	noError(t, err)
	// Small pieces, so that lines and characters are cut.
	for first := true; first || file != ""; first = false {
		n := min(len(file), 1000)
		noError(t, stream.Send(&pb.ImportSubscribersRequest{Chunk: []byte(file[:n]), DryRun: dryRun && first, RemoveMissing: removeMissing && first}))
		file = file[n:]
	}
	resp, err := stream.CloseAndRecv()
	noError(t, err)
	return resp
}

func TestFleet008_DryRunListsEveryBadLine(t *testing.T) {
	kv, s, subs := withPlans(t, "gold")
	before := kv.Txns()
	const file = "id,plan,site\n1,gold,north\n2,brass,\n3 3,gold,x\n1,gold,\n5,gold\n"
	for _, dry := range []bool{true, false} {
		resp := importFile(t, subs, file, dry, true)
		want := &pb.ImportSubscribersResponse{Errors: []*pb.ImportError{
			{Line: 3, Column: "plan", Message: "plan brass does not exist"},
			{Line: 4, Column: "id", Message: `subscriber id "3 3": ' ' at position 2; allowed are printable ASCII characters without space, "/" and ","`},
			{Line: 5, Column: "id", Message: "subscriber 1 is on line 2 already"},
			{Line: 6, Message: "line has 2 columns, the first line has 3"},
		}}
		if d := cmp.Diff(want, resp, protocmp.Transform()); d != "" {
			t.Errorf("dry run %t: %s", dry, d)
		}
	}
	s.View(func(st *store.State) {
		if _, n, _ := st.Len(); n != 0 || kv.Txns() != before {
			t.Errorf("%d subscribers stored with %d writes", n, kv.Txns()-before)
		}
	})
}

// Each flag alone does what it says, and the dry run tells what the import
// then does.
func TestFleet018_ImportFlags(t *testing.T) {
	_, s, subs := withPlans(t, "gold", "silver")
	importFile(t, subs, "id,plan,site\n1,gold,north\n2,gold,south\n3,gold,west\n", false, false)
	const file = "id;plan;site\r\n1;gold;north\r\n2;silver;\r\n4;gold;east\r\n"
	ids := func() (got []string) {
		s.View(func(st *store.State) {
			for sub := range st.Subscribers("") {
				got = append(got, sub.ID+" "+sub.Plan+" "+sub.Labels["site"])
			}
		})
		return got
	}
	start := []string{"1 gold north", "2 gold south", "3 gold west"}
	for _, step := range []struct {
		name        string
		dry, remove bool
		want        *pb.ImportSubscribersResponse
		stored      []string
	}{
		{"dry run with removal", true, true, &pb.ImportSubscribersResponse{Added: 1, Changed: 1, Removed: 1, Unchanged: 1, Changes: []*pb.ImportChange{
			{Kind: pb.ImportChange_KIND_CHANGED, Id: "2", Before: "plan gold, site south", After: "plan silver"},
			{Kind: pb.ImportChange_KIND_ADDED, Id: "4", After: "plan gold, site east"},
			{Kind: pb.ImportChange_KIND_REMOVED, Id: "3", Before: "plan gold, site west"},
		}}, start},
		{"dry run", true, false, &pb.ImportSubscribersResponse{Added: 1, Changed: 1, Unchanged: 1, Changes: []*pb.ImportChange{
			{Kind: pb.ImportChange_KIND_CHANGED, Id: "2", Before: "plan gold, site south", After: "plan silver"},
			{Kind: pb.ImportChange_KIND_ADDED, Id: "4", After: "plan gold, site east"},
		}}, start},
		{"import", false, false, &pb.ImportSubscribersResponse{Added: 1, Changed: 1, Unchanged: 1, Applied: true, Changes: []*pb.ImportChange{
			{Kind: pb.ImportChange_KIND_CHANGED, Id: "2", Before: "plan gold, site south", After: "plan silver"},
			{Kind: pb.ImportChange_KIND_ADDED, Id: "4", After: "plan gold, site east"},
		}}, []string{"1 gold north", "2 silver ", "3 gold west", "4 gold east"}},
		{"again", false, false, &pb.ImportSubscribersResponse{Unchanged: 3, Applied: true}, []string{"1 gold north", "2 silver ", "3 gold west", "4 gold east"}},
		{"with removal", false, true, &pb.ImportSubscribersResponse{Removed: 1, Unchanged: 3, Applied: true, Changes: []*pb.ImportChange{
			{Kind: pb.ImportChange_KIND_REMOVED, Id: "3", Before: "plan gold, site west"},
		}}, []string{"1 gold north", "2 silver ", "4 gold east"}},
	} {
		resp := importFile(t, subs, file, step.dry, step.remove)
		if d := cmp.Diff(step.want, resp, protocmp.Transform()); d != "" {
			t.Errorf("%s: %s", step.name, d)
		}
		if d := cmp.Diff(step.stored, ids()); d != "" {
			t.Errorf("after %s: %s", step.name, d)
		}
	}
}

func TestImportRefusesToRemoveWhoIsServed(t *testing.T) {
	_, s, subs := withPlans(t, "gold")
	importFile(t, subs, "id,plan\n1,gold\n2,gold\n", false, false)
	_, err := s.PutRouter(t.Context(), plan.Router{ID: "r1", Subscriber: "2"}, 0)
	noError(t, err)
	for _, file := range []string{"id,plan\n1,gold\n", "id,plan\n"} {
		resp := importFile(t, subs, file, false, true)
		if len(resp.Errors) != 1 || resp.Applied {
			t.Errorf("%q: %v, want one error", file, resp)
		}
	}
}

func TestImportOfManyLines(t *testing.T) {
	_, s, subs := withPlans(t, "gold")
	var file strings.Builder
	file.WriteString("id,plan\n")
	for i := range 3000 {
		fmt.Fprintf(&file, "%d,gold\n", i)
	}
	resp := importFile(t, subs, file.String(), false, false)
	s.View(func(st *store.State) {
		if n := st.CountSubscribers("gold"); resp.Added != 3000 || len(resp.Changes) != 1000 || !resp.Applied || n != 3000 {
			t.Errorf("%d added, %d told, %d stored, applied: %t", resp.Added, len(resp.Changes), n, resp.Applied)
		}
	})
	bad := importFile(t, subs, "id,plan\n"+strings.Repeat("x y,gold\n", 10_500), false, false)
	if n := len(bad.Errors); n != 10_001 || !strings.HasPrefix(bad.Errors[n-1].Message, "and ") {
		t.Errorf("%d errors are told, the last is %v", n, bad.Errors[n-1])
	}
	last := ""
	var got int
	for {
		list, err := subs.ListSubscribers(t.Context(), &pb.ListSubscribersRequest{PageToken: last, Plan: "gold"})
		noError(t, err)
		got += len(list.Subscribers)
		if last = list.NextPageToken; last == "" {
			break
		}
	}
	if got != 3000 {
		t.Errorf("%d subscribers in pages, want 3000", got)
	}
}
