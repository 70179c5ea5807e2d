package main

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// ctl runs one command of the operator's.
func (r *rig) ctl(args ...string) string {
	r.t.Helper()
	var out, errs bytes.Buffer
	code := ctl.Run(r.t.Context(), ctl.Config{
		Args: append([]string{"--controller", r.ops, "--credentials", r.credentials}, args...), Stdout: &out, Stderr: &errs,
	})
	if code != 0 {
		r.t.Fatalf("cakefleetctl %v: %s%s", args, out.String(), errs.String())
	}
	return out.String()
}

func (r *rig) rollout(id string) *pb.Rollout {
	r.t.Helper()
	resp, err := pb.NewRolloutServiceClient(r.conn).GetRollout(r.t.Context(), &pb.GetRolloutRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetRollout()
}

// history is what every router ran, one state after the other.
type history struct {
	mu   sync.Mutex
	runs map[string][]engine.Config // down; guarded by mu
}

// note takes down what an agent runs from now on.
func (h *history) note(id string, link *plan.Link) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.runs[id] = append(h.runs[id], link.Down)
}

// count returns how many routers ever ran what fits, and how many run it now.
func (h *history) count(fits func(engine.Config) bool) (ever, now int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, all := range h.runs {
		if slices.ContainsFunc(all, fits) {
			ever++
		}
		if fits(all[len(all)-1]) {
			now++
		}
	}
	return ever, now
}

// absurd is an overhead that no line has. A home of 100 B packets then gets half
// of its rate, and what it sends waits.
const absurd = 100

// traffic is what a home with such a link counts: times in the queue that are
// 20 times as long where the overhead is absurd.
type traffic struct {
	mu    sync.Mutex
	stats map[string]*[2]engine.Stats // guarded by mu
}

func (x *traffic) report(id string, link *plan.Link) *plan.Report {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.stats[id]
	if s == nil {
		s = &[2]engine.Stats{}
		x.stats[id] = s
	}
	for i, c := range []engine.Config{link.Down, link.Up} {
		wait := 2 * time.Millisecond
		if c.Overhead >= absurd {
			wait = 40 * time.Millisecond
		}
		s[i].Config, s[i].NumTins = c, 3
		t := &s[i].Tins[1]
		for range 200 {
			t.Sojourn.Observe(wait)
		}
		t.Packets += 200
		t.Bytes += 200 * packetBytes
		s[i].SentPackets += 200
		s[i].SentBytes += 200 * packetBytes
	}
	down, up := s[0], s[1]
	return &plan.Report{Down: &down, Up: &up}
}

