package storetest

import (
	"errors"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/store"
)

// Leases is what every KV with leases must do.
func Leases(t *testing.T, kv store.Leaser) {
	t.Helper()
	ctx := t.Context()
	grant := func(ttl time.Duration) store.Lease {
		t.Helper()
		l, granted, err := kv.Grant(ctx, ttl)
		if err != nil || granted < ttl {
			t.Fatalf("asked for %v, got %v and error %v", ttl, granted, err)
		}
		return l
	}
	put := func(l store.Lease, key string) {
		t.Helper()
		res, err := kv.TxnLeased(ctx, l, []store.Compare{{Key: key, Relation: store.Equal, Revision: 0}}, []store.Op{{Key: key, Value: []byte("x")}})
		if err != nil || !res.OK {
			t.Fatalf("put %s: done: %t, error %v", key, res.OK, err)
		}
	}
	exists := func(key string) bool {
		t.Helper()
		items, _, err := kv.Get(ctx, key)
		ok(t, err)
		return len(items) == 1
	}
	const a, b, c, d = store.Prefix + "lease/a", store.Prefix + "lease/b", store.Prefix + "lease/c", store.Prefix + "lease/d"
	long, other := grant(time.Hour), grant(time.Hour)
	put(long, a)
	put(long, b)
	put(other, c)
	ok(t, kv.Renew(ctx, long))
	// A key that is put without its lease has left it.
	if _, err := kv.Txn(ctx, nil, []store.Op{{Key: b, Value: []byte("y")}}); err != nil {
		t.Fatal(err)
	}
	ok(t, kv.Revoke(ctx, long))
	if exists(a) || !exists(b) || !exists(c) {
		t.Errorf("after the end of a lease: a %t, b %t, c %t", exists(a), exists(b), exists(c))
	}
	is(t, kv.Renew(ctx, long), store.ErrLeaseGone)
	ok(t, kv.Revoke(ctx, long))
	if _, err := kv.TxnLeased(ctx, long, nil, []store.Op{{Key: a, Value: []byte("x")}}); !errors.Is(err, store.ErrLeaseGone) {
		t.Errorf("put with a lease that has ended: %v", err)
	}
	// One that nobody renews ends by itself.
	put(grant(3*time.Second), d)
	for end := time.Now().Add(time.Minute); exists(d); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a lease of 3 s lives after a minute without a renewal")
		}
	}
}
