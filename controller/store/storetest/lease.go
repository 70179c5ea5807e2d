package storetest

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/controller/store"
)

// lease is one lease of a KV. Its fields are guarded by the KV's mu.
type lease struct {
	ttl   time.Duration
	keys  map[string]bool
	timer *time.Timer
}

// Grant is as in store.Leaser.
func (k *KV) Grant(_ context.Context, ttl time.Duration) (store.Lease, time.Duration, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return 0, 0, k.down
	}
	k.lastLease++
	id := k.lastLease
	k.leases[id] = &lease{ttl: ttl, keys: map[string]bool{}, timer: time.AfterFunc(ttl, func() { k.end(id) })}
	return id, ttl, nil
}

// Renew is as in store.Leaser.
func (k *KV) Renew(_ context.Context, id store.Lease) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.down != nil {
		return k.down
	}
	l := k.leases[id]
	if l == nil || !l.timer.Stop() {
		return store.ErrLeaseGone // also if it is about to be
	}
	l.timer.Reset(l.ttl)
	return nil
}

// Revoke is as in store.Leaser.
func (k *KV) Revoke(_ context.Context, id store.Lease) error {
	k.mu.Lock()
	down := k.down
	k.mu.Unlock()
	if down != nil {
		return down
	}
	k.end(id)
	return nil
}

// EndLeases ends all leases as if their time was over, so that a test has a
// leader that doesn't know yet.
func (k *KV) EndLeases() {
	k.mu.Lock()
	all := slices.Collect(maps.Keys(k.leases))
	k.mu.Unlock()
	for _, id := range all {
		k.end(id)
	}
}

func (k *KV) end(id store.Lease) {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.leases[id]
	if l == nil {
		return
	}
	l.timer.Stop()
	delete(k.leases, id)
	var ops []store.Op
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		ops = append(ops, store.Op{Key: key})
	}
	k.doLocked(nil, ops)
}
