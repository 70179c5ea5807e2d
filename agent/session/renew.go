package session

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/internal/backoff"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// renewTimeout bounds a renewal: the outbox waits meanwhile.
const renewTimeout = 10 * time.Second

// renewIn returns when to look at the certificate again: at least once a day,
// as the router's idea of the time may change.
func (s *Session) renewIn() time.Duration {
	const day = 24 * time.Hour
	if s.cfg.Renewal == nil {
		return day
	}
	return min(s.cfg.Renewal.Wait(), day)
}

// renew renews the certificate over the session's connection if it is time.
// That it went wrong is no reason to end the session.
func (s *Session) renew(ctx context.Context, conn *grpc.ClientConn) {
	if s.cfg.Renewal == nil || s.cfg.Renewal.Wait() > 0 {
		return
	}
	csr, err := s.cfg.Renewal.Request()
	if err != nil {
		s.cfg.Renewal.Take(nil, nil, err)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	r, err := pb.NewEnrollmentServiceClient(conn).Renew(ctx, &pb.RenewRequest{Csr: csr, Several: true})
	if err != nil {
		err = plain(err)
	}
	s.cfg.Renewal.Take(r.GetCertificate(), authorities(r.GetAuthorities(), r.GetCaCertificate()), err)
}

// authorities returns those of an answer. A controller of an earlier version
// knows of one.
func authorities(all [][]byte, one []byte) [][]byte {
	if len(all) == 0 {
		return [][]byte{one}
	}
	return all
}

// confirm says which authorities the router has stored, if the controller has
// asked. That it went wrong is no reason to end the session: it asks again.
func (s *Session) confirm(ctx context.Context, conn *grpc.ClientConn) {
	if s.cfg.Renewal == nil {
		return
	}
	id := s.cfg.Renewal.Confirms()
	if id == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	if _, err := pb.NewEnrollmentServiceClient(conn).ConfirmAuthorities(ctx, &pb.ConfirmAuthoritiesRequest{Authorities: id}); err != nil {
		s.cfg.Logger.Warn("authorities are not confirmed", "controller", s.cfg.Address, "error", plain(err))
	}
}

// Refused returns whether a controller does not take this router's identity
// any more, so that only another one will do.
func Refused(err error) bool { return status.Code(err) == codes.PermissionDenied }

// Quarantined returns whether a controller keeps this router out because there
// are two of it.
func Quarantined(err error) bool { return status.Code(err) == codes.FailedPrecondition }

// Expired returns whether a controller says that the router's certificate has
// ended. TLS has no better way to say so than the text of its alert.
func Expired(err error) bool {
	return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "remote error: tls: expired certificate")
}

// Retired returns whether a controller says that the router's certificate is of
// an authority that it does not trust.
func Retired(err error) bool {
	return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "remote error: tls: unknown certificate authority")
}

// WaitingError means that an operator has to approve the router's key.
type WaitingError struct {
	Fingerprint string
	After       time.Duration // when to ask again
}

// Error says what to do.
func (e *WaitingError) Error() string {
	return "waits for an operator: cakefleetctl router approve " + e.Fingerprint
}

// EnrollError is an enrolment that was refused.
type EnrollError struct {
	Err   error
	After time.Duration // before which not to ask again; 0: that is not said
}

// Error returns the controller's words.
func (e *EnrollError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *EnrollError) Unwrap() error { return e.Err }

// Enroll asks for an identity, once. The error is a *WaitingError if an
// operator has to say who the router is.
func Enroll(ctx context.Context, address string, e *identity.Enrollment) (id *identity.Identity, err error) {
	conn, err := dial(address, e.TLS(), func(error) {})
	if err != nil {
		return nil, err
	}
	defer func() { err = closed(conn, err) }()
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	r, err := pb.NewEnrollmentServiceClient(conn).Enroll(ctx, &pb.EnrollRequest{
		Token: e.Token.Text, Csr: e.Request, Serial: e.Serial, Model: e.Model, Several: true,
	})
	if err != nil {
		return nil, &EnrollError{Err: fmt.Errorf("enrol at %s: %w", address, plain(err)), After: backoff.RetryAfter(err)}
	}
	if w := r.GetWaiting(); w != nil {
		return nil, &WaitingError{Fingerprint: w.GetFingerprint(), After: w.GetRetryAfter().AsDuration()}
	}
	id, err = e.Finish(r.GetCertificate(), authorities(r.GetAuthorities(), r.GetCaCertificate()))
	if err != nil {
		return nil, fmt.Errorf("enrol at %s: %w", address, err)
	}
	return id, nil
}
