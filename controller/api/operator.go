package api

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	defaultOperatorTTL = 90 * 24 * time.Hour
	maxOperatorTTL     = 366 * 24 * time.Hour

	// keepEnded is how long a token or certificate that has ended is still
	// shown, so that whoever looks for the reason finds it.
	keepEnded = 30 * 24 * time.Hour
)

// OperatorService keeps the operators.
type OperatorService struct {
	pb.UnimplementedOperatorServiceServer

	store       *store.Store
	authorities identity.Source
}

// NewOperatorService returns the service on s, whose certificates are of the
// authorities a.
func NewOperatorService(s *store.Store, a identity.Source) *OperatorService {
	return &OperatorService{store: s, authorities: a}
}

// WhoAmI says who calls.
func (s *OperatorService) WhoAmI(ctx context.Context, _ *pb.WhoAmIRequest) (*pb.WhoAmIResponse, error) {
	c := identity.CallerFrom(ctx)
	return &pb.WhoAmIResponse{Name: c.Name, Role: pb.OperatorRole(c.Role), Via: c.Via, Address: c.Address}, nil
}

// ListOperators returns a page of operators.
func (s *OperatorService) ListOperators(_ context.Context, req *pb.ListOperatorsRequest) (*pb.ListOperatorsResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListOperatorsResponse{}
	s.store.View(func(st *store.State) {
		resp.Operators, resp.NextPageToken = collect(p, st.Operators(p.after),
			func(o store.Operator) string { return o.Name }, nil, operatorMessage)
	})
	return resp, nil
}

// CreateOperator adds an operator.
func (s *OperatorService) CreateOperator(ctx context.Context, req *pb.CreateOperatorRequest) (*pb.CreateOperatorResponse, error) {
	role, err := operatorRole(req.GetRole())
	if err != nil {
		return nil, statusOf(err)
	}
	o, err := s.store.CreateOperator(ctx, store.Operator{Name: req.GetName(), Role: role})
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateOperatorResponse{Operator: operatorMessage(o)}, nil
}

