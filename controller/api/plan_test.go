package api_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// serve returns a connection to the plan and subscriber services on s.
func serve(t *testing.T, s *store.Store) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	pb.RegisterPlanServiceServer(server, api.NewPlanService(s))
	pb.RegisterSubscriberServiceServer(server, api.NewSubscriberService(s))
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:memory",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func planMessage(name string, down, up int) *pb.Plan {
	m := wire.FromPlan(storetest.Plan(name, down, up))
	m.UpdateTime = nil
	return m
}

// reason returns the code and the reason of a status, and its metadata.
func reason(t *testing.T, err error) (string, map[string]string) {
	t.Helper()
	st := status.Convert(err)
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return st.Code().String() + " " + info.GetReason(), info.GetMetadata()
		}
	}
	return st.Code().String(), nil
}

func wantReason(t *testing.T, err error, want string) map[string]string {
	t.Helper()
	got, facts := reason(t, err)
	if got != want {
		t.Errorf("got %s (%v), want %s", got, err, want)
	}
	return facts
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPlanLife(t *testing.T) {
	ctx := t.Context()
	plans := pb.NewPlanServiceClient(serve(t, storetest.NewFake(t)))
	created, err := plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage("gold", 115, 12)})
	noError(t, err)
	if created.Plan.Revision == 0 || created.Plan.UpdateTime == nil || !proto.Equal(created.Plan.Link, planMessage("gold", 115, 12).Link) {
		t.Errorf("created %v", created.Plan)
	}
	got, err := plans.GetPlan(ctx, &pb.GetPlanRequest{Name: "gold"})
	noError(t, err)
	if d := cmp.Diff(created.Plan, got.Plan, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	_, err = plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage("gold", 1, 1)})
	wantReason(t, err, "AlreadyExists EXISTS")
	_, err = plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold", Revision: got.Plan.Revision + 1})
	wantReason(t, err, "Aborted CONFLICT")
	_, err = plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold"})
	noError(t, err)
	_, err = plans.GetPlan(ctx, &pb.GetPlanRequest{Name: "gold"})
	wantReason(t, err, "NotFound NOT_FOUND")
	_, err = plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold"})
	wantReason(t, err, "NotFound NOT_FOUND")
}

