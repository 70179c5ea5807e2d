package ctl_test

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// schedules has one schedule, for nights, or none.
type schedules struct {
	pb.UnimplementedScheduleServiceServer
	none bool
}

func nights() *pb.Schedule {
	return described(&pb.Schedule{
		Id: "nights", Target: &pb.ScheduleTarget{Labels: map[string]string{"site": "north"}}, ToPlan: "night", Zone: "Europe/Berlin",
		Windows: []string{"daily 23:00-06:00"}, Priority: 2, Revision: 119, UpdateTime: before(time.Hour), Author: "bob",
	})
}

// described adds what a controller knows.
func described(s *pb.Schedule) *pb.Schedule {
	s.Routers, s.Active, s.Upcoming = 4, !s.Paused, nil
	for i := range 2 {
		s.Upcoming = append(s.Upcoming, &pb.ScheduleSpan{
			Begin: before(time.Hour - time.Duration(i)*24*time.Hour), End: before(-6*time.Hour - time.Duration(i)*24*time.Hour),
		})
	}
	if len(s.Windows) == 0 {
		s.Upcoming = []*pb.ScheduleSpan{{Begin: before(-24 * time.Hour)}}
	}
	return s
}

func (f *schedules) conflicts() []*pb.ScheduleConflict {
	return []*pb.ScheduleConflict{{Id: "other", Fields: []string{"down.rate", "up.rate"}, Routers: 2, Time: before(-time.Hour), OtherCounts: true}}
}

func (f *schedules) GetSchedule(_ context.Context, r *pb.GetScheduleRequest) (*pb.GetScheduleResponse, error) {
	if r.Id != "nights" {
		return nil, status.Errorf(codes.NotFound, "schedule %s: not found", r.Id)
	}
	return &pb.GetScheduleResponse{Schedule: nights(), Conflicts: f.conflicts()}, nil
}

func (f *schedules) ListSchedules(context.Context, *pb.ListSchedulesRequest) (*pb.ListSchedulesResponse, error) {
	if f.none {
		return &pb.ListSchedulesResponse{}, nil
	}
	settled := described(&pb.Schedule{Id: "faster", Target: &pb.ScheduleTarget{Plan: "gold"}, Set: map[string]string{"down.rate": "300Mbit"}, Zone: "UTC", Start: "2026-11-29 02:00", Settled: true})
	return &pb.ListSchedulesResponse{Schedules: []*pb.Schedule{settled, nights()}}, nil
}

func (f *schedules) CreateSchedule(_ context.Context, r *pb.CreateScheduleRequest) (*pb.CreateScheduleResponse, error) {
	s := described(r.Schedule)
	s.Revision = 121
	return &pb.CreateScheduleResponse{Schedule: s, AffectedRouters: 4, Conflicts: f.conflicts()}, nil
}

func (f *schedules) UpdateSchedule(_ context.Context, r *pb.UpdateScheduleRequest) (*pb.UpdateScheduleResponse, error) {
	s := described(r.Schedule)
	s.Revision = 121
	return &pb.UpdateScheduleResponse{Schedule: s, Changed: true, AffectedRouters: 3}, nil
}

func (f *schedules) DeleteSchedule(context.Context, *pb.DeleteScheduleRequest) (*pb.DeleteScheduleResponse, error) {
	return &pb.DeleteScheduleResponse{AffectedRouters: 1}, nil
}
