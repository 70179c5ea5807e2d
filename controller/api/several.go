package api

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	// sumTime is how long another controller has for sums over its routers,
	// each of which it looks at.
	sumTime = 10 * time.Second

	// newcomerTime is longer than a controller takes to notice that a router
	// has gone without a word.
	newcomerTime = 10 * time.Minute
)

// Ask makes the service answer for routers that are connected to others too. It
// comes before the first call.
func (s *TelemetryService) Ask(p *Peers) { s.peers = p }

// forward lets another controller answer a call about a router that it has.
func forward[Req, Resp any](ctx context.Context, p *Peers, m lead.Member, req Req,
	call func(pb.TelemetryServiceClient, context.Context, Req, ...grpc.CallOption) (Resp, error),
) (resp Resp, err error) {
	ctx, cancel := context.WithTimeout(ctx, peerTime)
	defer cancel()
	conn, err := p.conn(m.Address)
	if err == nil {
		resp, err = call(pb.NewTelemetryServiceClient(conn), ctx, req)
	}
	if err != nil {
		err = status.Errorf(status.Code(err), "controller %s: %s", m.ID, status.Convert(err).Message())
	}
	return resp, err
}

// holder returns the controller that has a router: where it connected last if
// it is connected, else where it reported last; nil: this one. Controllers that
// did not answer are silent.
func (s *TelemetryService) holder(ctx context.Context, id string) (holder *lead.Member, silent []string) {
	if s.peers == nil {
		return nil, nil
	}
	best := s.find(id)
	theirs := askAll(ctx, s.peers, peerTime, func(ctx context.Context, c pb.PeerServiceClient, _ lead.Member) (*pb.FindRouterResponse, error) {
		return c.FindRouter(ctx, &pb.FindRouterRequest{Id: id})
	})
	for _, a := range theirs() {
		switch {
		case a.err != nil:
			silent = append(silent, a.member.ID)
		case knowsMore(a.resp, best):
			best, holder = a.resp, &a.member
		}
	}
	return holder, silent
}

// knowsMore tells whether who found a knows more of a router than who found b.
func knowsMore(a, b *pb.FindRouterResponse) bool {
	if a.GetConnected() != b.GetConnected() {
		return a.GetConnected()
	}
	if a.GetConnected() {
		return a.GetSinceTime().AsTime().After(b.GetSinceTime().AsTime())
	}
	if !a.GetReportedTime().AsTime().Equal(b.GetReportedTime().AsTime()) {
		return a.GetReportedTime().AsTime().After(b.GetReportedTime().AsTime())
	}
	return a.GetSinceTime().AsTime().After(b.GetSinceTime().AsTime())
}

// find says what this controller has of a router.
func (s *TelemetryService) find(id string) *pb.FindRouterResponse {
	standing := s.hub.Standing(id, plan.Desired{})
	m := &pb.FindRouterResponse{Connected: standing.Connected, SinceTime: wire.FromTime(standing.Since)}
	if _, received, ok := s.table.Latest(id); ok {
		m.ReportedTime = wire.FromTime(received)
	}
	return m
}

// FindRouter says what this controller has of a router.
func (s *PeerService) FindRouter(_ context.Context, req *pb.FindRouterRequest) (*pb.FindRouterResponse, error) {
	return s.telemetry.find(req.GetId()), nil
}

// moves says which routers came to which controller lately.
type moves struct {
	to     map[string]string // ids of controllers, by router
	silent []string          // controllers that did not answer
}

// from returns the routers that a controller may still believe to have.
func (m *moves) from(controller string) (elsewhere []string) {
	for id, to := range m.to {
		if to != controller {
			elsewhere = append(elsewhere, id)
		}
	}
	return elsewhere
}

