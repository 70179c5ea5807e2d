package ctl_test

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rollouts has one rollout that goes on, and ends a step further at each look.
type rollouts struct {
	pb.UnimplementedRolloutServiceServer
	none bool
	bad  bool
	look int
	got  *pb.StartRolloutRequest
}

func faster() *pb.Rollout {
	return &pb.Rollout{
		Id: "faster", Selector: &pb.RolloutSelector{Plan: "gold"}, Set: map[string]string{"down.rate": "200Mbit"}, Note: "plan gold to revision 7",
		Waves: []string{"1%", "100%"}, Sizes: []uint32{1, 100}, Wave: 1, Steps: 2, OpenedSteps: 1, Phase: pb.RolloutPhase_ROLLOUT_PHASE_SOAKING,
		PhaseTime: before(4 * time.Minute), Gates: []string{"p99_sojourn < 1.2x control"}, OnFailure: "rollback", Author: "alice", CreateTime: before(time.Hour),
		Verdicts: []*pb.RolloutVerdict{{Wave: 1, Gate: "p99_sojourn < 1.2x control", Result: "pass", Samples: 1000, Time: before(time.Minute), Text: "p99_sojourn 5ms < 6ms (control 5ms)"}},
	}
}

func (f *rollouts) StartRollout(_ context.Context, r *pb.StartRolloutRequest) (*pb.StartRolloutResponse, error) {
	f.got = r
	if f.bad {
		return nil, status.Error(codes.FailedPrecondition, "rollout x: another rollout is in the way: rollout faster changes the same routers and has not ended")
	}
	m := r.Rollout
	if m.Id == "" {
		m.Id = "gold-20261130-120000"
	}
	m.Sizes = []uint32{1, 10, 50, 100}
	return &pb.StartRolloutResponse{Rollout: m, Targets: 100, Changes: []string{"down.rate 115Mbit -> 200Mbit"}}, nil
}

func (f *rollouts) GetRollout(_ context.Context, r *pb.GetRolloutRequest) (*pb.GetRolloutResponse, error) {
	if r.Id != "faster" {
		return nil, status.Errorf(codes.NotFound, "rollout %s: not found", r.Id)
	}
	m := faster()
	resp := &pb.GetRolloutResponse{Rollout: m, Report: &pb.RolloutReport{
		Changed: &pb.RolloutTally{Members: 1, Applied: 1}, Control: &pb.RolloutTally{Members: 99},
		Gates: []*pb.RolloutVerdict{{Wave: 1, Gate: "p99_sojourn < 1.2x control", Result: "pass", Text: "p99_sojourn 5ms < 6ms (control 5ms)"}},
	}}
	switch f.look++; {
	case f.look == 3 && f.bad:
		m.Phase, m.Reason, resp.Report = pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK, "wave 1 failed: nack 100% is not < 1%", nil
	case f.look == 3:
		m.Phase, m.Wave, resp.Report = pb.RolloutPhase_ROLLOUT_PHASE_COMPLETED, 2, nil
	}
	return resp, nil
}

func (f *rollouts) ListRollouts(_ context.Context, r *pb.ListRolloutsRequest) (*pb.ListRolloutsResponse, error) {
	if f.none {
		return &pb.ListRolloutsResponse{}, nil
	}
	resp := &pb.ListRolloutsResponse{Rollouts: []*pb.Rollout{faster()}}
	if !r.Active {
		old := faster()
		old.Id, old.Phase, old.Reason = "before", pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK, "wave 1 failed: nack 100% is not < 1%"
		resp.Rollouts = append(resp.Rollouts, old)
	}
	return resp, nil
}

func (f *rollouts) ListRolloutRouters(_ context.Context, r *pb.ListRolloutRoutersRequest) (*pb.ListRolloutRoutersResponse, error) {
	return &pb.ListRolloutRoutersResponse{Routers: []*pb.RolloutRouter{{Id: "home-1", Wave: 1, State: r.State}}}, nil
}

func (f *rollouts) CommandRollout(_ context.Context, r *pb.CommandRolloutRequest) (*pb.CommandRolloutResponse, error) {
	m := faster()
	switch r.Command {
	case pb.RolloutCommand_ROLLOUT_COMMAND_PAUSE:
		m.Phase = pb.RolloutPhase_ROLLOUT_PHASE_PAUSED
	case pb.RolloutCommand_ROLLOUT_COMMAND_ROLLBACK:
		m.Phase, m.Wave = pb.RolloutPhase_ROLLOUT_PHASE_ROLLING_BACK, 0
	default:
		return nil, status.Error(codes.FailedPrecondition, "rollout faster is soaking: approve can't be done now")
	}
	return &pb.CommandRolloutResponse{Rollout: m}, nil
}
