package identity_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/identity"
)

func at(s string) time.Time {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		panic(err)
	}
	return t
}

func open(t *testing.T, dir string, now time.Time) *identity.Authority {
	t.Helper()
	a, err := identity.Open(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func request(t *testing.T, key any) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "somebody-else"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestOpenKeepsTheAuthority(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir, time.Now())
	second := open(t, dir, time.Now())
	if diff := cmp.Diff(first.Certificate(), second.Certificate()); diff != "" {
		t.Errorf("certificate changed (-first +second):\n%s", diff)
	}
	info, err := os.Stat(filepath.Join(dir, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("ca.key has mode %v", info.Mode())
	}

	// A start that was cut short between the two files keeps the key, and so
	// the pin in tokens that were made.
	if err := os.Remove(filepath.Join(dir, "ca.pem")); err != nil {
		t.Fatal(err)
	}
	if third := open(t, dir, time.Now()); third.Pin() != first.Pin() {
		t.Error("pin changed when only the certificate was missing")
	}
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("temporary files left: %v, %v", left, err)
	}
}

func TestLoadSaysWhatIsWrong(t *testing.T) {
	now := time.Now()
	dir, other := t.TempDir(), t.TempDir()
	a := open(t, dir, now)
	open(t, other, now)
	operator := filepath.Join(dir, "operator.pem")
	if _, err := a.EnsureOperator(operator, "admin", now); err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(dir, "junk")
	if err := os.WriteFile(junk, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	cert, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")
	for _, c := range []struct {
		name, cert, key, want string
		now                   time.Time
	}{
		{"no certificate file", filepath.Join(dir, "x"), key, "no such file", now},
		{"no key file", cert, filepath.Join(dir, "x"), "no such file", now},
		{"certificate is not PEM", junk, key, "does not begin with a PEM block", now},
		{"key is not PEM", cert, junk, "does not begin with a PEM block", now},
		{"another key", cert, filepath.Join(other, "ca.key"), "is not the key of", now},
		{"not an authority", operator, key, "is not one that may sign others", now},
		{"ended", cert, key, "ended at", now.Add(40 * 365 * 24 * time.Hour)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := identity.Load(c.cert, c.key, c.now)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want it to say %q", err, c.want)
			}
		})
	}
	if _, err := identity.Load(cert, key, now); err != nil {
		t.Errorf("good files: %v", err)
	}
}

