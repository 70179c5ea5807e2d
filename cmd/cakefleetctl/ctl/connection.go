package ctl

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// serverName is in every controller's certificate, so that addresses may change.
const serverName = "cakefleet-controller"

// callTimeout bounds one call; streams of files take longer.
const callTimeout = 20 * time.Second

// connection is the operators' door of a controller.
type connection struct {
	conn        *grpc.ClientConn
	plans       pb.PlanServiceClient
	subscribers pb.SubscriberServiceClient
	routers     pb.RouterServiceClient
	telemetry   pb.TelemetryServiceClient
	tokens      pb.TokenServiceClient
	schedules   pb.ScheduleServiceClient
	rollouts    pb.RolloutServiceClient
	admin       pb.AdminServiceClient
	operators   pb.OperatorServiceClient
	audit       pb.AuditServiceClient
	joins       pb.JoinServiceClient
}

// connect returns the connection, made at the first call.
func (a *app) connect() (*connection, error) {
	if a.conn != nil {
		return a.conn, nil
	}
	if _, _, err := net.SplitHostPort(a.controller); err != nil {
		return nil, fmt.Errorf("--controller %q: must be HOST:PORT, such as %s", a.controller, defaultController)
	}
	options := []grpc.DialOption{
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
	}
	c, err := a.tls(&options)
	if err != nil {
		return nil, failure{err}
	}
	conn, err := grpc.NewClient("passthrough:///"+a.controller, append(options, grpc.WithTransportCredentials(credentials.NewTLS(c)))...)
	if err != nil {
		return nil, failure{fmt.Errorf("controller %s: %w", a.controller, err)}
	}
	a.conn = &connection{
		conn:        conn,
		plans:       pb.NewPlanServiceClient(conn),
		subscribers: pb.NewSubscriberServiceClient(conn),
		routers:     pb.NewRouterServiceClient(conn),
		telemetry:   pb.NewTelemetryServiceClient(conn),
		tokens:      pb.NewTokenServiceClient(conn),
		schedules:   pb.NewScheduleServiceClient(conn),
		rollouts:    pb.NewRolloutServiceClient(conn),
		admin:       pb.NewAdminServiceClient(conn),
		operators:   pb.NewOperatorServiceClient(conn),
		audit:       pb.NewAuditServiceClient(conn),
		joins:       pb.NewJoinServiceClient(conn),
	}
	return a.conn, nil
}

// tls returns how to prove who both ends are, and adds what a token needs.
func (a *app) tls(options *[]grpc.DialOption) (*tls.Config, error) {
	if a.token == "" {
		a.token = strings.TrimSpace(a.env(envToken, ""))
	}
	if a.token != "" {
		*options = append(*options, grpc.WithPerRPCCredentials(bearer(a.token)))
		if strings.Count(a.token, ".") == 2 {
			path, err := a.expand(a.credentials)
			if err != nil {
				return nil, err
			}
			return authorityTLS(path)
		}
		return tokenTLS(context.Background(), a.controller, a.token)
	}
	path, err := a.expand(a.credentials)
	if err != nil {
		return nil, err
	}
	return loadCredentials(path)
}

// shown is what a refusal is about.
func (a *app) shown() string {
	if a.token != "" {
		return "the operator token"
	}
	return "the credentials " + a.credentials
}

func (a *app) close() error {
	if a.conn == nil {
		return nil
	}
	return a.conn.conn.Close()
}

// expand puts the home directory in place of a leading ~.
func (a *app) expand(path string) (string, error) {
	rest, ok := strings.CutPrefix(path, "~/")
	if !ok {
		return path, nil
	}
	home := a.env("HOME", "")
	if home == "" {
		return "", fmt.Errorf("credentials %s: HOME is not set, say --credentials FILE", path)
	}
	return filepath.Join(home, rest), nil
}

