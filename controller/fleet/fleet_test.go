package fleet_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start is when tests begin; no real time is used.
func start() time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC) }

func desired(rev plan.Revision, rate engine.BitsPerSecond) plan.Desired {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate = rate
	return plan.Desired{Revision: rev, Hash: l.Hash(), Link: &l}
}

// nothing is what a router without subscriber should run.
func nothing(rev plan.Revision) plan.Desired {
	return plan.Desired{Revision: rev, Reason: "no subscriber"}
}

// applied is the status of a router that runs d.
func applied(d plan.Desired) plan.Status {
	return plan.Status{Outcome: plan.OutcomeApplied, Applied: d.Revision, AppliedHash: d.Hash, EffectiveHash: d.Hash, Effective: d.Link}
}

func runs(d plan.Desired) fleet.Hello {
	return fleet.Hello{BootID: "b", Applied: d.Revision, AppliedHash: d.Hash, EffectiveHash: d.Hash, Effective: d.Link}
}

// want asserts what is sent next.
func want(t *testing.T, s *fleet.Session, now time.Time, d plan.Desired, nonce uint64) {
	t.Helper()
	p, ok, wait := s.Next(now, d)
	if !ok {
		t.Fatalf("nothing sent (wait %v), want nonce %d", wait, nonce)
	}
	if p.Nonce != nonce || p.Desired.Hash != d.Hash {
		t.Fatalf("sent nonce %d of %s, want nonce %d of %s", p.Nonce, p.Desired.Hash, nonce, d.Hash)
	}
}

// wantWait asserts that nothing is sent and for how long.
func wantWait(t *testing.T, s *fleet.Session, now time.Time, d plan.Desired, wait time.Duration) {
	t.Helper()
	p, ok, got := s.Next(now, d)
	if ok {
		t.Fatalf("sent nonce %d, want nothing", p.Nonce)
	}
	if got != wait {
		t.Fatalf("wait %v, want %v", got, wait)
	}
}

func wantSync(t *testing.T, h *fleet.Hub, d plan.Desired, want fleet.Sync) {
	t.Helper()
	if _, got := h.Sync("r", d); got != want {
		t.Fatalf("sync is %d, want %d", got, want)
	}
}

func TestEqualIsNotSent(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 1e6)
	s := h.Open("r", runs(a), "peer", now, &listener{})
	wantWait(t, s, now, a, 0)
	wantSync(t, h, a, fleet.InSync)

	// A newer revision of the same link is nothing new to the router.
	b := desired(9, 1e6)
	wantWait(t, s, now, b, 0)
	wantSync(t, h, b, fleet.InSync)

	// A router without subscriber that shapes nothing is left alone.
	s = h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	wantWait(t, s, now, nothing(5), 0)
	wantSync(t, h, nothing(5), fleet.None)
}

func TestSentUntilItRuns(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 1e6)
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	wantSync(t, h, a, fleet.Pending)
	want(t, s, now, a, 1)
	wantSync(t, h, a, fleet.Pending)
	s.Status(now, 1, applied(a))
	wantWait(t, s, now, a, 0)
	wantSync(t, h, a, fleet.InSync)

	// Clearing is a push like others.
	now = now.Add(time.Hour)
	want(t, s, now, nothing(6), 2)
	s.Status(now, 2, applied(nothing(6)))
	wantSync(t, h, nothing(6), fleet.None)
}

// TestAppliedIsNotRunning: a router that names the hash but reads something
// else back is not in sync, and is sent the state again, ever more rarely.
func TestAppliedIsNotRunning(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 1e6)
	other := applied(a)
	other.EffectiveHash = "other"
	s := h.Open("r", fleet.Hello{BootID: "b", AppliedHash: a.Hash, EffectiveHash: "other"}, "peer", now, &listener{})
	wantSync(t, h, a, fleet.Pending)
	want(t, s, now, a, 1)
	s.Status(now, 1, other)
	wantSync(t, h, a, fleet.Clamped)
	wantWait(t, s, now, a, 10*time.Second)
	now = now.Add(10 * time.Second)
	want(t, s, now, a, 2)
	s.Status(now, 2, other)
	wantWait(t, s, now, a, 20*time.Second)

	// Somebody changed the router's queue behind the agent's back.
	s.Status(now, 0, applied(a))
	wantWait(t, s, now, a, 0)
	now = now.Add(time.Hour)
	s.Status(now, 0, other)
	want(t, s, now, a, 3)
	s.Status(now, 3, other)
	wantWait(t, s, now, a, 20*time.Second)
}

