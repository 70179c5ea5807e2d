package ctl

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// errTokenText is all that is said of a text that isn't a token, as the text
// may have most of a secret in it.
var errTokenText = errors.New(`operator token: must be "cfo1." and what follows, as "cakefleetctl operator token" printed it (--token or ` + envToken + `)`)

// bearer shows an operator's token with every call.
type bearer string

// GetRequestMetadata returns the header with the token.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity says that a token is never sent in the clear.
func (b bearer) RequireTransportSecurity() bool { return true }

// pinOf returns the pin of the fleet's authority that a token names.
func pinOf(token string) (pin [sha256.Size]byte, err error) {
	parts := strings.Split(token, ".")
	if len(parts) < 5 || parts[0] != "cfo1" {
		return pin, errTokenText
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(parts[len(parts)-1])
	if err != nil || len(raw) != len(pin) {
		return pin, errTokenText
	}
	return [sha256.Size]byte(raw), nil
}

// tokenTLS returns how to speak to the controller at an address that has the
// authority which a token names. It asks for the certificates there with a
// handshake that trusts nobody and so always ends, looks for the authority among
// them, and from then on trusts that one alone: no token is ever sent to a
// server that was not verified.
func tokenTLS(ctx context.Context, address, token string) (*tls.Config, error) {
	pin, err := pinOf(token)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	d := tls.Dialer{NetDialer: &net.Dialer{}, Config: &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: serverName,
		RootCAs:    x509.NewCertPool(),
	}}
	conn, err := d.DialContext(ctx, "tcp", address)
	var unverified *tls.CertificateVerificationError
	switch {
	case err == nil:
		return nil, errors.Join(errors.New("a server was trusted without an authority"), conn.Close())
	case !errors.As(err, &unverified):
		return nil, fmt.Errorf("controller %s can't be reached: is it running, and is this its door for operators? say --controller HOST:PORT or set %s (%w)", address, envController, err)
	}
	for _, c := range unverified.UnverifiedCertificates {
		if c.IsCA && sha256.Sum256(c.RawSubjectPublicKeyInfo) == pin {
			roots := x509.NewCertPool()
			roots.AddCert(c)
			return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: serverName, RootCAs: roots}, nil
		}
	}
	return nil, fmt.Errorf("controller %s is not of the fleet that the token is for", address)
}

// authorityTLS returns how to speak to a controller of the authorities in a PEM
// file, for tokens of an identity provider, which name no fleet. What else is in
// the file is left alone, so that an operator's credentials will do.
func authorityTLS(path string) (*tls.Config, error) {
	const why = "a token of an identity provider does not name the fleet: say --credentials FILE or set " + envCredentials + " with ca.pem of the controller's data directory"
	rest, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf(why+" (%w)", err)
	}
	roots, n := x509.NewCertPool(), 0
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil && c.IsCA {
			roots.AddCert(c)
			n++
		}
	}
	if n == 0 {
		return nil, fmt.Errorf("%s: has no authority's certificate; "+why, path)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: serverName, RootCAs: roots}, nil
}
