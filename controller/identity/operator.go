package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"strings"
	"time"
)

// OperatorRole is what an operator may do. Each may what those before it may.
type OperatorRole uint8

// The roles of operators. The zero value may do nothing.
const (
	NoRole   OperatorRole = iota
	Viewer                // looks, and sees no personal fields
	Operator              // looks, and changes what routers do
	Admin                 // also decides who may do what
)

// roleWords are the words of the roles, by value.
var roleWords = []string{"none", "viewer", "operator", "admin"}

// String returns the word of the role.
func (r OperatorRole) String() string {
	if int(r) < len(roleWords) {
		return roleWords[r]
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// ParseOperatorRole returns the role with a name.
func ParseOperatorRole(word string) (OperatorRole, error) {
	for r, w := range roleWords[1:] {
		if w == word {
			return OperatorRole(r + 1), nil
		}
	}
	return NoRole, fmt.Errorf("role %q: must be %s", word, strings.Join(roleWords[1:], ", "))
}

// Caller is an operator at one of the operators' doors.
type Caller struct {
	Name    string
	Role    OperatorRole
	Via     string // how it was proved: "certificate", "token" and the token's id, or "oidc" and the issuer's host
	Address string // host of the other end; empty if it is not known
}

type callerKey struct{}

// WithCaller returns a context that knows who calls.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerFrom returns who calls; the zero Caller, which may do nothing, if it is
// not known.
func CallerFrom(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}

// OperatorsTLS returns what a door for operators needs: a client certificate is
// verified if there is one, and each call decides who may do without. Besides
// ServerName the door's certificate is good for names, which are host names and
// addresses.
func (s *Set) OperatorsTLS(names ...string) (*tls.Config, error) {
	a := s.shows
	t, err := s.tls(tls.VerifyClientCertIfGiven)
	if err != nil {
		return nil, err
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("server key: %w", err)
	}
	c := &x509.Certificate{
		Subject:     pkix.Name{CommonName: ServerName, OrganizationalUnit: []string{"controller"}},
		NotBefore:   a.cert.NotBefore,
		NotAfter:    a.cert.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{ServerName},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, n)
		}
	}
	cert, err := sign(c, a.cert, pub, a.key)
	if err != nil {
		return nil, fmt.Errorf("server certificate: %w", err)
	}
	t.Certificates = []tls.Certificate{s.complete(tls.Certificate{Certificate: a.shown(cert), PrivateKey: key, Leaf: cert})}
	return t, nil
}

// OperatorsTLS is Set's.
func (a *Authority) OperatorsTLS(names ...string) (*tls.Config, error) {
	return a.Set().OperatorsTLS(names...)
}

// SignOperator returns a certificate for the operator name and its key.
func (a *Authority) SignOperator(pub ed25519.PublicKey, name string, now time.Time) (*x509.Certificate, error) {
	cert, err := a.client(Peer{Role: RoleOperator, Name: name}, pub, OperatorLife, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of operator %s: %w", name, err)
	}
	return cert, nil
}