// TestTakenBack: a router that applied a state and could not keep it says so
// with a second answer.
func TestTakenBack(t *testing.T) {
	h, now, a, b := fleet.NewHub(), start(), desired(5, 1e6), desired(6, 2e6)
	s := h.Open("r", runs(a), "peer", now, &listener{})
	want(t, s, now, b, 1)
	s.Status(now, 1, applied(b))
	wantSync(t, h, b, fleet.InSync)
	back := applied(a)
	back.Outcome, back.Error = plan.OutcomeRejected, "the controller could not be reached after the change"
	s.Status(now, 1, back)
	wantSync(t, h, b, fleet.Rejected)
	wantWait(t, s, now.Add(time.Hour), b, 0)
}

// TestNobodyAnswers: changes for a router that doesn't answer are sent ever
// more rarely, so that what it has not read stays little.
func TestNobodyAnswers(t *testing.T) {
	h, now := fleet.NewHub(), start()
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	pushes := 0
	for i := range 3600 { // a change each second for an hour
		if _, ok, _ := s.Next(now, desired(plan.Revision(1+i), engine.BitsPerSecond(1e6+i))); ok {
			pushes++
		}
		now = now.Add(time.Second)
	}
	if pushes > 3600/10+10 {
		t.Errorf("%d pushes in an hour", pushes)
	}
}

// TestFleet059: what was refused is not sent again until it changes.
func TestFleet059(t *testing.T) {
	h, now, a, b := fleet.NewHub(), start(), desired(5, 1e6), desired(6, 9e9)
	s := h.Open("r", runs(a), "peer", now, &listener{})
	want(t, s, now, b, 1)
	refusal := applied(a)
	refusal.Outcome, refusal.Error = plan.OutcomeRejected, "down.rate: too fast"
	s.Status(now, 1, refusal)
	for range 1000 {
		now = now.Add(time.Hour)
		wantWait(t, s, now, b, 0)
	}
	wantSync(t, h, b, fleet.Rejected)
	snap := h.Snapshot("r", b)
	if snap.Reported.Error != refusal.Error || snap.Reported.Rejected != 6 || snap.Reported.Applied != 5 || snap.Reported.Outcome != plan.OutcomeRejected {
		t.Errorf("reported %+v", snap.Reported)
	}

	// A new session does not change that.
	s.Close(now)
	wantSync(t, h, b, fleet.Offline)
	s = h.Open("r", runs(a), "peer", now, &listener{})
	wantWait(t, s, now, b, 0)
	wantSync(t, h, b, fleet.Rejected)

	// Back to what runs: nothing to do. A new revision: one more try.
	wantWait(t, s, now, desired(7, 1e6), 0)
	wantSync(t, h, desired(7, 1e6), fleet.InSync)
	again := desired(8, 9e9)
	want(t, s, now, again, 1)
	s.Status(now, 1, refusal)
	wantWait(t, s, now, again, 0)
	again = desired(9, 9e9)
	wantWait(t, s, now, again, 100*time.Millisecond)
	now = now.Add(100 * time.Millisecond)
	want(t, s, now, again, 2)
	s.Status(now, 2, refusal)

	good := desired(10, 2e6)
	now = now.Add(time.Second)
	want(t, s, now, good, 3)
	s.Status(now, 3, applied(good))
	wantSync(t, h, good, fleet.InSync)
	if r := h.Snapshot("r", good).Reported; r.Error != "" || r.Rejected != 0 {
		t.Errorf("refusal still shown: %+v", r)
	}
}

// TestFleet025: exactly one answer is lost. The state is asked for again with
// a new nonce and is never taken for applied before the router says so.
func TestFleet025(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 1e6)
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	want(t, s, now, a, 1)
	wantWait(t, s, now, a, 10*time.Second)
	now = now.Add(9 * time.Second)
	wantWait(t, s, now, a, time.Second)
	wantSync(t, h, a, fleet.Pending)
	now = now.Add(time.Second)
	want(t, s, now, a, 2)
	wantSync(t, h, a, fleet.Pending)
	s.Status(now, 2, applied(a))
	wantWait(t, s, now, a, 0)
	wantSync(t, h, a, fleet.InSync)

	// A router that never answers is asked ever more rarely.
	b := desired(6, 2e6)
	now = now.Add(time.Minute)
	want(t, s, now, b, 3)
	end, asked := now.Add(24*time.Hour), 0
	for now.Before(end) {
		_, ok, wait := s.Next(now, b)
		if ok {
			asked++
			continue
		}
		now = now.Add(wait)
	}
	if asked > 24*60/5+6 {
		t.Errorf("asked %d times in a day", asked)
	}
}

