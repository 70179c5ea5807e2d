package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Serial announces a router before it is there. It is used up when the router
// joins.
type Serial struct {
	Serial     string // as the router names itself
	Router     string // identity that it gets
	Subscriber string // whom it will serve; empty if nobody
	Labels     map[string]string
	Key        plan.Key // whoever proves it joins at once; zero: an operator approves
	Revision   plan.Revision
	Updated    time.Time
}

// Validate returns an error that names the field.
func (x Serial) Validate() error {
	if err := ValidateSerial(x.Serial); err != nil {
		return err
	}
	if err := (plan.Router{ID: x.Router, Subscriber: x.Subscriber, Labels: x.Labels}).Validate(); err != nil {
		return fmt.Errorf("serial %s: %w", x.Serial, err)
	}
	return nil
}

// ValidateSerial checks what a router calls itself.
func ValidateSerial(serial string) error { return plan.ValidateID("serial", serial) }

// PutSerial announces a router, anew if it was announced already. Errors:
// ErrInvalid, ErrDangling.
func (s *Store) PutSerial(ctx context.Context, x Serial) (Serial, error) {
	if err := x.Validate(); err != nil {
		return Serial{}, invalid(KindSerial, x.Serial, err)
	}
	x.Updated = stamp()
	w := write{kind: KindSerial, id: x.Serial, value: encodeSerial(x), expect: Any}
	if x.Subscriber != "" {
		w.ref, w.refs, w.unmarked = KindSubscriber, []string{x.Subscriber}, true
	}
	var err error
	x.Revision, err = s.put(ctx, w)
	return x, err
}

// DeleteSerial takes an announcement back. Errors: ErrNotFound.
func (s *Store) DeleteSerial(ctx context.Context, serial string) error {
	return s.remove(ctx, KindSerial, serial, Any)
}

// Admission makes a key the one of a router.
type Admission struct {
	Router  plan.Router // subscriber and labels of the stored one stay where these are empty
	Serial  string      // announced, to be used up; empty if none is
	Replace bool        // of a router that has another key
}

// Admit makes a key the one of a router, in one transaction with the end of
// the announcement that it uses up.
//
// Errors: ErrInvalid; ErrExists if the router has another key that is not to be
// replaced; ErrNotFound if the announcement is gone; ErrRevoked; ErrDangling.
func (s *Store) Admit(ctx context.Context, a Admission) (plan.Router, error) {
	if err := a.Router.Validate(); err != nil {
		return plan.Router{}, invalid(KindRouter, a.Router.ID, err)
	}
	return s.join(ctx, "admit router "+a.Router.ID, func() (joining, error) {
		j := joining{router: a.Router, replace: a.Replace}
		if a.Serial == "" {
			return j, nil
		}
		j.uses = key(KindSerial, a.Serial)
		items, _, err := s.kv.Get(ctx, j.uses)
		if err != nil {
			return j, err
		}
		if len(items) == 0 {
			return j, notFound(KindSerial, a.Serial)
		}
		j.used = plan.Revision(items[0].Revision)
		return j, nil
	})
}

// joining is a router that gets a key, and the record that this uses up.
type joining struct {
	router  plan.Router
	uses    string        // key of that record; empty if none
	used    plan.Revision // of that record
	replace bool
}

// join gives a router its key. next says anew for every attempt what is to be
// done.
func (s *Store) join(ctx context.Context, what string, next func() (joining, error)) (plan.Router, error) {
	for range attempts {
		j, err := next()
		if err != nil {
			return plan.Router{}, joinError(what, err)
		}
		r, done, err := s.tryJoin(ctx, j)
		if err != nil {
			return plan.Router{}, joinError(what, err)
		}
		if done {
			return r, nil
		}
	}
	return plan.Router{}, fmt.Errorf("%s: %w", what, errBusy)
}

// joinError leaves errors about one record as they are: they say everything.
func joinError(what string, err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return fmt.Errorf("%s: %w", what, err)
}

// tryJoin tries once; done is false if something changed meanwhile.
func (s *Store) tryJoin(ctx context.Context, j joining) (r plan.Router, done bool, err error) {
	r = j.router
	banned := key(KindRevocation, r.Key.String())
	items, _, err := s.kv.Get(ctx, key(KindRouter, r.ID), banned)
	if err != nil {
		return r, false, err
	}
	if find(items, banned) != nil {
		return r, false, &Error{Kind: KindRevocation, ID: r.Key.String(), Err: ErrRevoked}
	}
	var have int64
	if it := find(items, key(KindRouter, r.ID)); it != nil {
		old, err := decodeRouter(r.ID, it.Value, plan.Revision(it.Revision))
		if err != nil {
			return r, false, fmt.Errorf("router %s: %w", r.ID, err)
		}
		if old.Key != (plan.Key{}) && old.Key != r.Key && !j.replace {
			return r, false, &Error{Kind: KindRouter, ID: r.ID, Err: ErrExists, Have: old.Revision, Updated: old.Updated}
		}
		r = inherit(r, old)
		have = it.Revision
	}
	r.Quarantine, r.Updated = nil, stamp()
	compares := []Compare{{key(KindRouter, r.ID), Equal, have}, {banned, Equal, 0}}
	ops := []Op{{key(KindRouter, r.ID), encodeRouter(r)}}
	if j.uses != "" {
		compares = append(compares, Compare{j.uses, Equal, int64(j.used)})
		ops = append(ops, Op{j.uses, nil})
	}
	if r.Subscriber != "" {
		compares = append(compares, Compare{commitKey, Equal, 0}, Compare{key(KindSubscriber, r.Subscriber), Greater, 0})
		ops = append(ops, marker(KindSubscriber, r.Subscriber, r.ID), Op{servedKey, []byte(r.ID)})
	}
	// A device is one router: it is no longer the one that it was with this key.
	var was plan.Router
	s.View(func(st *State) { was, _ = st.RouterOfKey(r.Key) })
	if was.ID != "" && was.ID != r.ID {
		compares = append(compares, Compare{key(KindRouter, was.ID), Equal, int64(was.Revision)})
		was.Key, was.Updated = plan.Key{}, r.Updated
		ops = append(ops, Op{key(KindRouter, was.ID), encodeRouter(was)})
	}
	res, err := s.kv.Txn(ctx, compares, ops)
	if err != nil {
		return r, false, err
	}
	if err := s.await(ctx, plan.Revision(res.Revision)); err != nil {
		return r, false, err
	}
	if res.OK {
		r.Revision = plan.Revision(res.Revision)
		return r, true, nil
	}
	if find(res.Items, commitKey) != nil {
		return r, false, s.awaitImport(ctx)
	}
	if r.Subscriber != "" && find(res.Items, key(KindSubscriber, r.Subscriber)) == nil {
		return r, false, &Error{Kind: KindRouter, ID: r.ID, Err: ErrDangling, Ref: KindSubscriber, RefID: r.Subscriber}
	}
	return r, false, nil
}

