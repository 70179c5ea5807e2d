// Package simagent plays the agents of very many routers in one process: the
// real session over real mTLS, with the protocol's own rules, and no packets.
// It is for benchmarks of the controller, for fleets in tests and for sizing.
//
// One Agent is one router. Run keeps its session as the real agent does: it
// dials, says hello with what runs, answers every push, reports when the
// controller says so, and comes back after an end with the same back-off. What
// it runs is kept over sessions, not over the process; the links are shared
// by all agents that run the same.
//
// Faults are played by Hooks, which all agents of a Fleet share: an answer that
// is not given is a lost one, a hook that blocks is a router that stalls, Break
// cuts the connection, two agents with one RouterID are a clone.
//
// An agent costs one goroutine, its TLS connection and about 1 kB.
package simagent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/internal/backoff"
	"github.com/cakefleet/cakefleet/internal/grpcwire"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	connectMethod = "/cakefleet.v1.SessionService/Connect"
	serverName    = "cakefleet-controller"

	// connectTime is for the connection, its handshake and the first answer.
	connectTime = 2 * time.Minute
)

// Push is a desired state as it came.
type Push struct {
	Nonce         uint64
	Desired       plan.Desired
	ConfirmWithin time.Duration
	Err           error // why it can't be read
}

// Hooks are called on the agent's own goroutine, or on a timer's for Report.
// Nil ones do what a good router does.
type Hooks struct {
	// Apply returns the answer to a push. If ok is false none is sent. Where
	// Outcome is applied or clamped, the agent runs the state from then on.
	Apply func(a *Agent, p Push) (s plan.Status, ok bool)
	// Answered is called when an answer was sent.
	Answered func(a *Agent)
	// Report returns the next report; nil: none. The agent fills in Sequence,
	// BootID and Uptime.
	Report func(a *Agent) *plan.Report
	// Began is called when the controller has accepted the hello.
	Began func(a *Agent)
	// Ended is called with why a session ended and how long the agent waits.
	Ended func(a *Agent, err error, wait time.Duration)
}

// Fleet is what its agents share.
type Fleet struct {
	// Address returns where the agent's next session goes, and from where; the
	// source may be nil.
	Address func(a *Agent) (controller string, source net.Addr)
	// TLS is for all agents; their certificates are added. ServerName is set.
	TLS   *tls.Config
	Hooks Hooks
	// Version and Model are what agents say of themselves.
	Version, Model string
	// ReportEvery is the time between reports; 0: as the controller says;
	// negative: never.
	ReportEvery time.Duration

	links sync.Map // *pb.Link by hash, as most agents run the same
}

// Agent is one simulated router.
type Agent struct {
	RouterID string
	BootID   string
	// Certificate proves RouterID.
	Certificate tls.Certificate

	fleet  *Fleet
	config *tls.Config // with the session ticket, which makes the next handshake cheap
	began  time.Time

	mu       sync.Mutex
	client   *grpcwire.Client // of the session; nil: none; guarded by mu
	conn     net.Conn         // guarded by mu
	stream   uint32           // guarded by mu
	runs     running          // guarded by mu
	sequence uint64           // of the newest report; guarded by mu
	expiry   *time.Timer      // nil: nothing expires; guarded by mu
	spread   atomic.Int64     // ns, as the controller said
	blocked  atomic.Uint64    // messages that were dropped as the controller didn't read
}

// running is what an agent runs.
type running struct {
	revision      plan.Revision
	hash          string
	effectiveHash string
	link          *pb.Link // shared; not to be changed
}

// New returns an agent of the fleet that is not connected yet.
func (f *Fleet) New(routerID, bootID string, cert tls.Certificate) *Agent {
	return &Agent{RouterID: routerID, BootID: bootID, Certificate: cert, fleet: f}
}

// Run keeps a session until ctx ends.
func (a *Agent) Run(ctx context.Context) {
	b := backoff.Backoff{Random: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
	a.began = time.Now()
	wait := b.Next()
	for {
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		opened, err := a.session(ctx)
		if ctx.Err() != nil {
			return
		}
		lived := time.Duration(0)
		if !opened.IsZero() {
			lived = time.Since(opened)
		}
		b.Spread = time.Duration(a.spread.Load())
		wait = b.After(lived, err)
		if errors.Is(err, errMove) {
			wait = 0
		}
		if a.fleet.Hooks.Ended != nil {
			a.fleet.Hooks.Ended(a, err, wait)
		}
	}
}

// Runs returns what the agent runs.
func (a *Agent) Runs() (rev plan.Revision, hash, effectiveHash string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runs.revision, a.runs.hash, a.runs.effectiveHash
}

// Connected reports whether the agent has a session.
func (a *Agent) Connected() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.client != nil
}

// Blocked returns how many messages were dropped because the controller did
// not read.
func (a *Agent) Blocked() uint64 { return a.blocked.Load() }

// Break cuts the connection, if there is one, as a network does that goes.
func (a *Agent) Break() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conn != nil {
		_ = a.conn.Close() // what counts is that it is gone
	}
}

