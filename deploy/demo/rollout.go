package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
)

const (
	stagedHomes = 12
	stagedFlows = 2 // down, and as many up, from one host of each home

	// leastGain is what homes must get of half as much again.
	leastGain = 1.1

	// mostRate is what each router is said to be able to shape.
	mostRate = 8e6

	soakTime   = 8 * time.Second
	lookEvery  = 500 * time.Millisecond
	stagedPing = 50 * time.Millisecond

	// delayGate compares what customers feel, trafficGate what they get.
	delayGate   = "p99_sojourn < 1.5x control"
	trafficGate = "utilisation > 0.75x control"
	answerGate  = "nack < 1%"
)

var (
	slowRates = rates{4e6, 1e6}
	fastRates = rates{6e6, 1.5e6}
)

// staged is one run of `make demo ROLLOUT=1`.
type staged struct {
	*show
	courses []*course
}

// rolloutDemo shows a good change that goes through its waves, and two bad ones
// that gates stop in the first.
func rolloutDemo(ctx context.Context, o options) (err error) {
	s := &staged{show: &show{options: o}}
	shown := false
	defer func() {
		if !shown {
			s.saveLogs()
		}
		err = errors.Join(err, s.close(o.keep && shown))
	}()
	for _, step := range []func(context.Context) error{s.build, s.begin, s.good, s.absurd, s.tooFast, s.lookBack, s.judge} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	if len(s.failures) > 0 {
		return errNotShown
	}
	shown = true
	return nil
}

// build makes the network, the fleet and what it should run.
func (s *staged) build(ctx context.Context) (err error) {
	say("A provider and %d homes on this machine: a controller, and an agent on each router. Every machine is a network", stagedHomes)
	say("namespace, and what follows is done to real packets.")
	say("")
	if err := os.RemoveAll(stateDir); err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return err
	}
	if s.net, err = homes.Build(prefix, stagedHomes); err != nil {
		return err
	}
	csv := []byte("id,plan\n")
	for i, h := range s.net.Homes {
		s.homes = append(s.homes, &home{Home: h, index: i, router: fmt.Sprintf("router-%d", i+1)})
		csv = fmt.Appendf(csv, "%s,%s\n", h.Name, planName)
	}
	if s.fleet, err = homes.NewFleet(s.net, s.bin, stateDir); err != nil {
		return err
	}
	s.fleet.ReportInterval = lookEvery
	if err := s.fleet.StartController(); err != nil {
		return err
	}
	if err := s.await(ctx, s.fleet.AwaitController); err != nil {
		return err
	}
	path := filepath.Join(stateDir, "homes.csv")
	if err := os.WriteFile(path, csv, 0o600); err != nil {
		return err
	}
	if _, err := s.ctl(ctx, true, "plan", "set", planName, "--down", bitText(slowRates.down), "--up", bitText(slowRates.up)); err != nil {
		return err
	}
	if _, err := s.ctl(ctx, true, "subscriber", "import", path); err != nil {
		return err
	}
	for i, h := range s.homes {
		token, err := s.ctl(ctx, false, "token", "create", "--router", h.router, "--subscriber", h.Name)
		if err != nil {
			return err
		}
		if err := s.fleet.StartAgent(i, strings.TrimSpace(token), "--max-rate", bitText(mostRate)); err != nil {
			return err
		}
	}
	return s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync })
}

// begin starts the traffic.
func (s *staged) begin(ctx context.Context) (err error) {
	if s.load, err = homes.NewLoad(s.net); err != nil {
		return err
	}
	s.began = time.Now()
	for _, h := range s.homes {
		if h.down, h.up, err = s.load.Bulk(h.index, 0, stagedFlows, homes.Server4, homes.Server6); err != nil {
			return err
		}
		if h.pings, err = s.load.Ping(h.index, 0, stagedPing); err != nil {
			return err
		}
	}
	say("")
	say("All %d routers shape. Traffic starts and goes on to the end: in each home %d TCP flows down and %d up fill the line of", stagedHomes, stagedFlows, stagedFlows)
	say("%v, and a small packet goes to the server and back every %v.", slowRates, stagedPing)
	say("")
	return sleep(ctx, settleTime+fillTime)
}