func TestSignRouter(t *testing.T) {
	now := at("2026-03-01T12:00:00Z")
	a := open(t, t.TempDir(), now)
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	later := now.Add(1000 * time.Hour)
	parsed, err := identity.ParseRequest(request(t, key))
	if err != nil {
		t.Fatal(err)
	}
	der, err := a.SignRouter(parsed.Public, "home-1", later)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	if !pub.Equal(cert.PublicKey) {
		t.Error("certificate has another key")
	}
	if cert.Subject.CommonName != "home-1" || cert.URIs[0].String() != "cakefleet://router/home-1" {
		t.Errorf("certificate names %q, %v", cert.Subject, cert.URIs)
	}
	if got := cert.NotAfter.Sub(later); got != identity.RouterLife {
		t.Errorf("it lives %v", got)
	}
	root, err := x509.ParseCertificate(a.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	if !cert.NotBefore.Equal(root.NotBefore) {
		t.Errorf("it begins at %v and the authority at %v", cert.NotBefore, root.NotBefore)
	}
	roots := x509.NewCertPool()
	roots.AddCert(root)
	opts := x509.VerifyOptions{Roots: roots, CurrentTime: later, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := cert.Verify(opts); err != nil {
		t.Error(err)
	}
	opts.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	if _, err := cert.Verify(opts); err == nil {
		t.Error("a router's certificate is good for a server")
	}
}

func TestParseRequestRefuses(t *testing.T) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := request(t, key)
	forged := append([]byte(nil), good...)
	forged[len(forged)-1] ^= 1
	for name, csr := range map[string][]byte{
		"empty":          nil,
		"junk":           []byte("hello"),
		"P-256":          request(t, p256),
		"bad signature":  forged,
		"too large":      append(append([]byte(nil), good...), make([]byte, 5000)...),
		"trailing bytes": append(append([]byte(nil), good...), 0),
	} {
		if _, err := identity.ParseRequest(csr); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := identity.ParseRequest(good); err != nil {
		t.Errorf("good one: %v", err)
	}
}

func TestEnsureOperator(t *testing.T) {
	now := time.Now()
	dir := t.TempDir()
	a := open(t, dir, now)
	file := filepath.Join(dir, "operator.pem")
	ensure := func(a *identity.Authority, now time.Time, want bool) {
		t.Helper()
		wrote, err := a.EnsureOperator(file, "admin", now)
		if err != nil || wrote != want {
			t.Fatalf("wrote %v, error %v; want %v", wrote, err, want)
		}
	}
	ensure(a, now, true)
	ensure(a, now, false)
	ensure(a, now.Add(identity.OperatorLife*3/5), true)
	ensure(open(t, t.TempDir(), now), now, true) // another fleet's are of no use

	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("operator.pem: mode %v, error %v", info.Mode(), err)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var types []string
	for block, rest := pem.Decode(raw); block != nil; block, rest = pem.Decode(rest) {
		types = append(types, block.Type)
	}
	if diff := cmp.Diff([]string{"CERTIFICATE", "PRIVATE KEY", "CERTIFICATE"}, types); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
}

func TestToken(t *testing.T) {
	pin := identity.Pin(sha256.Sum256([]byte("authority")))
	token, err := identity.NewToken(pin)
	if err != nil {
		t.Fatal(err)
	}
	got, err := identity.ParseToken(" " + token.Text() + "\n")
	if err != nil {
		t.Fatal(err)
	}
	if got != token || !got.Pin.Equal(pin) || got.Hash() != sha256.Sum256(token.Secret[:]) {
		t.Error("token changed on its way through text")
	}
	another, err := identity.NewToken(pin)
	if err != nil {
		t.Fatal(err)
	}
	if another.ID == token.ID || another.Secret == token.Secret {
		t.Error("two tokens are alike")
	}

	secret := strings.Split(token.Text(), ".")[2]
	for _, text := range []string{fmt.Sprint(token), fmt.Sprintf("%#v", token), fmt.Sprintf("%+v", &token)} {
		if strings.Contains(text, secret) || strings.Contains(text, fmt.Sprint(token.Secret)) {
			t.Errorf("%q has the secret", text)
		}
	}

	text := token.Text()
	for name, bad := range map[string]string{
		"empty": "", "version": "cf2" + text[3:], "cut": text[:len(text)-1], "longer": text + "A",
		"three parts": text[:strings.LastIndex(text, ".")], "five parts": text + ".",
		"upper case id": "cf1." + strings.ToUpper(token.ID[:9]) + "A" + text[14:], "slash": strings.Replace(text, token.ID, "a/aaaaaaaa", 1),
	} {
		_, err := identity.ParseToken(bad)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error has the secret", name)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	token, err := identity.NewToken(identity.Pin{1})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(token.Text())
	f.Add("cf1.aaaaaaaaaa..")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := identity.ParseToken(text)
		if err == nil && token.Text() != strings.TrimSpace(text) {
			t.Errorf("%q parses as %q", text, token.Text())
		}
	})
}

// handshake runs one over a pipe and returns whom the server sees.
func handshake(t *testing.T, server, client *tls.Config) (identity.Peer, error) {
	t.Helper()
	s, c := net.Pipe()
	defer func() { _ = errors.Join(s.Close(), c.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		conn := tls.Client(c, client)
		err := conn.HandshakeContext(ctx)
		if err == nil {
			_, err = conn.Read(make([]byte, 1)) // a refused certificate shows here
		}
		done <- errors.Join(err, c.Close())
	}()
	conn := tls.Server(s, server)
	err := conn.HandshakeContext(ctx)
	var peer identity.Peer
	if err == nil {
		peer, err = identity.PeerOf(conn.ConnectionState())
		_, werr := conn.Write([]byte{1})
		err = errors.Join(err, werr)
	}
	return peer, errors.Join(err, s.Close(), <-done)
}

func TestDoors(t *testing.T) {
	now := time.Now()
	a, stranger := open(t, t.TempDir(), now), open(t, t.TempDir(), now)
	roots := func(a *identity.Authority) *x509.CertPool {
		p := x509.NewCertPool()
		p.AppendCertsFromPEM(a.CertificatePEM())
		return p
	}
	routerCert := func(a *identity.Authority) []tls.Certificate {
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := a.SignRouter(pub, "home-1", now)
		if err != nil {
			t.Fatal(err)
		}
		return []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	}
	operatorCert := func(a *identity.Authority) []tls.Certificate {
		text, err := a.Operator("admin", now)
		if err != nil {
			t.Fatal(err)
		}
		pair, err := tls.X509KeyPair(text, text)
		if err != nil {
			t.Fatal(err)
		}
		return []tls.Certificate{pair}
	}
	agents, err := a.AgentsTLS()
	if err != nil {
		t.Fatal(err)
	}
	operators, err := a.OperatorsTLS()
	if err != nil {
		t.Fatal(err)
	}
	client := func(roots *x509.CertPool, certs []tls.Certificate) *tls.Config {
		return &tls.Config{RootCAs: roots, ServerName: identity.ServerName, Certificates: certs}
	}
	for _, c := range []struct {
		name   string
		server *tls.Config
		client *tls.Config
		want   identity.Peer
		err    string
	}{
		{"router at the agents' door", agents, client(roots(a), routerCert(a)), identity.Peer{Role: identity.RoleRouter, Name: "home-1"}, ""},
		{"operator at the agents' door is known as one", agents, client(roots(a), operatorCert(a)), identity.Peer{Role: identity.RoleOperator, Name: "admin"}, ""},
		{"nobody at the agents' door", agents, client(roots(a), nil), identity.Peer{}, "no client certificate"},
		{"stranger at the agents' door", agents, client(roots(a), routerCert(stranger)), identity.Peer{}, "unknown authority"},
		{"operator", operators, client(roots(a), operatorCert(a)), identity.Peer{Role: identity.RoleOperator, Name: "admin"}, ""},
		{"router at the operators' door is known as one", operators, client(roots(a), routerCert(a)), identity.Peer{Role: identity.RoleRouter, Name: "home-1"}, ""},
		{"nobody at the operators' door", operators, client(roots(a), nil), identity.Peer{}, "no client certificate"},
		{"strange operator", operators, client(roots(a), operatorCert(stranger)), identity.Peer{}, "unknown authority"},
		{"client of another fleet", agents, client(roots(stranger), routerCert(a)), identity.Peer{}, "unknown authority"},
		{"another server name", agents, &tls.Config{RootCAs: roots(a), ServerName: "controller", Certificates: routerCert(a)}, identity.Peer{}, "not controller"},
		{"TLS 1.2", agents, &tls.Config{RootCAs: roots(a), ServerName: identity.ServerName, MaxVersion: tls.VersionTLS12}, identity.Peer{}, "protocol version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := handshake(t, c.server, c.client)
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Fatalf("got error %v, want %q", err, c.err)
			}
			want := c.want
			if leaf := c.client.Certificates; want.Name != "" {
				cert, err := x509.ParseCertificate(leaf[0].Certificate[0])
				if err != nil {
					t.Fatal(err)
				}
				if want.Key, err = identity.KeyOf(cert.PublicKey.(ed25519.PublicKey)); err != nil {
					t.Fatal(err)
				}
			}
			if got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestPeerOfRefusesOtherURIs(t *testing.T) {
	for _, uri := range []string{
		"https://router/home-1", "cakefleet://root/home-1", "cakefleet://router/", "cakefleet://router/a/b",
		"cakefleet://router/Home", "cakefleet://user@router/home-1", "cakefleet://router/home-1?x=1", "cakefleet://router/home-1#x",
		"cakefleet://router:1/home-1", "cakefleet:router/home-1",
	} {
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		state := tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{URIs: []*url.URL{u}}}}}
		if p, err := identity.PeerOf(state); err == nil {
			t.Errorf("%s is %+v", uri, p)
		}
	}
	for _, uris := range [][]*url.URL{nil, {{Scheme: "cakefleet", Host: "router", Path: "/a"}, {Scheme: "cakefleet", Host: "operator", Path: "/a"}}} {
		state := tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{URIs: uris}}}}
		if p, err := identity.PeerOf(state); err == nil {
			t.Errorf("%v is %+v", uris, p)
		}
	}
}

