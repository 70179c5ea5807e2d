package ctl_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// noon is now in every test.
var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(noon.Add(-d)) }

// fleet is a controller's operators' door with a small fleet behind it.
type fleet struct {
	pb.UnimplementedPlanServiceServer
	pb.UnimplementedSubscriberServiceServer
	pb.UnimplementedRouterServiceServer
	pb.UnimplementedTelemetryServiceServer
	pb.UnimplementedTokenServiceServer
	pb.UnimplementedJoinServiceServer

	mu          sync.Mutex
	clock       time.Time // that answers say; zero: none
	revision    int64
	plans       []*pb.Plan
	stale       *pb.Plan // what GetPlan gives, if set: the store is ahead of it
	subscribers []*pb.Subscriber
	routers     []*pb.Router
	polls       int          // listings since the last change
	settle      func(*fleet) // what the routers do while they are asked for
	imported    *pb.ImportSubscribersRequest
	csv         []byte
	importing   *pb.ImportSubscribersResponse
	report      *pb.GetRouterStatsResponse
	schedules   schedules
	rollouts    rollouts
	admin       admin
	approved    *pb.ApproveRequest
	announced   []*pb.ProvisionedRouter
}

func (f *fleet) GetPlan(_ context.Context, r *pb.GetPlanRequest) (*pb.GetPlanResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stale != nil {
		return &pb.GetPlanResponse{Plan: f.stale}, nil
	}
	for _, p := range f.plans {
		if p.Name == r.Name {
			return &pb.GetPlanResponse{Plan: p}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "plan %s does not exist", r.Name)
}

// ListPlans has one plan on each page.
func (f *fleet) ListPlans(_ context.Context, r *pb.ListPlansRequest) (*pb.ListPlansResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, p := range f.plans {
		if r.PageToken == "" || r.PageToken == p.Name {
			resp := &pb.ListPlansResponse{Plans: []*pb.Plan{p}}
			if i+1 < len(f.plans) {
				resp.NextPageToken = f.plans[i+1].Name
			}
			return resp, nil
		}
	}
	return &pb.ListPlansResponse{}, nil
}

func (f *fleet) UpdatePlan(_ context.Context, r *pb.UpdatePlanRequest) (*pb.UpdatePlanResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := -1
	for i, p := range f.plans {
		if p.Name == r.Plan.Name {
			at = i
		}
	}
	switch {
	case at < 0 && !r.AllowMissing:
		return nil, status.Errorf(codes.NotFound, "plan %s does not exist", r.Plan.Name)
	case at >= 0 && r.Plan.Revision != 0 && r.Plan.Revision != f.plans[at].Revision:
		return nil, status.Errorf(codes.Aborted, "plan %s has revision %d", r.Plan.Name, f.plans[at].Revision)
	}
	resp := &pb.UpdatePlanResponse{Plan: r.Plan, Changed: true}
	if at >= 0 {
		was, _ := wire.ToPlan(f.plans[at])
		is, _ := wire.ToPlan(r.Plan)
		resp.Changed = was.Link != is.Link
	}
	for _, router := range f.routers {
		if router.Plan == r.Plan.Name && resp.Changed {
			resp.AffectedRouters++
		}
	}
	if r.ValidateOnly || !resp.Changed {
		return resp, nil
	}
	f.revision++
	r.Plan.Revision, r.Plan.UpdateTime = f.revision, before(0)
	if at < 0 {
		f.plans = append(f.plans, r.Plan)
	} else {
		f.plans[at] = r.Plan
	}
	f.polls = 0
	for _, router := range f.routers {
		if router.Plan == r.Plan.Name {
			router.Session.Sync = pb.SyncState_SYNC_STATE_PENDING
		}
	}
	return resp, nil
}

// inUse is how a controller refuses to delete what a kind of things uses.
func inUse(kind, format string, args ...any) error {
	s, err := status.Newf(codes.FailedPrecondition, format, args...).WithDetails(
		&errdetails.ErrorInfo{Reason: "IN_USE", Metadata: map[string]string{"used_by": kind}})
	if err != nil {
		return err
	}
	return s.Err()
}

func (f *fleet) DeletePlan(_ context.Context, r *pb.DeletePlanRequest) (*pb.DeletePlanResponse, error) {
	n := uint32(0)
	for _, s := range f.subscribers {
		if s.Plan == r.Name {
			n++
		}
	}
	if n > 0 && r.Replacement == "" {
		return nil, inUse("subscriber", "plan %s: %d subscribers have it", r.Name, n)
	}
	if r.Name == "night" {
		return nil, inUse("schedule", "plan night: in use by 1 schedule, such as weekend")
	}
	return &pb.DeletePlanResponse{MovedSubscribers: n}, nil
}

func (f *fleet) GetSubscriber(_ context.Context, r *pb.GetSubscriberRequest) (*pb.GetSubscriberResponse, error) {
	for _, s := range f.subscribers {
		if s.Id == r.Id {
			return &pb.GetSubscriberResponse{Subscriber: s}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "subscriber %s does not exist", r.Id)
}

func (f *fleet) ListSubscribers(_ context.Context, r *pb.ListSubscribersRequest) (*pb.ListSubscribersResponse, error) {
	resp := &pb.ListSubscribersResponse{}
	for _, s := range f.subscribers {
		if r.Plan == "" || r.Plan == s.Plan {
			resp.Subscribers = append(resp.Subscribers, s)
		}
	}
	return resp, nil
}

func (f *fleet) UpdateSubscriber(_ context.Context, r *pb.UpdateSubscriberRequest) (*pb.UpdateSubscriberResponse, error) {
	f.revision++
	s := r.Subscriber
	s.Revision, s.UpdateTime = f.revision, before(0)
	for _, router := range f.routers {
		if router.Subscriber == s.Id {
			s.Routers = append(s.Routers, router.Id)
		}
	}
	return &pb.UpdateSubscriberResponse{Subscriber: s, Changed: true}, nil
}

func (f *fleet) DeleteSubscriber(_ context.Context, r *pb.DeleteSubscriberRequest) (*pb.DeleteSubscriberResponse, error) {
	return nil, status.Errorf(codes.FailedPrecondition, "subscriber %s: router home-1 serves it", r.Id)
}

func (f *fleet) ImportSubscribers(stream pb.SubscriberService_ImportSubscribersServer) error {
	f.csv, f.imported = nil, nil
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(f.importing)
		}
		if err != nil {
			return err
		}
		if f.imported == nil {
			f.imported = m
		}
		f.csv = append(f.csv, m.Chunk...)
	}
}

