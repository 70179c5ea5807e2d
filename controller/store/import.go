package store

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// An import is more writes of subscribers than one transaction takes. It is a
// redo log: the writes are staged in pieces under imports/<id>/, and putting
// the one key commitKey makes them all count at once. From that revision on
// every controller shows the new records, whether it sees them under their own
// keys already or in a piece. Rolling forward then moves each piece to where
// its records belong, in one transaction that also removes the piece, so that
// it can be done by anybody, again, and after a crash at any step.
//
// While commitKey exists nobody else writes subscribers or makes references to
// them: such writes compare that it doesn't, and wait.

// commitKey names the import that counts and is not rolled forward yet.
const commitKey = Prefix + "import"

const imports = Prefix + "imports/"

// beginPart is the part of an import that exists from its first write until it
// is committed or given up.
const beginPart = "begin"

// Markers whose revision is compared by what doesn't fit one transaction.
const (
	changedKey = Prefix + refs + "changed" // a subscriber was written, or something removed; deleted or put again
	servedKey  = Prefix + refs + "served"  // a router was given a subscriber
)

const (
	// rollDelay is how long a controller leaves rolling forward to the one that
	// made the import.
	rollDelay = 2 * time.Second

	// staleAfter is when what was staged and never committed is removed.
	staleAfter = time.Hour
)

// commit is the import that counts.
type commit struct {
	id       string
	pieces   int
	revision plan.Revision
}

type commitRecord struct {
	Schema int       `json:"schema"`
	ID     string    `json:"id"`
	Pieces int       `json:"pieces"`
	Rows   int       `json:"rows"`
	Time   time.Time `json:"time"`
}

type (
	pieceRecord struct {
		Schema int           `json:"schema"`
		Writes []stageRecord `json:"writes"`
	}
	stageRecord struct {
		ID     string          `json:"id"`
		Record json.RawMessage `json:"record,omitempty"` // absent: the subscriber is removed
	}
)

// staged is one write of a piece, as the state takes it.
type staged struct {
	subscriber plan.Subscriber
	remove     bool
}

func importKey(id, part string) string { return imports + id + "/" + part }

func pieceName(n int) string { return fmt.Sprintf("%06d", n) }

// parseImportKey returns which part of which import a key is.
func parseImportKey(key string) (id, part string, ok bool) {
	rest, ok := strings.CutPrefix(key, imports)
	if !ok {
		return "", "", false
	}
	id, part, ok = strings.Cut(rest, "/")
	return id, part, ok && part != "" && part != beginPart
}

func decodeCommit(value []byte, revision int64) (commit, error) {
	var r commitRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return commit{}, err
	}
	return commit{id: r.ID, pieces: r.Pieces, revision: plan.Revision(revision)}, nil
}

func decodePieceRecord(value []byte) (pieceRecord, error) {
	var r pieceRecord
	err := decode(value, &r, &r.Schema)
	return r, err
}

func decodePiece(value []byte) ([]staged, error) {
	r, err := decodePieceRecord(value)
	if err != nil {
		return nil, err
	}
	out := make([]staged, len(r.Writes))
	for i, w := range r.Writes {
		if w.Record == nil {
			out[i] = staged{subscriber: plan.Subscriber{ID: w.ID}, remove: true}
			continue
		}
		sub, err := decodeSubscriber(w.ID, w.Record, 0)
		if err != nil {
			return nil, fmt.Errorf("subscriber %s: %w", w.ID, err)
		}
		out[i] = staged{subscriber: sub}
	}
	return out, nil
}

// piece is what rolling forward does in one transaction.
type piece struct {
	record pieceRecord
	bytes  int
}

