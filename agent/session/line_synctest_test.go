package session

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// line is a session to a controller of gRPC over a line whose time is not real.
type line struct {
	pb.UnimplementedSessionServiceServer

	every   time.Duration // between two reports
	late    func() time.Duration
	read    chan struct{} // closed: the controller reads
	streams atomic.Int64  // that began

	mu      sync.Mutex
	reports int        // guarded by mu
	last    *pb.Report // guarded by mu
	ended   []error    // guarded by mu
}

// Connect takes what comes, from when it may read.
func (l *line) Connect(stream pb.SessionService_ConnectServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	l.streams.Add(1)
	if err := stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Settings{Settings: &pb.Settings{ReportInterval: durationpb.New(l.every)}}}); err != nil {
		return err
	}
	select {
	case <-l.read:
	case <-stream.Context().Done():
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if r := m.GetReport(); r != nil {
			l.mu.Lock()
			l.reports, l.last = l.reports+1, r
			l.mu.Unlock()
		}
	}
}

func (l *line) heard() (reports int, last *pb.Report, ended []error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reports, l.last, l.ended
}

// lateConn is one end of a line on which what is written arrives in order and
// later.
type lateConn struct {
	net.Conn
	late  func() time.Duration
	queue chan packet
	done  chan struct{}
	once  sync.Once
}

type packet struct {
	at time.Time
	b  []byte
}

func newLateConn(c net.Conn, late func() time.Duration) *lateConn {
	l := &lateConn{Conn: c, late: late, queue: make(chan packet, 10_000), done: make(chan struct{})}
	go func() {
		for {
			select {
			case <-l.done:
				return
			case p := <-l.queue:
				select {
				case <-l.done:
					return
				case <-time.After(time.Until(p.at)):
				}
				if _, err := l.Conn.Write(p.b); err != nil {
					return
				}
			}
		}
	}()
	return l
}

func (l *lateConn) Write(b []byte) (int, error) {
	select {
	case l.queue <- packet{time.Now().Add(l.late()), append([]byte(nil), b...)}:
		return len(b), nil
	case <-l.done:
		return 0, net.ErrClosed
	}
}

func (l *lateConn) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Conn.Close()
}

// run keeps a session over the line while fn runs.
func (l *line) run(t *testing.T, fn func(*outbox.Outbox)) {
	authority := sessiontest.NewAuthority(t, time.Now().Add(-time.Hour))
	roots := x509.NewCertPool()
	roots.AddCert(authority.Certificate)
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	router := authority.Router(t, "r1", pub, time.Now().Add(-time.Hour), 24*time.Hour)
	server := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{authority.Server(t, time.Now().Add(-time.Hour))}})),
		grpc.StaticStreamWindowSize(64<<10), grpc.StaticConnWindowSize(64<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 30 * time.Second}), // as the door
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)
	pb.RegisterSessionServiceServer(server, l)
	listener := bufconn.Listen(64 << 10)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })

	out := outbox.New()
	sequence := uint64(0)
	s := New(Config{
		Address: "controller:1", Jitter: rand.New(rand.NewPCG(1, 2)),
		TLS: &tls.Config{
			MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "cakefleet-controller",
			Certificates: []tls.Certificate{{Certificate: [][]byte{router.Raw}, PrivateKey: key}},
		},
		Hello:  Hello{RouterID: "r1", BootID: "b", Dataplane: func() string { return "fake" }},
		Outbox: out, Status: func() plan.Status { return plan.Status{} }, Deliver: func(Push) {}, Reached: func(time.Time) {},
		Report: func() *plan.Report {
			sequence++
			return &plan.Report{Sequence: sequence, BootID: "b", Agent: plan.AgentStats{SkippedReports: out.Skipped()}}
		},
		Ended: func(_ context.Context, err error) bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.ended = append(l.ended, err)
			return false
		},
	})
	s.options = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		c, err := listener.DialContext(ctx)
		if err != nil || l.late == nil {
			return c, err
		}
		return newLateConn(c, l.late), nil
	})}
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	fn(out)
	cancel()
	server.Stop()
	wg.Wait()
}

// fleet.md 72: ten minutes on a line that loses 2 % of the packets. What was
// lost arrives late, by as much as TCP takes to send it again, and that is no
// reason for another session; silence is.
func TestFleet072_LossIsNoReasonToReconnect(t *testing.T) {
	open := make(chan struct{})
	close(open)
	const life = 10 * time.Minute
	t.Run("loss", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			random, lost := rand.New(rand.NewPCG(72, 72)), 0
			var mu sync.Mutex
			l := &line{every: time.Second, read: open, late: func() time.Duration {
				mu.Lock()
				defer mu.Unlock()
				late := 20 * time.Millisecond
				for again := 200 * time.Millisecond; random.IntN(100) < 2; again *= 2 {
					lost++
					late += again
				}
				return late
			}}
			l.run(t, func(*outbox.Outbox) {
				time.Sleep(life)
				synctest.Wait()
				reports, _, ended := l.heard()
				if l.streams.Load() != 1 || len(ended) != 0 {
					t.Errorf("%d sessions, ended with %v", l.streams.Load(), ended)
				}
				mu.Lock()
				defer mu.Unlock()
				if reports < 550 || lost < 5 {
					t.Errorf("%d reports came, %d packets were lost", reports, lost)
				}
			})
		})
	})
	t.Run("silence", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			l := &line{every: time.Second, read: open, late: func() time.Duration {
				if since := time.Since(began); since > life/2 && since < life/2+40*time.Second {
					return time.Minute
				}
				return 20 * time.Millisecond
			}}
			l.run(t, func(*outbox.Outbox) {
				time.Sleep(life)
				synctest.Wait()
				if n := l.streams.Load(); n != 2 {
					t.Errorf("%d sessions after 40 s of silence, want 2", n)
				}
			})
		})
	})
}

// fleet.md 74: the controller reads nothing for a minute. The agent keeps no
// more than the windows hold, leaves out what came due meanwhile, counts that,
// and says so.
func TestFleet074_ControllerReadsSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &line{every: time.Millisecond, read: make(chan struct{})}
		l.run(t, func(out *outbox.Outbox) {
			heap := func() int64 {
				runtime.GC()
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return int64(m.HeapAlloc)
			}
			time.Sleep(30 * time.Second)
			synctest.Wait()
			before := heap()
			time.Sleep(time.Minute)
			synctest.Wait()
			if grown := heap() - before; grown > 64<<10 {
				t.Errorf("%d bytes more live after a minute", grown)
			}
			close(l.read)
			time.Sleep(time.Second)
			synctest.Wait()
			reports, last, ended := l.heard()
			if len(ended) != 0 {
				t.Errorf("ended with %v", ended)
			}
			skipped := last.GetAgent().GetSkippedReports()
			if skipped < 60_000 {
				t.Errorf("%d reports skipped, want what a minute has", skipped)
			}
			// What is neither here nor counted would be lost in silence.
			if all := uint64(reports) + skipped; all < 89_000 || all > 95_000 {
				t.Errorf("%d reports came and %d were skipped, in 91 s with one a millisecond", reports, skipped)
			}
			if last.GetSequence() != uint64(reports) {
				t.Errorf("%d reports came, the newest is %d", reports, last.GetSequence())
			}
		})
	})
}
