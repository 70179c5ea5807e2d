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
	Router     string            // identity that it gives
	Subscriber string            // whom the router will serve; empty if nobody
	Labels     map[string]string // of the router
	Batch      string            // names those that were made together; empty if it was made alone
	SecretHash [32]byte          // SHA-256 of the secret
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
	if t.Batch != "" {
		if err := plan.ValidateName("batch", t.Batch); err != nil {
			return err
		}
	}
	return plan.Router{ID: t.Router, Subscriber: t.Subscriber, Labels: t.Labels}.Validate()
}

// PutToken stores a new token. Errors: ErrInvalid, ErrExists, ErrDangling.
func (s *Store) PutToken(ctx context.Context, t Token) error {
	if err := t.Validate(); err != nil {
		return invalid(KindToken, t.ID, err)
	}
	_, err := s.put(ctx, tokenWrite(t))
	return err
}

func tokenWrite(t Token) write {
	w := write{kind: KindToken, id: t.ID, value: encodeToken(t), expect: 0}
	if t.Subscriber != "" {
		w.ref, w.refs, w.unmarked = KindSubscriber, []string{t.Subscriber}, true
	}
	return w
}

// PutTokens stores new tokens in order, as many in a transaction as it takes.
// The first of them, whose number it returns, are stored, also after an error,
// which says why the next are not; after ErrUnavailable it is not known of those
// in the transaction that was under way. Errors: those of PutToken.
func (s *Store) PutTokens(ctx context.Context, all []Token) (stored int, err error) {
	for _, t := range all {
		if err := t.Validate(); err != nil {
			return 0, invalid(KindToken, t.ID, err)
		}
	}
	for stored < len(all) {
		t := txn{}
		for _, x := range all[stored:] {
			if !t.add(tokenWrite(x)) {
				break
			}
		}
		if _, err := s.commit(ctx, &t); err != nil {
			return stored, err
		}
		stored += len(t.writes)
	}
	return stored, nil
}

// DeleteTokens removes those of the tokens that there are.
func (s *Store) DeleteTokens(ctx context.Context, ids []string) error {
	for len(ids) > 0 {
		t := txn{}
		for _, id := range ids {
			if !t.add(write{kind: KindToken, id: id, expect: Any}) {
				break
			}
		}
		if _, err := s.commit(ctx, &t); err != nil {
			return err
		}
		ids = ids[len(t.writes):]
	}
	return nil
}

// DeleteToken removes a token. Errors: ErrNotFound.
func (s *Store) DeleteToken(ctx context.Context, id string) error {
	return s.remove(ctx, KindToken, id, Any)
}

// UseToken trades a token for a router in one transaction: the token is gone
// and the router exists, has the key, and serves the token's subscriber if it
// names one. A key that the router had before opens nothing any more. Of any
// number of uses, on any number of controllers, one succeeds. serial is what
// the router calls itself.
//
// Errors: ErrToken if there is no such token, the secret is another one or now
// is too late; ErrRevoked if the key was; ErrDangling if the subscriber was
// removed meanwhile.
func (s *Store) UseToken(ctx context.Context, id string, secretHash [32]byte, routerKey plan.Key, serial string, now time.Time) (plan.Router, error) {
	refused := &Error{Kind: KindToken, ID: id, Err: ErrToken}
	if plan.ValidateID("token", id) != nil {
		return plan.Router{}, refused
	}
	return s.join(ctx, "use token "+id, func() (joining, error) {
		// Read from etcd: the token may have been made or used on another
		// controller a moment ago.
		items, rev, err := s.kv.Get(ctx, key(KindToken, id))
		if err != nil {
			return joining{}, err
		}
		if len(items) == 0 {
			// The caller may ask what it was used for.
			if err := s.await(ctx, plan.Revision(rev)); err != nil {
				return joining{}, err
			}
			return joining{}, refused
		}
		t, err := decodeToken(id, items[0].Value, plan.Revision(items[0].Revision))
		if err != nil {
			return joining{}, err
		}
		if subtle.ConstantTimeCompare(t.SecretHash[:], secretHash[:]) != 1 || !now.Before(t.Expires) {
			return joining{}, refused
		}
		return joining{
			router: plan.Router{ID: t.Router, Subscriber: t.Subscriber, Labels: t.Labels, Serial: serial, Key: routerKey},
			uses:   key(KindToken, id), used: t.Revision, replace: true,
		}, nil
	})
}
