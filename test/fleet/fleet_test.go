package fleet_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/fleet/model"
)

var (
	seed   = flag.Uint64("seed", 0, "repeats the faults of a run; 0: others each time")
	rounds = flag.Int("rounds", 1, "how often each kind of fault comes")
)

const (
	plans   = 4
	routers = 60

	// patience is for what takes a moment unless something is broken, or a
	// machine has other things to do.
	patience = 3 * time.Minute

	// notice is how long an agent takes to find out that its controller has
	// failed without closing the connection.
	notice = time.Second
)

// insideEnv is set in the process that is inside the core's namespace, and has
// the prefix of the others.
const insideEnv = "CAKEFLEET_TEST_INSIDE"

// TestHistory is a fleet under faults of every kind, and its judgement.
func TestHistory(t *testing.T) {
	if *seed == 0 {
		*seed = rand.Uint64N(1_000_000) + 1
	}
	if prefix := os.Getenv(insideEnv); prefix != "" {
		inside(t, prefix)
		return
	}
	t.Parallel()
	t.Logf("seed %d", *seed)
	if os.Geteuid() != 0 {
		t.Log("nothing is cut off: namespaces need root")
		history(t, &network{base: 70})
		return
	}
	testnet.Require(t)
	// Only a process that starts in the core's namespace has all its threads
	// there.
	core := testnet.Make(t, "flt")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHistory$", "-test.v", fmt.Sprintf("-seed=%d", *seed), fmt.Sprintf("-rounds=%d", *rounds), "-test.timeout=2h")
	cmd.Env = append(os.Environ(), insideEnv+"="+core.Name+"-")
	out := &lines{t: t}
	cmd.Stdout, cmd.Stderr = out, out
	if err := core.Run(cmd); err != nil {
		t.Errorf("seed %d: %v", *seed, err)
	}
}

// lines passes on what the process inside says.
type lines struct{ t *testing.T }

