package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// How many upcoming times are told.
const (
	defaultUpcoming = 10
	mostUpcoming    = 100
)

// ScheduleService keeps what changes by the clock.
type ScheduleService struct {
	pb.UnimplementedScheduleServiceServer
	store *store.Store
}

// NewScheduleService returns the service on s.
func NewScheduleService(s *store.Store) *ScheduleService { return &ScheduleService{store: s} }

// GetSchedule returns one schedule.
func (s *ScheduleService) GetSchedule(_ context.Context, req *pb.GetScheduleRequest) (*pb.GetScheduleResponse, error) {
	upcoming := defaultUpcoming
	if n := req.GetUpcoming(); n > 0 {
		upcoming = int(min(n, mostUpcoming))
	}
	var resp *pb.GetScheduleResponse
	now := time.Now()
	s.store.View(func(st *store.State) {
		if v, ok := st.Schedule(req.GetId()); ok {
			resp = &pb.GetScheduleResponse{Schedule: scheduleMessage(st, &v, now, upcoming), Conflicts: conflicts(st, &v, now)}
		}
	})
	if resp == nil {
		return nil, statusOf(&store.Error{Kind: store.KindSchedule, ID: req.GetId(), Err: store.ErrNotFound})
	}
	return resp, nil
}

// ListSchedules returns a page of schedules.
func (s *ScheduleService) ListSchedules(_ context.Context, req *pb.ListSchedulesRequest) (*pb.ListSchedulesResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListSchedulesResponse{}
	now := time.Now()
	s.store.View(func(st *store.State) {
		resp.Schedules, resp.NextPageToken = collect(p, st.Schedules(p.after),
			func(v schedule.Schedule) string { return v.ID }, nil,
			func(v schedule.Schedule) *pb.Schedule { return scheduleMessage(st, &v, now, 1) })
	})
	return resp, nil
}

// CreateSchedule adds a schedule.
func (s *ScheduleService) CreateSchedule(ctx context.Context, req *pb.CreateScheduleRequest) (*pb.CreateScheduleResponse, error) {
	v, err := toSchedule(req.GetSchedule())
	if err != nil {
		return nil, statusOf(badField("schedule", err))
	}
	v.Author = author(ctx)
	effect, err := s.effect(&v)
	if err != nil {
		return nil, statusOf(err)
	}
	if effect.had {
		return nil, statusOf(&store.Error{Kind: store.KindSchedule, ID: v.ID, Err: store.ErrExists, Have: effect.was.Revision, Updated: effect.was.Updated})
	}
	if !req.GetValidateOnly() {
		if v, err = s.store.PutSchedule(ctx, v, 0); err != nil {
			return nil, statusOf(err)
		}
	}
	resp := &pb.CreateScheduleResponse{AffectedRouters: effect.routers}
	resp.Schedule, resp.Conflicts = s.describe(&v)
	return resp, nil
}

// UpdateSchedule replaces a schedule.
func (s *ScheduleService) UpdateSchedule(ctx context.Context, req *pb.UpdateScheduleRequest) (*pb.UpdateScheduleResponse, error) {
	v, err := toSchedule(req.GetSchedule())
	if err != nil {
		return nil, statusOf(badField("schedule", err))
	}
	v.Author = author(ctx)
	effect, err := s.effect(&v)
	if err != nil {
		return nil, statusOf(err)
	}
	was := effect.was
	expect := plan.Revision(req.GetSchedule().GetRevision())
	switch {
	case !effect.had:
		return nil, statusOf(&store.Error{Kind: store.KindSchedule, ID: v.ID, Err: store.ErrNotFound})
	case expect != 0 && expect != was.Revision:
		return nil, statusOf(&store.Error{Kind: store.KindSchedule, ID: v.ID, Err: store.ErrConflict, Want: expect, Have: was.Revision, Updated: was.Updated})
	case was.Settled:
		return nil, statusOf(&store.Error{Kind: store.KindSchedule, ID: v.ID, Err: store.ErrInvalid, Cause: fmt.Errorf(
			"schedule %s: has become part of %v and can't be changed any more; change that, or make another schedule", v.ID, was.Target)})
	}
	v.Created = was.Created
	resp := &pb.UpdateScheduleResponse{AffectedRouters: effect.routers, Changed: !sameSchedule(v, was)}
	switch {
	case !resp.GetChanged():
		v = was
	case !req.GetValidateOnly():
		if v, err = s.store.PutSchedule(ctx, v, was.Revision); err != nil {
			return nil, statusOf(err)
		}
	}
	resp.Schedule, resp.Conflicts = s.describe(&v)
	return resp, nil
}

