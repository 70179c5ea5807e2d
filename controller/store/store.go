package store

import (
	"context"
	"crypto/tls"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Config says where the store is and how it is kept.
type Config struct {
	DataDir   string      // of the embedded etcd; not looked at if there are endpoints
	Endpoints []string    // of an etcd cluster; empty: the embedded etcd
	TLS       *tls.Config // to the endpoints; nil: none

	Quota        int64         // bytes that the embedded etcd may hold; 0 = 2 GiB
	Retention    time.Duration // how long the embedded etcd keeps old revisions; 0 = 1 hour
	AuditAge     time.Duration // how long the audit log goes back; 0 = 1 year
	AuditEntries int           // that the audit log has at most; 0 = 100 000

	CompareInterval time.Duration // between full compares; 0 = 10 minutes
	Logger          hclog.Logger  // nil: none

	// Between, for tests, puts something between the store and etcd that has
	// faults; nil: nothing.
	Between func(Leaser) Leaser
}

// Store keeps the records in a KV and their State in memory.
type Store struct {
	kv      KV
	server  *etcdKV // what kv is on; nil if it is not on etcd
	logger  hclog.Logger
	compare time.Duration

	auditAge     time.Duration
	auditEntries int

	onChange []func(Change) // not changed once Run has begun

	// taking makes those who change the state one: the watch and the compare.
	taking     sync.Mutex
	unreadable map[string]int64               // guarded by taking: keys that can't be decoded, and their revision
	staged     map[string]map[string][]staged // guarded by taking: pieces of imports that don't count yet, by import and part

	stuck bool // guarded by taking: nothing but a list can go on

	own     atomic.Value  // string: the newest import of this store
	rolling chan struct{} // capacity 1: there is an import to roll forward

	mu     sync.RWMutex
	state  *State        // guarded by mu
	moved  chan struct{} // guarded by mu; closed and replaced when state.revision moves
	closed chan struct{}
	close  sync.Once
}

// New returns a store on kv that has read all records. It owns kv from then
// on, also after an error.
func New(ctx context.Context, kv KV, c Config) (*Store, error) {
	s := &Store{
		kv:         auditedKV{fencedKV{kv}, c.Logger, &late{}},
		logger:     c.Logger,
		compare:    c.CompareInterval,
		unreadable: map[string]int64{},
		staged:     map[string]map[string][]staged{},
		rolling:    make(chan struct{}, 1),
		state:      newState(),
		moved:      make(chan struct{}),
		closed:     make(chan struct{}),
	}
	if s.logger == nil {
		s.logger = hclog.NewNullLogger()
		s.kv = auditedKV{fencedKV{kv}, s.logger, &late{}}
	}
	if s.auditAge = c.AuditAge; s.auditAge == 0 {
		s.auditAge = defaultAuditAge
	}
	if s.auditEntries = c.AuditEntries; s.auditEntries == 0 {
		s.auditEntries = defaultAuditEntries
	}
	if s.compare == 0 {
		s.compare = 10 * time.Minute
	}
	if err := s.list(ctx); err != nil {
		_ = kv.Close() // the first error says more
		return nil, fmt.Errorf("read store: %w", err)
	}
	return s, nil
}

// OnChange registers a function that is called with every change after those
// that New has read, when the state has it. All calls of OnChange come before
// Run. fn must not block for long and must not write.
func (s *Store) OnChange(fn func(Change)) { s.onChange = append(s.onChange, fn) }

// View calls fn with the state as it is between two changes. fn must not call
// other methods of the store, and not block: changes wait for it.
func (s *Store) View(fn func(*State)) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	fn(s.state)
}

// Revision returns the revision up to which the state is complete.
func (s *Store) Revision() plan.Revision {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.state.revision
}

// Close ends the store and releases the KV. It comes after Run has returned.
func (s *Store) Close() error {
	var err error
	s.close.Do(func() {
		close(s.closed)
		err = s.kv.Close()
	})
	return err
}

// How long await waits for an event before it asks how far the watch is. All
// events come by themselves; what doesn't are revisions of keys outside Prefix.
const (
	askFirst = 50 * time.Millisecond
	askAgain = time.Second
)

// await returns when the state is complete up to a revision.
func (s *Store) await(ctx context.Context, rev plan.Revision) error {
	ask := time.NewTimer(askFirst)
	defer ask.Stop()
	for {
		s.mu.RLock()
		have, moved := s.state.revision, s.moved
		s.mu.RUnlock()
		if have >= rev {
			return nil
		}
		select {
		case <-moved:
		case <-ask.C:
			if err := s.kv.Progress(ctx); err != nil {
				s.logger.Debug("ask for progress", "error", err)
			}
			ask.Reset(askAgain)
		case <-ctx.Done():
			return fmt.Errorf("wait for revision %d: %w", rev, context.Cause(ctx))
		case <-s.closed:
			return ErrClosed
		}
	}
}
