package api_test

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fakeStream is a stream without a network, for tests on time that is not real.
type fakeStream struct {
	t       *testing.T
	ctx     context.Context              //nolint:containedctx // as in the stream it stands for
	session atomic.Pointer[door.Session] // nil: refused
	out     chan *pb.ConnectResponse
	full    atomic.Bool // nothing can be sent
	ended   chan error
	end     sync.Once
}

// peerContext is the context of a call that a router makes with a key.
func peerContext(t testing.TB, key ed25519.PrivateKey, router string) context.Context {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{RawSubjectPublicKeyInfo: der, URIs: []*url.URL{{Scheme: "cakefleet", Host: "router", Path: "/" + router}}}
	info := credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{cert}}}}
	return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: info})
}

func (f *fixture) fakeStream(router string) *fakeStream {
	key, _ := f.key(router)
	ctx := peerContext(f.t, key, router)
	s := &fakeStream{t: f.t, ctx: ctx, out: make(chan *pb.ConnectResponse, 1000), ended: make(chan error, 1)}
	session, err := f.sessions.Begin(ctx, s)
	if err != nil {
		s.End(err)
		return s
	}
	s.session.Store(&session)
	return s
}

func (s *fakeStream) Ready() bool { return !s.full.Load() }

func (s *fakeStream) Send(m proto.Message) error {
	s.out <- m.(*pb.ConnectResponse)
	return nil
}

// End ends the session as the door does.
func (s *fakeStream) End(err error) {
	s.end.Do(func() {
		s.ended <- err
		if session := s.session.Load(); session != nil {
			(*session).Closed()
		}
	})
}

// say is a message of the agent.
func (s *fakeStream) say(m *pb.ConnectRequest) {
	s.t.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := (*s.session.Load()).Receive(raw); err != nil {
		s.End(err)
	}
}

func newSessions(t *testing.T) (*fixture, *api.SessionService) {
	return newSessionsWith(t, api.SessionConfig{Interval: interval})
}

func newSessionsWith(t *testing.T, c api.SessionConfig) (*fixture, *api.SessionService) {
	f := &fixture{t: t, keys: map[string]ed25519.PrivateKey{}}
	f.store = storetest.NewFake(t, func(c store.Change) { f.sessions.Changed(c) })
	hub := fleet.NewHub()
	f.sessions = api.NewSessionService(f.store, hub, telemetry.New(telemetry.Config{Interval: interval}), c, hclog.NewNullLogger())
	f.routers = api.NewRouterService(f.store, hub)
	return f, f.sessions
}

func TestSessionWithoutHello(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		began := time.Now()
		err := <-f.fakeStream("home-1").ended
		if status.Code(err) != codes.DeadlineExceeded || time.Since(began) != 10*time.Second {
			t.Errorf("ended after %v with %v", time.Since(began), err)
		}
		sessions.Wait()
	})
}

// TestFleet025 loses exactly one answer on a real session: it is asked for
// again after 10 s with a new nonce.
func TestFleet025(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 20e6)
		f.setRouter("home-1", "gold")
		s := f.fakeStream("home-1")
		s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
		<-s.out // settings
		first, began := (<-s.out).GetDesired(), time.Now()
		second := (<-s.out).GetDesired()
		if first.GetNonce() != 1 || second.GetNonce() != 2 || second.GetHash() != first.GetHash() || time.Since(began) != 10*time.Second {
			t.Errorf("after %v: %v, then %v", time.Since(began), first, second)
		}
		s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{
			Nonce: 2, Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedHash: second.GetHash(), EffectiveHash: second.GetHash(),
		}}})
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if n := len(s.out); n != 0 {
			t.Errorf("%d more messages in a day", n)
		}
		// The network goes.
		s.End(nil)
		sessions.Wait()
	})
}
