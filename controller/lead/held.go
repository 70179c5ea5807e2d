package lead

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/controller/store"
)

// releaseTime is how long the end of a lease may take when it is given up.
const releaseTime = 2 * time.Second

// held is a key bound to a lease that only this process renews.
type held struct {
	kv       store.Leaser
	lease    store.Lease
	ttl      time.Duration
	key      string
	revision int64     // at which the key was put
	until    time.Time // up to which the lease lives for sure
}

// hold puts a key under a new lease if its revision stands in a relation to a
// number. It returns nil if it doesn't.
func hold(ctx context.Context, kv store.Leaser, key string, value []byte, r store.Relation, revision int64, ttl time.Duration) (*held, error) {
	began := time.Now()
	lease, granted, err := kv.Grant(ctx, ttl)
	if err != nil {
		return nil, fmt.Errorf("lease for %s: %w", key, err)
	}
	h := &held{kv: kv, lease: lease, ttl: granted, key: key, until: began.Add(granted)}
	res, err := kv.TxnLeased(ctx, lease, []store.Compare{{Key: key, Relation: r, Revision: revision}}, []store.Op{{Key: key, Value: value}})
	if err != nil || !res.OK {
		// After an error the key may be there or not.
		h.release(ctx)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("take %s: %w", key, err)
	case !res.OK:
		return nil, nil
	}
	h.revision = res.Revision
	return h, nil
}

// fence returns what holds as long as the key is as it was put.
func (h *held) fence() store.Compare {
	return store.Compare{Key: h.key, Relation: store.Equal, Revision: h.revision}
}

// during calls do and renews the lease until do returns. The context of do
// ends when the key is lost.
func (h *held) during(ctx context.Context, do func(context.Context) error) error {
	working, lost := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.keep(working); err != nil {
			lost(fmt.Errorf("%w: %w", ErrLost, err))
		}
	}()
	err := do(working)
	cause := context.Cause(working)
	lost(nil)
	<-done
	h.release(ctx)
	if ctx.Err() == nil && errors.Is(cause, ErrLost) {
		return cause
	}
	return err
}

// keep renews the lease until ctx ends or the key is lost.
func (h *held) keep(ctx context.Context) error {
	wait := h.ttl / 3
	for {
		if err := sleep(ctx, wait); err != nil {
			return nil //nolint:nilerr // the work has ended, which is no loss
		}
		began := time.Now()
		err := h.renew(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			h.until, wait = began.Add(h.ttl), h.ttl/3
			continue
		case errors.Is(err, store.ErrLeaseGone):
			return err
		}
		left := time.Until(h.until)
		if left <= 0 {
			return err
		}
		wait = min(h.ttl/10, left)
	}
}

// renew renews the lease, and looks whether the key is still ours: somebody may
// have deleted it by hand.
func (h *held) renew(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, h.until)
	defer cancel()
	if err := h.kv.Renew(ctx, h.lease); err != nil {
		return err
	}
	items, _, err := h.kv.Get(ctx, h.key)
	if err != nil {
		return err
	}
	if len(items) == 0 || items[0].Revision != h.revision {
		return fmt.Errorf("%w: %s was taken away", store.ErrLeaseGone, h.key)
	}
	return nil
}

// release gives the key up, so that nobody has to wait for the lease to end.
func (h *held) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	_ = h.kv.Revoke(ctx, h.lease) // else it ends by itself
}
