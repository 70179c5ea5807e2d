package api

import (
	"context"
	"errors"
	"fmt"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// maxReason is the longest reason of a revocation, bytes.
const maxReason = 200

// RevokeRouter refuses a router's key from now on. Its sessions end when the
// controllers' watches see that.
func (s *RouterService) RevokeRouter(ctx context.Context, req *pb.RevokeRouterRequest) (*pb.RevokeRouterResponse, error) {
	if err := checkReason(req.GetReason()); err != nil {
		return nil, statusOf(err)
	}
	if _, err := s.store.Revoke(ctx, req.GetId(), identity.CallerFrom(ctx).Name, req.GetReason()); err != nil {
		return nil, statusOf(err)
	}
	m, err := s.get(req.GetId())
	if err != nil {
		return nil, err
	}
	return &pb.RevokeRouterResponse{Router: s.message(m)}, nil
}

func checkReason(reason string) error {
	if len(reason) > maxReason {
		return badField("reason", fmt.Errorf("reason: %d bytes, at most %d are allowed", len(reason), maxReason))
	}
	if printable(reason) != reason {
		return badField("reason", errors.New("reason: has characters that can't be printed"))
	}
	return nil
}

// ReadmitRouter takes a revocation back.
func (s *RouterService) ReadmitRouter(ctx context.Context, req *pb.ReadmitRouterRequest) (*pb.ReadmitRouterResponse, error) {
	if (req.GetId() == "") == (req.GetFingerprint() == "") {
		return nil, statusOf(badField("id", errors.New("either the id of a router or the fingerprint of a key is needed")))
	}
	var k plan.Key
	what := "fingerprint " + req.GetFingerprint()
	if req.GetId() != "" {
		m, err := s.get(req.GetId())
		if err != nil {
			return nil, err
		}
		k, what = m.router.Key, "router "+req.GetId()
	} else {
		var err error
		if k, err = plan.ParseKey(req.GetFingerprint()); err != nil {
			return nil, statusOf(badField("fingerprint", err))
		}
	}
	err := s.store.Readmit(ctx, k)
	if errors.Is(err, store.ErrNotFound) {
		return nil, statusOf(badField("id", fmt.Errorf("%s: is not revoked", what)))
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.ReadmitRouterResponse{}, nil
}

// ReleaseRouter ends a quarantine. If both devices still live, it begins again.
func (s *RouterService) ReleaseRouter(ctx context.Context, req *pb.ReleaseRouterRequest) (*pb.ReleaseRouterResponse, error) {
	released, err := s.store.Release(ctx, req.GetId())
	if err == nil && !released {
		err = badField("id", fmt.Errorf("router %s: is not in quarantine", req.GetId()))
	}
	if err != nil {
		return nil, statusOf(err)
	}
	m, err := s.get(req.GetId())
	if err != nil {
		return nil, err
	}
	return &pb.ReleaseRouterResponse{Router: s.message(m)}, nil
}

// fingerprint returns a key as operators see it; empty for none.
func fingerprint(k plan.Key) string {
	if k == (plan.Key{}) {
		return ""
	}
	return k.String()
}

func fromRevocation(v *store.Revocation) *pb.Revocation {
	if v == nil {
		return nil
	}
	return &pb.Revocation{Time: wire.FromTime(v.Time), Operator: v.Operator, Reason: v.Reason}
}

func fromQuarantine(q *plan.Quarantine) *pb.Quarantine {
	if q == nil {
		return nil
	}
	m := &pb.Quarantine{Time: wire.FromTime(q.Since)}
	for _, d := range q.Devices {
		m.Devices = append(m.Devices, &pb.Device{Address: d.Address, BootId: d.BootID, Model: d.Model})
	}
	return m
}
