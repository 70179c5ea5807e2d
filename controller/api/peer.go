package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// peerTime is how long another controller has to answer. An operator waits.
const peerTime = 2 * time.Second

// PeerService tells other controllers what only this one knows.
type PeerService struct {
	pb.UnimplementedPeerServiceServer

	routers   *RouterService
	admin     *AdminService
	telemetry *TelemetryService // asks nobody
	rollouts  *RolloutService
}

// NewPeerService returns the service, which answers for these.
func NewPeerService(routers *RouterService, admin *AdminService, telemetry *TelemetryService, rollouts *RolloutService) *PeerService {
	return &PeerService{
		routers: routers, admin: admin, rollouts: rollouts,
		telemetry: NewTelemetryService(telemetry.store, telemetry.hub, telemetry.table, telemetry.source),
	}
}

// PeersDoor returns the options of the door that only controllers come in by.
func PeersDoor() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		p, err := caller(ctx)
		if err == nil && p.Role != identity.RoleController {
			err = fmt.Errorf("this door is for controllers, not for a %s", p.Role)
		}
		if err != nil {
			return nil, status.Error(codes.PermissionDenied, err.Error())
		}
		return handle(ctx, req)
	})}
}

// GetSessions returns what is known of the routers that are connected here.
func (s *PeerService) GetSessions(_ context.Context, req *pb.GetSessionsRequest) (*pb.GetSessionsResponse, error) {
	resp := &pb.GetSessionsResponse{}
	if len(req.GetIds()) == 0 {
		ahead, newest := s.admin.ahead()
		resp.Connected = uint32(len(s.admin.hub.Connected()))
		resp.Ahead, resp.AheadRevision = uint32(len(ahead)), int64(newest)
		resp.AheadRouters = ahead[:min(len(ahead), mostNamed)]
		resp.Clock = wire.FromTime(time.Now())
		return resp, nil
	}
	if len(req.GetIds()) > viewSize {
		return nil, status.Errorf(codes.InvalidArgument, "%d routers, at most %d are allowed", len(req.GetIds()), viewSize)
	}
	for _, id := range req.GetIds() {
		if connected, _ := s.routers.hub.Sync(id, plan.Desired{}); !connected {
			continue
		}
		m, err := s.routers.get(id)
		if err != nil {
			continue // removed a moment ago
		}
		r := s.routers.message(m)
		resp.Routers = append(resp.Routers, &pb.Router{Id: id, Reported: r.GetReported(), Session: r.GetSession()})
	}
	return resp, nil
}

// Peers asks the other controllers.
type Peers struct {
	members *lead.Members
	tls     func() *tls.Config // what is right now

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn // by address; guarded by mu
}

// NewPeers returns the other members, to be called with t.
func NewPeers(members *lead.Members, t func() *tls.Config) *Peers {
	return &Peers{members: members, tls: t, conns: map[string]*grpc.ClientConn{}}
}

// Close ends the connections.
func (p *Peers) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, c := range p.conns {
		errs = append(errs, c.Close())
	}
	p.conns = map[string]*grpc.ClientConn{}
	return errors.Join(errs...)
}

// newest makes each handshake with what is right then.
type newest struct{ tls func() *tls.Config }

// ClientHandshake does the handshake.
func (n newest) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return credentials.NewTLS(n.tls()).ClientHandshake(ctx, authority, conn)
}

// ServerHandshake is for servers.
func (n newest) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return credentials.NewTLS(n.tls()).ServerHandshake(conn)
}

// Info says what it is.
func (n newest) Info() credentials.ProtocolInfo { return credentials.NewTLS(n.tls()).Info() }

// Clone returns a copy.
func (n newest) Clone() credentials.TransportCredentials { return n }

// OverrideServerName does nothing: the name is that of the configuration.
func (n newest) OverrideServerName(string) error { return nil }

func (p *Peers) conn(address string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.conns[address]; c != nil {
		return c, nil
	}
	c, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(newest{p.tls}), grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: peerTime}))
	if err != nil {
		return nil, err
	}
	p.conns[address] = c
	return c, nil
}

// again is how soon a controller that could not be reached is tried again: it
// is asked all the time, and should answer soon after it has come back.
var again = backoff.Config{BaseDelay: time.Second, Multiplier: 1.6, Jitter: 0.2, MaxDelay: elsewhereEvery}

// forget ends the connections to controllers that are gone: gRPC would try for
// ever to reach them.
func (p *Peers) forget(others []lead.Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for address, c := range p.conns {
		if !slices.ContainsFunc(others, func(m lead.Member) bool { return m.Address == address }) {
			_ = c.Close() // what was under way on it ends with an error of its own
			delete(p.conns, address)
		}
	}
}