// inherit fills what is empty in r with what is stored.
func inherit(r, old plan.Router) plan.Router {
	if r.Subscriber == "" {
		r.Subscriber = old.Subscriber
	}
	if len(r.Labels) == 0 {
		r.Labels = old.Labels
	}
	if r.Serial == "" {
		r.Serial = old.Serial
	}
	return r
}

// Revocation says that a key is refused, whatever router has it.
type Revocation struct {
	Key      plan.Key
	Router   string // that had it; empty if none did
	Operator string // who revoked it
	Reason   string // may be empty
	Time     time.Time
	Revision plan.Revision
}

// maxRevokedTokens is how many of a router's tokens go with its key.
const maxRevokedTokens = 64

// Revoke refuses the key of a router from now on; its join tokens end too.
// Errors: ErrNotFound, and ErrInvalid if the router has no key.
func (s *Store) Revoke(ctx context.Context, router, operator, reason string) (Revocation, error) {
	for range attempts {
		var r plan.Router
		var exists bool
		var more []Op
		s.View(func(st *State) {
			r, exists = st.Router(router)
			for t := range st.Tokens("") {
				if t.Router == router && len(more) < maxRevokedTokens {
					more = append(more, Op{key(KindToken, t.ID), nil})
				}
			}
		})
		switch {
		case !exists:
			return Revocation{}, notFound(KindRouter, router)
		case r.Key == (plan.Key{}):
			return Revocation{}, invalid(KindRouter, router, fmt.Errorf("router %s: has not joined, so that it has no key to revoke", router))
		}
		v := Revocation{Key: r.Key, Router: router, Operator: operator, Reason: reason}
		got, err := s.revoke(ctx, v, more, []Compare{{key(KindRouter, router), Equal, int64(r.Revision)}})
		if errors.Is(err, ErrConflict) {
			continue // it has another key now, perhaps
		}
		return got, err
	}
	return Revocation{}, fmt.Errorf("revoke router %s: %w", router, errBusy)
}

// RevokeKey refuses a key that no router has.
func (s *Store) RevokeKey(ctx context.Context, k plan.Key, operator, reason string) (Revocation, error) {
	return s.revoke(ctx, Revocation{Key: k, Operator: operator, Reason: reason}, nil, nil)
}

func (s *Store) revoke(ctx context.Context, v Revocation, more []Op, guards []Compare) (Revocation, error) {
	v.Time = stamp()
	t := txn{guards: guards, compares: slices.Clone(guards)}
	t.add(write{kind: KindRevocation, id: v.Key.String(), value: encodeRevocation(v), expect: Any, more: more})
	var err error
	v.Revision, err = s.commit(ctx, &t)
	return v, err
}

// Readmit takes the revocation of a key back. Errors: ErrNotFound.
func (s *Store) Readmit(ctx context.Context, k plan.Key) error {
	return s.remove(ctx, KindRevocation, k.String(), Any)
}

// Quarantine refuses a router that there are two of, as long as it has the key k.
// It returns false if it has another one or is in quarantine already.
func (s *Store) Quarantine(ctx context.Context, router string, k plan.Key, q plan.Quarantine) (bool, error) {
	done, err := s.editRouter(ctx, router, func(r *plan.Router) bool {
		if r.Key != k || r.Quarantine != nil {
			return false
		}
		r.Quarantine = &q
		return true
	})
	return done, err
}

// Release ends the quarantine of a router; false if it is not in one. Errors:
// ErrNotFound.
func (s *Store) Release(ctx context.Context, router string) (bool, error) {
	return s.editRouter(ctx, router, func(r *plan.Router) bool {
		was := r.Quarantine
		r.Quarantine = nil
		return was != nil
	})
}

// editRouter changes one router as it is when it is written; edit returns
// false if nothing is to be written.
func (s *Store) editRouter(ctx context.Context, id string, edit func(*plan.Router) bool) (bool, error) {
	for range attempts {
		var r plan.Router
		var exists bool
		s.View(func(st *State) { r, exists = st.Router(id) })
		if !exists {
			return false, notFound(KindRouter, id)
		}
		if !edit(&r) {
			return false, nil
		}
		_, err := s.PutRouter(ctx, r, r.Revision)
		if errors.Is(err, ErrConflict) {
			continue
		}
		return err == nil, err
	}
	return false, fmt.Errorf("write router %s: %w", id, errBusy)
}
