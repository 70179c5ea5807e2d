package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// usersOf says which kind of record refers to which; a record that is referred
// to can't be removed.
var usersOf = map[Kind]Kind{KindPlan: KindSubscriber, KindSubscriber: KindRouter}

// Any stands for whatever revision a record has, also none.
const Any plan.Revision = -1

// attempts is how often a write that others got in the way of is tried anew.
// Each failure means that another writer succeeded.
const attempts = 32

var errBusy = fmt.Errorf("%w: too many others write at the same time", ErrUnavailable)

// PutPlan stores a plan, in one write whatever the number of its subscribers,
// and keeps what it was (PlanHistory).
// expect is the revision that the stored one must have: 0 for none, or Any.
// Errors: ErrInvalid, ErrNotFound, ErrExists, ErrConflict.
func (s *Store) PutPlan(ctx context.Context, p plan.Plan, expect plan.Revision) (plan.Plan, error) {
	if err := p.Validate(); err != nil {
		return plan.Plan{}, invalid(KindPlan, p.Name, err)
	}
	p.Updated = stamp()
	value := encodePlan(p)
	keep, err := s.historyOps(ctx, p, value)
	if err != nil {
		return plan.Plan{}, fmt.Errorf("write plan %s: %w", p.Name, err)
	}
	p.Revision, err = s.put(ctx, write{kind: KindPlan, id: p.Name, value: value, expect: expect, more: keep})
	return p, err
}

// PutSubscriber stores a subscriber; expect is as in PutPlan. Errors: those of
// PutPlan, and ErrDangling if the plan doesn't exist.
func (s *Store) PutSubscriber(ctx context.Context, sub plan.Subscriber, expect plan.Revision) (plan.Subscriber, error) {
	if err := sub.Validate(); err != nil {
		return plan.Subscriber{}, invalid(KindSubscriber, sub.ID, err)
	}
	sub.Updated = stamp()
	var err error
	sub.Revision, err = s.put(ctx, write{
		kind: KindSubscriber, id: sub.ID, value: encodeSubscriber(sub), expect: expect,
		ref: KindPlan, refs: sub.Plans(),
	})
	return sub, err
}

// PutRouter stores a router; expect is as in PutPlan. Errors: those of PutPlan,
// and ErrDangling if the subscriber doesn't exist.
func (s *Store) PutRouter(ctx context.Context, r plan.Router, expect plan.Revision) (plan.Router, error) {
	if err := r.Validate(); err != nil {
		return plan.Router{}, invalid(KindRouter, r.ID, err)
	}
	r.Updated = stamp()
	w := write{kind: KindRouter, id: r.ID, value: encodeRouter(r), expect: expect}
	if r.Subscriber != "" {
		w.ref, w.refs = KindSubscriber, []string{r.Subscriber}
	}
	var err error
	r.Revision, err = s.put(ctx, w)
	return r, err
}

// DeleteSubscriber removes a subscriber; expect is as in PutPlan, without 0.
// Errors: ErrNotFound, ErrConflict, and ErrInUse while a router serves it.
func (s *Store) DeleteSubscriber(ctx context.Context, id string, expect plan.Revision) error {
	return s.remove(ctx, KindSubscriber, id, expect)
}

// DeleteRouter removes a router; expect is as in PutPlan, without 0. Errors:
// ErrNotFound, ErrConflict.
func (s *Store) DeleteRouter(ctx context.Context, id string, expect plan.Revision) error {
	return s.remove(ctx, KindRouter, id, expect, Op{key(KindTrust, id), nil})
}

