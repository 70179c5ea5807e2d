package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/controllertest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rig is a real controller and what operators see of it.
type rig struct {
	t           *testing.T
	agents, ops string
	credentials string
	conn        *grpc.ClientConn
	http        string
	client      *http.Client
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c := controllertest.Config(t.TempDir())
	c.ListenHTTP, c.ReportInterval = "127.0.0.1:0", 100*time.Millisecond
	at := controllertest.Start(t, c)
	r := &rig{t: t, agents: at.Agents.String(), ops: at.Operators.String(), credentials: at.Credentials}
	r.conn, r.http = at.Operate(t), "https://"+at.HTTP.String()
	transport := &http.Transport{TLSClientConfig: at.TLS(t)}
	r.client = &http.Client{Transport: transport}
	t.Cleanup(transport.CloseIdleConnections)
	return r
}

func (r *rig) setPlan(rate engine.BitsPerSecond) {
	r.t.Helper()
	l := plan.DefaultLink()
	l.Down.Rate, l.Up.Rate = rate, rate/10
	_, err := pb.NewPlanServiceClient(r.conn).UpdatePlan(r.t.Context(), &pb.UpdatePlanRequest{Plan: &pb.Plan{Name: "gold", Link: wire.FromLink(&l)}, AllowMissing: true})
	if err != nil {
		r.t.Fatal(err)
	}
}

// join has routers with the plan gold join, as the options say, and returns who
// plays them and what removes them.
func (r *rig) join(options ...string) (p *player, leave func()) {
	r.t.Helper()
	o, err := parse(append([]string{"--agents", r.agents, "--operators", r.ops, "--credentials", r.credentials, "--plan", "gold", "--quiet"}, options...), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	members, fleet, err := join(r.t.Context(), o, nil, &bytes.Buffer{})
	if err != nil {
		fleet.close()
		r.t.Fatal(err)
	}
	return newPlayer(o, fleet.roots, members), fleet.close
}

func (r *rig) routers() []*pb.Router {
	r.t.Helper()
	resp, err := pb.NewRouterServiceClient(r.conn).ListRouters(r.t.Context(), &pb.ListRoutersRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetRouters()
}

func (r *rig) eventually(what string, holds func() bool) {
	r.t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within a minute", what)
		}
	}
}

// sim is a run of the program.
type sim struct {
	stop func() (summary, string)
}

// start runs the program until stop is called.
func (r *rig) start(args ...string) sim {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	var stdout, stderr bytes.Buffer
	done := make(chan error, 1)
	args = append([]string{"--agents", r.agents, "--operators", r.ops, "--credentials", r.credentials, "-o", "json"}, args...)
	go func() { done <- run(ctx, args, strings.NewReader(""), &stdout, &stderr) }()
	stop := sync.OnceValues(func() (s summary, progress string) {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("cakefleet-sim %v: %v", args, err)
			return s, stderr.String()
		}
		if err := json.Unmarshal(stdout.Bytes(), &s); err != nil {
			r.t.Errorf("%v in %s", err, stdout.String())
		}
		return s, stderr.String()
	})
	r.t.Cleanup(func() { stop() })
	return sim{stop}
}

// in counts the connected routers that stand as sync says.
func (r *rig) in(sync pb.SyncState) (n int) {
	for _, x := range r.routers() {
		if x.GetSession().GetConnected() && x.GetSession().GetSync() == sync {
			n++
		}
	}
	return n
}

