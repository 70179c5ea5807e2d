package api

import (
	"context"
	"errors"
	"runtime/debug"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// door checks who calls, keeps one call's panic from ending the process, and
// tells each call at debug level.
type door struct {
	role   identity.Role
	logger hclog.Logger
	open   string // prefix of the methods that need no certificate; empty: none
}

// AgentsDoor returns the options of the gRPC server that agents call.
func AgentsDoor(logger hclog.Logger) []grpc.ServerOption {
	d := door{role: identity.RoleRouter, logger: logger, open: "/" + pb.EnrollmentService_ServiceDesc.ServiceName + "/"}
	return d.options()
}

// OperatorsDoor returns the options of the gRPC server that operators call.
func OperatorsDoor(logger hclog.Logger) []grpc.ServerOption {
	return door{role: identity.RoleOperator, logger: logger}.options()
}

func (d door) options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(d.unary), grpc.StreamInterceptor(d.stream)}
}

func (d door) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	err = d.call(ctx, info.FullMethod, func() error {
		resp, err = handler(ctx, req)
		return err
	})
	return resp, err
}

func (d door) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return d.call(ss.Context(), info.FullMethod, func() error { return handler(srv, ss) })
}

func (d door) call(ctx context.Context, method string, handle func() error) (err error) {
	began := time.Now()
	who, refused := d.admit(ctx, method)
	defer func() {
		if p := recover(); p != nil {
			d.logger.Error("call panicked", "method", method, "peer", who, "panic", p, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "internal error; the controller's log has more")
		}
		d.logger.Debug("call", "method", method, "peer", who, "code", status.Code(err), "took", time.Since(began), "error", err)
	}()
	if refused != nil {
		return refused
	}
	return handle()
}

// admit returns who calls, for the log, and why the call is refused.
func (d door) admit(ctx context.Context, method string) (who string, err error) {
	p, err := caller(ctx)
	who = p.Role.String() + "/" + p.Name
	switch {
	case d.open != "" && strings.HasPrefix(method, d.open):
		return who, nil
	case errors.Is(err, identity.ErrNoCertificate):
		return who, status.Error(codes.Unauthenticated, err.Error())
	case err != nil:
		return who, status.Error(codes.PermissionDenied, err.Error())
	case p.Role != d.role:
		return who, status.Errorf(codes.PermissionDenied, "this door is for certificates of a %s, not of a %s", d.role, p.Role)
	}
	return who, nil
}

// caller returns who is at the other end of the connection.
func caller(ctx context.Context) (identity.Peer, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return identity.Peer{}, identity.ErrNoCertificate
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return identity.Peer{}, identity.ErrNoCertificate
	}
	return identity.PeerOf(info.State)
}