// TestStaleAnswer: only the answer to the newest push is one.
func TestStaleAnswer(t *testing.T) {
	h, now, a, b := fleet.NewHub(), start(), desired(5, 1e6), desired(6, 2e6)
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	want(t, s, now, a, 1)
	now = now.Add(time.Second)
	want(t, s, now, b, 2)

	refusal := plan.Status{Outcome: plan.OutcomeRejected, Error: "no"}
	s.Status(now, 1, refusal)
	wantSync(t, h, b, fleet.Pending)
	if r := h.Snapshot("r", b).Reported; r.Outcome != plan.OutcomeNone || r.Rejected != 0 {
		t.Errorf("stale answer counted: %+v", r)
	}
	// It is news all the same: a runs now.
	s.Status(now, 1, applied(a))
	if r := h.Snapshot("r", b).Reported; r.AppliedHash != a.Hash {
		t.Errorf("applied is %q", r.AppliedHash)
	}
	wantSync(t, h, b, fleet.Pending)

	// The operator goes back to a while b is on its way: what the router said
	// before does not count, a has to be sent again.
	wantSync(t, h, a, fleet.Pending)
	now = now.Add(time.Second)
	want(t, s, now, a, 3)
	s.Status(now, 2, applied(b))
	wantSync(t, h, a, fleet.Pending)
	s.Status(now, 3, applied(a))
	wantSync(t, h, a, fleet.InSync)

	// An answer that names another hash than what was sent contradicts itself.
	c := desired(7, 3e6)
	now = now.Add(time.Second)
	want(t, s, now, c, 4)
	wrong := applied(a)
	wrong.Outcome = plan.OutcomeClamped
	s.Status(now, 4, wrong)
	wantSync(t, h, c, fleet.Pending)
	wantWait(t, s, now, c, 10*time.Second)
	if r := h.Snapshot("r", c).Reported; r.Outcome != plan.OutcomeApplied {
		t.Errorf("outcome is %v", r.Outcome)
	}
}

func TestClampedIsKept(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 5e9)
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, &listener{})
	want(t, s, now, a, 1)
	clamped := plan.Status{
		Outcome: plan.OutcomeClamped, Applied: 5, AppliedHash: a.Hash, EffectiveHash: "less",
		Clamps: []plan.Clamp{{Field: "down.rate", Desired: "5Gbit", Effective: "1Gbit", Reason: "port speed"}},
	}
	s.Status(now, 1, clamped)
	wantWait(t, s, now, a, 0)
	wantSync(t, h, a, fleet.Clamped)

	// Not sent again in a new session, as nothing changed.
	hello := fleet.Hello{BootID: "c", Applied: 5, AppliedHash: a.Hash, EffectiveHash: "less"}
	s = h.Open("r", hello, "peer", now, &listener{})
	wantWait(t, s, now, a, 0)
	wantSync(t, h, a, fleet.Clamped)
	if diff := cmp.Diff(clamped.Clamps, h.Snapshot("r", a).Reported.Clamps); diff != "" {
		t.Errorf("clamps (-want +got):\n%s", diff)
	}
	// Another value than the known one is.
	hello.EffectiveHash = "even less"
	s = h.Open("r", hello, "peer", now, &listener{})
	want(t, s, now, a, 1)
}

// TestFleet063: one change is sent at once; many become a few pushes, and the
// newest is among them.
func TestFleet063(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(1, 1e6)
	s := h.Open("r", runs(a), "peer", now, &listener{})
	var last plan.Desired
	pushes := 0
	for i := range 5000 { // 1000 changes a second for 5 s
		last = desired(plan.Revision(2+i), engine.BitsPerSecond(2e6+i))
		if p, ok, _ := s.Next(now, last); ok {
			if pushes++; pushes == 1 && i != 0 {
				t.Fatalf("first change was sent after %d more", i)
			}
			s.Status(now, p.Nonce, applied(p.Desired))
		}
		now = now.Add(time.Millisecond)
	}
	if pushes > 15 {
		t.Errorf("%d pushes in 5 s", pushes)
	}
	p, ok, wait := s.Next(now, last)
	if !ok {
		if wait <= 0 || wait > 400*time.Millisecond {
			t.Fatalf("newest change waits %v", wait)
		}
		now = now.Add(wait)
		p, ok, _ = s.Next(now, last)
	}
	if !ok || p.Desired.Hash != last.Hash {
		t.Fatal("newest change was not sent")
	}
	s.Status(now, p.Nonce, applied(last))
	wantSync(t, h, last, fleet.InSync)

	// After some quiet the next change is the first again.
	now = now.Add(2 * time.Second)
	if _, ok, _ := s.Next(now, desired(9999, 7e6)); !ok {
		t.Error("change after quiet was held back")
	}
}

