package api

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	minFingerprint = 8    // digits that name a key which waits
	maxProvision   = 1000 // routers in one request
)

// JoinService lets operators decide which routers join.
type JoinService struct {
	pb.UnimplementedJoinServiceServer

	store      *store.Store
	enrollment *EnrollmentService
}

// NewJoinService returns the service for who waits at enrollment.
func NewJoinService(s *store.Store, enrollment *EnrollmentService) *JoinService {
	return &JoinService{store: s, enrollment: enrollment}
}

// ListPending returns the keys that wait for an operator at this controller.
func (j *JoinService) ListPending(context.Context, *pb.ListPendingRequest) (*pb.ListPendingResponse, error) {
	all, refused := j.enrollment.pending.list(time.Now())
	known := j.routersOf(all)
	resp := &pb.ListPendingResponse{Refused: refused}
	for _, p := range all {
		m := &pb.PendingRouter{
			Fingerprint: p.key.String(), Serial: p.serial, Model: p.model, Address: p.address,
			Since: wire.FromTime(p.since), LastSeen: wire.FromTime(p.seen), KnownRouterId: known[p.serial],
		}
		if x, ok := j.provisioned(p.serial); ok {
			m.Provisioned = fromSerial(x)
		}
		resp.Pending = append(resp.Pending, m)
	}
	return resp, nil
}

func (j *JoinService) provisioned(serial string) (x store.Serial, ok bool) {
	j.store.View(func(st *store.State) { x, ok = st.Serial(serial) })
	return x, ok
}

// routersOf returns the routers that have the serials of those who wait.
func (j *JoinService) routersOf(all []pendingRouter) map[string]string {
	known := map[string]string{}
	for _, p := range all {
		if p.serial != "" {
			known[p.serial] = ""
		}
	}
	if len(known) == 0 {
		return known
	}
	for after, more := "", true; more; {
		n := 0
		j.store.View(func(st *store.State) {
			for r := range st.Routers(after) {
				if _, wanted := known[r.Serial]; wanted {
					known[r.Serial] = r.ID
				}
				if after, n = r.ID, n+1; n == viewSize {
					break
				}
			}
		})
		more = n == viewSize
	}
	return known
}

// named returns the key that a fingerprint, or its beginning, names, and what
// is known of it if it waits here.
func (j *JoinService) named(digits string) (pendingRouter, error) {
	digits = strings.ToLower(strings.ReplaceAll(digits, ":", ""))
	now := time.Now()
	if k, err := plan.ParseKey(digits); err == nil {
		if found := j.enrollment.pending.find(digits, now); len(found) == 1 {
			return found[0], nil
		}
		return pendingRouter{key: k}, nil // it waits at another controller, or has not come yet
	}
	if len(digits) < minFingerprint {
		return pendingRouter{}, badField("fingerprint", fmt.Errorf("fingerprint %q: give at least %d of its digits", digits, minFingerprint))
	}
	found := j.enrollment.pending.find(digits, now)
	switch len(found) {
	case 0:
		return pendingRouter{}, badField("fingerprint", fmt.Errorf("fingerprint %.70q: nobody waits with it at this controller; if the router asks another one, give all 64 digits", digits))
	case 1:
		return found[0], nil
	default:
		return pendingRouter{}, badField("fingerprint", fmt.Errorf("fingerprint %q: %d keys that wait begin so; give more digits", digits, len(found)))
	}
}

// Approve makes a key the one of a router.
func (j *JoinService) Approve(ctx context.Context, req *pb.ApproveRequest) (*pb.ApproveResponse, error) {
	p, err := j.named(req.GetFingerprint())
	if err != nil {
		return nil, statusOf(err)
	}
	a := store.Admission{Replace: req.GetReplace(), Router: plan.Router{
		ID: req.GetRouterId(), Subscriber: req.GetSubscriber(), Labels: req.GetLabels(), Serial: p.serial, Key: p.key,
	}}
	if x, ok := j.provisioned(p.serial); ok && (a.Router.ID == "" || a.Router.ID == x.Router) {
		if x.Key != (plan.Key{}) && x.Key != p.key && !a.Replace {
			return nil, status.Errorf(codes.FailedPrecondition, "serial %s: is announced with another key than the one that asks; if the router's key was made anew, approve it with replace", x.Serial)
		}
		a.Serial, a.Router.ID = x.Serial, x.Router
		if a.Router.Subscriber == "" {
			a.Router.Subscriber = x.Subscriber
		}
		if len(a.Router.Labels) == 0 {
			a.Router.Labels = x.Labels
		}
	}
	if a.Router.ID == "" {
		return nil, statusOf(badField("router_id", errors.New("which router is it? its serial is not announced, so give it an id")))
	}
	r, err := j.store.Admit(ctx, a)
	if errors.Is(err, store.ErrExists) {
		return nil, status.Errorf(codes.AlreadyExists, "router %s: has another key; approve with replace if this device takes its place", a.Router.ID)
	}
	if err != nil {
		return nil, statusOf(err)
	}
	j.enrollment.pending.drop(p.key)
	return &pb.ApproveResponse{RouterId: r.ID, Fingerprint: p.key.String(), Subscriber: r.Subscriber}, nil
}

