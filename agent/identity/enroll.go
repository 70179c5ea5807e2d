package identity

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"
)

// Enrollment is a router on its way to an identity: it knows the controller
// by the token's pin and has a key.
type Enrollment struct {
	Token         Token
	Request       []byte // PKCS #10 in DER
	Serial, Model string // what the router says of itself; may be empty

	key         ed25519.PrivateKey
	authorities []*x509.Certificate
	clock       *Clock
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
	authorities := []*x509.Certificate{authority}
	if err := learn(clock, chain, authorities); err != nil {
		return nil, err
	}
	key, err := pendingKey(dir)
	if err != nil {
		return nil, err
	}
	return begin(token, key, authorities, clock)
}

// Again is the way to another certificate for the key that a router has, when
// the one that it had has ended or is refused: the controller decides by the
// key.
func (id *Identity) Again(clock *Clock) (*Enrollment, error) {
	return begin(Token{}, id.Key, id.Authorities, clock)
}

func begin(token Token, key ed25519.PrivateKey, authorities []*x509.Certificate, clock *Clock) (*Enrollment, error) {
	csr, err := request(key)
	if err != nil {
		return nil, err
	}
	return &Enrollment{Token: token, Request: csr, key: key, authorities: authorities, clock: clock}, nil
}

// request returns a signing request (PKCS #10 in DER).
func request(key ed25519.PrivateKey) ([]byte, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make signing request: %w", err)
	}
	return csr, nil
}

// TLS returns the configuration for the enrolment, which proves the
// controller by the authority that the token names.
func (e *Enrollment) TLS() *tls.Config { return serverOnly(e.authorities, e.clock) }

// Finish checks what the controller answered and returns the identity. The
// authorities are taken as they came if one that the router was told to trust is
// still among them: the controller has proven itself to TLS by that.
func (e *Enrollment) Finish(certificate []byte, authorities [][]byte) (*Identity, error) {
	return finish(certificate, authorities, e.authorities, e.key)
}

func finish(certificate []byte, authorities [][]byte, before []*x509.Certificate, key ed25519.PrivateKey) (*Identity, error) {
	leaf, err := x509.ParseCertificate(certificate)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	all, err := parseAuthorities(authorities)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(all, func(a *x509.Certificate) bool { return (&Identity{Authorities: before}).trusts(pinOf(a)) }) {
		return nil, errors.New("authority: not the one that the router was told to trust")
	}
	return assemble(key, leaf, all)
}

// Foreign returns whether a handshake ended because the controller showed no
// certificate of the identity's authority.
func (id *Identity) Foreign(handshake error) bool {
	var unverified *tls.CertificateVerificationError
	if !errors.As(handshake, &unverified) || len(unverified.UnverifiedCertificates) == 0 {
		return false
	}
	for _, c := range unverified.UnverifiedCertificates {
		if id.trusts(pinOf(c)) {
			return false
		}
	}
	return issuerOf(unverified.UnverifiedCertificates[0], id.Authorities) == nil
}

// trusts returns whether a pin is of one of the identity's authorities.
func (id *Identity) trusts(pin [sha256.Size]byte) bool {
	return slices.ContainsFunc(id.Authorities, func(a *x509.Certificate) bool { return pinOf(a) == pin })
}

// Of returns whether a join token or pin is of one of the identity's authorities.
func (id *Identity) Of(t Token) bool { return id.trusts(t.Pin) }

// LearnTime looks at why a handshake ended. If it is that the router's clock is
// before or past the life of the controller's certificate, which is shown to be
// of the router's own fleet, the clock is mended as far as that goes and the
// result is true: another try will do.
func (id *Identity) LearnTime(handshake error, clock *Clock) bool {
	var unverified *tls.CertificateVerificationError
	if !errors.As(handshake, &unverified) || len(unverified.UnverifiedCertificates) == 0 {
		return false
	}
	before := clock.Now()
	err := learn(clock, unverified.UnverifiedCertificates, id.Authorities)
	return err == nil && clock.Now().Sub(before).Abs() > time.Second
}

// learn looks at a chain that the router's clock is not within. The handshake
// that follows verifies all again.
//
// Before its beginning: that time has passed, as the authority has signed it.
//
// Past its end: either the certificate has ended, or the router's clock is
// ahead. While something keeps the clock right, or if a time past the end is
// known to have passed (the latest of the program's build, what the authority
// has signed and controllers have said), the certificate has ended. Else the
// clock loses its credit: a router that was switched on with a wrong clock must
// not be cut off for good, and whoever has stolen the key of a certificate that
// has ended gains no more by it than the time that the router does not know to
// have passed. The controller is told (ClockOK).
func learn(clock *Clock, chain, authorities []*x509.Certificate) error {
	began, ended := chain[0].NotBefore, chain[0].NotAfter
	authority := issuerOf(chain[0], authorities)
	if authority == nil {
		authority = authorities[len(authorities)-1] // through one in between
	}
	if authority.NotBefore.After(began) {
		began = authority.NotBefore
	}
	if authority.NotAfter.Before(ended) {
		ended = authority.NotAfter
	}
	now, at := clock.Now(), began
	ahead := now.After(ended)
	switch {
	case now.Before(began):
	case !ahead, clock.keptRight():
		return nil
	default:
		if known := clock.Known(); known.After(at) {
			at = known
		}
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	if _, err := chain[0].Verify(x509.VerifyOptions{DNSName: ServerName, Roots: rootsOf(authorities), Intermediates: between, CurrentTime: at}); err != nil {
		return fmt.Errorf("learn the time from the controller's certificate: %w", err)
	}
	if ahead {
		clock.disbelieve(at)
	} else {
		clock.Raise(began)
	}
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
