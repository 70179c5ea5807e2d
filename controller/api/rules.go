package api

import (
	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rule is what the operators' doors know of a call.
type rule struct {
	min    identity.OperatorRole // who may
	change bool                  // whether anything is other than before
}

var (
	look    = rule{identity.Viewer, false}
	inspect = rule{identity.Operator, false} // what only those need who change things
	change  = rule{identity.Operator, true}

	administer = rule{identity.Admin, true}
)

// The calls of the operators' doors. One that is not here is refused, and a
// test finds it.
var rules = map[string]rule{
	pb.PlanService_GetPlan_FullMethodName:           look,
	pb.PlanService_ListPlans_FullMethodName:         look,
	pb.PlanService_CreatePlan_FullMethodName:        change,
	pb.PlanService_UpdatePlan_FullMethodName:        change,
	pb.PlanService_DeletePlan_FullMethodName:        change,
	pb.PlanService_ListPlanRevisions_FullMethodName: look,
	pb.PlanService_RollbackPlan_FullMethodName:      change,

	pb.SubscriberService_GetSubscriber_FullMethodName:     look,
	pb.SubscriberService_ListSubscribers_FullMethodName:   look,
	pb.SubscriberService_CreateSubscriber_FullMethodName:  change,
	pb.SubscriberService_UpdateSubscriber_FullMethodName:  change,
	pb.SubscriberService_DeleteSubscriber_FullMethodName:  change,
	pb.SubscriberService_ImportSubscribers_FullMethodName: change,
	pb.SubscriberService_SetOverride_FullMethodName:       change,
	pb.SubscriberService_StartBoost_FullMethodName:        change,
	pb.SubscriberService_EndBoost_FullMethodName:          change,
	pb.SubscriberService_SuspendSubscriber_FullMethodName: change,
	pb.SubscriberService_ResumeSubscriber_FullMethodName:  change,

	pb.RouterService_GetRouter_FullMethodName:    look,
	pb.RouterService_ListRouters_FullMethodName:  look,
	pb.RouterService_UpdateRouter_FullMethodName: change,
	pb.RouterService_DeleteRouter_FullMethodName: change,

	pb.RouterService_RevokeRouter_FullMethodName:  change,
	pb.RouterService_ReadmitRouter_FullMethodName: change,
	pb.RouterService_ReleaseRouter_FullMethodName: change,

	pb.TelemetryService_GetRouterStats_FullMethodName:    look,
	pb.TelemetryService_ListPlanStats_FullMethodName:     look,
	pb.TelemetryService_ListRouterSamples_FullMethodName: look,
	pb.TelemetryService_ListWorst_FullMethodName:         look,
	pb.TelemetryService_QueryStats_FullMethodName:        look,
	pb.TelemetryService_ExplainRouter_FullMethodName:     look,

	pb.OperatorService_WhoAmI_FullMethodName:                    look,
	pb.OperatorService_ListOperators_FullMethodName:             {identity.Admin, false},
	pb.OperatorService_CreateOperator_FullMethodName:            administer,
	pb.OperatorService_UpdateOperator_FullMethodName:            administer,
	pb.OperatorService_DeleteOperator_FullMethodName:            administer,
	pb.OperatorService_CreateOperatorToken_FullMethodName:       administer,
	pb.OperatorService_CreateOperatorCertificate_FullMethodName: administer,
	pb.OperatorService_RevokeOperatorCredential_FullMethodName:  administer,

	pb.AuditService_ListAuditEntries_FullMethodName: inspect,
	pb.AuditService_UndoChange_FullMethodName:       change,

	pb.TokenService_CreateToken_FullMethodName:  change,
	pb.TokenService_ListTokens_FullMethodName:   inspect,
	pb.TokenService_DeleteToken_FullMethodName:  change,
	pb.TokenService_CreateTokens_FullMethodName: change,
	pb.TokenService_DeleteTokens_FullMethodName: change,

	pb.AdminService_GetStatus_FullMethodName:     look,
	pb.AdminService_RepairStore_FullMethodName:   administer,
	pb.AdminService_AcceptRestore_FullMethodName: administer,
	pb.AdminService_BackupStore_FullMethodName:   {identity.Admin, false},

	pb.ScheduleService_GetSchedule_FullMethodName:    look,
	pb.ScheduleService_ListSchedules_FullMethodName:  look,
	pb.ScheduleService_CreateSchedule_FullMethodName: change,
	pb.ScheduleService_UpdateSchedule_FullMethodName: change,
	pb.ScheduleService_DeleteSchedule_FullMethodName: change,
	pb.JoinService_GetAuthority_FullMethodName:       look,
	pb.JoinService_RotateAuthority_FullMethodName:    administer,
	pb.JoinService_RetireAuthority_FullMethodName:    administer,
	pb.JoinService_ListUnconfirmed_FullMethodName:    inspect,
	pb.JoinService_ListPending_FullMethodName:        inspect,
	pb.JoinService_Approve_FullMethodName:            change,
	pb.JoinService_Reject_FullMethodName:             change,
	pb.JoinService_Provision_FullMethodName:          change,
	pb.JoinService_ListProvisioned_FullMethodName:    inspect,
	pb.JoinService_Unprovision_FullMethodName:        change,

	pb.RolloutService_StartRollout_FullMethodName:       change,
	pb.RolloutService_GetRollout_FullMethodName:         look,
	pb.RolloutService_ListRollouts_FullMethodName:       look,
	pb.RolloutService_ListRolloutRouters_FullMethodName: look,
	pb.RolloutService_CommandRollout_FullMethodName:     change,
}
