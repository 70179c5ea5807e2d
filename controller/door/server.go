package door

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
)

// Session is the handler of one stream of the session method. Its methods must
// not block for long: they run on the workers that serve everybody.
type Session interface {
	// Receive takes in a message, which is only valid until it returns. An
	// error ends the stream with its status.
	Receive(message []byte) error
	// Writable is called after Stream.Ready was false, when it no longer is.
	Writable()
	// Closed is called once when the stream has ended, by whom ever.
	Closed()
}

// Config is what a server needs. Zero limits stand for the defaults.
type Config struct {
	TLS *tls.Config
	// Method is the full name of the session method.
	Method string
	// Open begins a session; an error refuses it with its status. ctx has the
	// peer, as in any gRPC call, and is not to be kept.
	Open func(ctx context.Context, s *Stream) (Session, error)
	// Unary is called around every unary call; nil: nothing is.
	Unary  grpc.UnaryServerInterceptor
	Logger hclog.Logger // nil: none

	Limits Limits
}

// Limits bound what peers cost. The zero values of fields stand for
// DefaultLimits.
type Limits struct {
	Rate        float64       // connections that are admitted each second at most
	Wait        time.Duration // the longest time in the room
	Connections int           // at once, those in the room included
	Handshake   time.Duration // for a handshake and for the first request
	Idle        time.Duration // until a silent peer is pinged, and again until it is closed
	Call        time.Duration // for a unary call
	Message     int           // bytes of a message
	Streams     int           // of a connection
	Frames      uint32        // of a connection each second; ten times as many at once
	Bytes       uint32        // likewise
}

// DefaultLimits returns the limits for this machine.
func DefaultLimits() Limits {
	return Limits{
		// A handshake takes about 1 ms of CPU: half of the machine.
		Rate:        float64(500 * runtime.GOMAXPROCS(0)),
		Wait:        12 * time.Second,
		Connections: 200_000,
		Handshake:   10 * time.Second,
		Idle:        30 * time.Second,
		Call:        30 * time.Second,
		Message:     64 << 10,
		Streams:     4,
		Frames:      200,
		Bytes:       256 << 10,
	}
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits()
	l.Rate = or(l.Rate, d.Rate)
	l.Wait = or(l.Wait, d.Wait)
	l.Connections = or(l.Connections, d.Connections)
	l.Handshake = or(l.Handshake, d.Handshake)
	l.Idle = or(l.Idle, d.Idle)
	l.Call = or(l.Call, d.Call)
	l.Message = or(l.Message, d.Message)
	l.Streams = or(l.Streams, d.Streams)
	l.Frames = or(l.Frames, d.Frames)
	l.Bytes = or(l.Bytes, d.Bytes)
	return l
}

func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// burst is how many seconds' worth of a budget may come at once.
const burst = 10

// slots is into how many parts the connections are put for the sweep, of which
// one is done every Idle / slots.
const slots = 30

// Server serves the door.
type Server struct {
	config Config
	limits Limits
	logger hclog.Logger
	unary  map[string]unaryMethod
	began  time.Time

	poller *poller
	ready  chan *conn // capacity: the poller waits rather than the workers
	calls  sync.WaitGroup

	mu       sync.Mutex
	conns    map[int]*conn // watched ones by descriptor; guarded by mu
	sweep    [slots]map[*conn]struct{}
	next     int // slot of the next connection; guarded by mu
	open     int // connections, those in the room included; guarded by mu
	stopping bool
	waiting  map[net.Conn]struct{} // in the room or in handshake; guarded by mu
	stop     chan struct{}         // closed by Stop
	room     chan net.Conn
	refused  atomic.Uint64

	paceMu  sync.Mutex
	pace    pace         // guarded by paceMu
	running atomic.Int64 // unary calls
}

type unaryMethod struct {
	service any
	desc    *grpc.MethodDesc
}

// New returns a server that serves nothing yet.
func New(c Config) *Server {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	c.TLS = c.TLS.Clone()
	if !slices.Contains(c.TLS.NextProtos, "h2") {
		c.TLS.NextProtos = append(c.TLS.NextProtos, "h2")
	}
	limits := c.Limits.orDefault()
	s := &Server{
		config: c, limits: limits, logger: c.Logger, unary: map[string]unaryMethod{}, began: time.Now(),
		pace: newPace(limits.Rate), conns: map[int]*conn{}, waiting: map[net.Conn]struct{}{}, stop: make(chan struct{}),
	}
	for i := range s.sweep {
		s.sweep[i] = map[*conn]struct{}{}
	}
	s.room = make(chan net.Conn, max(1, int(s.limits.Rate*s.limits.Wait.Seconds())))
	s.ready = make(chan *conn, 1024)
	return s
}