// sameSchedule tells whether two schedules do the same.
func sameSchedule(a, b schedule.Schedule) bool {
	return a.Target.Equal(b.Target) && a.Set == b.Set && a.ToPlan == b.ToPlan && a.Zone == b.Zone && a.Start == b.Start && a.End == b.End &&
		slices.Equal(a.Windows, b.Windows) && a.Priority == b.Priority && a.Paused == b.Paused
}

// DeleteSchedule removes a schedule.
func (s *ScheduleService) DeleteSchedule(ctx context.Context, req *pb.DeleteScheduleRequest) (*pb.DeleteScheduleResponse, error) {
	resp := &pb.DeleteScheduleResponse{}
	s.store.View(func(st *store.State) {
		if was, ok := st.Schedule(req.GetId()); ok {
			resp.AffectedRouters = affected(st, &was, nil, time.Now())
		}
	})
	if err := s.store.DeleteSchedule(ctx, req.GetId(), expectation(req.GetRevision())); err != nil {
		return nil, statusOf(err)
	}
	return resp, nil
}

// effect is what a schedule would do if it were stored.
type effect struct {
	was     schedule.Schedule // that is stored now
	had     bool
	routers uint32 // whose desired state changes at once
}

func (s *ScheduleService) effect(v *schedule.Schedule) (e effect, err error) {
	if err := v.Validate(); err != nil {
		return e, badField("schedule", err)
	}
	now := time.Now()
	s.store.View(func(st *store.State) {
		if err = exists(st, v); err != nil {
			return
		}
		e.was, e.had = st.Schedule(v.ID)
		before := &e.was
		if !e.had {
			before, v.Created = nil, now.UTC().Truncate(time.Microsecond)
		} else {
			v.Created = e.was.Created
		}
		e.routers = affected(st, before, v, now)
	})
	return e, err
}

// exists returns an error if something that a schedule names doesn't exist.
func exists(st *store.State, v *schedule.Schedule) error {
	missing := func(k store.Kind, id string) error {
		return &store.Error{Kind: store.KindSchedule, ID: v.ID, Err: store.ErrDangling, Ref: k, RefID: id}
	}
	for _, name := range []string{v.Target.Plan, v.ToPlan} {
		if _, ok := st.Plan(name); !ok && name != "" {
			return missing(store.KindPlan, name)
		}
	}
	if _, ok := st.Subscriber(v.Target.Subscriber); !ok && v.Target.Subscriber != "" {
		return missing(store.KindSubscriber, v.Target.Subscriber)
	}
	return nil
}

// otherwise is the state with one schedule as it would be.
type otherwise struct {
	*store.State
	set *schedule.Set
}

// SchedulesFor returns what there would be.
func (o otherwise) SchedulesFor(sub *plan.Subscriber) []*schedule.Entry { return o.set.For(sub) }

// affected returns how many routers would have another desired state if a
// schedule were after instead of before; nil is none.
func affected(st *store.State, before, after *schedule.Schedule, now time.Time) (n uint32) {
	var all []schedule.Schedule
	for v := range st.Schedules("") {
		if before == nil || v.ID != before.ID {
			all = append(all, v)
		}
	}
	if after != nil {
		all = append(all, *after)
	}
	then := otherwise{st, schedule.NewSet(all)}
	seen := map[string]bool{}
	var hashes resolve.Hashes
	for _, v := range []*schedule.Schedule{before, after} {
		if v == nil {
			continue
		}
		for id := range st.RoutersOfTarget(v.Target) {
			if seen[id] {
				continue
			}
			seen[id] = true
			was, _ := resolve.Router(st, id, now, &hashes)
			is, _ := resolve.Router(then, id, now, &hashes)
			if was.Hash != is.Hash {
				n++
			}
		}
	}
	return n
}

