package api

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"runtime/debug"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// gate checks who calls, keeps one call's panic from ending the process, and
// tells each call at debug level.
type gate struct {
	logger hclog.Logger
	// admit returns what the call gets to know of its caller, who calls, for the
	// log, and why the call is refused.
	admit   func(ctx context.Context, method string) (_ context.Context, who string, err error)
	privacy *privacy // nil: answers are not for operators
	clock   bool     // answers say what time it is here
}

// ClockHeader is the metadata of an answer that has the controller's time, as a
// viewer's own clock may be wrong.
const ClockHeader = "cakefleet-clock"

// AgentsDoor returns what is around every unary call of agents. Sessions are
// checked when they begin.
func AgentsDoor(logger hclog.Logger) grpc.UnaryServerInterceptor {
	return gate{logger: logger, admit: admitAgent}.unary
}

// OperatorsDoor returns the options of the gRPC server that operators call.
// viewerLabels are the labels of subscribers that viewers see.
func OperatorsDoor(control *access.Control, viewerLabels []string, logger hclog.Logger) []grpc.ServerOption {
	return gate{logger: logger, clock: true, privacy: newPrivacy(viewerLabels), admit: func(ctx context.Context, method string) (context.Context, string, error) {
		who, err := control.Admit(shown(ctx))
		return admitOperator(ctx, method, who, err)
	}}.options()
}

// InsideDoor returns the options of a gRPC server that only this process can
// reach, on behalf of callers that another door has let in.
func InsideDoor(viewerLabels []string, logger hclog.Logger) []grpc.ServerOption {
	return gate{logger: logger, privacy: newPrivacy(viewerLabels), admit: func(ctx context.Context, method string) (context.Context, string, error) {
		who, err := callerInside(ctx)
		return admitOperator(ctx, method, who, err)
	}}.options()
}

func (g gate) options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(g.unary), grpc.ChainStreamInterceptor(g.stream)}
}

func (g gate) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	if g.clock {
		_ = grpc.SetHeader(ctx, metadata.Pairs(ClockHeader, time.Now().UTC().Format(time.RFC3339Nano))) // the answer is good without
	}
	err = g.call(ctx, info.FullMethod, func(ctx context.Context) error {
		resp, err = handler(ctx, req)
		if err == nil && g.privacy != nil {
			resp = g.privacy.forCaller(identity.CallerFrom(ctx), resp)
		}
		return err
	})
	return resp, err
}

func (g gate) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return g.call(ss.Context(), info.FullMethod, func(ctx context.Context) error {
		if ctx != ss.Context() {
			ss = &stream{ss, ctx}
		}
		if g.privacy != nil {
			ss = &privateStream{ss, g.privacy, identity.CallerFrom(ctx)}
		}
		return handler(srv, ss)
	})
}

// stream is a stream whose context knows the caller.
type stream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // what Context returns
}

// Context returns the context of the call.
func (s *stream) Context() context.Context { return s.ctx }

func (g gate) call(ctx context.Context, method string, handle func(context.Context) error) (err error) {
	began := time.Now()
	ctx, who, refused := g.admit(ctx, method)
	defer func() {
		if p := recover(); p != nil {
			g.logger.Error("call panicked", "method", method, "peer", who, "panic", p, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "internal error; the controller's log has more")
		}
		g.logger.Debug("call", "method", method, "peer", who, "code", status.Code(err), "took", time.Since(began), "error", err)
	}()
	if refused != nil {
		return refused
	}
	return handle(ctx)
}

// openPrefix is of the methods of the agents' door that need no certificate.
var openPrefix = "/" + pb.EnrollmentService_ServiceDesc.ServiceName + "/"

func admitAgent(ctx context.Context, method string) (_ context.Context, who string, err error) {
	p, err := caller(ctx)
	who = p.Role.String() + "/" + p.Name
	switch {
	case strings.HasPrefix(method, openPrefix):
		// Who it is, the token says; the audit log gets to know where it came from.
		a := store.Actor{Caller: identity.Caller{Name: "agent", Address: shown(ctx).Address}, Call: method[strings.LastIndexByte(method, '/')+1:]}
		return store.WithActor(ctx, a), who, nil
	case errors.Is(err, identity.ErrNoCertificate):
		return ctx, who, status.Error(codes.Unauthenticated, err.Error())
	case err != nil:
		return ctx, who, status.Error(codes.PermissionDenied, err.Error())
	case p.Role != identity.RoleRouter:
		return ctx, who, status.Errorf(codes.PermissionDenied, "this door is for certificates of a %s, not of a %s", identity.RoleRouter, p.Role)
	}
	return ctx, who, nil
}

// admitOperator lets a caller that was recognised, or wasn't, do a call.
func admitOperator(ctx context.Context, method string, c identity.Caller, err error) (_ context.Context, who string, _ error) {
	who = c.Role.String() + "/" + c.Name
	switch {
	case errors.Is(err, access.ErrNoCredentials):
		return ctx, who, status.Error(codes.Unauthenticated, err.Error())
	case errors.Is(err, access.ErrThrottled), errors.Is(err, access.ErrTooFast):
		return ctx, who, status.Error(codes.ResourceExhausted, err.Error())
	case errors.Is(err, access.ErrIssuer):
		return ctx, who, status.Error(codes.FailedPrecondition, err.Error())
	case err != nil:
		return ctx, who, status.Error(codes.PermissionDenied, err.Error())
	}
	r, known := rules[method]
	switch {
	case !known:
		return ctx, who, status.Errorf(codes.Unimplemented, "%s is not a call of this door", method)
	case c.Role < r.min:
		return ctx, who, status.Errorf(codes.PermissionDenied, "%s is %s here; this is for an %s", c.Name, c.Role, r.min)
	}
	ctx = identity.WithCaller(ctx, c)
	if r.change {
		ctx = store.WithActor(ctx, store.Actor{Caller: c, Call: method[strings.LastIndexByte(method, '/')+1:]})
	}
	return ctx, who, nil
}

// shown returns what a caller of gRPC shows of itself.
func shown(ctx context.Context) access.Credentials {
	c := access.Credentials{TLS: connectionState(ctx)}
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		c.Address = p.Addr.String()
		if host, _, err := net.SplitHostPort(c.Address); err == nil {
			c.Address = host
		}
	}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		// Several can't all be right.
		if a := md.Get("authorization"); len(a) > 0 {
			c.Authorization = strings.Join(a, ", ")
		}
	}
	return c
}

func connectionState(ctx context.Context) *tls.ConnectionState {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return nil
	}
	return &info.State
}

// callerMetadata has the caller on its way to the inside door, as JSON.
const callerMetadata = "cakefleet-caller"

func callerInside(ctx context.Context) (c identity.Caller, err error) {
	md, _ := metadata.FromIncomingContext(ctx)
	text := md.Get(callerMetadata)
	if len(text) != 1 {
		return c, access.ErrNoCredentials
	}
	err = json.Unmarshal([]byte(text[0]), &c)
	return c, err
}

// caller returns the router at the other end of the connection.
func caller(ctx context.Context) (identity.Peer, error) {
	state := connectionState(ctx)
	if state == nil {
		return identity.Peer{}, identity.ErrNoCertificate
	}
	return identity.PeerOf(*state)
}
