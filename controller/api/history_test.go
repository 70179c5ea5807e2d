package api_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rates returns the revisions of plan gold and the rate of each in Mbit/s, newest
// first.
func rates(t *testing.T, plans pb.PlanServiceClient) (revisions []int64, down []uint64) {
	t.Helper()
	resp, err := plans.ListPlanRevisions(t.Context(), &pb.ListPlanRevisionsRequest{Name: "gold"})
	noError(t, err)
	for _, p := range resp.GetRevisions() {
		revisions, down = append(revisions, p.GetRevision()), append(down, p.GetLink().GetDown().GetRateBps()/1_000_000)
	}
	return revisions, down
}

// Going back to what a plan was makes a new revision, which is in the history
// like every other, with who made it.
func TestFleet038_RollbackIsANewRevision(t *testing.T) {
	f := newFixture(t)
	plans := pb.NewPlanServiceClient(f.dial(f.operators, f.operatorCert()))
	for _, down := range []int{100, 200, 300} {
		_, err := plans.UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: planMessage("gold", down, 10), AllowMissing: true})
		noError(t, err)
	}
	f.setRouter("home-1", "gold")
	revisions, _ := rates(t, plans)
	first := revisions[len(revisions)-1]
	dry, err := plans.RollbackPlan(t.Context(), &pb.RollbackPlanRequest{Name: "gold", ToRevision: first, ValidateOnly: true})
	noError(t, err)
	if after, _ := rates(t, plans); !dry.GetChanged() || dry.GetAffectedRouters() != 1 || len(after) != 3 {
		t.Errorf("dry run: %v, %d revisions", dry, len(after))
	}
	_, err = plans.RollbackPlan(t.Context(), &pb.RollbackPlanRequest{Name: "gold", ToRevision: first, Revision: revisions[1]})
	wantReason(t, err, "Aborted CONFLICT")
	resp, err := plans.RollbackPlan(t.Context(), &pb.RollbackPlanRequest{Name: "gold", ToRevision: first, Revision: revisions[0]})
	noError(t, err)
	after, down := rates(t, plans)
	if len(down) != 4 || down[0] != 100 || down[1] != 300 || down[2] != 200 || down[3] != 100 {
		t.Errorf("history is %v", down)
	}
	if p := resp.GetPlan(); p.GetRevision() <= revisions[0] || p.GetRevision() != after[0] || p.GetAuthor() != "admin" || !resp.GetChanged() {
		t.Errorf("rolled back to %v", p)
	}
	_, err = plans.RollbackPlan(t.Context(), &pb.RollbackPlanRequest{Name: "gold", ToRevision: first + 1_000_000})
	wantReason(t, err, "InvalidArgument INVALID")
	_, err = plans.ListPlanRevisions(t.Context(), &pb.ListPlanRevisionsRequest{Name: "brass"})
	wantReason(t, err, "NotFound NOT_FOUND")

	// What was removed can come back.
	noError(t, f.store.DeleteRouter(t.Context(), "home-1", store.Any))
	noError(t, f.store.DeleteSubscriber(t.Context(), "sub-home-1", store.Any))
	_, err = plans.DeletePlan(t.Context(), &pb.DeletePlanRequest{Name: "gold"})
	noError(t, err)
	_, err = plans.RollbackPlan(t.Context(), &pb.RollbackPlanRequest{Name: "gold", ToRevision: revisions[1]})
	noError(t, err)
	if _, down := rates(t, plans); down[0] != 200 {
		t.Errorf("history is %v after the plan came back", down)
	}
}

// The second of two operators on one plan is told what the first one changed.
func TestConflictTellsWhatChanged(t *testing.T) {
	f := newFixture(t)
	plans := pb.NewPlanServiceClient(f.dial(f.operators, f.operatorCert()))
	seen, err := plans.UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: planMessage("gold", 100, 10), AllowMissing: true})
	noError(t, err)
	p := storetest.Plan("gold", 200, 10)
	p.Author = "bob"
	p.Link.Up.Wash = true
	_, err = f.store.PutPlan(t.Context(), p, store.Any)
	noError(t, err)
	mine := planMessage("gold", 100, 20)
	mine.Revision = seen.GetPlan().GetRevision()
	_, err = plans.UpdatePlan(t.Context(), &pb.UpdatePlanRequest{Plan: mine, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"link.up.rate_bps"}}})
	facts := wantReason(t, err, "Aborted CONFLICT")
	if want := "bob changed down.rate 100Mbit -> 200Mbit, up.wash false -> true"; err == nil || !strings.HasSuffix(err.Error(), want) || facts["id"] != "gold" {
		t.Errorf("%v doesn't end in %q; facts %v", err, want, facts)
	}
}

// Only so many revisions are kept.
func TestHistoryIsBounded(t *testing.T) {
	s := storetest.NewFake(t)
	plans := pb.NewPlanServiceClient(serve(t, s))
	for i := range 120 {
		_, err := s.PutPlan(t.Context(), storetest.Plan("gold", 1+i, 1), store.Any)
		noError(t, err)
	}
	_, err := s.PutPlan(t.Context(), storetest.Plan("gold-2", 1, 1), store.Any)
	noError(t, err)
	if _, down := rates(t, plans); len(down) != 100 || down[0] != 120 || down[99] != 21 {
		t.Errorf("%d revisions, %v", len(down), down)
	}
}
