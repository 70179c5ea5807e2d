package rollout_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// world is routers, a store with one record, and leaders that work on it.
type world struct {
	t       *testing.T
	r       *rand.Rand
	now     time.Time
	routers []*router
	sub     plan.Subscriber
	live    *rollout.Live // what is stored
	version int           // of the record
	term    int           // of the leader that may write
	planRev plan.Revision
	blind   bool // nobody can say what routers do
	bad     bool // changed routers are slow
	silent  bool // nobody counts anything

	allowed map[int]bool // waves behind which it may go on: gates passed, or an operator said so
	log     []string
}

type router struct {
	id, site  string
	connected bool
	newcomer  bool
	asked     bool // was told
	runs      bool // has what the rollout sets
	answer    int  // how it answers: 0 applies, 1 clamps, 2 refuses, 3 never
	rejected  bool
}

func (w *world) note(format string, args ...any) {
	if w.log = append(w.log, fmt.Sprintf(format, args...)); len(w.log) > 60 {
		w.log = w.log[1:]
	}
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	for _, line := range w.log {
		w.t.Log(line)
	}
	w.t.Fatalf(format, args...)
}

func newWorld(t *testing.T, r *rand.Rand) *world {
	w := &world{t: t, r: r, now: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), planRev: 7, sub: plan.Subscriber{ID: "1", Plan: "gold"}, allowed: map[int]bool{}}
	n := 1 + r.IntN(30)
	var targets []rollout.Target
	for i := range n {
		x := &router{id: fmt.Sprintf("r%d", i), site: fmt.Sprint(r.IntN(3)), connected: r.IntN(5) > 0, answer: w.answers()}
		w.routers = append(w.routers, x)
		targets = append(targets, rollout.Target{Router: x.id, Site: x.site})
	}
	waves := [][]rollout.Size{rollout.DefaultWaves(), {{Percent: 100}}, {{Count: 1}, {Count: 3}, {Percent: 100}}, {{Percent: 30}, {Percent: 60}, {Percent: 100}}}
	s := rollout.Spec{
		ID: "x", Selector: rollout.Selector{Plan: "gold"}, Set: plan.RatesOf(plan.DefaultLink()), Base: w.planRev, Whole: true,
		Waves: waves[r.IntN(len(waves))], Soak: time.Minute, AnswerTime: time.Minute, MinSamples: 100, OnFailure: rollout.OnFailure(r.IntN(3)),
		PerSite: r.IntN(3), Author: "alice", Approval: r.IntN(4) == 0,
	}
	for _, text := range []string{"nack < 20%", "disconnect < 50%", "p99_sojourn < 1.5x control + 1ms"} {
		if r.IntN(2) == 0 {
			s.Gates = append(s.Gates, gate(t, text))
		}
	}
	if r.IntN(4) == 0 {
		s.Zone, s.Windows = "UTC", []schedule.Window{{Days: schedule.AllDays, From: 12*60 + 5, To: 12*60 + 15}}
	}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	places, err := s.Freeze(targets, r.Uint64())
	if err != nil {
		t.Fatal(err)
	}
	made := rollout.Rollout{Spec: s, State: rollout.State{Phase: rollout.Waiting, Since: w.now}}
	if s.Approval {
		made.Phase = rollout.Approving
	}
	if w.live, err = rollout.NewLive(made, places); err != nil {
		t.Fatal(err)
	}
	w.checkSizes(n)
	return w
}

func (w *world) answers() int {
	if w.r.IntN(6) > 0 {
		return 0
	}
	return w.r.IntN(4)
}

