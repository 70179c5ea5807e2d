package main

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/internal/backoff"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	callTime   = 20 * time.Second
	importTime = 5 * time.Minute
	removeTime = 5 * time.Minute

	// atOnce is how many joins are under way, over joinConns connections. One of
	// the loopback is an address for the controller's limits each.
	atOnce    = 32
	joinConns = 8

	// tokensAtOnce is how many join tokens are made in one call.
	tokensAtOnce = 500
)

// member is a router that has joined, as it is kept.
type member struct {
	Router      string `json:"router"`
	Key         []byte `json:"key"`         // PKCS #8
	Certificate []byte `json:"certificate"` // DER
	Authority   []byte `json:"authority"`   // DER

	pair tls.Certificate
	ends time.Time
}

// fleet is what routers share with whoever made them.
type fleet struct {
	o         *options
	roots     *x509.CertPool
	authority []byte // DER
	operators *grpc.ClientConn
	doors     []*grpc.ClientConn
	made      []string // routers and subscribers to remove

	mu   sync.Mutex
	kept *os.File // nil: nothing is kept; guarded by mu
}

func (f *fleet) close() {
	for _, c := range append(f.doors, f.operators) {
		if c != nil {
			_ = c.Close() // nothing is under way
		}
	}
	if f.kept != nil {
		_ = f.kept.Close() // each line was written, or its error told
	}
}

// wanted is a router that is to join.
type wanted struct {
	id    string // empty: the token says
	token string // empty: the key is known
	key   ed25519.PrivateKey
}

// join returns routers that may have sessions. The fleet is to be closed also if
// there is an error.
func join(ctx context.Context, o *options, stdin io.Reader, stderr io.Writer) ([]member, *fleet, error) {
	f := &fleet{o: o}
	members, want, err := f.remembered()
	if err != nil {
		return nil, f, err
	}
	switch {
	case o.tokens != "":
		tokens, err := readTokens(o.tokens, stdin)
		if err != nil {
			return nil, f, err
		}
		// A kept router has used its token.
		for _, t := range tokens[:max(min(len(tokens), o.n-len(members)-len(want)), 0)] {
			want = append(want, wanted{token: t})
		}
		if len(want) > 0 && f.roots == nil {
			if err := f.trust(ctx, tokens[0]); err != nil {
				return nil, f, err
			}
		}
	case o.plan != "":
		made, err := f.provision(ctx, members, want)
		if err != nil {
			return nil, f, err
		}
		want = append(want, made...)
	case len(members)+len(want) == 0:
		return nil, f, fmt.Errorf("--state %s: has none of the routers %s to %s; say --plan or --tokens to make them", o.state, o.id(0), o.id(o.n-1))
	}
	joined, err := f.enroll(ctx, want, stderr)
	if err != nil {
		return nil, f, errors.Join(err, f.remove(stderr))
	}
	return append(members, joined...), f, nil
}

// remembered reads the routers of an earlier run. Those whose certificate has
// ended are to ask for another with their key.
func (f *fleet) remembered() (members []member, again []wanted, err error) {
	path := f.o.state
	if path == "" {
		return nil, nil, nil
	}
	f.kept, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("--state: %w", err)
	}
	lines := bufio.NewScanner(f.kept)
	byID := map[string]member{}
	var order []string
	for n := 1; lines.Scan(); n++ {
		var m member
		bad := func(err error) error {
			return fmt.Errorf("--state %s line %d: %w; take the line out, or another file", path, n, err)
		}
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return nil, nil, bad(err)
		}
		if err := m.read(); err != nil {
			return nil, nil, bad(err)
		}
		if f.authority != nil && string(f.authority) != string(m.Authority) {
			return nil, nil, bad(errors.New("is of another fleet than the lines before it"))
		}
		if err := f.trusted(m.Authority); err != nil {
			return nil, nil, bad(err)
		}
		if _, known := byID[m.Router]; !known {
			order = append(order, m.Router)
		}
		byID[m.Router] = m
	}
	if err := lines.Err(); err != nil {
		return nil, nil, fmt.Errorf("--state %s: %w", path, err)
	}
	for _, id := range order {
		m := byID[id]
		switch {
		case f.o.plan != "" && !f.o.has(id), len(members)+len(again) == f.o.n:
		case time.Until(m.ends) < time.Hour:
			again = append(again, wanted{id: id, key: m.pair.PrivateKey.(ed25519.PrivateKey)})
		default:
			members = append(members, m)
		}
	}
	return members, again, nil
}

