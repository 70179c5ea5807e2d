package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"time"
)

// PeersTLS returns what controllers need to ask each other: for the door, where
// nobody comes in without a certificate of the fleet's authority, and for who
// calls, as the controller id. The key is never stored, and the certificate is
// as good as the authority's, because a controller runs for long.
func (s *Set) PeersTLS(id string, now time.Time) (door, caller *tls.Config, err error) {
	if door, err = s.tls(tls.RequireAndVerifyClientCert); err != nil {
		return nil, nil, err
	}
	caller, err = s.PeerTLS(id, now)
	return door, caller, err
}

// PeerTLS returns what PeersTLS has for who calls.
func (s *Set) PeerTLS(id string, now time.Time) (*tls.Config, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key of controller %s: %w", id, err)
	}
	cert, err := s.signs.client(Peer{Role: RoleController, Name: id}, pub, authorityLife, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of controller %s: %w", id, err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: ServerName, RootCAs: s.pool(),
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}},
	}, nil
}

// PeersTLS is Set's.
func (a *Authority) PeersTLS(id string, now time.Time) (door, caller *tls.Config, err error) {
	return a.Set().PeersTLS(id, now)
}