// TestRollouts plays 40 routers through three changes of their plan by
// cakefleetctl rollout start on a real controller. A good one goes through its
// waves to all; one with a rate that no router can do, and one with an absurd
// overhead, are stopped by a gate in the first wave and rolled back, and nobody
// beyond that wave ever runs them.
func TestRollouts(t *testing.T) {
	r := newRig(t)
	r.setPlan(100e6)
	p, leave := r.join("-n", "40", "--most", "500mbit")
	defer leave()
	h, x := &history{runs: map[string][]engine.Config{}}, &traffic{stats: map[string]*[2]engine.Stats{}}
	p.fleet.Hooks.Apply = func(a *simagent.Agent, push simagent.Push) (plan.Status, bool) {
		s, ok := p.apply(a, push)
		if s.Effective != nil {
			h.note(a.RouterID, s.Effective)
		}
		return s, ok
	}
	p.fleet.Hooks.Report = func(a *simagent.Agent) *plan.Report {
		y := p.of[a]
		y.mu.Lock()
		defer y.mu.Unlock()
		if y.link == nil {
			return &plan.Report{}
		}
		return x.report(a.RouterID, y.link)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	defer running.Wait()
	defer cancel()
	r.eventually("all in sync", func() bool { return r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == 40 })

	start := func(id string, args ...string) *pb.Rollout {
		t.Helper()
		r.ctl(append([]string{
			"rollout", "start", id, "--plan", "gold", "--waves", "10%,50%,100%", "--soak", "2s", "--answer-time", "30s", "--on-failure", "rollback",
			"--gate", "nack < 1%", "--gate", "clamp < 5%", "--gate", "p99_sojourn < 1.2x control",
		}, args...)...)
		r.eventually("rollout "+id+" ends", func() bool {
			m := r.rollout(id)
			if m.GetPhase() == pb.RolloutPhase_ROLLOUT_PHASE_PAUSED {
				t.Fatalf("rollout %s is paused: %s", id, m.GetReason())
			}
			return m.GetFinishTime() != nil
		})
		r.eventually("all in sync after rollout "+id, func() bool { return r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == 40 })
		return r.rollout(id)
	}
	down := func(rate engine.BitsPerSecond) func(engine.Config) bool {
		return func(c engine.Config) bool { return c.Rate == rate }
	}

	done := start("good", "--down", "200mbit")
	if done.GetPhase() != pb.RolloutPhase_ROLLOUT_PHASE_COMPLETED || len(done.GetVerdicts()) != 9 || !slices.Equal(done.GetSizes(), []uint32{4, 20, 40}) {
		t.Errorf("the good one: %v, %s, sizes %v, verdicts %v", done.GetPhase(), done.GetReason(), done.GetSizes(), done.GetVerdicts())
	}
	for _, v := range done.GetVerdicts() {
		if v.GetResult() != "pass" {
			t.Errorf("the good one: %v", v)
		}
	}
	if _, now := h.count(down(200e6)); now != 40 {
		t.Errorf("%d of 40 run the good one", now)
	}

	// Each is asked for 900 Mbit/s, and can do 500. One of the first wave's four
	// that says so is enough: others may not have said it, nor have run it yet.
	tooFast := start("too-fast", "--down", "900mbit")
	rolledBack(t, tooFast, "clamp < 5%", "is not < 5%")
	if ever, now := h.count(down(500e6)); ever < 1 || ever > 4 || now != 0 {
		t.Errorf("%d routers ran the one that is too fast and %d still do, want 1 to 4 and 0", ever, now)
	}

	heavy := start("heavy", "--set", "down.overhead=100")
	rolledBack(t, heavy, "p99_sojourn < 1.2x control", "control")
	if ever, now := h.count(func(c engine.Config) bool { return c.Overhead >= absurd }); ever < 1 || ever > 4 || now != 0 {
		t.Errorf("%d routers ran the absurd overhead and %d still do, want 1 to 4 and 0", ever, now)
	}
	if _, now := h.count(down(200e6)); now != 40 {
		t.Errorf("%d of 40 run what they had before", now)
	}
	for _, want := range []string{"too-fast", "heavy", "rolled back", "completed"} {
		if all := r.ctl("rollout", "history"); !strings.Contains(all, want) {
			t.Errorf("rollout history has no %q:\n%s", want, all)
		}
	}
}

// rolledBack checks that one gate stopped a rollout in its first wave.
func rolledBack(t *testing.T, m *pb.Rollout, gate, why string) {
	t.Helper()
	var failed []string
	for _, v := range m.GetVerdicts() {
		if v.GetWave() != 1 {
			t.Errorf("rollout %s came to wave %d", m.GetId(), v.GetWave())
		}
		if v.GetResult() == "fail" {
			failed = append(failed, v.GetGate())
		}
	}
	if m.GetPhase() != pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK || !slices.Equal(failed, []string{gate}) || !strings.Contains(m.GetReason(), why) && !slices.ContainsFunc(m.GetVerdicts(), func(v *pb.RolloutVerdict) bool { return strings.Contains(v.GetText(), why) }) {
		t.Errorf("rollout %s: %v, %q, failed %v, verdicts %v", m.GetId(), m.GetPhase(), m.GetReason(), failed, m.GetVerdicts())
	}
	t.Logf("rollout %s: %s", m.GetId(), m.GetReason())
}
