// Package accesstest runs an OpenID Connect identity provider in tests: real
// discovery, keys and tokens, on the loopback.
package accesstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
)

// Issuer is an identity provider.
type Issuer struct {
	URL  string
	Down atomic.Bool  // it answers 503 Service Unavailable
	Asks atomic.Int64 // requests so far

	t    testing.TB
	mu   sync.Mutex
	keys []jose.JSONWebKey // guarded by mu; public
}

// NewIssuer returns a provider without keys that serves until the test ends.
func NewIssuer(t testing.TB) *Issuer {
	t.Helper()
	i := &Issuer{t: t}
	s := httptest.NewServer(i)
	t.Cleanup(s.Close)
	i.URL = s.URL
	return i
}

// ServeHTTP answers with the discovery document, or the keys.
func (i *Issuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.Asks.Add(1)
	var answer any
	switch {
	case i.Down.Load():
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	case r.URL.Path == "/.well-known/openid-configuration":
		answer = map[string]any{
			"issuer": i.URL, "jwks_uri": i.URL + "/keys", "authorization_endpoint": i.URL + "/a", "token_endpoint": i.URL + "/t",
			"id_token_signing_alg_values_supported": []string{"ES256", "HS256", "none"},
		}
	case r.URL.Path == "/keys":
		i.mu.Lock()
		answer = jose.JSONWebKeySet{Keys: i.keys}
		i.mu.Unlock()
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		i.t.Errorf("issuer: %v", err)
	}
}

// Key signs tokens.
type Key struct {
	t      testing.TB
	signer jose.Signer
}

// NewKey returns a key that nobody knows.
func NewKey(t testing.TB, id string) (*Key, jose.JSONWebKey) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: private, KeyID: id}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &Key{t, signer}, jose.JSONWebKey{Key: private.Public(), KeyID: id, Algorithm: "ES256", Use: "sig"}
}

// Rotate makes a new key the only one of the provider.
func (i *Issuer) Rotate(id string) *Key {
	i.t.Helper()
	key, public := NewKey(i.t, id)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys = []jose.JSONWebKey{public}
	return key
}

// Token returns a signed token with claims.
func (k *Key) Token(claims map[string]any) string {
	k.t.Helper()
	text, err := jwt.Signed(k.signer).Claims(claims).Serialize()
	if err != nil {
		k.t.Fatal(err)
	}
	return text
}