// checkSizes compares the steps with what was asked for.
func (w *world) checkSizes(n int) {
	s := &w.live.Spec
	if s.Size(s.NumWaves()) != n {
		w.fail("steps have %d of %d routers", s.Size(s.NumWaves()), n)
	}
	wave := 0
	for _, size := range s.Waves {
		most := size.Count
		if size.Percent > 0 {
			most = int(size.Percent * float64(n) / 100)
		}
		most = max(most, 1)
		if wave > 0 && s.Size(wave-1) >= min(most, n) {
			continue // nobody is left for it
		}
		if s.Size(wave) > most {
			w.fail("wave %d has %d routers with those before, %v of %d were asked for", wave, s.Size(wave), size, n)
		}
		wave++
	}
	atSite := map[string]int{}
	for _, x := range w.routers {
		if step, ok := w.live.Step(x.id, &w.sub); ok && s.PerSite > 0 {
			if k := fmt.Sprint(step, x.site); !x.newcomer {
				if atSite[k]++; atSite[k] > s.PerSite {
					w.fail("step %d has %d routers of site %s", step, atSite[k], x.site)
				}
			}
		}
	}
}

// opened tells whether a router is to have what the rollout sets now.
func (w *world) opened(x *router) bool {
	return w.live.Base == w.planRev && w.live.Phase != rollout.Overtaken && w.live.Opens(x.id, &w.sub)
}

// report is what a leader sees.
func (w *world) report() *rollout.Report {
	if w.blind {
		return nil
	}
	r := &rollout.Report{Time: w.now, Since: w.live.Since}
	for _, x := range w.routers {
		step, ok := w.live.Step(x.id, &w.sub)
		if !ok {
			continue
		}
		t := rollout.Tally{Members: 1}
		is := w.opened(x)
		switch {
		case !is && step >= w.live.Touched:
			t.Pending = 1
		case !x.connected:
			t.Unreachable = 1
		case is && x.rejected:
			t.Rejected = 1
		case is && x.runs && x.answer == 1:
			t.Clamped = 1
		case is && x.runs:
			t.Applied = 1
		case !is && !x.runs:
			t.RolledBack = 1
		default:
			t.Offered = 1
		}
		if step == w.live.Opened-1 {
			r.Step.Add(&t)
		}
		f := w.figures(is)
		if step < w.live.Opened || w.live.Opened == 0 && step < w.live.Touched {
			r.Changed.Add(&t)
			if x.connected && !w.silent {
				r.ChangedFigures.Add(&f)
				past := w.figures(false)
				r.PastFigures.Add(&past)
			}
		} else {
			if x.connected {
				t.Applied, t.Pending = 1, 0 // a control router runs what it should
			}
			r.Control.Add(&t)
			if x.connected && !w.silent {
				r.ControlFigures.Add(&f)
			}
		}
	}
	return r
}

func (w *world) figures(changed bool) rollout.Figures {
	f := rollout.Figures{Routers: 1, Time: time.Minute}
	f.Down.Packets = 200
	d := 5 * time.Millisecond
	if changed && w.bad {
		d = 50 * time.Millisecond
	}
	for range 200 {
		f.Down.Sojourn.Observe(d)
	}
	return f
}

// leader is one that reads the record, thinks, and writes later.
type leader struct {
	term    int
	version int
	seen    rollout.Rollout
	next    rollout.Rollout
	changed bool
	had     bool // a report
}

func (w *world) think() leader {
	l := leader{term: w.term, version: w.version, seen: w.live.Rollout}
	report := w.report()
	l.had = report != nil
	l.next, l.changed, _, _ = rollout.Next(w.live.Rollout, rollout.Input{Now: w.now, Report: report, Plan: w.planRev})
	return l
}

// write is the fenced transaction of a leader.
func (w *world) write(l leader) {
	if !l.changed || l.term != w.term || l.version != w.version {
		return
	}
	w.note("%v leader %d: %v/%d -> %v/%d %s", w.now.Format("15:04:05"), l.term, l.seen.Phase, l.seen.Opened, l.next.Phase, l.next.Opened, l.next.Reason)
	w.judge(l)
	w.store(l.next)
}

func (w *world) store(next rollout.Rollout) {
	w.live = w.live.With(next)
	w.version++
}

