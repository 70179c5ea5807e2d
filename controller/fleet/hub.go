package fleet

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Why a session ended without its stream.
var (
	ErrReplaced = errors.New("the router opened a newer session")
	ErrRemoved  = errors.New("the router was removed")
)

// Sync sums up how what a router runs stands to what it should run.
type Sync uint8

// The states, in the order of the protocol.
const (
	None     Sync = 1 + iota // nothing is desired and nothing runs
	InSync                   // acknowledged, and read back from the data plane
	Pending                  // not answered yet
	Clamped                  // runs with other values than desired
	Rejected                 // refused; what ran before still runs
	Offline                  // not connected, so nobody knows
	Ahead                    // runs what the store does not know; nothing is sent
)

// Hello is how a router opens a session.
type Hello struct {
	BootID        string
	AgentVersion  string
	Model         string
	Dataplane     string
	Applied       plan.Revision
	AppliedHash   string
	EffectiveHash string
	Effective     *plan.Link
}

// Snapshot is what is known of one router.
type Snapshot struct {
	Connected    bool
	Since        time.Time // when Connected changed
	LastSeen     time.Time
	Peer         string
	AgentVersion string
	Model        string
	BootID       string
	Dataplane    string
	Sync         Sync
	Reported     *Reported // nil until it has said something
}

// Hub has all routers that were connected since the controller started.
type Hub struct {
	mu      sync.RWMutex
	routers map[string]*router // guarded by mu

	counters counters
}

// router is one router. Its fields are guarded by mu, which is taken after the
// hub's, never before.
type router struct {
	mu       sync.Mutex
	machine  machine
	session  *Session // nil while it is not connected
	since    time.Time
	before   time.Time // when the session before the newest one began
	begun    time.Time // when the newest one began
	lastSeen time.Time
	opens    time.Time // see Admit
	peer     string
	hello    Hello // without what machine keeps
	boots    boots
}

// Session is one router's open stream.
type Session struct {
	bootID   string
	router   *router
	listener Listener
	clone    *Clone    // nil: there is one of the router, as far as is known
	counters *counters // of the hub
}

// Listener is what a session tells its stream. Its methods are called from any
// goroutine, with locks held: they must not block and not call the hub.
type Listener interface {
	// Woken is called after Wake and after Status: Next may have something else
	// to say. Many calls may be taken as one.
	Woken()
	// Ended is called at most once, when the session ends without its stream:
	// ErrReplaced or ErrRemoved.
	Ended(why error)
}

// Counts is what was said since the hub was made.
type Counts struct {
	Pushes                     uint64 // desired states that were given to streams to send
	Applied, Clamped, Rejected uint64 // answers to them
}

// counters are those of Counts.
type counters struct{ pushes, applied, clamped, rejected atomic.Uint64 }

// answered counts the answer to a push.
func (c *counters) answered(o plan.Outcome) {
	switch o {
	case plan.OutcomeApplied:
		c.applied.Add(1)
	case plan.OutcomeClamped:
		c.clamped.Add(1)
	case plan.OutcomeRejected:
		c.rejected.Add(1)
	default: // says nothing about the push
	}
}

// NewHub returns a hub without routers.
func NewHub() *Hub { return &Hub{routers: map[string]*router{}} }

// Counts returns what was said since the hub was made.
func (h *Hub) Counts() Counts {
	return Counts{h.counters.pushes.Load(), h.counters.applied.Load(), h.counters.clamped.Load(), h.counters.rejected.Load()}
}

// Sessions returns how many routers are connected.
func (h *Hub) Sessions() (n int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, r := range h.routers {
		r.mu.Lock()
		if r.session != nil {
			n++
		}
		r.mu.Unlock()
	}
	return n
}

