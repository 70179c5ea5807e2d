package door_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/internal/grpcwire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// method is the session's, whose messages are strings.
const method = "/test.Echo/Session"

// rig is a door whose session says back what it hears, and does what some words
// ask for.
type rig struct {
	t       *testing.T
	door    *door.Server
	address string
	tls     *tls.Config

	mu     sync.Mutex
	latest *echo // guarded by mu
	closed atomic.Int64
	stop   func()
}

type echo struct {
	rig      *rig
	stream   *door.Stream
	writable atomic.Int64
}

func (e *echo) Receive(raw []byte) error {
	m := &wrapperspb.StringValue{}
	if err := proto.Unmarshal(raw, m); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	switch m.GetValue() {
	case "refuse":
		return status.Error(codes.PermissionDenied, "refused: 100 % ü")
	case "panic":
		panic("secret detail")
	case "end":
		e.stream.End(nil)
		return nil
	}
	return e.stream.Send(m)
}

func (e *echo) Writable() { e.writable.Add(1) }

func (e *echo) Closed() { e.rig.closed.Add(1) }

func newRig(t *testing.T, limits door.Limits) *rig {
	t.Helper()
	authority, err := identity.Open(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	server, err := authority.AgentsTLS()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t}
	r.door = door.New(door.Config{TLS: server, Method: method, Limits: limits, Open: func(ctx context.Context, s *door.Stream) (door.Session, error) {
		if p, ok := peer.FromContext(ctx); !ok || p.Addr == nil {
			return nil, errors.New("no peer")
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.latest = &echo{rig: r, stream: s}
		return r.latest, nil
	}})
	r.door.RegisterService(&grpc.ServiceDesc{ServiceName: "test.Echo", Methods: []grpc.MethodDesc{{MethodName: "Call", Handler: call}}}, r)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.CertificatePEM())
	r.tls = &tls.Config{RootCAs: roots, ServerName: identity.ServerName, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.address = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.door.Serve(l) }()
	var once sync.Once
	r.stop = func() {
		once.Do(func() {
			r.door.Stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(r.stop)
	return r
}

// call is a unary method that says back what it hears.
func call(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) { //nolint:revive // as grpc.MethodDesc wants it
	m := &wrapperspb.StringValue{}
	if err := decode(m); err != nil {
		return nil, err
	}
	switch m.GetValue() {
	case "panic":
		panic("secret detail")
	case "wait":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return m, nil
}

func (r *rig) session() *echo {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.latest
}

// grpc connects as grpc-go does.
func (r *rig) grpc() *grpc.ClientConn {
	r.t.Helper()
	conn, err := grpc.NewClient(r.address, grpc.WithTransportCredentials(credentials.NewTLS(r.tls)))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// raw connects without a word.
func (r *rig) raw() *tls.Conn {
	r.t.Helper()
	conn, err := tls.Dial("tcp", r.address, r.tls)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// goAway reads until the connection ends and returns the text of the door's
// last word.
func goAway(t *testing.T, conn net.Conn) string {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(conn)
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		t.Fatal("the connection goes on")
	}
	for {
		f, n, err := grpcwire.Next(b)
		if err != nil || n == 0 {
			return ""
		}
		if f.Type == grpcwire.TypeGoAway {
			return string(f.Payload[8:])
		}
		b = b[n:]
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

var streamDesc = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

func open(t *testing.T, conn *grpc.ClientConn) grpc.ClientStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	s, err := conn.NewStream(ctx, streamDesc, method)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func say(t *testing.T, s grpc.ClientStream, word string) (string, error) {
	t.Helper()
	if err := s.SendMsg(wrapperspb.String(word)); err != nil {
		t.Fatal(err)
	}
	m := &wrapperspb.StringValue{}
	err := s.RecvMsg(m)
	return m.GetValue(), err
}

// TestServesGRPC talks to the door with grpc-go: sessions, their ends, unary
// calls, and what there is not.
func TestServesGRPC(t *testing.T) {
	r := newRig(t, door.Limits{})
	conn := r.grpc()
	s := open(t, conn)
	for _, word := range []string{"", "hello", strings.Repeat("long ", 2000)} {
		if got, err := say(t, s, word); got != word || err != nil {
			t.Fatalf("said %.20q, heard %.20q, %v", word, got, err)
		}
	}
	// A second session on the connection, and calls beside the first.
	second := open(t, conn)
	if err := second.RecvMsg(&wrapperspb.StringValue{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("second session: %v", err)
	}
	m := &wrapperspb.StringValue{}
	if err := conn.Invoke(t.Context(), "/test.Echo/Call", wrapperspb.String("word"), m); err != nil || m.GetValue() != "word" {
		t.Errorf("call: %q, %v", m.GetValue(), err)
	}
	if err := conn.Invoke(t.Context(), "/test.Echo/Probe", wrapperspb.String(""), m); status.Code(err) != codes.Unimplemented {
		t.Errorf("unknown method: %v", err)
	}
	if err := conn.Invoke(t.Context(), "/test.Echo/Call", wrapperspb.String("panic"), m); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "secret") {
		t.Errorf("panic in a call: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := conn.Invoke(ctx, "/test.Echo/Call", wrapperspb.String("wait"), m); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("call that takes too long: %v", err)
	}
	if got, err := say(t, s, "still here"); got != "still here" || err != nil {
		t.Errorf("heard %q, %v", got, err)
	}
	if _, err := say(t, s, "refuse"); status.Code(err) != codes.PermissionDenied || status.Convert(err).Message() != "refused: 100 % ü" {
		t.Errorf("refused session: %v", err)
	}
	for word, want := range map[string]codes.Code{"panic": codes.Internal, "end": codes.OK} {
		_, err := say(t, open(t, conn), word)
		if errors.Is(err, io.EOF) {
			err = nil
		}
		if status.Code(err) != want {
			t.Errorf("%s: %v", word, err)
		}
	}
	// The client ends it, in either way.
	s = open(t, conn)
	if _, err := say(t, s, "x"); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := s.RecvMsg(m); !errors.Is(err, io.EOF) {
		t.Errorf("after the client's end: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	if s, err := conn.NewStream(ctx, streamDesc, method); err != nil {
		t.Fatal(err)
	} else if _, err := say(t, s, "x"); err != nil {
		t.Fatal(err)
	}
	cancel()
	eventually(t, "all five sessions are closed", func() bool { return r.closed.Load() == 5 })
}

func TestStop(t *testing.T) {
	r := newRig(t, door.Limits{})
	s := open(t, r.grpc())
	if _, err := say(t, s, "x"); err != nil {
		t.Fatal(err)
	}
	idle := r.raw()
	if _, err := grpcwire.NewClient(idle, "https", r.address); err != nil {
		t.Fatal(err)
	}
	// Whoever is still being greeted is not told. The answer to its settings
	// shows that it was.
	for answered := false; !answered; {
		var head [grpcwire.HeaderSize]byte
		if _, err := io.ReadFull(idle, head[:]); err != nil {
			t.Fatal(err)
		}
		f, size := grpcwire.ParseHeader(head)
		if _, err := io.CopyN(io.Discard, idle, int64(size)); err != nil {
			t.Fatal(err)
		}
		answered = f.Type == grpcwire.TypeSettings && f.Has(grpcwire.FlagAck)
	}
	eventually(t, "two connections", func() bool { return r.door.Len() == 2 })
	r.stop()
	if r.closed.Load() != 1 {
		t.Error("the session was not closed")
	}
	if err := s.RecvMsg(&wrapperspb.StringValue{}); status.Code(err) != codes.Unavailable {
		t.Errorf("session ended with %v", err)
	}
	if text := goAway(t, idle); text != "the controller stops" {
		t.Errorf("last word %q", text)
	}
	if n := r.door.Len(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
}

// TestLastWord has peers that are gone right after what they say, with and
// without a goodbye of TLS: their end is seen though it may come as one event
// with what they said.
func TestLastWord(t *testing.T) {
	r := newRig(t, door.Limits{})
	word, err := proto.Marshal(wrapperspb.String("bye"))
	if err != nil {
		t.Fatal(err)
	}
	const peers = 60
	for i := range peers {
		conn := r.raw()
		c, err := grpcwire.NewClient(conn, "https", r.address)
		if err != nil {
			t.Fatal(err)
		}
		stream, err := c.Open(method)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Send(stream, word, false); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Recv(); err != nil { // the session is open
			t.Fatal(err)
		}
		if err := c.Send(stream, word, false); err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			_ = conn.NetConn().Close() // as an agent that is killed
		} else {
			_ = conn.Close() // it is the test's to see what comes of it
		}
	}
	eventually(t, "the ends of all are seen", func() bool { return r.closed.Load() == peers && r.door.Len() == 0 })
}

// TestBadPeers: who breaks the rules or takes too much is told so and closed,
// and nobody else notices.
func TestBadPeers(t *testing.T) {
	// Who is good does its handshake within the same time.
	r := newRig(t, door.Limits{Handshake: 5 * time.Second, Frames: 20, Bytes: 10_000})
	good := open(t, r.grpc())
	settings := grpcwire.AppendSettings([]byte(grpcwire.Preface), grpcwire.Settings{})
	with := func(b []byte) []byte { return append(append([]byte(nil), settings...), b...) }
	request := grpcwire.RequestBlock("https", "x", method)
	var pings, many []byte
	for range 1000 {
		pings = grpcwire.AppendPing(pings, false, [8]byte{})
	}
	for range 20 {
		many = append(many, grpcwire.AppendData(nil, 1, make([]byte, 10_000), false)...)
	}
	peers := map[string]struct {
		say  []byte
		want string // in the last word; empty: there is none
	}{
		"another protocol":   {[]byte("GET / HTTP/1.1\r\n\r\n"), "no preface"},
		"nothing":            {nil, ""},
		"half a preface":     {[]byte(grpcwire.Preface[:10]), ""},
		"only settings":      {settings, ""},
		"a huge frame":       {with(grpcwire.AppendHeader(nil, 1<<20, grpcwire.TypeData, 0, 1)), "frame of 1048576 bytes"},
		"data of no stream":  {with(grpcwire.AppendData(nil, 7, nil, false)), "data of stream 7"},
		"an even stream":     {with(grpcwire.AppendHeaders(nil, 2, request, false)), "stream 2 after 0"},
		"an old stream":      {with(grpcwire.AppendHeaders(grpcwire.AppendHeaders(nil, 5, request, false), 3, request, false)), "stream 3 after 5"},
		"bad headers":        {with(grpcwire.AppendHeaders(nil, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff}, false)), "headers:"},
		"endless headers":    {with(append(grpcwire.AppendHeader(nil, len(request), grpcwire.TypeHeaders, 0, 1), request...)), "several frames"},
		"a continuation":     {with(grpcwire.AppendHeader(nil, 0, grpcwire.TypeContinuation, 0, 1)), "type 9"},
		"a window of 4 GiB":  {with(grpcwire.AppendWindowUpdate(grpcwire.AppendWindowUpdate(nil, 0, grpcwire.MaxWindow), 0, grpcwire.MaxWindow)), "2 GiB"},
		"a window of 0":      {with(grpcwire.AppendWindowUpdate(nil, 0, 0)), "by nothing"},
		"a flood of pings":   {with(pings), "too many frames"},
		"too much data":      {with(append(grpcwire.AppendHeaders(nil, 1, request, false), many...)), "too many bytes"},
		"a ping of no size":  {with(grpcwire.AppendHeader(nil, 0, grpcwire.TypePing, 0, 0)), "ping of 0"},
		"settings of 5 byte": {with(append(grpcwire.AppendHeader(nil, 5, grpcwire.TypeSettings, 0, 0), 0, 0, 0, 0, 0)), "settings"},
	}
	t.Run("all", func(t *testing.T) { // ends when all have ended
		for name, c := range peers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				conn := r.raw()
				_, err := conn.Write(c.say)
				text := goAway(t, conn)
				if len(c.say) > 5000 && (err != nil || text == "") {
					return // who still sends when it is closed may not hear the last word
				}
				if err != nil || !strings.Contains(text, c.want) || c.want == "" && text != "" {
					t.Errorf("last word %q, want %q; %v", text, c.want, err)
				}
			})
		}
	})
	if got, err := say(t, good, "well"); got != "well" || err != nil {
		t.Errorf("the good one hears %q, %v", got, err)
	}
	eventually(t, "only the good one is left", func() bool { return r.door.Len() == 1 })
}

// TestBadMessages end their stream and not the connection.
func TestBadMessages(t *testing.T) {
	r := newRig(t, door.Limits{Message: 1000})
	conn := r.raw()
	client, err := grpcwire.NewClient(conn, "https", "x")
	if err != nil {
		t.Fatal(err)
	}
	ended := func(stream uint32) codes.Code {
		for {
			e, err := client.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if e.Stream == stream && e.End != nil {
				return status.Code(e.End)
			}
		}
	}
	for name, c := range map[string]struct {
		say  []byte
		want codes.Code
	}{
		"too large":    {make([]byte, 2000), codes.ResourceExhausted},
		"not protobuf": {[]byte{0xff}, codes.InvalidArgument},
	} {
		stream, err := client.Open(method)
		if err != nil {
			t.Fatal(err)
		}
		if err := client.Send(stream, c.say, false); err != nil {
			t.Fatal(err)
		}
		if code := ended(stream); code != c.want {
			t.Errorf("%s: ended with %v", name, code)
		}
	}
	// Streams are few.
	var last uint32
	for range 5 {
		if last, err = client.Open("/test.Echo/Call"); err != nil {
			t.Fatal(err)
		}
	}
	if code := ended(last); code != codes.Unavailable {
		t.Errorf("one stream too many ended with %v", code)
	}
}

// TestStalledPeer: a peer that doesn't read is sent what its window allows, and
// the sender is never held up; when it reads again, it is told.
func TestStalledPeer(t *testing.T) {
	r := newRig(t, door.Limits{})
	conn := r.raw()
	stalled, err := grpcwire.NewClient(conn, "https", "x")
	if err != nil {
		t.Fatal(err)
	}
	stream, err := stalled.Open(method)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has a session", func() bool { return r.session() != nil })
	s := r.session()
	text := wrapperspb.String(strings.Repeat("x", 1000))
	sent := 0
	for s.stream.Ready() {
		if err := s.stream.Send(text); err != nil {
			t.Fatal(err)
		}
		if sent++; sent > 1000 {
			t.Fatal("there is no end to what is sent")
		}
	}
	if err := s.stream.Send(text); !errors.Is(err, grpcwire.ErrBlocked) {
		t.Errorf("beyond the window: %v", err)
	}
	if size := sent * 1000; size < 40_000 || size > grpcwire.InitialWindow {
		t.Errorf("%d bytes were sent into a window of %d", size, grpcwire.InitialWindow)
	}
	// Somebody else is served.
	if got, err := say(t, open(t, r.grpc()), "x"); got != "x" || err != nil {
		t.Errorf("heard %q, %v", got, err)
	}
	if s.writable.Load() != 0 {
		t.Error("it was told that it could send")
	}
	for range sent {
		if e, err := stalled.Recv(); err != nil || e.Stream != stream || e.End != nil {
			t.Fatalf("received %v, %v", e, err)
		}
	}
	eventually(t, "it is told that it can send", func() bool { return s.writable.Load() == 1 && s.stream.Ready() })
}

// TestFleet075: a peer that says nothing is pinged, and closed if it doesn't
// answer; one that answers stays.
func TestFleet075(t *testing.T) {
	const idle = 2 * time.Second // in which an answer to a ping comes back on any machine
	r := newRig(t, door.Limits{Idle: idle})
	good := open(t, r.grpc())
	if _, err := say(t, good, "x"); err != nil {
		t.Fatal(err)
	}
	silent := r.raw()
	if _, err := silent.Write(grpcwire.AppendHeaders(grpcwire.AppendSettings([]byte(grpcwire.Preface), grpcwire.Settings{}), 1, grpcwire.RequestBlock("https", "x", method), false)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has a session", func() bool { return r.door.Len() == 2 })
	eventually(t, "the silent one is closed", func() bool { return r.closed.Load() == 1 && r.door.Len() == 1 })
	time.Sleep(3 * idle) // some pings more
	if got, err := say(t, good, "x"); got != "x" || err != nil {
		t.Errorf("the one that answers pings hears %q, %v", got, err)
	}
}

// TestRoom: a connection beyond the room is closed at once, and those within
// are let in one after another.
func TestRoom(t *testing.T) {
	r := newRig(t, door.Limits{Rate: 10, Wait: 500 * time.Millisecond, Handshake: time.Minute}) // room for 5
	const n = 300                                                                               // more than come in while they come, however slowly
	var in, out atomic.Int64
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			conn, err := tls.Dial("tcp", r.address, r.tls)
			if err != nil {
				out.Add(1)
				return
			}
			in.Add(1)
			_ = conn.Close()
		})
	}
	wg.Wait()
	if in.Load() < 5 || in.Load() == n || uint64(out.Load()) != r.door.Refused() {
		t.Errorf("%d came in, %d did not, the door refused %d", in.Load(), out.Load(), r.door.Refused())
	}
	// It is not full for ever.
	eventually(t, "all are gone", func() bool { return r.door.Len() == 0 })
	if got, err := say(t, open(t, r.grpc()), "x"); got != "x" || err != nil {
		t.Errorf("later: heard %q, %v", got, err)
	}
}

func TestBucket(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	b := door.NewBucket(10, 5)
	for i := range 5 {
		if wait, ok := b.Take(now, 1); !ok {
			t.Fatalf("token %d is missing for %v", i, wait)
		}
	}
	if wait, ok := b.Take(now, 1); ok || wait != 100*time.Millisecond {
		t.Errorf("beyond the burst: %t, wait %v", ok, wait)
	}
	if _, ok := b.Take(now.Add(-time.Hour), 1); ok {
		t.Error("a clock that goes back gives tokens")
	}
	taken := 0
	for end := now.Add(time.Hour); now.Before(end); now = now.Add(time.Millisecond) {
		if _, ok := b.Take(now, 1); ok {
			taken++
		}
	}
	if taken < 35_990 || taken > 36_010 {
		t.Errorf("%d tokens in an hour at 10 a second", taken)
	}
}