// loadCredentials reads certificate, key and the fleet's authorities, in this
// order in one PEM file.
func loadCredentials(path string) (*tls.Config, error) {
	const where = "a controller writes operator.pem to its data directory at its first start: copy it to %s, or say --credentials FILE or set " + envCredentials
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("no credentials at %s: "+where, path, path)
	case err != nil:
		return nil, fmt.Errorf("credentials: %w", err)
	}
	bad := func(why string) error {
		return fmt.Errorf("credentials %s: %s: "+where, path, why, path)
	}
	var certs [][]byte
	var key []byte
	for rest := b; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		switch block.Type {
		case "CERTIFICATE":
			certs = append(certs, block.Bytes)
		case "PRIVATE KEY":
			key = pem.EncodeToMemory(block)
		}
	}
	if len(certs) < 2 || key == nil {
		return nil, bad("must have a certificate, its key and the fleet's authority")
	}
	pair, err := tls.X509KeyPair(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certs[0]}), key)
	if err != nil {
		return nil, bad(err.Error())
	}
	roots := x509.NewCertPool()
	for i, der := range certs[1:] {
		authority, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, bad(err.Error())
		}
		if bytes.Equal(certs[0], der) || !authority.IsCA {
			return nil, bad(fmt.Sprintf("certificate %d is not an authority", i+2))
		}
		roots.AddCert(authority)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		ServerName:   serverName,
		RootCAs:      roots,
		Certificates: []tls.Certificate{pair},
	}, nil
}

// call makes one call and explains how it ended.
func call[Req, Resp any](ctx context.Context, a *app, f func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) (*Resp, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var header metadata.MD
	resp, err := f(ctx, req, grpc.Header(&header))
	a.hear(header)
	return resp, a.explain(err)
}

// clockHeader is what a controller's answer says its time in.
const clockHeader = "cakefleet-clock"

// clockSlack is how far the controller's clock may be from this machine's and
// still be taken as the same.
const clockSlack = 2 * time.Second

// hear takes note of the controller's clock.
func (a *app) hear(header metadata.MD) {
	said := header.Get(clockHeader)
	if len(said) == 0 {
		return
	}
	at, err := time.Parse(time.RFC3339Nano, said[0])
	if err != nil {
		return // of another version
	}
	off := at.Sub(a.cfg.Now())
	if off.Abs() < clockSlack {
		off = 0
	}
	a.off.Store(int64(off))
}

// now is the time by the controller's clock, which all times of a fleet are
// of; by this machine's before the first answer.
func (a *app) now() time.Time { return a.cfg.Now().Add(time.Duration(a.off.Load())) }

// explain turns the end of a call into what an operator can do about it.
func (a *app) explain(err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	text := s.Message()
	switch s.Code() {
	case codes.Unavailable:
		switch {
		case strings.Contains(text, "unknown authority") || strings.Contains(text, "bad certificate") || strings.Contains(text, "tls: unknown"):
			text = fmt.Sprintf("controller %s and the credentials %s are not of the same fleet: take operator.pem of this controller's data directory (%s)", a.controller, a.credentials, text)
		case strings.Contains(text, "certificate has expired"):
			text = fmt.Sprintf("controller %s: a certificate has ended or a clock is wrong (%s)", a.controller, text)
		default:
			text = fmt.Sprintf("controller %s can't be reached: is it running, and is this its door for operators? say --controller HOST:PORT or set %s (%s)", a.controller, envController, text)
		}
	case codes.DeadlineExceeded:
		text = fmt.Sprintf("controller %s did not answer within %v", a.controller, callTimeout)
	case codes.Unauthenticated, codes.PermissionDenied:
		text = fmt.Sprintf("controller %s refused %s: %s", a.controller, a.shown(), text)
	case codes.Unimplemented:
		text = fmt.Sprintf("controller %s does not know this: its version is older than cakefleetctl %s, or the address is its door for agents (%s)", a.controller, a.cfg.Version, text)
	case codes.Aborted:
		text += ": somebody else changed it in the meantime, look and try again"
	default: // what the controller says is what there is to say
	}
	return failure{&answer{s.Code(), text, usedBy(s)}}
}

// usedBy is the kind of what uses that which can't be deleted; empty if that is
// not what a controller says.
func usedBy(s *status.Status) string {
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetMetadata()["used_by"]
		}
	}
	return ""
}

// answer is what a controller said, in words.
type answer struct {
	code   codes.Code
	text   string
	usedBy string // see usedBy
}

// Error returns the words.
func (e *answer) Error() string { return e.text }

// isCode returns whether a controller answered with a code.
func isCode(err error, code codes.Code) bool {
	var e *answer
	return errors.As(err, &e) && e.code == code
}

// isUsedBy returns whether a controller refused a deletion because of a kind of
// users.
func isUsedBy(err error, kind string) bool {
	var e *answer
	return errors.As(err, &e) && e.usedBy == kind
}
