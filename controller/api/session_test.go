package api_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestFleet006_SessionConverges(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	gold := f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	if r := f.router(ops, "home-1"); r.GetSession().GetSync() != pb.SyncState_SYNC_STATE_OFFLINE || r.GetReported() != nil {
		t.Errorf("before it connects: %v", r)
	}

	a := f.connect("home-1", &pb.Hello{AgentVersion: "v1", Model: "model\x1b[31m", Dataplane: "userspace"})
	d := a.desired()
	if diff := cmp.Diff(wire.FromLink(&gold), d.GetLink(), protocmp.Transform()); diff != "" {
		t.Errorf("link (-want +got):\n%s", diff)
	}
	if d.GetHash() != gold.Hash() || d.GetNonce() != 1 {
		t.Errorf("hash %q, nonce %d", d.GetHash(), d.GetNonce())
	}
	f.waitSync(ops, pb.SyncState_SYNC_STATE_PENDING)
	a.apply(d)
	r := f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
	if r.GetPlan() != "gold" || r.GetSubscriber() != "sub-home-1" || r.GetReported().GetAppliedRevision() != d.GetRevision() {
		t.Errorf("router: %v", r)
	}
	if s := r.GetSession(); !s.GetConnected() || s.GetAgentVersion() != "v1" || s.GetDataplane() != "userspace" || s.GetBootId() != "boot-1" || strings.ContainsRune(s.GetModel(), 0x1b) {
		t.Errorf("session: %v", s)
	}

	// One change of the plan is one revision, and arrives.
	before := f.store.Revision()
	silver := f.setPlan("gold", 50e6)
	if got := f.store.Revision(); got != before+1 {
		t.Errorf("a plan change is %d revisions", got-before)
	}
	d = a.desired()
	if d.GetHash() != silver.Hash() || d.GetRevision() != int64(before+1) || d.GetNonce() != 2 {
		t.Errorf("pushed %v", d)
	}
	a.apply(d)
	f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)

	// Its subscriber goes: nothing is shaped any more.
	_, key := f.key("home-1")
	if _, err := f.store.PutRouter(t.Context(), plan.Router{ID: "home-1", Key: key}, store.Any); err != nil {
		t.Fatal(err)
	}
	d = a.desired()
	if d.GetLink() != nil || d.GetHash() != "" {
		t.Errorf("pushed %v, want nothing to shape", d)
	}
	a.apply(d)
	r = f.waitSync(ops, pb.SyncState_SYNC_STATE_NONE)
	if r.GetDesired().GetReason() == "" {
		t.Error("no reason is given")
	}

	if err := a.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if code := a.ends(); code != codes.OK {
		t.Errorf("ended with %v", code)
	}
	f.waitSync(ops, pb.SyncState_SYNC_STATE_OFFLINE)
}

func TestSessionEqualIsNotSent(t *testing.T) {
	f := newFixture(t)
	gold := f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{AppliedRevision: 1, AppliedHash: gold.Hash(), EffectiveHash: gold.Hash()})
	f.setPlan("gold", 30e6)
	if d := a.desired(); d.GetLink().GetDown().GetRateBps() != 30e6 || d.GetNonce() != 1 {
		t.Errorf("first push is %v", d)
	}
}

func TestSessionRefusalIsShownAndHeldBack(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	slow := f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	hello := func() *pb.Hello {
		return &pb.Hello{AppliedRevision: 1, AppliedHash: slow.Hash(), EffectiveHash: slow.Hash(), Effective: wire.FromLink(&slow)}
	}
	a := f.connect("home-1", hello())
	f.setPlan("gold", 10e9)
	d := a.desired()
	a.status(&pb.Status{
		Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_REJECTED, AppliedRevision: 1, AppliedHash: slow.Hash(),
		EffectiveHash: slow.Hash(), Effective: wire.FromLink(&slow), Error: "down.rate: 10Gbit is more than the port carries\x07",
		Conditions: []*pb.Condition{{Type: "Degraded", Status: true, Reason: "Rate", Message: "m"}},
	})
	r := f.waitSync(ops, pb.SyncState_SYNC_STATE_REJECTED)
	rep := r.GetReported()
	if !strings.HasPrefix(rep.GetError(), "down.rate: 10Gbit is more") || strings.Contains(rep.GetError(), "\x07") {
		t.Errorf("error is %q", rep.GetError())
	}
	if rep.GetRejectedRevision() != d.GetRevision() || rep.GetOutcome() != pb.Outcome_OUTCOME_REJECTED || rep.GetEffective().GetDown().GetRateBps() != 20e6 || len(rep.GetConditions()) != 1 {
		t.Errorf("reported %v", rep)
	}

	// On a new stream it is not sent; the next one that is different is.
	a = f.connect("home-1", hello())
	f.waitSync(ops, pb.SyncState_SYNC_STATE_REJECTED)
	f.setPlan("gold", 1e9)
	if d := a.desired(); d.GetLink().GetDown().GetRateBps() != 1e9 {
		t.Errorf("sent %v", d)
	}
}

