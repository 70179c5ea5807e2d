package api

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Bounds of the keys that wait for an operator. They are in memory only, as
// strangers put them there: who still waits asks again, and is there again soon
// after a controller has started.
const (
	maxPending       = 4096
	maxPendingOrigin = 256 // of one address, which may be a provider's NAT
	pendingLife      = 15 * time.Minute
	pendingEvery     = 30 * time.Second // at which an agent asks again, and up to twice that
)

// pendingRouter is one key that waits for an operator. What it says of itself
// is not proven.
type pendingRouter struct {
	key     plan.Key
	serial  string
	model   string
	address string
	since   time.Time
	seen    time.Time
	origin  netip.Prefix
}

// pendingQueue has the keys that wait.
type pendingQueue struct {
	mu       sync.Mutex
	byKey    map[plan.Key]pendingRouter
	byOrigin map[netip.Prefix]int
	refused  uint64
}

func newPendingQueue() *pendingQueue {
	return &pendingQueue{byKey: map[plan.Key]pendingRouter{}, byOrigin: map[netip.Prefix]int{}}
}

// put notes that p asks, at p.seen. It returns false if there is no room.
func (q *pendingQueue) put(p pendingRouter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if old, known := q.byKey[p.key]; known {
		p.since = old.since
		q.dropLocked(p.key)
	} else {
		p.since = p.seen
		if len(q.byKey) >= maxPending || q.byOrigin[p.origin] >= maxPendingOrigin {
			q.sweepLocked(p.seen)
		}
		if len(q.byKey) >= maxPending || q.byOrigin[p.origin] >= maxPendingOrigin {
			q.refused++
			return false
		}
	}
	q.byKey[p.key] = p
	q.byOrigin[p.origin]++
	return true
}

// sweepLocked forgets who has not asked for long.
func (q *pendingQueue) sweepLocked(now time.Time) {
	for k, p := range q.byKey {
		if now.Sub(p.seen) > pendingLife {
			q.dropLocked(k)
		}
	}
}

func (q *pendingQueue) dropLocked(k plan.Key) {
	p, known := q.byKey[k]
	if !known {
		return
	}
	delete(q.byKey, k)
	if q.byOrigin[p.origin]--; q.byOrigin[p.origin] == 0 {
		delete(q.byOrigin, p.origin)
	}
}

// drop takes a key out.
func (q *pendingQueue) drop(k plan.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropLocked(k)
}

// list returns who waits, who has waited longest first, and how many were
// turned away.
func (q *pendingQueue) list(now time.Time) (all []pendingRouter, refused uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sweepLocked(now)
	for _, p := range q.byKey {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b pendingRouter) int {
		return cmp.Or(a.since.Compare(b.since), strings.Compare(a.key.String(), b.key.String()))
	})
	return all, q.refused
}

// find returns the keys whose fingerprint begins so.
func (q *pendingQueue) find(prefix string, now time.Time) (found []pendingRouter) {
	all, _ := q.list(now)
	for _, p := range all {
		if strings.HasPrefix(p.key.String(), prefix) {
			found = append(found, p)
		}
	}
	return found
}
