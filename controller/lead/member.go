package lead

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/store"
)

const members = store.Prefix + "controllers/"

// Member is one controller of the fleet.
type Member struct {
	ID      string    `json:"-"`
	Address string    `json:"address"` // host:port at which agents and other controllers reach it
	Version string    `json:"version,omitempty"`
	Started time.Time `json:"started"`
}

// NewID returns an id for a controller that starts: the name of the machine, so
// that people know it, and a random part.
func NewID() string {
	host, err := os.Hostname()
	if err != nil {
		host = "controller"
	}
	var b [3]byte
	_, _ = rand.Read(b[:]) // never fails
	return host + "-" + hex.EncodeToString(b[:])
}

// Members is the controllers that live, as this one sees them.
type Members struct {
	kv     store.Leaser
	self   Member
	ttl    time.Duration
	logger hclog.Logger

	mu  sync.Mutex
	all map[string]Member // guarded by mu; by id
}

// NewMembers returns the members of the fleet, of which self becomes one while
// Run runs. ttl is how long a member that has died is still one; 0 = DefaultTTL.
func NewMembers(kv store.Leaser, self Member, ttl time.Duration, logger hclog.Logger) *Members {
	if ttl == 0 {
		ttl = DefaultTTL
	}
	if logger == nil {
		logger = hclog.NewNullLogger()
	}
	return &Members{kv: kv, self: self, ttl: ttl, logger: logger, all: map[string]Member{}}
}

// Self returns the member that this controller is.
func (m *Members) Self() Member { return m.self }

// All returns the members in order of id, this one among them as soon as it is
// known. While the store can't be reached it is what was known last.
func (m *Members) All() []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(m.all), func(a, b Member) int { return strings.Compare(a.ID, b.ID) })
}

// Others returns the members without this one.
func (m *Members) Others() []Member {
	return slices.DeleteFunc(m.All(), func(o Member) bool { return o.ID == m.self.ID })
}

// Run keeps the record of this controller and the list of all, until ctx ends;
// then it returns nil.
func (m *Members) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.again(ctx, "list the controllers", m.follow) })
	m.again(ctx, "register the controller", m.register)
	return nil
}

// again calls fn until ctx ends.
func (m *Members) again(ctx context.Context, what string, fn func(context.Context) error) {
	wait := retryFirst
	for ctx.Err() == nil {
		began := time.Now()
		err := fn(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > retryMost {
			wait = retryFirst
		}
		m.logger.Debug(what, "wait", wait, "error", err)
		_ = sleep(ctx, wait) // the loop looks
		wait = min(2*wait, retryMost)
	}
}

// register keeps the record until it is lost.
func (m *Members) register(ctx context.Context) error {
	value, err := json.Marshal(m.self)
	if err != nil {
		return err
	}
	// Whatever is there is of this process: the id is made anew by each.
	h, err := hold(ctx, m.kv, members+m.self.ID, value, store.Greater, -1, m.ttl)
	if err != nil {
		return err
	}
	return h.during(ctx, func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	})
}

// follow keeps the list until the watch ends.
func (m *Members) follow(ctx context.Context) error {
	items, rev, err := m.kv.List(ctx, members)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.all = map[string]Member{}
	for _, it := range items {
		m.takeLocked(it)
	}
	m.mu.Unlock()
	// Listing anew now and then mends what a watch may have lost.
	ctx, cancel := context.WithTimeoutCause(ctx, 6*m.ttl, errSeen)
	defer cancel()
	err = m.kv.Watch(ctx, members, rev, func(b store.Batch) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, it := range b.Items {
			m.takeLocked(it)
		}
	})
	if errors.Is(err, errSeen) {
		return nil
	}
	return err
}

func (m *Members) takeLocked(it store.Item) {
	id := strings.TrimPrefix(it.Key, members)
	if it.Value == nil {
		delete(m.all, id)
		return
	}
	o := Member{ID: id}
	if err := json.Unmarshal(it.Value, &o); err != nil {
		m.logger.Warn("record of a controller can't be read", "key", it.Key, "error", fmt.Errorf("controller %s: %w", id, err))
		return
	}
	m.all[id] = o
}