// look is what cakefleetctl rollout watch tells, as far as it is told here.
type look struct {
	at      time.Time
	Rollout struct {
		Phase, Reason string
		Wave          int
		Sizes         []int
		Verdicts      []verdict
	}
	Report struct {
		Changed struct{ Members, Offered, Applied, Clamped, Rejected, Unreachable, Already int }
		Gates   []verdict
		Missing string
	}
}

func (l *look) phase() string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(l.Rollout.Phase, "ROLLOUT_PHASE_"), "_", " "))
}

func (l *look) gate(name string) (v verdict, ok bool) {
	i := slices.IndexFunc(l.Report.Gates, func(v verdict) bool { return strings.HasPrefix(v.Gate, name) })
	if i < 0 {
		return v, false
	}
	return l.Report.Gates[i], true
}

// verdict is what a gate says.
type verdict struct {
	Wave                    int
	Gate, Result, Text      string
	Value, Limit, Reference float64
}

// course is one rollout as it went.
type course struct {
	id, heading  string
	began, ended time.Time
	looks        []look
	first        []string // routers of its first wave
	told         int      // verdicts that were told
}

func (c *course) last() *look { return &c.looks[len(c.looks)-1] }

// most returns how many routers had it at most.
func (c *course) most() (n int) {
	for _, l := range c.looks {
		if l.Rollout.Wave > 0 {
			n = max(n, l.Report.Changed.Members)
		}
	}
	return n
}

// add takes in a look, and tells what is new in it.
func (c *course) add(l look) {
	was := look{}
	if len(c.looks) > 0 {
		was = *c.last()
	}
	c.looks = append(c.looks, l)
	at := func(format string, args ...any) {
		say("   %5.1f s  %s", l.at.Sub(c.began).Seconds(), fmt.Sprintf(format, args...))
	}
	r, n := &l.Rollout, l.Report.Changed
	if r.Wave > was.Rollout.Wave {
		at("wave %d of %d is opened: %d of %d routers are to have it", r.Wave, len(r.Sizes), r.Sizes[r.Wave-1], stagedHomes)
	}
	for _, v := range r.Verdicts[c.told:] {
		at("the gate says %s: %s", v.Result, v.Text)
	}
	c.told = len(r.Verdicts)
	if l.phase() == was.phase() {
		return
	}
	switch l.phase() {
	case "soaking":
		at("%d run it, %d refused it; they are watched for a while", n.Applied+n.Clamped, n.Rejected)
	case "rolling back", "rolled back", "completed", "aborted", "overtaken", "paused":
		text := l.phase()
		if r.Reason != "" {
			text += ": " + r.Reason
		}
		at("%s", text)
	}
}

// run starts a rollout and follows it to its end. A rollout that pauses because
// its figures don't tell anything goes on with time for more of them.
func (s *staged) run(ctx context.Context, id, heading string, args ...string) (*course, error) {
	c := &course{id: id, heading: heading, began: time.Now()}
	args = append([]string{"rollout", "start", id, "--plan", planName}, args...)
	args = append(args, "--waves", "25%,50%,100%", "--answer-time", "10s", "--gate", answerGate, "--gate", delayGate, "--gate", trafficGate, "--on-failure", "rollback")
	if _, err := s.ctl(ctx, true, args...); err != nil {
		return nil, err
	}
	say("   $ cakefleetctl rollout watch %s     # the same in plain words:", id)
	for try := 1; ; try++ {
		err := s.watch(ctx, c)
		if len(c.looks) == 0 {
			return nil, errors.Join(err, fmt.Errorf("rollout %s can't be watched", id))
		}
		if c.last().phase() != "paused" || try == tries {
			break
		}
		say("   It was paused as it has too little to judge by: is this machine busy with other things? It has the time again:")
		if _, err := s.ctl(ctx, true, "rollout", "resume", id); err != nil {
			return nil, err
		}
	}
	c.ended = time.Now()
	s.courses = append(s.courses, c)
	return c, ctx.Err()
}

