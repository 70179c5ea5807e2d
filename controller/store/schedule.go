package store

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

type scheduleRecord struct {
	Schema     int               `json:"schema"`
	Plan       string            `json:"plan,omitempty"`
	Subscriber string            `json:"subscriber,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Set        map[string]string `json:"set,omitempty"`
	ToPlan     string            `json:"to_plan,omitempty"`
	Zone       string            `json:"zone,omitempty"`
	Start      string            `json:"start,omitempty"`
	End        string            `json:"end,omitempty"`
	Windows    []string          `json:"windows,omitempty"`
	Priority   int               `json:"priority,omitempty"`
	Paused     bool              `json:"paused,omitempty"`
	Settled    bool              `json:"settled,omitempty"`
	Removed    bool              `json:"removed,omitempty"`
	Created    time.Time         `json:"created,omitzero"`
	Updated    time.Time         `json:"updated"`
	By         string            `json:"by,omitempty"`
}

func encodeSchedule(s schedule.Schedule) []byte {
	r := scheduleRecord{
		Schema: schema, Plan: s.Target.Plan, Subscriber: s.Target.Subscriber, Labels: s.Target.Labels,
		Set: s.Set.Words(), ToPlan: s.ToPlan, Zone: s.Zone, Start: s.Start.String(), End: s.End.String(), Priority: s.Priority,
		Paused: s.Paused, Settled: s.Settled, Removed: s.Removed, Created: s.Created, Updated: s.Updated, By: s.Author,
	}
	for _, w := range s.Windows {
		r.Windows = append(r.Windows, w.String())
	}
	return encode(r)
}

func decodeSchedule(id string, value []byte, rev plan.Revision) (schedule.Schedule, error) {
	var r scheduleRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return schedule.Schedule{}, err
	}
	s := schedule.Schedule{
		ID: id, Target: schedule.Target{Plan: r.Plan, Subscriber: r.Subscriber, Labels: r.Labels},
		ToPlan: r.ToPlan, Zone: r.Zone, Priority: r.Priority, Paused: r.Paused, Settled: r.Settled, Removed: r.Removed,
		Created: r.Created, Updated: r.Updated, Author: r.By, Revision: rev,
	}
	var err error
	if s.Set, err = plan.ParseSettings(r.Set); err != nil {
		return schedule.Schedule{}, fmt.Errorf("set: %w", err)
	}
	if s.Start, err = schedule.ParseClock(r.Start); err != nil {
		return schedule.Schedule{}, fmt.Errorf("start: %w", err)
	}
	if s.End, err = schedule.ParseClock(r.End); err != nil {
		return schedule.Schedule{}, fmt.Errorf("end: %w", err)
	}
	for _, text := range r.Windows {
		w, err := schedule.ParseWindow(text)
		if err != nil {
			return schedule.Schedule{}, err
		}
		s.Windows = append(s.Windows, w)
	}
	return s, nil
}

// Schedule returns a schedule; ok is false if there is none of that id.
func (s *State) Schedule(id string) (v schedule.Schedule, ok bool) {
	v, ok = s.schedules.byID[id]
	return v, ok && !v.Removed
}

// Schedules yields the schedules whose id comes after an id, in order.
func (s *State) Schedules(after string) iter.Seq[schedule.Schedule] {
	return func(yield func(schedule.Schedule) bool) {
		for v := range s.schedules.after(after) {
			if !v.Removed && !yield(v) {
				return
			}
		}
	}
}

// SchedulesFor returns the schedules for a subscriber, in force or not, the one
// that counts last, with those that were removed: they have a revision.
func (s *State) SchedulesFor(sub *plan.Subscriber) []*schedule.Entry { return s.scheduleSet.For(sub) }

// RoutersOfTarget yields the ids of the routers that a schedule's target means.
// One of labels costs a look at every subscriber.
func (s *State) RoutersOfTarget(t schedule.Target) iter.Seq[string] {
	switch {
	case t.Plan != "":
		return func(yield func(string) bool) {
			for r := range s.routersOfPlan[t.Plan].values() {
				// The index also has those that the plan only suspends.
				if r.subscriber.Plan == t.Plan && !yield(r.ID) {
					return
				}
			}
		}
	case t.Subscriber != "":
		return ids(slices.Values(s.routersOfSubscriber[t.Subscriber]))
	}
	return func(yield func(string) bool) {
		for id, sub := range s.subscribers.byID {
			if !t.Matches(sub) {
				continue
			}
			for _, r := range s.routersOfSubscriber[id] {
				if !yield(r.ID) {
					return
				}
			}
		}
	}
}

func (s *State) affectedBySchedule(id string) iter.Seq[string] {
	if v, ok := s.schedules.byID[id]; ok {
		return s.RoutersOfTarget(v.Target)
	}
	return func(func(string) bool) {} // what it was for is told by its tombstone
}

func (s *State) setSchedule(id string, v schedule.Schedule, exists bool) {
	if old, had := s.schedules.byID[id]; had && old.ToPlan != "" {
		s.schedulesOfPlan.remove(old.ToPlan, id)
	}
	s.schedules.set(id, v, exists)
	if exists && v.ToPlan != "" && !v.Settled {
		s.schedulesOfPlan.add(v.ToPlan, id)
	}
	s.scheduleSetOld = true
}

// index makes what is derived from all records of a kind, before anybody looks.
func (s *State) index() {
	if s.scheduleSetOld {
		all := make([]schedule.Schedule, 0, len(s.schedules.byID))
		for v := range s.schedules.after("") {
			all = append(all, v)
		}
		s.scheduleSet, s.scheduleSetOld = schedule.NewSet(all), false
	}
	if s.rolloutsOld {
		s.rolloutSet, s.rolloutsOld = rollout.NewSet(slices.Collect(s.rollouts.after(""))), false
	}
}

// tombstone returns what is kept of schedules that were for a target: the
// revision of what routers should run must not go back when one is removed.
// There is one for each target.
func tombstone(t schedule.Target, now time.Time) Op {
	v := schedule.Schedule{ID: "~" + t.String(), Target: t, Removed: true, Updated: now}
	return Op{key(KindSchedule, v.ID), encodeSchedule(v)}
}

// PutSchedule stores a schedule; expect is as in PutPlan. Errors: those of
// PutPlan, and ErrDangling if the plan to change to doesn't exist.
func (s *Store) PutSchedule(ctx context.Context, v schedule.Schedule, expect plan.Revision) (schedule.Schedule, error) {
	if err := v.Validate(); err != nil {
		return schedule.Schedule{}, invalid(KindSchedule, v.ID, err)
	}
	v.Target.Labels = maps.Clone(v.Target.Labels)
	v.Updated = stamp()
	if v.Created.IsZero() {
		v.Created = v.Updated
	}
	var was schedule.Schedule
	var had bool
	s.View(func(st *State) { was, had = st.Schedule(v.ID) })
	w := scheduleWrite(v, expect)
	if had && !was.Target.Equal(v.Target) {
		w.more = []Op{tombstone(was.Target, v.Updated)}
	}
	var err error
	v.Revision, err = s.put(ctx, w)
	return v, err
}

func scheduleWrite(v schedule.Schedule, expect plan.Revision) write {
	w := write{kind: KindSchedule, id: v.ID, value: encodeSchedule(v), expect: expect}
	if v.ToPlan != "" && !v.Settled {
		w.ref, w.refs = KindPlan, []string{v.ToPlan}
	}
	return w
}

// DeleteSchedule removes a schedule; expect is as in PutPlan, without 0.
// Errors: ErrNotFound, ErrConflict.
func (s *Store) DeleteSchedule(ctx context.Context, id string, expect plan.Revision) error {
	var was schedule.Schedule
	var had bool
	s.View(func(st *State) { was, had = st.Schedule(id) })
	switch {
	case !had:
		return notFound(KindSchedule, id)
	case expect == Any:
		expect = was.Revision
	case expect != was.Revision:
		return &Error{Kind: KindSchedule, ID: id, Err: ErrConflict, Want: expect, Have: was.Revision, Updated: was.Updated}
	}
	_, err := s.put(ctx, write{kind: KindSchedule, id: id, expect: expect, more: []Op{tombstone(was.Target, stamp())}})
	return err
}

// SettleSchedule makes a schedule that is in force for good part of its plan,
// or of its subscriber, in one transaction: no router notices, and what an
// operator sets afterwards counts. Errors: ErrConflict if any of them was
// changed meanwhile, ErrNotFound if one is gone.
func (s *Store) SettleSchedule(ctx context.Context, v schedule.Schedule) error {
	if !v.Settles() {
		return invalid(KindSchedule, v.ID, fmt.Errorf("schedule %s: is not in force for good", v.ID))
	}
	now := stamp()
	t := txn{}
	if name := v.Target.Plan; name != "" {
		var p plan.Plan
		var ok bool
		s.View(func(st *State) { p, ok = st.Plan(name) })
		if !ok {
			return notFound(KindPlan, name)
		}
		v.Set.Over(&p.Link)
		if err := p.Validate(); err != nil {
			return invalid(KindPlan, name, err)
		}
		p.Updated, p.Author = now, "schedule "+v.ID
		value := encodePlan(p)
		keep, err := s.historyOps(ctx, p, value)
		if err != nil {
			return fmt.Errorf("settle schedule %s: %w", v.ID, err)
		}
		t.add(write{kind: KindPlan, id: name, value: value, expect: p.Revision, more: keep})
	} else {
		var sub plan.Subscriber
		var ok bool
		s.View(func(st *State) { sub, ok = st.Subscriber(v.Target.Subscriber) })
		if !ok {
			return notFound(KindSubscriber, v.Target.Subscriber)
		}
		sub.Plan = v.ToPlan
		t.add(subscriberWrite(SubscriberWrite{Subscriber: sub, Expect: sub.Revision}, now))
	}
	expect := v.Revision
	v.Settled, v.Updated = true, now
	t.add(scheduleWrite(v, expect))
	_, err := s.commit(ctx, &t)
	return err
}
