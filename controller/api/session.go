package api

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	// helloTime is how long a new stream may stay without its hello.
	helloTime = 10 * time.Second

	// maxSleep is how long a session waits for a time on the clock before it looks
	// at the clock again, which somebody may have set.
	maxSleep = 10 * time.Minute

	// quarantineTime bounds the write of a quarantine.
	quarantineTime = 10 * time.Second

	// maxWord is the longest name that an agent may give of itself, bytes.
	maxWord = 128

	// maxStatus is the largest status that is kept, bytes.
	maxStatus = 8 << 10
)

// SessionService runs the sessions of agents. A session that is calm has no
// goroutine: what comes is taken in by the door's workers, and what is to be
// sent by a few of the service's own, which live while there is something.
type SessionService struct {
	store     *store.Store
	hub       *fleet.Hub
	telemetry *telemetry.Table
	config    SessionConfig
	logger    hclog.Logger
	peers     *Peers // nil: this controller is alone

	refused *news
	hashes  resolve.Hashes
	words   words
	links   links

	mu      sync.Mutex
	talks   []*talk // open ones; guarded by mu
	queue   []*talk // that have something to do, the first at head; guarded by mu
	head    int     // guarded by mu
	active  int     // workers; guarded by mu
	stopped bool    // guarded by mu
	ended   bool    // by Wait: no worker begins any more; guarded by mu
	workers sync.WaitGroup
}

// SessionConfig says how sessions are kept.
type SessionConfig struct {
	// Interval is the time between two reports of an agent, while MaxReports
	// allows it.
	Interval time.Duration
	// MaxReports is how many reports a second all agents together should send;
	// with more agents each reports less often. 0: no bound.
	MaxReports float64
	// MaxAge is how old a session gets, more or less a tenth, before its agent
	// is asked to open another one, so that the agents spread over controllers
	// that came later. 0: any age.
	MaxAge time.Duration
	// Rate returns how many connections the door admits each second now, which
	// agents are told so that they come back no faster. 0: they are told nothing,
	// as if it is nil.
	Rate func() float64
	// Probe is the host to which routers measure the delay, unless their
	// subscriber has the label plan.ProbeLabel.
	Probe plan.Probe
	// Trust is the authorities of the fleet, which routers that do not know them
	// are told of; nil: they are told nothing.
	Trust identity.Source
}

// NewSessionService returns the service.
func NewSessionService(s *store.Store, hub *fleet.Hub, t *telemetry.Table, c SessionConfig, logger hclog.Logger) *SessionService {
	return &SessionService{store: s, hub: hub, telemetry: t, config: c, logger: logger, refused: newNews()}
}

// probeOf returns what a router should measure.
func (s *SessionService) probeOf(router string) plan.Probe {
	p := s.config.Probe
	s.store.View(func(st *store.State) {
		if _, sub := st.Served(router); sub != nil {
			if host, ok := sub.Labels[plan.ProbeLabel]; ok {
				p.Host = host
			}
		}
	})
	if p.Host == "" || p.Host == plan.ProbeOff {
		return plan.Probe{}
	}
	if p.Interval == 0 {
		p.Interval = defaultProbeInterval
	}
	return p
}

// defaultProbeInterval is the time between two echoes.
const defaultProbeInterval = 10 * time.Second

// Changed tells the sessions that a change reaches. It is for Store.OnChange.
func (s *SessionService) Changed(c store.Change) {
	if c.Kind == store.KindRouter && c.Deleted {
		s.hub.Remove(c.ID)
		s.telemetry.Remove(c.ID)
		return
	}
	if c.Kind == store.KindRestore {
		s.hub.WakeAll()
		return
	}
	s.store.View(func(st *store.State) {
		for id := range st.Affected(c) {
			s.hub.Wake(id)
		}
	})
}

// WakeAll makes all sessions look for what they have to tell.
func (s *SessionService) WakeAll() { s.hub.WakeAll() }

// unconfirmed returns the authorities that a router has not confirmed; nil if
// there is nothing to tell it.
func (s *SessionService) unconfirmed(router string) *identity.Set {
	if s.config.Trust == nil {
		return nil
	}
	set := s.config.Trust.Set()
	if !set.Moved() {
		return nil
	}
	id, known := set.ID(), false
	s.store.View(func(st *store.State) { known = st.Trusts(router, id) })
	if known {
		return nil
	}
	return set
}

