package store

import (
	"context"
	"crypto/subtle"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Token is a join token without its secret.
type Token struct {
	ID         string
	Router     string   // identity that it gives
	Subscriber string   // whom the router will serve; empty if nobody
	SecretHash [32]byte // SHA-256 of the secret
	Expires    time.Time
	Revision   plan.Revision
}

// Validate returns an error that names the field.
func (t Token) Validate() error {
	if err := plan.ValidateID("token", t.ID); err != nil {
		return err
	}
	if t.SecretHash == ([32]byte{}) {
		return fmt.Errorf("token %s: hash of the secret is missing", t.ID)
	}
	if t.Expires.IsZero() {
		return fmt.Errorf("token %s: time of expiry is missing", t.ID)
	}
	return plan.Router{ID: t.Router, Subscriber: t.Subscriber}.Validate()
}

// PutToken stores a new token. Errors: ErrInvalid, ErrExists, ErrDangling.
func (s *Store) PutToken(ctx context.Context, t Token) error {
	if err := t.Validate(); err != nil {
		return invalid(KindToken, t.ID, err)
	}
	w := write{kind: KindToken, id: t.ID, value: encodeToken(t), expect: 0}
	if t.Subscriber != "" {
		w.ref, w.refs, w.unmarked = KindSubscriber, []string{t.Subscriber}, true
	}
	_, err := s.put(ctx, w)
	return err
}

// DeleteToken removes a token. Errors: ErrNotFound.
func (s *Store) DeleteToken(ctx context.Context, id string) error {
	return s.remove(ctx, KindToken, id, Any)
}

// UseToken trades a token for a router in one transaction: the token is gone
// and the router exists, has the key, and serves the token's subscriber if it
// names one. A key that the router had before opens nothing any more. Of any
// number of uses, on any number of controllers, one succeeds.
//
// Errors: ErrToken if there is no such token, the secret is another one or now
// is too late; ErrDangling if the subscriber was removed meanwhile.
func (s *Store) UseToken(ctx context.Context, id string, secretHash [32]byte, routerKey plan.Key, now time.Time) (Token, plan.Router, error) {
	fail := func(err error) (Token, plan.Router, error) { return Token{}, plan.Router{}, err }
	refused := &Error{Kind: KindToken, ID: id, Err: ErrToken}
	if plan.ValidateID("token", id) != nil {
		return fail(refused)
	}
	for range attempts {
		// Read from etcd: the token may have been made or used on another
		// controller a moment ago.
		items, _, err := s.kv.Get(ctx, key(KindToken, id))
		if err != nil {
			return fail(fmt.Errorf("use token %s: %w", id, err))
		}
		if len(items) == 0 {
			return fail(refused)
		}
		t, err := decodeToken(id, items[0].Value, plan.Revision(items[0].Revision))
		if err != nil {
			return fail(fmt.Errorf("use token %s: %w", id, err))
		}
		if subtle.ConstantTimeCompare(t.SecretHash[:], secretHash[:]) != 1 || !now.Before(t.Expires) {
			return fail(refused)
		}
		r, done, err := s.useToken(ctx, t, routerKey)
		if done || err != nil {
			return t, r, err
		}
	}
	return fail(fmt.Errorf("use token %s: %w", id, errBusy))
}

// useToken tries once; done is false if something changed meanwhile.
func (s *Store) useToken(ctx context.Context, t Token, routerKey plan.Key) (r plan.Router, done bool, err error) {
	items, _, err := s.kv.Get(ctx, key(KindRouter, t.Router))
	if err != nil {
		return plan.Router{}, false, fmt.Errorf("use token %s: %w", t.ID, err)
	}
	r = plan.Router{ID: t.Router}
	var have int64
	if len(items) != 0 {
		if r, err = decodeRouter(t.Router, items[0].Value, 0); err != nil {
			return plan.Router{}, false, fmt.Errorf("use token %s: router %s: %w", t.ID, t.Router, err)
		}
		have = items[0].Revision
	}
	if t.Subscriber != "" {
		r.Subscriber = t.Subscriber
	}
	r.Key, r.Updated = routerKey, stamp()
	compares := []Compare{
		{key(KindToken, t.ID), Equal, int64(t.Revision)},
		{key(KindRouter, r.ID), Equal, have},
	}
	ops := []Op{{key(KindToken, t.ID), nil}, {key(KindRouter, r.ID), encodeRouter(r)}}
	if r.Subscriber != "" {
		compares = append(compares, Compare{commitKey, Equal, 0}, Compare{key(KindSubscriber, r.Subscriber), Greater, 0})
		ops = append(ops, marker(KindSubscriber, r.Subscriber, r.ID), Op{servedKey, []byte(r.ID)})
	}
	res, err := s.kv.Txn(ctx, compares, ops)
	if err != nil {
		return plan.Router{}, false, fmt.Errorf("use token %s: %w", t.ID, err)
	}
	if !res.OK {
		if find(res.Items, commitKey) != nil {
			if err := s.await(ctx, plan.Revision(res.Revision)); err != nil {
				return plan.Router{}, false, fmt.Errorf("use token %s: %w", t.ID, err)
			}
			return plan.Router{}, false, s.awaitImport(ctx)
		}
		if r.Subscriber != "" && find(res.Items, key(KindSubscriber, r.Subscriber)) == nil {
			return plan.Router{}, false, &Error{Kind: KindRouter, ID: r.ID, Err: ErrDangling, Ref: KindSubscriber, RefID: r.Subscriber}
		}
		return plan.Router{}, false, nil
	}
	r.Revision = plan.Revision(res.Revision)
	return r, true, s.await(ctx, r.Revision)
}
