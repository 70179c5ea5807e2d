package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// The audit log has one entry for each transaction that changes a record, put
// in the same transaction, so that there is never one without the other. It is
// beside Prefix: no controller holds it in memory. A key has the time, counted
// down so that the newest comes first, and something to make it another one; the
// entry's name is its revision.
const (
	audit    = "/cakefleet/audit/v1/"
	auditEnd = "/cakefleet/audit/v10" // after all of them
)

// auditKey is before the keys of all entries that were made at a time or before.
func auditKey(at time.Time) string {
	return fmt.Sprintf("%s%016x", audit, uint64(math.MaxInt64-at.UnixMicro()))
}

const (
	// mostAudited is how many bytes of records an entry has; of what changes
	// more it only has the counts.
	mostAudited = 16 << 10

	defaultAuditAge     = 365 * 24 * time.Hour
	defaultAuditEntries = 100_000
	pruneInterval       = time.Hour
)

// Actor is who changes something, for the audit log.
type Actor struct {
	identity.Caller

	Call string // what was called, such as UpdatePlan
}

type (
	actorKey  struct{}
	countsKey struct{}
)

// WithActor returns a context whose writes are told as those of a. Without one
// they are the controller's own.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// AuditEntry is one change as it was told.
type AuditEntry struct {
	ID                      plan.Revision // that the change made
	Time                    time.Time
	Actor                   Actor
	Role                    string // of the actor then
	Changes                 []AuditChange
	Added, Changed, Removed int
	before                  string // import of which is kept what was before; empty: of none
	key                     string
}

// AuditChange is one record before and after, in JSON without secrets; nil: it
// does not exist.
type AuditChange struct {
	Kind Kind            `json:"kind"`
	ID   string          `json:"id"`
	Old  json.RawMessage `json:"old,omitempty"`
	New  json.RawMessage `json:"new,omitempty"`
}

type auditRecord struct {
	Schema  int           `json:"schema"`
	Time    time.Time     `json:"time"`
	Who     string        `json:"who"`
	Role    string        `json:"role,omitempty"`
	Via     string        `json:"via,omitempty"`
	Address string        `json:"address,omitempty"`
	Call    string        `json:"call,omitempty"`
	Changes []AuditChange `json:"changes,omitempty"`
	counts
}

type counts struct {
	Added   int `json:"added,omitempty"`
	Changed int `json:"changed,omitempty"`
	Removed int `json:"removed,omitempty"`

	Before string `json:"before,omitempty"` // import of which is kept what was before; see undoKey
}

// auditedKV is a KV that tells every change of a record, so that no method of
// Store can forget it.
type auditedKV struct {
	fencedKV

	logger hclog.Logger
	late   *late
}

func (a auditedKV) Txn(ctx context.Context, compares []Compare, ops []Op) (TxnResult, error) {
	e, err := a.entry(ctx, ops)
	if err != nil {
		return TxnResult{}, err
	}
	if e == nil {
		return a.fencedKV.Txn(ctx, compares, ops)
	}
	told := append(slices.Clip(ops), Op{auditKey(e.Time) + "-" + random(), encode(e)})
	res, err := a.fencedKV.Txn(ctx, compares, told)
	onlyDeletes := !slices.ContainsFunc(ops, func(o Op) bool { return o.Value != nil })
	if errors.Is(err, ErrFull) && onlyDeletes {
		// The way out of a full etcd is to delete, and nothing can be written.
		res, err := a.fencedKV.Txn(ctx, compares, ops)
		if err == nil && res.OK {
			a.logger.Warn("store is full: the audit log is told of what was deleted when there is room", "operator", e.Who, "count", e.Removed)
			a.late.add(told[len(ops)])
		}
		return res, err
	}
	if err == nil && res.OK {
		a.tellLate(ctx)
	}
	return res, err
}

// late has entries of the audit log that a full store did not take. Those that
// the controller does not live to write are in its own log alone.
type late struct {
	mu  sync.Mutex
	ops []Op // guarded by mu
}

