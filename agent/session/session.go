// Package session is an agent's one talk with its controller: it dials,
// enrols, says hello, hands desired states to the agent and sends what is in
// the outbox. It is the only part of the agent that knows gRPC and the
// protocol's types.
package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/internal/backoff"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Push is a desired state from the controller.
type Push struct {
	Desired       plan.Desired
	ConfirmWithin time.Duration // 0: no confirmation is asked for
	ExpiresAfter  time.Duration // 0: it stays
	Then          *plan.Link    // what follows after ExpiresAfter; nil: nothing is shaped
	Err           error         // why it can't be read; it is to be refused
	Answer        outbox.Address
}

// Hello is what an agent says of itself once per session.
type Hello struct {
	RouterID, BootID, Version, Model string
	Dataplane                        func() string // the running one; empty: none yet
	Capabilities                     []string
}

// Config is what a session needs. All fields but Logger, Jitter, Probe and Clock are needed.
type Config struct {
	Address string // host:port of the controller
	TLS     *tls.Config
	Logger  hclog.Logger
	Jitter  *rand.Rand // of back-off and reports; nil: seeded at random

	Hello   Hello
	Outbox  *outbox.Outbox
	Status  func() plan.Status    // what runs now; called at the beginning of a stream
	Report  func() *plan.Report   // makes a report; what it refers to stays as it is until the next call
	Deliver func(Push)            // gets every push; must not block
	Probe   func(plan.Probe)      // gets the delay to measure, no host for none; must not block
	Reached func(since time.Time) // the controller answered something that was said after since; must not block
	Clock   func(time.Time)       // gets the controller's wall clock; must not block
	// Handshake is told of every TLS handshake that ended in an error; true
	// means that trying again at once makes sense.
	Handshake func(error) bool
	// Ended is told why a stream ended; true ends Run. nil: nothing is told.
	Ended   func(context.Context, error) bool
	Renewal Renewal // nil: the certificate is not renewed
}

// Renewal keeps a router's certificate from ending. One goroutine at a time
// calls it.
type Renewal interface {
	// Wait returns how long there is until the certificate is to be renewed.
	Wait() time.Duration
	// Request returns a signing request (PKCS #10 in DER).
	Request() ([]byte, error)
	// Take takes the certificate and the authorities in DER, or why there is none.
	Take(certificate []byte, authorities [][]byte, err error)
	// Trust is told which authorities the fleet has, by their name, and how long
	// all routers together should take to learn of them.
	Trust(id []byte, spread time.Duration)
	// Confirms returns the name of the authorities that are stored, once, if they
	// are those that Trust was told of; nil if there is nothing to confirm.
	Confirms() []byte
}

// Session keeps a stream to the controller as long as it runs.
type Session struct {
	cfg     Config
	backoff backoff.Backoff
	open    func(context.Context) (lived time.Duration, err error) // one whole stream; tests replace it
	options []grpc.DialOption                                      // of tests
	stream  uint64                                                 // counts streams, from 1
	retry   atomic.Bool                                            // Handshake asked for another try

	// next is a connection that is ready for the next stream; nil: none.
	next *grpc.ClientConn

	// The report that was sent last, and the origin that it was sent to.
	sentLast wire.Scratch
	sentTo   string
	raw      []byte // of the newest message with a report

	// Of the stream: whether sentLast was sent on it, and how many differences
	// were sent since one that was whole.
	sent        bool
	differences int
}

// Times of one stream.
const (
	defaultReportInterval = 10 * time.Second
	connectTimeout        = 20 * time.Second
	helloTimeout          = 30 * time.Second // until the controller's first message
	probeTimeout          = 5 * time.Second

	// wholeEvery is how often a report is whole even for a controller that takes
	// differences: one that could not use a report can't use what builds on it.
	wholeEvery = 60
)

