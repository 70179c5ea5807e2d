package api

import (
	"google.golang.org/grpc"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// RegisterAgents registers the services of the agents' door. Sessions are not
// one of them: the door opens them.
func RegisterAgents(r grpc.ServiceRegistrar, enrollment *EnrollmentService) {
	pb.RegisterEnrollmentServiceServer(r, enrollment)
}

// Services are those of the operators' doors.
type Services struct {
	Plans       *PlanService
	Subscribers *SubscriberService
	Routers     *RouterService
	Telemetry   *TelemetryService
	Tokens      *TokenService
	Joins       *JoinService
	Schedules   *ScheduleService
	Admin       *AdminService
	Operators   *OperatorService
	Audit       *AuditService
	Rollouts    *RolloutService
}

// RegisterPeers registers the services of the door of other controllers.
func RegisterPeers(r grpc.ServiceRegistrar, s *PeerService) {
	pb.RegisterPeerServiceServer(r, s)
	pb.RegisterTelemetryServiceServer(r, s.telemetry)
}

// RegisterOperators registers the services of the operators' doors.
func RegisterOperators(r grpc.ServiceRegistrar, s Services) {
	pb.RegisterPlanServiceServer(r, s.Plans)
	pb.RegisterSubscriberServiceServer(r, s.Subscribers)
	pb.RegisterRouterServiceServer(r, s.Routers)
	pb.RegisterTelemetryServiceServer(r, s.Telemetry)
	pb.RegisterTokenServiceServer(r, s.Tokens)
	pb.RegisterJoinServiceServer(r, s.Joins)
	pb.RegisterScheduleServiceServer(r, s.Schedules)
	pb.RegisterAdminServiceServer(r, s.Admin)
	pb.RegisterOperatorServiceServer(r, s.Operators)
	pb.RegisterAuditServiceServer(r, s.Audit)
	pb.RegisterRolloutServiceServer(r, s.Rollouts)
}