// mostLate bounds late; more than that is deleted by hand hardly ever.
const mostLate = 10_000

func (l *late) add(op Op) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ops) < mostLate {
		l.ops = append(l.ops, op)
	}
}

// tellLate writes what a full store did not take, after a write that it took.
func (a auditedKV) tellLate(ctx context.Context) {
	a.late.mu.Lock()
	defer a.late.mu.Unlock()
	for len(a.late.ops) > 0 {
		n := min(len(a.late.ops), maxOps)
		if _, err := a.fencedKV.Txn(ctx, nil, a.late.ops[:n]); err != nil {
			a.logger.Debug("audit log is told later", "error", err)
			return
		}
		a.late.ops = a.late.ops[n:]
	}
	a.late.ops = nil
}

// entry returns what is to be told of a transaction; nil for nothing.
func (a auditedKV) entry(ctx context.Context, ops []Op) (*auditRecord, error) {
	actor, known := ctx.Value(actorKey{}).(Actor)
	e := &auditRecord{
		Schema: schema, Time: stamp(), Who: actor.Name, Via: actor.Via, Address: actor.Address, Call: actor.Call,
	}
	if actor.Role != identity.NoRole {
		e.Role = actor.Role.String()
	}
	if !known {
		e.Who = "controller"
	}
	var keys []string
	for _, o := range ops {
		if o.Key == commitKey && o.Value != nil {
			e.counts, _ = ctx.Value(countsKey{}).(counts)
			return e, nil
		}
		if strings.HasPrefix(o.Key, imports) {
			return nil, nil // an import, which is told when it counts
		}
		if k, _, ok := parseKey(o.Key); ok && k != KindPlace && k != KindTrust && (known || ours(k)) {
			keys = append(keys, o.Key)
		}
	}
	if len(keys) == 0 {
		return nil, nil
	}
	items, _, err := a.Get(ctx, keys...)
	if err != nil {
		return nil, err
	}
	size := 0
	for _, o := range ops {
		if !slices.Contains(keys, o.Key) {
			continue
		}
		c := AuditChange{New: o.Value}
		c.Kind, c.ID, _ = parseKey(o.Key)
		if it := find(items, o.Key); it != nil {
			c.Old = it.Value
		}
		switch {
		case c.Old == nil && c.New == nil:
			continue
		case c.Old == nil:
			e.Added++
		case c.New == nil:
			e.Removed++
		default:
			e.Changed++
		}
		c.Old, c.New = withoutSecrets(c.Old), withoutSecrets(c.New)
		size += len(c.Old) + len(c.New)
		e.Changes = append(e.Changes, c)
	}
	if size > mostAudited {
		e.Before = a.keep(ctx, e.Time, e.Changes)
		e.Changes = nil
	}
	return e, nil
}

// ours tells whether changes that the controller makes by itself are told. What
// its machines write of their own state is not.
func ours(k Kind) bool {
	return slices.Contains([]Kind{KindPlan, KindSubscriber, KindRouter, KindToken, KindOperator, KindCA}, k)
}

// withoutSecrets returns a record with something else in place of hashes of
// secrets.
func withoutSecrets(value []byte) json.RawMessage {
	if value == nil {
		return nil
	}
	if !json.Valid(value) {
		return encode(fmt.Sprintf("%d bytes that are not JSON", len(value)))
	}
	if !bytes.Contains(value, []byte(`"secret_hash"`)) && !bytes.Contains(value, []byte(`"sealed_key"`)) {
		return value
	}
	var v any
	if err := json.Unmarshal(value, &v); err != nil {
		return encode("a record that can't be read")
	}
	return encode(hide(v))
}

func hide(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if v[k] = hide(x); k == "secret_hash" || k == "sealed_key" {
				v[k] = "hidden"
			}
		}
	case []any:
		for i, x := range v {
			v[i] = hide(x)
		}
	}
	return v
}