// FuzzParseRequest is what a stranger can send as a signing request.
func FuzzParseRequest(f *testing.F) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	for _, k := range []any{key, p256} {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "x"}}, k)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(der)
		f.Add(der[:len(der)-1])
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		req, err := identity.ParseRequest(der)
		if err != nil {
			return
		}
		again, err := x509.ParseCertificateRequest(der)
		if err != nil || again.CheckSignature() != nil || !req.Public.Equal(again.PublicKey) {
			t.Errorf("taken without a proof: %v", err)
		}
		if known, err := identity.KeyOf(req.Public); err != nil || known != req.Key {
			t.Errorf("key %v, want %v (%v)", req.Key, known, err)
		}
	})
}

// issue makes a certificate that may sign others, by parent or by itself.
func issue(t *testing.T, name string, parent *x509.Certificate, by ed25519.PrivateKey, ends time.Time) (*x509.Certificate, ed25519.PrivateKey) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: ends.AddDate(-1, 0, 0), NotAfter: ends,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if parent == nil {
		parent, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, pub, by)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// TestFleet039 gives the controller an authority that a provider's root has
// signed: its files are taken, the chain is shown, and routers join it.
func TestFleet039_AuthorityBelowARoot(t *testing.T) {
	dir, ends := t.TempDir(), time.Now().AddDate(0, 6, 0)
	root, rootKey := issue(t, "root", nil, nil, ends)
	middle, middleKey := issue(t, "middle", root, rootKey, ends)
	fleet, fleetKey := issue(t, "fleet", middle, middleKey, ends)
	der, err := x509.MarshalPKCS8PrivateKey(fleetKey)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, blocks ...*pem.Block) string {
		var text []byte
		for _, b := range blocks {
			text = append(text, pem.EncodeToMemory(b)...)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert := func(c *x509.Certificate) *pem.Block { return &pem.Block{Type: "CERTIFICATE", Bytes: c.Raw} }
	keyFile := write("key.pem", &pem.Block{Type: "PRIVATE KEY", Bytes: der})
	for name, c := range map[string]struct {
		file, want string
		shown      int
	}{
		"alone":        {write("1.pem", cert(fleet)), "", 2},
		"with chain":   {write("2.pem", cert(fleet), cert(middle), cert(root)), "", 4},
		"without root": {write("3.pem", cert(fleet), cert(middle)), "", 3},
		"wrong order":  {write("4.pem", cert(fleet), cert(root), cert(middle)), "is not the issuer", 0},
		"root first":   {write("5.pem", cert(root), cert(middle)), "is not the issuer", 0},
		"too long":     {write("6.pem", cert(root), cert(root), cert(root), cert(root), cert(root), cert(root)), "more than 5", 0},
		"another key":  {write("7.pem", cert(middle), cert(root)), "is not the key of", 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := identity.Load(c.file, keyFile, time.Now())
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			server, err := a.AgentsTLS()
			if err != nil {
				t.Fatal(err)
			}
			if n := len(server.Certificates[0].Certificate); n != c.shown {
				t.Errorf("%d certificates are shown", n)
			}
			pub, key, err := ed25519.GenerateKey(rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			leaf, err := a.SignRouter(pub, "home-1", time.Now())
			if err != nil {
				t.Fatal(err)
			}
			// Only the authority is trusted, at both ends.
			roots := x509.NewCertPool()
			roots.AddCert(fleet)
			client := &tls.Config{ServerName: identity.ServerName, RootCAs: roots, Certificates: []tls.Certificate{{Certificate: [][]byte{leaf}, PrivateKey: key}}}
			if who, err := handshake(t, server, client); err != nil || who.Name != "home-1" {
				t.Errorf("%+v, %v", who, err)
			}
		})
	}
}

// TestFleet040 moves the clock to the end of the authority: it is told 30 days
// before, urgently a week and a day before, and a controller does not start
// after it.
func TestFleet040_AuthorityEnds(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	a := open(t, dir, now)
	for _, c := range []struct {
		before time.Duration
		want   string // empty: nothing is told
		now    bool
	}{
		{31 * 24 * time.Hour, "", false},
		{30 * 24 * time.Hour, "the fleet's authority ends in 30 days", false},
		{8 * 24 * time.Hour, "ends in 8 days", false},
		{7 * 24 * time.Hour, "ends in 7 days", true},
		{25 * time.Hour, "ends in 25 hours", true},
		{24*time.Hour - time.Second, "ends in less than 24 hours", true},
		{-time.Second, "ended at", true},
	} {
		err := a.Ending(a.Ends().Add(-c.before))
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) || errors.Is(err, identity.ErrEnding) != c.now {
			t.Errorf("%v before: %v", c.before, err)
		}
	}
	if _, err := identity.Open(dir, a.Ends().Add(time.Second)); err == nil || !strings.Contains(err.Error(), "ended at") {
		t.Errorf("after the end: %v", err)
	}
}