// Routers that the operators' door makes do as they are told to be played, and
// are gone afterwards.
func TestFleet043_PlaysAFleet(t *testing.T) {
	r := newRig(t)
	r.setPlan(100e6)
	s := r.start("-n", "40", "--plan", "gold", "--sites", "3", "--refuse", "20%", "--clamp", "20%", "--offline", "20%")
	var refuse, clamp, away int
	o := &options{n: 40, prefix: "sim-", refuse: 0.2, clamp: 0.2, offline: 0.2, seed: 1}
	for i := range o.n {
		switch o.mannerOf(o.id(i)) {
		case refuses:
			refuse++
		case clamps:
			clamp++
		case stays:
			away++
		case good:
		}
	}
	if refuse == 0 || clamp == 0 || away == 0 || refuse+clamp+away > 35 {
		t.Fatalf("%d refuse, %d clamp, %d stay away of 40", refuse, clamp, away)
	}
	good := 40 - refuse - clamp - away
	rate := func(bps uint64) (n int) {
		for _, x := range r.routers() {
			if x.GetReported().GetEffective().GetDown().GetRateBps() == bps {
				n++
			}
		}
		return n
	}
	r.eventually("all have answered", func() bool {
		return rate(100e6) == good && rate(50e6) == clamp && r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == good
	})
	r.setPlan(200e6)
	r.eventually("good ones run the new plan, clamping ones half of it", func() bool { return rate(200e6) == good && rate(100e6) == clamp })
	telemetry := pb.NewTelemetryServiceClient(r.conn)
	r.eventually("reports", func() bool {
		for i := range o.n {
			if o.mannerOf(o.id(i)) == stays {
				continue
			}
			stats, err := telemetry.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: o.id(i)})
			if err != nil || stats.GetReport().GetSequence() < 3 {
				return false
			}
		}
		return true
	})
	got, progress := s.stop()
	if got.Routers != 40 || got.Offline != away || got.Sessions != int64(40-away) || got.AllSeconds <= 0 || got.Began != int64(40-away) {
		t.Errorf("sessions: %+v", got)
	}
	if got.Acks < int64(2*(good+clamp)) || got.Clamped < int64(2*clamp) || got.Refused < int64(refuse) || got.Pushes != got.Acks+got.Refused || got.Reports == 0 {
		t.Errorf("answers: %+v", got)
	}
	if !(got.LagMaxSeconds > 0 && got.LagP50Seconds <= got.LagP99Seconds && got.LagP99Seconds <= got.LagMaxSeconds) {
		t.Errorf("lag: %+v", got)
	}
	if !strings.Contains(progress, "removing 40 routers") {
		t.Errorf("progress: %s", progress)
	}
	subs, err := pb.NewSubscriberServiceClient(r.conn).ListSubscribers(t.Context(), &pb.ListSubscribersRequest{})
	if n := len(r.routers()); n != 0 || err != nil || len(subs.GetSubscribers()) != 0 {
		t.Errorf("left: %d routers, %v, %v", n, subs.GetSubscribers(), err)
	}
}

// Routers that join with tokens are kept, and come back in another run without
// any; their file is secret.
func TestTokensAndState(t *testing.T) {
	r := newRig(t)
	r.setPlan(100e6)
	var tokens []string
	for _, id := range []string{"home-1", "home-2", "home-3"} {
		if _, err := pb.NewSubscriberServiceClient(r.conn).CreateSubscriber(t.Context(), &pb.CreateSubscriberRequest{Subscriber: &pb.Subscriber{Id: id, Plan: "gold"}}); err != nil {
			t.Fatal(err)
		}
		resp, err := pb.NewTokenServiceClient(r.conn).CreateToken(t.Context(), &pb.CreateTokenRequest{RouterId: id, Subscriber: id})
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, resp.GetSecret())
	}
	file, state := filepath.Join(t.TempDir(), "tokens"), filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(file, []byte(strings.Join(tokens, "\n")+"\n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	inSync := func() bool { return r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == 3 }
	s := r.start("--tokens", file, "--state", state, "--credentials", "none")
	r.eventually("all in sync", inSync)
	s.stop()
	r.eventually("none is connected", func() bool { return r.in(pb.SyncState_SYNC_STATE_IN_SYNC) == 0 })
	if info, err := os.Stat(state); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("state: %v, %v", info, err)
	}
	s = r.start("--state", state, "--report-interval", "-1s")
	r.eventually("all in sync again", inSync)
	if got, _ := s.stop(); got.Routers != 3 || got.Reports != 0 {
		t.Errorf("second run: %+v", got)
	}
	if n := len(r.routers()); n != 3 {
		t.Errorf("%d routers are left, want 3", n)
	}
	// A used token is refused, with the controller's words.
	err := run(t.Context(), []string{"--agents", r.agents, "--tokens", file, "--quiet"}, nil, &bytes.Buffer{}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "token") {
		t.Errorf("used tokens: %v", err)
	}
	err = run(t.Context(), []string{"--agents", r.agents, "--operators", r.ops, "--credentials", r.credentials, "--plan", "tin", "--quiet"}, nil, &bytes.Buffer{}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "cakefleetctl plan set tin") {
		t.Errorf("no plan: %v", err)
	}
}

