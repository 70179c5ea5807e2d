package door

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/internal/grpcwire"
)

// What a connection's turn is at.
const (
	turnIdle   = iota // nothing came since the last one
	turnBusy          // a worker has it
	turnAgain         // something came; a worker has it or will
	turnClosed        // there will be none any more
)

// conn is one connection. Fields without a comment are the worker's whose turn
// it is.
type conn struct {
	server *Server
	tls    secure
	socket *socket
	fd     int
	slot   int
	state  atomic.Uint32
	seen   atomic.Uint32 // when something was received, by server.now

	first    *time.Timer // until the first request; nil after
	prefaced bool
	decoder  *grpcwire.Decoder // nil before the first request
	rest     []byte            // of a frame that is not all there
	last     uint32            // the newest stream of the peer
	credit   int               // bytes received since the last window update
	frames   budget
	bytes    budget

	mu      sync.Mutex // guards what follows; taken before the locks of tls
	closed  bool
	pinged  bool    // and no answer yet
	window  int64   // that the peer allows on the connection
	initial int64   // of new streams
	session *Stream // nil: none
	calls   []*call // unary ones under way
}

// secure is what is used of a *tls.Conn.
type secure interface {
	Read(p []byte) (int, error)
	Write(p []byte) (int, error)
	CloseWrite() error
	ConnectionState() tls.ConnectionState
}

func newConn(s *Server, t secure, socket *socket) *conn {
	return &conn{server: s, tls: t, socket: socket, fd: -1, window: grpcwire.InitialWindow, initial: grpcwire.InitialWindow}
}

// settings are the same for every connection.
func (s *Server) settings() grpcwire.Settings {
	none, streams, headers := uint32(0), uint32(s.limits.Streams), uint32(8<<10)
	return grpcwire.Settings{TableSize: &none, MaxStreams: &streams, MaxHeaders: &headers}
}

// begin says hello as a server does, which the client waits for.
func (c *conn) begin() error {
	_, err := c.tls.Write(grpcwire.AppendSettings(nil, c.server.settings()))
	return err
}

// worker has what a turn needs.
type worker struct {
	in  []byte
	out []byte // answers, written at the end of the turn
}

// readSize is how much is read at once: a TLS record.
const readSize = 16 << 10

// turnReads bounds a turn.
const turnReads = 16

func newWorker() *worker { return &worker{in: make([]byte, readSize)} }

// turn reads and serves what there is. It returns true if there is more.
func (c *conn) turn(w *worker) (more bool) {
	if !c.state.CompareAndSwap(turnAgain, turnBusy) {
		return false
	}
	if err := c.socket.event(); err != nil {
		c.fail(err)
		return false
	}
	w.out = w.out[:0]
	for range turnReads {
		n, err := c.tls.Read(w.in)
		if n > 0 {
			c.seen.Store(c.server.now())
			if errTake := c.take(w, w.in[:n]); errTake != nil {
				c.broken(w, errTake)
				return false
			}
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, errAgain) {
			c.fail(err)
			return false
		}
		if err := c.write(w.out); err != nil {
			c.fail(err)
			return false
		}
		if cap(w.out) > readSize {
			w.out = nil
		}
		// Something that came meanwhile is another turn.
		return !c.state.CompareAndSwap(turnBusy, turnIdle)
	}
	if err := c.write(w.out); err != nil {
		c.fail(err)
		return false
	}
	c.state.CompareAndSwap(turnBusy, turnAgain)
	return true
}

func (c *conn) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	_, err := c.tls.Write(b)
	return err
}

// broken ends a connection whose peer broke the rules.
func (c *conn) broken(w *worker, err error) {
	if e, ok := errors.AsType[*grpcwire.Error](err); ok {
		_ = c.write(grpcwire.AppendGoAway(w.out, c.last, e.Code, e.Text)) // the peer may be gone
	}
	c.fail(err)
}

// take serves the frames in p.
func (c *conn) take(w *worker, p []byte) error {
	if !c.bytes.spend(c.server.now(), uint32(len(p)), c.server.limits.Bytes, burst*c.server.limits.Bytes) {
		return grpcwire.Broken(grpcwire.EnhanceYourCalm, "too many bytes")
	}
	if c.rest != nil {
		p = append(c.rest, p...)
		c.rest = nil
	}
	if !c.prefaced {
		if n := min(len(p), len(grpcwire.Preface)); string(p[:n]) != grpcwire.Preface[:n] {
			return grpcwire.Broken(grpcwire.ProtocolError, "no preface")
		}
		if len(p) >= len(grpcwire.Preface) {
			c.prefaced = true
			p = p[len(grpcwire.Preface):]
		}
	}
	for c.prefaced {
		f, n, err := grpcwire.Next(p)
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		if !c.frames.spend(c.server.now(), 1, c.server.limits.Frames, burst*c.server.limits.Frames) {
			return grpcwire.Broken(grpcwire.EnhanceYourCalm, "too many frames")
		}
		if err := c.frame(w, f); err != nil {
			return err
		}
		p = p[n:]
	}
	if len(p) > 0 {
		c.rest = append([]byte(nil), p...)
	}
	return nil
}