// pieces divides writes so that each piece can be rolled forward in one
// transaction.
func pieces(writes []SubscriberWrite, now time.Time) []piece {
	var all []piece
	p := piece{record: pieceRecord{Schema: schema}}
	ops, marked := 1, map[string]bool{} // the removal of the piece itself
	flush := func() {
		if len(p.record.Writes) > 0 {
			all = append(all, p)
		}
		p = piece{record: pieceRecord{Schema: schema}}
		ops = 1
		clear(marked)
	}
	for _, sw := range writes {
		w := subscriberWrite(sw, now)
		need := func() int {
			n := 1
			if sw.Remove {
				n++ // the marker of those who refer to it
			}
			for _, ref := range w.refs {
				if !marked[ref] {
					n++
				}
			}
			return n
		}
		if ops+need() > maxOps || p.bytes+len(w.value) > maxBytes/2 {
			flush()
		}
		ops += need()
		for _, ref := range w.refs {
			marked[ref] = true
		}
		p.bytes += len(w.value) + len(w.id)
		p.record.Writes = append(p.record.Writes, stageRecord{ID: w.id, Record: w.value})
	}
	flush()
	return all
}

// importSubscribers makes all writes or none. guards are about whole records
// and hold when they count.
func (s *Store) importSubscribers(ctx context.Context, writes []SubscriberWrite, guards []Compare) error {
	if err := s.check(writes); err != nil {
		return err
	}
	now := stamp()
	id := importID(now)
	all := pieces(writes, now)
	begin, err := s.stage(ctx, id, all)
	if err != nil {
		s.abandon(ctx, id)
		return fmt.Errorf("import: stage %d changes: %w", len(writes), err)
	}
	told := count(writes)
	kept := int64(-1)
	removes := slices.ContainsFunc(writes, func(w SubscriberWrite) bool { return w.Remove })
	record := encode(commitRecord{Schema: schema, ID: id, Pieces: len(all), Rows: len(writes), Time: now})
	for range attempts {
		var seen plan.Revision
		var changed int64
		s.View(func(st *State) { seen, changed = st.revision, st.changed })
		if err := s.check(writes); err != nil {
			s.abandon(ctx, id)
			return err
		}
		if kept != changed && len(writes) <= mostKept { // subscribers may be others than those that were kept
			if err := s.keepBefore(ctx, id, writes); err != nil {
				s.abandon(ctx, id)
				return fmt.Errorf("import: keep what %d changes replace: %w", len(writes), err)
			}
			kept, told.Before = changed, id
		}
		ctx := context.WithValue(ctx, countsKey{}, told)
		compares := []Compare{
			{commitKey, Equal, 0},
			{importKey(id, beginPart), Equal, begin},
			{changedKey, Equal, changed},
			{changedKey, Greater, 0},
		}
		if removes {
			compares = append(compares, Compare{servedKey, Less, int64(seen) + 1})
		}
		compares = append(compares, guards...)
		s.own.Store(id)
		res, err := s.kv.Txn(ctx, compares, []Op{
			{commitKey, record},
			{importKey(id, beginPart), nil},
			{changedKey, []byte(id)},
		})
		if err != nil {
			// Whether it counts is not known here. If it does, somebody rolls it
			// forward; if not, what is staged is removed when it is old.
			return fmt.Errorf("import: commit %d changes: %w", len(writes), err)
		}
		if err := s.await(ctx, plan.Revision(res.Revision)); err != nil {
			return fmt.Errorf("import: %w", err)
		}
		if res.OK {
			return nil
		}
		if find(res.Items, commitKey) != nil {
			if err := s.awaitImport(ctx); err != nil {
				return fmt.Errorf("import: %w", err)
			}
			continue
		}
		if find(res.Items, importKey(id, beginPart)) == nil {
			return fmt.Errorf("import: %w: it took longer than %v", ErrUnavailable, staleAfter)
		}
		if err := (&txn{guards: guards}).refusal(res.Items); !errors.Is(err, errMoved) {
			s.abandon(ctx, id)
			return err
		}
		if find(res.Items, changedKey) == nil {
			if _, err := s.kv.Txn(ctx, nil, []Op{{changedKey, []byte(id)}}); err != nil {
				s.abandon(ctx, id)
				return fmt.Errorf("import: %w", err)
			}
		}
	}
	s.abandon(ctx, id)
	return fmt.Errorf("import: %w", errBusy)
}

// count returns what an import changes, for the audit log.
func count(writes []SubscriberWrite) (c counts) {
	for _, w := range writes {
		switch {
		case w.Remove:
			c.Removed++
		case w.Expect == 0:
			c.Added++
		default:
			c.Changed++
		}
	}
	return c
}

