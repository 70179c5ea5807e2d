package door

import (
	"context"
	"fmt"
	"net"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/internal/grpcwire"
)

// Stream is the sending end of a session. Its methods never block.
type Stream struct {
	conn     *conn
	id       uint32
	handler  Session           // nil until Open has returned
	messages grpcwire.Messages // the worker's

	// Guarded by conn.mu.
	window  int64
	begun   bool // the answer's headers went out
	blocked bool // Ready was false
}

// room is what must be free in the windows for Ready, bytes. It is also the
// largest message.
const room = 12 << 10

// Ready reports whether a message can be sent now. If not, the session's
// Writable is called when it can.
func (s *Stream) Ready() bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	ready := s.readyLocked()
	s.blocked = !ready
	return ready
}

func (s *Stream) readyLocked() bool { return min(s.window, s.conn.window) >= room }

// Send sends a message of at most 12 kB. It is an error if the stream has ended
// or was not Ready.
func (s *Stream) Send(m proto.Message) error {
	// Message and frame are made in one buffer.
	head := grpcwire.HeaderSize + grpcwire.PrefixSize
	b := make([]byte, head, head+proto.Size(m))
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
	if err != nil {
		return err
	}
	size := len(b) - head
	if size+grpcwire.PrefixSize > room {
		return fmt.Errorf("message of %d bytes, at most %d are sent", size, room-grpcwire.PrefixSize)
	}
	frame := grpcwire.AppendHeader(b[:0], grpcwire.PrefixSize+size, grpcwire.TypeData, 0, s.id)
	frame = append(frame, 0, byte(size>>24), byte(size>>16), byte(size>>8), byte(size))
	b = frame[:len(b)]

	c := s.conn
	c.mu.Lock()
	if c.session != s {
		c.mu.Unlock()
		return net.ErrClosed
	}
	if !s.readyLocked() {
		s.blocked = true
		c.mu.Unlock()
		return grpcwire.ErrBlocked
	}
	n := int64(grpcwire.PrefixSize + size)
	c.window -= n
	s.window -= n
	if !s.begun {
		s.begun = true
		b = append(grpcwire.AppendHeaders(nil, s.id, responseBlock, false), b...)
	}
	_, err = c.tls.Write(b)
	c.mu.Unlock()
	if err != nil {
		c.fail(err)
	}
	return err
}

var responseBlock = grpcwire.ResponseBlock()

// End ends the stream with the status of err; nil: success. Only the first
// call counts.
func (s *Stream) End(err error) {
	st, _ := status.FromError(err)
	c := s.conn
	c.mu.Lock()
	if c.session != s {
		c.mu.Unlock()
		return
	}
	c.session = nil
	b := grpcwire.AppendHeaders(nil, s.id, grpcwire.TrailersBlock(st, !s.begun), true)
	// The peer has nothing more to say.
	b = grpcwire.AppendReset(b, s.id, grpcwire.NoError)
	handler := s.handler
	c.mu.Unlock()
	if handler != nil {
		handler.Closed() // before the peer learns of it, who may ask elsewhere
	}
	if err := c.write(b); err != nil {
		c.fail(err)
	}
}

// call is a unary call under way.
type call struct {
	id      uint32
	method  unaryMethod
	path    string
	request []byte // nil: not here yet
	ready   bool   // the request was here
	message grpcwire.Messages

	window int64 // guarded by conn.mu
	ctx    context.Context
	cancel context.CancelFunc
}

func (c *conn) callLocked(id uint32) *call {
	for _, call := range c.calls {
		if call.id == id {
			return call
		}
	}
	return nil
}

// call begins a unary call.
func (c *conn) call(id uint32, window int64, m unaryMethod, h grpcwire.Headers) {
	limit := c.server.limits.Call
	if t, ok := h.Timeout(); ok {
		limit = min(limit, t)
	}
	//nolint:gosec // cancel is called by whatever ends the call
	ctx, cancel := context.WithTimeout(c.context(context.Background()), limit)
	n := &call{id: id, method: m, path: h.Path, window: window, ctx: ctx, cancel: cancel}
	// One whose request never comes must not stay.
	context.AfterFunc(ctx, func() { c.answer(n, nil, status.FromContextError(ctx.Err()).Err()) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, n)
}

// callData takes in the request, and serves the call at its end.
func (c *conn) callData(n *call, p []byte, end bool) {
	err := n.message.Take(p, c.server.limits.Message, func(m []byte) error {
		if n.ready {
			return status.Error(codes.Internal, "a second request")
		}
		n.ready, n.request = true, append([]byte{}, m...)
		return nil
	})
	switch {
	case err != nil:
		c.answer(n, nil, err)
	case !end:
	case !n.ready:
		c.answer(n, nil, status.Error(codes.Internal, "no request"))
	default:
		c.server.running.Add(1)
		c.server.calls.Go(func() {
			defer c.server.running.Add(-1)
			resp, err := c.server.serve(n)
			c.answer(n, resp, err)
		})
	}
}

// serve runs the handler.
func (s *Server) serve(n *call) (resp any, err error) {
	err = s.guard(func() error {
		resp, err = s.handle(n)
		return err
	})
	return resp, err
}

// guard keeps a panic of a handler from ending the process.
func (s *Server) guard(fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.logger.Error("call panicked", "panic", p, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "internal error; the controller's log has more")
		}
	}()
	return fn()
}

func (s *Server) handle(n *call) (resp any, err error) {
	decode := func(m any) error {
		if err := proto.Unmarshal(n.request, m.(proto.Message)); err != nil {
			return status.Error(codes.Internal, err.Error())
		}
		return nil
	}
	return n.method.desc.Handler(n.method.service, n.ctx, decode, s.config.Unary)
}

var _ grpc.ServiceRegistrar = (*Server)(nil)

// answer ends a call.
func (c *conn) answer(n *call, resp any, err error) {
	var b []byte
	if err == nil {
		var raw []byte
		if raw, err = proto.Marshal(resp.(proto.Message)); err == nil && len(raw) > room {
			err = status.Errorf(codes.ResourceExhausted, "answer of %d bytes", len(raw))
		}
		if err == nil {
			b = grpcwire.AppendHeaders(b, n.id, responseBlock, false)
			b = grpcwire.AppendData(b, n.id, raw, false)
		}
	}
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	size := int64(0)
	if err == nil {
		size = int64(len(b)) // a little more than what counts
	}
	b = grpcwire.AppendHeaders(b, n.id, grpcwire.TrailersBlock(st, err != nil), true)
	if err != nil {
		b = grpcwire.AppendReset(b, n.id, grpcwire.NoError)
	}
	c.mu.Lock()
	var errWrite error
	if c.callLocked(n.id) == n {
		if size > min(n.window, c.window) {
			b = grpcwire.AppendReset(nil, n.id, grpcwire.FlowControlError)
			size = 0
		}
		c.window -= size
		_, errWrite = c.tls.Write(b)
	}
	c.mu.Unlock()
	c.drop(n)
	if errWrite != nil {
		c.fail(errWrite)
	}
}

// drop is the end of a call.
func (c *conn) drop(n *call) {
	n.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, have := range c.calls {
		if have == n {
			c.calls = append(c.calls[:i:i], c.calls[i+1:]...)
			return
		}
	}
}
