package api_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func evening() *pb.Schedule {
	return &pb.Schedule{
		Id: "evening", Target: &pb.ScheduleTarget{Plan: "gold"}, Set: map[string]string{"down.rate": "200mbit"},
		Zone: "Europe/Berlin", Windows: []string{"mon-fri 18:00-23:00"},
	}
}

// TestFleet033_Session has a router connected from the winter into the summer:
// it is told at 18:00 on the wall, before and after the clocks change, and
// nothing else.
func TestFleet033_Session(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 20e6)
		f.setRouter("home-1", "gold")
		_, err := f.store.PutSchedule(t.Context(), schedule.Schedule{
			ID: "evening", Target: schedule.Target{Plan: "gold"}, Set: plan.RatesOf(link(50e6)), Zone: "Europe/Berlin",
			Windows: []schedule.Window{{Days: 1 << time.Sunday, From: 18 * 60, To: 23 * 60}},
		}, 0)
		noError(t, err)
		s := f.fakeStream("home-1")
		s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
		got := map[string]uint64{}
		for year := time.Now().Year(); ; {
			var m *pb.ConnectResponse
			select {
			case m = <-s.out:
			case <-time.After(14 * 24 * time.Hour):
				t.Fatal("nothing in two weeks")
			}
			d := m.GetDesired()
			if d == nil {
				continue
			}
			now := time.Now().UTC()
			if now.Year() != year || now.Month() > time.April {
				break
			}
			got[now.Format("01-02 15:04:05.000")] = d.GetLink().GetDown().GetRateBps()
			s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Status{Status: &pb.Status{
				Nonce: d.GetNonce(), Outcome: pb.Outcome_OUTCOME_APPLIED, AppliedHash: d.GetHash(), EffectiveHash: d.GetHash(),
			}}})
		}
		// 2000-01-01 is a Saturday; the clocks change on March 26.
		for at, want := range map[string]uint64{
			"01-02 17:00:00.000": 50e6, "01-02 22:00:00.000": 20e6, "03-19 17:00:00.000": 50e6, "03-19 22:00:00.000": 20e6,
			"03-26 16:00:00.000": 50e6, "03-26 21:00:00.000": 20e6, "04-30 16:00:00.000": 50e6, "04-30 21:00:00.000": 20e6,
		} {
			if got[at] != want {
				t.Errorf("at %s UTC the router was told %d bit/s, want %d", at, got[at], want)
			}
		}
		if want := 1 + 2*18; len(got) != want {
			t.Errorf("the router was told %d times, want %d: %v", len(got), want, got)
		}
		s.End(nil)
		sessions.Wait()
	})
}