func (c *conn) frame(w *worker, f grpcwire.Frame) error {
	switch f.Type {
	case grpcwire.TypeSettings:
		return c.peerSettings(w, f)
	case grpcwire.TypePing:
		data, err := grpcwire.Ping(f)
		if err != nil {
			return err
		}
		if f.Has(grpcwire.FlagAck) {
			c.mu.Lock()
			c.pinged = false
			c.mu.Unlock()
			return nil
		}
		w.out = grpcwire.AppendPing(w.out, true, data)
		return nil
	case grpcwire.TypeWindowUpdate:
		return c.allow(f)
	case grpcwire.TypeHeaders:
		return c.headers(w, f)
	case grpcwire.TypeData:
		return c.data(w, f)
	case grpcwire.TypeReset:
		if _, err := grpcwire.ResetCode(f); err != nil {
			return err
		}
		c.reset(f.Stream)
		return nil
	case grpcwire.TypeContinuation, grpcwire.TypePushPromise:
		return grpcwire.Broken(grpcwire.ProtocolError, "frame of type %d", f.Type)
	default: // GOAWAY, PRIORITY and what later versions have
		return nil
	}
}

func (c *conn) peerSettings(w *worker, f grpcwire.Frame) error {
	s, err := grpcwire.ParseSettings(f)
	if err != nil || f.Has(grpcwire.FlagAck) {
		return err
	}
	w.out = grpcwire.AppendSettingsAck(w.out)
	if s.Window == nil {
		return nil
	}
	c.mu.Lock()
	delta := int64(*s.Window) - c.initial
	c.initial += delta
	if c.session != nil {
		c.session.window += delta
	}
	for _, call := range c.calls {
		call.window += delta
	}
	c.mu.Unlock()
	c.writable()
	return nil
}

// allow takes in a WINDOW_UPDATE.
func (c *conn) allow(f grpcwire.Frame) error {
	n, err := grpcwire.Increment(f)
	if err != nil {
		return err
	}
	c.mu.Lock()
	window := &c.window
	if f.Stream != 0 {
		window = nil // a stream that has ended
		if c.session != nil && c.session.id == f.Stream {
			window = &c.session.window
		}
		for _, call := range c.calls {
			if call.id == f.Stream {
				window = &call.window
			}
		}
	}
	over := false
	if window != nil {
		*window += n
		over = *window > grpcwire.MaxWindow
	}
	c.mu.Unlock()
	if over {
		return grpcwire.Broken(grpcwire.FlowControlError, "window of more than 2 GiB")
	}
	c.writable()
	return nil
}

// writable tells the session that was blocked and no longer is.
func (c *conn) writable() {
	c.mu.Lock()
	s := c.session
	tell := s != nil && s.blocked && s.readyLocked()
	if tell {
		s.blocked = false
	}
	c.mu.Unlock()
	if tell {
		s.handler.Writable()
	}
}

// headers begins a call. Trailers of a client don't exist in gRPC.
func (c *conn) headers(w *worker, f grpcwire.Frame) error {
	if !f.Has(grpcwire.FlagEndHeaders) {
		return grpcwire.Broken(grpcwire.EnhanceYourCalm, "a header block in several frames")
	}
	block, err := grpcwire.Content(f)
	if err != nil {
		return err
	}
	if c.decoder == nil {
		c.decoder = grpcwire.NewDecoder()
	}
	h, err := c.decoder.Decode(block)
	if err != nil {
		return err
	}
	if f.Stream%2 == 0 || f.Stream <= c.last {
		return grpcwire.Broken(grpcwire.ProtocolError, "stream %d after %d", f.Stream, c.last)
	}
	c.last = f.Stream
	if c.first != nil {
		c.first.Stop()
		c.first = nil
	}
	c.mu.Lock()
	open := len(c.calls)
	busy := c.session != nil
	if busy {
		open++
	}
	initial := c.initial
	c.mu.Unlock()
	if open >= c.server.limits.Streams {
		w.out = grpcwire.AppendReset(w.out, f.Stream, grpcwire.RefusedStream)
		return nil
	}
	refuse := func(code codes.Code, text string) error {
		w.out = grpcwire.AppendHeaders(w.out, f.Stream, grpcwire.TrailersBlock(status.New(code, text), true), true)
		if !f.Has(grpcwire.FlagEndStream) {
			w.out = grpcwire.AppendReset(w.out, f.Stream, grpcwire.NoError)
		}
		return nil
	}
	method, known := c.server.unary[h.Path]
	switch {
	case h.Method != "POST" || !strings.HasPrefix(h.ContentType, "application/grpc"):
		return refuse(codes.Internal, "not a gRPC call")
	case known && f.Has(grpcwire.FlagEndStream):
		return refuse(codes.Internal, "no request")
	case known:
		c.call(f.Stream, initial, method, h)
		return nil
	case h.Path != c.server.config.Method:
		return refuse(codes.Unimplemented, "unknown method")
	case busy:
		return refuse(codes.ResourceExhausted, "one session on a connection")
	}
	// What came before goes out before what Open says.
	if err := c.write(w.out); err != nil {
		return err
	}
	w.out = w.out[:0]
	c.openSession(f.Stream, initial)
	if f.Has(grpcwire.FlagEndStream) {
		c.endSession(f.Stream)
	}
	return nil
}