// RegisterService registers the unary methods of a service; its streams are not
// served. It comes before Serve.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, service any) {
	for i := range desc.Methods {
		m := &desc.Methods[i]
		s.unary["/"+desc.ServiceName+"/"+m.MethodName] = unaryMethod{service, m}
	}
}

// Serve serves the connections that the listener accepts until Stop. It closes
// the listener and may be called once.
func (s *Server) Serve(l net.Listener) error {
	var err error
	if s.poller, err = newPoller(); err != nil {
		return errors.Join(fmt.Errorf("watch connections: %w", err), l.Close())
	}
	var background, workers sync.WaitGroup
	numWorkers := 2 * runtime.GOMAXPROCS(0)
	for range numWorkers {
		workers.Go(s.work)
	}
	background.Go(func() {
		<-s.stop
		_ = l.Close() // what counts is that Accept returns
	})
	background.Go(s.admit)
	background.Go(s.watchIdle)
	polled := make(chan error, 1)
	go func() {
		polled <- s.poller.wait(s.event)
	}()

	err = s.accept(l)
	s.shut()
	background.Wait()
	s.poller.stop()
	err = errors.Join(err, <-polled)
	for range numWorkers {
		s.ready <- nil
	}
	workers.Wait()
	s.calls.Wait()
	return errors.Join(err, s.poller.close())
}

// accept puts what comes into the room until Stop.
func (s *Server) accept(l net.Listener) error {
	for {
		nc, err := l.Accept()
		if err != nil {
			select {
			case <-s.stop:
				return nil
			default:
			}
			if e, ok := errors.AsType[net.Error](err); ok && e.Temporary() { //nolint:staticcheck // too many open files is temporary, and nothing else says so
				s.logger.Warn("accept", "error", err)
				time.Sleep(50 * time.Millisecond)
				continue
			}
			return err
		}
		if !s.enter(nc) {
			s.refused.Add(1)
			_ = nc.Close() // the peer is not waited for
		}
	}
}

// enter puts a connection into the room if there is room.
func (s *Server) enter(nc net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping || s.open >= s.limits.Connections || float64(len(s.room)) >= max(1, s.Rate()*s.limits.Wait.Seconds()) {
		return false
	}
	select {
	case s.room <- nc:
		s.open++
		s.waiting[nc] = struct{}{}
		return true
	default:
		return false
	}
}

// burstOf returns how many may leave the room at once: a twentieth of a second's.
func burstOf(rate float64) float64 { return max(1, rate/20) }

// admit lets the room out at the rate that the CPU can serve.
func (s *Server) admit() {
	rate := s.Rate()
	bucket := NewBucket(rate, burstOf(rate))
	for {
		select {
		case <-s.stop:
			return
		case nc := <-s.room:
			for {
				s.paceMu.Lock()
				s.pace.look(time.Now())
				bucket.SetRate(s.pace.rate, burstOf(s.pace.rate))
				wait, ok := bucket.Take(time.Now(), 1)
				if wait = min(wait, paceEvery); ok {
					s.pace.totals.Admitted++
				} else {
					s.pace.hold(wait)
				}
				s.paceMu.Unlock()
				if ok {
					break
				}
				time.Sleep(wait)
			}
			admitted := time.Now()
			s.calls.Go(func() { s.handshake(&greeting{Conn: nc, server: s, admitted: admitted}) })
		}
	}
}

// greeting is a connection during its handshake: it measures how long the
// answer to the first message takes.
type greeting struct {
	net.Conn
	server   *Server
	admitted time.Time
	heard    time.Time // when the answer began to be due; zero: not yet
	answered bool
}

// soon is how long a read takes that had not to wait for the peer: what was
// there already has waited since the connection was admitted.
const soon = time.Millisecond

// Read is as in net.Conn.
func (g *greeting) Read(p []byte) (int, error) {
	if !g.heard.IsZero() {
		return g.Conn.Read(p)
	}
	began := time.Now()
	n, err := g.Conn.Read(p)
	if n > 0 {
		g.heard = time.Now()
		if g.heard.Sub(began) < soon {
			g.heard = g.admitted
		}
		g.server.paceMu.Lock()
		g.server.pace.heard()
		g.server.paceMu.Unlock()
	}
	return n, err
}

// Write is as in net.Conn.
func (g *greeting) Write(p []byte) (int, error) {
	g.answer(true)
	return g.Conn.Write(p)
}

// answer notes that the first message was answered, or will not be.
func (g *greeting) answer(ok bool) {
	if g.heard.IsZero() || g.answered {
		return
	}
	g.answered = true
	g.server.paceMu.Lock()
	defer g.server.paceMu.Unlock()
	g.server.pace.answered(time.Since(g.heard), ok)
}