// A schedule is tried, made, found to be in the way of another, changed, and
// removed; each tells how many routers it is for.
func TestSchedules(t *testing.T) {
	s, _ := served(t)
	svc := api.NewScheduleService(s)
	ctx := t.Context()
	always := evening()
	always.Windows = []string{"daily 00:00-24:00"}
	tried, err := svc.CreateSchedule(ctx, &pb.CreateScheduleRequest{Schedule: always, ValidateOnly: true})
	noError(t, err)
	if tried.GetAffectedRouters() != 1 || tried.GetSchedule().GetRouters() != 1 || !tried.GetSchedule().GetActive() {
		t.Errorf("dry run: %v", tried)
	}
	if all, err := svc.ListSchedules(ctx, &pb.ListSchedulesRequest{}); err != nil || len(all.GetSchedules()) != 0 {
		t.Fatalf("a dry run has stored %v, %v", all, err)
	}
	if d, owner := runs(t, s); owner("down.rate") != "100Mbit by plan" || !d.Changes.IsZero() {
		t.Errorf("before: %s", owner("down.rate"))
	}
	made, err := svc.CreateSchedule(ctx, &pb.CreateScheduleRequest{Schedule: always})
	noError(t, err)
	d, owner := runs(t, s)
	if owner("down.rate") != "200Mbit by schedule" || d.Changes.IsZero() {
		t.Errorf("in force: %s, changes %v", owner("down.rate"), d.Changes)
	}

	own := evening()
	own.Id, own.Target = "own", &pb.ScheduleTarget{Subscriber: "1"}
	own.Windows, own.Start, own.End = nil, time.Now().AddDate(0, 1, 0).Format("2006-01-02 15:04"), time.Now().AddDate(0, 2, 0).Format("2006-01-02T15:04")
	second, err := svc.CreateSchedule(ctx, &pb.CreateScheduleRequest{Schedule: own})
	noError(t, err)
	c := second.GetConflicts()
	if len(c) != 1 || c[0].GetId() != "evening" || c[0].GetOtherCounts() || c[0].GetRouters() != 1 || strings.Join(c[0].GetFields(), " ") != "down.rate" {
		t.Errorf("conflicts: %v", c)
	}
	got, err := svc.GetSchedule(ctx, &pb.GetScheduleRequest{Id: "evening", Upcoming: 3})
	noError(t, err)
	if c := got.GetConflicts(); len(c) != 1 || !c[0].GetOtherCounts() {
		t.Errorf("conflicts seen from the other side: %v", c)
	}

	paused := got.GetSchedule()
	paused.Paused = true
	changed, err := svc.UpdateSchedule(ctx, &pb.UpdateScheduleRequest{Schedule: paused})
	noError(t, err)
	if !changed.GetChanged() || changed.GetAffectedRouters() != 1 || changed.GetSchedule().GetActive() {
		t.Errorf("pause: %v", changed)
	}
	if again, err := svc.UpdateSchedule(ctx, &pb.UpdateScheduleRequest{Schedule: changed.GetSchedule()}); err != nil || again.GetChanged() {
		t.Errorf("the same again: %v, %v", again, err)
	}
	if _, err := svc.UpdateSchedule(ctx, &pb.UpdateScheduleRequest{Schedule: made.GetSchedule()}); status.Code(err) != codes.Aborted {
		t.Errorf("update of an old revision: %v", err)
	}
	after, _ := runs(t, s)
	if _, err := svc.DeleteSchedule(ctx, &pb.DeleteScheduleRequest{Id: "evening"}); err != nil {
		t.Error(err)
	}
	if d, _ := runs(t, s); d.Revision <= after.Revision {
		t.Errorf("revision went from %d to %d", after.Revision, d.Revision)
	}
}

func TestBadSchedules(t *testing.T) {
	s, _ := served(t)
	svc := api.NewScheduleService(s)
	for _, c := range []struct {
		change func(*pb.Schedule)
		code   codes.Code
		want   string
	}{
		{func(m *pb.Schedule) { m.Id = "A" }, codes.InvalidArgument, `schedule name "A"`},
		{func(m *pb.Schedule) { m.Zone = "Mars/Base" }, codes.InvalidArgument, "time zone database"},
		{func(m *pb.Schedule) { m.Windows = []string{"18-23"} }, codes.InvalidArgument, "mon-fri 18:00-23:00"},
		{func(m *pb.Schedule) { m.Start = "tomorrow" }, codes.InvalidArgument, "start \"tomorrow\": must be a date and a time"},
		{func(m *pb.Schedule) { m.Set["up.speed"] = "1" }, codes.InvalidArgument, `field "up.speed" is unknown`},
		{func(m *pb.Schedule) { m.Target.Plan = "none" }, codes.FailedPrecondition, "plan none does not exist"},
		{func(m *pb.Schedule) { m.Target = &pb.ScheduleTarget{Subscriber: "9"} }, codes.FailedPrecondition, "subscriber 9 does not exist"},
		{func(m *pb.Schedule) { m.Set, m.ToPlan = nil, "none" }, codes.FailedPrecondition, "plan none does not exist"},
	} {
		m := evening()
		c.change(m)
		_, err := svc.CreateSchedule(t.Context(), &pb.CreateScheduleRequest{Schedule: m, ValidateOnly: true})
		if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.want) {
			t.Errorf("%v, want %v and %q", err, c.code, c.want)
		}
	}
	if _, err := svc.UpdateSchedule(t.Context(), &pb.UpdateScheduleRequest{Schedule: evening()}); status.Code(err) != codes.NotFound {
		t.Errorf("update of none: %v", err)
	}
	if _, err := svc.CreateSchedule(t.Context(), &pb.CreateScheduleRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no schedule: %v", err)
	}
}