// conflicts returns the schedules that set a field of the same router at the
// same time as v.
func conflicts(st *store.State, v *schedule.Schedule, now time.Time) (all []*pb.ScheduleConflict) {
	if v.Settled || v.Paused {
		return nil
	}
	for o := range st.Schedules("") {
		fields := fieldsOf(v) & fieldsOf(&o)
		if o.ID == v.ID || o.Settled || o.Paused || fields == 0 {
			continue
		}
		at, ok := schedule.Overlap(v, &o, now)
		if !ok {
			continue
		}
		routers := 0
		for id := range st.RoutersOfTarget(v.Target) {
			r, _ := st.Router(id)
			if sub, ok := st.Subscriber(r.Subscriber); ok && o.Target.Matches(&sub) {
				routers++
			}
		}
		if routers == 0 {
			continue
		}
		c := &pb.ScheduleConflict{Id: o.ID, Routers: uint32(routers), Time: wire.FromTime(at), OtherCounts: counts(&o, v)}
		for ; fields != 0; fields &= fields - 1 {
			c.Fields = append(c.Fields, plan.FieldName(bits.TrailingZeros64(fields)))
		}
		all = append(all, c)
	}
	return all
}

// counts tells whether a takes precedence over b. What changes a plan is below
// what is set above it.
func counts(a, b *schedule.Schedule) bool {
	layer := func(s *schedule.Schedule) bool { return s.ToPlan == "" && !s.Settles() }
	if layer(a) != layer(b) {
		return layer(a)
	}
	return schedule.Compare(a, b) > 0
}

func fieldsOf(v *schedule.Schedule) uint64 {
	if v.ToPlan != "" {
		return 1<<plan.NumFields - 1
	}
	return v.Set.Fields
}

func (s *ScheduleService) describe(v *schedule.Schedule) (m *pb.Schedule, c []*pb.ScheduleConflict) {
	now := time.Now()
	s.store.View(func(st *store.State) {
		m, c = scheduleMessage(st, v, now, defaultUpcoming), conflicts(st, v, now)
	})
	return m, c
}

func scheduleMessage(st *store.State, v *schedule.Schedule, now time.Time, upcoming int) *pb.Schedule {
	m := &pb.Schedule{
		Id:     v.ID,
		Target: &pb.ScheduleTarget{Plan: v.Target.Plan, Subscriber: v.Target.Subscriber, Labels: v.Target.Labels},
		Set:    v.Set.Words(), ToPlan: v.ToPlan, Zone: v.Zone, Start: v.Start.String(), End: v.End.String(), Priority: int32(v.Priority),
		Paused: v.Paused, Settled: v.Settled, Revision: int64(v.Revision), UpdateTime: wire.FromTime(v.Updated), CreateTime: wire.FromTime(v.Created), Author: v.Author,
	}
	for _, w := range v.Windows {
		m.Windows = append(m.Windows, w.String())
	}
	m.Active, _ = v.At(now)
	for _, span := range v.Upcoming(now, upcoming) {
		m.Upcoming = append(m.Upcoming, &pb.ScheduleSpan{Begin: wire.FromTime(span.From), End: wire.FromTime(span.Until)})
	}
	for range st.RoutersOfTarget(v.Target) {
		m.Routers++
	}
	return m
}

// toSchedule reads what an operator can say of a schedule.
func toSchedule(m *pb.Schedule) (v schedule.Schedule, err error) {
	if m == nil {
		return v, errors.New("schedule is missing")
	}
	t := m.GetTarget()
	v = schedule.Schedule{
		ID:     m.GetId(),
		Target: schedule.Target{Plan: t.GetPlan(), Subscriber: t.GetSubscriber(), Labels: maps.Clone(t.GetLabels())},
		ToPlan: m.GetToPlan(), Zone: m.GetZone(), Priority: int(m.GetPriority()), Paused: m.GetPaused(),
	}
	if v.Set, err = plan.ParseSettings(m.GetSet()); err != nil {
		return v, fmt.Errorf("schedule %s: %w", v.ID, err)
	}
	if v.Start, err = schedule.ParseClock(m.GetStart()); err != nil {
		return v, fmt.Errorf("schedule %s: start %w", v.ID, err)
	}
	if v.End, err = schedule.ParseClock(m.GetEnd()); err != nil {
		return v, fmt.Errorf("schedule %s: end %w", v.ID, err)
	}
	for _, text := range m.GetWindows() {
		w, err := schedule.ParseWindow(text)
		if err != nil {
			return v, fmt.Errorf("schedule %s: %w", v.ID, err)
		}
		v.Windows = append(v.Windows, w)
	}
	return v, nil
}