func TestBadCommandLines(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("cf1.nonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"", "say how the routers join"},
		{"--plan gold --tokens x", "don't go together"},
		{"--plan gold -n 0", "must be 1 to 1000000"},
		{"--plan gold --refuse 7", "must be a share such as 5%"},
		{"--plan gold --refuse 70% --clamp 40%", "more than all routers"},
		{"--plan gold --agents localhost", "must be HOST:PORT"},
		{"--plan gold --most 7", "unit missing"},
		{"--plan gold --sojourn 5ms --sojourn-p99 2ms", "the second not below the first"},
		{"--plan gold -o xml", "must be table or json"},
		{"--plan gold --prefix SIM", "router name"},
		{"--plan gold more", `argument "more" is not understood`},
		{"--plan gold --source here", "must be addresses of this machine"},
		{"--plan gold --credentials " + missing, "no credentials at"},
		{"--tokens " + missing, "no such file"},
		{"--tokens " + bad, "line 1: join token"},
		{"--state " + missing, "has none of the routers"},
		{"--state " + bad, "line 1"},
	} {
		err := run(t.Context(), strings.Fields(c.args), strings.NewReader(""), &bytes.Buffer{}, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.args, err, c.want)
		}
	}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--help"}, nil, &out, &out); err != nil || !strings.Contains(out.String(), "How to size a controller") || !strings.Contains(out.String(), "-sojourn-p99") {
		t.Errorf("help: %v, %s", err, out.String())
	}
}

// What the machine would run out of is told before anything is made.
func TestResources(t *testing.T) {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := old
	low.Cur = 500
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old) }() // it was like that
	err := run(t.Context(), []string{"--plan", "gold", "-n", "437"}, nil, &bytes.Buffer{}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "437 routers need 501 open files, and this process may have 500") || !strings.Contains(err.Error(), "play 436 here") {
		t.Errorf("files: %v", err)
	}
	if o := (&options{n: 436, agents: []string{"127.0.0.1:1"}}); o.resources() != nil {
		t.Errorf("436 routers: %v", o.resources())
	}
}

// The histogram has the percentiles that were asked for, and counters never go
// back.
func TestReportedTraffic(t *testing.T) {
	p := newPlayer(&options{sojourn: 3 * time.Millisecond, sojourn99: 40 * time.Millisecond, drop: 0.01}, nil, nil)
	link := plan.DefaultLink()
	var before *engine.Stats
	for packets := 0.0; packets < 1e6; packets += 777.7 {
		s := p.direction(&link.Down, packets)
		if before != nil {
			for i, n := range s.Tins[1].Sojourn {
				if n < before.Tins[1].Sojourn[i] {
					t.Fatalf("bucket %d goes back at %v packets", i, packets)
				}
			}
			if s.SentPackets < before.SentPackets || s.Drops < before.Drops || s.Tins[1].Bytes < before.Tins[1].Bytes {
				t.Fatalf("counters go back at %v packets", packets)
			}
		}
		before = s
	}
	h := before.Tins[1].Sojourn
	for _, c := range []struct {
		num  uint64
		want time.Duration
	}{{50, 3 * time.Millisecond}, {99, 40 * time.Millisecond}} {
		if got := h.Quantile(c.num, 100); got < c.want*8/10 || got > c.want*12/10 {
			t.Errorf("percentile %d is %v, want about %v", c.num, got, c.want)
		}
	}
}