// judge holds a write of a leader against the promises.
func (w *world) judge(l leader) {
	was, is := w.live.Rollout, l.next
	if was.Phase.Final() {
		w.fail("a leader wakes a rollout that has ended: %v", was.Phase)
	}
	if was.Phase == rollout.Paused || was.Phase == rollout.Approving {
		if is.Phase != rollout.Overtaken {
			w.fail("a leader goes on from %v to %v without an operator", was.Phase, is.Phase)
		}
	}
	// It may go on behind a wave only if every gate has passed on data.
	if is.Passed > was.Passed {
		passed := map[string]rollout.Result{}
		for _, v := range is.Verdicts[len(was.Verdicts):] {
			passed[v.Gate] = v.Result
		}
		for _, g := range is.Gates {
			if passed[g.String()] != rollout.Pass {
				w.fail("wave %d passes with %v for %v", was.Wave(), passed[g.String()], g)
			}
		}
		if !l.had {
			w.fail("wave %d passes without a report", was.Wave())
		}
		w.allowed[was.Wave()] = true
	}
	for _, v := range is.Verdicts[len(was.Verdicts):] {
		if v.Result == rollout.Fail && is.Phase != rollout.Paused && is.Phase != rollout.Aborted && is.Phase != rollout.RollingBack {
			w.fail("a gate fails and the rollout goes to %v", is.Phase)
		}
	}
	switch {
	case is.Opened == was.Opened:
	case is.Opened == 0:
		if is.Phase != rollout.RollingBack && is.Phase != rollout.Overtaken {
			w.fail("steps are closed in phase %v", is.Phase)
		}
	case is.Opened != was.Opened+1:
		w.fail("steps go from %d to %d", was.Opened, is.Opened)
	default:
		if !l.had {
			w.fail("a step is opened without a report")
		}
		if was.Phase != rollout.Waiting {
			w.fail("a step is opened in phase %v", was.Phase)
		}
		if is.Approval && (is.Approved == "" || is.Approved == is.Author) {
			w.fail("a step is opened without approval")
		}
		wave := is.Wave()
		if wave != was.Wave() && wave > 0 && !w.allowed[wave-1] {
			w.fail("wave %d is opened and wave %d never passed", wave, wave-1)
		}
		if m := w.now.Hour()*60 + w.now.Minute(); len(is.Windows) > 0 && (m < 12*60+5 || m >= 12*60+15) {
			w.fail("a step is opened at %v", w.now)
		}
		n := 0
		for _, x := range w.routers {
			if step, ok := w.live.Step(x.id, &w.sub); ok && !x.newcomer && step < is.Opened {
				n++
			}
		}
		if n > is.Size(wave) {
			w.fail("%d routers are in wave %d of %d", n, wave, is.Size(wave))
		}
	}
}

// operator gives a command, if it makes sense.
func (w *world) operator(c rollout.Command) {
	by := []string{"alice", "bob"}[w.r.IntN(2)]
	next, _, err := rollout.Do(w.live.Rollout, c, by, w.now)
	if err != nil {
		if !errors.Is(err, rollout.ErrCommand) {
			w.fail("%v: %v", c, err)
		}
		if c == rollout.Abort && !w.live.Phase.Final() {
			w.fail("abort is refused in phase %v", w.live.Phase)
		}
		return
	}
	w.note("%v %s: %v: %v/%d -> %v/%d", w.now.Format("15:04:05"), by, c, w.live.Phase, w.live.Opened, next.Phase, next.Opened)
	switch {
	case c == rollout.Abort && !next.Phase.Final():
		w.fail("abort leads to %v", next.Phase)
	case next.Opened > w.live.Opened:
		w.fail("command %v opens steps", c)
	case c == rollout.Promote && next.Passed > w.live.Passed:
		w.allowed[w.live.Wave()] = true
	case c == rollout.Approve && by == "alice":
		w.fail("alice approves what she made")
	}
	w.store(next)
}