func (f *fleet) GetRouter(_ context.Context, r *pb.GetRouterRequest) (*pb.GetRouterResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, router := range f.routers {
		if router.Id == r.Id {
			return &pb.GetRouterResponse{Router: router}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "router %s does not exist", r.Id)
}

func (f *fleet) ListRouters(_ context.Context, r *pb.ListRoutersRequest) (*pb.ListRoutersResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &pb.ListRoutersResponse{}
	for _, router := range f.routers {
		if (r.Plan == "" || r.Plan == router.Plan) && (r.Sync == 0 || r.Sync == router.Session.Sync) {
			resp.Routers = append(resp.Routers, router)
		}
	}
	f.polls++
	if f.settle != nil {
		f.settle(f)
	}
	return resp, nil
}

func (f *fleet) UpdateRouter(_ context.Context, r *pb.UpdateRouterRequest) (*pb.UpdateRouterResponse, error) {
	f.revision++
	return &pb.UpdateRouterResponse{Router: &pb.Router{Id: r.Router.Id, Subscriber: r.Router.Subscriber, Revision: f.revision}}, nil
}

func (f *fleet) DeleteRouter(context.Context, *pb.DeleteRouterRequest) (*pb.DeleteRouterResponse, error) {
	return &pb.DeleteRouterResponse{}, nil
}

func (f *fleet) CreateToken(_ context.Context, r *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	return &pb.CreateTokenResponse{
		Token:  &pb.Token{Id: "abcdefghij", RouterId: r.RouterId, Subscriber: r.Subscriber, ExpireTime: timestamppb.New(noon.Add(r.Ttl.AsDuration()))},
		Secret: "cf1.abcdefghij.SECRET.PIN",
	}, nil
}

func (f *fleet) ListTokens(context.Context, *pb.ListTokensRequest) (*pb.ListTokensResponse, error) {
	return &pb.ListTokensResponse{Tokens: []*pb.Token{{Id: "abcdefghij", RouterId: "home-9", ExpireTime: before(-23 * time.Hour)}}}, nil
}

func (f *fleet) DeleteToken(context.Context, *pb.DeleteTokenRequest) (*pb.DeleteTokenResponse, error) {
	return &pb.DeleteTokenResponse{}, nil
}

func (f *fleet) GetRouterStats(_ context.Context, r *pb.GetRouterStatsRequest) (*pb.GetRouterStatsResponse, error) {
	if f.report == nil || r.RouterId != "home-1" {
		return nil, status.Errorf(codes.NotFound, "router %s has not reported", r.RouterId)
	}
	return f.report, nil
}

func (f *fleet) ListPlanStats(context.Context, *pb.ListPlanStatsRequest) (*pb.ListPlanStatsResponse, error) {
	var h engine.Histogram
	for range 100 {
		h.Observe(2 * time.Millisecond)
	}
	return &pb.ListPlanStatsResponse{Plans: []*pb.PlanStats{
		{
			Plan: "gold", Routers: 3, Connected: 2, InSync: 1,
			Down: &pb.DirectionSums{SentBytes: 123456789, SentPackets: 100000, Drops: 12, Marks: 345, RateBps: 229_800_000, CapacityBps: 345_000_000, Sojourn: wire.FromHistogram(&h)},
			Up:   &pb.DirectionSums{SentBytes: 999, SentPackets: 10, CapacityBps: 36_000_000},
		},
		{Routers: 1, Down: &pb.DirectionSums{}, Up: &pb.DirectionSums{}},
	}}, nil
}

// link returns a link with rates.
func link(down, up engine.BitsPerSecond) plan.Link {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = down, up
	l.Down.Tins, l.Up.Tins = engine.Diffserv4, engine.Diffserv4
	return l
}

// newFleet has two plans and four routers: one that runs what it should, one
// that refused it, one that runs something near it and one that is away.
func newFleet() *fleet {
	gold, old := link(115e6, 12e6), link(50e6, 10e6)
	near := gold
	near.Down.MemoryLimit = 4 << 20
	f := &fleet{revision: 120}
	f.plans = []*pb.Plan{
		{Name: "bronze", Link: wire.FromLink(new(link(20e6, 5e6))), Revision: 100, UpdateTime: before(75 * time.Hour)},
		{Name: "gold", Link: wire.FromLink(&gold), Revision: 118, UpdateTime: before(3 * time.Minute), Subscribers: 4, Routers: 4},
	}
	desired := func() *pb.DesiredState {
		return &pb.DesiredState{Revision: 118, Hash: gold.Hash(), Link: wire.FromLink(&gold), Since: before(3 * time.Minute)}
	}
	session := func(sync pb.SyncState) *pb.SessionState {
		return &pb.SessionState{Connected: true, Since: before(49 * time.Hour), LastSeen: before(2 * time.Second), Peer: "192.0.2.7:41000", AgentVersion: "0.1.0", Model: "Archer C7 v2", BootId: "0011223344556677", Dataplane: "userspace", Sync: sync}
	}
	for i, id := range []string{"home-1", "home-2", "home-3", "home-4"} {
		r := &pb.Router{Id: id, Subscriber: fmt.Sprint(10001 + i), Plan: "gold", Revision: int64(101 + i), Desired: desired()}
		switch i {
		case 0:
			r.Session = session(pb.SyncState_SYNC_STATE_IN_SYNC)
			r.Reported = &pb.ReportedState{AppliedRevision: 118, AppliedHash: gold.Hash(), EffectiveHash: gold.Hash(), Effective: wire.FromLink(&gold), Outcome: pb.Outcome_OUTCOME_APPLIED, ReceivedTime: before(179 * time.Second)}
		case 1:
			r.Session = session(pb.SyncState_SYNC_STATE_REJECTED)
			r.Reported = &pb.ReportedState{
				AppliedRevision: 90, AppliedHash: old.Hash(), EffectiveHash: old.Hash(), Effective: wire.FromLink(&old), Outcome: pb.Outcome_OUTCOME_REJECTED, RejectedRevision: 118, Error: "down.rate: 115Mbit is above the 100Mbit that this router can shape (--max-rate)", ReceivedTime: before(179 * time.Second),
				Conditions: []*pb.Condition{{Type: "ClockOK", Reason: "Behind", Message: "the router's clock is behind a time that is known to have passed"}, {Type: "Degraded"}, {Type: "StateSaved", Status: true}, {Type: "InterfaceUp", Status: true}, {Type: "Crashed", Status: true, Reason: "OutOfMemory", Message: "the agent has ended by itself and was started again: the router ran out of memory, and the kernel killed it or another program"}},
			}
		case 2:
			r.Session = session(pb.SyncState_SYNC_STATE_CLAMPED)
			r.Reported = &pb.ReportedState{
				AppliedRevision: 118, AppliedHash: gold.Hash(), EffectiveHash: near.Hash(), Effective: wire.FromLink(&near), Outcome: pb.Outcome_OUTCOME_CLAMPED, ReceivedTime: before(179 * time.Second),
				Clamps: []*pb.Clamp{{Field: "down.memory_limit", Desired: "auto", Effective: "4Mb", Reason: "the router has 128 MB"}},
			}
		case 3:
			r.Session = &pb.SessionState{Since: before(5 * time.Hour), LastSeen: before(5 * time.Hour), Sync: pb.SyncState_SYNC_STATE_OFFLINE}
		}
		f.routers = append(f.routers, r)
		f.subscribers = append(f.subscribers, &pb.Subscriber{Id: r.Subscriber, Plan: "gold", Labels: map[string]string{"site": "north", "ap": "7"}, Revision: int64(50 + i), UpdateTime: before(72 * time.Hour), Routers: []string{id}})
	}
	st := engine.Stats{Config: gold.Down, SentBytes: 1234567, SentPackets: 1000, Drops: 3, Overlimits: 77, MemoryUsed: 123456, MemoryLimit: 5 << 20, Capacity: 115e6, MinNetLen: 40, MaxNetLen: 1500, MinAdjLen: 54, MaxAdjLen: 1514, AvgNetOff: 14, NumTins: 4}
	st.Tins[1].Packets, st.Tins[1].Bytes = 1003, 1239109
	f.report = &pb.GetRouterStatsResponse{
		Report: wire.FromReport(&plan.Report{
			Sequence: 7, BootID: "0011223344556677", Uptime: 49 * time.Hour, Down: &st,
			Agent: plan.AgentStats{CPUTime: 200 * time.Second, ResidentBytes: 13_100_000, BypassedPackets: 2, BatchSizeMilli: 2430},
		}),
		ReceivedTime: before(2 * time.Second), Connected: true,
	}
	return f
}

// serve starts the fleet and returns its address and an operator's credentials.
func (f *fleet) serve(t *testing.T) (address, credentialsFile string) {
	t.Helper()
	ca := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serverDER, serverKey := ca.issue(t, "cakefleet-controller")
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{serverDER}, PrivateKey: serverKey}},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    roots,
	})), grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if !f.clock.IsZero() {
			if err := grpc.SetHeader(ctx, metadata.Pairs("cakefleet-clock", f.clock.Format(time.RFC3339Nano))); err != nil {
				return nil, err
			}
		}
		return handler(ctx, req)
	}))
	pb.RegisterPlanServiceServer(s, f)
	pb.RegisterSubscriberServiceServer(s, f)
	pb.RegisterRouterServiceServer(s, f)
	pb.RegisterTelemetryServiceServer(s, f)
	pb.RegisterTokenServiceServer(s, f)
	pb.RegisterScheduleServiceServer(s, &f.schedules)
	pb.RegisterRolloutServiceServer(s, &f.rollouts)
	pb.RegisterAdminServiceServer(s, &f.admin)
	pb.RegisterJoinServiceServer(s, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String(), ca.credentials(t)
}

type authority struct {
	cert *x509.Certificate
	key  ed25519.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "fleet"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, c, c, pub, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

func (a *authority) issue(t *testing.T, name string) ([]byte, ed25519.PrivateKey) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, pub, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return der, key
}

// credentials writes what a controller writes for its operator.
func (a *authority) credentials(t *testing.T) string {
	t.Helper()
	der, key := a.issue(t, "operator")
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	for _, block := range []*pem.Block{{Type: "CERTIFICATE", Bytes: der}, {Type: "PRIVATE KEY", Bytes: keyDER}, {Type: "CERTIFICATE", Bytes: a.cert.Raw}} {
		b = append(b, pem.EncodeToMemory(block)...)
	}
	path := filepath.Join(t.TempDir(), "operator.pem")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