// decodeEntry reads an entry of the audit log.
func decodeEntry(it Item) (AuditEntry, error) {
	var r auditRecord
	if err := decode(it.Value, &r, &r.Schema); err != nil {
		return AuditEntry{}, fmt.Errorf("audit entry %s: %w", it.Key, err)
	}
	return AuditEntry{
		ID: plan.Revision(it.Revision), Time: r.Time, Role: r.Role,
		Actor:   Actor{Caller: identity.Caller{Name: r.Who, Via: r.Via, Address: r.Address}, Call: r.Call},
		Changes: r.Changes, Added: r.Added, Changed: r.Changed, Removed: r.Removed, before: r.Before, key: it.Key,
	}, nil
}

// AuditLog returns at most limit entries that are wanted and not older than
// since, newest first. before is what the page before has returned as next;
// empty for the first. next is empty after the last page.
func (s *Store) AuditLog(ctx context.Context, before string, limit int, since time.Time, wanted func(AuditEntry) bool) (entries []AuditEntry, next string, err error) {
	const page = 500
	q := Range{From: audit, End: auditEnd, Limit: page}
	if !since.IsZero() {
		q.End = auditKey(since.Add(-time.Microsecond))
	}
	if before != "" {
		q.From = audit + before + "\x00"
	}
	for {
		items, _, err := s.kv.Range(ctx, q)
		if err != nil {
			return nil, "", fmt.Errorf("audit log: %w", err)
		}
		for _, it := range items {
			e, err := decodeEntry(it)
			if err != nil {
				s.logger.Warn("audit entry can't be read", "key", it.Key, "error", err)
				continue
			}
			if !wanted(e) {
				continue
			}
			if len(entries) == limit {
				return entries, strings.TrimPrefix(entries[limit-1].key, audit), nil
			}
			entries = append(entries, e)
		}
		if len(items) < page {
			return entries, "", nil
		}
		q.From = items[len(items)-1].Key + "\x00"
	}
}

// AuditEntryOf returns the entry of a revision. Errors: ErrNotFound.
func (s *Store) AuditEntryOf(ctx context.Context, id plan.Revision) (AuditEntry, error) {
	// Time and revision go the same way, but for clocks that differ.
	const differ = 10 * time.Minute
	early, late := time.UnixMicro(0), time.Now().Add(differ)
	for late.Sub(early) > time.Second {
		middle := early.Add(late.Sub(early) / 2)
		items, _, err := s.kv.Range(ctx, Range{From: auditKey(middle), End: auditEnd, Limit: 1})
		if err != nil {
			return AuditEntry{}, fmt.Errorf("audit log: %w", err)
		}
		if len(items) > 0 && items[0].Revision >= int64(id) {
			late = middle
		} else {
			early = middle
		}
	}
	q := Range{From: auditKey(late.Add(differ)), End: auditKey(late.Add(-differ)), Limit: listPage}
	for {
		items, count, err := s.kv.Range(ctx, q)
		if err != nil {
			return AuditEntry{}, fmt.Errorf("audit log: %w", err)
		}
		for _, it := range items {
			if it.Revision == int64(id) {
				return decodeEntry(it)
			}
		}
		if count <= len(items) {
			return AuditEntry{}, &Error{Kind: "change", ID: strconv.FormatInt(int64(id), 10), Err: ErrNotFound}
		}
		q.From = items[len(items)-1].Key + "\x00"
	}
}

// Lasting returns why an entry can't be undone, whatever was changed since;
// empty if it can.
func (e AuditEntry) Lasting() string {
	if e.before != "" {
		return ""
	}
	if len(e.Changes) == 0 {
		return notKept
	}
	for _, c := range e.Changes {
		switch c.Kind {
		case KindPlan, KindSubscriber, KindRouter, KindSchedule:
		case KindToken:
			return "what opens a door does not come back by undoing: make another one with cakefleetctl token create"
		case KindOperator:
			return "what opens a door does not come back by undoing: see cakefleetctl operator"
		case KindRollout:
			return fmt.Sprintf("routers run what a rollout has opened: take that back with cakefleetctl rollout rollback %s while it is under way; the plan that it has changed at its end with cakefleetctl undo of that change, or cakefleetctl plan rollback", c.ID)
		default:
			return fmt.Sprintf("a %s can't be undone: change it back", c.Kind)
		}
	}
	return ""
}

