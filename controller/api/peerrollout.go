package api

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Ask makes the service answer for routers that are connected to others too. It
// comes before the first call.
func (s *RolloutService) Ask(p *Peers) { s.peers = p }

// Reports returns what the other controllers know of their routers of a rollout
// as it is in l. missing says who has not said it; empty: all have.
func (p *Peers) Reports(ctx context.Context, l *rollout.Live) (reports []rollout.Report, missing string) {
	answers := askAll(ctx, p, sumTime, func(ctx context.Context, c pb.PeerServiceClient, _ lead.Member) (*pb.SumRolloutResponse, error) {
		return c.SumRollout(ctx, &pb.SumRolloutRequest{Id: l.ID, Revision: int64(l.Revision)})
	})()
	for _, a := range answers {
		if a.err == nil {
			reports = append(reports, toRolloutReport(a.resp))
		}
	}
	if n := len(answers) - len(reports); n > 0 {
		return nil, fmt.Sprintf("%d of %d other controllers have not said what they know", n, len(answers))
	}
	return reports, ""
}

// SumRollout returns sums over the routers that are connected here.
func (s *PeerService) SumRollout(_ context.Context, req *pb.SumRolloutRequest) (*pb.SumRolloutResponse, error) {
	l, err := s.rollouts.live(req.GetId())
	if err != nil {
		return nil, statusOf(err)
	}
	if l.Revision != plan.Revision(req.GetRevision()) {
		return nil, status.Errorf(codes.FailedPrecondition, "rollout %s has revision %d here", l.ID, l.Revision)
	}
	r, ok := s.rollouts.conduct.Own(l)
	if !ok {
		return nil, status.Error(codes.FailedPrecondition, "this controller has only begun to count")
	}
	return rolloutSums(r), nil
}

func rolloutSums(r *rollout.Report) *pb.SumRolloutResponse {
	return &pb.SumRolloutResponse{
		Time: wire.FromTime(r.Time), SinceTime: wire.FromTime(r.Since), Step: tallyMessage(&r.Step), Changed: tallyMessage(&r.Changed), Control: tallyMessage(&r.Control),
		ChangedFigures: figuresMessage(&r.ChangedFigures), ControlFigures: figuresMessage(&r.ControlFigures), PastFigures: figuresMessage(&r.PastFigures),
	}
}

// GetRolloutStates returns how routers that are connected here stand to a
// rollout.
func (s *PeerService) GetRolloutStates(_ context.Context, req *pb.GetRolloutStatesRequest) (*pb.GetRolloutStatesResponse, error) {
	if len(req.GetRouters()) > viewSize {
		return nil, status.Errorf(codes.InvalidArgument, "%d routers, at most %d are allowed", len(req.GetRouters()), viewSize)
	}
	l, err := s.rollouts.live(req.GetId())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.GetRolloutStatesResponse{}
	for _, r := range s.rollouts.conduct.States(l, req.GetRouters()) {
		if r.State != conduct.Unreachable {
			resp.Routers = append(resp.Routers, &pb.RolloutState{Id: r.ID, State: r.State.String(), SinceTime: wire.FromTime(r.Since)})
		}
	}
	return resp, nil
}

// routers yields the routers of a rollout after an id, in order, with what other
// controllers know of them. Of two sessions of one router the one that began
// later counts.
func (s *RolloutService) routers(ctx context.Context, l *rollout.Live, after string, silent *[]string) iter.Seq[*pb.RolloutRouter] {
	return func(yield func(*pb.RolloutRouter) bool) {
		ids := s.conduct.Routers(l)
		begin, found := slices.BinarySearch(ids, after)
		if found {
			begin++
		}
		for part := range slices.Chunk(ids[begin:], viewSize) {
			answers := askAll(ctx, s.peers, peerTime, func(ctx context.Context, c pb.PeerServiceClient, _ lead.Member) (*pb.GetRolloutStatesResponse, error) {
				return c.GetRolloutStates(ctx, &pb.GetRolloutStatesRequest{Id: l.ID, Routers: part})
			})
			own := s.conduct.States(l, part)
			theirs := map[string]*pb.RolloutState{}
			for _, a := range answers() {
				if a.err != nil && !slices.Contains(*silent, a.member.ID) {
					*silent = append(*silent, a.member.ID)
				}
				for _, r := range a.resp.GetRouters() {
					if known := theirs[r.GetId()]; known == nil || r.GetSinceTime().AsTime().After(known.GetSinceTime().AsTime()) {
						theirs[r.GetId()] = r
					}
				}
			}
			for _, r := range own {
				state := r.State.String()
				if o := theirs[r.ID]; o != nil && (r.State == conduct.Unreachable || o.GetSinceTime().AsTime().After(r.Since)) {
					state = o.GetState()
				}
				if !yield(&pb.RolloutRouter{Id: r.ID, Wave: uint32(l.Steps[r.Step].Wave + 1), State: state}) {
					return
				}
			}
		}
	}
}

func toRolloutReport(m *pb.SumRolloutResponse) rollout.Report {
	return rollout.Report{
		Time: m.GetTime().AsTime(), Since: m.GetSinceTime().AsTime(), Step: toTally(m.GetStep()), Changed: toTally(m.GetChanged()), Control: toTally(m.GetControl()),
		ChangedFigures: toFigures(m.GetChangedFigures()), ControlFigures: toFigures(m.GetControlFigures()), PastFigures: toFigures(m.GetPastFigures()),
	}
}

func toTally(m *pb.RolloutTally) rollout.Tally {
	return rollout.Tally{
		Members: int(m.GetMembers()), Pending: int(m.GetPending()), Offered: int(m.GetOffered()), Applied: int(m.GetApplied()), Clamped: int(m.GetClamped()),
		Rejected: int(m.GetRejected()), Unreachable: int(m.GetUnreachable()), Already: int(m.GetAlready()), RolledBack: int(m.GetRolledBack()),
		Lost: int(m.GetLost()), Restarted: int(m.GetRestarted()),
	}
}

func figuresMessage(f *rollout.Figures) *pb.RolloutFigures {
	return &pb.RolloutFigures{
		Routers: uint32(f.Routers), Down: countsMessage(&f.Down), Up: countsMessage(&f.Up), Cpu: durationpb.New(f.CPU), Time: durationpb.New(f.Time),
	}
}

func toFigures(m *pb.RolloutFigures) rollout.Figures {
	return rollout.Figures{
		Routers: int(m.GetRouters()), Down: toCounts(m.GetDown()), Up: toCounts(m.GetUp()), CPU: m.GetCpu().AsDuration(), Time: m.GetTime().AsDuration(),
	}
}

func countsMessage(c *rollout.Counts) *pb.RolloutCounts {
	return &pb.RolloutCounts{Bytes: c.Bytes, Packets: c.Packets, Drops: c.Drops, Marks: c.Marks, CapacityBits: c.Capacity, Sojourn: slices.Clone(c.Sojourn[:])}
}

func toCounts(m *pb.RolloutCounts) rollout.Counts {
	c := rollout.Counts{Bytes: m.GetBytes(), Packets: m.GetPackets(), Drops: m.GetDrops(), Marks: m.GetMarks(), Capacity: m.GetCapacityBits()}
	copy(c.Sojourn[:], m.GetSojourn()[:min(len(m.GetSojourn()), engine.HistogramBuckets)])
	return c
}