// importTime is how the name of an import begins.
const importTime = "20060102T150405Z"

func importID(now time.Time) string { return now.Format(importTime) + "-" + random() }

func random() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// stage writes what can be committed then, and returns the revision of its
// first part.
func (s *Store) stage(ctx context.Context, id string, all []piece) (begin int64, err error) {
	res, err := s.kv.Txn(ctx, []Compare{{importKey(id, beginPart), Equal, 0}}, []Op{{importKey(id, beginPart), []byte(id)}})
	if err != nil {
		return 0, err
	}
	begin = res.Revision
	var ops []Op
	size := 0
	flush := func() error {
		if len(ops) == 0 {
			return nil
		}
		_, err := s.kv.Txn(ctx, nil, ops)
		ops, size = nil, 0
		return err
	}
	for i, p := range all {
		value := encode(p.record)
		if len(ops) == maxOps || size+len(value) > maxBytes {
			if err := flush(); err != nil {
				return 0, err
			}
		}
		ops = append(ops, Op{importKey(id, pieceName(i)), value})
		size += len(value)
	}
	return begin, flush()
}

// check returns why writes can't be made from the state as it is.
func (s *Store) check(writes []SubscriberWrite) (err error) {
	s.View(func(st *State) {
		for _, w := range writes {
			if err = st.check(w); err != nil {
				return
			}
		}
	})
	return err
}

func (s *State) check(w SubscriberWrite) error {
	id := w.Subscriber.ID
	have, exists := s.Subscriber(id)
	switch {
	case w.Expect == Any && (exists || !w.Remove), w.Expect == have.Revision:
	case !exists:
		return notFound(KindSubscriber, id)
	default:
		e := &Error{Kind: KindSubscriber, ID: id, Err: ErrConflict, Want: w.Expect, Have: have.Revision, Updated: have.Updated}
		if w.Expect == 0 {
			e.Err = ErrExists
		}
		return e
	}
	if w.Remove {
		if _, n, first := s.users(KindSubscriber, id); n > 0 {
			return &Error{Kind: KindSubscriber, ID: id, Err: ErrInUse, Ref: KindRouter, RefID: first, Count: n}
		}
		return nil
	}
	for _, name := range w.Subscriber.Plans() {
		if _, ok := s.plans.byID[name]; !ok {
			return &Error{Kind: KindSubscriber, ID: id, Err: ErrDangling, Ref: KindPlan, RefID: name}
		}
	}
	return nil
}

// abandon removes what was staged and does not count. What it can't remove is
// removed when it is old.
func (s *Store) abandon(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := s.discard(ctx, id); err != nil {
		s.logger.Warn("remove what an import has staged, later it is tried again", "import", id, "error", err)
	}
}

// discard removes all parts of an import unless it is committed. The first part
// goes first, so that it can't be committed meanwhile.
func (s *Store) discard(ctx context.Context, id string) error {
	items, _, err := s.kv.Get(ctx, commitKey)
	if err != nil {
		return err
	}
	was := int64(0)
	if len(items) > 0 {
		c, err := decodeCommit(items[0].Value, items[0].Revision)
		if err != nil || c.id == id {
			return err
		}
		was = items[0].Revision
	}
	res, err := s.kv.Txn(ctx, []Compare{{commitKey, Equal, was}}, []Op{{importKey(id, beginPart), nil}})
	if err != nil {
		return err
	}
	if !res.OK {
		return fmt.Errorf("%w: another import was committed meanwhile", ErrUnavailable)
	}
	items, _, err = s.kv.List(ctx, imports+id+"/")
	if err != nil {
		return err
	}
	before, _, err := s.kv.List(ctx, undoKey(id, ""))
	if err != nil {
		return err
	}
	items = append(items, before...)
	for part := range slices.Chunk(items, maxOps) {
		ops := make([]Op, len(part))
		for i, it := range part {
			ops[i] = Op{it.Key, nil}
		}
		if _, err := s.kv.Txn(ctx, nil, ops); err != nil {
			return err
		}
	}
	return nil
}

