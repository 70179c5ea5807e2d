package api_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func hello(id string) *pb.ConnectRequest {
	return &pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: id, BootId: "b"}}}
}

// applied is the answer of a router that runs d.
func applied(d *pb.Desired) *pb.ConnectRequest {
	return &pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{
		Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedRevision: d.GetRevision(),
		AppliedHash: d.GetHash(), EffectiveHash: d.GetHash(), Effective: d.GetLink(),
	}}}
}

// running runs what looks after sessions until the function returned is called.
func running(sessions *api.SessionService) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = sessions.Run(ctx) }()
	return func() {
		cancel()
		<-done
		sessions.Wait()
	}
}

func TestReportInterval(t *testing.T) {
	for _, c := range []struct {
		agents int
		most   float64
		want   time.Duration
	}{
		{0, 5000, 10 * time.Second},
		{49_999, 5000, 10 * time.Second},
		{100_000, 5000, 20 * time.Second},
		{1_000_000, 5000, 200 * time.Second},
		{1_000_000, 0, 10 * time.Second},
	} {
		if got := api.ReportInterval(10*time.Second, c.agents, c.most); got != c.want {
			t.Errorf("%d agents, at most %g a second: every %v, want %v", c.agents, c.most, got, c.want)
		}
	}
	for _, c := range []struct {
		agents int
		rate   float64
		want   time.Duration
	}{{30_000, 1000, 30 * time.Second}, {0, 1000, 0}, {30_000, 0, 0}, {10_000_000, 1, 10 * time.Minute}} {
		if got := api.ReconnectSpread(c.agents, c.rate); got != c.want {
			t.Errorf("%d agents at %g a second: spread over %v, want %v", c.agents, c.rate, got, c.want)
		}
	}
}

// With more agents each is asked to report less often, those that are there
// already, too; and again more often when they go.
func TestReportsStretch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessionsWith(t, api.SessionConfig{Interval: 10 * time.Second, MaxReports: 1, Rate: func() float64 { return 10 }})
		defer running(sessions)()
		f.setPlan("gold", 20e6)
		settings := func(s *fakeStream) (last *pb.Settings) {
			synctest.Wait()
			for len(s.out) > 0 {
				if m := (<-s.out).GetSettings(); m != nil {
					last = m
				}
			}
			return last
		}
		var all []*fakeStream
		for i := range 40 {
			id := fmt.Sprintf("home-%d", i)
			f.setRouter(id, "gold")
			s := f.fakeStream(id)
			s.say(hello(id))
			all = append(all, s)
		}
		if got := settings(all[0]); got.GetReportInterval().AsDuration() != 10*time.Second {
			t.Errorf("the first is told %v", got)
		}
		time.Sleep(10 * time.Second)
		if got := settings(all[0]); got.GetReportInterval().AsDuration() != 40*time.Second || got.GetReconnectSpread().AsDuration() != 4*time.Second {
			t.Errorf("with 40 agents the first is told %v", got)
		}
		time.Sleep(time.Minute)
		if got := settings(all[0]); got != nil {
			t.Errorf("without a change it is told %v", got)
		}
		for _, s := range all[1:] {
			s.End(nil)
		}
		time.Sleep(10 * time.Second)
		if got := settings(all[0]); got.GetReportInterval().AsDuration() != 10*time.Second {
			t.Errorf("alone again it is told %v", got)
		}
		all[0].End(nil)
	})
}

// A session that is old is asked to move, and ends if it doesn't; not all at
// one time.
func TestSessionAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessionsWith(t, api.SessionConfig{Interval: interval, MaxAge: time.Hour})
		defer running(sessions)()
		f.setPlan("gold", 20e6)
		began := time.Now()
		var lock sync.Mutex
		var asked []time.Duration // guarded by lock
		for i := range 20 {
			id := fmt.Sprintf("home-%d", i)
			f.setRouter(id, "gold")
			s := f.fakeStream(id)
			s.say(hello(id))
			go func() {
				for m := range s.out {
					if m.GetMove() != nil {
						lock.Lock()
						asked = append(asked, time.Since(began))
						lock.Unlock()
					}
				}
			}()
			defer close(s.out)
			defer func() {
				if err := <-s.ended; status.Code(err) != codes.Unavailable {
					t.Errorf("%s ended with %v", id, err)
				}
				if late := time.Since(began); late > 70*time.Minute {
					t.Errorf("%s ended after %v", id, late)
				}
			}()
		}
		time.Sleep(53 * time.Minute)
		lock.Lock()
		defer lock.Unlock()
		if len(asked) != 0 {
			t.Errorf("asked to move after %v", asked[0])
		}
		lock.Unlock()
		time.Sleep(14 * time.Minute)
		lock.Lock()
		if len(asked) != 20 {
			t.Fatalf("%d of 20 were asked to move within 67 minutes", len(asked))
		}
		if spread := asked[19] - asked[0]; spread < 4*time.Minute {
			t.Errorf("all were asked within %v", spread)
		}
	})
}

