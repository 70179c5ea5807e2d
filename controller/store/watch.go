package store

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// How long Run waits before it tries again when etcd can't be reached. Only
// the controllers do, so there is no herd to spread.
const (
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Run keeps the state up to date until ctx ends, and returns nil then. It
// never gives up: while etcd can't be reached, the state stays as it was.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { s.compareLoop(ctx) })

	wait := retryFirst
	for ctx.Err() == nil {
		begin := s.Revision()
		err := s.kv.Watch(ctx, Prefix, int64(begin), s.take)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, ErrCompacted) {
			s.logger.Info("watch fell behind a compaction, list everything", "revision", begin)
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
	return nil
}

func (s *Store) compareLoop(ctx context.Context) {
	tick := time.NewTicker(s.compare)
	defer tick.Stop()
	for {
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

// take brings the state forward by what the watch has seen.
func (s *Store) take(b Batch) {
	s.taking.Lock()
	defer s.taking.Unlock()
	s.mu.Lock()
	var changes []Change
	for _, it := range b.Items {
		// A list may have been ahead of the watch.
		if plan.Revision(it.Revision) <= s.state.revision {
			continue
		}
		if k, id, ok := parseKey(it.Key); ok {
			changes = s.takeItem(changes, k, id, it)
		}
	}
	s.reachLocked(max(s.state.revision, plan.Revision(b.Revision)))
	s.mu.Unlock()
	s.tell(changes)
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
	s.mu.Lock()
	seen := s.state.revision
	var changes []Change
	missed := 0
	have := make(map[string]bool, len(items))
	for _, it := range items {
		k, id, ok := parseKey(it.Key)
		if !ok {
			continue
		}
		have[it.Key] = true
		if s.state.revisionOf(k, id) == plan.Revision(it.Revision) {
			continue
		}
		n := len(changes)
		changes = s.takeItem(changes, k, id, it)
		if len(changes) > n && plan.Revision(it.Revision) <= seen {
			missed++
		}
	}
	var gone []Item
	for k, id := range s.state.records() {
		if !have[key(k, id)] {
			gone = append(gone, Item{Key: key(k, id), Revision: rev})
		}
	}
	for _, it := range gone {
		k, id, _ := parseKey(it.Key)
		changes = s.takeItem(changes, k, id, it)
	}
	for k := range s.unreadable {
		if !have[k] {
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
	return append(changes, c)
}

func (s *Store) reachLocked(rev plan.Revision) {
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