// Say sends a status, as an answer to the push named nonce or as news with 0.
func (a *Agent) Say(nonce uint64, s plan.Status) error {
	return a.sendStatus(wire.FromStatus(s, nonce))
}

// session has one session from beginning to end; opened is when it was
// accepted.
func (a *Agent) session(ctx context.Context) (opened time.Time, err error) {
	address, source := a.fleet.Address(a)
	dialer := net.Dialer{LocalAddr: source, Timeout: connectTime, KeepAlive: -1}
	if source != nil {
		dialer.Control = portAtConnect
	}
	raw, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return opened, err
	}
	defer context.AfterFunc(ctx, func() { _ = raw.Close() })() // ends a read that blocks
	defer func() { _ = raw.Close() }()
	if err := raw.SetDeadline(time.Now().Add(connectTime)); err != nil {
		return opened, err
	}
	if a.config == nil {
		a.config = a.fleet.TLS.Clone()
		a.config.ServerName = serverName
		a.config.NextProtos = []string{"h2"}
		a.config.Certificates = []tls.Certificate{a.Certificate}
		a.config.ClientSessionCache = &ticket{}
	}
	conn := tls.Client(raw, a.config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return opened, err
	}
	client, err := grpcwire.NewClient(conn, "https", address)
	if err != nil {
		return opened, err
	}
	// A server that is full says so before anything else.
	stream, err := client.Open(connectMethod)
	if err != nil {
		return opened, err
	}
	a.mu.Lock()
	a.client, a.conn, a.stream = client, conn, stream
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.client, a.conn = nil, nil
	}()
	if err := a.hello(); err != nil {
		return opened, err
	}
	return a.receive(client, raw)
}

// portAtConnect leaves the choice of a port to connect, which may take one that
// has a connection elsewhere. For bind a port is in use or not, and it searches
// long when most of them are.
func portAtConnect(_, _ string, c syscall.RawConn) error {
	const bindAddressNoPort = 24 // IP_BIND_ADDRESS_NO_PORT
	return c.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, bindAddressNoPort, 1) // without it bind chooses
	})
}

func (a *Agent) hello() error {
	a.mu.Lock()
	r := a.runs
	a.mu.Unlock()
	return a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{
		RouterId:        a.RouterID,
		BootId:          a.BootID,
		AgentVersion:    a.fleet.Version,
		Model:           a.fleet.Model,
		AppliedRevision: int64(r.revision),
		AppliedHash:     r.hash,
		EffectiveHash:   r.effectiveHash,
		Effective:       r.link,
		Clock:           timestamppb.Now(),
		Dataplane:       "userspace",
	}}})
}

func (a *Agent) receive(client *grpcwire.Client, raw net.Conn) (opened time.Time, err error) {
	var report *time.Timer
	defer func() {
		if report != nil {
			report.Stop()
		}
	}()
	for {
		e, err := client.Recv()
		if err != nil {
			return opened, err
		}
		if e.End != nil {
			return opened, e.End
		}
		m := &pb.ConnectResponse{}
		if err := proto.Unmarshal(e.Message, m); err != nil {
			return opened, fmt.Errorf("the controller's message: %w", err)
		}
		if opened.IsZero() {
			opened = time.Now()
			if err := raw.SetDeadline(time.Time{}); err != nil {
				return opened, err
			}
			if a.fleet.Hooks.Began != nil {
				a.fleet.Hooks.Began(a)
			}
		}
		switch m := m.GetMessage().(type) {
		case *pb.ConnectResponse_Move:
			return opened, errMove
		case *pb.ConnectResponse_Settings:
			a.spread.Store(int64(m.Settings.GetReconnectSpread().AsDuration()))
			if report != nil {
				report.Stop()
			}
			report = a.reports(client, m.Settings.GetReportInterval().AsDuration())
		case *pb.ConnectResponse_Desired:
			if err := a.apply(m.Desired); err != nil {
				return opened, err
			}
			if a.fleet.Hooks.Answered != nil {
				a.fleet.Hooks.Answered(a)
			}
		}
	}
}

// apply answers a push.
func (a *Agent) apply(d *pb.Desired) error {
	if a.fleet.Hooks.Apply == nil {
		return a.applied(d)
	}
	p := Push{Nonce: d.GetNonce(), ConfirmWithin: d.GetConfirmWithin().AsDuration()}
	p.Desired, p.Err = wire.ToDesired(d)
	if p.Err == nil && d.GetExpiresAfter() != nil {
		p.Desired.ExpiresAfter = d.GetExpiresAfter().AsDuration()
		p.Desired.Then, p.Err = wire.ToLink(d.GetThen())
	}
	s, ok := a.fleet.Hooks.Apply(a, p)
	if s.Outcome == plan.OutcomeApplied || s.Outcome == plan.OutcomeClamped {
		a.run(running{s.Applied, s.AppliedHash, s.EffectiveHash, a.fleet.share(s.EffectiveHash, wire.FromLink(s.Effective))}, d)
	}
	if !ok {
		return nil
	}
	return a.Say(p.Nonce, s)
}

