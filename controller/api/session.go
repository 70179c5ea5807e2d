package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

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

	// maxWord is the longest name that an agent may give of itself, bytes.
	maxWord = 128

	// maxReport is the largest report that is kept, bytes. One with eight tins
	// in use both ways has about 8 kB.
	maxReport = 32 << 10

	// maxStatus is the largest status that is kept, bytes.
	maxStatus = 8 << 10
)

// SessionService runs the sessions of agents. Each has two goroutines: the
// stream's handler, which sends, and one that receives.
type SessionService struct {
	pb.UnimplementedSessionServiceServer

	store     *store.Store
	hub       *fleet.Hub
	telemetry *telemetry.Table
	interval  time.Duration
	logger    hclog.Logger

	hashes    resolve.Hashes
	receivers sync.WaitGroup
	stop      sync.Once
	stopping  chan struct{} // closed by Stop
}

// NewSessionService returns the service that asks agents to report at an interval.
func NewSessionService(s *store.Store, hub *fleet.Hub, t *telemetry.Table, interval time.Duration, logger hclog.Logger) *SessionService {
	return &SessionService{store: s, hub: hub, telemetry: t, interval: interval, logger: logger, stopping: make(chan struct{})}
}

// Changed tells the sessions that a change reaches. It is for Store.OnChange.
func (s *SessionService) Changed(c store.Change) {
	if c.Kind == store.KindRouter && c.Deleted {
		s.hub.Remove(c.ID)
		s.telemetry.Remove(c.ID)
		return
	}
	s.store.View(func(st *store.State) {
		for id := range st.Affected(c) {
			s.hub.Wake(id)
		}
	})
}

// Stop ends all sessions; the agents come back to whatever controller they
// find next.
func (s *SessionService) Stop() { s.stop.Do(func() { close(s.stopping) }) }

// Wait returns when all goroutines of ended streams have ended, which they do
// after the gRPC server has stopped.
func (s *SessionService) Wait() { s.receivers.Wait() }

// Connect is one agent's session.
func (s *SessionService) Connect(stream pb.SessionService_ConnectServer) error {
	who, err := caller(stream.Context())
	if err != nil {
		return status.Error(codes.Unauthenticated, err.Error())
	}
	r := receiver{SessionService: s, stream: stream, router: who.Name, hello: make(chan *pb.Hello, 1), session: make(chan *fleet.Session, 1), ended: make(chan error, 1)}
	s.receivers.Go(r.run)
	defer close(r.session)

	hello, err := r.waitHello(stream.Context())
	if err != nil {
		return err
	}
	if _, err := s.desired(who); err != nil {
		return err
	}
	session := s.hub.Open(who.Name, hello, peerAddress(stream.Context()), time.Now())
	defer func() { session.Close(time.Now()) }()
	r.session <- session
	settings := &pb.Settings{ReportInterval: durationpb.New(s.interval), Differences: true, Clock: timestamppb.Now()}
	if err := stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Settings{Settings: settings}}); err != nil {
		return err
	}
	return s.send(stream, session, who, r.ended)
}

// send sends what the session says until the stream or the session ends.
func (s *SessionService) send(stream pb.SessionService_ConnectServer, session *fleet.Session, who identity.Peer, ended <-chan error) error {
	var timer *time.Timer // made when it is needed first: most sessions are calm
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	for {
		desired, err := s.desired(who)
		if err != nil {
			return err
		}
		now := time.Now()
		push, ok, wait := session.Next(now, desired)
		if ok {
			m := &pb.ConnectResponse_Desired{Desired: wire.FromDesired(push.Desired, push.Nonce)}
			if err := stream.Send(&pb.ConnectResponse{Message: m}); err != nil {
				return err
			}
			continue
		}
		if left := desired.Changes.Sub(now); !desired.Changes.IsZero() && (wait <= 0 || left < wait) {
			wait = max(left, time.Millisecond)
		}
		var due <-chan time.Time
		if wait > 0 {
			if timer == nil {
				timer = time.NewTimer(wait)
			} else {
				timer.Reset(wait)
			}
			due = timer.C
		}
		select {
		case <-session.Woken():
		case <-due:
		case err := <-ended:
			return why(session, who.Name, err)
		case <-session.Done():
			return why(session, who.Name, nil)
		case <-s.stopping:
			return status.Error(codes.Unavailable, "the controller stops")
		}
	}
}

// why returns what ended a session: the hub, or else its stream with err.
func why(session *fleet.Session, router string, err error) error {
	select {
	case <-session.Done():
	default:
		return err
	}
	if errors.Is(session.Err(), fleet.ErrRemoved) {
		return removed(router)
	}
	return status.Error(codes.Aborted, session.Err().Error())
}

// desired returns what a router should run, or why it may not know: there is no
// such router, or one that has joined with another key since. Its certificate
// may be good for a long time yet.
func (s *SessionService) desired(who identity.Peer) (d plan.Desired, err error) {
	s.store.View(func(st *store.State) {
		r, exists := st.Router(who.Name)
		switch {
		case !exists:
			err = removed(who.Name)
		case r.Key != who.Key:
			err = status.Errorf(codes.PermissionDenied, "router %s: is another device now, or has a new key; to come back it needs a join token", who.Name)
		default:
			d, _ = resolve.Router(st, who.Name, time.Now(), &s.hashes)
		}
	})
	return d, err
}

