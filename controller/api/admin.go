package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	// mostNamed is how many routers a status names.
	mostNamed = 20

	// backupPiece is how much of a backup goes into one message, bytes.
	backupPiece = 256 << 10

	// fewFree is what should be free on the disk of an embedded etcd, bytes: it
	// makes its log in files of 64 MB.
	fewFree = 200 << 20
)

// AdminService tells how the store and the controllers are, and mends them.
type AdminService struct {
	pb.UnimplementedAdminServiceServer

	store   *store.Store
	hub     *fleet.Hub
	members *lead.Members
	peers   *Peers // nil: this controller is alone

	certificates func() []identity.Certificate // that this controller lives by; nil: not known
}

// Trust makes the service tell when certificates end, and warn before. It comes
// before the first call.
func (s *AdminService) Trust(all func() []identity.Certificate) { s.certificates = all }

// Ask makes the service tell of other controllers too. It comes before the
// first call.
func (s *AdminService) Ask(p *Peers) { s.peers = p }

// NewAdminService returns the service.
func NewAdminService(s *store.Store, hub *fleet.Hub, members *lead.Members) *AdminService {
	return &AdminService{store: s, hub: hub, members: members}
}

// GetStatus returns how the store and the controllers are.
func (s *AdminService) GetStatus(ctx context.Context, _ *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	etcd, err := s.store.EtcdStatus(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.GetStatusResponse{Store: fromEtcd(etcd)}
	s.store.View(func(st *store.State) {
		resp.Store.SeenRevision = int64(st.Revision())
		if r, ok := st.Restored(); ok {
			resp.Restore = fromRestored(r)
		}
		_, subscribers, routers := st.Len()
		unserved, idle := st.Unserved()
		resp.Subscribers, resp.UnservedSubscribers = uint32(subscribers), uint32(unserved)
		resp.Routers, resp.IdleRouters = uint32(routers), uint32(idle)
	})
	self := s.members.Self().ID
	for _, m := range s.members.All() {
		c := &pb.ControllerStatus{Id: m.ID, Address: m.Address, Version: m.Version, StartTime: wire.FromTime(m.Started), Self: m.ID == self}
		if c.GetSelf() {
			c.Routers = uint32(len(s.hub.Connected()))
		}
		resp.Controllers = append(resp.Controllers, c)
	}
	ahead, newest := s.ahead()
	asked := time.Now()
	for _, a := range s.peers.ask(ctx, &pb.GetSessionsRequest{}) {
		i := slices.IndexFunc(resp.GetControllers(), func(c *pb.ControllerStatus) bool { return c.GetId() == a.member.ID })
		switch {
		case i < 0: // gone meanwhile
		case a.err != nil:
			resp.Controllers[i].Error = a.err.Error()
			resp.Problems = append(resp.Problems, fmt.Sprintf("controller %s at %s does not answer: %v", a.member.ID, a.member.Address, a.err))
		default:
			resp.Controllers[i].Routers = a.resp.GetConnected()
			ahead = append(ahead, a.resp.GetAheadRouters()...)
			newest = max(newest, plan.Revision(a.resp.GetAheadRevision()))
			resp.Ahead += a.resp.GetAhead() - uint32(len(a.resp.GetAheadRouters()))
			if text := apart(a.resp.GetClock().AsTime(), asked, time.Now()); text != "" && a.resp.GetClock() != nil {
				resp.Problems = append(resp.Problems, fmt.Sprintf("the clock of controller %s at %s is %s this one's: set both right (NTP); until then schedules and boosts begin and end that much apart", a.member.ID, a.member.Address, text))
			}
		}
	}
	resp.Ahead += uint32(len(ahead))
	resp.AheadRevision = int64(newest)
	resp.AheadRouters = ahead[:min(len(ahead), mostNamed)]
	if kv, err := s.store.Leases(); err == nil {
		leaders, err := lead.Leaders(ctx, kv)
		if err != nil {
			resp.Problems = append(resp.Problems, fmt.Sprintf("the store does not say who leads: %v", err))
		}
		for work, leader := range leaders {
			resp.Led = append(resp.Led, &pb.LedWork{Work: work, Leader: leader})
		}
		slices.SortFunc(resp.Led, func(a, b *pb.LedWork) int { return strings.Compare(a.GetWork(), b.GetWork()) })
	}
	resp.Problems = append(resp.Problems, problems(etcd, resp)...)
	var lives []identity.Certificate
	if s.certificates != nil {
		lives = s.certificates()
	}
	for _, c := range lives {
		m := &pb.CertificateStatus{Purpose: c.Purpose, Subject: c.Subject, ExpireTime: wire.FromTime(c.Ends)}
		if err := c.Ending(time.Now()); err != nil {
			m.Problem = err.Error()
			resp.Problems = append(resp.Problems, m.GetProblem())
		}
		resp.Certificates = append(resp.Certificates, m)
	}
	return resp, nil
}

// mostApart is how far the clocks of two controllers may be apart.
const mostApart = 5 * time.Second

// apart says how another clock, which was read between two times of this one,
// is to it; empty: near enough.
func apart(theirs, from, to time.Time) string {
	switch {
	case theirs.After(to.Add(mostApart)):
		return theirs.Sub(to).Round(time.Second).String() + " ahead of"
	case theirs.Before(from.Add(-mostApart)):
		return from.Sub(theirs).Round(time.Second).String() + " behind"
	default:
		return ""
	}
}

// ahead returns the routers that are connected here and run what the store does
// not know, in order, and the newest revision of them.
func (s *AdminService) ahead() (ids []string, newest plan.Revision) {
	connected := s.hub.Connected()
	slices.Sort(connected)
	var hashes resolve.Hashes
	for part := range slices.Chunk(connected, viewSize) {
		s.store.View(func(st *store.State) {
			for _, id := range part {
				d, ok := desiredOf(st, id, &hashes)
				if !ok {
					continue
				}
				if _, sync := s.hub.Sync(id, d); sync == fleet.Ahead {
					ids = append(ids, id)
					newest = max(newest, s.hub.Snapshot(id, d).Reported.Applied)
				}
			}
		})
	}
	return ids, newest
}

// problems returns what is wrong, in words.
func problems(etcd store.EtcdStatus, resp *pb.GetStatusResponse) (all []string) {
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	down := 0
	for _, m := range etcd.Members {
		switch {
		case m.Err != nil:
			down++
			add("etcd at %s does not answer: %v", m.Endpoint, m.Err)
		case slices.Contains(m.Alarms, "CORRUPT"):
			add("etcd at %s has other data than the rest: take it out of the cluster and let it join anew, empty", m.Endpoint)
		case m.Quota > 0 && m.InUse > m.Quota/10*8:
			add("etcd at %s uses %d of %d bytes: raise its quota (--etcd-quota, or --quota-backend-bytes of etcd)", m.Endpoint, m.InUse, m.Quota)
		case m.Quota > 0 && m.Size > m.Quota/10*8 && !etcd.Full():
			add("the file of etcd at %s has %d of %d bytes, and only %d are in use: cakefleetctl doctor --repair gives the rest back", m.Endpoint, m.Size, m.Quota, m.InUse)
		}
	}
	if n := len(etcd.Members); down > 0 && n-down <= n/2 {
		add("only %d of %d members of etcd answer: nothing can be written until more than half do; routers keep what they run", n-down, n)
	}
	if etcd.Full() {
		add("the store is full: nothing new can be written; routers keep what they run. cakefleetctl doctor --repair makes room")
	}
	if etcd.Free >= 0 && etcd.Free < fewFree {
		add("only %d bytes are free on the disk of the store", etcd.Free)
	}
	if seen := resp.GetStore().GetSeenRevision(); etcd.Revision > 0 && seen > etcd.Revision {
		add("the store is at revision %d, and this controller has seen %d: it was put back while this controller ran; start the controller again", etcd.Revision, seen)
	}
	if n := resp.GetAhead(); n > 0 {
		add("%d routers, such as %s, run what the store does not know, because it was restored from an older backup: nothing is sent to them. "+
			"Make the lost changes again, or move them back with cakefleetctl doctor --accept-restore", n, resp.GetAheadRouters()[0])
	}
	return all
}

// RepairStore makes room in the store.
func (s *AdminService) RepairStore(_ *pb.RepairStoreRequest, stream grpc.ServerStreamingServer[pb.RepairStoreResponse]) error {
	var lost error // of the caller; the repair goes on without
	err := s.store.RepairEtcd(stream.Context(), func(step string) {
		lost = errors.Join(lost, stream.Send(&pb.RepairStoreResponse{Step: step}))
	})
	return statusOf(errors.Join(err, lost))
}

// AcceptRestore lets routers be moved back.
func (s *AdminService) AcceptRestore(ctx context.Context, _ *pb.AcceptRestoreRequest) (*pb.AcceptRestoreResponse, error) {
	ahead, newest := s.ahead()
	for _, a := range s.peers.ask(ctx, &pb.GetSessionsRequest{}) {
		if a.err != nil {
			return nil, status.Errorf(codes.Unavailable, "controller %s at %s does not answer, so that nobody knows what its routers run: %v", a.member.ID, a.member.Address, a.err)
		}
		ahead = append(ahead, a.resp.GetAheadRouters()...)
		newest = max(newest, plan.Revision(a.resp.GetAheadRevision()))
	}
	r, err := s.store.AcceptRestore(ctx, newest, author(ctx))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.AcceptRestoreResponse{Restore: fromRestored(r), Routers: uint32(len(ahead))}, nil
}

// BackupStore returns a backup in pieces.
func (s *AdminService) BackupStore(_ *pb.BackupStoreRequest, stream grpc.ServerStreamingServer[pb.BackupStoreResponse]) (err error) {
	r, size, err := s.store.Snapshot(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	defer func() { _ = r.Close() }() // it was read to its end, or the caller has gone
	buffer := make([]byte, backupPiece)
	for {
		n, err := io.ReadFull(r, buffer)
		if n > 0 {
			if err := stream.Send(&pb.BackupStoreResponse{Chunk: buffer[:n], SizeBytes: size}); err != nil {
				return err
			}
			size = 0
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return statusOf(fmt.Errorf("%w: backup: %w", store.ErrUnavailable, err))
		}
	}
}

func fromEtcd(st store.EtcdStatus) *pb.StoreStatus {
	m := &pb.StoreStatus{Embedded: st.Embedded, Revision: st.Revision, FreeBytes: st.Free}
	for _, e := range st.Members {
		member := &pb.StoreMember{
			Name: e.Name, Endpoint: e.Endpoint, Version: e.Version, SizeBytes: e.Size, UsedBytes: e.InUse,
			QuotaBytes: e.Quota, Leader: e.Leader, Alarms: e.Alarms,
		}
		if e.Err != nil {
			member.Error = e.Err.Error()
		}
		m.Members = append(m.Members, member)
	}
	return m
}

func fromRestored(r store.Restored) *pb.RestoreStatus {
	return &pb.RestoreStatus{
		Revision: int64(r.Revision), UntilRevision: int64(r.Until), Time: wire.FromTime(r.Time),
		Accepted: r.Accepted, AcceptedBy: r.By,
	}
}