// DeletePlan removes a plan after it has moved its subscribers, if there are
// any, to replacement, all of them at once. If it stops half-way, all have one
// plan or the other, and doing it again goes on from there.
//
// Errors: ErrNotFound, ErrConflict, ErrInUse if there are subscribers and no
// replacement, ErrDangling if the replacement doesn't exist, ErrInvalid if it
// is the plan itself.
func (s *Store) DeletePlan(ctx context.Context, name, replacement string, expect plan.Revision) (moved int, err error) {
	if name == replacement {
		return 0, invalid(KindPlan, name, fmt.Errorf("plan %s: can't be its own replacement", name))
	}
	// Whoever changes the plan while it is being removed wants it to stay, so
	// the revision is fixed before anything moves.
	if expect, err = s.expected(ctx, KindPlan, name, expect); err != nil {
		return 0, err
	}
	guard := []Compare{{key(KindPlan, name), Equal, int64(expect)}}
	for range attempts {
		var users []SubscriberWrite
		s.View(func(st *State) {
			for sub := range st.SubscribersOfPlan(name, "") {
				w := SubscriberWrite{Subscriber: sub, Expect: sub.Revision}
				w.Subscriber = replacePlan(sub, name, replacement)
				users = append(users, w)
			}
		})
		if len(users) == 0 || replacement == "" {
			err := s.remove(ctx, KindPlan, name, expect)
			if e, ok := errors.AsType[*Error](err); ok && replacement != "" && errors.Is(err, ErrInUse) && e.Ref == KindSubscriber {
				continue // somebody was given the plan meanwhile
			}
			return moved, err
		}
		n, err := s.writeSubscribers(ctx, users, guard)
		moved += n
		var e *Error
		overtaken := errors.As(err, &e) && e.Kind == KindSubscriber && (errors.Is(err, ErrConflict) || errors.Is(err, ErrNotFound))
		if err != nil && !overtaken {
			return moved, fmt.Errorf("delete plan %s: move subscribers to plan %s: %w", name, replacement, err)
		}
	}
	return moved, fmt.Errorf("delete plan %s: %w", name, errBusy)
}

// replacePlan returns a subscriber that refers to another plan.
func replacePlan(sub plan.Subscriber, name, replacement string) plan.Subscriber {
	l := sub.EditLayers()
	for _, at := range []*string{&sub.Plan, &l.Suspension, &l.BillingSuspension} {
		if *at == name {
			*at = replacement
		}
	}
	return sub.WithLayers(l)
}

// SubscriberWrite is one of many subscribers to put or remove.
type SubscriberWrite struct {
	Subscriber plan.Subscriber
	Remove     bool          // only Subscriber.ID is looked at
	Expect     plan.Revision // that the stored one must have; 0 for none
}

// WriteSubscribers makes all writes or none, however many there are, and
// returns how many were made. Every reader, on every controller, sees either
// none of them or all.
//
// Errors: ErrInvalid, ErrConflict, ErrNotFound, ErrExists, ErrDangling, ErrInUse
// of the first subscriber that can't be written; nothing is written then.
// ErrUnavailable and ErrFull mean that nothing is, or everything is.
func (s *Store) WriteSubscribers(ctx context.Context, writes []SubscriberWrite) (written int, err error) {
	return s.writeSubscribers(ctx, writes, nil)
}

// writeSubscribers is WriteSubscribers that also needs guards to hold, which
// are about whole records.
func (s *Store) writeSubscribers(ctx context.Context, writes []SubscriberWrite, guards []Compare) (written int, err error) {
	ids := make(map[string]bool, len(writes))
	for _, w := range writes {
		id := w.Subscriber.ID
		if ids[id] {
			return 0, invalid(KindSubscriber, id, fmt.Errorf("subscriber %s: written twice", id))
		}
		ids[id] = true
		if w.Remove {
			continue
		}
		if err := w.Subscriber.Validate(); err != nil {
			return 0, invalid(KindSubscriber, id, err)
		}
	}
	if len(writes) == 0 {
		return 0, nil
	}
	now := stamp()
	for range attempts {
		t := txn{seen: s.Revision(), guards: guards, compares: slices.Clone(guards)}
		for _, w := range writes {
			if !t.add(subscriberWrite(w, now)) {
				if err := s.importSubscribers(ctx, writes, guards); err != nil {
					return 0, err
				}
				return len(writes), nil
			}
		}
		_, err := s.commit(ctx, &t)
		if errors.Is(err, errMoved) {
			continue
		}
		if err != nil {
			return 0, err
		}
		return len(writes), nil
	}
	return 0, fmt.Errorf("write %d subscribers: %w", len(writes), errBusy)
}

func subscriberWrite(sw SubscriberWrite, now time.Time) write {
	if sw.Remove {
		return write{kind: KindSubscriber, id: sw.Subscriber.ID, expect: sw.Expect, users: usersOf[KindSubscriber]}
	}
	sub := sw.Subscriber
	sub.Updated = now
	return write{
		kind: KindSubscriber, id: sub.ID, value: encodeSubscriber(sub), expect: sw.Expect,
		ref: KindPlan, refs: sub.Plans(),
	}
}

