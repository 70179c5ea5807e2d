// Package sessiontest is a controller for tests of the agent: real TLS on the
// loopback, and it does what the test says.
package sessiontest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Authority is a fleet's certificate authority.
type Authority struct {
	Certificate *x509.Certificate
	key         ed25519.PrivateKey
}

// NewAuthority makes an authority whose certificates begin at began.
func NewAuthority(t testing.TB, began time.Time) *Authority {
	t.Helper()
	pub, key := newKey(t)
	c := sign(t, &x509.Certificate{
		Subject:               pkix.Name{CommonName: "fleet"},
		NotBefore:             began,
		NotAfter:              began.AddDate(10, 0, 0),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}, nil, pub, key)
	return &Authority{Certificate: c, key: key}
}

// Server returns a controller's certificate that begins at began.
func (a *Authority) Server(t testing.TB, began time.Time) tls.Certificate {
	t.Helper()
	pub, key := newKey(t)
	c := sign(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: "controller"},
		DNSNames:    []string{"cakefleet-controller"},
		NotBefore:   began,
		NotAfter:    began.AddDate(1, 0, 0),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, a, pub, nil)
	return tls.Certificate{Certificate: [][]byte{c.Raw, a.Certificate.Raw}, PrivateKey: key}
}

// Router returns a router's certificate for a key.
func (a *Authority) Router(t testing.TB, id string, pub ed25519.PublicKey, began time.Time, life time.Duration) *x509.Certificate {
	t.Helper()
	return sign(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: id, OrganizationalUnit: []string{"router"}},
		URIs:        []*url.URL{{Scheme: "cakefleet", Host: "router", Path: "/" + id}},
		NotBefore:   began,
		NotAfter:    began.Add(life),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a, pub, nil)
}

// Token returns a join token that names this authority.
func (a *Authority) Token(secret string) string {
	pin := sha256.Sum256(a.Certificate.RawSubjectPublicKeyInfo)
	return "cf1.0123456789." + secret + "." + base64.RawURLEncoding.EncodeToString(pin[:])
}

func newKey(t testing.TB) (ed25519.PublicKey, ed25519.PrivateKey) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return pub, key
}

// sign makes a certificate; without an authority it signs itself with self.
func sign(t testing.TB, c *x509.Certificate, by *Authority, pub ed25519.PublicKey, self ed25519.PrivateKey) *x509.Certificate {
	t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber = serial
	parent, key := c, self
	if by != nil {
		parent, key = by.Certificate, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, pub, key)
	if err != nil {
		t.Fatal(err)
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// Controller is a server for one test.
type Controller struct {
	pb.UnimplementedEnrollmentServiceServer
	pb.UnimplementedSessionServiceServer

	Address   string
	Authority *Authority
	Sessions  chan *Session // every stream that said hello
	Interval  time.Duration // of reports; 0: no settings are sent
	// Stall makes sessions read nothing after the hello until it is closed.
	Stall chan struct{}

	t      testing.TB
	cfg    Config
	server *grpc.Server

	mu       sync.Mutex
	tokens   map[string]string // text: router id
	enrolled int
	renewed  int
}

// Session is one stream.
type Session struct {
	RouterID string // of the certificate
	Hello    *pb.Hello
	Statuses chan *pb.Status
	Reports  chan *pb.Report

	ctx  context.Context
	end  chan error
	send chan *pb.ConnectResponse
}

// Config says how a controller is made.
type Config struct {
	Authority *Authority
	Began     time.Time // of the server's certificate; zero: an hour ago
	Address   string    // empty: any port
	Interval  time.Duration
	Stall     chan struct{}
	// Differences asks for reports that are differences; Session.Reports has
	// them as they come.
	Differences bool
	Origin      string           // what the settings say; see Settings.origin
	Clock       func() time.Time // what the settings say; nil: no time
	Probe       *pb.Probe        // what the settings ask to be measured; nil: nothing
	Now         func() time.Time // its clock, for certificates; nil: right
}

// Start starts a controller that stops with the test.
func Start(t testing.TB, cfg Config) *Controller {
	t.Helper()
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Began.IsZero() {
		cfg.Began = cfg.Now().Add(-time.Hour)
	}
	if cfg.Authority == nil {
		cfg.Authority = NewAuthority(t, cfg.Began)
	}
	if cfg.Address == "" {
		cfg.Address = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cfg.Authority.Certificate)
	c := &Controller{
		Address:   l.Addr().String(),
		Authority: cfg.Authority,
		Sessions:  make(chan *Session, 100),
		Interval:  cfg.Interval,
		Stall:     cfg.Stall,
		cfg:       cfg,
		t:         t,
		tokens:    map[string]string{},
	}
	c.server = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{
			MinVersion:   tls.VersionTLS13,
			Time:         cfg.Now,
			Certificates: []tls.Certificate{cfg.Authority.Server(t, cfg.Began)},
			ClientCAs:    roots,
			ClientAuth:   tls.VerifyClientCertIfGiven,
		})),
		// Windows that don't grow, as the controller has them: else every report
		// makes it ask how long the line is.
		grpc.StaticStreamWindowSize(64<<10),
		grpc.StaticConnWindowSize(64<<10),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)
	pb.RegisterEnrollmentServiceServer(c.server, c)
	pb.RegisterSessionServiceServer(c.server, c)
	served := make(chan struct{})
	go func() { defer close(served); _ = c.server.Serve(l) }()
	t.Cleanup(func() { c.Stop(); <-served })
	return c
}

// Stop cuts every connection. It is idempotent.
func (c *Controller) Stop() { c.server.Stop() }