// sweep removes what imports that ended half-way have staged.
func (s *Store) sweep(ctx context.Context, now time.Time) error {
	items, _, err := s.kv.List(ctx, imports)
	if err != nil {
		return err
	}
	done := map[string]bool{}
	for _, it := range items {
		id, _, _ := strings.Cut(strings.TrimPrefix(it.Key, imports), "/")
		at, _, _ := strings.Cut(id, "-")
		began, err := time.Parse(importTime, at)
		if done[id] || err == nil && now.Sub(began) < staleAfter {
			continue
		}
		done[id] = true
		if err := s.discard(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// awaitImport returns when no import counts that is not rolled forward.
func (s *Store) awaitImport(ctx context.Context) error {
	for {
		s.mu.RLock()
		c, moved := s.state.commit, s.moved
		s.mu.RUnlock()
		if c.id == "" {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("wait for the import %s: %w", c.id, context.Cause(ctx))
		case <-s.closed:
			return ErrClosed
		}
	}
}

// rollLoop rolls imports forward until ctx ends.
func (s *Store) rollLoop(ctx context.Context) {
	for {
		select {
		case <-s.rolling:
		case <-ctx.Done():
			return
		}
		wait := retryFirst
		for ctx.Err() == nil {
			s.mu.RLock()
			c := s.state.commit
			s.mu.RUnlock()
			if c.id == "" {
				break
			}
			err := s.roll(ctx, c)
			if err == nil {
				break
			}
			if ctx.Err() == nil {
				s.logger.Warn("import can't be rolled forward, try again", "import", c.id, "wait", wait, "error", err)
			}
			if sleep(ctx, wait) != nil {
				return
			}
			wait = min(2*wait, retryMost)
		}
	}
}

// roll moves the records of a committed import to their keys and ends it. If
// somebody else does the same, it stands back.
func (s *Store) roll(ctx context.Context, c commit) error {
	if s.own.Load() != c.id {
		if err := sleep(ctx, rollDelay); err != nil {
			return err
		}
	}
	for {
		items, _, err := s.kv.List(ctx, imports+c.id+"/")
		if err != nil {
			return err
		}
		overtaken := false
		for _, it := range items {
			overtaken, err = s.rollPiece(ctx, c, it)
			if err != nil {
				return fmt.Errorf("%s: %w", it.Key, err)
			}
			if overtaken {
				break
			}
		}
		if !overtaken {
			break
		}
		if err := sleep(ctx, rollDelay); err != nil {
			return err
		}
	}
	res, err := s.kv.Txn(ctx, []Compare{{commitKey, Equal, int64(c.revision)}}, []Op{{commitKey, nil}})
	if err != nil {
		return err
	}
	if res.OK {
		s.logger.Info("import is stored", "import", c.id, "revision", c.revision, "pieces", c.pieces)
	}
	return s.await(ctx, plan.Revision(res.Revision))
}

// rollPiece moves one piece; overtaken tells that it was moved already.
func (s *Store) rollPiece(ctx context.Context, c commit, it Item) (overtaken bool, err error) {
	r, err := decodePieceRecord(it.Value)
	if err != nil {
		return false, err
	}
	ops := []Op{{it.Key, nil}}
	marked := map[string]bool{}
	for _, w := range r.Writes {
		if w.Record == nil {
			ops = append(ops, Op{key(KindSubscriber, w.ID), nil}, Op{refKey(KindSubscriber, w.ID), nil})
			continue
		}
		sub, err := decodeSubscriber(w.ID, w.Record, 0)
		if err != nil {
			return false, fmt.Errorf("subscriber %s: %w", w.ID, err)
		}
		ops = append(ops, Op{key(KindSubscriber, w.ID), encodeImported(sub, c.revision)})
		for _, name := range sub.Plans() {
			if !marked[name] {
				marked[name] = true
				ops = append(ops, marker(KindPlan, name, w.ID))
			}
		}
	}
	res, err := s.kv.Txn(ctx, []Compare{{commitKey, Equal, int64(c.revision)}, {it.Key, Equal, it.Revision}}, ops)
	return !res.OK, err
}

// sleep waits unless ctx ends before.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// takeImport takes what the watch saw of imports; ok is false if pieces are
// missing, so that everything must be listed.
func (s *Store) takeImport(changes []Change, it Item) (_ []Change, ok bool) {
	switch it.Key {
	case commitKey:
		return s.takeCommit(changes, it)
	case changedKey:
		s.state.changed = it.Revision
		if it.Value == nil {
			s.state.changed = 0
		}
		return changes, true
	}
	id, part, is := parseImportKey(it.Key)
	if !is {
		return changes, true
	}
	if it.Value == nil {
		delete(s.staged[id], part)
		if len(s.staged[id]) == 0 {
			delete(s.staged, id)
		}
		return changes, true
	}
	s.keepPiece(id, part, it)
	return changes, true
}

// keepPiece keeps a piece until its import is committed or it is removed.
func (s *Store) keepPiece(id, part string, it Item) {
	writes, err := decodePiece(it.Value)
	if err != nil {
		s.logger.Error("piece of an import can't be read", "key", it.Key, "revision", it.Revision, "error", err)
		return
	}
	if s.staged[id] == nil {
		s.staged[id] = map[string][]staged{}
	}
	s.staged[id][part] = writes
}

func (s *Store) takeCommit(changes []Change, it Item) (_ []Change, ok bool) {
	if it.Value == nil {
		s.state.commit = commit{}
		return changes, true
	}
	c, err := decodeCommit(it.Value, it.Revision)
	if err != nil {
		s.logger.Error("commit of an import can't be read", "revision", it.Revision, "error", err)
		return changes, true
	}
	if len(s.staged[c.id]) != c.pieces {
		return changes, false
	}
	s.setCommit(c)
	for _, writes := range s.staged[c.id] {
		changes = s.state.overlay(changes, writes, c.revision)
	}
	delete(s.staged, c.id)
	return changes, true
}

// setCommit makes an import count and has it rolled forward.
func (s *Store) setCommit(c commit) {
	s.state.commit = c
	select {
	case s.rolling <- struct{}{}:
	default:
	}
}

// overlay takes in what an import has written at a revision. Newer records
// stay.
func (s *State) overlay(changes []Change, writes []staged, rev plan.Revision) []Change {
	for _, w := range writes {
		id := w.subscriber.ID
		have, exists := s.subscribers.byID[id]
		if exists && have.Revision >= rev || w.remove && !exists {
			continue
		}
		c := Change{Kind: KindSubscriber, ID: id, Revision: rev, Deleted: w.remove}
		w.subscriber.Revision = rev
		s.setSubscriber(id, w.subscriber, !w.remove)
		changes = append(changes, c)
	}
	return changes
}

// counting is the import that counts in a full list, with what is not rolled
// forward of it.
type counting struct {
	commit  commit
	changed int64             // revision of changedKey
	writes  map[string]staged // by subscriber
}

// listImports finds the import that counts and keeps the pieces of others.
func (s *Store) listImports(items []Item) counting {
	var c counting
	clear(s.staged)
	for _, it := range items {
		if it.Key == changedKey {
			c.changed = it.Revision
		}
		if it.Key != commitKey {
			continue
		}
		var err error
		if c.commit, err = decodeCommit(it.Value, it.Revision); err != nil {
			s.logger.Error("commit of an import can't be read", "revision", it.Revision, "error", err)
		}
	}
	c.writes = map[string]staged{}
	for _, it := range items {
		id, part, ok := parseImportKey(it.Key)
		if !ok {
			continue
		}
		s.keepPiece(id, part, it)
		if id != c.commit.id {
			continue
		}
		for _, w := range s.staged[id][part] {
			c.writes[w.subscriber.ID] = w
		}
	}
	delete(s.staged, c.commit.id)
	return c
}

// unchanged takes in a record of an import that is rolled forward if it is what
// the state has already, so that nobody is told of it twice.
func (s *Store) unchanged(id string, it Item) bool {
	have, exists := s.state.Subscriber(id)
	if it.Value == nil || !exists {
		return false
	}
	sub, err := decodeSubscriber(id, it.Value, plan.Revision(it.Revision))
	if err != nil {
		return false
	}
	if have.Revision != sub.Revision || !bytes.Equal(encodeImported(have, sub.Revision), it.Value) {
		return false
	}
	s.state.modified[id] = plan.Revision(it.Revision)
	return true
}