// endSession is for a peer that has nothing more to say.
func (c *conn) endSession(id uint32) {
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil && s.id == id {
		s.End(nil)
	}
}

func (c *conn) openSession(id uint32, window int64) {
	s := &Stream{conn: c, id: id, window: window}
	c.mu.Lock()
	c.session = s
	c.mu.Unlock()
	var handler Session
	err := c.server.guard(func() (err error) {
		handler, err = c.server.config.Open(c.context(context.Background()), s)
		return err
	})
	c.mu.Lock()
	s.handler = handler
	gone := c.session != s // ended meanwhile
	c.mu.Unlock()
	switch {
	case err != nil:
		s.End(err)
	case gone:
		handler.Closed()
	}
}

// context returns ctx with the peer.
func (c *conn) context(ctx context.Context) context.Context {
	return peer.NewContext(ctx, &peer.Peer{
		Addr:     c.socket.addr,
		AuthInfo: credentials.TLSInfo{State: c.tls.ConnectionState(), CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}},
	})
}

// data takes in a part of a stream. Windows are given back at once, as all
// that comes is taken in at once.
func (c *conn) data(w *worker, f grpcwire.Frame) error {
	p, err := grpcwire.Content(f)
	if err != nil {
		return err
	}
	if f.Stream == 0 || f.Stream > c.last {
		return grpcwire.Broken(grpcwire.ProtocolError, "data of stream %d, which is not open", f.Stream)
	}
	end := f.Has(grpcwire.FlagEndStream)
	c.mu.Lock()
	s := c.session
	if s != nil && s.id != f.Stream {
		s = nil
	}
	call := c.callLocked(f.Stream)
	c.mu.Unlock()
	if c.credit += len(f.Payload); c.credit >= grpcwire.InitialWindow/2 {
		w.out = grpcwire.AppendWindowUpdate(w.out, 0, c.credit)
		if (s != nil || call != nil) && !end {
			w.out = grpcwire.AppendWindowUpdate(w.out, f.Stream, c.credit)
		}
		c.credit = 0
	}
	switch {
	case s != nil:
		err := c.server.guard(func() error {
			return s.messages.Take(p, c.server.limits.Message, s.handler.Receive)
		})
		if err != nil {
			s.End(err)
		} else if end {
			s.End(nil)
		}
	case call != nil:
		c.callData(call, p, end)
	}
	return nil
}

// reset ends a stream that the peer broke off.
func (c *conn) reset(id uint32) {
	c.mu.Lock()
	var handler Session
	if c.session != nil && c.session.id == id {
		handler = c.session.handler
		c.session = nil
	}
	call := c.callLocked(id)
	c.mu.Unlock()
	if handler != nil {
		handler.Closed()
	}
	if call != nil {
		c.drop(call)
	}
}

// visit is called once in a time of Limits.Idle.
func (c *conn) visit() {
	idle := uint32(c.server.limits.Idle / time.Second)
	if c.server.now()-c.seen.Load() < idle {
		return
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	silent := c.pinged
	var err error
	if !silent {
		c.pinged = true
		_, err = c.tls.Write(grpcwire.AppendPing(nil, false, [8]byte{}))
	}
	c.mu.Unlock()
	if silent {
		err = errors.New("no answer to a ping")
	}
	if err != nil {
		c.fail(err)
	}
}

// goAway closes a connection and says so.
func (c *conn) goAway() {
	_ = c.write(grpcwire.AppendGoAway(nil, 1<<31-1, grpcwire.NoError, "the controller stops")) // it may be gone
	_ = c.tls.CloseWrite()                                                                     // likewise
	c.fail(net.ErrClosed)
}

// fail ends the connection and what is on it. It may be called more than once.
func (c *conn) fail(err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	var handler Session
	if c.session != nil {
		handler = c.session.handler
	}
	calls := c.calls
	c.session, c.calls = nil, nil
	c.mu.Unlock()
	c.state.Store(turnClosed)
	_ = c.socket.Close() // it ends in any case
	c.server.forget(c)
	c.server.logger.Trace("connection ended", "peer", c.socket.addr, "error", err)
	if handler != nil {
		handler.Closed()
	}
	for _, call := range calls {
		call.cancel()
	}
}