// has tells whether id is of the routers that are played.
func (o *options) has(id string) bool {
	var i int
	_, err := fmt.Sscanf(strings.TrimPrefix(id, o.prefix), "%d", &i)
	return err == nil && i >= o.from && i < o.from+o.n && o.id(i-o.from) == id
}

// read makes what TLS needs of what is kept.
func (m *member) read() error {
	key, err := x509.ParsePKCS8PrivateKey(m.Key)
	if err != nil {
		return err
	}
	k, ok := key.(ed25519.PrivateKey)
	if !ok {
		return errors.New("the key is not Ed25519")
	}
	cert, err := x509.ParseCertificate(m.Certificate)
	if err != nil {
		return err
	}
	m.ends = cert.NotAfter
	m.pair = tls.Certificate{Certificate: [][]byte{m.Certificate}, PrivateKey: k}
	return nil
}

func (f *fleet) trusted(authority []byte) error {
	if f.roots != nil {
		return nil
	}
	ca, err := x509.ParseCertificate(authority)
	if err != nil {
		return fmt.Errorf("the fleet's authority: %w", err)
	}
	f.roots, f.authority = x509.NewCertPool(), authority
	f.roots.AddCert(ca)
	return nil
}

func readTokens(path string, stdin io.Reader) (all []string, err error) {
	in := stdin
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("--tokens: %w", err)
		}
		defer func() { _ = file.Close() }() // it was only read
		in = file
	}
	lines := bufio.NewScanner(in)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" {
			continue
		}
		if _, err := identity.ParseToken(text); err != nil {
			return nil, fmt.Errorf("--tokens %s line %d: %w", path, n, err)
		}
		all = append(all, text)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("--tokens %s: %w", path, err)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("--tokens %s: has no token", path)
	}
	return all, nil
}

// trust finds the authority that a token names among the certificates that the
// controller shows, with a handshake that trusts nobody.
func (f *fleet) trust(ctx context.Context, text string) error {
	token, err := identity.ParseToken(text)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS13, ServerName: identity.ServerName, RootCAs: x509.NewCertPool()}}
	conn, err := d.DialContext(ctx, "tcp", f.o.agents[0])
	if err == nil {
		return errors.Join(errors.New("a server was trusted without an authority"), conn.Close())
	}
	unverified, ok := errors.AsType[*tls.CertificateVerificationError](err)
	if !ok {
		return fmt.Errorf("controller %s can't be reached: is it running, and is this its door for agents? (%w)", f.o.agents[0], err)
	}
	for _, c := range unverified.UnverifiedCertificates {
		if pin := identity.Pin(sha256.Sum256(c.RawSubjectPublicKeyInfo)); c.IsCA && pin.Equal(token.Pin) {
			return f.trusted(c.Raw)
		}
	}
	return fmt.Errorf("controller %s is not of the fleet that token %s is for", f.o.agents[0], token.ID)
}

