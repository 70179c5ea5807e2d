package ctl

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const pollEvery = 200 * time.Millisecond

// waitFlags say whether and how long to wait for routers.
type waitFlags struct {
	wait    bool
	timeout time.Duration
}

func (w *waitFlags) add(s *pflag.FlagSet, on bool) {
	s.BoolVar(&w.wait, "wait", on, "wait until the routers have applied it")
	s.DurationVar(&w.timeout, "wait-timeout", 10*time.Second, "how `long` to wait")
}

// target is a change that routers are to apply.
type target struct {
	revision int64
	routers  uint32 // how many it affects
	// list returns the routers in question that are in a state.
	list func(context.Context, pb.SyncState) ([]*pb.Router, error)
}

// await waits until every router has answered, tells how far it is, and names
// those that have not applied it. Routers that are away don't hold it up: they
// catch up when they return.
func (a *app) await(ctx context.Context, f waitFlags, began time.Time, t target) error {
	if !f.wait {
		return nil
	}
	deadline := time.NewTimer(f.timeout)
	defer deadline.Stop()
	told := ""
	for {
		pending, err := t.pending(ctx)
		if err != nil {
			return err
		}
		if len(pending) == 0 {
			break
		}
		if line := fmt.Sprintf("%d/%d routers answered", int(t.routers)-len(pending), t.routers); line != told {
			a.note("%s", line)
			told = line
		}
		select {
		case <-ctx.Done():
			return failure{fmt.Errorf("interrupted; the change is stored and routers go on applying it")}
		case <-deadline.C:
			return a.conclude(ctx, t, began, pending)
		case <-time.After(pollEvery):
		}
	}
	return a.conclude(ctx, t, began, nil)
}

// pending returns the routers that have not answered.
func (t target) pending(ctx context.Context) ([]*pb.Router, error) {
	return t.list(ctx, pb.SyncState_SYNC_STATE_PENDING)
}

// conclude tells what became of the change.
func (a *app) conclude(ctx context.Context, t target, began time.Time, pending []*pb.Router) error {
	open := pending
	for _, state := range []pb.SyncState{pb.SyncState_SYNC_STATE_REJECTED, pb.SyncState_SYNC_STATE_CLAMPED, pb.SyncState_SYNC_STATE_OFFLINE} {
		routers, err := t.list(ctx, state)
		if err != nil {
			return err
		}
		open = append(open, routers...)
	}
	took := time.Since(began).Round(10 * time.Millisecond)
	if len(open) == 0 {
		a.note("%d/%d routers applied it within %v", t.routers, t.routers, took)
		return nil
	}
	refused, clamped := 0, 0
	for _, r := range open {
		switch r.GetSession().GetSync() {
		case pb.SyncState_SYNC_STATE_REJECTED:
			refused++
		case pb.SyncState_SYNC_STATE_CLAMPED:
			clamped++
		default:
		}
	}
	a.note("%d/%d routers applied it within %v; the others:", int(t.routers)-len(open)+clamped, t.routers, took)
	const most = 20
	for i, r := range open {
		if i == most {
			a.note("  and %d more: see cakefleetctl router list", len(open)-most)
			break
		}
		a.note("  %s  %s", r.GetId(), a.why(r))
	}
	if refused > 0 || len(pending) > 0 {
		return failure{}
	}
	return nil
}

// routersOfPlan lists by plan.
func (a *app) routersOfPlan(name string) func(context.Context, pb.SyncState) ([]*pb.Router, error) {
	return func(ctx context.Context, state pb.SyncState) ([]*pb.Router, error) {
		return a.listRouters(ctx, &pb.ListRoutersRequest{Plan: name, Sync: state})
	}
}

// theseRouters lists of a few.
func (a *app) theseRouters(ids []string) func(context.Context, pb.SyncState) ([]*pb.Router, error) {
	return func(ctx context.Context, state pb.SyncState) ([]*pb.Router, error) {
		var in []*pb.Router
		for _, id := range ids {
			resp, err := call(ctx, a, a.conn.routers.GetRouter, &pb.GetRouterRequest{Id: id})
			if err != nil {
				return nil, err
			}
			if resp.GetRouter().GetSession().GetSync() == state {
				in = append(in, resp.GetRouter())
			}
		}
		return in, nil
	}
}
