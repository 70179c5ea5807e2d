package api

import (
	"context"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// EnrollmentService trades join tokens for certificates.
type EnrollmentService struct {
	pb.UnimplementedEnrollmentServiceServer

	store     *store.Store
	authority *identity.Authority
	logger    hclog.Logger
}

// NewEnrollmentService returns the service that signs with authority.
func NewEnrollmentService(s *store.Store, authority *identity.Authority, logger hclog.Logger) *EnrollmentService {
	return &EnrollmentService{store: s, authority: authority, logger: logger}
}

// Enroll trades a join token and a signing request for a certificate. Neither
// the token nor the certificate is ever logged.
func (e *EnrollmentService) Enroll(ctx context.Context, req *pb.EnrollRequest) (*pb.EnrollResponse, error) {
	token, err := identity.ParseToken(req.GetToken())
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	if !token.Pin.Equal(e.authority.Pin()) {
		return nil, status.Errorf(codes.Unauthenticated, "join token %s: belongs to another fleet", token.ID)
	}
	// Before the token is used up, as it can be used once.
	key, err := identity.ParseRequest(req.GetCsr())
	if err != nil {
		return nil, statusOf(badField("csr", err))
	}
	id, err := identity.KeyOf(key)
	if err != nil {
		return nil, statusOf(err)
	}
	now := time.Now()
	_, router, err := e.store.UseToken(ctx, token.ID, token.Hash(), id, now)
	if err != nil {
		return nil, statusOf(err)
	}
	cert, err := e.authority.SignRouter(key, router.ID, now)
	if err != nil {
		return nil, statusOf(err)
	}
	e.logger.Info("router enrolled", "router", router.ID, "token", token.ID)
	return &pb.EnrollResponse{RouterId: router.ID, Certificate: cert, CaCertificate: e.authority.Certificate()}, nil
}