// A router that opens sessions again and again is told to wait, and for how
// long; the sessions of others and its later ones are not touched.
func TestSessionRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 20e6)
		f.setRouter("home-1", "gold")
		f.setRouter("home-2", "gold")
		try := func(id string) error {
			s := f.fakeStream(id)
			s.say(hello(id))
			synctest.Wait()
			s.End(nil)
			return <-s.ended
		}
		let := 0
		for range 100 {
			err := try("home-1")
			if err == nil {
				let++
				continue
			}
			var wait time.Duration
			for _, d := range status.Convert(err).Details() {
				if r, ok := d.(*errdetails.RetryInfo); ok {
					wait = r.GetRetryDelay().AsDuration()
				}
			}
			if status.Code(err) != codes.ResourceExhausted || wait <= 0 || wait > 10*time.Second {
				t.Fatalf("refused with %v, wait %v", err, wait)
			}
		}
		if let < 10 || let > 30 {
			t.Errorf("%d of 100 sessions at once were let in", let)
		}
		if err := try("home-2"); err != nil {
			t.Errorf("another router: %v", err)
		}
		time.Sleep(time.Minute)
		if err := try("home-1"); err != nil {
			t.Errorf("a minute later: %v", err)
		}
		sessions.Wait()
	})
}

// A stream that can't take anything is not waited for: it gets the newest state
// when it can, and what came between is not kept.
func TestSessionThatCantBeSentTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 1e6)
		f.setRouter("home-1", "gold")
		f.setRouter("home-2", "gold")
		stalled, lively := f.fakeStream("home-1"), f.fakeStream("home-2")
		stalled.say(hello("home-1"))
		lively.say(hello("home-2"))
		synctest.Wait()
		for range 2 { // settings and the first state
			<-stalled.out
			<-lively.out
		}
		stalled.full.Store(true)
		var newest plan.Link
		for i := range engine.BitsPerSecond(50) {
			newest = f.setPlan("gold", 2e6+i)
			time.Sleep(time.Minute)
			synctest.Wait()
			var d *pb.Desired
			for len(lively.out) > 0 {
				d = (<-lively.out).GetDesired()
			}
			if d.GetHash() != newest.Hash() {
				t.Fatalf("change %d: the other one was sent %v", i, d)
			}
			lively.say(applied(d))
		}
		if n := len(stalled.out); n != 0 {
			t.Errorf("%d messages wait for the stalled one", n)
		}
		stalled.full.Store(false)
		(*stalled.session.Load()).Writable()
		synctest.Wait()
		if n := len(stalled.out); n != 1 {
			t.Fatalf("%d messages after it could take some, want 1", n)
		}
		if d := (<-stalled.out).GetDesired(); d.GetHash() != newest.Hash() {
			t.Errorf("it was sent %v", d)
		}
		stalled.End(nil)
		lively.End(nil)
		sessions.Wait()
	})
}

// TestFleet061: 100 000 refused hellos leave nothing behind, whatever they say.
func TestFleet061(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 1e6)
		f.setRouter("home-1", "gold")
		refuse := func(n int) {
			for i := range n {
				id := "home-1"
				s := f.fakeStream(id)
				switch i % 3 {
				case 0: // of somebody else
					s.say(hello(fmt.Sprintf("stranger-%d", i)))
				case 1: // without a hello
					s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{Error: fmt.Sprint(i)}}})
				default: // without an answer to anything
					s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: id, Model: fmt.Sprint(i)}}})
				}
				if err := <-s.ended; err == nil {
					t.Fatalf("hello %d was not refused", i)
				}
			}
		}
		heap := func() uint64 {
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		refuse(1000) // what is made once is made
		before := heap()
		refuse(100_000)
		synctest.Wait()
		if after := heap(); after > before+before/5+1<<20 {
			t.Errorf("100 000 refused hellos leave %d kB: %d before, %d after", (after-before)>>10, before, after)
		}
		sessions.Wait()
	})
}

// TestSessionClampIsShown: values that a router could not run are shown with
// what runs and why, and are not sent again.
func TestSessionClampIsShown(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 2e9)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{})
	d := a.desired()
	runs := link(1e9)
	a.status(&pb.Status{
		Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_CLAMPED, AppliedRevision: d.GetRevision(), AppliedHash: d.GetHash(),
		EffectiveHash: runs.Hash(), Effective: wire.FromLink(&runs),
		Clamps: []*pb.Clamp{{Field: "down.rate", Desired: "2Gbit", Effective: "1Gbit", Reason: "the port has 1 Gbit/s"}},
	})
	r := f.waitSync(ops, pb.SyncState_SYNC_STATE_CLAMPED)
	rep := r.GetReported()
	if len(rep.GetClamps()) != 1 || rep.GetClamps()[0].GetReason() != "the port has 1 Gbit/s" || rep.GetEffective().GetDown().GetRateBps() != 1e9 || r.GetDesired().GetLink().GetDown().GetRateBps() != 2e9 {
		t.Errorf("router %v", r)
	}
	f.setPlan("gold", 3e9)
	if d := a.desired(); d.GetNonce() != 2 || d.GetLink().GetDown().GetRateBps() != 3e9 {
		t.Errorf("next it was sent %v", d)
	}
}