// AddToken makes a token that can be used once.
func (c *Controller) AddToken(routerID string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	token := c.Authority.Token("secret-of-" + routerID)
	c.tokens[token] = routerID
	return token
}

// Enrolled returns how many certificates were given.
func (c *Controller) Enrolled() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.enrolled
}

// Enroll gives a certificate for a token.
func (c *Controller) Enroll(_ context.Context, r *pb.EnrollRequest) (*pb.EnrollResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id, ok := c.tokens[r.GetToken()]
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "token is unknown, used or too old")
	}
	csr, err := x509.ParseCertificateRequest(r.GetCsr())
	if err != nil || csr.CheckSignature() != nil {
		return nil, status.Error(codes.InvalidArgument, "signing request")
	}
	delete(c.tokens, r.GetToken())
	c.enrolled++
	cert := c.Authority.Router(c.t, id, csr.PublicKey.(ed25519.PublicKey), c.cfg.Now().Add(-time.Minute), 90*24*time.Hour)
	return &pb.EnrollResponse{RouterId: id, Certificate: cert.Raw, CaCertificate: c.Authority.Certificate.Raw}, nil
}

// Renew gives another certificate for the key of the client's.
func (c *Controller) Renew(ctx context.Context, r *pb.RenewRequest) (*pb.RenewResponse, error) {
	id, err := router(ctx)
	if err != nil {
		return nil, err
	}
	csr, err := x509.ParseCertificateRequest(r.GetCsr())
	if err != nil || csr.CheckSignature() != nil {
		return nil, status.Error(codes.InvalidArgument, "signing request")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.renewed++
	cert := c.Authority.Router(c.t, id, csr.PublicKey.(ed25519.PublicKey), c.cfg.Now().Add(-time.Minute), 90*24*time.Hour)
	return &pb.RenewResponse{Certificate: cert.Raw, CaCertificate: c.Authority.Certificate.Raw}, nil
}

// Renewed returns how many certificates were renewed.
func (c *Controller) Renewed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.renewed
}

// Connect has one session.
func (c *Controller) Connect(stream pb.SessionService_ConnectServer) error {
	id, err := router(stream.Context())
	if err != nil {
		return err
	}
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetHello().GetRouterId() != id {
		return status.Errorf(codes.PermissionDenied, "hello of %q with the certificate of %q", m.GetHello().GetRouterId(), id)
	}
	s := &Session{
		RouterID: id,
		Hello:    m.GetHello(),
		Statuses: make(chan *pb.Status, 1000),
		Reports:  make(chan *pb.Report, 10000),
		ctx:      stream.Context(),
		end:      make(chan error, 1),
		send:     make(chan *pb.ConnectResponse),
	}
	settings := &pb.Settings{ReportInterval: durationpb.New(c.Interval), Differences: c.cfg.Differences, Origin: c.cfg.Origin}
	settings.Probe = c.cfg.Probe
	if c.cfg.Clock != nil {
		settings.Clock = timestamppb.New(c.cfg.Clock())
	}
	if err := stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Settings{Settings: settings}}); err != nil {
		return err
	}
	c.Sessions <- s
	go s.receive(stream, c.Stall)
	for {
		select {
		case m := <-s.send:
			if err := stream.Send(m); err != nil {
				return err
			}
		case err := <-s.end:
			return err
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
	}
}

func (s *Session) receive(stream pb.SessionService_ConnectServer, stall chan struct{}) {
	if stall != nil {
		select {
		case <-stall:
		case <-s.ctx.Done():
		}
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			s.End(err)
			return
		}
		switch arm := m.GetMessage().(type) {
		case *pb.ConnectRequest_Status:
			give(s.ctx, s.Statuses, arm.Status)
		case *pb.ConnectRequest_Report:
			give(s.ctx, s.Reports, arm.Report)
		}
	}
}

func give[T any](ctx context.Context, to chan<- T, v T) {
	select {
	case to <- v:
	case <-ctx.Done():
	}
}

// Push sends a desired state.
func (s *Session) Push(d *pb.Desired) {
	select {
	case s.send <- &pb.ConnectResponse{Message: &pb.ConnectResponse_Desired{Desired: d}}:
	case <-s.ctx.Done():
	}
}

// Move asks the agent for another session.
func (s *Session) Move(within time.Duration) {
	select {
	case s.send <- &pb.ConnectResponse{Message: &pb.ConnectResponse_Move{Move: &pb.Move{Within: durationpb.New(within)}}}:
	case <-s.ctx.Done():
	}
}

// End ends the session from the controller's side.
func (s *Session) End(err error) {
	select {
	case s.end <- err:
	default:
	}
}

// Certificate returns the router's certificate.
func (s *Session) Certificate() *x509.Certificate {
	info, err := credentialsOf(s.ctx)
	if err != nil {
		return nil
	}
	return info.State.PeerCertificates[0]
}

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

func router(ctx context.Context) (string, error) {
	info, err := credentialsOf(ctx)
	if err != nil {
		return "", err
	}
	for _, u := range info.State.PeerCertificates[0].URIs {
		if u.Host == "router" {
			return u.Path[1:], nil
		}
	}
	return "", status.Error(codes.PermissionDenied, "not a router's certificate")
}

func credentialsOf(ctx context.Context) (credentials.TLSInfo, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return credentials.TLSInfo{}, status.Error(codes.Unauthenticated, "no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 {
		return credentials.TLSInfo{}, status.Error(codes.Unauthenticated, "no client certificate")
	}
	return info, nil
}
