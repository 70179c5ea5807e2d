package api

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	defaultTTL = 24 * time.Hour
	maxTTL     = 30 * 24 * time.Hour

	mostTokens = 1000 // in one request

	// For each new token, sweep tokens go if they are too old, of those that come
	// next in a round of swept: forgotten ones don't pile up, and what a token
	// costs does not depend on how many there are.
	sweep = 8
	swept = 64
)

// TokenService makes join tokens.
type TokenService struct {
	pb.UnimplementedTokenServiceServer

	store       *store.Store
	authorities identity.Source

	mu    sync.Mutex
	round string // guarded by mu: the id up to which tokens were looked at for being too old
}

// NewTokenService returns the service whose tokens name the authority that signs.
func NewTokenService(s *store.Store, a identity.Source) *TokenService {
	return &TokenService{store: s, authorities: a}
}

// CreateToken makes a join token. What is stored of its secret is the hash.
func (t *TokenService) CreateToken(ctx context.Context, req *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	now := time.Now()
	token, stored, err := t.newToken(req, "", now)
	if err != nil {
		return nil, statusOf(err)
	}
	if err := t.sweep(ctx, now, 1); err != nil {
		return nil, statusOf(err)
	}
	if err := t.store.PutToken(ctx, stored); err != nil {
		return nil, statusOf(err)
	}
	return &pb.CreateTokenResponse{Token: fromToken(stored), Secret: token.Text()}, nil
}

// newToken returns the token that is asked for and what is to be stored of it.
func (t *TokenService) newToken(req *pb.CreateTokenRequest, batch string, now time.Time) (token identity.Token, stored store.Token, err error) {
	ttl := defaultTTL
	if req.GetTtl() != nil {
		if err := req.GetTtl().CheckValid(); err != nil {
			return token, stored, badField("ttl", fmt.Errorf("ttl: %w", err))
		}
		if d := req.GetTtl().AsDuration(); d != 0 {
			ttl = d
		}
	}
	if ttl < time.Second || ttl > maxTTL {
		return token, stored, badField("ttl", fmt.Errorf("ttl %v: must be 1s to %v", ttl, maxTTL))
	}
	if token, err = identity.NewToken(t.authorities.Set().Signs().Pin()); err != nil {
		return token, stored, err
	}
	return token, store.Token{
		ID:         token.ID,
		Router:     req.GetRouterId(),
		Subscriber: req.GetSubscriber(),
		Labels:     req.GetLabels(),
		Batch:      batch,
		SecretHash: token.Hash(),
		Expires:    now.Add(ttl),
	}, nil
}

// CreateTokens makes many join tokens. Those whose subscriber is not known here
// are stored one by one: another controller may have just made it, and only the
// store can say so.
func (t *TokenService) CreateTokens(ctx context.Context, req *pb.CreateTokensRequest) (*pb.CreateTokensResponse, error) {
	n := len(req.GetTokens())
	if n == 0 || n > mostTokens {
		return nil, statusOf(badField("tokens", fmt.Errorf("%d tokens: must be 1 to %d", n, mostTokens)))
	}
	if b := req.GetBatch(); b != "" {
		if err := plan.ValidateName("batch", b); err != nil {
			return nil, statusOf(badField("batch", err))
		}
	}
	now := time.Now()
	if err := t.sweep(ctx, now, n); err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.CreateTokensResponse{Tokens: make([]*pb.CreatedToken, n)}
	secrets := make([]string, n)
	var many, single []store.Token
	var manyAt, singleAt []int
	for i, m := range req.GetTokens() {
		resp.Tokens[i] = &pb.CreatedToken{}
		token, x, err := t.newToken(m, req.GetBatch(), now)
		if err == nil {
			err = x.Validate()
		}
		if err != nil {
			resp.Tokens[i].Error = err.Error()
			continue
		}
		secrets[i] = token.Text()
		if t.serves(x) {
			many, manyAt = append(many, x), append(manyAt, i)
		} else {
			single, singleAt = append(single, x), append(singleAt, i)
		}
	}
	made := func(i int, x store.Token) { resp.Tokens[i] = &pb.CreatedToken{Token: fromToken(x), Secret: secrets[i]} }
	stored, err := t.store.PutTokens(ctx, many)
	for j, x := range many[:stored] {
		made(manyAt[j], x)
	}
	for j, x := range single {
		if err != nil {
			break
		}
		switch err = t.store.PutToken(ctx, x); {
		case err == nil:
			made(singleAt[j], x)
		case errors.Is(err, store.ErrDangling):
			resp.Tokens[singleAt[j]].Error, err = err.Error(), nil
		}
	}
	if err != nil {
		resp.Stopped = err.Error()
	}
	return resp, nil
}

// serves tells whether the state has what the token refers to.
func (t *TokenService) serves(x store.Token) (ok bool) {
	if x.Subscriber == "" {
		return true
	}
	t.store.View(func(st *store.State) { _, ok = st.Subscriber(x.Subscriber) })
	return ok
}

// sweep removes some of the tokens that are too old, before n are made.
func (t *TokenService) sweep(ctx context.Context, now time.Time, n int) error {
	var old []string
	t.mu.Lock()
	t.store.View(func(st *store.State) {
		looked := 0
		for s := range st.Tokens(t.round) {
			if looked == swept*n || len(old) == sweep*n {
				return
			}
			looked++
			t.round = s.ID
			if !now.Before(s.Expires) {
				old = append(old, s.ID)
			}
		}
		t.round = "" // from the beginning
	})
	t.mu.Unlock()
	return t.store.DeleteTokens(ctx, old)
}

// DeleteTokens makes a page of the tokens of a batch useless.
func (t *TokenService) DeleteTokens(ctx context.Context, req *pb.DeleteTokensRequest) (*pb.DeleteTokensResponse, error) {
	if err := plan.ValidateName("batch", req.GetBatch()); err != nil {
		return nil, statusOf(badField("batch", err))
	}
	p, err := newPage(mostTokens, req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.DeleteTokensResponse{}
	var ids []string
	t.store.View(func(st *store.State) {
		looked := 0
		for s := range st.Tokens(p.after) {
			if looked++; looked > swept*mostTokens || len(ids) == p.size {
				resp.NextPageToken = pageToken(p.after)
				return
			}
			if p.after = s.ID; s.Batch == req.GetBatch() {
				ids = append(ids, s.ID)
			}
		}
	})
	if err := t.store.DeleteTokens(ctx, ids); err != nil {
		return nil, statusOf(err)
	}
	resp.Deleted = uint32(len(ids))
	return resp, nil
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
	return &pb.Token{Id: t.ID, RouterId: t.Router, Subscriber: t.Subscriber, Labels: t.Labels, Batch: t.Batch, ExpireTime: wire.FromTime(t.Expires)}
}