// New returns a session that is not connected yet.
func New(cfg Config) *Session {
	if cfg.Logger == nil {
		cfg.Logger = hclog.NewNullLogger()
	}
	if cfg.Jitter == nil {
		cfg.Jitter = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	if cfg.Probe == nil {
		cfg.Probe = func(plan.Probe) {}
	}
	if cfg.Clock == nil {
		cfg.Clock = func(time.Time) {}
	}
	s := &Session{cfg: cfg, backoff: backoff.Backoff{Random: cfg.Jitter}}
	s.open = s.connect
	return s
}

// Run connects again and again, for ever, until ctx ends.
func (s *Session) Run(ctx context.Context) error {
	wait := s.backoff.Next()
	defer func() {
		if s.next != nil {
			_ = s.next.Close() // nothing was said on it
		}
	}()
	for {
		if s.retry.Swap(false) {
			wait = 0
		}
		if sleep(ctx, wait) != nil {
			return nil
		}
		lived, err := s.open(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if s.cfg.Ended != nil && s.cfg.Ended(ctx, err) || ctx.Err() != nil {
			return nil
		}
		wait = s.backoff.After(lived, err)
		if errors.Is(err, errMove) {
			wait = 0
			s.cfg.Logger.Info("moving to another session", "controller", s.cfg.Address, "lived", lived.Round(time.Millisecond))
			continue
		}
		s.cfg.Logger.Warn("session ended", "controller", s.cfg.Address, "lived", lived.Round(time.Millisecond), "error", plain(err))
	}
}

// connect has one stream from beginning to end. It always returns an error.
func (s *Session) connect(ctx context.Context) (lived time.Duration, err error) {
	s.stream++
	s.sent = false
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn := s.next
	if s.next = nil; conn == nil {
		if conn, err = s.dial(); err != nil {
			return 0, err
		}
	}
	defer func() { err = closed(conn, err) }()

	// A controller that accepts and then says nothing is as good as none.
	silent := time.AfterFunc(helloTimeout, func() {
		cancel(fmt.Errorf("controller %s said nothing for %v", s.cfg.Address, helloTimeout))
	})
	defer silent.Stop()
	stream, err := pb.NewSessionServiceClient(conn).Connect(ctx)
	if err != nil {
		return 0, cause(ctx, err)
	}
	began := time.Now()
	if err := s.hello(stream); err != nil {
		return 0, cause(ctx, err)
	}
	first, err := stream.Recv()
	if err != nil {
		return 0, cause(ctx, err)
	}
	silent.Stop()
	s.cfg.Logger.Info("session began", "controller", s.cfg.Address, "stream", s.stream)
	s.cfg.Reached(began)

	settings := make(chan *pb.Settings, 1) // the newest; replaced when unread
	received := make(chan struct{})        // closed when ended is set
	var ended error
	go func() { defer close(received); ended = s.receive(stream, first, settings) }()
	err = s.send(ctx, conn, stream, settings, received)
	if err == nil || errors.Is(err, io.EOF) {
		// The stream ended, and only its receiver learns why. Nobody else may
		// ask: a stream has one receiver.
		<-received
		err = cause(ctx, ended)
	}
	cancel(err)
	<-received
	return time.Since(began), err
}

func (s *Session) dial() (*grpc.ClientConn, error) {
	return dial(s.cfg.Address, s.cfg.TLS, func(err error) {
		if s.cfg.Handshake != nil && s.cfg.Handshake(err) {
			s.retry.Store(true)
		}
	}, s.options...)
}

// errMove means that the controller asked for another session, for which there
// is a connection.
var errMove = errors.New("the controller asked for another session")

// move makes the connection of the next session while this one goes on. Without
// one the session stays until the controller ends it.
func (s *Session) move(ctx context.Context, within time.Duration) error {
	conn, err := s.dial()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, min(max(within/2, time.Second), connectTimeout))
	defer cancel()
	if err := ready(ctx, conn); err != nil {
		_ = conn.Close() // the error says more
		s.cfg.Logger.Info("stay: no connection for another session", "controller", s.cfg.Address, "error", err)
		return nil
	}
	s.next = conn
	return errMove
}

// hello says what runs and, as news, the router's conditions.
func (s *Session) hello(stream pb.SessionService_ConnectClient) error {
	h, st := s.cfg.Hello, s.cfg.Status()
	err := stream.Send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{
		RouterId:        h.RouterID,
		BootId:          h.BootID,
		AgentVersion:    h.Version,
		Model:           h.Model,
		Capabilities:    h.Capabilities,
		AppliedRevision: int64(st.Applied),
		AppliedHash:     st.AppliedHash,
		EffectiveHash:   st.EffectiveHash,
		Effective:       wire.FromLink(st.Effective),
		Clock:           timestamppb.Now(),
		Dataplane:       h.Dataplane(),
	}}})
	if err == nil {
		err = s.sendStatus(stream, outbox.News(st), 0)
	}
	if errors.Is(err, io.EOF) { // the stream ended; there is no other receiver yet
		_, err = stream.Recv()
	}
	return err
}

// receive hands on what comes until the stream ends. It is the only receiver.
func (s *Session) receive(stream pb.SessionService_ConnectClient, m *pb.ConnectResponse, settings chan *pb.Settings) error {
	for {
		switch arm := m.GetMessage().(type) {
		case *pb.ConnectResponse_Desired:
			s.cfg.Deliver(s.push(arm.Desired))
		case *pb.ConnectResponse_Settings:
			replace(settings, arm.Settings)
			s.backoff.Spread = arm.Settings.GetReconnectSpread().AsDuration()
			s.cfg.Probe(wire.ToProbe(arm.Settings.GetProbe()))
			if c := arm.Settings.GetClock(); c != nil {
				s.cfg.Clock(c.AsTime())
			}
		case *pb.ConnectResponse_Move:
			if err := s.move(stream.Context(), arm.Move.GetWithin().AsDuration()); err != nil {
				return err
			}
		default: // of a later version
		}
		var err error
		if m, err = stream.Recv(); err != nil {
			return err
		}
	}
}

func (s *Session) push(m *pb.Desired) Push {
	p := Push{
		ConfirmWithin: m.GetConfirmWithin().AsDuration(),
		ExpiresAfter:  m.GetExpiresAfter().AsDuration(),
		Answer:        outbox.Address{Stream: s.stream, Nonce: m.GetNonce()},
	}
	var errThen error
	p.Desired, p.Err = wire.ToDesired(m)
	if p.Then, errThen = wire.ToLink(m.GetThen()); errThen != nil && p.Err == nil {
		p.Err = fmt.Errorf("then: %w", errThen)
	}
	if p.ConfirmWithin < 0 || p.ExpiresAfter < 0 {
		p.Err = errors.Join(p.Err, errors.New("confirm_within and expires_after must not be negative"))
	}
	return p
}

// send sends what is due until the stream ends, which is io.EOF or nil. It is
// the only sender; when the controller is slow it waits here, and the outbox
// keeps only the newest.
func (s *Session) send(ctx context.Context, conn *grpc.ClientConn, stream pb.SessionService_ConnectClient, settings <-chan *pb.Settings, received <-chan struct{}) error {
	every, differences, origin := defaultReportInterval, false, ""
	wait := jittered(s.cfg.Jitter, every)
	due, dueAt := time.NewTimer(wait), time.Now().Add(wait)
	defer due.Stop()
	renew := time.NewTimer(s.renewIn())
	defer renew.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-received:
			return nil
		case <-renew.C:
			s.renew(ctx, conn)
			s.confirm(ctx, conn)
			renew.Reset(max(s.renewIn(), time.Second))
		case set := <-settings:
			differences, origin = set.GetDifferences(), set.GetOrigin()
			if id := set.GetAuthorities(); len(id) > 0 && s.cfg.Renewal != nil {
				s.cfg.Renewal.Trust(id, set.GetReconnectSpread().AsDuration())
				s.confirm(ctx, conn)
				renew.Reset(max(s.renewIn(), time.Millisecond))
			}
			if d := set.GetReportInterval().AsDuration(); d > 0 {
				every = d
				wait := jittered(s.cfg.Jitter, every) // spread over the fleet
				due.Reset(wait)
				dueAt = time.Now().Add(wait)
			}
		case <-due.C:
			now := time.Now()
			// Those that came due while a controller that is slow held this up.
			s.cfg.Outbox.Skip(uint64(max(0, now.Sub(dueAt)/every)))
			due.Reset(every)
			dueAt = now.Add(every)
			s.cfg.Outbox.PutReport()
		case <-s.cfg.Outbox.Ready():
			if err := s.sendWork(ctx, conn, stream, differences, origin); err != nil {
				return cause(ctx, err)
			}
		}
	}
}

func (s *Session) sendWork(ctx context.Context, conn *grpc.ClientConn, stream pb.SessionService_ConnectClient, differences bool, origin string) error {
	w := s.cfg.Outbox.Take(s.stream)
	if w.Status != nil {
		if err := s.sendStatus(stream, w.Status, w.Nonce); err != nil {
			return err
		}
	}
	if w.Report {
		if err := s.sendReport(stream, differences, origin); err != nil {
			return err
		}
	}
	if w.Probe {
		return s.probe(ctx, conn)
	}
	return nil
}

// sendReport sends the next report, as a difference if it may be one. The first
// report of a stream comes behind the one that was sent last on an earlier
// stream, from which a controller that knows nothing of the router begins to
// count. origin is the controller's on this stream; empty: it doesn't care.
func (s *Session) sendReport(stream pb.SessionService_ConnectClient, differences bool, origin string) error {
	if !s.sent && s.sentTo != "" {
		s.sentLast.Again = s.sentTo
		if err := s.sendRaw(stream, &s.sentLast.Report, nil); err != nil {
			return err
		}
		s.sentLast.Again = ""
		s.sent, s.differences = true, 0
	}
	r := s.cfg.Report()
	var before *plan.Report
	if differences && s.sent && s.differences+1 < wholeEvery {
		before = &s.sentLast.Report
		s.differences++
	} else {
		s.differences = 0
	}
	err := s.sendRaw(stream, r, before)
	s.sentLast.Copy(r)
	s.sent, s.sentTo = true, origin
	return err
}

// sendRaw sends a report that package wire has written: to the generated code
// it is a field that it doesn't know and passes on.
func (s *Session) sendRaw(stream pb.SessionService_ConnectClient, r, before *plan.Report) error {
	s.raw = wire.AppendReportRequest(s.raw[:0], r, before)
	m := &pb.ConnectRequest{}
	m.ProtoReflect().SetUnknown(s.raw)
	return stream.Send(m)
}

func (s *Session) sendStatus(stream pb.SessionService_ConnectClient, st *plan.Status, nonce uint64) error {
	return stream.Send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: wire.FromStatus(*st, nonce)}})
}

// probe shows that the controller can be reached now: it calls a method that
// doesn't exist, which every gRPC server answers at once. A session that
// can't do this is over; the next one's beginning is a proof as well.
func (s *Session) probe(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	began := time.Now()
	err := conn.Invoke(ctx, "/cakefleet.v1.SessionService/Probe", &emptypb.Empty{}, &emptypb.Empty{})
	switch status.Code(err) {
	case codes.OK, codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated:
		s.cfg.Reached(began)
		return nil
	default:
		return fmt.Errorf("probe controller: %w", err)
	}
}

// cause returns why we ended the stream ourselves, if we did.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// replace makes v the only value in a channel of capacity 1 that has one
// sender.
func replace[T any](ch chan T, v T) {
	for {
		select {
		case ch <- v:
			return
		default:
		}
		select {
		case <-ch:
		default:
		}
	}
}

func jittered(r *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(d) + 1))
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return ctx.Err()
	}
}
