package api

import (
	"context"
	"errors"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/store"
)

// errorDomain is the domain of every ErrorInfo.
const errorDomain = "cakefleet"

// retryDelay is when a caller should try again if the store can't be reached.
const retryDelay = time.Second

// The table of domain errors: the first that fits counts. The reason is what
// programs tell apart; where a store.Error has facts, they are in its metadata.
var statusTable = []struct {
	err    error
	code   codes.Code
	reason string
}{
	{store.ErrInvalid, codes.InvalidArgument, "INVALID"},
	{errRequest, codes.InvalidArgument, "INVALID"},
	{store.ErrNotFound, codes.NotFound, "NOT_FOUND"},
	{store.ErrExists, codes.AlreadyExists, "EXISTS"},
	{store.ErrConflict, codes.Aborted, "CONFLICT"},
	{store.ErrLasting, codes.FailedPrecondition, "LASTING"},
	{store.ErrChangedSince, codes.FailedPrecondition, "CHANGED_SINCE"},
	{store.ErrLastAdmin, codes.FailedPrecondition, "LAST_ADMIN"},
	{store.ErrInUse, codes.FailedPrecondition, "IN_USE"},
	{store.ErrDangling, codes.FailedPrecondition, "DANGLING"},
	{store.ErrRevoked, codes.PermissionDenied, reasonRevoked},
	{errBusyRouters, codes.FailedPrecondition, "ROLLOUT_IN_THE_WAY"},
	{errHeld, codes.FailedPrecondition, "HELD_BACK"},
	{rollout.ErrCommand, codes.FailedPrecondition, "PHASE"},
	{store.ErrToken, codes.Unauthenticated, "TOKEN"},
	{store.ErrFenced, codes.Aborted, "FENCED"},
	{store.ErrFull, codes.ResourceExhausted, "STORE_FULL"},
	{store.ErrNoEtcd, codes.FailedPrecondition, "NO_ETCD"},
	{store.ErrUnavailable, codes.Unavailable, "STORE_UNAVAILABLE"},
	{store.ErrClosed, codes.Unavailable, "STORE_UNAVAILABLE"},
	{context.DeadlineExceeded, codes.DeadlineExceeded, "DEADLINE"},
	{context.Canceled, codes.Canceled, "CANCELED"},
}

// errRequest is a request that makes no sense, whatever is stored.
var errRequest = errors.New("invalid request")

// requestError is an error about one field of a request.
type requestError struct {
	field string // path in the request
	cause error
}

func (e *requestError) Error() string        { return e.cause.Error() }
func (e *requestError) Is(target error) bool { return target == errRequest }

// badField returns an error that blames a field of the request.
func badField(field string, cause error) error { return &requestError{field, cause} }

// statusOf returns the gRPC status of a domain error with its details; nil for
// nil, and err itself if it is a status already.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	// Not one deeper inside: that is etcd's and not ours.
	if s, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return s.GRPCStatus().Err()
	}
	for _, row := range statusTable {
		if errors.Is(err, row.err) {
			return withDetails(status.New(row.code, err.Error()), details(err, row.reason, row.code)).Err()
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// retryIn are the details of a refusal that ends by itself.
func retryIn(reason string, wait time.Duration) []protoadapt.MessageV1 {
	return []protoadapt.MessageV1{
		&errdetails.ErrorInfo{Reason: reason, Domain: errorDomain},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)},
	}
}

func withDetails(s *status.Status, d []protoadapt.MessageV1) *status.Status {
	full, err := s.WithDetails(d...)
	if err != nil {
		return s // without its details it still says what happened
	}
	return full
}

func details(err error, reason string, code codes.Code) []protoadapt.MessageV1 {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: errorDomain}
	d := []protoadapt.MessageV1{info}
	if code == codes.Unavailable {
		d = append(d, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	}
	if field, ok := errors.AsType[*requestError](err); ok {
		d = append(d, violation(field.field, field.Error()))
	}
	e, ok := errors.AsType[*store.Error](err)
	if !ok {
		return d
	}
	info.Metadata = map[string]string{"kind": string(e.Kind), "id": e.ID}
	switch {
	case errors.Is(e.Err, store.ErrInvalid):
		d = append(d, violation(string(e.Kind), e.Error()))
	case errors.Is(e.Err, store.ErrNotFound):
		d = append(d, &errdetails.ResourceInfo{ResourceType: string(e.Kind), ResourceName: e.ID, Description: e.Error()})
	case errors.Is(e.Err, store.ErrConflict), errors.Is(e.Err, store.ErrExists):
		info.Metadata["expected_revision"] = strconv.FormatInt(int64(e.Want), 10)
		info.Metadata["stored_revision"] = strconv.FormatInt(int64(e.Have), 10)
		info.Metadata["stored_at"] = e.Updated.UTC().Format(time.RFC3339Nano)
	case errors.Is(e.Err, store.ErrInUse):
		info.Metadata["used_by"] = string(e.Ref)
		info.Metadata["count"] = strconv.Itoa(e.Count)
		info.Metadata["example"] = e.RefID
		d = append(d, precondition(reason, e))
	case errors.Is(e.Err, store.ErrDangling):
		info.Metadata["missing_kind"] = string(e.Ref)
		info.Metadata["missing_id"] = e.RefID
		d = append(d, precondition(reason, e))
	}
	return d
}

func violation(field, description string) *errdetails.BadRequest {
	return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: description}}}
}

func precondition(reason string, e *store.Error) *errdetails.PreconditionFailure {
	return &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
		{Type: reason, Subject: string(e.Kind) + "s/" + e.ID, Description: e.Error()},
	}}
}