// quarantine refuses a router of which there are two from now on, on every
// controller. Both go on shaping as they do.
func (s *SessionService) quarantine(ctx context.Context, who identity.Peer, c *fleet.Clone) {
	ctx, cancel := context.WithTimeout(ctx, quarantineTime)
	defer cancel()
	done, err := s.store.Quarantine(ctx, who.Name, who.Key, plan.Quarantine{
		Since: time.Now().UTC().Truncate(time.Second), Devices: c.Devices[:],
	})
	switch {
	case err != nil:
		s.logger.Error("two devices have one identity, and it can't be stored", "router", who.Name, "error", err)
	case done:
		s.logger.Warn("two devices have one identity: in quarantine until an operator releases it", "router", who.Name,
			"peer", c.Devices[0].Address, "other", c.Devices[1].Address)
	}
}

// desired returns what a router should run, or why it may not know.
func (s *SessionService) desired(who identity.Peer) (d plan.Desired, err error) {
	s.store.View(func(st *store.State) {
		if err = standing(st, who); err == nil {
			d, _ = desiredOf(st, who.Name, &s.hashes)
		}
	})
	return d, err
}

// desiredOf returns what a router should run; ok is false if there is none of
// that id.
func desiredOf(st *store.State, id string, hashes *resolve.Hashes) (d plan.Desired, ok bool) {
	d, ok = resolve.Router(st, id, time.Now(), hashes)
	d.Known = st.Known()
	return d, ok
}

func peerAddress(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return ""
}

func (t *talk) toHello(m *pb.Hello) (fleet.Hello, error) {
	router := t.who.Name
	if m.GetRouterId() != router {
		return fleet.Hello{}, status.Errorf(codes.PermissionDenied, "hello of router %.64q with the certificate of router %q", m.GetRouterId(), router)
	}
	if m.GetBootId() == "" {
		return fleet.Hello{}, status.Error(codes.InvalidArgument, "hello: boot_id is missing")
	}
	for name, word := range map[string]string{
		"boot_id": m.GetBootId(), "agent_version": m.GetAgentVersion(), "model": m.GetModel(), "dataplane": m.GetDataplane(),
		"applied_hash": m.GetAppliedHash(), "effective_hash": m.GetEffectiveHash(),
	} {
		if len(word) > maxWord {
			return fleet.Hello{}, status.Errorf(codes.InvalidArgument, "hello: %s has %d bytes, at most %d are allowed", name, len(word), maxWord)
		}
	}
	effective, err := wire.ToLink(m.GetEffective())
	if err != nil {
		effective = nil // a newer agent's; it is for people only, the hash tells whether it is right
	}
	return fleet.Hello{
		BootID:        m.GetBootId(),
		AgentVersion:  t.words.one(printable(m.GetAgentVersion())),
		Model:         t.words.one(printable(m.GetModel())),
		Dataplane:     t.words.one(printable(m.GetDataplane())),
		Applied:       plan.Revision(m.GetAppliedRevision()),
		AppliedHash:   t.words.one(m.GetAppliedHash()),
		EffectiveHash: t.words.one(m.GetEffectiveHash()),
		Effective:     t.links.one(effective),
	}, nil
}

func (t *talk) readStatus(m *pb.Status) (plan.Status, error) {
	if size := proto.Size(m); size > maxStatus {
		return plan.Status{}, fmt.Errorf("status has %d bytes, at most %d are allowed", size, maxStatus)
	}
	st, err := wire.ToStatus(m)
	if err != nil {
		return plan.Status{}, err
	}
	st.AppliedHash, st.EffectiveHash = t.words.one(st.AppliedHash), t.words.one(st.EffectiveHash)
	st.Effective = t.links.one(st.Effective)
	st.Error, st.Dataplane = printable(st.Error), t.words.one(printable(st.Dataplane))
	for i, c := range st.Clamps {
		st.Clamps[i] = plan.Clamp{Field: printable(c.Field), Desired: printable(c.Desired), Effective: printable(c.Effective), Reason: printable(c.Reason)}
	}
	for i, c := range st.Conditions {
		st.Conditions[i] = plan.Condition{Type: t.words.one(printable(c.Type)), Status: c.Status, Reason: t.words.one(printable(c.Reason)), Message: t.words.one(printable(c.Message))}
	}
	return st, nil
}

// printable is a router's text without what could play tricks on an operator's
// terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