// provision makes subscribers and join tokens for the routers that are not
// known.
func (f *fleet) provision(ctx context.Context, members []member, again []wanted) ([]wanted, error) {
	known := map[string]bool{}
	for i := range members {
		known[members[i].Router] = true
	}
	for _, w := range again {
		known[w.id] = true
	}
	var ids []string
	for i := range f.o.n {
		if id := f.o.id(i); !known[id] {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	if err := f.connect(); err != nil {
		return nil, err
	}
	if err := f.subscribers(ctx, ids); err != nil {
		return nil, err
	}
	if f.o.state == "" {
		f.made = ids
	}
	tokens := pb.NewTokenServiceClient(f.operators)
	want := make([]wanted, 0, len(ids))
	for part := range slices.Chunk(ids, tokensAtOnce) {
		made, err := f.tokens(ctx, tokens, part)
		if err != nil {
			return nil, errors.Join(err, f.remove(io.Discard))
		}
		want = append(want, made...)
	}
	return want, nil
}

// tokens makes a join token for each id.
func (f *fleet) tokens(ctx context.Context, tokens pb.TokenServiceClient, ids []string) ([]wanted, error) {
	req := &pb.CreateTokensRequest{}
	for _, id := range ids {
		req.Tokens = append(req.Tokens, &pb.CreateTokenRequest{RouterId: id, Subscriber: id})
	}
	var resp *pb.CreateTokensResponse
	err := patient(ctx, func(ctx context.Context) (err error) {
		resp, err = tokens.CreateTokens(ctx, req)
		return err
	})
	switch {
	case err != nil:
		return nil, f.refused("join tokens", err)
	case len(resp.GetTokens()) != len(ids):
		return nil, fmt.Errorf("join tokens: %d answers for %d", len(resp.GetTokens()), len(ids))
	case resp.GetStopped() != "":
		return nil, fmt.Errorf("join tokens: %s", resp.GetStopped())
	}
	want := make([]wanted, len(ids))
	for i, x := range resp.GetTokens() {
		if x.GetError() != "" {
			return nil, fmt.Errorf("join token of %s: %s", ids[i], x.GetError())
		}
		want[i] = wanted{id: ids[i], token: x.GetSecret()}
	}
	return want, nil
}

// connect opens the operators' door.
func (f *fleet) connect() error {
	path := f.o.credentials
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no credentials at %s: a controller writes operator.pem to its data directory at its first start; say --credentials FILE, or join with --tokens", path)
	}
	if err != nil {
		return fmt.Errorf("--credentials: %w", err)
	}
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		return fmt.Errorf("--credentials %s: %w", path, err)
	}
	var authority []byte
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if c, err := x509.ParseCertificate(block.Bytes); block.Type == "CERTIFICATE" && err == nil && c.IsCA {
			authority = block.Bytes
		}
	}
	if authority == nil {
		return fmt.Errorf("--credentials %s: must have a certificate, its key and the fleet's authority", path)
	}
	if f.authority != nil && string(f.authority) != string(authority) {
		return fmt.Errorf("--credentials %s and --state %s are not of the same fleet", path, f.o.state)
	}
	if err := f.trusted(authority); err != nil {
		return fmt.Errorf("--credentials %s: %w", path, err)
	}
	pair.Certificate = pair.Certificate[:1]
	f.operators, err = f.dial(f.o.operators, nil, pair)
	return err
}

func (f *fleet) dial(address string, source net.Addr, certs ...tls.Certificate) (*grpc.ClientConn, error) {
	d := net.Dialer{LocalAddr: source}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: identity.ServerName, RootCAs: f.roots, Certificates: certs,
		})),
		grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) { return d.DialContext(ctx, "tcp", a) }),
		grpc.WithDisableServiceConfig(), grpc.WithNoProxy())
}

// refused explains how a call at the operators' door ended.
func (f *fleet) refused(what string, err error) error {
	text := status.Convert(err).Message()
	if status.Code(err) == codes.Unavailable {
		return fmt.Errorf("controller %s can't be reached: is it running, and is this its door for operators? say --operators HOST:PORT (%s)", f.o.operators, text)
	}
	return fmt.Errorf("%s: %s", what, text)
}

// subscribers stores one subscriber for each id, all in one call.
func (f *fleet) subscribers(ctx context.Context, ids []string) error {
	ctx, cancel := context.WithTimeout(ctx, importTime)
	defer cancel()
	_, err := pb.NewPlanServiceClient(f.operators).GetPlan(ctx, &pb.GetPlanRequest{Name: f.o.plan})
	if status.Code(err) == codes.NotFound {
		return fmt.Errorf("plan %s does not exist: make it with cakefleetctl plan set %s --down 115mbit --up 12mbit", f.o.plan, f.o.plan)
	}
	if err != nil {
		return f.refused("plan "+f.o.plan, err)
	}
	stream, err := pb.NewSubscriberServiceClient(f.operators).ImportSubscribers(ctx)
	if err != nil {
		return f.refused("subscribers", err)
	}
	header := "id,plan\n"
	if f.o.sites > 0 {
		header = "id,plan,site\n"
	}
	if err := stream.Send(&pb.ImportSubscribersRequest{Chunk: []byte(header), AllowMassChange: true}); err != nil {
		return f.refused("subscribers", err)
	}
	for some := range slices.Chunk(ids, 1000) {
		var b strings.Builder
		for _, id := range some {
			fmt.Fprintf(&b, "%s,%s", id, f.o.plan)
			if f.o.sites > 0 {
				fmt.Fprintf(&b, ",site-%03d", hashOf(id, 0)%uint64(f.o.sites))
			}
			b.WriteByte('\n')
		}
		if stream.Send(&pb.ImportSubscribersRequest{Chunk: []byte(b.String())}) != nil {
			break // CloseAndRecv says why
		}
	}
	resp, err := stream.CloseAndRecv()
	switch {
	case err != nil:
		return f.refused("subscribers", err)
	case len(resp.GetErrors()) > 0:
		return fmt.Errorf("subscribers: %s", resp.GetErrors()[0].GetMessage())
	case !resp.GetApplied():
		return fmt.Errorf("subscribers: not stored: %s", resp.GetHeld())
	}
	return nil
}