func TestNewerSessionWins(t *testing.T) {
	h, now, a, b := fleet.NewHub(), start(), desired(5, 1e6), desired(6, 2e6)
	ended := &listener{}
	old := h.Open("r", runs(a), "old", now, ended)
	young := h.Open("r", runs(b), "young", now.Add(time.Second), &listener{})
	if !errors.Is(ended.why, fleet.ErrReplaced) {
		t.Errorf("the old one ended with %v", ended.why)
	}
	// Nothing that the old one does counts.
	if old.Status(now, 0, applied(a)) || old.Seen(now) {
		t.Error("old session is listened to")
	}
	wantWait(t, old, now, a, 0)
	old.Close(now.Add(2 * time.Second))
	snap := h.Snapshot("r", b)
	if !snap.Connected || snap.Sync != fleet.InSync || snap.Peer != "young" || !snap.Since.Equal(now.Add(time.Second)) {
		t.Errorf("after the old one closed: %+v", snap)
	}
	young.Close(now.Add(3 * time.Second))
	young.Close(now.Add(4 * time.Second))
	snap = h.Snapshot("r", b)
	if snap.Connected || snap.Sync != fleet.Offline || !snap.Since.Equal(now.Add(3*time.Second)) {
		t.Errorf("after the young one closed: %+v", snap)
	}
	if snap.Reported.AppliedHash != b.Hash {
		t.Error("what it ran is forgotten")
	}
}

func TestRemove(t *testing.T) {
	h, now, a := fleet.NewHub(), start(), desired(5, 1e6)
	ended := &listener{}
	s := h.Open("r", runs(a), "peer", now, ended)
	h.Remove("r")
	h.Remove("r")
	if !errors.Is(ended.why, fleet.ErrRemoved) {
		t.Errorf("it ended with %v", ended.why)
	}
	if snap := h.Snapshot("r", a); snap.Reported != nil || snap.Connected {
		t.Errorf("it is remembered: %+v", snap)
	}
	s.Close(now)
	h.Wake("r")
}

// TestWake: a change and a status are told to the session's stream.
func TestWake(t *testing.T) {
	h, now := fleet.NewHub(), start()
	l := &listener{}
	s := h.Open("r", fleet.Hello{BootID: "b"}, "peer", now, l)
	h.Wake("r")
	h.Wake("nobody")
	if n := l.woken.Load(); n != 1 {
		t.Errorf("woken %d times, want 1", n)
	}
	s.Status(now, 0, plan.Status{})
	if n := l.woken.Load(); n != 2 {
		t.Errorf("woken %d times after a status, want 2", n)
	}
	s.Close(now)
	h.Wake("r")
	if n := l.woken.Load(); n != 2 {
		t.Errorf("woken %d times after the end, want 2", n)
	}
}

// listener notes what a session tells.
type listener struct {
	woken atomic.Int64
	why   error
}

func (l *listener) Woken() { l.woken.Add(1) }

func (l *listener) Ended(why error) { l.why = why }