func TestUpdatePlan(t *testing.T) {
	ctx := t.Context()
	kv := storetest.NewKV()
	s := storetest.Start(t, kv, store.Config{})
	plans := pb.NewPlanServiceClient(serve(t, s))
	created, err := plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage("gold", 115, 12)})
	noError(t, err)
	_, err = s.PutSubscriber(ctx, plan.Subscriber{ID: "1", Plan: "gold"}, 0)
	noError(t, err)
	for _, id := range []string{"r1", "r2", "r3"} {
		_, err = s.PutRouter(ctx, plan.Router{ID: id, Subscriber: "1"}, 0)
		noError(t, err)
	}
	rate := func(bps uint64) *pb.Plan {
		return &pb.Plan{Name: "gold", Link: &pb.Link{Down: &pb.Shaping{RateBps: bps}}}
	}
	mask := func(paths ...string) *fieldmaskpb.FieldMask { return &fieldmaskpb.FieldMask{Paths: paths} }

	t.Run("only told", func(t *testing.T) {
		before := kv.Txns()
		resp, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: rate(5e6), UpdateMask: mask("link.down.rate_bps"), ValidateOnly: true})
		noError(t, err)
		if !resp.Changed || resp.AffectedRouters != 3 || resp.Plan.Link.Down.RateBps != 5e6 || resp.Plan.Revision != created.Plan.Revision || kv.Txns() != before {
			t.Errorf("%v with %d writes", resp, kv.Txns()-before)
		}
	})
	t.Run("one field, one write", func(t *testing.T) {
		before := kv.Txns()
		resp, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: rate(50e6), UpdateMask: mask("link.down.rate_bps")})
		noError(t, err)
		want := planMessage("gold", 50, 12).Link
		if d := cmp.Diff(want, resp.Plan.Link, protocmp.Transform()); d != "" || !resp.Changed || resp.AffectedRouters != 3 || resp.Plan.Routers != 3 || resp.Plan.Subscribers != 1 {
			t.Errorf("changed %t, reaches %d of %d\n%s", resp.Changed, resp.AffectedRouters, resp.Plan.Routers, d)
		}
		if n := kv.Txns() - before; n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
	t.Run("nothing changes, nothing is written", func(t *testing.T) {
		before := kv.Txns()
		resp, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: rate(50e6), UpdateMask: mask("link.down.rate_bps")})
		noError(t, err)
		if resp.Changed || resp.AffectedRouters != 0 || kv.Txns() != before {
			t.Errorf("%v with %d writes", resp, kv.Txns()-before)
		}
	})
	t.Run("another revision", func(t *testing.T) {
		p := rate(1e6)
		p.Revision = created.Plan.Revision
		for _, only := range []bool{false, true} {
			_, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: p, UpdateMask: mask("link.down.rate_bps"), ValidateOnly: only})
			facts := wantReason(t, err, "Aborted CONFLICT")
			got, _ := plans.GetPlan(ctx, &pb.GetPlanRequest{Name: "gold"})
			if facts["stored_revision"] != fmt.Sprint(got.GetPlan().GetRevision()) || facts["stored_at"] == "" {
				t.Errorf("facts are %v, stored is revision %d", facts, got.GetPlan().GetRevision())
			}
		}
	})
	t.Run("one whole direction", func(t *testing.T) {
		p := planMessage("gold", 7, 7)
		resp, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: p, UpdateMask: mask("link.up")})
		noError(t, err)
		if d := cmp.Diff(planMessage("gold", 50, 7).Link, resp.Plan.Link, protocmp.Transform()); d != "" {
			t.Error(d)
		}
	})
	for _, c := range []struct {
		name, path string
		plan       *pb.Plan
		want       string
	}{
		{"name can't change", "name", rate(1), "InvalidArgument INVALID"},
		{"no such field", "link.down.color", rate(1), "InvalidArgument INVALID"},
		{"field of a number", "link.down.rate_bps.x", rate(1), "InvalidArgument INVALID"},
		{"direction that is missing", "link.up", rate(1), "InvalidArgument INVALID"},
		{"whole link that is missing", "", &pb.Plan{Name: "gold"}, "InvalidArgument INVALID"},
		{"above every link", "link.down.rate_bps", rate(1e12), "InvalidArgument INVALID"},
		{"no such plan", "link.down.rate_bps", &pb.Plan{Name: "brass", Link: rate(1).Link}, "NotFound NOT_FOUND"},
		{"no plan", "", nil, "InvalidArgument INVALID"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := kv.Txns()
			req := &pb.UpdatePlanRequest{Plan: c.plan}
			if c.path != "" {
				req.UpdateMask = mask(c.path)
			}
			_, err := plans.UpdatePlan(ctx, req)
			wantReason(t, err, c.want)
			if kv.Txns() != before {
				t.Error("something was written")
			}
		})
	}
	t.Run("made if missing", func(t *testing.T) {
		p := rate(9e6)
		p.Name = "new"
		resp, err := plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: p, UpdateMask: mask("link.down.rate_bps"), AllowMissing: true})
		noError(t, err)
		if !resp.Changed || resp.Plan.Link.Down.RateBps != 9e6 || resp.Plan.Link.Up.Mtu != 1514 {
			t.Errorf("%v", resp)
		}
		// Hosts share the line equally, whatever number of flows each has.
		for direction, want := range map[*pb.Shaping]pb.FlowMode{
			resp.Plan.Link.Down: pb.FlowMode_FLOW_MODE_DUAL_DSTHOST,
			resp.Plan.Link.Up:   pb.FlowMode_FLOW_MODE_DUAL_SRCHOST,
		} {
			if direction.Flows != want || !direction.Nat {
				t.Errorf("a new plan has %v", direction)
			}
		}
		p.Name, p.Revision = "other", 7
		_, err = plans.UpdatePlan(ctx, &pb.UpdatePlanRequest{Plan: p, AllowMissing: true})
		wantReason(t, err, "NotFound NOT_FOUND")
	})
}

