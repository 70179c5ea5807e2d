package api

import (
	"google.golang.org/grpc"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// RegisterAgents registers the services of the agents' door.
func RegisterAgents(r grpc.ServiceRegistrar, sessions *SessionService, enrollment *EnrollmentService) {
	pb.RegisterSessionServiceServer(r, sessions)
	pb.RegisterEnrollmentServiceServer(r, enrollment)
}

// RegisterOperators registers the services of the operators' door.
func RegisterOperators(r grpc.ServiceRegistrar, plans *PlanService, subscribers *SubscriberService, routers *RouterService, telemetry *TelemetryService, tokens *TokenService) {
	pb.RegisterPlanServiceServer(r, plans)
	pb.RegisterSubscriberServiceServer(r, subscribers)
	pb.RegisterRouterServiceServer(r, routers)
	pb.RegisterTelemetryServiceServer(r, telemetry)
	pb.RegisterTokenServiceServer(r, tokens)
}
