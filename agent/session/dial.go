package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cakefleet/cakefleet/agent/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// dial makes a connection that is good for one session: gRPC's own back-off is
// too narrow for a fleet, so that it never gets to it.
func dial(address string, c *tls.Config, handshake func(error)) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(observed{credentials.NewTLS(c), handshake}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: connectTimeout}),
		// Below the time after which home and provider NAT forget a connection.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithReadBufferSize(4<<10),
		grpc.WithWriteBufferSize(4<<10),
		grpc.WithMaxCallAttempts(1),
	)
	if err != nil {
		return nil, fmt.Errorf("controller %s: %w", address, err)
	}
	return conn, nil
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

// Enroll trades a token for an identity. It asks once.
func Enroll(ctx context.Context, address string, e *identity.Enrollment) (id *identity.Identity, err error) {
	conn, err := dial(address, e.TLS(), func(error) {})
	if err != nil {
		return nil, err
	}
	defer func() { err = closed(conn, err) }()
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	r, err := pb.NewEnrollmentServiceClient(conn).Enroll(ctx, &pb.EnrollRequest{Token: e.Token.Text, Csr: e.Request})
	if err != nil {
		return nil, fmt.Errorf("enrol at %s: %w", address, plain(err))
	}
	id, err = e.Finish(r.GetCertificate(), r.GetCaCertificate())
	if err != nil {
		return nil, fmt.Errorf("enrol at %s: %w", address, err)
	}
	return id, nil
}

// retryAfter returns how long the controller asks to stay away: RetryInfo in
// the details of the error, read by hand as it is two numbers.
func retryAfter(err error) time.Duration {
	s, ok := status.FromError(err)
	if !ok {
		return 0
	}
	for _, d := range s.Proto().GetDetails() {
		if d.GetTypeUrl() != "type.googleapis.com/google.rpc.RetryInfo" {
			continue
		}
		delay := bytesField(d.GetValue(), 1)
		seconds, nanos := varintField(delay, 1), varintField(delay, 2)
		// A controller that asks for more than this is not believed.
		const most = time.Hour
		if seconds > uint64(most/time.Second) || nanos > uint64(time.Second) {
			return most
		}
		return time.Duration(seconds)*time.Second + time.Duration(nanos)
	}
	return 0
}

// bytesField returns the first field of a number and of bytes in b; nil if
// there is none.
func bytesField(b []byte, want protowire.Number) []byte {
	v, _ := protowire.ConsumeBytes(field(b, want, protowire.BytesType))
	return v
}

// varintField is the same for integers; 0 if there is none.
func varintField(b []byte, want protowire.Number) uint64 {
	v, n := protowire.ConsumeVarint(field(b, want, protowire.VarintType))
	if n < 0 {
		return 0
	}
	return v
}

// field returns b from the value of the first field of a number and type on.
func field(b []byte, want protowire.Number, kind protowire.Type) []byte {
	for len(b) > 0 {
		number, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if number == want && typ == kind {
			return b
		}
		if n = protowire.ConsumeFieldValue(number, typ, b); n < 0 {
			return nil
		}
		b = b[n:]
	}
	return nil
}

// plain returns err without gRPC's "rpc error: code = ... desc =".
func plain(err error) error {
	if s, ok := status.FromError(err); ok && s.Message() != "" {
		return fmt.Errorf("%s (%s)", s.Message(), s.Code())
	}
	return err
}
