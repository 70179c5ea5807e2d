package api_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// pushed returns what a stream was sent of desired states.
func (s *fakeStream) pushed() (all []*pb.Desired) {
	synctest.Wait()
	for len(s.out) > 0 {
		if d := (<-s.out).GetDesired(); d != nil {
			all = append(all, d)
		}
	}
	return all
}

// A change of what no router shapes by leaves it in sync and sends nothing.
func TestFleet026_UnusedFieldMovesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 20e6)
		f.setRouter("home-1", "gold")
		s := f.fakeStream("home-1")
		s.say(hello("home-1"))
		for _, d := range s.pushed() {
			s.say(applied(d))
		}
		_, key := f.key("home-1")
		for i, change := range []func() error{
			func() error {
				_, err := f.store.PutSubscriber(t.Context(), plan.Subscriber{ID: "sub-home-1", Plan: "gold", Labels: map[string]string{"site": "north"}}, store.Any)
				return err
			},
			func() error {
				_, err := f.store.PutRouter(t.Context(), plan.Router{ID: "home-1", Subscriber: "sub-home-1", Key: key, Labels: map[string]string{"box": "7"}}, store.Any)
				return err
			},
			func() error { // the same rates, written again
				_, err := f.store.PutPlan(t.Context(), plan.Plan{Name: "gold", Link: link(20e6)}, store.Any)
				return err
			},
		} {
			if err := change(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour)
			if all := s.pushed(); len(all) != 0 {
				t.Errorf("change %d: sent %v", i, all)
			}
			if got := f.shown("home-1").GetSession().GetSync(); got != pb.SyncState_SYNC_STATE_IN_SYNC {
				t.Errorf("change %d: shown as %v", i, got)
			}
		}
		s.End(nil)
		sessions.Wait()
	})
}

// shown returns how operators see a router, without a connection.
func (f *fixture) shown(id string) *pb.Router {
	f.t.Helper()
	resp, err := f.routers.GetRouter(f.t.Context(), &pb.GetRouterRequest{Id: id})
	if err != nil {
		f.t.Fatal(err)
	}
	return resp.GetRouter()
}

// A value that many inherit changes: those who do get a new revision, and
// nobody else: not who overrides it, nor who has another plan.
func TestFleet027_InheritedValueReachesWhoInheritsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 20e6)
		f.setPlan("silver", 5e6)
		streams := map[string]*fakeStream{}
		var before plan.Revision
		for i := range 12 {
			id, of := fmt.Sprintf("home-%02d", i), "gold"
			if i%3 == 2 {
				of = "silver"
			}
			f.setRouter(id, of)
			if i%3 == 1 { // both rates are its own
				sub := plan.Subscriber{ID: "sub-" + id, Plan: of}
				var l plan.Layers
				for field, rate := range map[string]string{"down.rate": "7mbit", "up.rate": "1mbit"} {
					if err := l.Override.Parse(field, rate); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := f.store.PutSubscriber(t.Context(), sub.WithLayers(l), store.Any); err != nil {
					t.Fatal(err)
				}
			}
			s := f.fakeStream(id)
			s.say(hello(id))
			for _, d := range s.pushed() {
				s.say(applied(d))
			}
			streams[id] = s
			before = f.store.Revision()
		}
		f.setPlan("gold", 30e6)
		time.Sleep(time.Minute)
		for i := range 12 {
			id := fmt.Sprintf("home-%02d", i)
			all := streams[id].pushed()
			if i%3 != 0 {
				if len(all) != 0 {
					t.Errorf("%s does not inherit the rate, and is sent %v", id, all)
				}
				continue
			}
			if len(all) == 0 || all[0].GetLink().GetDown().GetRateBps() != 30e6 || plan.Revision(all[0].GetRevision()) <= before {
				t.Errorf("%s inherits the rate, and is sent %v", id, all)
			}
		}
		for _, s := range streams {
			s.End(nil)
		}
		sessions.Wait()
	})
}

