package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
)

type options struct {
	bin, svg string
	keep     bool
}

// stateDir has the state and logs of the demo's fleet. It is fixed, so that
// --end and the next run find it.
const stateDir = "/run/cakefleet-demo"

const (
	homesCount  = 3
	flowsEach   = 2 // down, and as many up, from each of a home's two hosts
	planName    = "family"
	pingEvery   = 10 * time.Millisecond
	fifoBuffer  = 250 * time.Millisecond
	fillTime    = 7 * time.Second // until TCP has filled a FIFO
	settleTime  = 4 * time.Second // until TCP has found a new rate
	measureTime = 9 * time.Second
	grace       = time.Second // until the last probes are back
)

var (
	oldRates = rates{20e6, 5e6}
	newRates = rates{50e6, 12e6}
)

// show is one run of the demo.
type show struct {
	options
	net   *homes.Network
	fleet *homes.Fleet
	load  *homes.Load
	homes []*home
	began time.Time // of the traffic

	baseline, before, after *phase
	shapedAt, changedAt     time.Time
	revision                int64 // of the last write
	failures                []string
}

func demo(ctx context.Context, o options) (err error) {
	s := &show{options: o}
	shown := false
	defer func() {
		// A panic passes here too. Only a demo that went well is left running.
		if !shown {
			s.saveLogs()
		}
		err = errors.Join(err, s.close(o.keep && shown))
	}()
	for _, step := range []func(context.Context) error{
		s.buildNetwork, s.prepare, s.startTraffic, s.measureFIFO, s.shape, s.changePlan, s.lookAround, s.tell,
	} {
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

// say prints a paragraph.
func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func (s *show) buildNetwork(context.Context) (err error) {
	say("A provider and three homes on this machine. Every machine is a network namespace:")
	say("")
	say("  server ──┐            ┌── router-1 (NAT) ── hosts a, b")
	say("           ├── [core] ──┼── router-2 (NAT) ── hosts a, b")
	say("  noc ─────┘            └── router-3 (NAT) ── hosts a, b")
	say("  (cakefleet-controller)    (a cakefleet-agent on each)")
	say("")
	if err := os.RemoveAll(stateDir); err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return err
	}
	if s.net, err = homes.Build(prefix, homesCount); err != nil {
		return err
	}
	for i, h := range s.net.Homes {
		s.homes = append(s.homes, &home{Home: h, index: i, router: fmt.Sprintf("router-%d", i+1)})
		// From the start the lines are what the provider sells without cakefleet.
		if err := h.Limit(uint64(oldRates.down), uint64(oldRates.up), fifoBuffer); err != nil {
			return err
		}
	}
	s.fleet, err = homes.NewFleet(s.net, s.bin, stateDir)
	return err
}

// prepare starts the controller and makes the plan, the subscribers and the
// join tokens.
func (s *show) prepare(ctx context.Context) error {
	if err := s.fleet.StartController(); err != nil {
		return err
	}
	if err := s.await(ctx, s.fleet.AwaitController); err != nil {
		return err
	}
	say("The controller is up. The operator makes a plan, brings the subscribers from billing, and makes a one-use join")
	say("token for each router:")
	if _, err := s.ctl(ctx, true, "plan", "set", planName, "--down", bitText(oldRates.down), "--up", bitText(oldRates.up),
		"--options", "diffserv4 nat", "--up-options", "ack-filter"); err != nil {
		return err
	}
	csv := filepath.Join(stateDir, "homes.csv")
	lines := []byte("id,plan\n")
	for _, h := range s.homes {
		lines = fmt.Appendf(lines, "%s,%s\n", h.Name, planName)
	}
	if err := os.WriteFile(csv, lines, 0o600); err != nil {
		return err
	}
	if _, err := s.ctl(ctx, true, "subscriber", "import", csv); err != nil {
		return err
	}
	for i, h := range s.homes {
		token, err := s.ctl(ctx, i == 0, "token", "create", "--router", h.router, "--subscriber", h.Name)
		if err != nil {
			return err
		}
		h.token = strings.TrimSpace(token)
	}
	say("")
	return nil
}

func (s *show) startTraffic(context.Context) (err error) {
	if s.load, err = homes.NewLoad(s.net); err != nil {
		return err
	}
	s.began = time.Now()
	for _, h := range s.homes {
		for host := range homes.HostsPerHome {
			down, up, err := s.load.Bulk(h.index, host, flowsEach, homes.Server4, homes.Server6)
			if err != nil {
				return err
			}
			h.down, h.up = append(h.down, down...), append(h.up, up...)
		}
		if h.pings, err = s.load.Ping(h.index, 0, pingEvery); err != nil {
			return err
		}
	}
	n := flowsEach * homes.HostsPerHome
	say("Traffic starts and goes on to the end. In each home: %d TCP flows down and %d up, half of them IPv6,", n, n)
	say("and a small packet to the server and back every %v over IPv4 and over IPv6.", pingEvery)
	say("")
	return nil
}

// measureFIFO measures the lines as they are without shaping.
func (s *show) measureFIFO(ctx context.Context) (err error) {
	say("1. Without cakefleet: a line of %v with a plain FIFO of %v, as most lines are.", oldRates, fifoBuffer)
	s.baseline, err = s.measure(ctx, "FIFO", oldRates, false, fillTime)
	return err
}

// shape lets three agents join and takes the bottlenecks away.
func (s *show) shape(ctx context.Context) (err error) {
	say("2. An agent starts on each router: it makes its key, joins over its own WAN with the token, gets what the plan")
	say("   says, and shapes. The FIFO is gone; the line itself could carry far more.")
	s.shapedAt = time.Now()
	for i, h := range s.homes {
		if err := s.fleet.StartAgent(i, h.token); err != nil {
			return err
		}
	}
	if err := s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync }); err != nil {
		return err
	}
	say("   All three shape %v after their start, most of it round trips through the full FIFO.", time.Since(s.shapedAt).Round(10*time.Millisecond))
	for _, h := range s.homes {
		if err := h.Open(); err != nil {
			return err
		}
	}
	s.before, err = s.measure(ctx, "shaped", oldRates, true, settleTime)
	return err
}

