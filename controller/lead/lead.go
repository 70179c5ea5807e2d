package lead

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/store"
)

const (
	// DefaultTTL is how long the fleet waits for a leader that has died: as
	// short as a busy machine's pauses and a short loss of etcd allow.
	DefaultTTL = 10 * time.Second

	prefix = store.Prefix + "leader/"

	// How long to wait after a term that ended with an error.
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

// ErrLost is the cause of the end of a leader's context when its term is over.
var ErrLost = errors.New("leadership is lost")

// Config says who stands for election.
type Config struct {
	Name   string        // of this controller, for people and for Leader
	TTL    time.Duration // of a term without a sign of life; 0 = DefaultTTL
	Logger hclog.Logger  // nil: none
}

// Elections lets one controller stand for any number of works.
type Elections struct {
	kv     store.Leaser
	config Config
}

// New returns elections on kv, which stays the caller's.
func New(kv store.Leaser, c Config) *Elections {
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return &Elections{kv: kv, config: c}
}

// Run calls do whenever this controller leads the work, until ctx ends; then it
// returns nil. do works until its context ends: with ErrLost as the cause when
// the term is over, or with ctx. Its context carries the fence for all writes
// by a store.Store; fence is the same for other writes. If do returns before,
// the leadership is given up, so that another controller may have a try, and an
// error is logged.
func (e *Elections) Run(ctx context.Context, work string, do func(ctx context.Context, fence store.Compare) error) error {
	logger := e.config.Logger.With("work", work)
	wait := retryFirst
	for ctx.Err() == nil {
		led, err := e.term(ctx, work, logger, do)
		if ctx.Err() != nil {
			break
		}
		if err == nil && !led {
			continue // another one was faster
		}
		if led && (err == nil || errors.Is(err, ErrLost) || errors.Is(err, store.ErrFenced)) {
			logger.Info("work is not led by this controller any more", "error", err)
			wait = retryFirst
		} else {
			logger.Warn("led work ended, try again", "wait", wait, "error", err)
		}
		if sleep(ctx, wait) != nil {
			break
		}
		wait = min(2*wait, retryMost)
	}
	return nil
}

// term waits until nobody leads, and leads if no other is faster.
func (e *Elections) term(ctx context.Context, work string, logger hclog.Logger, do func(context.Context, store.Compare) error) (led bool, err error) {
	key := prefix + work
	if err := e.free(ctx, key); err != nil {
		return false, err
	}
	h, err := hold(ctx, e.kv, key, []byte(e.config.Name), store.Equal, 0, e.config.TTL)
	if err != nil || h == nil {
		return false, err
	}
	logger.Info("this controller leads the work")
	err = h.during(ctx, func(ctx context.Context) error {
		return do(store.WithFence(ctx, h.fence()), h.fence())
	})
	return true, err
}

// free waits until a key does not exist. It looks again every now and then, so
// that a deletion that a watch has lost costs only time.
func (e *Elections) free(ctx context.Context, key string) error {
	for {
		items, rev, err := e.kv.Get(ctx, key)
		if err != nil {
			return fmt.Errorf("who leads: %w", err)
		}
		if len(items) == 0 {
			return nil
		}
		err = watchKey(ctx, e.kv, key, rev, 3*e.config.TTL)
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, store.ErrCompacted) {
			return fmt.Errorf("wait for the leader to go: %w", err)
		}
	}
}

var errSeen = errors.New("seen")

// watchKey waits until something happens to a key, at most for a time.
func watchKey(ctx context.Context, kv store.KV, key string, after int64, most time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, most, errSeen)
	defer cancel()
	ctx, seen := context.WithCancelCause(ctx)
	defer seen(nil)
	err := kv.Watch(ctx, key, after, func(b store.Batch) {
		for _, it := range b.Items {
			if it.Key == key {
				seen(errSeen)
			}
		}
	})
	if errors.Is(context.Cause(ctx), errSeen) {
		return nil
	}
	return err
}

// Leader returns the name of the controller that leads a work; empty if none
// does.
func (e *Elections) Leader(ctx context.Context, work string) (string, error) {
	items, _, err := e.kv.Get(ctx, prefix+work)
	if err != nil {
		return "", fmt.Errorf("who leads %s: %w", work, err)
	}
	if len(items) == 0 {
		return "", nil
	}
	return string(items[0].Value), nil
}

// Leaders returns the names of the leaders by work.
func Leaders(ctx context.Context, kv store.KV) (map[string]string, error) {
	items, _, err := kv.List(ctx, prefix)
	if err != nil {
		return nil, fmt.Errorf("who leads: %w", err)
	}
	all := make(map[string]string, len(items))
	for _, it := range items {
		all[it.Key[len(prefix):]] = string(it.Value)
	}
	return all, nil
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