// handshake makes a connection of what left the room.
func (s *Server) handshake(g *greeting) {
	nc := g.Conn
	c, err := s.greet(g)
	g.answer(false)
	s.mu.Lock()
	delete(s.waiting, nc)
	if err == nil && s.stopping {
		err = net.ErrClosed
	}
	if err != nil {
		s.open--
		s.mu.Unlock()
		_ = nc.Close() // the error is what counts
		if c != nil {
			_ = c.socket.Close() // likewise
		}
		s.logger.Debug("handshake", "peer", nc.RemoteAddr(), "error", err)
		return
	}
	c.first = time.AfterFunc(s.limits.Handshake, func() { c.fail(errors.New("no request came")) })
	c.slot = s.next
	s.next = (s.next + 1) % slots
	s.conns[c.fd] = c
	s.sweep[c.slot][c] = struct{}{}
	s.mu.Unlock()
	if err := s.poller.add(c.fd); err != nil {
		c.fail(err)
	}
}

func (s *Server) greet(nc net.Conn) (*conn, error) {
	if err := nc.SetDeadline(time.Now().Add(s.limits.Handshake)); err != nil {
		return nil, err
	}
	socket := newSocket(nc)
	t := tls.Server(socket, s.config.TLS)
	if err := t.Handshake(); err != nil {
		return nil, err
	}
	if t.ConnectionState().NegotiatedProtocol != "h2" {
		return nil, errors.New("the client doesn't speak HTTP/2")
	}
	c := newConn(s, t, socket)
	if err := c.begin(); err != nil {
		return nil, err
	}
	if err := socket.detach(); err != nil {
		return nil, err
	}
	c.fd = socket.fd
	return c, nil
}

// event is called by the poller.
func (s *Server) event(fd int, ends bool) {
	s.mu.Lock()
	c := s.conns[fd]
	s.mu.Unlock()
	if c != nil && ends {
		c.socket.ends()
	}
	if c != nil && c.state.Swap(turnAgain) == turnIdle {
		s.ready <- c
	}
}

// work does turns until Serve ends.
func (s *Server) work() {
	w := newWorker()
	for {
		c := <-s.ready
		if c == nil {
			return
		}
		for c.turn(w) {
			// Others first if somebody waits, but the poller must not be
			// what this worker waits for.
			select {
			case s.ready <- c:
			default:
				continue
			}
			break
		}
	}
}

// watchIdle pings those who are silent and closes those who don't answer.
func (s *Server) watchIdle() {
	ticker := time.NewTicker(s.limits.Idle / slots)
	defer ticker.Stop()
	for slot := 0; ; slot = (slot + 1) % slots {
		select {
		case <-s.stop:
			return
		case <-ticker.C:
		}
		s.mu.Lock()
		all := make([]*conn, 0, len(s.sweep[slot]))
		for c := range s.sweep[slot] {
			all = append(all, c)
		}
		s.mu.Unlock()
		for _, c := range all {
			c.visit()
		}
	}
}

// forget is the end of a connection.
func (s *Server) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[c.fd] == c {
		delete(s.conns, c.fd)
	}
	delete(s.sweep[c.slot], c)
	s.open--
}

// Len returns how many connections there are, those in the room included.
func (s *Server) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// Refused returns how many connections found the room full.
func (s *Server) Refused() uint64 { return s.refused.Load() }

// Rate returns how many connections are admitted each second, if as many come:
// at most Limits.Rate, and less if the CPU was found to serve less.
func (s *Server) Rate() float64 {
	s.paceMu.Lock()
	defer s.paceMu.Unlock()
	s.pace.look(time.Now())
	return s.pace.rate
}

// Admission returns what was admitted until now.
func (s *Server) Admission() Admission {
	s.paceMu.Lock()
	defer s.paceMu.Unlock()
	return s.pace.total(time.Now())
}

// Stop ends Serve. Connections end with what was sent on them before; unary
// calls are ended, too.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		s.stopping = true
		close(s.stop)
	}
}

// shut closes all connections.
func (s *Server) shut() {
	s.Stop()
	s.mu.Lock()
	all := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		all = append(all, c)
	}
	for nc := range s.waiting {
		_ = nc.Close() // a handshake that is under way ends
	}
	s.mu.Unlock()
	for _, c := range all {
		c.goAway()
	}
}

// Drain waits until no unary call runs or ctx ends.
func (s *Server) Drain(ctx context.Context) {
	for s.running.Load() > 0 && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// now is the time in seconds for budgets.
func (s *Server) now() uint32 { return uint32(time.Since(s.began) / time.Second) }