func (l *lines) Write(b []byte) (int, error) {
	l.t.Logf("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

func inside(t *testing.T, prefix string) {
	core, err := testnet.Open(strings.TrimSuffix(prefix, "-"))
	if err != nil {
		t.Fatal(err)
	}
	nodes, closeAll, err := namespaces(core, prefix, 3, 3)
	t.Cleanup(func() {
		if err := closeAll(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	history(t, nodes)
}

// fault is something bad that happens to a process for a time.
type fault struct {
	kind   string // kill, stop, cut
	target string // controller or etcd
	length time.Duration
	leader bool // who leads the led work, or etcd
}

func history(t *testing.T, nodes *network) {
	random := rand.New(rand.NewPCG(*seed, 2))
	c := newCluster(t, nodes, 3, 3, nil)
	l := newLoad(t, c, *seed, plans, routers)
	limit, done := context.WithTimeout(t.Context(), patience)
	defer done()
	if !wait(limit, l.settled) {
		t.Fatal("the fleet does not settle before anything bad happens")
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	worked := make(chan struct{})
	go func() {
		defer close(worked)
		l.work(ctx, plans)
	}()
	kinds := []string{"kill", "stop"}
	if nodes.core != nil {
		kinds = append(kinds, "cut")
	}
	var faults []fault
	for range *rounds {
		for _, target := range []string{"controller", "etcd"} {
			for _, kind := range kinds {
				f := fault{kind, target, time.Duration(1500+random.IntN(1000)) * time.Millisecond, random.IntN(2) == 0}
				if kind == "stop" {
					f.length, f.leader = 2*ttl+time.Duration(random.IntN(1000))*time.Millisecond, true
				}
				faults = append(faults, f)
			}
		}
	}
	random.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for _, f := range faults {
		l.suffer(f, random)
		time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond)
	}
	// A slow machine needs longer for enough to be judged.
	enough := func() bool { return l.count(model.Wrote) >= 20 && l.count(model.Showed) > 0 && len(l.steps()) >= 20 }
	limit, done = context.WithTimeout(t.Context(), patience)
	defer done()
	wait(limit, enough)
	stop()
	<-worked
	h := l.finish(patience)
	found := model.Judge(h)
	for i, v := range found {
		if i == 20 {
			t.Errorf("and %d more", len(found)-20)
			break
		}
		t.Error(v)
	}
	counts := map[model.Kind]int{}
	moves := 0
	for _, e := range h.Events {
		counts[e.Kind]++
		if e.Kind == model.Failed {
			moves += len(e.Routers)
		}
	}
	t.Logf("seed %d, %v: %d faults, %d writes and %d perhaps, %d sessions, %d pushes, %d changes, %d steps of led work, %d routers lost their controller, %d moved",
		*seed, time.Since(l.began).Round(time.Second), len(faults), counts[model.Wrote], counts[model.MaybeWrote], counts[model.Began], counts[model.Pushed], counts[model.Applied], counts[model.Led], moves, model.Moved(h))
	if counts[model.Wrote] < 20 || counts[model.Applied] < routers || counts[model.Led] < 20 || model.Moved(h) == 0 || counts[model.Showed] == 0 {
		t.Error("too little happened to judge")
	}
}

// suffer makes a fault happen and heals it.
func (l *load) suffer(f fault, random *rand.Rand) {
	l.t.Helper()
	all := l.controllers
	if f.target == "etcd" {
		all = l.etcd
	}
	p := all[random.IntN(len(all))]
	if f.leader {
		if leader := l.leader(f.target); leader >= 0 {
			p = all[leader]
		}
	}
	l.t.Logf("%v: %s %s for %v", time.Since(l.began).Round(time.Millisecond), f.kind, p.name, f.length)
	p.setFaulty(true)
	switch f.kind {
	case "kill":
		p.signal(syscall.SIGKILL)
		<-p.done
	case "stop":
		p.signal(syscall.SIGSTOP)
	case "cut":
		if err := l.net.cut(p, true); err != nil {
			l.t.Error(err)
		}
	}
	if f.target == "controller" {
		l.failed(p, notice)
	}
	time.Sleep(f.length)
	switch f.kind {
	case "kill":
		p.start(l.t)
	case "stop":
		p.signal(syscall.SIGCONT)
	case "cut":
		if err := l.net.cut(p, false); err != nil {
			l.t.Error(err)
		}
	}
	if f.target == "controller" && f.kind == "kill" {
		// It is up again when it answers.
		l.running.Go(func() {
			ctx, cancel := context.WithTimeout(l.t.Context(), patience)
			defer cancel()
			wait(ctx, func() bool {
				conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", p.ip+":8443")
				if err == nil {
					_ = conn.Close()
				}
				return err == nil
			})
			p.setFaulty(false)
		})
		return
	}
	p.setFaulty(false)
}

// leader returns which controller leads the led work, or which member leads
// etcd; -1 if nobody knows.
func (l *load) leader(target string) int {
	ctx, cancel := context.WithTimeout(l.t.Context(), 5*time.Second)
	defer cancel()
	if target == "etcd" {
		st, err := l.store.EtcdStatus(ctx)
		if err != nil {
			return -1
		}
		for _, m := range st.Members {
			if m.Leader {
				return slices.IndexFunc(l.etcd, func(p *process) bool { return p.name == m.Name })
			}
		}
		return -1
	}
	kv, err := l.store.Leases()
	if err != nil {
		return -1
	}
	leaders, err := lead.Leaders(ctx, kv)
	if err != nil {
		return -1
	}
	return slices.IndexFunc(l.controllers, func(p *process) bool { return p.name == leaders["test-tally"] })
}

// TestPlantedBugs shows that the judge finds what is wrong with agents and
// controllers, and not only what is wrong with a history.
func TestPlantedBugs(t *testing.T) {
	if os.Getenv(insideEnv) != "" {
		t.Skip("is for the process outside")
	}
	t.Parallel()
	const last = 77_777_000 // the rate of the last write
	for i, c := range []struct {
		name   string
		want   string
		change func(*controllerPart)
		plant  func(*load, *simagent.Agent, simagent.Push, plan.Status) (plan.Status, bool)
		during func(*load)
	}{
		{name: "nothing"},
		{name: "answer", want: "unanswered", plant: once(func(_ *load, _ *simagent.Agent, _ simagent.Push, s plan.Status) (plan.Status, bool) {
			return s, false
		})},
		{name: "stale", want: "stale", plant: once(func(l *load, a *simagent.Agent, _ simagent.Push, _ plan.Status) (plan.Status, bool) {
			// What ran before, as if the push had come too late.
			was := l.before(a.RouterID)
			return plan.Status{Outcome: plan.OutcomeApplied, Applied: was.Revision, AppliedHash: was.Hash, EffectiveHash: was.Hash, Effective: was.Link}, true
		})},
		{name: "event", want: "not converged", change: func(p *controllerPart) { p.Lose = fmt.Sprintf(`"rate_bps":%d,`, last) }},
		{name: "fence", want: "led by two", change: func(p *controllerPart) { p.NoFence = true }, during: func(l *load) {
			// One that is stopped between two steps does nothing wrong.
			for range 10 {
				if !wait(l.t.Context(), func() bool { return l.leader("controller") >= 0 }) {
					return
				}
				l.suffer(fault{kind: "stop", target: "controller", length: 2*ttl + time.Second, leader: true}, rand.New(rand.NewPCG(1, 1)))
				time.Sleep(time.Second)
				if l.ledByTwo() {
					return
				}
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := newLoad(t, newCluster(t, &network{base: 71 + i}, 1, 2, c.change), 1, 2, 8)
			limit, done := context.WithTimeout(t.Context(), patience)
			defer done()
			if !wait(limit, l.settled) {
				t.Fatal("the fleet does not settle before anything bad happens")
			}
			for range 5 {
				l.mustWrite(limit, "plan-0", l.operators[0], 0)
				l.mustWrite(limit, "plan-1", l.operators[1], 0)
				time.Sleep(200 * time.Millisecond)
				l.look(t.Context())
			}
			l.mu.Lock()
			l.plant = c.plant
			l.mu.Unlock()
			if c.during != nil {
				c.during(l)
			}
			l.mustWrite(limit, "plan-0", l.operators[0], last)
			l.mustWrite(limit, "plan-1", l.operators[1], 0)
			// Without a fault all has to settle; with one it may never.
			length := 5 * time.Second
			if c.want == "" {
				length = patience
			}
			found := model.Judge(l.finish(length))
			wanted := func() bool {
				return slices.ContainsFunc(found, func(v model.Violation) bool { return v.Rule == c.want })
			}
			for c.want != "" && !wanted() && limit.Err() == nil {
				found = model.Judge(l.finish(time.Second))
			}
			for _, v := range found {
				t.Log(v)
			}
			if c.want == "" && len(found) > 0 {
				t.Errorf("%d violations, and nothing was planted", len(found))
			}
			if c.want != "" && !wanted() {
				t.Errorf("the judge did not find %q", c.want)
			}
		})
	}
}

// once plants a fault in the first push after it was set.
func once(plant func(*load, *simagent.Agent, simagent.Push, plan.Status) (plan.Status, bool)) func(*load, *simagent.Agent, simagent.Push, plan.Status) (plan.Status, bool) {
	var done atomic.Bool
	return func(l *load, a *simagent.Agent, p simagent.Push, s plan.Status) (plan.Status, bool) {
		if done.Swap(true) {
			return s, true
		}
		return plant(l, a, p, s)
	}
}
