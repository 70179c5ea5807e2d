package ctl_test

import (
	"context"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

var someKey = strings.Repeat("0123456789abcdef", 4)

func (f *fleet) GetAuthority(context.Context, *pb.GetAuthorityRequest) (*pb.GetAuthorityResponse, error) {
	return &pb.GetAuthorityResponse{Pin: "cGlu", ExpireTime: before(-20 * 24 * time.Hour), Warning: "the fleet's authority ends in 20 days"}, nil
}

func (f *fleet) ListPending(context.Context, *pb.ListPendingRequest) (*pb.ListPendingResponse, error) {
	p := func(serial string) *pb.PendingRouter {
		return &pb.PendingRouter{Fingerprint: someKey, Serial: serial, Model: "Archer C7 v2", Address: "192.0.2.7:40312", Since: before(5 * time.Minute), LastSeen: before(20 * time.Second)}
	}
	announced, other, known := p("SN1"), p("SN2"), p("SN3")
	announced.Provisioned = &pb.ProvisionedRouter{Serial: "SN1", RouterId: "sn1", Subscriber: "10001"}
	other.Provisioned = &pb.ProvisionedRouter{Serial: "SN2", RouterId: "sn2", Fingerprint: someKey}
	known.KnownRouterId = "home-1"
	return &pb.ListPendingResponse{Pending: []*pb.PendingRouter{announced, other, known, p("")}, Refused: 3}, nil
}

func (f *fleet) Approve(_ context.Context, r *pb.ApproveRequest) (*pb.ApproveResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.approved = r
	if r.RouterId == "home-1" && !r.Replace {
		return nil, status.Error(codes.AlreadyExists, "router home-1: has another key; approve with replace if this device takes its place")
	}
	return &pb.ApproveResponse{RouterId: r.RouterId, Fingerprint: someKey, Subscriber: r.Subscriber}, nil
}

func (f *fleet) Reject(context.Context, *pb.RejectRequest) (*pb.RejectResponse, error) {
	return &pb.RejectResponse{Fingerprint: someKey}, nil
}

func (f *fleet) Provision(_ context.Context, r *pb.ProvisionRequest) (*pb.ProvisionResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &pb.ProvisionResponse{}
	for _, x := range r.Routers {
		text := ""
		if x.Subscriber == "nobody" {
			text = "serial " + x.Serial + ": subscriber nobody does not exist"
		} else {
			f.announced = append(f.announced, x)
		}
		resp.Errors = append(resp.Errors, text)
	}
	return resp, nil
}

func (f *fleet) ListProvisioned(context.Context, *pb.ListProvisionedRequest) (*pb.ListProvisionedResponse, error) {
	return &pb.ListProvisionedResponse{Routers: []*pb.ProvisionedRouter{
		{Serial: "SN1", RouterId: "sn1", Subscriber: "10001", Labels: map[string]string{"site": "north", "batch": "7"}},
		{Serial: "SN2", RouterId: "sn2", Fingerprint: someKey},
	}}, nil
}

func (f *fleet) Unprovision(context.Context, *pb.UnprovisionRequest) (*pb.UnprovisionResponse, error) {
	return &pb.UnprovisionResponse{}, nil
}

func (f *fleet) RevokeRouter(_ context.Context, r *pb.RevokeRouterRequest) (*pb.RevokeRouterResponse, error) {
	return &pb.RevokeRouterResponse{Router: &pb.Router{Id: r.Id}}, nil
}

func (f *fleet) ReadmitRouter(_ context.Context, r *pb.ReadmitRouterRequest) (*pb.ReadmitRouterResponse, error) {
	if r.Id == "home-1" {
		return nil, status.Error(codes.InvalidArgument, "router home-1: is not revoked")
	}
	return &pb.ReadmitRouterResponse{}, nil
}

func (f *fleet) ReleaseRouter(_ context.Context, r *pb.ReleaseRouterRequest) (*pb.ReleaseRouterResponse, error) {
	return &pb.ReleaseRouterResponse{Router: &pb.Router{Id: r.Id}}, nil
}