// Open begins a session of the router id, whose other end is at peer. A
// session that the router has already ends with ErrReplaced.
func (h *Hub) Open(id string, hello Hello, peer string, now time.Time, l Listener) *Session {
	s := &Session{bootID: hello.BootID, listener: l, counters: &h.counters}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.routers[id]
	if r == nil {
		r = &router{}
		h.routers[id] = r
	}
	s.router = r
	r.mu.Lock()
	defer r.mu.Unlock()
	s.clone = r.boots.hello(now, deviceOf(r.hello, r.peer), deviceOf(hello, peer))
	r.endLocked(ErrReplaced)
	r.machine.hello(now, hello)
	hello.Effective = nil
	r.session, r.hello, r.peer = s, hello, peer
	r.since, r.lastSeen = now, now
	r.before, r.begun = r.begun, now
	return s
}

// How often a router may open a session: a few at once, then one in a while.
const (
	openBurst = 20
	openEvery = 3 * time.Second
)

// Admit reports whether a router may open a session now, and counts it. Else
// wait says when it may.
func (h *Hub) Admit(id string, now time.Time) (wait time.Duration, ok bool) {
	r := h.router(id)
	if r == nil {
		return 0, true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// opens is when the last of those that were let in would have come if they
	// came at the rate.
	earliest := now.Add(-openBurst * openEvery)
	if r.opens.Before(earliest) {
		r.opens = earliest
	}
	next := r.opens.Add(openEvery)
	if wait := next.Sub(now); wait > 0 {
		return wait, false
	}
	r.opens = next
	return 0, true
}

// endLocked ends the session that there is, if any.
func (r *router) endLocked(err error) {
	if r.session != nil {
		r.session.listener.Ended(err)
		r.session = nil
	}
}

// Wake tells the router's session that the desired state may have changed. It
// never blocks.
func (h *Hub) Wake(id string) {
	if r := h.router(id); r != nil {
		r.mu.Lock()
		s := r.session
		r.mu.Unlock()
		if s != nil {
			s.Wake()
		}
	}
}

// WakeAll tells every session that the desired state may have changed.
func (h *Hub) WakeAll() {
	for _, id := range h.Connected() {
		h.Wake(id)
	}
}

// Connected returns the ids of the routers that are connected, in no order.
func (h *Hub) Connected() []string {
	h.mu.RLock()
	defer h.mu.RUnlock()
	ids := make([]string, 0, len(h.routers))
	for id, r := range h.routers {
		r.mu.Lock()
		if r.session != nil {
			ids = append(ids, id)
		}
		r.mu.Unlock()
	}
	return ids
}

// Newcomer is a router that is connected, and since when.
type Newcomer struct {
	Since  time.Time
	Device plan.Device
}

// Newcomers returns the routers that are connected and have been since a time
// after from.
func (h *Hub) Newcomers(from time.Time) map[string]Newcomer {
	h.mu.RLock()
	defer h.mu.RUnlock()
	all := map[string]Newcomer{}
	for id, r := range h.routers {
		r.mu.Lock()
		if r.session != nil && r.since.After(from) {
			all[id] = Newcomer{r.since, deviceOf(r.hello, r.peer)}
		}
		r.mu.Unlock()
	}
	return all
}

// Elsewhere tells that a router has opened a session with another controller,
// by this one's clock at n.Since. If that is later than what this one knows of
// the router, a session that it has here ends with ErrReplaced: its other end
// is gone, or it is another device. The result is both if they have taken turns.
func (h *Hub) Elsewhere(id string, n Newcomer, now time.Time) *Clone {
	r := h.router(id)
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !n.Since.After(r.begun) {
		return nil
	}
	clone := r.boots.hello(now, deviceOf(r.hello, r.peer), n.Device)
	if r.session != nil {
		r.endLocked(ErrReplaced)
		r.since = now
	}
	r.hello.BootID, r.hello.Model, r.peer = n.Device.BootID, n.Device.Model, n.Device.Address
	r.before, r.begun = r.begun, n.Since
	return clone
}

// Remove forgets a router; its session ends with ErrRemoved.
func (h *Hub) Remove(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.routers[id]; r != nil {
		r.mu.Lock()
		r.endLocked(ErrRemoved)
		r.mu.Unlock()
		delete(h.routers, id)
	}
}

// Sync returns whether a router is connected and how it stands to its desired
// state d.
func (h *Hub) Sync(id string, d plan.Desired) (connected bool, s Sync) {
	r := h.router(id)
	if r == nil {
		return false, Offline
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.syncLocked(d)
}

// Standing is how a router stands to its desired state.
type Standing struct {
	Connected bool
	Sync      Sync
	Since     time.Time // when Connected changed; zero if it never was
	Before    time.Time // when the session before the newest one began; zero if there is none
}

// Standing returns how a router stands to its desired state d.
func (h *Hub) Standing(id string, d plan.Desired) Standing {
	r := h.router(id)
	if r == nil {
		return Standing{Sync: Offline}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Standing{Since: r.since, Before: r.before}
	s.Connected, s.Sync = r.syncLocked(d)
	return s
}

func (r *router) syncLocked(d plan.Desired) (connected bool, s Sync) {
	if r.session == nil {
		return false, Offline
	}
	return true, r.machine.sync(d)
}

// Snapshot returns what is known of a router whose desired state is d.
func (h *Hub) Snapshot(id string, d plan.Desired) Snapshot {
	r := h.router(id)
	if r == nil {
		return Snapshot{Sync: Offline}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	reported := r.machine.reported
	connected, sync := r.syncLocked(d)
	return Snapshot{
		Connected:    connected,
		Since:        r.since,
		LastSeen:     r.lastSeen,
		Peer:         r.peer,
		AgentVersion: r.hello.AgentVersion,
		Model:        r.hello.Model,
		BootID:       r.hello.BootID,
		Dataplane:    r.hello.Dataplane,
		Sync:         sync,
		Reported:     &reported,
	}
}

func (h *Hub) router(id string) *router {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.routers[id]
}

// Wake tells the session's stream to ask Next again. It never blocks.
func (s *Session) Wake() { s.listener.Woken() }

// BootID returns the boot id of the session's hello.
func (s *Session) BootID() string { return s.bootID }

// Clone returns the two devices that have one identity, if the session's hello
// proved that there are two; else nil.
func (s *Session) Clone() *Clone { return s.clone }

// Next returns the push that is due, if ok; sending it is the caller's promise.
// Else wait says after what time to ask again if nothing wakes the session
// before; 0 is never.
func (s *Session) Next(now time.Time, d plan.Desired) (p Push, ok bool, wait time.Duration) {
	s.router.mu.Lock()
	defer s.router.mu.Unlock()
	if s.router.session != s {
		return Push{}, false, 0
	}
	if p, ok, wait = s.router.machine.next(now, d); ok {
		s.counters.pushes.Add(1)
	}
	return p, ok, wait
}

// Status takes in a router's answer to the push named nonce, or news if nonce
// is 0. It returns false if the session has ended and the status counts for
// nothing.
func (s *Session) Status(now time.Time, nonce uint64, st plan.Status) bool {
	ok := s.seen(now, func(m *machine) {
		m.status(now, nonce, st)
		if st.Dataplane != "" { // its interface came after the hello
			s.router.hello.Dataplane = st.Dataplane
		}
	})
	if !ok {
		return false
	}
	if nonce != 0 {
		s.counters.answered(st.Outcome)
	}
	s.Wake()
	return true
}

// Seen notes that something was received. It returns false if the session has
// ended.
func (s *Session) Seen(now time.Time) bool { return s.seen(now, func(*machine) {}) }

func (s *Session) seen(now time.Time, then func(*machine)) bool {
	s.router.mu.Lock()
	defer s.router.mu.Unlock()
	if s.router.session != s {
		return false
	}
	s.router.lastSeen = now
	then(&s.router.machine)
	return true
}

// Close ends the session with its stream. It changes nothing if the router has
// a newer one.
func (s *Session) Close(now time.Time) {
	s.router.mu.Lock()
	defer s.router.mu.Unlock()
	if s.router.session == s {
		s.router.session = nil
		s.router.since = now
	}
}

// Model returns the hardware model that a router named last; empty if it was
// never connected.
func (h *Hub) Model(id string) string {
	r := h.router(id)
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hello.Model
}
