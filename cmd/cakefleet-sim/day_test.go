package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fails runs a command that must not succeed, and returns what it says.
func (r *rig) fails(args ...string) string {
	r.t.Helper()
	var out, errs bytes.Buffer
	if ctl.Run(r.t.Context(), ctl.Config{Args: append([]string{"--controller", r.ops, "--credentials", r.credentials}, args...), Stdout: &out, Stderr: &errs}) == 0 {
		r.t.Fatalf("cakefleetctl %v succeeds: %s", args, out.String())
	}
	return errs.String()
}

// rest makes one call of the REST API.
func (r *rig) rest(method, path, body string) map[string]any {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.http+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		r.t.Fatalf("%s %s: %v, %v: %s", method, path, resp.Status, err, text)
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		r.t.Fatal(err)
	}
	return m
}

// states counts the routers of a rollout by wave and state.
func (r *rig) states(id string) map[string]int {
	r.t.Helper()
	resp, err := pb.NewRolloutServiceClient(r.conn).ListRolloutRouters(r.t.Context(), &pb.ListRolloutRoutersRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}
	n := map[string]int{}
	for _, x := range resp.GetRouters() {
		n[string(rune('0'+x.GetWave()))+" "+x.GetState()]++
	}
	return n
}

func (r *rig) until(id string, phases ...pb.RolloutPhase) *pb.Rollout {
	r.t.Helper()
	r.eventually("rollout "+id+" comes to "+phases[0].String(), func() bool { return slices.Contains(phases, r.rollout(id).GetPhase()) })
	return r.rollout(id)
}

