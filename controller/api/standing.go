package api

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
)

// refusedDelay is when a router whose identity is refused should ask again:
// often enough that it is back soon after an operator has changed his mind.
const refusedDelay = time.Minute

// Reasons why a router's identity is refused, for programs.
const (
	reasonRemoved     = "ROUTER_REMOVED"
	reasonKey         = "ROUTER_HAS_ANOTHER_KEY"
	reasonRevoked     = "ROUTER_REVOKED"
	reasonQuarantined = "ROUTER_QUARANTINED"
)

// standing returns why a router's certificate opens nothing, though it may be
// good for a long time yet; nil if it does. PermissionDenied means that it
// needs another identity, FailedPrecondition that it has to wait.
func standing(st *store.State, who identity.Peer) error {
	if v, revoked := st.Revocation(who.Key); revoked {
		return revokedError(v, "router "+who.Name)
	}
	r, exists := st.Router(who.Name)
	switch {
	case !exists:
		return removed(who.Name)
	case r.Key != who.Key:
		return refusal(codes.PermissionDenied, reasonKey, refusedDelay, "router %s: is another device now, or has a new key; to come back it needs a join token", who.Name)
	case r.Quarantine != nil:
		return refusal(codes.FailedPrecondition, reasonQuarantined, refusedDelay, "router %s: two devices have its key since %s; an operator must release it", who.Name, r.Quarantine.Since.UTC().Format(time.RFC3339))
	}
	return nil
}

// removed is the answer to a router that isn't in the store, or not any more.
func removed(router string) error {
	return refusal(codes.PermissionDenied, reasonRemoved, refusedDelay, "router %s: was removed from the fleet", router)
}

// revokedError is the answer to whoever has a revoked key.
func revokedError(v store.Revocation, who string) error {
	why := ""
	if v.Reason != "" {
		why = ": " + v.Reason
	}
	return refusal(codes.PermissionDenied, reasonRevoked, refusedDelay, "%s: its key was revoked at %s%s", who, v.Time.UTC().Format(time.RFC3339), why)
}

// refusal returns a status with its reason and when to ask again.
func refusal(code codes.Code, reason string, again time.Duration, format string, args ...any) error {
	return withDetails(status.Newf(code, format, args...), []protoadapt.MessageV1{
		&errdetails.ErrorInfo{Reason: reason, Domain: errorDomain},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(again)},
	}).Err()
}