// UpdateOperator changes the role.
func (s *OperatorService) UpdateOperator(ctx context.Context, req *pb.UpdateOperatorRequest) (*pb.UpdateOperatorResponse, error) {
	role, err := operatorRole(req.GetRole())
	if err != nil {
		return nil, statusOf(err)
	}
	o, err := s.store.ChangeOperator(ctx, req.GetName(), expectation(req.GetRevision()), func(o *store.Operator) error {
		o.Role = role
		return nil
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.UpdateOperatorResponse{Operator: operatorMessage(o)}, nil
}

// DeleteOperator removes an operator.
func (s *OperatorService) DeleteOperator(ctx context.Context, req *pb.DeleteOperatorRequest) (*pb.DeleteOperatorResponse, error) {
	if err := s.store.DeleteOperator(ctx, req.GetName()); err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeleteOperatorResponse{}, nil
}

// CreateOperatorToken makes a token. What is stored of its secret is the hash.
func (s *OperatorService) CreateOperatorToken(ctx context.Context, req *pb.CreateOperatorTokenRequest) (*pb.CreateOperatorTokenResponse, error) {
	ttl := defaultOperatorTTL
	if req.GetTtl() != nil {
		if err := req.GetTtl().CheckValid(); err != nil {
			return nil, statusOf(badField("ttl", fmt.Errorf("ttl: %w", err)))
		}
		if d := req.GetTtl().AsDuration(); d != 0 {
			ttl = d
		}
	}
	if ttl < time.Second || ttl > maxOperatorTTL {
		return nil, statusOf(badField("ttl", fmt.Errorf("ttl %v: must be 1s to %v", ttl, maxOperatorTTL)))
	}
	c := store.Credential{Token: true, Note: req.GetNote()}
	if req.GetRole() != pb.OperatorRole_OPERATOR_ROLE_UNSPECIFIED {
		var err error
		if c.Role, err = operatorRole(req.GetRole()); err != nil {
			return nil, statusOf(err)
		}
	}
	token, err := identity.NewOperatorToken(req.GetName(), s.authorities.Set().Signs().Pin())
	if err != nil {
		return nil, statusOf(err)
	}
	c.ID, c.Hash = token.ID, token.Hash()
	c.Created = time.Now().UTC().Truncate(time.Second)
	c.Expires = c.Created.Add(ttl)
	if err := s.add(ctx, req.GetName(), c); err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateOperatorTokenResponse{Credential: credentialMessage(c), Secret: token.Text()}, nil
}

// CreateOperatorCertificate signs a key.
func (s *OperatorService) CreateOperatorCertificate(ctx context.Context, req *pb.CreateOperatorCertificateRequest) (*pb.CreateOperatorCertificateResponse, error) {
	pub, err := identity.ParseRequest(req.GetCsr())
	if err != nil {
		return nil, statusOf(badField("csr", err))
	}
	set := s.authorities.Set()
	cert, err := set.Signs().SignOperator(pub.Public, req.GetName(), time.Now())
	if err != nil {
		return nil, statusOf(badField("name", err))
	}
	c := OperatorCertificate(cert, req.GetNote(), time.Now())
	if err := s.add(ctx, req.GetName(), c); err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateOperatorCertificateResponse{
		Credential: credentialMessage(c), Certificate: cert.Raw, CaCertificate: set.Signs().Certificate(), Authorities: set.Raw(),
	}, nil
}

// OperatorCertificate returns what is stored of an operator's certificate.
func OperatorCertificate(cert *x509.Certificate, note string, now time.Time) store.Credential {
	hash := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return store.Credential{
		ID: hex.EncodeToString(hash[:])[:10], Hash: hash, Note: note,
		Created: now.UTC().Truncate(time.Second), Expires: cert.NotAfter.UTC(),
	}
}

// add gives an operator a credential, and forgets those that ended long ago.
func (s *OperatorService) add(ctx context.Context, name string, c store.Credential) error {
	_, err := s.store.ChangeOperator(ctx, name, store.Any, func(o *store.Operator) error {
		o.Credentials = slices.DeleteFunc(o.Credentials, func(x store.Credential) bool {
			return !x.Opens(c.Created.Add(-keepEnded)) || x.ID == c.ID
		})
		o.Credentials = append(o.Credentials, c)
		return nil
	})
	return err
}

// RevokeOperatorCredential makes one token or certificate useless.
func (s *OperatorService) RevokeOperatorCredential(ctx context.Context, req *pb.RevokeOperatorCredentialRequest) (*pb.RevokeOperatorCredentialResponse, error) {
	o, err := s.store.ChangeOperator(ctx, req.GetName(), store.Any, func(o *store.Operator) error {
		had := len(o.Credentials)
		o.Credentials = slices.DeleteFunc(o.Credentials, func(x store.Credential) bool { return x.ID == req.GetId() })
		if len(o.Credentials) == had {
			return badField("id", fmt.Errorf("operator %s: has no token and no certificate %q", o.Name, req.GetId()))
		}
		return nil
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.RevokeOperatorCredentialResponse{Operator: operatorMessage(o)}, nil
}

// operatorRole returns the role that a message names.
func operatorRole(r pb.OperatorRole) (identity.OperatorRole, error) {
	if r < pb.OperatorRole_OPERATOR_ROLE_VIEWER || r > pb.OperatorRole_OPERATOR_ROLE_ADMIN {
		return identity.NoRole, badField("role", errors.New("role: must be viewer, operator or admin"))
	}
	return identity.OperatorRole(r), nil
}

func operatorMessage(o store.Operator) *pb.Operator {
	m := &pb.Operator{Name: o.Name, Role: pb.OperatorRole(o.Role), UpdateTime: wire.FromTime(o.Updated), Revision: int64(o.Revision)}
	for _, c := range o.Credentials {
		m.Credentials = append(m.Credentials, credentialMessage(c))
	}
	return m
}

func credentialMessage(c store.Credential) *pb.OperatorCredential {
	kind := pb.OperatorCredential_KIND_CERTIFICATE
	if c.Token {
		kind = pb.OperatorCredential_KIND_TOKEN
	}
	return &pb.OperatorCredential{
		Kind: kind, Id: c.ID, Note: c.Note, Role: pb.OperatorRole(c.Role),
		CreateTime: timestamppb.New(c.Created), ExpireTime: timestamppb.New(c.Expires),
	}
}