func TestSessionNewerWins(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	old := f.connect("home-1", &pb.Hello{})
	old.desired()
	young := f.connect("home-1", &pb.Hello{})
	d := young.desired()
	if code := old.ends(); code != codes.Aborted {
		t.Errorf("old session ended with %v", code)
	}
	young.apply(d)
	f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
}

// TestSessionStalledAgent: one agent never reads, the others are told at once.
func TestSessionStalledAgent(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 1e6)
	f.setRouter("stalled", "gold")
	f.setRouter("lively", "gold")
	stalled, lively := f.connect("stalled", &pb.Hello{}), f.connect("lively", &pb.Hello{})
	lively.apply(lively.desired())
	for i := range engine.BitsPerSecond(5) {
		want := f.setPlan("gold", 2e6+i)
		d := lively.desired()
		if d.GetHash() != want.Hash() {
			t.Fatalf("change %d: sent %v", i, d)
		}
		lively.apply(d)
	}
	_ = stalled
}

func TestSessionOfRemovedRouter(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 1e6)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{})
	a.apply(a.desired())
	routers := pb.NewRouterServiceClient(ops)
	if _, err := routers.DeleteRouter(t.Context(), &pb.DeleteRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	if code := a.ends(); code != codes.PermissionDenied {
		t.Errorf("session ended with %v", code)
	}
	// Its certificate is good for 90 days, and yet it doesn't come in.
	again := f.stream("home-1", f.dial(f.agents, f.routerCert("home-1")))
	again.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
	if code := again.ends(); code != codes.PermissionDenied {
		t.Errorf("new session ended with %v", code)
	}
	if _, err := routers.GetRouter(t.Context(), &pb.GetRouterRequest{Id: "home-1"}); status.Code(err) != codes.NotFound {
		t.Errorf("get: %v", err)
	}
}

// A router that joins again, removed before or not, leaves the certificates of
// its old keys worthless: their sessions end and new ones are refused.
func TestSessionOfReplacedKey(t *testing.T) {
	for _, remove := range []bool{false, true} {
		t.Run(fmt.Sprintf("removed=%t", remove), func(t *testing.T) {
			f := newFixture(t)
			ops, anon := f.dial(f.operators, f.operatorCert()), f.dial(f.agents, nil)
			f.setPlan("gold", 1e6)
			f.setRouter("home-1", "gold")
			old := f.routerCert("home-1")
			a := f.connect("home-1", &pb.Hello{})
			a.apply(a.desired())
			token := f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-home-1"})
			if remove {
				if _, err := pb.NewRouterServiceClient(ops).DeleteRouter(t.Context(), &pb.DeleteRouterRequest{Id: "home-1"}); err != nil {
					t.Fatal(err)
				}
			}
			f.keys["home-1"] = newKey(t)
			if _, err := f.enroll(anon, token.GetSecret(), csr(t, f.keys["home-1"])); err != nil {
				t.Fatal(err)
			}
			if code := a.ends(); code != codes.PermissionDenied {
				t.Errorf("session of the old key ended with %v", code)
			}

			fresh := f.connect("home-1", &pb.Hello{})
			fresh.apply(fresh.desired())
			f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
			again := f.stream("home-1", f.dial(f.agents, old))
			again.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
			if code := again.ends(); code != codes.PermissionDenied {
				t.Errorf("new session of the old key ended with %v", code)
			}
			// The attempt has not disturbed the router, and what operators
			// change of it leaves its key.
			if _, err := pb.NewRouterServiceClient(ops).UpdateRouter(t.Context(), &pb.UpdateRouterRequest{Router: &pb.Router{Id: "home-1"}}); err != nil {
				t.Fatal(err)
			}
			fresh.apply(fresh.desired())
			f.waitSync(ops, pb.SyncState_SYNC_STATE_NONE)
		})
	}
}

