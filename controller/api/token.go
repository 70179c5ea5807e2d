package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	defaultTTL = 24 * time.Hour
	maxTTL     = 30 * 24 * time.Hour

	// sweep is how many tokens that are too old go with each new one, so that
	// forgotten ones don't pile up.
	sweep = 8
)

// TokenService makes join tokens.
type TokenService struct {
	pb.UnimplementedTokenServiceServer

	store *store.Store
	pin   identity.Pin
}

// NewTokenService returns the service whose tokens name the authority with this pin.
func NewTokenService(s *store.Store, pin identity.Pin) *TokenService {
	return &TokenService{store: s, pin: pin}
}

// CreateToken makes a join token. What is stored of its secret is the hash.
func (t *TokenService) CreateToken(ctx context.Context, req *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	ttl := defaultTTL
	if req.GetTtl() != nil {
		if err := req.GetTtl().CheckValid(); err != nil {
			return nil, statusOf(badField("ttl", fmt.Errorf("ttl: %w", err)))
		}
		if d := req.GetTtl().AsDuration(); d != 0 {
			ttl = d
		}
	}
	if ttl < time.Second || ttl > maxTTL {
		return nil, statusOf(badField("ttl", fmt.Errorf("ttl %v: must be 1s to %v", ttl, maxTTL)))
	}
	token, err := identity.NewToken(t.pin)
	if err != nil {
		return nil, statusOf(err)
	}
	now := time.Now()
	if err := t.sweep(ctx, now); err != nil {
		return nil, statusOf(err)
	}
	stored := store.Token{
		ID:         token.ID,
		Router:     req.GetRouterId(),
		Subscriber: req.GetSubscriber(),
		Labels:     req.GetLabels(),
		SecretHash: token.Hash(),
		Expires:    now.Add(ttl),
	}
	if err := t.store.PutToken(ctx, stored); err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateTokenResponse{Token: fromToken(stored), Secret: token.Text()}, nil
}

// sweep removes some of the tokens that are too old.
func (t *TokenService) sweep(ctx context.Context, now time.Time) error {
	var old []string
	t.store.View(func(st *store.State) {
		for s := range st.Tokens("") {
			if len(old) == sweep {
				break
			}
			if !now.Before(s.Expires) {
				old = append(old, s.ID)
			}
		}
	})
	for _, id := range old {
		if err := t.store.DeleteToken(ctx, id); err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
	}
	return nil
}

// ListTokens returns the tokens that were not used and are not too old.
func (t *TokenService) ListTokens(_ context.Context, req *pb.ListTokensRequest) (*pb.ListTokensResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	now := time.Now()
	resp := &pb.ListTokensResponse{}
	t.store.View(func(st *store.State) {
		resp.Tokens, resp.NextPageToken = collect(p, st.Tokens(p.after),
			func(s store.Token) string { return s.ID },
			func(s store.Token) bool { return now.Before(s.Expires) },
			fromToken)
	})
	return resp, nil
}

// DeleteToken makes a token useless.
func (t *TokenService) DeleteToken(ctx context.Context, req *pb.DeleteTokenRequest) (*pb.DeleteTokenResponse, error) {
	if err := t.store.DeleteToken(ctx, req.GetId()); err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeleteTokenResponse{}, nil
}

func fromToken(t store.Token) *pb.Token {
	return &pb.Token{Id: t.ID, RouterId: t.Router, Subscriber: t.Subscriber, Labels: t.Labels, ExpireTime: wire.FromTime(t.Expires)}
}