// moved asks who came where lately, so that a router counts once although the
// controller that it has left has not noticed yet. Of two the later one counts.
func (s *TelemetryService) moved(ctx context.Context) *moves {
	m := &moves{to: map[string]string{}}
	if s.peers == nil {
		return m
	}
	latest := map[string]time.Time{}
	for id, n := range s.hub.Newcomers(time.Now().Add(-newcomerTime)) {
		latest[id], m.to[id] = n.Since, s.peers.self()
	}
	theirs := askAll(ctx, s.peers, sumTime, func(ctx context.Context, c pb.PeerServiceClient, _ lead.Member) (*pb.ListNewcomersResponse, error) {
		return c.ListNewcomers(ctx, &pb.ListNewcomersRequest{})
	})
	for _, a := range theirs() {
		if a.err != nil {
			m.silent = append(m.silent, a.member.ID)
		}
		for _, n := range a.resp.GetNewcomers() {
			if since := n.GetSinceTime().AsTime(); since.After(latest[n.GetId()]) {
				latest[n.GetId()], m.to[n.GetId()] = since, a.member.ID
			}
		}
	}
	return m
}

// ListNewcomers returns who connected here lately.
func (s *PeerService) ListNewcomers(_ context.Context, req *pb.ListNewcomersRequest) (*pb.ListNewcomersResponse, error) {
	now := time.Now()
	from := now.Add(-newcomerTime)
	if t := req.GetAfterTime(); t != nil && t.AsTime().After(from) {
		from = t.AsTime()
	}
	resp := &pb.ListNewcomersResponse{Clock: wire.FromTime(now)}
	for id, n := range s.telemetry.hub.Newcomers(from) {
		resp.Newcomers = append(resp.Newcomers, &pb.Newcomer{
			Id: id, SinceTime: wire.FromTime(n.Since), BootId: n.Device.BootID, Model: n.Device.Model, Address: n.Device.Address,
		})
	}
	return resp, nil
}

// leave takes note that routers have connected elsewhere since: what they
// reported here is not how they are now, until they report here again.
func (s *TelemetryService) leave(elsewhere []string) (gone map[string]bool) {
	gone = make(map[string]bool, len(elsewhere))
	for _, id := range elsewhere {
		gone[id] = true
		s.table.Silence(id)
	}
	return gone
}

// SumPlans returns the sums of the routers that are connected here.
func (s *PeerService) SumPlans(_ context.Context, req *pb.SumPlansRequest) (*pb.SumPlansResponse, error) {
	resp := &pb.SumPlansResponse{}
	for _, p := range s.telemetry.sumPlans(req.GetElsewhere()) {
		p.Routers = 0
		resp.Plans = append(resp.Plans, p)
	}
	slices.SortFunc(resp.GetPlans(), func(a, b *pb.PlanStats) int { return cmp.Compare(a.GetPlan(), b.GetPlan()) })
	return resp, nil
}

// FindWorst returns who suffers of the routers that report here.
func (s *PeerService) FindWorst(_ context.Context, req *pb.FindWorstRequest) (*pb.FindWorstResponse, error) {
	q, err := s.telemetry.worstQuery(req.GetRequest())
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.FindWorstResponse{Worst: s.telemetry.findWorst(&q, req.GetElsewhere())}, nil
}

// include appends an id that is not there yet.
func include(ids []string, id string) []string {
	if slices.Contains(ids, id) {
		return ids
	}
	return append(ids, id)
}

// addPlan adds what another controller has of a plan.
func addPlan(all map[string]*pb.PlanStats, p *pb.PlanStats) {
	sum := all[p.GetPlan()]
	if sum == nil {
		all[p.GetPlan()] = p // it is newer than what this one knows
		return
	}
	sum.Connected += p.GetConnected()
	sum.InSync += p.GetInSync()
	addSums(sum.GetDown(), p.GetDown())
	addSums(sum.GetUp(), p.GetUp())
}

func addSums(to, d *pb.DirectionSums) {
	to.SentBytes += d.GetSentBytes()
	to.SentPackets += d.GetSentPackets()
	to.Drops += d.GetDrops()
	to.Marks += d.GetMarks()
	to.RateBps += d.GetRateBps()
	to.CapacityBps += d.GetCapacityBps()
	counts := d.GetSojourn().GetCounts()
	if len(counts) == 0 {
		return
	}
	if to.GetSojourn() == nil {
		to.Sojourn = &pb.Histogram{}
	}
	for i, n := range counts {
		if i == len(to.GetSojourn().GetCounts()) {
			to.Sojourn.Counts = append(to.Sojourn.Counts, 0)
		}
		to.Sojourn.Counts[i] += n
	}
}
