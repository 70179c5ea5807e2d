package store

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// What an import replaces is kept beside the audit log, in pieces as the import
// itself, so that it can be undone although it is too much for an entry. No
// controller holds it in memory.
const undos = "/cakefleet/undo/v1/"

const (
	// mostKept is how many writes of an import are kept at most: 30 MB or so.
	mostKept = 100_000

	// keptFor is how long they are kept.
	keptFor = 7 * 24 * time.Hour

	// mostTold is how many changes undoing an import tells.
	mostTold = 1000
)

var notKept = fmt.Sprintf("what was before is kept for %d days, and of imports of up to %d subscribers: import the file from before with cakefleetctl subscriber import", keptFor/(24*time.Hour), mostKept)

type (
	keptPiece struct {
		Schema int          `json:"schema"`
		Writes []keptRecord `json:"writes"`
	}
	// keptRecord is a subscriber before an import.
	keptRecord struct {
		ID     string          `json:"id"`
		Record json.RawMessage `json:"record,omitempty"` // absent: there was none
		Gone   bool            `json:"gone,omitempty"`   // the import removes it
	}
)

// undoKey is a piece of what an import has replaced.
func undoKey(id, part string) string { return undos + id + "/" + part }

// keepBefore keeps what writes are about to replace.
func (s *Store) keepBefore(ctx context.Context, id string, writes []SubscriberWrite) error {
	var all []keptRecord
	s.View(func(st *State) {
		all = make([]keptRecord, len(writes))
		for i, w := range writes {
			all[i].ID, all[i].Gone = w.Subscriber.ID, w.Remove
			if sub, ok := st.Subscriber(w.Subscriber.ID); ok {
				all[i].Record = encodeSubscriber(sub)
			}
		}
	})
	piece, size, n := keptPiece{Schema: schema}, 0, 0
	flush := func() error {
		if len(piece.Writes) == 0 {
			return nil
		}
		_, err := s.kv.Txn(ctx, nil, []Op{{undoKey(id, pieceName(n)), encode(piece)}})
		piece.Writes, size, n = nil, 0, n+1
		return err
	}
	for _, r := range all {
		if size += len(r.Record) + len(r.ID) + 32; size > maxBytes/2 {
			if err := flush(); err != nil {
				return err
			}
		}
		piece.Writes = append(piece.Writes, r)
	}
	return flush()
}

// keep keeps what changes of subscribers replace that are too much for an entry
// and fit one transaction. It returns the name that it is kept under; empty if
// it is not.
func (a auditedKV) keep(ctx context.Context, at time.Time, changes []AuditChange) string {
	piece, size := keptPiece{Schema: schema}, 0
	for _, c := range changes {
		size += len(c.Old) + len(c.ID) + 32
		if c.Kind != KindSubscriber || size > maxBytes {
			return ""
		}
		piece.Writes = append(piece.Writes, keptRecord{ID: c.ID, Record: c.Old, Gone: c.New == nil})
	}
	id := importID(at)
	if _, err := a.fencedKV.Txn(ctx, nil, []Op{{undoKey(id, pieceName(0)), encode(piece)}}); err != nil {
		a.logger.Warn("what is replaced is not kept, so that it can't be undone", "count", len(changes), "error", err)
		return ""
	}
	return id
}

// undoImport makes all subscribers that an import has written what they were
// before, all or none, which is an import again.
func (s *Store) undoImport(ctx context.Context, e AuditEntry, dryRun bool) ([]AuditChange, error) {
	fail := func(err error) ([]AuditChange, error) {
		return nil, fmt.Errorf("undo change %d: %w", e.ID, err)
	}
	items, rev, err := s.kv.List(ctx, undoKey(e.before, ""))
	if err != nil {
		return fail(err)
	}
	if len(items) == 0 {
		return nil, fmt.Errorf("change %d: %w: %s", e.ID, ErrLasting, notKept)
	}
	if err := s.await(ctx, plan.Revision(rev)); err != nil {
		return fail(err)
	}
	var writes []SubscriberWrite
	var changes []AuditChange
	var since []string // subscribers that were changed since
	for _, it := range items {
		var r keptPiece
		if err := decode(it.Value, &r, &r.Schema); err != nil {
			return fail(fmt.Errorf("%s: %w", it.Key, err))
		}
		for _, was := range r.Writes {
			w := SubscriberWrite{Subscriber: plan.Subscriber{ID: was.ID}, Remove: was.Record == nil}
			if !w.Remove {
				if w.Subscriber, err = decodeSubscriber(was.ID, was.Record, 0); err != nil {
					return fail(fmt.Errorf("subscriber %s: %w", was.ID, err))
				}
			}
			c := AuditChange{Kind: KindSubscriber, ID: was.ID, New: was.Record}
			var is plan.Subscriber
			var exists bool
			s.View(func(st *State) { is, exists = st.Subscriber(was.ID) })
			switch {
			case exists == was.Gone, exists && is.Revision != e.ID:
				since = append(since, was.ID)
			case exists:
				w.Expect, c.Old = e.ID, encodeSubscriber(is)
			}
			writes = append(writes, w)
			if len(changes) < mostTold {
				changes = append(changes, c)
			}
		}
	}
	if len(since) > 0 {
		text := strings.Join(since[:min(len(since), 5)], ", ")
		if more := len(since) - 5; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		return nil, fmt.Errorf("change %d: subscriber %s %w: import the file from before with cakefleetctl subscriber import, which changes only what differs", e.ID, text, ErrChangedSince)
	}
	if dryRun {
		return changes, nil
	}
	if _, err := s.WriteSubscribers(ctx, writes); err != nil {
		return fail(err)
	}
	return changes, nil
}

// undoSchedule returns the write that makes a schedule what it was.
func undoSchedule(c AuditChange, expect plan.Revision) (w write, err error) {
	now := stamp()
	w = write{kind: KindSchedule, id: c.ID, expect: expect}
	if c.Old != nil {
		was, err := decodeSchedule(c.ID, c.Old, 0)
		if err != nil {
			return w, err
		}
		was.Updated = now
		w = scheduleWrite(was, expect)
	}
	if c.New == nil {
		return w, nil
	}
	is, err := decodeSchedule(c.ID, c.New, 0)
	if err != nil {
		return w, err
	}
	w.more = []Op{tombstone(is.Target, now)}
	return w, nil
}

// pruneBefore removes what imports have replaced that is too old.
func (s *Store) pruneBefore(ctx context.Context, now time.Time) error {
	// An import's name begins with its time.
	end := undos + now.Add(-keptFor).UTC().Format(importTime)
	for {
		items, _, err := s.kv.Range(ctx, Range{From: undos, End: end, Limit: maxOps})
		if err != nil || len(items) == 0 {
			return err
		}
		for part := range slices.Chunk(items, maxOps) {
			ops := make([]Op, len(part))
			for i, it := range part {
				ops[i] = Op{it.Key, nil}
			}
			if _, err := s.kv.Txn(ctx, nil, ops); err != nil {
				return err
			}
		}
	}
}