// write is one record to put, or to delete if there is no value.
type write struct {
	kind   Kind
	id     string
	value  []byte
	expect plan.Revision
	more   []Op // what else is done with it

	ref      Kind     // what it refers to; empty if to nothing
	refs     []string // ids of that kind
	unmarked bool     // the references don't hold their targets
	users    Kind     // of a deletion: what may refer to it; empty if nothing does
}

// waits tells whether it must not be made while an import is rolled forward.
func (w write) waits() bool {
	return w.kind == KindSubscriber || w.ref == KindSubscriber || w.users != ""
}

// touches returns the marker that an import looks at; empty if none.
func (w write) touches() string {
	switch {
	case w.kind == KindSubscriber, w.kind == KindPlan && w.users != "":
		return changedKey
	case w.ref == KindSubscriber && !w.unmarked:
		return servedKey
	default:
		return ""
	}
}

func (s *Store) put(ctx context.Context, w write) (plan.Revision, error) {
	t := txn{}
	t.add(w)
	return s.commit(ctx, &t)
}

// remove deletes one record. A marker that moved without a user that stays is
// not a reason to give up.
func (s *Store) remove(ctx context.Context, k Kind, id string, expect plan.Revision, more ...Op) error {
	w := write{kind: k, id: id, users: usersOf[k], more: more}
	for range attempts {
		var err error
		if w.expect, err = s.expected(ctx, k, id, expect); err != nil {
			return err
		}
		t := txn{seen: s.Revision()}
		t.add(w)
		_, err = s.commit(ctx, &t)
		if errors.Is(err, errMoved) || expect == Any && errors.Is(err, ErrConflict) {
			continue
		}
		return err
	}
	return fmt.Errorf("delete %s %s: %w", k, id, errBusy)
}

// expected returns the revision of a record that exists if expect is Any.
func (s *Store) expected(ctx context.Context, k Kind, id string, expect plan.Revision) (plan.Revision, error) {
	if expect > 0 {
		return expect, nil
	}
	s.View(func(st *State) { expect = st.revisionOf(k, id) })
	if expect > 0 {
		return expect, nil
	}
	// Perhaps another controller has just made it.
	items, rev, err := s.kv.Get(ctx, key(k, id))
	if err != nil {
		return 0, fmt.Errorf("delete %s %s: %w", k, id, err)
	}
	if len(items) == 0 {
		return 0, notFound(k, id)
	}
	return revisionIn(items[0]), s.await(ctx, plan.Revision(rev))
}

// errMoved says that a reference was made to what is to be deleted, between
// the state that was looked at and the transaction.
var errMoved = fmt.Errorf("%w: a reference was made meanwhile", ErrUnavailable)

// txn collects writes that fit one transaction.
type txn struct {
	seen     plan.Revision // up to which users were looked for
	guards   []Compare
	writes   []write
	compares []Compare // the guards, and those of the writes
	ops      []Op
	marked   map[string]bool // what is compared or put once for all writes
	bytes    int
}

// add takes a write in; false if there is no room.
func (t *txn) add(w write) bool {
	k := key(w.kind, w.id)
	compares := make([]Compare, 0, 2)
	ops := make([]Op, 0, 2)
	if w.expect != Any {
		compares = append(compares, Compare{k, Equal, int64(w.expect)})
	}
	ops = append(ops, Op{k, w.value})
	ops = append(ops, w.more...)
	if w.waits() && !t.marked[commitKey] {
		compares = append(compares, Compare{commitKey, Equal, 0})
	}
	if m := w.touches(); m == servedKey && !t.marked[m] {
		ops = append(ops, Op{m, []byte(w.id)})
	}
	for _, id := range w.refs {
		if t.marked[refKey(w.ref, id)] {
			continue
		}
		compares = append(compares, Compare{key(w.ref, id), Greater, 0})
		if !w.unmarked {
			ops = append(ops, marker(w.ref, id, w.id))
		}
	}
	if w.users != "" {
		m := refKey(w.kind, w.id)
		compares = append(compares, Compare{m, Less, int64(t.seen) + 1})
		ops = append(ops, Op{m, nil})
	}
	full := len(t.compares)+len(compares) > maxOps || len(t.ops)+len(ops)+2 > maxOps || t.bytes+len(w.value) > maxBytes
	if full && len(t.writes) > 0 {
		return false
	}
	if t.marked == nil {
		t.marked = map[string]bool{}
	}
	t.marked[commitKey] = t.marked[commitKey] || w.waits()
	t.marked[w.touches()] = true
	for _, id := range w.refs {
		t.marked[refKey(w.ref, id)] = true
	}
	t.writes = append(t.writes, w)
	t.compares = append(t.compares, compares...)
	t.ops = append(t.ops, ops...)
	t.bytes += len(w.value)
	return true
}

