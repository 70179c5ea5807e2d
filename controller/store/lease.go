package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	// ErrFenced means that a write belongs to led work and that its leader is
	// not the leader any more. Nothing was stored.
	ErrFenced = errors.New("another controller leads this work now")

	// ErrLeaseGone means that a lease has ended.
	ErrLeaseGone = errors.New("lease has ended")

	errNoLeases = errors.New("this store has no leases")
)

// Lease names keys that end with their owner: unless it is renewed within its
// time, the store deletes them. 0 is no lease.
type Lease int64

// Leaser is a KV with leases.
type Leaser interface {
	KV
	// Grant returns a new lease and how long it lives without Renew, which is
	// ttl or more.
	Grant(ctx context.Context, ttl time.Duration) (Lease, time.Duration, error)
	// Renew makes a lease live for its whole time again. ErrLeaseGone means
	// that it has ended.
	Renew(ctx context.Context, l Lease) error
	// Revoke ends a lease and deletes its keys; one that has ended is no error.
	Revoke(ctx context.Context, l Lease) error
	// TxnLeased is Txn whose puts end with a lease.
	TxnLeased(ctx context.Context, l Lease, compares []Compare, ops []Op) (TxnResult, error)
}

// Leases returns the KV that the store is on, for what is not a record:
// leadership and who is there. The error says that it has no leases.
func (s *Store) Leases() (Leaser, error) {
	if l, ok := s.kv.(auditedKV).KV.(Leaser); ok {
		return l, nil
	}
	return nil, errNoLeases
}

type fenceKey struct{}

// WithFence returns a context whose writes, by every method of Store, are done
// only while c holds, and return ErrFenced else. It is a part of the context so
// that no write of led work can forget it.
func WithFence(ctx context.Context, c Compare) context.Context {
	return context.WithValue(ctx, fenceKey{}, c)
}

// fencedKV is a KV that heeds WithFence.
type fencedKV struct{ KV }

func (f fencedKV) Txn(ctx context.Context, compares []Compare, ops []Op) (TxnResult, error) {
	fence, ok := ctx.Value(fenceKey{}).(Compare)
	if !ok {
		return f.KV.Txn(ctx, compares, ops)
	}
	res, err := f.KV.Txn(ctx, append(slices.Clip(compares), fence), ops)
	if err != nil || res.OK {
		return res, err
	}
	it := find(res.Items, fence.Key)
	if !fence.holds(it) {
		return TxnResult{}, fmt.Errorf("%w (%s)", ErrFenced, fence.Key)
	}
	res.Items = slices.DeleteFunc(res.Items, func(it Item) bool { return it.Key == fence.Key })
	return res, nil
}

// holds tells whether c holds for the item of its key, nil if there is none.
func (c Compare) holds(it *Item) bool {
	var have int64
	if it != nil {
		have = it.Revision
	}
	switch c.Relation {
	case Less:
		return have < c.Revision
	case Greater:
		return have > c.Revision
	default:
		return have == c.Revision
	}
}

func (e *etcdKV) Grant(ctx context.Context, ttl time.Duration) (Lease, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// etcd counts whole seconds.
	resp, err := e.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return 0, 0, etcdError(err)
	}
	return Lease(resp.ID), time.Duration(resp.TTL) * time.Second, nil
}

func (e *etcdKV) Renew(ctx context.Context, l Lease) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := e.client.KeepAliveOnce(ctx, clientv3.LeaseID(l))
	return leaseError(err)
}

func (e *etcdKV) Revoke(ctx context.Context, l Lease) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := e.client.Revoke(ctx, clientv3.LeaseID(l))
	if err = leaseError(err); errors.Is(err, ErrLeaseGone) {
		return nil
	}
	return err
}

func leaseError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return ErrLeaseGone
	default:
		return etcdError(err)
	}
}