// Reject refuses a key from now on.
func (j *JoinService) Reject(ctx context.Context, req *pb.RejectRequest) (*pb.RejectResponse, error) {
	if err := checkReason(req.GetReason()); err != nil {
		return nil, statusOf(err)
	}
	p, err := j.named(req.GetFingerprint())
	if err != nil {
		return nil, statusOf(err)
	}
	if r, ok := j.enrollment.routerOf(p.key); ok {
		return nil, statusOf(badField("fingerprint", fmt.Errorf("fingerprint %s: is the key of router %s; revoke that", p.key, r.ID)))
	}
	if _, err := j.store.RevokeKey(ctx, p.key, identity.CallerFrom(ctx).Name, req.GetReason()); err != nil {
		return nil, statusOf(err)
	}
	j.enrollment.pending.drop(p.key)
	return &pb.RejectResponse{Fingerprint: p.key.String()}, nil
}

// Provision announces routers. Each is answered for itself.
func (j *JoinService) Provision(ctx context.Context, req *pb.ProvisionRequest) (*pb.ProvisionResponse, error) {
	if n := len(req.GetRouters()); n == 0 || n > maxProvision {
		return nil, statusOf(badField("routers", fmt.Errorf("%d routers: must be 1 to %d", n, maxProvision)))
	}
	resp := &pb.ProvisionResponse{}
	for _, m := range req.GetRouters() {
		text := ""
		err := j.provision(ctx, m)
		switch {
		case err == nil:
		case errors.Is(err, store.ErrInvalid), errors.Is(err, store.ErrDangling), errors.Is(err, errRequest):
			text = err.Error()
		default: // the rest would go wrong as well
			return nil, statusOf(err)
		}
		resp.Errors = append(resp.Errors, text)
	}
	return resp, nil
}

func (j *JoinService) provision(ctx context.Context, m *pb.ProvisionedRouter) error {
	x := store.Serial{Serial: m.GetSerial(), Router: m.GetRouterId(), Subscriber: m.GetSubscriber(), Labels: m.GetLabels()}
	if x.Router == "" {
		x.Router = strings.ToLower(x.Serial)
	}
	if m.GetFingerprint() != "" {
		var err error
		if x.Key, err = plan.ParseKey(m.GetFingerprint()); err != nil {
			return badField("fingerprint", err)
		}
	}
	_, err := j.store.PutSerial(ctx, x)
	return err
}

// ListProvisioned returns the serials that have not joined yet.
func (j *JoinService) ListProvisioned(_ context.Context, req *pb.ListProvisionedRequest) (*pb.ListProvisionedResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListProvisionedResponse{}
	j.store.View(func(st *store.State) {
		resp.Routers, resp.NextPageToken = collect(p, st.Serials(p.after),
			func(x store.Serial) string { return x.Serial },
			func(store.Serial) bool { return true },
			fromSerial)
	})
	return resp, nil
}

// Unprovision takes an announcement back.
func (j *JoinService) Unprovision(ctx context.Context, req *pb.UnprovisionRequest) (*pb.UnprovisionResponse, error) {
	if err := j.store.DeleteSerial(ctx, req.GetSerial()); err != nil {
		return nil, statusOf(err)
	}
	return &pb.UnprovisionResponse{}, nil
}

func fromSerial(x store.Serial) *pb.ProvisionedRouter {
	return &pb.ProvisionedRouter{
		Serial: x.Serial, RouterId: x.Router, Subscriber: x.Subscriber, Labels: x.Labels, Fingerprint: fingerprint(x.Key),
	}
}
