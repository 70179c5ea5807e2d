package store

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// How long Run waits before it tries again when etcd can't be reached. Only
// the controllers do, so there is no herd to spread.
const (
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Run keeps the state up to date until ctx ends, and returns nil then. It
// never gives up: while etcd can't be reached, the state stays as it was. Only
// an embedded etcd that can't go on is an error.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dead := make(chan error, 1) // one is all there can be
	if e, err := s.etcd(); err == nil && e.died != nil {
		wg.Go(func() {
			select {
			case <-e.died.done:
				dead <- e.died.err
				cancel()
			case <-ctx.Done():
			}
		})
	}
	wg.Go(func() { s.compareLoop(ctx) })
	wg.Go(func() { s.rollLoop(ctx) })
	wg.Go(func() { s.pruneLoop(ctx) })

	wait := retryFirst
	for ctx.Err() == nil {
		begin := s.Revision()
		err := s.watch(ctx, begin)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, ErrCompacted) || errors.Is(err, errIncomplete) {
			s.logger.Info("watch has missed something, list everything", "revision", begin, "error", err)
			err = s.list(ctx)
			if err == nil {
				wait = retryFirst
				continue
			}
		}
		if s.Revision() != begin {
			wait = retryFirst
		}
		s.logger.Warn("watch ended, try again", "wait", wait, "error", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, retryMost)
	}
	select {
	case err := <-dead:
		return err
	default:
		return nil
	}
}

// errIncomplete says that an import counts of which the watch has not seen all.
var errIncomplete = errors.New("pieces of an import are missing")

// watch takes what happens after a revision until something goes wrong.
func (s *Store) watch(ctx context.Context, after plan.Revision) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return s.kv.Watch(ctx, Prefix, int64(after), func(b Batch) {
		if !s.take(b) {
			cancel(errIncomplete)
		}
	})
}

func (s *Store) compareLoop(ctx context.Context) {
	tick := time.NewTicker(s.compare)
	defer tick.Stop()
	for {
		if err := s.sweep(ctx, time.Now()); err != nil && ctx.Err() == nil {
			s.logger.Warn("remove what old imports have staged", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := s.list(ctx); err != nil && ctx.Err() == nil {
			s.logger.Warn("compare with store", "error", err)
		}
	}
}

// take brings the state forward by what the watch has seen. If it returns
// false, the state stays as it was and everything must be listed.
func (s *Store) take(b Batch) bool {
	s.taking.Lock()
	defer s.taking.Unlock()
	if s.stuck {
		return false
	}
	s.mu.Lock()
	var changes []Change
	for _, it := range b.Items {
		// A list may have been ahead of the watch.
		if plan.Revision(it.Revision) <= s.state.revision {
			continue
		}
		if k, id, ok := parseKey(it.Key); ok {
			changes = s.takeItem(changes, k, id, it)
			continue
		}
		var ok bool
		if changes, ok = s.takeImport(changes, it); !ok {
			// A commit is alone in its transaction with markers, so that what is
			// before it in the batch may count.
			s.stuck = true
			s.reachLocked(max(s.state.revision, plan.Revision(it.Revision)-1))
			s.mu.Unlock()
			s.tell(changes)
			return false
		}
	}
	s.reachLocked(max(s.state.revision, plan.Revision(b.Revision)))
	s.mu.Unlock()
	s.tell(changes)
	return true
}

// list makes the state what a full list has, and tells what differed. The
// watch waits meanwhile, so that the list is not older than the state.
func (s *Store) list(ctx context.Context) error {
	s.taking.Lock()
	defer s.taking.Unlock()
	items, rev, err := s.kv.List(ctx, Prefix)
	if err != nil {
		return err
	}
	over := s.listImports(items)
	s.mu.Lock()
	seen := s.state.revision
	var changes []Change
	missed := 0
	note := func(n int, rev plan.Revision) {
		if len(changes) > n && rev <= seen {
			missed++
		}
	}
	listed := make(map[string]bool, len(items))
	for _, it := range items {
		k, id, ok := parseKey(it.Key)
		if !ok {
			continue
		}
		if _, is := over.writes[id]; is && k == KindSubscriber {
			continue
		}
		listed[it.Key] = true
		have := s.state.revisionOf(k, id)
		if k == KindSubscriber {
			have = s.state.stored(id, have)
		}
		if have == plan.Revision(it.Revision) {
			continue
		}
		n := len(changes)
		changes = s.takeItem(changes, k, id, it)
		note(n, plan.Revision(it.Revision))
	}
	for id, w := range over.writes {
		listed[key(KindSubscriber, id)] = !w.remove
		n := len(changes)
		changes = s.state.overlay(changes, []staged{w}, over.commit.revision)
		note(n, over.commit.revision)
	}
	s.state.changed = over.changed
	s.setCommit(over.commit)
	s.stuck = false
	var gone []Item
	for k, id := range s.state.records() {
		if !listed[key(k, id)] {
			gone = append(gone, Item{Key: key(k, id), Revision: rev})
		}
	}
	for _, it := range gone {
		k, id, _ := parseKey(it.Key)
		changes = s.takeItem(changes, k, id, it)
	}
	for k := range s.unreadable {
		if !listed[k] {
			delete(s.unreadable, k)
		}
	}
	s.reachLocked(plan.Revision(rev))
	s.mu.Unlock()
	if missed > 0 || len(gone) > 0 && plan.Revision(rev) == seen {
		s.logger.Warn("state differed from store, repaired", "revision", rev, "missed", missed+len(gone))
	}
	s.tell(changes)
	return nil
}

// takeItem takes one record into the state. What can't be read is reported
// once and changes nothing: the last readable record stays in force, because a
// newer controller may have written what this one doesn't understand.
func (s *Store) takeItem(changes []Change, k Kind, id string, it Item) []Change {
	c := Change{Kind: k, ID: id, Revision: plan.Revision(it.Revision)}
	if k == KindSubscriber && s.state.commit.id != "" && s.unchanged(id, it) {
		return changes // an import that is rolled forward
	}
	var was *rollout.Live
	if k == KindRollout {
		was, _ = s.state.Rollout(id)
	}
	if it.Value == nil {
		delete(s.unreadable, it.Key)
		c.Deleted = true
		if !s.state.remove(k, id) {
			return changes
		}
		return append(changes, c)
	}
	if err := s.state.put(k, id, it.Value, c.Revision); err != nil {
		if s.unreadable[it.Key] != it.Revision {
			s.unreadable[it.Key] = it.Revision
			s.logger.Error("record can't be read, ignore it", "key", it.Key, "revision", it.Revision, "error", err)
		}
		return changes
	}
	delete(s.unreadable, it.Key)
	if k == KindRollout {
		is, _ := s.state.Rollout(id)
		c.Steps = stepsChanged(was, is)
	}
	return append(changes, c)
}

func (s *Store) reachLocked(rev plan.Revision) {
	s.state.index()
	if rev == s.state.revision {
		return
	}
	s.state.revision = rev
	close(s.moved)
	s.moved = make(chan struct{})
}

func (s *Store) tell(changes []Change) {
	for _, c := range changes {
		for _, fn := range s.onChange {
			fn(c)
		}
	}
}