// watch follows a rollout until it ends or pauses. That a rollout did not go well
// is told by its last look, and not an error.
func (s *staged) watch(ctx context.Context, c *course) error {
	read, write := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := s.fleet.CtlTo(ctx, write, nil, "rollout", "watch", c.id, "--every", lookEvery.String(), "-o", "json")
		_ = write.Close() // of a pipe in memory
		ended <- err
	}()
	d := json.NewDecoder(read)
	var bad error
	for {
		var l look
		if bad = d.Decode(&l); bad != nil {
			break
		}
		l.at = time.Now()
		if len(c.first) == 0 && l.Rollout.Wave == 1 {
			if bad = s.firstWave(ctx, c); bad != nil {
				break
			}
		}
		c.add(l)
	}
	_, _ = io.Copy(io.Discard, read) // so that the command can end
	err := <-ended
	if !errors.Is(bad, io.EOF) {
		return bad
	}
	if len(c.looks) > 0 {
		return nil
	}
	return err
}

// firstWave finds out whose routers are in the first wave.
func (s *staged) firstWave(ctx context.Context, c *course) error {
	text, err := s.ctl(ctx, false, "rollout", "routers", c.id, "-o", "json")
	if err != nil {
		return err
	}
	var list struct {
		Routers []struct {
			ID   string
			Wave int
		}
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return fmt.Errorf("routers of rollout %s: %w", c.id, err)
	}
	for _, r := range list.Routers {
		if r.Wave == 1 {
			c.first = append(c.first, r.ID)
		}
	}
	return nil
}

// goodput returns what some of the homes got down in a time, bits/s each.
func (s *staged) goodput(from, to time.Time, fits func(*home) bool) float64 {
	var sum, n float64
	for _, h := range s.homes {
		if fits(h) {
			sum += s.load.Record.Goodput(from, to, h.down...)
			n++
		}
	}
	return sum / max(n, 1)
}

func all(*home) bool { return true }

// good is a change that is good for everybody.
func (s *staged) good(ctx context.Context) error {
	say("1. The plan is to be faster, %v instead of %v. Nobody wants to learn on all customers at once, so it goes out in", fastRates, slowRates)
	say("   waves, each with those before it. At the end of each, its routers are compared with those that are not changed yet:")
	before := time.Now()
	was := s.goodput(before.Add(-5*time.Second), before, all)
	var c *course
	for try := 1; ; try++ {
		id, soak := "faster", soakTime
		args := []string{"--down", bitText(fastRates.down), "--up", bitText(fastRates.up)}
		if try > 1 {
			say("   A gate has stopped it, and it is good: is this machine busy with other things? Once more, with more time to judge it:")
			id, soak = fmt.Sprintf("faster-%d", try), time.Duration(try)*soakTime
			args = append(args, "--ignore-hold")
		}
		var err error
		if c, err = s.run(ctx, id, "good: "+fastRates.String(), append(args, "--soak", soak.String())...); err != nil {
			return err
		}
		if c.last().phase() != "rolled back" || try == tries {
			break
		}
		c.heading = "good, and stopped in error"
	}
	s.check(c.last().phase() == "completed", "the good change is completed (it is %s)", c.last().phase())
	for _, l := range c.looks {
		if w := l.Rollout.Wave; w > 0 {
			s.check(l.Report.Changed.Members <= l.Rollout.Sizes[w-1], "wave %d has at most %d routers (%d)", w, l.Rollout.Sizes[w-1], l.Report.Changed.Members)
		}
	}
	if err := s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync }); err != nil {
		return err
	}
	is := 0.
	for try := 1; try <= tries && is <= leastGain*was; try++ {
		if err := sleep(ctx, settleTime); err != nil {
			return err
		}
		now := time.Now()
		is = s.goodput(now.Add(-settleTime), now, all)
	}
	s.check(is > leastGain*was, "homes get more than before (%.2f Mbit/s of TCP payload down, before %.2f)", is/1e6, was/1e6)
	say("   Each home gets %.2f Mbit/s of TCP payload down on average, before it were %.2f.", is/1e6, was/1e6)
	say("")
	return nil
}

// bad holds a rollout that must be stopped in its first wave against that.
func (s *staged) bad(c *course, gates ...string) {
	l := c.last()
	s.check(l.phase() == "rolled back", "rollout %s is rolled back (it is %s)", c.id, l.phase())
	s.check(c.most() == l.Rollout.Sizes[0], "rollout %s: %d routers were to have it, the first wave has %d", c.id, c.most(), l.Rollout.Sizes[0])
	stopped := false
	for _, v := range l.Rollout.Verdicts {
		s.check(v.Wave == 1, "rollout %s does not come to wave %d", c.id, v.Wave)
		stopped = stopped || v.Result == "fail" && slices.Contains(gates, v.Gate)
	}
	s.check(stopped, "rollout %s is stopped by the gate %s", c.id, strings.Join(gates, " or "))
}