// turn is one thing that happens.
func (w *world) turn(pending *[]leader) {
	switch n := w.r.IntN(100); {
	case n < 40: // the leader works
		w.write(w.think())
	case n < 45: // it thinks, and writes later, if it still may
		*pending = append(*pending, w.think())
	case n < 50:
		if len(*pending) > 0 {
			i := w.r.IntN(len(*pending))
			l := (*pending)[i]
			*pending = append((*pending)[:i], (*pending)[i+1:]...)
			w.write(l)
		}
	case n < 53: // another one leads
		w.term++
	case n < 70:
		w.now = w.now.Add(time.Duration(w.r.IntN(40)) * time.Second)
	case n < 90: // a router is told, and answers
		x := w.routers[w.r.IntN(len(w.routers))]
		if x.connected && x.answer != 3 {
			is := w.opened(x)
			x.rejected = is && x.answer == 2
			x.runs = is && !x.rejected
			x.asked = x.asked || is
		}
	case n < 93:
		x := w.routers[w.r.IntN(len(w.routers))]
		x.connected = !x.connected
	case n < 94:
		if len(w.routers) < 40 {
			w.routers = append(w.routers, &router{id: fmt.Sprintf("new%d", len(w.routers)), connected: true, newcomer: true})
		}
	case n < 95:
		w.blind = !w.blind
	case n < 96:
		w.bad = w.r.IntN(3) == 0
	case n < 97:
		w.silent = w.r.IntN(3) == 0
	case n < 98 && w.r.IntN(20) == 0:
		w.planRev++
	default:
		commands := []rollout.Command{rollout.Approve, rollout.Approve, rollout.Pause, rollout.Resume, rollout.Resume, rollout.Promote, rollout.Rollback, rollout.Retry, rollout.Abort}
		w.operator(commands[w.r.IntN(len(commands))])
	}
	// At any moment: whoever has it was in an open step, and no wave is larger
	// than it may be.
	runs := 0
	for _, x := range w.routers {
		step, ok := w.live.Step(x.id, &w.sub)
		if x.runs && (!ok || step >= w.live.Touched) {
			w.fail("router %s of step %d runs it, %d were ever open", x.id, step, w.live.Touched)
		}
		if x.runs && !x.newcomer {
			runs++
		}
	}
	if t := w.live.Touched; t > 0 && runs > w.live.Size(w.live.Steps[t-1].Wave) {
		w.fail("%d routers run it, wave %d has %d", runs, w.live.Steps[t-1].Wave, w.live.Size(w.live.Steps[t-1].Wave))
	}
}

// settle ends all trouble; the rollout must then end too.
func (w *world) settle() {
	w.blind, w.bad, w.silent = false, false, false
	for _, x := range w.routers {
		x.connected, x.answer = true, 0
	}
	for range 20_000 {
		if w.live.Phase.Final() {
			for _, x := range w.routers {
				if w.live.Phase == rollout.Completed && w.live.Base == w.planRev && !w.opened(x) {
					w.fail("completed without router %s", x.id)
				}
			}
			return
		}
		for _, x := range w.routers {
			x.runs, x.rejected = w.opened(x), false
		}
		switch w.live.Phase {
		case rollout.Paused:
			w.operator(rollout.Resume)
		case rollout.Approving:
			w.operator(rollout.Approve)
		default:
			w.write(w.think())
		}
		w.now = w.now.Add(10 * time.Second)
	}
	w.fail("does not end: %v/%d of %d, %s", w.live.Phase, w.live.Opened, len(w.live.Steps), w.live.Reason)
}

// TestModel is a million things that happen, in as many worlds as they fill.
func TestModel(t *testing.T) {
	steps := 1_000_000
	if testing.Short() {
		steps = 50_000
	}
	ended := map[rollout.Phase]int{}
	for seed := uint64(1); steps > 0; seed++ {
		w := newWorld(t, rand.New(rand.NewPCG(seed, 1)))
		w.note("seed %d: %d routers, %d steps, gates %v, %v", seed, len(w.routers), len(w.live.Steps), w.live.Gates, w.live.OnFailure)
		var pending []leader
		for range 200 + w.r.IntN(600) {
			w.turn(&pending)
			steps--
		}
		if w.r.IntN(4) == 0 && !w.live.Phase.Final() {
			w.operator(rollout.Abort)
			if !w.live.Phase.Final() {
				w.fail("seed %d: aborted and not ended", seed)
			}
		}
		w.settle()
		ended[w.live.Phase]++
	}
	t.Logf("worlds ended as %v", ended)
	for p := rollout.Completed; p <= rollout.Overtaken; p++ {
		if ended[p] == 0 {
			t.Errorf("no world ended as %v, so that this test proves little", p)
		}
	}
}