func TestSessionRefusesHello(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 1e6)
	f.setRouter("home-1", "gold")
	hello := func(h *pb.Hello) *pb.ConnectRequest {
		return &pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: h}}
	}
	for name, c := range map[string]struct {
		first *pb.ConnectRequest
		want  codes.Code
	}{
		"another router":   {hello(&pb.Hello{RouterId: "home-2", BootId: "b"}), codes.PermissionDenied},
		"no boot id":       {hello(&pb.Hello{RouterId: "home-1"}), codes.InvalidArgument},
		"long model":       {hello(&pb.Hello{RouterId: "home-1", BootId: "b", Model: strings.Repeat("m", 1000)}), codes.InvalidArgument},
		"status first":     {&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{}}}, codes.InvalidArgument},
		"an unknown thing": {&pb.ConnectRequest{}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			a := f.stream("home-1", f.dial(f.agents, f.routerCert("home-1")))
			a.send(c.first)
			if code := a.ends(); code != c.want {
				t.Errorf("ended with %v, want %v", code, c.want)
			}
		})
	}
}

// TestSessionIgnoresWhatItDoesNotUnderstand: a newer agent is not cut off.
func TestSessionIgnoresWhatItDoesNotUnderstand(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 1e6)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{
		Effective:    &pb.Link{Down: &pb.Shaping{Tins: 99}},
		Capabilities: []string{"something"},
	})
	d := a.desired()
	a.send(&pb.ConnectRequest{})
	a.status(&pb.Status{Nonce: d.GetNonce(), Outcome: 77})
	a.status(&pb.Status{Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, Error: strings.Repeat("e", 10_000)})
	a.report(&pb.Report{Sequence: 1, BootId: "boot-1", Down: &pb.DirectionStats{Shaping: &pb.Shaping{Tins: 99}}})
	a.report(&pb.Report{Sequence: 1, BootId: "another boot"})
	f.waitSync(ops, pb.SyncState_SYNC_STATE_PENDING)
	a.apply(d)
	f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
	if n := strings.Count(f.log.String(), "ignored a message of an agent"); n != 1 {
		t.Errorf("told %d times, want 1", n)
	}
}

func TestSessionsStop(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 1e6)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{})
	f.sessions.Stop()
	f.sessions.Stop()
	if code := a.ends(); code != codes.Unavailable {
		t.Errorf("ended with %v", code)
	}
	f.sessions.Wait()
}

