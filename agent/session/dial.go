package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// dial makes a connection that is good for one session: gRPC's own back-off is
// too narrow for a fleet, so that it never gets to it.
func dial(address string, c *tls.Config, handshake func(error), more ...grpc.DialOption) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///"+address, append([]grpc.DialOption{
		grpc.WithTransportCredentials(observed{credentials.NewTLS(c), handshake}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		// Below the time after which home and provider NAT forget a connection.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithReadBufferSize(4 << 10),
		// Windows that don't grow: else every push makes it ask how long the line is.
		grpc.WithStaticStreamWindowSize(64 << 10),
		grpc.WithStaticConnWindowSize(64 << 10),
		grpc.WithWriteBufferSize(4 << 10),
		grpc.WithMaxCallAttempts(1),
	}, more...)...)
	if err != nil {
		return nil, fmt.Errorf("controller %s: %w", address, err)
	}
	return conn, nil
}

// ready makes conn connect and returns when it has, with its handshake.
func ready(ctx context.Context, conn *grpc.ClientConn) error {
	conn.Connect()
	for {
		switch state := conn.GetState(); state {
		case connectivity.Ready:
			return nil
		case connectivity.TransientFailure, connectivity.Shutdown:
			return fmt.Errorf("connect: %s", state)
		default:
			if !conn.WaitForStateChange(ctx, state) {
				return ctx.Err()
			}
		}
	}
}

// closed closes conn and returns err, with what went wrong in closing if
// anything did.
func closed(conn *grpc.ClientConn, err error) error {
	if errClose := conn.Close(); errClose != nil {
		return errors.Join(err, errClose)
	}
	return err
}

// observed tells of handshakes that end in an error, which gRPC passes on as
// text only.
type observed struct {
	credentials.TransportCredentials
	failed func(error)
}

// ClientHandshake does the handshake.
func (o observed) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := o.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		o.failed(err)
	}
	return conn, info, err
}

// Clone returns a copy.
func (o observed) Clone() credentials.TransportCredentials {
	return observed{o.TransportCredentials.Clone(), o.failed}
}

// plain returns err without gRPC's "rpc error: code = ... desc =".
func plain(err error) error {
	if s, ok := status.FromError(err); ok && s.Message() != "" {
		return fmt.Errorf("%s (%s)", s.Message(), s.Code())
	}
	return err
}
