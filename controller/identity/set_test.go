package identity_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
)

func mustSet(t *testing.T, now, next *identity.Authority) *identity.Set {
	t.Helper()
	s, err := identity.NewSet(now, next, true)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func twoAuthorities(t *testing.T) (a, b *identity.Authority, dir string) {
	t.Helper()
	dir = t.TempDir()
	a, err := identity.Open(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if b, err = identity.NewAuthority(time.Now()); err != nil {
		t.Fatal(err)
	}
	return a, b, dir
}

// meet returns how a handshake ends on both ends.
func meet(server, client *tls.Config) (atServer, atClient error) {
	s, c := net.Pipe()
	done := make(chan error, 1)
	go func() {
		conn := tls.Server(s, server)
		err := conn.Handshake()
		if err == nil {
			_, err = conn.Write([]byte("x"))
		}
		done <- errors.Join(err, s.Close())
	}()
	conn := tls.Client(c, client)
	_, atClient = conn.Read(make([]byte, 1)) // a refusal of the client's certificate comes after its handshake
	_ = c.Close()
	return <-done, atClient
}

// Who comes in at which door: what a client trusts, and who has signed its
// certificate, before, while and after one authority takes the place of another.
func TestDoorsOfASet(t *testing.T) {
	a, b, _ := twoAuthorities(t)
	trust := identity.NewTrust(a.Set())
	door, err := trust.Door((*identity.Set).AgentsTLS, "h2")
	if err != nil {
		t.Fatal(err)
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	client := func(by *identity.Authority, roots ...*identity.Authority) *tls.Config {
		der, err := by.SignRouter(pub, "home-1", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		for _, r := range roots {
			pool.AppendCertsFromPEM(r.CertificatePEM())
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: identity.ServerName, RootCAs: pool, NextProtos: []string{"h2"},
			Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		}
	}
	old, both, early, fresh := client(a, a), client(b, a, b), client(a, a, b), client(b, b)
	for _, c := range []struct {
		when string
		set  *identity.Set
		in   map[string]bool
	}{
		{"before", a.Set(), map[string]bool{"old": true, "early": true}},
		{"while", mustSet(t, a, b), map[string]bool{"old": true, "early": true, "both": true, "fresh": true}},
		{"after", mustSet(t, b, nil), map[string]bool{"both": true, "fresh": true}},
	} {
		if err := trust.Use(c.set); err != nil {
			t.Fatal(err)
		}
		for name, cfg := range map[string]*tls.Config{"old": old, "both": both, "early": early, "fresh": fresh} {
			atServer, atClient := meet(door, cfg)
			if in := atServer == nil && atClient == nil; in != c.in[name] {
				t.Errorf("%s, %s: %v, %v", c.when, name, atServer, atClient)
			}
		}
	}
	if x, y := mustSet(t, a, b), mustSet(t, b, a); x.ID() != y.ID() || x.ID() == a.Set().ID() {
		t.Error("the name of a set depends on its order, or not on its members")
	}
}

func TestSeal(t *testing.T) {
	a, b, _ := twoAuthorities(t)
	sealed, err := a.Seal(b)
	if err != nil {
		t.Fatal(err)
	}
	got, err := a.Unseal(b.Certificate(), sealed)
	if err != nil || got.Pin() != b.Pin() {
		t.Fatalf("%v", err)
	}
	if _, err := got.SignRouter(make(ed25519.PublicKey, 32), "home-1", time.Now()); err != nil {
		t.Errorf("it does not sign: %v", err)
	}
	if _, err := b.Unseal(b.Certificate(), sealed); err == nil {
		t.Error("another key opens it")
	}
	if _, err := a.Unseal(a.Certificate(), sealed); err == nil {
		t.Error("it opens for another certificate")
	}
	sealed[len(sealed)-1] ^= 1
	if _, err := a.Unseal(b.Certificate(), sealed); err == nil {
		t.Error("it opens after it was changed")
	}
}

// However far Adopt came when the power failed, there is a whole authority.
func TestAdoptIsCutShort(t *testing.T) {
	a, b, dir := twoAuthorities(t)
	cert, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")
	read := func(file string) []byte {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	oldCert, oldKey := read(cert), read(key)
	if err := b.Adopt(dir, time.Now()); err != nil {
		t.Fatal(err)
	}
	newCert, newKey := read(cert), read(key)
	bothKeys := append(bytes.Clone(newKey), oldKey...)
	for _, c := range []struct {
		cert, key []byte
		want      identity.Pin
	}{{oldCert, bothKeys, a.Pin()}, {newCert, bothKeys, b.Pin()}, {newCert, newKey, b.Pin()}} {
		for file, text := range map[string][]byte{cert: c.cert, key: c.key} {
			if err := os.WriteFile(file, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, err := identity.Open(dir, time.Now())
		if err != nil || got.Pin() != c.want {
			t.Errorf("the folder has another authority, %v", err)
		}
		if err := b.Adopt(dir, time.Now()); err != nil {
			t.Error(err)
		}
		if got, err = identity.Open(dir, time.Now()); err != nil || got.Pin() != b.Pin() {
			t.Errorf("it is not taken in again: %v", err)
		}
	}
}