// A shaping in which nothing is set must not mean "unlimited" by accident.
func TestFleet012_EmptyShapingIsRefused(t *testing.T) {
	plans := pb.NewPlanServiceClient(serve(t, storetest.NewFake(t)))
	_, err := plans.CreatePlan(t.Context(), &pb.CreatePlanRequest{Plan: &pb.Plan{Name: "gold", Link: &pb.Link{Down: &pb.Shaping{}, Up: &pb.Shaping{}}}})
	wantReason(t, err, "InvalidArgument INVALID")
}

func TestDeletePlanInUse(t *testing.T) {
	ctx := t.Context()
	s := storetest.NewFake(t)
	plans := pb.NewPlanServiceClient(serve(t, s))
	for _, name := range []string{"gold", "silver"} {
		_, err := plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage(name, 1, 1)})
		noError(t, err)
	}
	for _, id := range []string{"1", "2"} {
		_, err := s.PutSubscriber(ctx, plan.Subscriber{ID: id, Plan: "gold"}, 0)
		noError(t, err)
	}
	_, err := plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold"})
	facts := wantReason(t, err, "FailedPrecondition IN_USE")
	if facts["count"] != "2" || !strings.Contains(err.Error(), "in use by 2 subscribers, such as 1") {
		t.Errorf("%v with %v", err, facts)
	}
	_, err = plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold", Replacement: "brass"})
	facts = wantReason(t, err, "FailedPrecondition DANGLING")
	if facts["missing_id"] != "brass" {
		t.Errorf("facts are %v", facts)
	}
	resp, err := plans.DeletePlan(ctx, &pb.DeletePlanRequest{Name: "gold", Replacement: "silver"})
	noError(t, err)
	if resp.MovedSubscribers != 2 {
		t.Errorf("moved %d, want 2", resp.MovedSubscribers)
	}
}

func TestListPlansInPages(t *testing.T) {
	ctx := t.Context()
	s := storetest.NewFake(t)
	plans := pb.NewPlanServiceClient(serve(t, s))
	var want, got []string
	for i := range 7 {
		name := fmt.Sprintf("p%d", i)
		_, err := s.PutPlan(ctx, storetest.Plan(name, 1, 1), 0)
		noError(t, err)
		want = append(want, name)
	}
	pages, token := 0, ""
	for {
		resp, err := plans.ListPlans(ctx, &pb.ListPlansRequest{PageSize: 3, PageToken: token})
		noError(t, err)
		for _, p := range resp.Plans {
			got = append(got, p.Name)
		}
		pages++
		if token = resp.NextPageToken; token == "" {
			break
		}
		// What is removed between two pages doesn't upset them.
		_, err = s.DeletePlan(ctx, got[len(got)-1], "", store.Any)
		noError(t, err)
	}
	if !slices.Equal(got, want) || pages != 3 {
		t.Errorf("%d pages with %v", pages, got)
	}
	_, err := plans.ListPlans(ctx, &pb.ListPlansRequest{PageToken: "x"})
	wantReason(t, err, "InvalidArgument INVALID")
}

func TestStoreIsDown(t *testing.T) {
	ctx := t.Context()
	kv := storetest.NewKV()
	plans := pb.NewPlanServiceClient(serve(t, storetest.Start(t, kv, store.Config{})))
	_, err := plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage("gold", 1, 1)})
	noError(t, err)
	for down, want := range map[error]string{store.ErrUnavailable: "Unavailable STORE_UNAVAILABLE", store.ErrFull: "ResourceExhausted STORE_FULL"} {
		kv.SetDown(down)
		_, err = plans.CreatePlan(ctx, &pb.CreatePlanRequest{Plan: planMessage("silver", 1, 1)})
		wantReason(t, err, want)
		if _, err := plans.GetPlan(ctx, &pb.GetPlanRequest{Name: "gold"}); status.Code(err) != codes.OK {
			t.Errorf("what is known can't be read: %v", err)
		}
	}
}