// removed is the answer to a router that isn't in the store, or not any more.
func removed(router string) error {
	return status.Errorf(codes.PermissionDenied, "router %s: was removed from the fleet", router)
}

func peerAddress(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return p.Addr.String()
	}
	return ""
}

// receiver takes in what one agent says. It is a goroutine of its own, because
// only the end of the stream's handler ends a blocked Recv.
type receiver struct {
	*SessionService
	stream  pb.SessionService_ConnectServer
	router  string
	hello   chan *pb.Hello      // capacity 1: sent once
	session chan *fleet.Session // capacity 1: sent once; closed without one if the handler returned
	ended   chan error          // capacity 1: sent once
	odd     bool                // something was ignored, and told
}

func (r *receiver) run() {
	defer func() {
		if p := recover(); p != nil {
			r.logger.Error("receiver panicked", "router", r.router, "panic", p, "stack", string(debug.Stack()))
			r.ended <- status.Error(codes.Internal, "internal error; the controller's log has more")
		}
	}()
	r.ended <- r.receive()
}

func (r *receiver) receive() error {
	m, err := r.stream.Recv()
	if err != nil {
		return end(err)
	}
	if m.GetHello() == nil {
		return status.Error(codes.InvalidArgument, "the first message must be hello")
	}
	r.hello <- m.GetHello()
	session, ok := <-r.session
	if !ok {
		return nil
	}
	for {
		m, err := r.stream.Recv()
		if err != nil {
			return end(err)
		}
		if !r.take(session, m, time.Now()) {
			return nil // the session has ended, and the handler knows why
		}
	}
}

// end is how a stream ends for its handler.
func end(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// take takes in one message. It returns false if the session has ended. What
// it doesn't understand it ignores, as a newer agent may say it: to end the
// session would cut the router off for good.
func (r *receiver) take(session *fleet.Session, m *pb.ConnectRequest, now time.Time) bool {
	switch m := m.GetMessage().(type) {
	case *pb.ConnectRequest_Status:
		st, err := readStatus(m.Status)
		if err != nil {
			r.ignore("status", err)
			break
		}
		return session.Status(now, m.Status.GetNonce(), st)
	case *pb.ConnectRequest_Report:
		if !session.Seen(now) {
			return false
		}
		if err := r.report(session, m.Report, now); err != nil && !errors.Is(err, telemetry.ErrOld) {
			r.ignore("report", err)
		}
		return true
	}
	return session.Seen(now)
}

func (r *receiver) report(session *fleet.Session, m *pb.Report, now time.Time) error {
	if m.GetSince() != 0 {
		before := &pb.Report{}
		latest, _, _ := r.telemetry.Latest(r.router) // nothing is a report of no boot
		err := proto.Unmarshal(latest, before)
		if err != nil {
			return err
		}
		if m, err = wire.Sum(m, before); err != nil {
			return err
		}
	}
	report, err := wire.ToReport(m)
	if err != nil {
		return err
	}
	if report.BootID != session.BootID() {
		return errors.New("boot_id: is not that of the hello")
	}
	if size := proto.Size(m); size > maxReport {
		return fmt.Errorf("report has %d bytes, at most %d are allowed", size, maxReport)
	}
	raw, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return r.telemetry.Ingest(r.router, &report, raw, now)
}

// ignore tells the first message of a session that can't be used.
func (r *receiver) ignore(what string, err error) {
	if !r.odd {
		r.odd = true
		r.logger.Warn("ignored a message of an agent, more are not told", "router", r.router, "kind", what, "error", err)
	}
}

// waitHello returns the stream's hello.
func (r *receiver) waitHello(ctx context.Context) (fleet.Hello, error) {
	timer := time.NewTimer(helloTime)
	defer timer.Stop()
	select {
	case m := <-r.hello:
		return toHello(m, r.router)
	case err := <-r.ended:
		return fleet.Hello{}, err
	case <-ctx.Done():
		return fleet.Hello{}, status.FromContextError(ctx.Err()).Err()
	case <-timer.C:
		return fleet.Hello{}, status.Errorf(codes.DeadlineExceeded, "no hello within %v", helloTime)
	}
}

func toHello(m *pb.Hello, router string) (fleet.Hello, error) {
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
		AgentVersion:  printable(m.GetAgentVersion()),
		Model:         printable(m.GetModel()),
		Dataplane:     printable(m.GetDataplane()),
		Applied:       plan.Revision(m.GetAppliedRevision()),
		AppliedHash:   m.GetAppliedHash(),
		EffectiveHash: m.GetEffectiveHash(),
		Effective:     effective,
	}, nil
}

func readStatus(m *pb.Status) (plan.Status, error) {
	if size := proto.Size(m); size > maxStatus {
		return plan.Status{}, fmt.Errorf("status has %d bytes, at most %d are allowed", size, maxStatus)
	}
	st, err := wire.ToStatus(m)
	if err != nil {
		return plan.Status{}, err
	}
	st.Error, st.Dataplane = printable(st.Error), printable(st.Dataplane)
	for i, c := range st.Clamps {
		st.Clamps[i] = plan.Clamp{Field: printable(c.Field), Desired: printable(c.Desired), Effective: printable(c.Effective), Reason: printable(c.Reason)}
	}
	for i, c := range st.Conditions {
		st.Conditions[i] = plan.Condition{Type: printable(c.Type), Status: c.Status, Reason: printable(c.Reason), Message: printable(c.Message)}
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