// errNoDoor is of a controller that runs etcd inside and serves others as well.
var errNoDoor = errors.New("it runs etcd inside and cannot be asked by other controllers; start it with --etcd-endpoints, too")

// answer is what one controller says.
type answer[T any] struct {
	member lead.Member
	resp   T
	err    error
}

// askAll asks all others at once and returns what waits for their answers; each
// has the time limit to answer.
func askAll[T any](ctx context.Context, p *Peers, limit time.Duration, call func(context.Context, pb.PeerServiceClient, lead.Member) (T, error)) (wait func() []answer[T]) {
	if p == nil {
		return func() []answer[T] { return nil }
	}
	others := p.members.Others()
	p.forget(others)
	answers := make([]answer[T], len(others))
	var wg sync.WaitGroup
	for i, m := range others {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			answers[i].member = m
			if m.Address == "" {
				answers[i].err = errNoDoor
				return
			}
			conn, err := p.conn(m.Address)
			if err == nil {
				answers[i].resp, err = call(ctx, pb.NewPeerServiceClient(conn), m)
			}
			answers[i].err = err
		})
	}
	return func() []answer[T] {
		wg.Wait()
		return answers
	}
}

// ask asks all others for sessions.
func (p *Peers) ask(ctx context.Context, req *pb.GetSessionsRequest) []answer[*pb.GetSessionsResponse] {
	return askAll(ctx, p, peerTime, func(ctx context.Context, c pb.PeerServiceClient, _ lead.Member) (*pb.GetSessionsResponse, error) {
		return c.GetSessions(ctx, req)
	})()
}

// self is the id of this controller; empty if it is alone.
func (p *Peers) self() string {
	if p == nil {
		return ""
	}
	return p.members.Self().ID
}

// Ask makes the service answer for routers that are connected to others too. It
// comes before the first call.
func (s *RouterService) Ask(p *Peers) { s.peers = p }

// complete puts what other controllers know into the messages of routers, and
// returns which of them did not answer. Of two sessions of one router the one
// that began later counts: the other end has not noticed yet.
func (s *RouterService) complete(ctx context.Context, routers []*pb.Router) (silent []string) {
	if s.peers == nil {
		return nil
	}
	self := s.peers.members.Self().ID
	ids := make([]string, len(routers))
	byID := make(map[string]*pb.Router, len(routers))
	for i, r := range routers {
		ids[i], byID[r.GetId()] = r.GetId(), r
		if r.GetSession().GetConnected() {
			r.Session.Controller = self
		}
	}
	for _, a := range s.peers.ask(ctx, &pb.GetSessionsRequest{Ids: ids}) {
		if a.err != nil {
			silent = append(silent, a.member.ID)
			continue
		}
		for _, o := range a.resp.GetRouters() {
			r := byID[o.GetId()]
			if r == nil || r.GetSession().GetConnected() && !o.GetSession().GetSince().AsTime().After(r.GetSession().GetSince().AsTime()) {
				continue
			}
			r.Reported, r.Session = o.GetReported(), o.GetSession()
			r.Session.Controller = a.member.ID
		}
	}
	return silent
}

// completed yields the messages of members, with what other controllers know.
func (s *RouterService) completed(ctx context.Context, all iter.Seq[member], most int, silent *[]string) iter.Seq[*pb.Router] {
	return func(yield func(*pb.Router) bool) {
		var batch []*pb.Router
		flush := func() bool {
			for _, id := range s.complete(ctx, batch) {
				if !slices.Contains(*silent, id) {
					*silent = append(*silent, id)
				}
			}
			for _, r := range batch {
				if !yield(r) {
					return false
				}
			}
			batch = batch[:0]
			return true
		}
		for m := range all {
			if batch = append(batch, s.message(m)); len(batch) == most && !flush() {
				return
			}
		}
		if len(batch) > 0 {
			flush()
		}
	}
}

// listAll is ListRouters with what other controllers know.
func (s *RouterService) listAll(ctx context.Context, p page, req *pb.ListRoutersRequest) *pb.ListRoutersResponse {
	resp := &pb.ListRoutersResponse{}
	wanted := func(r *pb.Router) bool {
		return req.GetSync() == 0 || req.GetSync() == r.GetSession().GetSync()
	}
	routers := s.completed(ctx, members(s.store, req.GetPlan(), p.after), min(p.size+1, viewSize), &resp.SilentControllers)
	resp.Routers, resp.NextPageToken = collect(p, routers, (*pb.Router).GetId, wanted, func(r *pb.Router) *pb.Router { return r })
	return resp
}