// ErrLasting means that a change can't be undone.
var ErrLasting = errors.New("can't be undone")

// ErrChangedSince means that what a change has made is not there any more.
var ErrChangedSince = errors.New("was changed since")

// Undo makes all records that an entry changed what they were before, in one
// transaction, and returns what that changes. With dryRun it only returns it.
// Errors: ErrNotFound, ErrLasting, ErrChangedSince which says by whom, and those
// of writing the records.
func (s *Store) Undo(ctx context.Context, id plan.Revision, dryRun bool) ([]AuditChange, error) {
	e, err := s.AuditEntryOf(ctx, id)
	if err != nil {
		return nil, err
	}
	if why := e.Lasting(); why != "" {
		return nil, fmt.Errorf("change %d: %w: %s", id, ErrLasting, why)
	}
	if e.before != "" {
		return s.undoImport(ctx, e, dryRun)
	}
	// Of a schedule's end stays what keeps revisions from going back.
	e.Changes = slices.DeleteFunc(e.Changes, func(c AuditChange) bool { return c.Kind == KindSchedule && strings.HasPrefix(c.ID, "~") })
	keys := make([]string, len(e.Changes))
	for i, c := range e.Changes {
		keys[i] = key(c.Kind, c.ID)
	}
	items, rev, err := s.kv.Get(ctx, keys...)
	if err != nil {
		return nil, fmt.Errorf("undo change %d: %w", id, err)
	}
	if err := s.await(ctx, plan.Revision(rev)); err != nil {
		return nil, err
	}
	t := txn{seen: s.Revision()}
	changes := make([]AuditChange, 0, len(e.Changes))
	for i, c := range e.Changes {
		now := find(items, keys[i])
		same := now == nil && c.New == nil || now != nil && c.New != nil && revisionIn(*now) == id
		if !same {
			return nil, fmt.Errorf("change %d: %s %s %w%s", id, c.Kind, c.ID, ErrChangedSince, s.since(ctx, e, c))
		}
		w, err := s.undoWrite(ctx, c, now)
		if err != nil {
			return nil, fmt.Errorf("undo change %d: %w", id, err)
		}
		if !t.add(w) {
			return nil, fmt.Errorf("change %d: %w: it changed too many records", id, ErrLasting)
		}
		undone := AuditChange{Kind: c.Kind, ID: c.ID, Old: c.New}
		if w.value != nil {
			undone.New = w.value
		}
		changes = append(changes, undone)
	}
	if dryRun {
		return changes, nil
	}
	_, err = s.commit(ctx, &t)
	return changes, err
}

// undoWrite returns the write that makes a record what it was. now is what it
// is.
func (s *Store) undoWrite(ctx context.Context, c AuditChange, now *Item) (w write, err error) {
	w = write{kind: c.Kind, id: c.ID}
	if now != nil {
		w.expect = revisionIn(*now)
	}
	if c.Kind == KindSchedule {
		return undoSchedule(c, w.expect)
	}
	if c.Old == nil {
		w.users = usersOf[c.Kind]
		return w, nil
	}
	switch c.Kind {
	case KindPlan:
		p, err := decodePlan(c.ID, c.Old, 0)
		if err != nil {
			return w, err
		}
		p.Updated, p.Author = stamp(), ""
		if a, ok := ctx.Value(actorKey{}).(Actor); ok {
			p.Author = a.Name
		}
		w.value = encodePlan(p)
		w.more, err = s.historyOps(ctx, p, w.value)
		return w, err
	case KindSubscriber:
		sub, err := decodeSubscriber(c.ID, c.Old, 0)
		if err != nil {
			return w, err
		}
		return subscriberWrite(SubscriberWrite{Subscriber: sub, Expect: w.expect}, stamp()), nil
	case KindRouter:
		value, err := oldRouter(c.Old, now)
		if err != nil {
			return w, err
		}
		r, err := decodeRouter(c.ID, value, 0)
		if err != nil {
			return w, err
		}
		r.Updated = stamp()
		if w.value = encodeRouter(r); r.Subscriber != "" {
			w.ref, w.refs = KindSubscriber, []string{r.Subscriber}
		}
		return w, nil
	default:
		return w, fmt.Errorf("%s %s: %w", c.Kind, c.ID, ErrLasting)
	}
}