// enroll trades tokens and keys for certificates.
func (f *fleet) enroll(ctx context.Context, want []wanted, stderr io.Writer) ([]member, error) {
	if len(want) == 0 {
		return nil, nil
	}
	for i := range joinConns {
		c, err := f.dial(f.o.agents[i%len(f.o.agents)], f.o.source(i, 1))
		if err != nil {
			return nil, err
		}
		f.doors = append(f.doors, c)
	}
	var done atomic.Int64
	stop := make(chan struct{})
	var told sync.WaitGroup
	told.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if !f.o.quiet {
					fmt.Fprintf(stderr, "joined %d of %d\n", done.Load(), len(want))
				}
			}
		}
	})
	members := make([]member, len(want))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for i, w := range want {
		g.Go(func() (err error) {
			if members[i], err = f.one(ctx, f.doors[i%len(f.doors)], w); err == nil {
				done.Add(1)
			}
			return err
		})
	}
	err := g.Wait()
	close(stop)
	told.Wait()
	return members, err
}

// patient makes a call, as often as the controller asks to come again.
func patient(ctx context.Context, call func(context.Context) error) error {
	for {
		limit, cancel := context.WithTimeout(ctx, callTime)
		err := call(limit)
		cancel()
		if status.Code(err) != codes.ResourceExhausted {
			return err
		}
		select {
		case <-time.After(max(backoff.RetryAfter(err), 100*time.Millisecond)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// one enrols one router.
func (f *fleet) one(ctx context.Context, door *grpc.ClientConn, w wanted) (m member, err error) {
	if w.key == nil {
		if _, w.key, err = ed25519.GenerateKey(rand.Reader); err != nil {
			return m, err
		}
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, w.key)
	if err != nil {
		return m, err
	}
	var resp *pb.EnrollResponse
	err = patient(ctx, func(ctx context.Context) (err error) {
		resp, err = pb.NewEnrollmentServiceClient(door).Enroll(ctx, &pb.EnrollRequest{Token: w.token, Csr: csr, Model: f.o.model})
		return err
	})
	switch {
	case ctx.Err() != nil:
		return m, ctx.Err()
	case status.Code(err) == codes.Unavailable:
		return m, fmt.Errorf("controller %s can't be reached: is it running, and is this its door for agents? say --agents HOST:PORT (%s)", door.Target(), status.Convert(err).Message())
	case err != nil:
		return m, fmt.Errorf("router %s joins: %s", w.id, status.Convert(err).Message())
	case resp.GetWaiting() != nil:
		return m, fmt.Errorf("router %s: the controller does not know its key any more; take its line out of --state %s", w.id, f.o.state)
	}
	m = member{Router: resp.GetRouterId(), Certificate: resp.GetCertificate(), Authority: f.authority}
	if m.Key, err = x509.MarshalPKCS8PrivateKey(w.key); err != nil {
		return m, err
	}
	if err := m.read(); err != nil {
		return m, fmt.Errorf("router %s: certificate: %w", m.Router, err)
	}
	return m, f.keep(m)
}

// keep writes a router down before it is used.
func (f *fleet) keep(m member) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept == nil {
		return nil
	}
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if _, err := f.kept.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	return nil
}

// remove takes away what was made and nobody can use any more. It goes on after
// Ctrl-C, as nobody else would do it.
func (f *fleet) remove(stderr io.Writer) error {
	if len(f.made) == 0 {
		return nil
	}
	if !f.o.quiet {
		fmt.Fprintf(stderr, "removing %d routers and their subscribers\n", len(f.made))
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	routers, subscribers := pb.NewRouterServiceClient(f.operators), pb.NewSubscriberServiceClient(f.operators)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, id := range f.made {
		g.Go(func() error {
			// A token that was not used goes by itself, after a day.
			err := patient(ctx, func(ctx context.Context) error {
				_, err := routers.DeleteRouter(ctx, &pb.DeleteRouterRequest{Id: id})
				return err
			})
			if err != nil && status.Code(err) != codes.NotFound {
				return f.refused("remove router "+id, err)
			}
			err = patient(ctx, func(ctx context.Context) error {
				_, err := subscribers.DeleteSubscriber(ctx, &pb.DeleteSubscriberRequest{Id: id})
				return err
			})
			if err != nil && status.Code(err) != codes.NotFound {
				return f.refused("remove subscriber "+id, err)
			}
			return nil
		})
	}
	f.made = nil
	return g.Wait()
}
