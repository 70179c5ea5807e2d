// Package identity has who a router is: its key, its certificate and the
// fleet's authority, and how a connection proves both ends. Nothing here or
// elsewhere turns verification off.
package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/agent/state"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// ServerName is the name in every controller's certificate, so that addresses
// may change.
const ServerName = "cakefleet-controller"

const (
	identityFile = "identity.pem"
	keyFile      = "identity.key" // the key while its certificate is awaited
	uriPrefix    = "cakefleet://router/"
)

// ErrNone means that the router has no identity yet.
var ErrNone = errors.New("no identity")

// Identity is a router's proof of who it is.
type Identity struct {
	RouterID  string
	Key       ed25519.PrivateKey
	Leaf      *x509.Certificate
	Authority *x509.Certificate
}

// Load reads the identity in dir. The error is ErrNone if there is none.
func Load(dir string) (*Identity, error) {
	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNone
	}
	if err != nil {
		return nil, err
	}
	id, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return id, nil
}

// parse reads what Save writes: certificate, key, authority.
func parse(b []byte) (*Identity, error) {
	var certs []*x509.Certificate
	var key ed25519.PrivateKey
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		switch block.Type {
		case "CERTIFICATE":
			c, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, err
			}
			certs = append(certs, c)
		case "PRIVATE KEY":
			k, err := parseKey(block.Bytes)
			if err != nil {
				return nil, err
			}
			key = k
		}
	}
	if len(certs) != 2 || key == nil {
		return nil, fmt.Errorf("%d certificates and a key: %t; need the router's and the authority's certificate and the key", len(certs), key != nil)
	}
	return assemble(key, certs[0], certs[1])
}

// assemble checks that the parts belong together. It doesn't look at times.
func assemble(key ed25519.PrivateKey, leaf, authority *x509.Certificate) (*Identity, error) {
	if pub, ok := leaf.PublicKey.(ed25519.PublicKey); !ok || !pub.Equal(key.Public()) {
		return nil, errors.New("the certificate is not for this router's key")
	}
	if err := leaf.CheckSignatureFrom(authority); err != nil {
		return nil, fmt.Errorf("the certificate is not of the fleet's authority: %w", err)
	}
	for _, u := range leaf.URIs {
		if id, ok := strings.CutPrefix(u.String(), uriPrefix); ok {
			if err := plan.ValidateName("router", id); err != nil {
				return nil, err
			}
			return &Identity{RouterID: id, Key: key, Leaf: leaf, Authority: authority}, nil
		}
	}
	return nil, fmt.Errorf("the certificate has no name that begins with %s", uriPrefix)
}

// Save writes the identity to dir so that it survives a power cut.
func (id *Identity) Save(dir string) error {
	key, err := x509.MarshalPKCS8PrivateKey(id.Key)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	for _, block := range []pem.Block{
		{Type: "CERTIFICATE", Bytes: id.Leaf.Raw},
		{Type: "PRIVATE KEY", Bytes: key},
		{Type: "CERTIFICATE", Bytes: id.Authority.Raw},
	} {
		if err := pem.Encode(&b, &block); err != nil {
			return err
		}
	}
	if err := state.WriteFile(dir, identityFile, b.Bytes()); err != nil {
		return fmt.Errorf("save identity: %w", err)
	}
	// The key is in the identity now; a copy that stays does no harm.
	_ = os.Remove(filepath.Join(dir, keyFile))
	return nil
}

// Valid returns whether the certificate holds at t.
func (id *Identity) Valid(t time.Time) bool {
	return !t.After(id.Leaf.NotAfter)
}

// TLS returns the configuration for a session as this router.
func (id *Identity) TLS(clock *Clock) *tls.Config {
	c := serverOnly(id.Authority, clock)
	c.Certificates = []tls.Certificate{{Certificate: [][]byte{id.Leaf.Raw}, PrivateKey: id.Key, Leaf: id.Leaf}}
	return c
}

// serverOnly proves the controller and not the router.
func serverOnly(authority *x509.Certificate, clock *Clock) *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: ServerName,
		RootCAs:    roots,
		Time:       clock.Now,
		// A third of the default's CPU time on a router: no post-quantum
		// exchange, and sessions are resumed.
		CurvePreferences:   []tls.CurveID{tls.X25519},
		ClientSessionCache: tls.NewLRUClientSessionCache(1),
	}
}

func parseKey(der []byte) (ed25519.PrivateKey, error) {
	k, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, err
	}
	key, ok := k.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("key is %T, need Ed25519", k)
	}
	return key, nil
}

// pendingKey returns the key that a certificate is being asked for. It is
// saved first: if the answer to a request is lost, the next one is for the
// same key.
func pendingKey(dir string) (ed25519.PrivateKey, error) {
	path := filepath.Join(dir, keyFile)
	if b, err := os.ReadFile(path); err == nil {
		if block, _ := pem.Decode(b); block != nil {
			if key, err := parseKey(block.Bytes); err == nil {
				return key, nil
			}
		}
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := state.WriteFile(dir, keyFile, b); err != nil {
		return nil, fmt.Errorf("save key: %w", err)
	}
	return key, nil
}