// TestConverges plays a router that loses answers, restarts, reconnects and
// refuses, while the operator changes his mind, and checks after every step
// that nothing is shown as in sync that the router does not run.
func TestConverges(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	h, now := fleet.NewHub(), start()
	var runsNow plan.Desired
	s := h.Open("r", runs(runsNow), "peer", now, &listener{})
	d := desired(1, 1e6)
	var inbox []fleet.Push
	for step := range 20000 {
		now = now.Add(time.Duration(r.IntN(300)) * time.Millisecond)
		switch r.IntN(10) {
		case 0:
			d = desired(plan.Revision(step+2), engine.BitsPerSecond(1e6*(1+r.IntN(4))))
		case 1:
			d = nothing(plan.Revision(step + 2))
		case 2:
			inbox = nil
			s = h.Open("r", runs(runsNow), "peer", now, &listener{})
		case 3, 4, 5:
			if p, ok, _ := s.Next(now, d); ok {
				inbox = append(inbox, p)
			}
		default:
			if len(inbox) == 0 {
				break
			}
			p := inbox[0]
			inbox = inbox[1:]
			if p.Desired.Link != nil && p.Desired.Link.Down.Rate == 4e6 {
				refusal := applied(runsNow)
				refusal.Outcome = plan.OutcomeRejected
				s.Status(now, p.Nonce, refusal)
				break
			}
			runsNow = p.Desired
			if r.IntN(5) > 0 { // else the answer is lost
				s.Status(now, p.Nonce, applied(runsNow))
			}
		}
		_, sync := h.Sync("r", d)
		if (sync == fleet.InSync || sync == fleet.None) && runsNow.Hash != d.Hash {
			t.Fatalf("step %d: shown as in sync, but %s runs and %s is desired", step, runsNow.Hash, d.Hash)
		}
	}
	// Left in peace it converges.
	d = desired(1<<40, 3e6)
	for range 100 {
		for _, p := range inbox {
			runsNow = p.Desired
			s.Status(now, p.Nonce, applied(runsNow))
		}
		inbox = nil
		p, ok, wait := s.Next(now, d)
		if ok {
			inbox = append(inbox, p)
		}
		now = now.Add(wait)
	}
	wantSync(t, h, d, fleet.InSync)
	if runsNow.Hash != d.Hash {
		t.Error("another state runs")
	}
}

// A router is well again as soon as what it says is: nothing has to change and
// nothing has to be sent for it.
func TestFleet036_WellAgainWithoutAChange(t *testing.T) {
	h := fleet.NewHub()
	d, now := desired(1, 1e6), start()
	s := h.Open("r", runs(d), "peer", now, &listener{})
	wantSync(t, h, d, fleet.InSync)
	s.Close(now.Add(time.Minute))
	wantSync(t, h, d, fleet.Offline)
	s = h.Open("r", runs(d), "peer", now.Add(time.Hour), &listener{})
	wantSync(t, h, d, fleet.InSync)
	wantWait(t, s, now.Add(time.Hour), d, 0)

	// Its data plane loses the state and gets it back by itself; the statuses are
	// news, not answers.
	lost := plan.Status{Applied: d.Revision, AppliedHash: d.Hash, Conditions: []plan.Condition{{Type: "Degraded", Status: true}}}
	s.Status(now.Add(time.Hour), 0, lost)
	if _, sync := h.Sync("r", d); sync == fleet.InSync {
		t.Error("nothing runs, and it is shown as in sync")
	}
	s.Status(now.Add(time.Hour), 0, applied(d))
	wantSync(t, h, d, fleet.InSync)
	if c := h.Snapshot("r", d).Reported.Conditions; len(c) != 0 {
		t.Errorf("conditions that are over are shown: %v", c)
	}

	// What was refused and is put back in the plan is no problem any more.
	worse := desired(2, 9e9)
	p, _, _ := s.Next(now.Add(2*time.Hour), worse)
	s.Status(now.Add(2*time.Hour), p.Nonce, plan.Status{Outcome: plan.OutcomeRejected, Applied: d.Revision, AppliedHash: d.Hash, EffectiveHash: d.Hash, Effective: d.Link, Error: "too much"})
	wantSync(t, h, worse, fleet.Rejected)
	back := desired(3, 1e6)
	wantSync(t, h, back, fleet.InSync)
	wantWait(t, s, now.Add(3*time.Hour), back, 0)
}

func TestFleet049_ConcurrentUse(t *testing.T) {
	h := fleet.NewHub()
	d := desired(1, 1e6)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				id := fmt.Sprintf("r%d", i%3)
				s := h.Open(id, fleet.Hello{BootID: "b"}, "peer", start(), &listener{})
				if p, ok, _ := s.Next(start(), d); ok {
					s.Status(start(), p.Nonce, applied(d))
				}
				h.Wake(id)
				h.Snapshot(id, d)
				if g == 0 && i%10 == 0 {
					h.Remove(id)
				}
				s.Close(start())
			}
		})
	}
	wg.Wait()
	for i := range 3 {
		if connected, _ := h.Sync(fmt.Sprintf("r%d", i), d); connected {
			t.Errorf("r%d is connected after all sessions closed", i)
		}
	}
}