// oldRouter returns a router's record as it was, with the identity that it has
// now: a key that was replaced or removed does not come back by undoing.
func oldRouter(old json.RawMessage, now *Item) ([]byte, error) {
	var was, is map[string]json.RawMessage
	if err := json.Unmarshal(old, &was); err != nil {
		return nil, err
	}
	if now != nil {
		if err := json.Unmarshal(now.Value, &is); err != nil {
			return nil, err
		}
	}
	for _, field := range []string{"key", "quarantine"} {
		if delete(was, field); is[field] != nil {
			was[field] = is[field]
		}
	}
	return json.Marshal(was)
}

// since says who has changed a record after an entry, as far as the log has it.
func (s *Store) since(ctx context.Context, e AuditEntry, c AuditChange) string {
	later, _, err := s.AuditLog(ctx, "", 3, e.Time, func(x AuditEntry) bool {
		return x.ID > e.ID && slices.ContainsFunc(x.Changes, func(y AuditChange) bool { return y.Kind == c.Kind && y.ID == c.ID })
	})
	if err != nil || len(later) == 0 {
		return ""
	}
	var said []string
	for _, x := range later {
		said = append(said, fmt.Sprintf("by %s at %s (%s, change %d)", x.Actor.Name, x.Time.Format(time.RFC3339), x.Actor.Call, x.ID))
	}
	return ": " + strings.Join(said, ", ")
}

// pruneLoop keeps the audit log within its bounds.
func (s *Store) pruneLoop(ctx context.Context) {
	tick := time.NewTicker(pruneInterval)
	defer tick.Stop()
	for {
		if err := s.Prune(ctx, time.Now()); err != nil && ctx.Err() == nil {
			s.logger.Warn("remove what is too old in the audit log", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Prune removes entries of the audit log that are too old or too many, and what
// imports have replaced that is too old.
func (s *Store) Prune(ctx context.Context, now time.Time) error {
	if err := s.pruneBefore(ctx, now); err != nil {
		return err
	}
	end := now.Add(-s.auditAge)
	_, count, err := s.kv.Range(ctx, Range{From: audit, End: auditEnd, Limit: 1})
	if err != nil {
		return err
	}
	if count > s.auditEntries {
		// Find the time since which there are as many as may stay.
		early, late := end, now.Add(time.Hour)
		for late.Sub(early) > time.Microsecond {
			middle := early.Add(late.Sub(early) / 2)
			_, n, err := s.kv.Range(ctx, Range{From: audit, End: auditKey(middle), Limit: 1})
			if err != nil {
				return err
			}
			if n > s.auditEntries {
				early = middle
			} else {
				late = middle
			}
		}
		end = late
	}
	for {
		items, _, err := s.kv.Range(ctx, Range{From: auditKey(end), End: auditEnd, Limit: maxOps})
		if err != nil || len(items) == 0 {
			return err
		}
		ops := make([]Op, len(items))
		for i, it := range items {
			ops[i] = Op{it.Key, nil}
		}
		if _, err := s.kv.Txn(ctx, nil, ops); err != nil {
			return err
		}
	}
}