// absurd is a change that routers take, and customers feel.
func (s *staged) absurd(ctx context.Context) error {
	say("2. Somebody means well and sets the overhead of another kind of line: 256 bytes and ATM cells for every packet. Each")
	say("   router can do that, so that nothing refuses it. But lines seem longer than they are, and customers would feel it:")
	c, err := s.run(ctx, "overhead", "bad: absurd overhead", "--set", "down.raw=false", "--set", "down.overhead=256", "--set", "down.framing=atm",
		"--set", "up.raw=false", "--set", "up.overhead=256", "--set", "up.framing=atm", "--soak", soakTime.String())
	if err != nil {
		return err
	}
	s.bad(c, delayGate, trafficGate)
	in := func(h *home) bool { return slices.Contains(c.first, h.router) }
	from, to := c.ended.Add(-soakTime/2), c.ended.Add(-lookEvery)
	few, rest := s.goodput(from, to, in), s.goodput(from, to, func(h *home) bool { return !in(h) })
	s.check(few < 0.95*rest, "the homes of the first wave felt it (%.2f Mbit/s down, the others %.2f)", few/1e6, rest/1e6)
	say("   %d homes got %.2f Mbit/s of TCP payload down for some seconds; the other %d had %.2f all the time.", len(c.first), few/1e6, stagedHomes-len(c.first), rest/1e6)
	say("   Nobody can do it again by mistake:")
	if _, err := s.ctl(ctx, false, "rollout", "start", "again", "--plan", planName, "--set", "down.raw=false", "--set", "down.overhead=256", "--set", "down.framing=atm",
		"--set", "up.raw=false", "--set", "up.overhead=256", "--set", "up.framing=atm"); err == nil {
		s.check(false, "what was rolled back is held until it is edited")
	} else {
		_, why, _ := strings.Cut(err.Error(), "cakefleetctl: ")
		say("   $ cakefleetctl rollout start again --plan %s --set down.overhead=256 ...", planName)
		say("   %s", why)
	}
	say("")
	return s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync })
}

// tooFast is a change that routers refuse.
func (s *staged) tooFast(ctx context.Context) error {
	rate := rates{9e6, 2e6}
	say("3. A rate that these routers can't do: they shape %g Mbit/s at most (--max-rate), and say so before they change anything:", mostRate/1e6)
	c, err := s.run(ctx, "too-fast", "bad: rate too high", "--down", bitText(rate.down), "--up", bitText(rate.up), "--soak", soakTime.String())
	if err != nil {
		return err
	}
	s.bad(c, answerGate)
	say("")
	return s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync })
}

// lookBack shows what the operator sees afterwards.
func (s *staged) lookBack(ctx context.Context) error {
	say("4. What is known afterwards, with the figures that made each verdict:")
	for _, args := range [][]string{{"rollout", "history"}, {"rollout", "history", "overhead"}, {"audit", "list", "--what", "plan/" + planName}} {
		if _, err := s.ctl(ctx, true, args...); err != nil {
			return err
		}
		say("")
	}
	return nil
}

// judge draws the picture and tells whether all of it holds.
func (s *staged) judge(ctx context.Context) error {
	if err := s.drawCourses(); err != nil {
		return err
	}
	say("Picture: %s", s.svg)
	say("")
	for _, e := range s.load.Record.Errors() {
		s.check(false, "every flow lives to the end: %s", e)
	}
	states, err := s.fleet.Routers(ctx)
	if err != nil {
		return err
	}
	for _, r := range states {
		s.check(r.Connected && r.Sync, "%s runs what it should", r.ID)
	}
	if len(s.failures) > 0 {
		for _, f := range s.failures {
			say("  %s", f)
		}
		return nil
	}
	say("All of this holds:")
	say("  - the good change went through its waves to all %d routers, and homes get more", stagedHomes)
	say("  - of each bad one only the %d routers of the first wave knew, a gate stopped it, and they have what they had before", s.courses[0].last().Rollout.Sizes[0])
	say("  - every TCP flow lived through all of it")
	return nil
}