// changePlan is what the demo is about.
func (s *show) changePlan(ctx context.Context) (err error) {
	states, err := s.fleet.Routers(ctx)
	if err != nil {
		return err
	}
	for _, r := range states {
		s.revision = max(s.revision, r.Desired)
	}
	say("3. While all of that runs, the plan changes, in one place:")
	s.changedAt = time.Now()
	if _, err := s.ctl(ctx, true, "plan", "set", planName, "--down", bitText(newRates.down), "--up", bitText(newRates.up)); err != nil {
		return err
	}
	if err := s.awaitRouters(ctx, func(r homes.RouterState) bool { return r.Sync && r.Desired > s.revision }); err != nil {
		return err
	}
	took := time.Since(s.changedAt)
	states, err = s.fleet.Routers(ctx)
	if err != nil {
		return err
	}
	say("   All three routers acknowledged it within %v, and what their data planes run was read back.", took.Round(10*time.Millisecond))
	for _, r := range states {
		s.check(r.Applied == s.revision+1, "%s applied revision %d, the one write after %d", r.ID, r.Applied, s.revision)
	}
	s.after, err = s.measure(ctx, "changed", newRates, true, settleTime)
	return err
}

// tries is how often a phase is measured at most: whatever else this machine
// does takes from what homes get.
const tries = 3

