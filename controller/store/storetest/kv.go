// Package storetest has what tests of the store and on the store need: a KV in
// memory that fails on demand, NewFake, and the suite that every KV passes.
package storetest

import (
	"bytes"
	"cmp"
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
	items     map[string]store.Item  // guarded by mu
	log       []store.Item           // guarded by mu; in order of revision
	revision  int64                  // guarded by mu
	compacted int64                  // guarded by mu; a watch can't start below
	down      error                  // guarded by mu; nil: reachable
	lost      func(store.Item) bool  // guarded by mu; what watches don't see
	txns      int                    // guarded by mu
	leases    map[store.Lease]*lease // guarded by mu
	lastLease store.Lease            // guarded by mu
	changed   chan struct{}          // guarded by mu; closed and replaced with every change of the above
}

// NewKV returns an empty KV.
func NewKV() *KV {
	return &KV{items: map[string]store.Item{}, revision: 1, leases: map[store.Lease]*lease{}, changed: make(chan struct{})}
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

// Range is as in store.KV.
func (k *KV) Range(_ context.Context, q store.Range) (items []store.Item, count int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return nil, 0, k.down
	}
	for key, it := range k.items {
		if key < q.From || key >= q.End {
			continue
		}
		items = append(items, it)
	}
	slices.SortFunc(items, func(a, b store.Item) int { return strings.Compare(a.Key, b.Key) })
	return items[:min(len(items), q.Limit)], len(items), nil
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
func (k *KV) Txn(ctx context.Context, compares []store.Compare, ops []store.Op) (store.TxnResult, error) {
	return k.TxnLeased(ctx, 0, compares, ops)
}

// TxnLeased is as in store.Leaser.
func (k *KV) TxnLeased(_ context.Context, l store.Lease, compares []store.Compare, ops []store.Op) (store.TxnResult, error) {
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
	held := k.leases[l]
	if l != 0 && held == nil {
		return store.TxnResult{}, store.ErrLeaseGone
	}
	k.doLocked(held, ops)
	return store.TxnResult{OK: true, Revision: k.revision}, nil
}

// doLocked does operations, and binds what they put to a lease if there is one.
func (k *KV) doLocked(held *lease, ops []store.Op) {
	next := k.revision + 1
	for _, o := range ops {
		_, exists := k.items[o.Key]
		if o.Value == nil && !exists {
			continue
		}
		for _, l := range k.leases {
			delete(l.keys, o.Key)
		}
		it := store.Item{Key: o.Key, Value: bytes.Clone(o.Value), Revision: next}
		if o.Value == nil {
			delete(k.items, o.Key)
		} else {
			k.items[o.Key] = it
			if held != nil {
				held.keys[o.Key] = true
			}
		}
		k.log = append(k.log, it)
		k.revision = next
	}
	k.wakeLocked()
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
		from, _ := slices.BinarySearchFunc(k.log, after+1, func(it store.Item, rev int64) int { return cmp.Compare(it.Revision, rev) })
		for _, it := range k.log[from:] {
			if strings.HasPrefix(it.Key, prefix) && (k.lost == nil || !k.lost(it)) {
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