// Applied is the answer of a router that runs the push as it is.
func (p Push) Applied() plan.Status {
	if p.Err != nil {
		return plan.Status{Outcome: plan.OutcomeRejected, Error: p.Err.Error()}
	}
	s := plan.Status{Outcome: plan.OutcomeApplied, Applied: p.Desired.Revision, AppliedHash: p.Desired.Hash, Effective: p.Desired.Link}
	if s.Effective != nil {
		s.EffectiveHash = s.Effective.Hash()
	}
	return s
}

// applied is apply without hooks, which needs no native types.
func (a *Agent) applied(d *pb.Desired) error {
	effectiveHash := d.GetHash()
	if d.GetExpiresAfter() != nil { // the hash is not the link's alone
		link, err := wire.ToLink(d.GetLink())
		if err != nil {
			return err
		}
		effectiveHash = link.Hash()
	}
	r := running{plan.Revision(d.GetRevision()), d.GetHash(), effectiveHash, a.fleet.share(effectiveHash, d.GetLink())}
	a.run(r, d)
	return a.sendStatus(r.status(d.GetNonce(), pb.Outcome_OUTCOME_APPLIED))
}

func (r running) status(nonce uint64, o pb.Outcome) *pb.Status {
	return &pb.Status{
		Nonce: nonce, Outcome: o, AppliedRevision: int64(r.revision),
		AppliedHash: r.hash, EffectiveHash: r.effectiveHash, Effective: r.link,
	}
}

// run takes note of what runs from now on, and of when it ends.
func (a *Agent) run(r running, d *pb.Desired) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.runs = r
	if a.expiry != nil {
		a.expiry.Stop()
		a.expiry = nil
	}
	if d.GetExpiresAfter() == nil {
		return
	}
	then := d.GetThen()
	a.expiry = time.AfterFunc(d.GetExpiresAfter().AsDuration(), func() { a.expire(r.revision, then) })
}

// expire runs what follows a state that has ended, with or without a
// controller.
func (a *Agent) expire(rev plan.Revision, then *pb.Link) {
	link, err := wire.ToLink(then)
	if err != nil {
		return
	}
	var hash string
	if link != nil {
		hash = link.Hash()
	}
	a.mu.Lock()
	if a.runs.revision != rev {
		a.mu.Unlock()
		return
	}
	a.runs = running{rev, hash, hash, a.fleet.share(hash, then)}
	news := a.runs.status(0, pb.Outcome_OUTCOME_UNSPECIFIED)
	a.mu.Unlock()
	_ = a.sendStatus(news) // without a session the next hello says it
}

// share returns the link of a hash that all agents share.
func (f *Fleet) share(hash string, link *pb.Link) *pb.Link {
	if link == nil {
		return nil
	}
	known, ok := f.links.Load(hash)
	if !ok {
		known, _ = f.links.LoadOrStore(hash, link)
	}
	return known.(*pb.Link)
}

// reports sends reports until the timer is stopped or the session is another,
// the first after a random part of the time between two; nil if none are wanted.
func (a *Agent) reports(client *grpcwire.Client, every time.Duration) *time.Timer {
	if a.fleet.ReportEvery != 0 {
		every = a.fleet.ReportEvery
	}
	if every <= 0 || a.fleet.Hooks.Report == nil {
		return nil
	}
	var timer *time.Timer
	ready := make(chan struct{})
	timer = time.AfterFunc(time.Duration(rand.Int64N(int64(every))), func() {
		<-ready
		a.mu.Lock()
		current := a.client == client
		a.mu.Unlock()
		if current && a.report() == nil {
			timer.Reset(every)
		}
	})
	close(ready)
	return timer
}

func (a *Agent) report() error {
	r := a.fleet.Hooks.Report(a)
	if r == nil {
		return nil
	}
	a.mu.Lock()
	a.sequence++
	r.Sequence = a.sequence
	a.mu.Unlock()
	r.BootID, r.Uptime = a.BootID, time.Since(a.began)
	return a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Report{Report: wire.FromReport(r)}})
}

func (a *Agent) sendStatus(s *pb.Status) error {
	return a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: s}})
}

// errMove means that the controller asked for another session.
var errMove = errors.New("the controller asked for another session")

// errNotConnected means that there is no session to say something in.
var errNotConnected = errors.New("no session")

func (a *Agent) send(m *pb.ConnectRequest) error {
	raw, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	a.mu.Lock()
	client, stream := a.client, a.stream
	a.mu.Unlock()
	if client == nil {
		return errNotConnected
	}
	err = client.Send(stream, raw, false)
	if errors.Is(err, grpcwire.ErrBlocked) {
		a.blocked.Add(1)
		return nil
	}
	return err
}

// ticket is a session cache of one. The one in crypto/tls has a map and a list.
type ticket struct{ state *tls.ClientSessionState }

// Get returns the ticket.
func (t *ticket) Get(string) (*tls.ClientSessionState, bool) { return t.state, t.state != nil }

// Put keeps a ticket.
func (t *ticket) Put(_ string, s *tls.ClientSessionState) { t.state = s }