// measure waits until the traffic has settled and then measures one phase. A
// shaped one that is not as it should be is measured again.
func (s *show) measure(ctx context.Context, name string, r rates, shaped bool, settle time.Duration) (*phase, error) {
	if err := sleep(ctx, settle); err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		p := &phase{name: name, rates: r}
		m, err := homes.NewMeter(s.net.Homes...)
		if err != nil {
			return nil, err
		}
		if err := sleep(ctx, measureTime); err != nil {
			return nil, err
		}
		if err := m.End(); err != nil {
			return nil, err
		}
		p.to = time.Now()
		if err := sleep(ctx, grace); err != nil {
			return nil, err
		}
		for i, h := range s.homes {
			x := m.Result(i, s.load.Record, h.down, h.up, h.pings)
			p.results = append(p.results, x)
			say("   %s: %5.2f Mbit/s down, %5.2f up; a small packet takes %s there and back, one in a hundred over %s",
				h.router, x.Down.Goodput/1e6, x.Up.Goodput/1e6, ms(x.Latency.Median), ms(x.Latency.P99))
		}
		say("")
		misses := s.misses(p)
		if !shaped || len(misses) == 0 {
			return p, nil
		}
		if try == tries {
			s.failures = append(s.failures, misses...)
			return p, nil
		}
		say("   That is not as it should be; is this machine busy with other things? Measured again:")
	}
}

// lookAround shows what the operator sees, while the traffic still runs.
func (s *show) lookAround(ctx context.Context) error {
	say("4. What the operator sees:")
	for _, args := range [][]string{
		{"router", "list"},
		{"router", "show", s.homes[0].router},
		{"stats", s.homes[0].router},
		{"stats", "--by", "plan"},
	} {
		if _, err := s.ctl(ctx, true, args...); err != nil {
			return err
		}
		say("")
	}
	return nil
}

// close takes everything down, or leaves the fleet running.
func (s *show) close(keep bool) error {
	var errs []error
	if s.load != nil {
		errs = append(errs, s.load.Stop())
	}
	if keep {
		s.sayKept()
		return errors.Join(errs...)
	}
	if s.fleet != nil {
		errs = append(errs, s.fleet.Stop())
	}
	if s.net != nil {
		errs = append(errs, s.net.Close())
	}
	if left, err := homes.Namespaces(prefix); err != nil {
		errs = append(errs, err)
	} else if len(left) > 0 {
		errs = append(errs, fmt.Errorf("left behind: %v", left))
	}
	return errors.Join(append(errs, os.RemoveAll(stateDir))...)
}

// saveLogs keeps what the programs wrote beside the picture.
func (s *show) saveLogs() {
	if err := os.MkdirAll(filepath.Dir(s.svg), 0o755); err != nil {
		say("demo: keep logs: %v", err)
		return
	}
	logs, _ := filepath.Glob(stateDir + "/*.log") // the pattern is right
	for _, from := range logs {
		to := filepath.Join(filepath.Dir(s.svg), "demo-"+filepath.Base(from))
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, text, 0o600)
		}
		if err != nil {
			say("demo: keep the log %s: %v", from, err)
			continue
		}
		say("Log kept: %s", to)
	}
}

func (s *show) sayKept() {
	ctl := fmt.Sprintf("nsenter --net=/run/netns/%s %s --credentials %s", s.net.Noc.Name, filepath.Join(s.bin, "cakefleetctl"), s.fleet.Credentials())
	say("")
	say("The fleet goes on running. Look around, as root:")
	say("  %s router list", ctl)
	say("  %s plan set %s --down 30mbit --up 8mbit", ctl, planName)
	say("  %s stats %s", ctl, s.homes[0].router)
	say("  nsenter --net=/run/netns/%s sh      # a LAN host; %s is the server", s.net.Homes[0].Hosts[0].Name, homes.Server4)
	say("  less %s/controller.log %s/home-1.log", stateDir, stateDir)
	say("End it:")
	say("  %s --end", os.Args[0])
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// bitText is a rate as tc writes it.
func bitText(rate float64) string { return fmt.Sprintf("%gmbit", rate/1e6) }