// marker tells those who delete a target that a reference to it was made. The
// value is for whoever looks with etcdctl.
func marker(target Kind, id, by string) Op { return Op{refKey(target, id), []byte(by)} }

// commit does a transaction and waits until the state has seen it.
func (s *Store) commit(ctx context.Context, t *txn) (plan.Revision, error) {
	first := t.writes[0]
	for {
		if err := s.free(t); err != nil {
			return 0, err
		}
		compares, ops := s.prepare(t)
		res, err := s.kv.Txn(ctx, compares, ops)
		if err != nil {
			return 0, fmt.Errorf("write %s %s: %w", first.kind, first.id, err)
		}
		rev := plan.Revision(res.Revision)
		// Also after a refusal: who reads next should see what was in the way.
		if err := s.await(ctx, rev); err != nil {
			return 0, fmt.Errorf("write %s %s: %w", first.kind, first.id, err)
		}
		if res.OK {
			return rev, nil
		}
		if find(res.Items, commitKey) == nil {
			return 0, t.refusal(res.Items)
		}
		if err := s.awaitImport(ctx); err != nil {
			return 0, fmt.Errorf("write %s %s: %w", first.kind, first.id, err)
		}
	}
}

// prepare returns what a transaction compares and does, as the state is now.
func (s *Store) prepare(t *txn) ([]Compare, []Op) {
	compares, ops := slices.Clone(t.compares), t.ops
	s.View(func(st *State) {
		for i, c := range compares {
			if k, id, ok := parseKey(c.Key); ok && k == KindSubscriber && c.Relation == Equal && c.Revision > 0 {
				compares[i].Revision = int64(st.stored(id, plan.Revision(c.Revision)))
			}
		}
	})
	if t.marked[changedKey] {
		// When etcd is full it takes deletions and nothing else: a transaction of
		// deletions moves the marker by deleting it.
		mark := Op{changedKey, nil}
		if t.bytes > 0 {
			mark.Value = []byte(t.writes[0].id)
		}
		ops = append(slices.Clip(ops), mark)
	}
	return compares, ops
}

// free returns ErrInUse if anything that is to be deleted has users.
func (s *Store) free(t *txn) (err error) {
	s.View(func(st *State) {
		for _, w := range t.writes {
			if w.users == "" {
				continue
			}
			e := &Error{Kind: w.kind, ID: w.id, Err: ErrInUse}
			e.Ref, e.Count, e.RefID = st.users(w.kind, w.id)
			if e.Count > 0 {
				err = e
				return
			}
		}
	})
	return err
}

// refusal returns why a transaction did nothing, of the first write that is to
// blame. items are those of the compared keys that exist.
func (t *txn) refusal(items []Item) error {
	for _, g := range t.guards {
		k, id, _ := parseKey(g.Key)
		if err := differs(k, id, plan.Revision(g.Revision), items); err != nil {
			return err
		}
	}
	for _, w := range t.writes {
		if err := differs(w.kind, w.id, w.expect, items); err != nil {
			return err
		}
		for _, id := range w.refs {
			if find(items, key(w.ref, id)) == nil {
				return &Error{Kind: w.kind, ID: w.id, Err: ErrDangling, Ref: w.ref, RefID: id}
			}
		}
	}
	return errMoved
}

// differs returns an error if a record is not as expected.
func differs(k Kind, id string, expect plan.Revision, items []Item) error {
	it := find(items, key(k, id))
	switch {
	case expect == Any || it == nil && expect == 0 || it != nil && revisionIn(*it) == expect:
		return nil
	case it == nil:
		return notFound(k, id)
	}
	e := &Error{Kind: k, ID: id, Err: ErrConflict, Want: expect, Have: revisionIn(*it), Updated: updated(it.Value)}
	if expect == 0 {
		e.Err = ErrExists
	}
	return e
}

func find(items []Item, key string) *Item {
	i := slices.IndexFunc(items, func(it Item) bool { return it.Key == key })
	if i < 0 {
		return nil
	}
	return &items[i]
}

// stamp returns the time of a change as records have it: to the microsecond,
// so that what a write returns is what a later read returns.
func stamp() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }
