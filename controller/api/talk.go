package api

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Stream is the sending end of an agent's session; *door.Stream is one.
type Stream interface {
	// Ready reports whether something can be sent now. If not, the session is
	// told when it can.
	Ready() bool
	Send(m proto.Message) error
	// End ends the stream with the status of an error; nil: success.
	End(err error)
}

// SessionMethod is the method whose calls are sessions.
const SessionMethod = pb.SessionService_Connect_FullMethodName

// Times of sessions.
const (
	// moveTime is how long an agent has to go when it was asked to.
	moveTime = 30 * time.Second
	// tendEvery is how often all sessions are looked after.
	tendEvery = 5 * time.Second
)

// talk is one session. It ends with its stream.
type talk struct {
	*SessionService
	stream  Stream
	who     identity.Peer
	address string
	opened  time.Time

	model, version string // as the hello said, for the groups that reports count in

	odd bool // something was ignored, and told; the receiver's, of which there is one at a time

	session atomic.Pointer[fleet.Session] // nil before the hello
	closed  atomic.Bool
	queued  atomic.Bool // it is in the queue
	why     atomic.Pointer[error]
	timer   atomic.Pointer[time.Timer] // until the hello has to be here, and then until there is something to send; nil: neither

	sending sync.Mutex // one sends at a time
	until   time.Time  // when it has to move; zero: never; guarded by sending
	moving  bool       // guarded by sending
	// What the agent was told; guarded by sending.
	interval, spread time.Duration
	probe            plan.Probe
	trust            *identity.Set // that it was asked to confirm; nil: none

	place int // in SessionService.talks; guarded by its mu; -1: not there
}

// OpenSession begins a session on a stream that the door has let in.
func (s *SessionService) OpenSession(ctx context.Context, stream *door.Stream) (door.Session, error) {
	return s.Begin(ctx, stream)
}

// Begin begins a session. ctx has the peer and is not kept.
func (s *SessionService) Begin(ctx context.Context, stream Stream) (door.Session, error) {
	if _, _, err := admitAgent(ctx, pb.SessionService_Connect_FullMethodName); err != nil {
		return nil, err
	}
	who, err := caller(ctx)
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	t := &talk{SessionService: s, stream: stream, who: who, address: peerAddress(ctx), opened: time.Now(), place: -1}
	t.timer.Store(time.AfterFunc(helloTime, func() {
		t.stream.End(status.Errorf(codes.DeadlineExceeded, "no hello within %v", helloTime))
	}))
	return t, nil
}

// Receive takes in one message.
func (t *talk) Receive(raw []byte) error {
	session := t.session.Load()
	if report, ok := wire.CutReport(raw); ok && session != nil {
		t.takeReport(session, report, time.Now())
		return nil
	}
	m := &pb.ConnectRequest{}
	if err := proto.Unmarshal(raw, m); err != nil {
		return status.Errorf(codes.InvalidArgument, "message: %v", err)
	}
	if session == nil {
		err := t.greet(m.GetHello())
		if err != nil {
			t.logger.Debug("session refused", "router", t.who.Name, "peer", t.address, "error", err)
		}
		return err
	}
	t.take(session, m, time.Now())
	return nil
}

// greet opens the session that a hello asks for.
func (t *talk) greet(m *pb.Hello) error {
	if m == nil {
		return status.Error(codes.InvalidArgument, "the first message must be hello")
	}
	if timer := t.timer.Swap(nil); timer != nil {
		timer.Stop()
	}
	hello, err := t.toHello(m)
	if err != nil {
		return err
	}
	now := time.Now()
	if _, err := t.desired(t.who); err != nil {
		if t.refused.is(t.who.Key, now) {
			t.logger.Warn("refused a router", "router", t.who.Name, "peer", t.address, "error", err)
		}
		return err
	}
	if wait, ok := t.hub.Admit(t.who.Name, now); !ok {
		return tooOften(t.who.Name, wait)
	}
	if !t.join() {
		return errStopping
	}
	t.model, t.version = hello.Model, hello.AgentVersion
	session := t.hub.Open(t.who.Name, hello, t.address, now, t)
	t.session.Store(session)
	if clone := session.Clone(); clone != nil {
		t.aside(func() { t.quarantine(context.Background(), t.who, clone) })
	}
	if t.closed.Load() { // meanwhile; Closed may not have seen what it has to undo
		t.leave()
		session.Close(now)
		return nil
	}
	if err := t.settle(now); err != nil {
		return err
	}
	t.Woken()
	return nil
}

var errStopping = status.Error(codes.Unavailable, "the controller stops")

// tooOften is the answer to a router that opens sessions again and again.
func tooOften(router string, wait time.Duration) error {
	s := status.Newf(codes.ResourceExhausted, "router %s: opens sessions too often, the next one is in %v", router, wait.Round(time.Second))
	return withDetails(s, retryIn("SESSION_RATE", wait)).Err()
}

// settle tells the agent how to keep the session, if that is news.
func (t *talk) settle(now time.Time) error {
	interval, spread := t.settings()
	t.sending.Lock()
	defer t.sending.Unlock()
	if t.until.IsZero() && t.config.MaxAge > 0 {
		t.until = now.Add(t.config.MaxAge*9/10 + time.Duration(rand.Int64N(int64(t.config.MaxAge/5)+1)))
	}
	if !changed(t.interval, interval) && !changed(t.spread, spread) {
		return nil
	}
	if t.interval == 0 {
		t.probe, t.trust = t.probeOf(t.who.Name), t.unconfirmed(t.who.Name)
	}
	t.interval, t.spread = interval, spread
	return t.sendSettings(now)
}

// sendSettings needs sending.
func (t *talk) sendSettings(now time.Time) error {
	var authorities []byte
	if t.trust != nil {
		id := t.trust.ID()
		authorities = id[:]
	}
	return t.stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Settings{Settings: &pb.Settings{
		ReportInterval: durationpb.New(t.interval), ReconnectSpread: durationpb.New(t.spread), Differences: true, Clock: timestamppb.New(now),
		Probe: wire.FromProbe(t.probe), Origin: t.telemetry.Origin(), Authorities: authorities,
	}}})
}

// take takes in one message that is no report. What it doesn't understand it
// ignores, as a newer agent may say it: to end the session would cut the router
// off for good.
func (t *talk) take(session *fleet.Session, m *pb.ConnectRequest, now time.Time) {
	if m, ok := m.GetMessage().(*pb.ConnectRequest_Status); ok {
		st, err := t.readStatus(m.Status)
		if err == nil {
			session.Status(now, m.Status.GetNonce(), st)
			return
		}
		t.ignore("status", err)
	}
	session.Seen(now)
}

// takeReport takes in a report in the form in which it came.
func (t *talk) takeReport(session *fleet.Session, raw []byte, now time.Time) {
	if !session.Seen(now) {
		return // it has ended
	}
	err := t.report(session, raw, now)
	if err != nil && !errors.Is(err, telemetry.ErrOld) && !errors.Is(err, telemetry.ErrUnknown) {
		t.ignore("report", err)
	}
}

func (t *talk) report(session *fleet.Session, raw []byte, now time.Time) error {
	head, err := wire.ReadReportHead(raw)
	if err != nil {
		return err
	}
	if string(head.BootID) != session.BootID() {
		return errors.New("boot_id: is not that of the hello")
	}
	return t.telemetry.Ingest(t.who.Name, raw, t.groups(), now)
}

// siteLabel is the label of subscribers that says where they are.
const siteLabel = "site"

// groups returns where the router is now.
func (t *talk) groups() telemetry.Place {
	p := telemetry.Place{Model: t.model, Version: t.version}
	names := t.telemetry.Config().Labels
	t.store.View(func(st *store.State) {
		if len(names) > 0 {
			p.Labels = make([]string, len(names))
		}
		_, sub := st.Served(t.who.Name)
		if sub == nil {
			return
		}
		p.Plan, p.Site = sub.Plan, sub.Labels[siteLabel]
		for i, name := range names {
			p.Labels[i] = sub.Labels[name]
		}
	})
	return p
}

// ignore tells the first message of a session that can't be used.
func (t *talk) ignore(what string, err error) {
	if !t.odd {
		t.odd = true
		t.logger.Warn("ignored a message of an agent, more are not told", "router", t.who.Name, "kind", what, "error", err)
	}
}

// Woken is called when there may be something to send.
func (t *talk) Woken() {
	if !t.closed.Load() && !t.queued.Swap(true) {
		t.enqueue(t)
	}
}

// Writable is called when the agent reads again.
func (t *talk) Writable() { t.Woken() }

// Ended is called when the hub ends the session.
func (t *talk) Ended(why error) {
	err := status.Error(codes.Aborted, why.Error())
	if errors.Is(why, fleet.ErrRemoved) {
		err = removed(t.who.Name)
	}
	t.end(err)
}

// end ends the session from elsewhere than its own calls.
func (t *talk) end(err error) {
	t.why.CompareAndSwap(nil, &err)
	t.Woken()
}

// Closed is called when the stream has ended.
func (t *talk) Closed() {
	t.closed.Store(true)
	if timer := t.timer.Load(); timer != nil {
		timer.Stop()
	}
	t.leave()
	if session := t.session.Load(); session != nil {
		session.Close(time.Now())
		if connected, _ := t.hub.Sync(t.who.Name, plan.Desired{}); !connected {
			t.telemetry.Silence(t.who.Name)
		}
	}
}

// step sends what is due.
func (t *talk) step() {
	if err := t.send(); err != nil {
		t.stream.End(err)
	}
}

// send returns why the session is over, if it is.
func (t *talk) send() error {
	t.sending.Lock()
	defer t.sending.Unlock()
	if why := t.why.Load(); why != nil {
		return *why
	}
	session := t.session.Load()
	p, set := t.probeOf(t.who.Name), t.unconfirmed(t.who.Name)
	if set == nil {
		t.trust = nil // it has confirmed
	}
	if (p != t.probe || set != t.trust) && t.interval != 0 && !t.closed.Load() && t.stream.Ready() {
		t.probe, t.trust = p, set
		if err := t.sendSettings(time.Now()); err != nil {
			return err
		}
	}
	for session != nil && !t.closed.Load() && t.stream.Ready() {
		desired, err := t.desired(t.who)
		if err != nil {
			return err
		}
		now := time.Now()
		push, ok, wait := session.Next(now, desired)
		if !ok {
			if left := desired.Changes.Sub(now); !desired.Changes.IsZero() && (wait <= 0 || left < wait) {
				wait = min(max(left, time.Millisecond), maxSleep)
			}
			t.wakeAfter(wait)
			return nil
		}
		m := &pb.ConnectResponse_Desired{Desired: wire.FromDesired(push.Desired, push.Nonce)}
		if err := t.stream.Send(&pb.ConnectResponse{Message: m}); err != nil {
			return err
		}
	}
	return nil
}

// wakeAfter asks for another step; 0: for none.
func (t *talk) wakeAfter(wait time.Duration) {
	timer := t.timer.Load()
	switch {
	case wait <= 0 && timer != nil:
		timer.Stop()
		t.timer.Store(nil)
	case wait > 0 && timer != nil:
		timer.Reset(wait)
	case wait > 0:
		t.timer.Store(time.AfterFunc(wait, t.Woken))
	}
}

// tend looks after one session.
func (t *talk) tend(now time.Time) {
	if err := t.settle(now); err != nil {
		return // the stream has ended, or says more when it can
	}
	t.sending.Lock()
	due := !t.until.IsZero() && !now.Before(t.until)
	asked := t.moving
	if due {
		t.moving, t.until = true, now.Add(moveTime)
	}
	t.sending.Unlock()
	switch {
	case due && asked:
		t.end(status.Error(codes.Unavailable, "the session is old, open another one"))
	case due:
		// An agent that doesn't know it has the time to end what it does.
		_ = t.stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Move{Move: &pb.Move{Within: durationpb.New(moveTime)}}}) // as above
	}
}

// join makes the talk one of the open ones; false if the service stops.
func (t *talk) join() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopped {
		return false
	}
	t.place = len(t.talks)
	t.talks = append(t.talks, t)
	return true
}

func (t *talk) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.place < 0 {
		return
	}
	last := len(t.talks) - 1
	moved := t.talks[last]
	t.talks[t.place], moved.place = moved, t.place
	t.talks[last] = nil
	t.talks = t.talks[:last]
	t.place = -1
}

// enqueue has a worker do the talk's step.
func (s *SessionService) enqueue(t *talk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	s.queue = append(s.queue, t)
	if s.active < runtime.GOMAXPROCS(0) {
		s.active++
		s.workers.Go(s.work)
	}
}

// aside does on another goroutine what may take its time.
func (s *SessionService) aside(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.workers.Go(do)
	}
}

// work does steps as long as there are some.
func (s *SessionService) work() {
	for {
		s.mu.Lock()
		if s.head == len(s.queue) {
			s.queue, s.head = nil, 0
			s.active--
			s.mu.Unlock()
			return
		}
		t := s.queue[s.head]
		s.queue[s.head] = nil
		s.head++
		s.mu.Unlock()
		t.queued.Store(false)
		t.step()
	}
}

// Run looks after the sessions until ctx ends.
func (s *SessionService) Run(ctx context.Context) error {
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() { s.watchOthers(ctx) })
	ticker := time.NewTicker(tendEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			for _, t := range s.open() {
				t.tend(now)
			}
		}
	}
}

func (s *SessionService) open() []*talk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*talk(nil), s.talks...)
}

// Stop ends all sessions; the agents come back to whatever controller they
// find next.
func (s *SessionService) Stop() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	for _, t := range s.open() {
		t.end(errStopping)
	}
}

// Wait returns when nothing of the sessions runs any more, which is soon after
// the door has stopped.
func (s *SessionService) Wait() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.workers.Wait()
}

// settings returns what agents are told now.
func (s *SessionService) settings() (interval, spread time.Duration) {
	s.mu.Lock()
	agents := len(s.talks)
	s.mu.Unlock()
	interval = ReportInterval(s.config.Interval, agents, s.config.MaxReports)
	s.telemetry.Expect(interval)
	if s.config.Rate == nil {
		return interval, 0
	}
	return interval, ReconnectSpread(agents, s.config.Rate())
}

// ReportInterval returns the time between two reports of each of a number of
// agents that together should send at most so many a second; 0: any number.
func ReportInterval(least time.Duration, agents int, most float64) time.Duration {
	if most <= 0 {
		return least
	}
	return max(least, time.Duration(float64(agents)/most*float64(time.Second)))
}

// maxSpread is the longest time over which agents come back.
const maxSpread = 10 * time.Minute

// ReconnectSpread returns the time that a number of agents need to come back
// through a door that admits so many a second; 0: it has no bound.
func ReconnectSpread(agents int, rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return min(time.Duration(float64(agents)/rate*float64(time.Second)), maxSpread)
}

// changed reports whether a setting is so much another that it is worth a
// message: by a quarter, or at all if there was none.
func changed(was, is time.Duration) bool {
	return was == 0 && is != 0 || max(was, is)-min(was, is) > was/4
}

// links keeps one copy of links that very many routers run. The zero value is
// ready.
type links struct {
	mu    sync.RWMutex
	known map[plan.Link]*plan.Link // guarded by mu
}

func (l *links) one(link *plan.Link) *plan.Link {
	if link == nil {
		return nil
	}
	l.mu.RLock()
	known := l.known[*link]
	l.mu.RUnlock()
	if known != nil {
		return known
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known == nil || len(l.known) >= maxWords {
		l.known = map[plan.Link]*plan.Link{}
	}
	l.known[*link] = link
	return link
}

// words keeps one copy of words that very many routers say, such as models and
// versions. The zero value is ready.
type words struct {
	mu    sync.RWMutex
	known map[string]string // guarded by mu
}

// maxWords bounds what is kept; routers are free to say what they want.
const maxWords = 4096

func (w *words) one(s string) string {
	if s == "" {
		return ""
	}
	w.mu.RLock()
	known, ok := w.known[s]
	w.mu.RUnlock()
	if ok {
		return known
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.known == nil || len(w.known) >= maxWords {
		w.known = map[string]string{}
	}
	w.known[s] = s
	return s
}
