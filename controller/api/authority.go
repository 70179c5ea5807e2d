package api

import (
	"context"
	"encoding/base64"
	"errors"
	"slices"
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

func pinText(p identity.Pin) string { return base64.RawURLEncoding.EncodeToString(p[:]) }

// GetAuthority returns what names the fleet's authority and when it ends.
func (j *JoinService) GetAuthority(context.Context, *pb.GetAuthorityRequest) (*pb.GetAuthorityResponse, error) {
	set := j.enrollment.authorities.Set()
	newest := set.Signs()
	resp := &pb.GetAuthorityResponse{Pin: pinText(newest.Pin()), ExpireTime: wire.FromTime(newest.Ends())}
	for _, c := range set.Certificates() {
		if err := c.Ending(time.Now()); err != nil && resp.Warning == "" {
			resp.Warning = err.Error()
		}
	}
	ca := j.stored()
	for _, a := range set.All() {
		resp.Authorities = append(resp.Authorities, authorityMessage(set, a, ca))
	}
	if len(set.All()) > 1 {
		resp.EndingCredentials = j.ending(ca.Next.Since)
	}
	_, routers, unconfirmed := j.unconfirmed("", 0)
	resp.Routers, resp.Unconfirmed = uint32(routers), uint32(unconfirmed)
	return resp, nil
}

// stored returns what the store has of the authorities.
func (j *JoinService) stored() (ca store.CA) {
	j.store.View(func(st *store.State) { ca, _ = st.CA() })
	return ca
}

func authorityMessage(set *identity.Set, a *identity.Authority, ca store.CA) *pb.Authority {
	m := &pb.Authority{Pin: pinText(a.Pin()), ExpireTime: wire.FromTime(a.Ends()), Shows: a == set.Shows(), Signs: a == set.Signs()}
	for _, e := range []store.CAEntry{ca.Current, ca.Next} {
		if e.Pin == m.GetPin() && !e.Since.IsZero() {
			m.Since = wire.FromTime(e.Since)
		}
	}
	return m
}

// ending returns the tokens and certificates of operators that were made before
// the newest authority, and so know the one before alone.
func (j *JoinService) ending(since time.Time) (all []string) {
	now := time.Now()
	j.store.View(func(st *store.State) {
		for o := range st.Operators("") {
			for _, c := range o.Credentials {
				if c.Opens(now) && c.Created.Before(since) {
					all = append(all, o.Name+"/"+c.ID)
				}
			}
		}
	})
	return all
}

// unconfirmed returns at most most routers, those after an id first, that have
// not confirmed the authorities, how many have a key that is not revoked, and
// how many of them have not confirmed. most 0 returns no ids and counts all;
// else it ends with the last id.
func (j *JoinService) unconfirmed(after string, most int) (ids []string, routers, missing int) {
	set := j.enrollment.authorities.Set()
	id := set.ID()
	for more := true; more; {
		n := 0
		j.store.View(func(st *store.State) {
			for r := range st.Routers(after) {
				after, n = r.ID, n+1
				_, revoked := st.Revocation(r.Key)
				if r.Key != (plan.Key{}) && !revoked {
					routers++
					if set.Moved() && !st.Trusts(r.ID, id) {
						missing++
						if most > 0 {
							ids = append(ids, r.ID)
						}
					}
				}
				if n == viewSize || most > 0 && len(ids) == most {
					break
				}
			}
		})
		more = n == viewSize && (most == 0 || len(ids) < most)
	}
	return ids, routers, missing
}

// errBehind means that the store is ahead of what this controller works with.
var errBehind = status.Error(codes.Unavailable, "this controller does not have the fleet's newest authorities yet: try again in a moment; if that does not help, its log says why")

// RotateAuthority makes another authority beside the fleet's.
func (j *JoinService) RotateAuthority(ctx context.Context, _ *pb.RotateAuthorityRequest) (*pb.RotateAuthorityResponse, error) {
	set, ca := j.enrollment.authorities.Set(), j.stored()
	now := time.Now()
	current := pinText(set.Shows().Pin())
	switch {
	case ca.Next.Pin != "":
		return nil, status.Errorf(codes.FailedPrecondition, "authority %s takes the place of %s already since %s: see cakefleetctl ca show, and end it with cakefleetctl ca retire",
			ca.Next.Pin, ca.Current.Pin, ca.Next.Since.Format(time.RFC3339))
	case ca.Current.Pin == "":
		ca.Current = store.CAEntry{Pin: current}
	case ca.Current.Pin != current:
		return nil, errBehind
	}
	next, err := identity.NewAuthority(now)
	if err != nil {
		return nil, statusOf(err)
	}
	key, err := set.Shows().Seal(next)
	if err != nil {
		return nil, statusOf(err)
	}
	ca.Next = store.CAEntry{Pin: pinText(next.Pin()), Cert: next.Certificate(), Key: key, SealedBy: current, Since: now.UTC().Truncate(time.Second)}
	if _, err := j.store.PutCA(ctx, ca, ca.Revision); err != nil {
		return nil, authoritiesMoved(err)
	}
	return &pb.RotateAuthorityResponse{Authority: &pb.Authority{
		Pin: ca.Next.Pin, ExpireTime: wire.FromTime(next.Ends()), Since: wire.FromTime(ca.Next.Since), Signs: true,
	}}, nil
}

// authoritiesMoved says that another operator has done the same.
func authoritiesMoved(err error) error {
	if errors.Is(err, store.ErrExists) || errors.Is(err, store.ErrConflict) {
		return status.Error(codes.Aborted, "the fleet's authorities")
	}
	return statusOf(err)
}

// RetireAuthority ends the trust in the older authority.
func (j *JoinService) RetireAuthority(ctx context.Context, req *pb.RetireAuthorityRequest) (*pb.RetireAuthorityResponse, error) {
	set, ca := j.enrollment.authorities.Set(), j.stored()
	switch {
	case ca.Next.Pin == "":
		return nil, status.Error(codes.FailedPrecondition, "there is no other authority: cakefleetctl ca rotate makes one, and routers need time to learn of it")
	case pinText(set.Shows().Pin()) != ca.Current.Pin || pinText(set.Signs().Pin()) != ca.Next.Pin:
		return nil, errBehind
	}
	ids, _, _ := j.unconfirmed("", 5)
	_, routers, missing := j.unconfirmed("", 0)
	if missing > 0 && !req.GetForce() {
		names := strings.Join(ids[:min(len(ids), 5)], ", ")
		if missing > len(ids) {
			names += ", ..."
		}
		return nil, status.Errorf(codes.FailedPrecondition, "%d of %d routers have not confirmed the new authority and would have to join again: %s. "+
			"Those that are away learn of it when they are back; cakefleetctl ca show --unconfirmed lists them, and --force retires anyhow", missing, routers, names)
	}
	retired := ca.Current.Pin
	ca.Current, ca.Next = ca.Next, store.CAEntry{}
	if _, err := j.store.PutCA(ctx, ca, ca.Revision); err != nil {
		return nil, authoritiesMoved(err)
	}
	return &pb.RetireAuthorityResponse{
		RetiredPin: retired, Unconfirmed: uint32(missing),
		Authority: &pb.Authority{
			Pin: ca.Current.Pin, ExpireTime: wire.FromTime(set.Signs().Ends()), Since: wire.FromTime(ca.Current.Since), Shows: true, Signs: true,
		},
	}, nil
}

// ListUnconfirmed returns the routers that have not confirmed the authorities.
func (j *JoinService) ListUnconfirmed(_ context.Context, req *pb.ListUnconfirmedRequest) (*pb.ListUnconfirmedResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	ids, _, _ := j.unconfirmed(p.after, p.size+1)
	resp := &pb.ListUnconfirmedResponse{RouterIds: ids}
	if len(ids) > p.size {
		resp.RouterIds = slices.Clip(ids[:p.size])
		resp.NextPageToken = pageToken(ids[p.size-1])
	}
	return resp, nil
}
