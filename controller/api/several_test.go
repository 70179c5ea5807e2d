package api_test

import (
	"context"
	"crypto/tls"
	"net"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// join makes the controller one of several, with the door of the others. die
// closes the door, so that it does not answer any more.
func (f *fixture) join(kv store.Leaser, id string) (members *lead.Members, die func()) {
	f.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	self := lead.Member{ID: id, Address: l.Addr().String(), Started: time.Now()}
	members = lead.NewMembers(kv, self, 0, nil)
	door, caller, err := f.authority.PeersTLS(id, self.Started)
	if err != nil {
		f.t.Fatal(err)
	}
	peers := api.NewPeers(members, func() *tls.Config { return caller })
	admin := f.admin(members)
	f.routers.Ask(peers)
	f.telemetry.Ask(peers)
	f.sessions.Ask(peers)
	f.rollouts = f.rolloutsOf(peers)
	f.rollouts.Ask(peers)
	server := grpc.NewServer(append(api.PeersDoor(), grpc.Creds(credentials.NewTLS(door)), grpc.WaitForHandlers(true))...)
	api.RegisterPeers(server, api.NewPeerService(f.routers, admin, f.telemetry, f.rollouts))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := members.Run(f.t.Context()); err != nil {
			f.t.Error(err)
		}
	})
	wg.Go(func() {
		if err := server.Serve(l); err != nil {
			f.t.Error(err)
		}
	})
	f.t.Cleanup(func() {
		server.Stop()
		wg.Wait()
		if err := peers.Close(); err != nil {
			f.t.Error(err)
		}
	})
	return members, server.Stop
}

// reports makes a router report n times, a second apart: a load of 8 Mbit/s of
// 20 down.
func (a *agent) reports(first, n uint64) {
	a.t.Helper()
	for i := first; i < first+n; i++ {
		down, up := stats(1000*i), stats(10*i)
		down.Tins[0].Sojourn[7], up.Tins[0].Sojourn[7] = 1000*i, 10*i
		a.report(wire.FromReport(&plan.Report{Sequence: i, BootID: "boot-1", Uptime: time.Duration(i) * time.Second, Down: down, Up: up}))
	}
}