// TestOperatorsDay does everything that an operator can do with a rollout, by
// the command line and by REST, to ten routers with real sessions: one of them
// refuses at first, one comes later, and one stays away.
func TestOperatorsDay(t *testing.T) {
	r := newRig(t)
	r.setPlan(100e6)
	p, leave := r.join("-n", "12", "--sites", "2")
	defer leave()
	// The last two are not there yet: one comes later, one stays away.
	var refuse atomic.Bool
	var mu sync.Mutex
	rates := map[string]engine.BitsPerSecond{} // guarded by mu
	p.fleet.Hooks.Apply = func(a *simagent.Agent, push simagent.Push) (plan.Status, bool) {
		if a.RouterID == "sim-000003" && refuse.Load() {
			return plan.Status{Outcome: plan.OutcomeRejected, Error: "not today"}, true
		}
		s, ok := p.apply(a, push)
		mu.Lock()
		defer mu.Unlock()
		rates[a.RouterID] = s.Effective.Down.Rate
		return s, ok
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, x := range p.routers {
		if id := x.agent.RouterID; id != "sim-000010" && id != "sim-000011" {
			running.Go(func() { x.agent.Run(ctx) })
		}
	}
	r.eventually("ten in sync", func() bool { return r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == 10 })
	run := func(rate engine.BitsPerSecond) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, v := range rates {
			if v == rate {
				n++
			}
		}
		return n
	}

	// Who is meant, without anything being stored.
	for _, c := range []struct{ selector, want string }{
		{"--plan=gold", "12 routers"},
		{"--label=site=site-000", ""},
		{"--site=site-001", ""},
		{"--model=simulated", "10 routers"}, // the two others have never said what they are
		{"--router=sim-000001,sim-000002", "2 routers"},
	} {
		if got := r.ctl("rollout", "start", "try", c.selector, "--down", "150mbit", "--dry-run"); !strings.Contains(got, c.want) {
			t.Errorf("%s: %s", c.selector, got)
		}
	}

	// A file; one refuses, which pauses; it is asked again.
	file := filepath.Join(t.TempDir(), "rollout.yaml")
	if err := os.WriteFile(file, []byte("selector: {plan: gold}\nset: {down.rate: 150mbit}\nwaves: ['100%']\nsoak: 1s\nanswer_time: 60s\ngates: ['nack < 1%']\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	refuse.Store(true)
	r.ctl("rollout", "start", "faster", "-f", file)
	if m := r.until("faster", pb.RolloutPhase_ROLLOUT_PHASE_PAUSED); !strings.Contains(m.GetReason(), "nack 10% is not < 1%") {
		t.Errorf("paused: %s", m.GetReason())
	}
	r.eventually("all others have answered", func() bool {
		return maps.Equal(r.states("faster"), map[string]int{"1 applied": 9, "1 rejected": 1, "1 unreachable": 2})
	})
	if got := r.fails("rollout", "watch", "faster"); !strings.Contains(got, "is paused") || !strings.Contains(got, "rollout resume, promote, rollback or abort") {
		t.Errorf("watch says %s", got)
	}
	refuse.Store(false)
	r.ctl("rollout", "retry", "faster", "--failed")
	r.ctl("rollout", "watch", "faster", "--every", "100ms")
	if n := run(150e6); n != 10 {
		t.Errorf("after retry, %d run it", n)
	}
	if got := r.fails("rollout", "retry", "faster"); !strings.Contains(got, "it is part of plan gold") {
		t.Errorf("retry of what is the plan: %s", got)
	}

	// Paused in its first wave. A router comes meanwhile, and is in the last.
	r.ctl("rollout", "start", "pauses", "--plan", "gold", "--down", "200mbit", "--waves", "3,100%", "--soak", "10m", "--answer-time", "1m", "--gate", "nack < 1%")
	r.until("pauses", pb.RolloutPhase_ROLLOUT_PHASE_ANSWERING, pb.RolloutPhase_ROLLOUT_PHASE_SOAKING)
	r.ctl("rollout", "pause", "pauses")
	if got := r.fails("rollout", "start", "second", "--site", "site-000", "--down", "1mbit"); !strings.Contains(got, "rollout pauses changes the same routers") {
		t.Errorf("a second one: %s", got)
	}
	r.ctl("rollout", "start", "queued", "--site", "site-000", "--up", "33mbit", "--waves", "100%", "--soak", "1s", "--answer-time", "1m", "--per-site", "2", "--queue")
	for _, x := range p.routers {
		if x.agent.RouterID == "sim-000010" {
			running.Go(func() { x.agent.Run(ctx) })
		}
	}
	r.eventually("eleven connected", func() bool {
		n := 0
		for what, k := range r.states("pauses") {
			if !strings.HasSuffix(what, "unreachable") {
				n += k
			}
		}
		return n == 11
	})
	if m := r.rollout("pauses"); m.GetPhase() != pb.RolloutPhase_ROLLOUT_PHASE_PAUSED || m.GetWave() != 1 || !strings.HasPrefix(m.GetReason(), "paused by") {
		t.Errorf("paused by hand: %v", m)
	}
	if n := run(200e6); n > 3 {
		t.Errorf("%d run what 3 may", n)
	}
	r.ctl("rollout", "resume", "pauses")
	for wave := range uint32(2) { // nobody has ten minutes
		r.eventually("it soaks", func() bool {
			m := r.rollout("pauses")
			return m.GetWave() == wave+1 && m.GetPhase() == pb.RolloutPhase_ROLLOUT_PHASE_SOAKING
		})
		r.ctl("rollout", "promote", "pauses")
	}
	r.ctl("rollout", "watch", "pauses", "--every", "100ms")
	if n := run(200e6); n != 11 {
		t.Errorf("resumed and completed, %d run it", n)
	}
	// What waited behind it goes on by itself, two of the site at a time.
	r.until("queued", pb.RolloutPhase_ROLLOUT_PHASE_COMPLETED)
	if m := r.rollout("queued"); m.GetSteps() < 2 || m.GetOpenedSteps() != m.GetSteps() {
		t.Errorf("queued, in %d steps", m.GetSteps())
	}
	r.ctl("rollout", "rollback", "queued")
	r.until("queued", pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK)

	// By REST: aborted in its first wave, it stays as it is, and can be rolled back.
	made := r.rest("POST", "/v1/rollouts", `{"rollout": {"id": "rest", "selector": {"plan": "gold"}, "set": {"down.rate": "250mbit"}, "waves": ["2", "100%"], "soak": "600s", "answer_time": "60s"}}`)
	if made["targets"] != 12. {
		t.Errorf("made by REST: %v", made)
	}
	r.until("rest", pb.RolloutPhase_ROLLOUT_PHASE_SOAKING)
	r.rest("POST", "/v1/rollouts/rest/command", `{"command": "ROLLOUT_COMMAND_ABORT"}`)
	if m := r.rest("GET", "/v1/rollouts/rest", "")["rollout"].(map[string]any); m["phase"] != "ROLLOUT_PHASE_ABORTED" || m["wave"] != 1. {
		t.Errorf("aborted by REST: %v", m)
	}
	some := run(250e6)
	if some == 0 || some > 2 {
		t.Errorf("aborted, %d run it", some)
	}
	r.rest("POST", "/v1/rollouts/rest/command", `{"command": "ROLLOUT_COMMAND_ROLLBACK"}`)
	r.until("rest", pb.RolloutPhase_ROLLOUT_PHASE_ROLLED_BACK)
	r.eventually("all have what they had", func() bool { return run(200e6) == 11 })
	if list := r.rest("GET", "/v1/rollouts", "")["rollouts"].([]any); len(list) != 4 {
		t.Errorf("REST lists %d rollouts", len(list))
	}

	// The clock, and another person.
	r.ctl("rollout", "start", "later", "--plan", "gold", "--down", "300mbit", "--start", "2099-01-01 02:00", "--zone", "Europe/Berlin", "--soak", "1s", "--approval")
	if got := r.fails("rollout", "approve", "later"); !strings.Contains(got, "another person than admin must approve it") {
		t.Errorf("approved by who made it: %s", got)
	}
	r.ctl("operator", "create", "bob", "--role", "operator")
	pem := filepath.Join(t.TempDir(), "bob.pem")
	r.ctl("operator", "certificate", "bob", "--out", pem)
	bob := *r
	bob.credentials = pem
	bob.ctl("rollout", "approve", "later")
	r.eventually("it waits for its time", func() bool { return strings.Contains(r.rollout("later").GetReason(), "by the clock") })
	if m := r.rollout("later"); m.GetApprover() != "bob" || m.GetOpenedSteps() != 0 {
		t.Errorf("approved: %v", m)
	}

	// A hot fix overtakes it.
	if got := r.fails("plan", "set", "gold", "--down", "90mbit"); !strings.Contains(got, "--overtake-rollout") {
		t.Errorf("a plan that a rollout changes: %s", got)
	}
	r.ctl("plan", "set", "gold", "--down", "90mbit", "--overtake-rollout")
	r.until("later", pb.RolloutPhase_ROLLOUT_PHASE_OVERTAKEN)
	r.eventually("all have the hot fix", func() bool { return run(90e6) == 11 })

	// Who was away all the time gets the newest.
	for _, x := range p.routers {
		if x.agent.RouterID == "sim-000011" {
			running.Go(func() { x.agent.Run(ctx) })
		}
	}
	r.eventually("the last one has the hot fix", func() bool { return run(90e6) == 12 })
}