// Changes, answers and reports come from everywhere at once on one real stream,
// and every message gets through whole.
func TestFleet049_ManyWritersOneStream(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	a := f.connect("home-1", &pb.Hello{})
	const writers, changes = 4, 50
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			for j := range changes {
				l := link(engine.BitsPerSecond(1e6 + i*1000 + j))
				if _, err := f.store.PutPlan(t.Context(), plan.Plan{Name: "gold", Link: l}, store.Any); err != nil {
					t.Error(err)
				}
			}
		})
	}
	answers, read := make(chan *pb.ConnectRequest, 1000), make(chan struct{})
	go func() { // what comes
		defer close(read)
		for {
			m, err := a.stream.Recv()
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("the session ends: %v", err)
				}
				return
			}
			if d := m.GetDesired(); d != nil {
				answers <- applied(d)
			}
		}
	}()
	end, ended := make(chan struct{}), make(chan struct{})
	go func() { // what goes: with every answer a report, fewer than the door calls too many
		defer close(ended)
		for n := uint64(1); ; n++ {
			select {
			case <-end:
				return
			case m := <-answers:
				report := &pb.ConnectRequest{Message: &pb.ConnectRequest_Report{Report: &pb.Report{Sequence: n, BootId: "boot-1"}}}
				if err := errors.Join(a.stream.Send(report), a.stream.Send(m)); err != nil {
					t.Errorf("send: %v", err)
					return
				}
			}
		}
	}()
	all.Wait()
	r := f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
	if rev := r.GetReported().GetAppliedRevision(); plan.Revision(rev) != f.store.Revision() {
		t.Errorf("revision %d runs, %d is the newest", rev, f.store.Revision())
	}
	close(end)
	<-ended
	noError(t, a.stream.CloseSend())
	<-read
}

// A router whose clock is a year ahead: the controller stamps what comes with
// its own time, shows what the router says of its clock, and others notice
// nothing.
func TestFleet082_ClockOfARouterIsItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		defer sessions.Wait()
		f.setPlan("gold", 20e6)
		began := time.Now()
		for _, id := range []string{"early", "other"} {
			f.setRouter(id, "gold")
			s := f.fakeStream(id)
			defer s.End(nil)
			m := hello(id)
			if id == "early" {
				m.GetHello().Clock = timestamppb.New(began.AddDate(1, 0, 0))
			}
			s.say(m)
			for _, d := range s.pushed() {
				a := applied(d)
				if id == "early" {
					a.GetStatus().Conditions = []*pb.Condition{{Type: "ClockOK", Reason: "Wrong", Message: "365 days ahead"}}
				}
				s.say(a)
			}
		}
		for _, id := range []string{"early", "other"} {
			r := f.shown(id)
			if seen := r.GetSession().GetLastSeen().AsTime(); seen.After(time.Now()) || seen.Before(began.Add(-time.Second)) {
				t.Errorf("%s was seen at %v, and it is %v", id, seen, time.Now())
			}
			if r.GetSession().GetSync() != pb.SyncState_SYNC_STATE_IN_SYNC {
				t.Errorf("%s is %v", id, r.GetSession().GetSync())
			}
			conditions := fmt.Sprint(r.GetReported().GetConditions())
			if told := strings.Contains(conditions, "365 days ahead"); told != (id == "early") {
				t.Errorf("%s: conditions %s", id, conditions)
			}
		}
	})
}

// What the clocks of two controllers differ by is told, as schedules and boosts
// begin and end that much apart; how long the answer took is no difference.
func TestClocksApart(t *testing.T) {
	asked := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for theirs, want := range map[time.Duration]string{
		0:                "",
		4 * time.Second:  "",
		14 * time.Second: "", // the answer took ten
		75 * time.Second: "1m5s ahead of",
		-4 * time.Second: "",
		-2 * time.Hour:   "2h0m0s behind",
	} {
		if got := api.Apart(asked.Add(theirs), asked, asked.Add(10*time.Second)); got != want {
			t.Errorf("%v: %q, want %q", theirs, got, want)
		}
	}
}