// TestOthersOutOfReach: a controller that ends every connection is not dialled
// without a pause, one without a door is not dialled at all, and one that is gone
// is not dialled any more.
func TestOthersOutOfReach(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var dialled atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			dialled.Add(1)
			_ = conn.Close() // what the other side makes of that is the test
		}
	})
	t.Cleanup(func() {
		_ = l.Close() // closed already, if all went well
		wg.Wait()
	})

	kv := storetest.NewKV()
	f := newFixtureOn(t, kv, t.TempDir(), api.SessionConfig{Interval: interval})
	members, _ := f.join(kv, "core-1")
	ctx, leave := context.WithCancel(t.Context())
	var others sync.WaitGroup
	for _, m := range []lead.Member{{ID: "core-2", Address: l.Addr().String(), Started: time.Now()}, {ID: "core-3", Started: time.Now()}} {
		others.Go(func() {
			if err := lead.NewMembers(kv, m, 0, nil).Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { leave(); others.Wait() })
	eventually(t, "the controllers know each other", func() bool { return len(members.Others()) == 2 })

	ask := func() []string {
		worst, err := f.telemetry.ListWorst(t.Context(), &pb.ListWorstRequest{})
		if err != nil {
			t.Fatal(err)
		}
		silent := worst.GetSilentControllers()
		slices.Sort(silent)
		return silent
	}
	began := time.Now()
	for range 20 {
		if silent := ask(); !slices.Equal(silent, []string{"core-2", "core-3"}) {
			t.Fatalf("silent: %v", silent)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if n, most := dialled.Load(), 3+int64(time.Since(began)/(500*time.Millisecond)); n == 0 || n > most {
		t.Errorf("dialled %d times within %v, want 1 to %d", n, time.Since(began), most)
	}
	leave()
	others.Wait()
	eventually(t, "they are gone", func() bool { return len(members.Others()) == 0 })
	if silent := ask(); len(silent) > 0 {
		t.Errorf("silent, though gone: %v", silent)
	}
	n := dialled.Load()
	time.Sleep(2 * time.Second) // the longest pause before the second try
	if now := dialled.Load(); now > n+1 {
		t.Errorf("dialled %d times after it was gone", now-n)
	}
}

// TestTelemetryOfSeveral has two controllers with a router each, and one that
// moves from one to the other, which does not notice. Each answers for all.
func TestTelemetryOfSeveral(t *testing.T) {
	kv, dir := storetest.NewKV(), t.TempDir()
	one := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two.keys = one.keys
	membersOne, _ := one.join(kv, "core-1")
	membersTwo, die := two.join(kv, "core-2")
	gold := one.setPlan("gold", 20e6)
	for _, id := range []string{"home-1", "home-2", "home-3"} {
		one.setRouter(id, "gold")
	}
	cert := one.operatorCert()
	atOne := pb.NewTelemetryServiceClient(one.dial(one.operators, cert))
	conn := two.dial(two.operators, cert)
	atTwo := pb.NewTelemetryServiceClient(conn)
	eventually(t, "the controllers know each other and the routers", func() bool {
		_, err := pb.NewRouterServiceClient(conn).GetRouter(t.Context(), &pb.GetRouterRequest{Id: "home-3"})
		return err == nil && len(membersOne.Others()) == 1 && len(membersTwo.Others()) == 1
	})

	hello := func() *pb.Hello { return &pb.Hello{AppliedHash: gold.Hash(), EffectiveHash: gold.Hash()} }
	one.connect("home-1", hello()).reports(1, 3)
	two.connect("home-2", hello()).reports(1, 3)
	one.connect("home-3", hello()).reports(1, 3)
	all := func(tele pb.TelemetryServiceClient, id string, sequence uint64) func() bool {
		return func() bool {
			resp, err := tele.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: id})
			return err == nil && resp.GetConnected() && resp.GetReport().GetSequence() == sequence
		}
	}
	eventually(t, "the first life of home-3", all(atTwo, "home-3", 3))
	moved := two.connect("home-3", hello())
	moved.reports(4, 3)

	for name, tele := range map[string]pb.TelemetryServiceClient{"core-1": atOne, "core-2": atTwo} {
		eventually(t, "home-1 at "+name, all(tele, "home-1", 3))
		eventually(t, "home-2 at "+name, all(tele, "home-2", 3))
		eventually(t, "home-3 at "+name, all(tele, "home-3", 6))

		samples, err := tele.ListRouterSamples(t.Context(), &pb.ListRouterSamplesRequest{RouterId: "home-3"})
		if err != nil {
			t.Fatal(err)
		}
		n := 0 // of those that span a second of traffic; the first of a controller has nothing before it
		for _, s := range samples.GetSamples() {
			if s.GetDown().GetLoadBps() == 8e6 {
				n++
			}
		}
		if n != 4 || !slices.IsSortedFunc(samples.GetSamples(), func(a, b *pb.RouterSample) int {
			return a.GetTime().AsTime().Compare(b.GetTime().AsTime())
		}) {
			t.Errorf("%s: samples of home-3: %v, want 2 of each controller in order", name, samples)
		}

		worst, err := tele.ListWorst(t.Context(), &pb.ListWorstRequest{By: pb.WorstBy_WORST_BY_SATURATION})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, w := range worst.GetWorst() {
			names = append(names, w.GetName())
		}
		if slices.Sort(names); !slices.Equal(names, []string{"home-1", "home-2", "home-3"}) {
			t.Errorf("%s: worst routers: %v", name, names)
		}
		worst, err = tele.ListWorst(t.Context(), &pb.ListWorstRequest{Kind: "plan"})
		if err != nil {
			t.Fatal(err)
		}
		if w := worst.GetWorst(); len(w) != 1 || w[0].GetRouters() != 3 || w[0].GetLoadBps() != 24e6 || w[0].GetShapedBps() != 60e6 || w[0].GetDirection() != "down" {
			t.Errorf("%s: worst plan: %v", name, worst)
		}
		if worst, err = tele.ListWorst(t.Context(), &pb.ListWorstRequest{Limit: 1}); err != nil || len(worst.GetWorst()) != 1 {
			t.Errorf("%s: the worst one: %v, %v", name, worst, err)
		}

		sums, err := tele.ListPlanStats(t.Context(), &pb.ListPlanStatsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		p := sums.GetPlans()
		if len(p) != 1 || p[0].GetRouters() != 3 || p[0].GetConnected() != 3 || p[0].GetInSync() != 3 || p[0].GetDown().GetRateBps() != 24e6 || p[0].GetDown().GetCapacityBps() != 60e6 {
			t.Errorf("%s: plans: %v", name, sums)
		} else if h := p[0].GetDown().GetSojourn().GetCounts(); len(h) != 8 || h[7] != p[0].GetDown().GetSentPackets() || p[0].GetUp().GetSentPackets()*100 != h[7] {
			t.Errorf("%s: sojourn %v, packets %d down, %d up: want each packet once in the histogram", name, h, p[0].GetDown().GetSentPackets(), p[0].GetUp().GetSentPackets())
		}

		why, err := tele.ExplainRouter(t.Context(), &pb.ExplainRouterRequest{RouterId: "home-3"})
		if err != nil || why.GetWindow().AsDuration() != 2*time.Second || why.GetFindings()[0].GetCause() == "offline" {
			t.Errorf("%s: explanation: %v, %v", name, why, err)
		}
	}
	one1, err := atOne.ListPlanStats(t.Context(), &pb.ListPlanStatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	two2, err := atTwo.ListPlanStats(t.Context(), &pb.ListPlanStatsRequest{})
	if diff := cmp.Diff(one1, two2, protocmp.Transform()); diff != "" || err != nil {
		t.Errorf("the controllers differ (-core-1 +core-2), %v:\n%s", err, diff)
	}

	// One that does not answer is named.
	die()
	sums, err := atOne.ListPlanStats(t.Context(), &pb.ListPlanStatsRequest{})
	if err != nil || !slices.Equal(sums.GetSilentControllers(), []string{"core-2"}) || sums.GetPlans()[0].GetRouters() != 3 {
		t.Errorf("with a dead controller: %v, %v", sums, err)
	}
	if _, err := atOne.GetRouterStats(t.Context(), &pb.GetRouterStatsRequest{RouterId: "home-2"}); err == nil {
		t.Error("statistics of a router of a dead controller")
	}
	worst, err := atOne.ListWorst(t.Context(), &pb.ListWorstRequest{})
	if err != nil || !slices.Equal(worst.GetSilentControllers(), []string{"core-2"}) {
		t.Errorf("with a dead controller: %v, %v", worst, err)
	}
}

// TestRolloutOfSeveral has two controllers with a router each. Each knows how
// both stand to a rollout; without the other it says that something is missing.
func TestRolloutOfSeveral(t *testing.T) {
	kv, dir := storetest.NewKV(), t.TempDir()
	one := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two.keys = one.keys
	membersOne, _ := one.join(kv, "core-1")
	membersTwo, die := two.join(kv, "core-2")
	gold := one.setPlan("gold", 20e6)
	for _, id := range []string{"home-1", "home-2", "home-3"} {
		one.setRouter(id, "gold")
	}
	started, err := one.rollouts.StartRollout(t.Context(), &pb.StartRolloutRequest{Rollout: &pb.Rollout{
		Id: "faster", Selector: &pb.RolloutSelector{Plan: "gold"}, Set: map[string]string{"down.rate": "30mbit"}, Waves: []string{"100%"}, Gates: []string{"nack < 50%"},
	}})
	noError(t, err)
	var routers *pb.ListRolloutRoutersResponse
	states := func(s *api.RolloutService) string {
		routers, err = s.ListRolloutRouters(t.Context(), &pb.ListRolloutRoutersRequest{Id: "faster"})
		var text string
		for _, r := range routers.GetRouters() {
			text += r.GetState() + " "
		}
		return text
	}
	eventually(t, "the controllers know each other and the rollout", func() bool {
		_, err := two.rollouts.GetRollout(t.Context(), &pb.GetRolloutRequest{Id: "faster"})
		return err == nil && len(membersOne.Others()) == 1 && len(membersTwo.Others()) == 1
	})
	hello := func() *pb.Hello { return &pb.Hello{AppliedHash: gold.Hash(), EffectiveHash: gold.Hash()} }
	one.connect("home-1", hello())
	two.connect("home-2", hello())
	for name, s := range map[string]*api.RolloutService{"core-1": one.rollouts, "core-2": two.rollouts} {
		eventually(t, "the states at "+name, func() bool { return states(s) == "pending pending unreachable " })
	}

	// With its step open, both are asked, and have not answered.
	var next rollout.Rollout
	one.store.View(func(st *store.State) {
		l, _ := st.Rollout("faster")
		next = l.Rollout
	})
	next.Opened, next.Touched, next.Phase, next.OpenedAt = 1, 1, rollout.Answering, time.Now()
	_, err = one.store.PutRollout(t.Context(), next, plan.Revision(started.GetRollout().GetRevision()), true)
	noError(t, err)
	for name, s := range map[string]*api.RolloutService{"core-1": one.rollouts, "core-2": two.rollouts} {
		eventually(t, "the states at "+name, func() bool { return states(s) == "offered offered unreachable " })
		eventually(t, "the sums at "+name, func() bool {
			resp, err := s.GetRollout(t.Context(), &pb.GetRolloutRequest{Id: "faster"})
			c := resp.GetReport().GetChanged()
			return err == nil && c.GetMembers() == 3 && c.GetOffered() == 2 && c.GetUnreachable() == 1
		})
	}
	_, err = one.rollouts.ListRolloutRouters(t.Context(), &pb.ListRolloutRoutersRequest{Id: "faster", State: "happy"})
	refused(t, err, codes.InvalidArgument, `state "happy"`, "already at target")

	die()
	if got := states(one.rollouts); got != "offered unreachable unreachable " || !slices.Equal(routers.GetSilentControllers(), []string{"core-2"}) {
		t.Errorf("without core-2: %s, silent %v", got, routers.GetSilentControllers())
	}
	resp, err := one.rollouts.GetRollout(t.Context(), &pb.GetRolloutRequest{Id: "faster"})
	if err != nil || resp.GetReport().GetMissing() != "1 of 1 other controllers have not said what they know" {
		t.Errorf("without core-2: %v, %v", resp.GetReport(), err)
	}
}

// TestRolloutReportOverTheWire sends a report whose every number is another one.
func TestRolloutReportOverTheWire(t *testing.T) {
	n := 0
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch n++; v.Kind() {
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[time.Time]() {
				v.Set(reflect.ValueOf(time.Unix(int64(n), 0).UTC()))
				return
			}
			for _, field := range v.Fields() {
				fill(field)
			}
		case reflect.Array:
			for i := range v.Len() {
				fill(v.Index(i))
			}
		case reflect.Uint64:
			v.SetUint(uint64(n))
		default:
			v.SetInt(int64(n))
		}
	}
	var r rollout.Report
	fill(reflect.ValueOf(&r).Elem())
	got, err := api.OverTheWire(&r)
	if err != nil || n < 500 {
		t.Fatalf("%d numbers, %v", n, err)
	}
	if d := cmp.Diff(r, got); d != "" {
		t.Errorf("(-sent +came):\n%s", d)
	}
}
