package api_test

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fakeStream is a stream without a network, for tests on time that is not real.
type fakeStream struct {
	grpc.ServerStream
	ctx  context.Context //nolint:containedctx // as in the stream it stands for
	in   chan *pb.ConnectRequest
	out  chan *pb.ConnectResponse
	stop context.CancelFunc
}

func (f *fixture) fakeStream(router string) *fakeStream {
	key, _ := f.key(router)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		f.t.Fatal(err)
	}
	cert := &x509.Certificate{RawSubjectPublicKeyInfo: der, URIs: []*url.URL{{Scheme: "cakefleet", Host: "router", Path: "/" + router}}}
	info := credentials.TLSInfo{State: tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{cert}}}}
	ctx, stop := context.WithCancel(peer.NewContext(f.t.Context(), &peer.Peer{AuthInfo: info}))
	return &fakeStream{ctx: ctx, stop: stop, in: make(chan *pb.ConnectRequest, 10), out: make(chan *pb.ConnectResponse, 1000)}
}

func (s *fakeStream) Context() context.Context { return s.ctx }

func (s *fakeStream) Recv() (*pb.ConnectRequest, error) {
	select {
	case m := <-s.in:
		return m, nil
	case <-s.ctx.Done():
		return nil, status.FromContextError(s.ctx.Err()).Err()
	}
}

func (s *fakeStream) Send(m *pb.ConnectResponse) error {
	s.out <- m
	return nil
}

// serve runs a session on the stream, which ends with it as gRPC's does.
func (s *fakeStream) serve(sessions *api.SessionService) <-chan error {
	ended := make(chan error, 1)
	go func() {
		defer s.stop()
		ended <- sessions.Connect(s)
	}()
	return ended
}

func newSessions(t *testing.T) (*fixture, *api.SessionService) {
	f := &fixture{t: t, keys: map[string]ed25519.PrivateKey{}}
	f.store = storetest.NewFake(t, func(c store.Change) { f.sessions.Changed(c) })
	f.sessions = api.NewSessionService(f.store, fleet.NewHub(), telemetry.New(interval), interval, hclog.NewNullLogger())
	return f, f.sessions
}

func TestSessionWithoutHello(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		began := time.Now()
		err := <-f.fakeStream("home-1").serve(sessions)
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
		ended := s.serve(sessions)
		s.in <- &pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}}
		<-s.out // settings
		first, began := (<-s.out).GetDesired(), time.Now()
		second := (<-s.out).GetDesired()
		if first.GetNonce() != 1 || second.GetNonce() != 2 || second.GetHash() != first.GetHash() || time.Since(began) != 10*time.Second {
			t.Errorf("after %v: %v, then %v", time.Since(began), first, second)
		}
		s.in <- &pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{
			Nonce: 2, Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedHash: second.GetHash(), EffectiveHash: second.GetHash(),
		}}}
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if n := len(s.out); n != 0 {
			t.Errorf("%d more messages in a day", n)
		}
		// The network goes.
		s.stop()
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("ended with %v", err)
		}
		sessions.Wait()
	})
}