func TestDoors(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 1e6)
	f.setRouter("home-1", "gold")
	first := func(a *agent) codes.Code {
		_, err := a.stream.Recv()
		return status.Code(err)
	}
	for name, c := range map[string]struct {
		call func() codes.Code
		want codes.Code
	}{
		"session without certificate": {func() codes.Code { return first(f.stream("", f.dial(f.agents, nil))) }, codes.Unauthenticated},
		"session of an operator":      {func() codes.Code { return first(f.stream("", f.dial(f.agents, f.operatorCert()))) }, codes.PermissionDenied},
		"enrollment without certificate is heard": {func() codes.Code {
			_, err := pb.NewEnrollmentServiceClient(f.dial(f.agents, nil)).Enroll(t.Context(), &pb.EnrollRequest{Token: "x"})
			if !strings.Contains(status.Convert(err).Message(), "signing request") {
				t.Errorf("answer is %v", err)
			}
			return status.Code(err)
		}, codes.InvalidArgument},
		"operations of a router": {func() codes.Code {
			_, err := pb.NewRouterServiceClient(f.dial(f.operators, f.routerCert("home-1"))).ListRouters(t.Context(), &pb.ListRoutersRequest{})
			return status.Code(err)
		}, codes.PermissionDenied},
		"tokens for a router": {func() codes.Code {
			_, err := pb.NewTokenServiceClient(f.dial(f.operators, f.routerCert("home-1"))).CreateToken(t.Context(), &pb.CreateTokenRequest{RouterId: "home-2"})
			return status.Code(err)
		}, codes.PermissionDenied},
		"operations without certificate": {func() codes.Code {
			_, err := pb.NewRouterServiceClient(f.dial(f.operators, nil)).ListRouters(t.Context(), &pb.ListRoutersRequest{})
			return status.Code(err)
		}, codes.Unauthenticated},
		"operator": {func() codes.Code {
			_, err := pb.NewRouterServiceClient(f.dial(f.operators, f.operatorCert())).ListRouters(t.Context(), &pb.ListRoutersRequest{})
			return status.Code(err)
		}, codes.OK},
		"a fault in a service": {func() codes.Code {
			_, err := pb.NewSubscriberServiceClient(f.dial(f.operators, f.operatorCert())).GetSubscriber(t.Context(), &pb.GetSubscriberRequest{})
			if strings.Contains(status.Convert(err).Message(), "secret detail") {
				t.Errorf("answer is %v", err)
			}
			return status.Code(err)
		}, codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.call(); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
	if !strings.Contains(f.log.String(), "secret detail") {
		t.Error("the fault is not in the log")
	}
}

// A boost goes out with its end and what follows; at the end the controller
// wants what the router runs by then, without being woken by anybody.
func TestFleet001_BoostInSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		gold := f.setPlan("gold", 100_000_000)
		f.setRouter("home-1", "gold")
		s := f.fakeStream("home-1")
		s.say(hello("home-1"))
		for _, d := range s.pushed() {
			s.say(applied(d))
		}
		var boost plan.Boost
		noError(t, boost.Settings.Parse("down.rate", "300mbit"))
		const length = 2 * time.Hour
		boost.Until = time.Now().Add(length)
		_, err := f.store.PutSubscriber(t.Context(), plan.Subscriber{ID: "sub-home-1", Plan: "gold"}.WithLayers(plan.Layers{Boost: boost}), store.Any)
		noError(t, err)
		time.Sleep(time.Second)
		all := s.pushed()
		if len(all) != 1 {
			t.Fatalf("sent %v", all)
		}
		d := all[0]
		then, err := wire.ToLink(d.GetThen())
		noError(t, err)
		link, err := wire.ToLink(d.GetLink())
		noError(t, err)
		if *then != gold || link.Down.Rate != 300_000_000 || d.GetExpiresAfter().AsDuration() <= 0 || d.GetExpiresAfter().AsDuration() > length {
			t.Fatalf("boost is %v, then %v after %v", link, then, d.GetExpiresAfter().AsDuration())
		}
		s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{
			Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedRevision: d.GetRevision(),
			AppliedHash: d.GetHash(), EffectiveHash: link.Hash(), Effective: d.GetLink(),
		}}})
		r := f.shown("home-1")
		if sync := r.GetSession().GetSync(); sync != pb.SyncState_SYNC_STATE_IN_SYNC {
			t.Errorf("shown as %v", sync)
		}
		if fields := r.GetDesired().GetFields(); len(fields) != 1 || fields[0].GetOwner() != "boost" || fields[0].GetField() != "down.rate" || fields[0].GetValue() != "300Mbit" {
			t.Errorf("fields that are not the plan's: %v", fields)
		}
		// The end is part of what is desired, and not of what a data plane runs:
		// who compares has a hash for each.
		if des, rep := r.GetDesired(), r.GetReported(); des.GetHash() != rep.GetAppliedHash() || des.GetEffectiveHash() != rep.GetEffectiveHash() || des.GetHash() == des.GetEffectiveHash() {
			t.Errorf("desired %s and %s, applied %s, effective %s", des.GetHash(), des.GetEffectiveHash(), rep.GetAppliedHash(), rep.GetEffectiveHash())
		}
		time.Sleep(length - 2*time.Second)
		if all := s.pushed(); len(all) != 0 {
			t.Errorf("before the end %v is sent", all)
		}
		time.Sleep(2 * time.Second)
		all = s.pushed()
		if len(all) != 1 || all[0].GetHash() != gold.Hash() || all[0].GetExpiresAfter() != nil {
			t.Fatalf("at the end %v is desired", all)
		}
		s.say(applied(all[0]))
		if r := f.shown("home-1"); r.GetSession().GetSync() != pb.SyncState_SYNC_STATE_IN_SYNC || r.GetDesired().GetEffectiveHash() != gold.Hash() {
			t.Errorf("after the end %v", r)
		}
		s.End(nil)
		sessions.Wait()
	})
}
