// Package storetest has what tests of the store and on the store need: a KV in
// memory that fails on demand, NewFake, and the suite that every KV passes.
package storetest

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/cakefleet/cakefleet/controller/store"
)

// KV is a store.KV in memory. It keeps every change, so that a watch can start
// anywhere that is not compacted.
type KV struct {
	mu        sync.Mutex
	items     map[string]store.Item // guarded by mu
	log       []store.Item          // guarded by mu; in order of revision
	revision  int64                 // guarded by mu
	compacted int64                 // guarded by mu; a watch can't start below
	down      error                 // guarded by mu; nil: reachable
	lost      func(store.Item) bool // guarded by mu; what watches don't see
	txns      int                   // guarded by mu
	changed   chan struct{}         // guarded by mu; closed and replaced with every change of the above
}

// NewKV returns an empty KV.
func NewKV() *KV {
	return &KV{items: map[string]store.Item{}, revision: 1, changed: make(chan struct{})}
}

// List is as in store.KV.
func (k *KV) List(_ context.Context, prefix string) ([]store.Item, int64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return nil, 0, k.down
	}
	var items []store.Item
	for key, it := range k.items {
		if strings.HasPrefix(key, prefix) {
			items = append(items, it)
		}
	}
	slices.SortFunc(items, func(a, b store.Item) int { return strings.Compare(a.Key, b.Key) })
	return items, k.revision, nil
}

// Get is as in store.KV.
func (k *KV) Get(_ context.Context, keys ...string) ([]store.Item, int64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return nil, 0, k.down
	}
	return k.getLocked(keys), k.revision, nil
}

func (k *KV) getLocked(keys []string) (items []store.Item) {
	for _, key := range keys {
		if it, ok := k.items[key]; ok {
			items = append(items, it)
		}
	}
	return items
}

// Txn is as in store.KV.
func (k *KV) Txn(_ context.Context, compares []store.Compare, ops []store.Op) (store.TxnResult, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return store.TxnResult{}, k.down
	}
	k.txns++
	keys := make([]string, len(compares))
	ok := true
	for i, c := range compares {
		keys[i] = c.Key
		have := k.items[c.Key].Revision
		switch c.Relation {
		case store.Equal:
			ok = ok && have == c.Revision
		case store.Less:
			ok = ok && have < c.Revision
		case store.Greater:
			ok = ok && have > c.Revision
		}
	}
	if !ok {
		return store.TxnResult{Revision: k.revision, Items: k.getLocked(keys)}, nil
	}
	next := k.revision + 1
	for _, o := range ops {
		_, exists := k.items[o.Key]
		if o.Value == nil && !exists {
			continue
		}
		it := store.Item{Key: o.Key, Value: bytes.Clone(o.Value), Revision: next}
		if o.Value == nil {
			delete(k.items, o.Key)
		} else {
			k.items[o.Key] = it
		}
		k.log = append(k.log, it)
		k.revision = next
	}
	k.wakeLocked()
	return store.TxnResult{OK: true, Revision: k.revision}, nil
}

// Watch is as in store.KV.
func (k *KV) Watch(ctx context.Context, prefix string, after int64, seen func(store.Batch)) error {
	for {
		k.mu.Lock()
		if k.down != nil {
			defer k.mu.Unlock()
			return k.down
		}
		if after+1 < k.compacted {
			defer k.mu.Unlock()
			return store.ErrCompacted
		}
		b := store.Batch{Revision: k.revision}
		for _, it := range k.log {
			if it.Revision > after && strings.HasPrefix(it.Key, prefix) && (k.lost == nil || !k.lost(it)) {
				b.Items = append(b.Items, it)
			}
		}
		changed := k.changed
		k.mu.Unlock()
		if b.Revision > after {
			seen(b)
			after = b.Revision
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Progress is as in store.KV. Watch always tells the newest revision.
func (k *KV) Progress(context.Context) error { return nil }

// Close is as in store.KV.
func (k *KV) Close() error { return nil }

// SetDown makes everything fail with err, and the running watches end; nil
// makes it work again.
func (k *KV) SetDown(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.down = err
	k.wakeLocked()
}

// Lose makes watches not see the items for which fn is true.
func (k *KV) Lose(fn func(store.Item) bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lost = fn
}

// Compact forgets everything that happened so far.
func (k *KV) Compact() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.compacted = k.revision + 1
	k.log = nil
}

// Txns returns how many transactions were asked for.
func (k *KV) Txns() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.txns
}

func (k *KV) wakeLocked() {
	close(k.changed)
	k.changed = make(chan struct{})
}
