package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"time"
)

// PeersTLS returns what controllers need to ask each other: for the door, where
// nobody comes in without a certificate of the fleet's authority, and for who
// calls, as the controller id. The key is never stored, and the certificate is
// as good as the authority's, because a controller runs for long.
func (a *Authority) PeersTLS(id string, now time.Time) (door, caller *tls.Config, err error) {
	if door, err = a.tls(tls.RequireAndVerifyClientCert); err != nil {
		return nil, nil, err
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("key of controller %s: %w", id, err)
	}
	cert, err := a.client(Peer{Role: RoleController, Name: id}, pub, authorityLife, now)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate of controller %s: %w", id, err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return door, &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: ServerName, RootCAs: roots,
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}},
	}, nil
}