// Every certificate that a controller lives by is told of, with what its end
// means; one that lives for a month is not warned of for all its life.
func TestFleet040_EveryCertificate(t *testing.T) {
	now := time.Now()
	root, rootKey := issue(t, "root", nil, nil, now.AddDate(1, 0, 0))
	fleet, fleetKey := issue(t, "fleet", root, rootKey, now.AddDate(0, 6, 0))
	der, err := x509.MarshalPKCS8PrivateKey(fleetKey)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile := filepath.Join(t.TempDir(), "ca.pem"), filepath.Join(t.TempDir(), "ca.key")
	var chain []byte
	for _, c := range []*x509.Certificate{fleet, root} {
		chain = append(chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	for file, text := range map[string][]byte{certFile: chain, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, err := identity.Load(certFile, keyFile, now)
	if err != nil {
		t.Fatal(err)
	}
	var purposes []string
	for _, c := range a.Certificates() {
		purposes = append(purposes, c.Purpose)
		if err := c.Ending(c.Ends.Add(-time.Hour)); !errors.Is(err, identity.ErrEnding) || !strings.Contains(err.Error(), "then") && c.Subject != identity.ServerName {
			t.Errorf("%s: %v", c.Purpose, err)
		}
	}
	if want := []string{"authority", "issuer of the authority", "agents' and operators' doors"}; !slices.Equal(purposes, want) {
		t.Errorf("told of %q, want %q", purposes, want)
	}
	short := identity.HTTPSDoor(&x509.Certificate{Subject: pkix.Name{CommonName: "isp.example"}, NotBefore: now, NotAfter: now.Add(40 * 24 * time.Hour)}, "/etc/isp.pem")
	if err := short.Ending(now.Add(25 * 24 * time.Hour)); err != nil {
		t.Errorf("with 15 of 40 days left: %v", err)
	}
	if err := short.Ending(now.Add(31 * 24 * time.Hour)); err == nil || errors.Is(err, identity.ErrEnding) || !strings.Contains(err.Error(), "/etc/isp.pem") || !strings.Contains(err.Error(), "HTTPS door (CN=isp.example) ends in 9 days") {
		t.Errorf("with 9 of 40 days left: %v", err)
	}
}
