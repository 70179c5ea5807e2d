package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"
)

// Enrollment is a router on its way to an identity: it knows the controller
// by the token's pin and has a key.
type Enrollment struct {
	Token   Token
	Request []byte // PKCS #10 in DER

	key       ed25519.PrivateKey
	authority *x509.Certificate
	clock     *Clock
}

// Begin finds the fleet's authority at the controller and makes the key.
func Begin(ctx context.Context, address, dir string, token Token, clock *Clock) (*Enrollment, error) {
	chain, err := presented(ctx, address)
	if err != nil {
		return nil, err
	}
	authority, err := findAuthority(chain, token.Pin)
	if err != nil {
		return nil, err
	}
	if err := raise(clock, chain, authority); err != nil {
		return nil, err
	}
	key, err := pendingKey(dir)
	if err != nil {
		return nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make signing request: %w", err)
	}
	return &Enrollment{Token: token, Request: csr, key: key, authority: authority, clock: clock}, nil
}

// TLS returns the configuration for the enrolment, which proves the
// controller by the authority that the token names.
func (e *Enrollment) TLS() *tls.Config { return serverOnly(e.authority, e.clock) }

// Finish checks what the controller answered and returns the identity.
func (e *Enrollment) Finish(certificate, authority []byte) (*Identity, error) {
	leaf, err := x509.ParseCertificate(certificate)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	ca, err := x509.ParseCertificate(authority)
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	if pinOf(ca) != e.Token.Pin {
		return nil, errors.New("authority: not the one that the join token names")
	}
	return assemble(e.key, leaf, ca)
}

// LearnTime looks at why a handshake ended. If it is that the router's clock is
// behind the beginning of the controller's certificate, which is shown to be of
// the router's own fleet, the clock is raised and the result is true: another
// try will do.
func (id *Identity) LearnTime(handshake error, clock *Clock) bool {
	var unverified *tls.CertificateVerificationError
	if !errors.As(handshake, &unverified) || len(unverified.UnverifiedCertificates) == 0 {
		return false
	}
	before := clock.Now()
	return raise(clock, unverified.UnverifiedCertificates, id.Authority) == nil && clock.Now().After(before.Add(time.Second))
}

// raise tells the clock that the time has passed at which the chain began. The
// authority signed that it has. The handshake that follows verifies all again.
func raise(clock *Clock, chain []*x509.Certificate, authority *x509.Certificate) error {
	began := chain[0].NotBefore
	if authority.NotBefore.After(began) {
		began = authority.NotBefore
	}
	if !clock.Now().Before(began) {
		return nil
	}
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	if _, err := chain[0].Verify(x509.VerifyOptions{DNSName: ServerName, Roots: roots, CurrentTime: began}); err != nil {
		return fmt.Errorf("learn the time from the controller's certificate: %w", err)
	}
	clock.Raise(began)
	return nil
}

// presented returns the certificates that a server presents, unproven. It
// trusts no authority at all, so that the handshake always ends in an error,
// which has them: a pin can't be checked any earlier, and this way no
// connection ever exists whose other end was not verified.
func presented(ctx context.Context, address string) ([]*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	d := tls.Dialer{NetDialer: &net.Dialer{}, Config: &tls.Config{
		MinVersion:       tls.VersionTLS13,
		ServerName:       ServerName,
		RootCAs:          x509.NewCertPool(),
		CurvePreferences: []tls.CurveID{tls.X25519},
	}}
	conn, err := d.DialContext(ctx, "tcp", address)
	var unverified *tls.CertificateVerificationError
	switch {
	case err == nil:
		return nil, errors.Join(errors.New("a server was trusted without an authority"), conn.Close())
	case errors.As(err, &unverified) && len(unverified.UnverifiedCertificates) > 0:
		return unverified.UnverifiedCertificates, nil
	default:
		return nil, fmt.Errorf("ask controller %s for its certificates: %w", address, err)
	}
}
