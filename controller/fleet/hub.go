package fleet

import (
	"errors"
	"sync"
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
}

// router is one router. Its fields are guarded by mu, which is taken after the
// hub's, never before.
type router struct {
	mu       sync.Mutex
	machine  machine
	session  *Session // nil while it is not connected
	since    time.Time
	lastSeen time.Time
	peer     string
	hello    Hello // without what machine keeps
}

// Session is one router's open stream.
type Session struct {
	bootID string
	router *router
	wake   chan struct{} // capacity 1: one wake-up stands for any number of changes
	done   chan struct{} // closed when it ended without its stream
	err    error         // why; written before done is closed
}

// NewHub returns a hub without routers.
func NewHub() *Hub { return &Hub{routers: map[string]*router{}} }

// Open begins a session of the router id, whose other end is at peer. A
// session that the router has already ends with ErrReplaced.
func (h *Hub) Open(id string, hello Hello, peer string, now time.Time) *Session {
	s := &Session{bootID: hello.BootID, wake: make(chan struct{}, 1), done: make(chan struct{})}
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
	r.endLocked(ErrReplaced)
	r.machine.hello(now, hello)
	hello.Effective = nil
	r.session, r.hello, r.peer = s, hello, peer
	r.since, r.lastSeen = now, now
	return s
}

// endLocked ends the session that there is, if any.
func (r *router) endLocked(err error) {
	if r.session != nil {
		r.session.err = err
		close(r.session.done)
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

// Wake makes Woken fire. It never blocks.
func (s *Session) Wake() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Woken fires after Wake and after Status: Next may have something else to say.
func (s *Session) Woken() <-chan struct{} { return s.wake }

// Done is closed when the session ended without its stream.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err says why Done is closed: ErrReplaced or ErrRemoved.
func (s *Session) Err() error { return s.err }

// BootID returns the boot id of the session's hello.
func (s *Session) BootID() string { return s.bootID }

// Next returns the push that is due, if ok; sending it is the caller's promise.
// Else wait says after what time to ask again if nothing wakes the session
// before; 0 is never.
func (s *Session) Next(now time.Time, d plan.Desired) (p Push, ok bool, wait time.Duration) {
	s.router.mu.Lock()
	defer s.router.mu.Unlock()
	if s.router.session != s {
		return Push{}, false, 0
	}
	return s.router.machine.next(now, d)
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
