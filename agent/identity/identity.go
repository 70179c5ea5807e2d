// Package identity has who a router is: its key, its certificate and the
// fleet's authority, and how a connection proves both ends. Nothing here or
// elsewhere turns verification off.
package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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
	beforeFile   = "identity.old.pem" // the one before it
	keyFile      = "identity.key"     // the key while its certificate is awaited
	uriPrefix    = "cakefleet://router/"
)

// ErrNone means that the router has no identity yet.
var ErrNone = errors.New("no identity")

// ErrDamaged means that a file is not what was written: the router has lost its
// key with it.
var ErrDamaged = errors.New("is damaged")

// Identity is a router's proof of who it is.
type Identity struct {
	RouterID    string
	Key         ed25519.PrivateKey
	Leaf        *x509.Certificate
	Authorities []*x509.Certificate // that the router trusts, one of which has signed Leaf; the newest is the last
	Damage      error               // why the newest one could not be read and this is the one before it; nil: it is the newest
}

// Load reads the identity in dir, the one before it if that is damaged. The
// error is ErrNone if there is none.
func Load(dir string) (*Identity, error) {
	id, err := load(dir, identityFile)
	if err == nil {
		return id, nil
	}
	before, errBefore := load(dir, beforeFile)
	if errBefore != nil {
		return nil, err
	}
	before.Damage = err
	return before, nil
}

func load(dir, name string) (*Identity, error) {
	path := filepath.Join(dir, name)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNone
	}
	if err != nil {
		return nil, err
	}
	id, err := parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, ErrDamaged, err)
	}
	return id, nil
}

// parse reads what Save writes: certificate, key, authorities.
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
	if len(certs) < 2 || key == nil {
		return nil, fmt.Errorf("has %d of 2 certificates and %s key", min(len(certs), 2), map[bool]string{true: "the", false: "no"}[key != nil])
	}
	return assemble(key, certs[0], certs[1:])
}

// assemble checks that the parts belong together. It doesn't look at times.
func assemble(key ed25519.PrivateKey, leaf *x509.Certificate, authorities []*x509.Certificate) (*Identity, error) {
	if pub, ok := leaf.PublicKey.(ed25519.PublicKey); !ok || !pub.Equal(key.Public()) {
		return nil, errors.New("the certificate is not for this router's key")
	}
	if issuerOf(leaf, authorities) == nil {
		return nil, errors.New("the certificate is not of the fleet's authority")
	}
	for _, u := range leaf.URIs {
		if id, ok := strings.CutPrefix(u.String(), uriPrefix); ok {
			if err := plan.ValidateName("router", id); err != nil {
				return nil, err
			}
			return &Identity{RouterID: id, Key: key, Leaf: leaf, Authorities: authorities}, nil
		}
	}
	return nil, fmt.Errorf("the certificate has no name that begins with %s", uriPrefix)
}

// issuerOf returns which of the authorities has signed a certificate; nil if
// none has.
func issuerOf(c *x509.Certificate, authorities []*x509.Certificate) *x509.Certificate {
	for _, a := range authorities {
		if a.IsCA && c.CheckSignatureFrom(a) == nil {
			return a
		}
	}
	return nil
}

// Save writes the identity to dir so that it survives a power cut. The one
// that was there stays as the one before it.
func (id *Identity) Save(dir string) error {
	if _, err := load(dir, identityFile); err == nil {
		b, err := os.ReadFile(filepath.Join(dir, identityFile))
		if err == nil {
			err = state.WriteFile(dir, beforeFile, b)
		}
		if err != nil {
			return fmt.Errorf("save identity: keep the one before it: %w", err)
		}
	}
	key, err := x509.MarshalPKCS8PrivateKey(id.Key)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	blocks := []pem.Block{{Type: "CERTIFICATE", Bytes: id.Leaf.Raw}, {Type: "PRIVATE KEY", Bytes: key}}
	for _, a := range id.Authorities {
		blocks = append(blocks, pem.Block{Type: "CERTIFICATE", Bytes: a.Raw})
	}
	for _, block := range blocks {
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
	return TLS(clock, id.Authorities, func() *Identity { return id })
}

// TLS returns the configuration for sessions with controllers of the authorities.
// The certificate is that of what current returns at each handshake.
func TLS(clock *Clock, authorities []*x509.Certificate, current func() *Identity) *tls.Config {
	c := serverOnly(authorities, clock)
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		id := current()
		return &tls.Certificate{Certificate: [][]byte{id.Leaf.Raw}, PrivateKey: id.Key, Leaf: id.Leaf}, nil
	}
	return c
}

// Life of a certificate. It is renewed when half of it is left, and up to
// renewSpread earlier, so that routers that joined on one day spread.
const (
	renewLeft   = 45 * 24 * time.Hour
	renewSpread = 9 * 24 * time.Hour
	expiring    = 15 * 24 * time.Hour
)

// RenewAt returns when the certificate is to be renewed, the earlier the
// larger spread is, which is 0 to 1.
func (id *Identity) RenewAt(spread float64) time.Time {
	return id.Leaf.NotAfter.Add(-renewLeft - time.Duration(spread*float64(renewSpread)))
}

// Expiring returns whether the certificate ends so soon after t that its
// renewal must have gone wrong for a long time.
func (id *Identity) Expiring(t time.Time) bool { return t.After(id.Leaf.NotAfter.Add(-expiring)) }

// Request returns a signing request for the key that the router has.
func (id *Identity) Request() ([]byte, error) { return request(id.Key) }

// Renewed checks the answer to Request and returns the identity with the new
// certificate and the authorities that came with it: the controller has proven
// that it is of one that the router trusts already.
func (id *Identity) Renewed(certificate []byte, authorities [][]byte) (*Identity, error) {
	now, err := finish(certificate, authorities, id.Authorities, id.Key)
	switch {
	case err != nil:
		return nil, err
	case now.RouterID != id.RouterID:
		return nil, fmt.Errorf("the new certificate is for router %s, not %s", now.RouterID, id.RouterID)
	case now.Leaf.NotAfter.Before(id.Leaf.NotAfter):
		return nil, errors.New("the new certificate ends before the old one")
	}
	return now, nil
}

// Fingerprint returns the SHA-256 of a key's public half in hex digits, by
// which operators know it.
func Fingerprint(key ed25519.PrivateKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}

// OwnKey returns the key of the identity in dir; without one, the key that its
// certificate will be for, made if there is none yet.
func OwnKey(dir string) (ed25519.PrivateKey, error) {
	id, err := Load(dir)
	if errors.Is(err, ErrNone) {
		return pendingKey(dir)
	}
	if err != nil {
		return nil, err
	}
	return id.Key, nil
}

// mostAuthorities bounds what a controller may tell a router to trust.
const mostAuthorities = 5

// parseAuthorities reads certificates of authorities in DER.
func parseAuthorities(raw [][]byte) (all []*x509.Certificate, err error) {
	if len(raw) == 0 || len(raw) > mostAuthorities {
		return nil, fmt.Errorf("authorities: %d, must be 1 to %d", len(raw), mostAuthorities)
	}
	for _, der := range raw {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("authority: %w", err)
		}
		if !c.IsCA {
			return nil, fmt.Errorf("authority %s: is not one that may sign others", c.Subject)
		}
		all = append(all, c)
	}
	return all, nil
}

// TrustID names the authorities as the protocol does: SHA-256 of their pins,
// sorted.
func (id *Identity) TrustID() []byte {
	pins := make([][sha256.Size]byte, len(id.Authorities))
	for i, a := range id.Authorities {
		pins[i] = pinOf(a)
	}
	slices.SortFunc(pins, func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) })
	h := sha256.New()
	for _, p := range pins {
		h.Write(p[:])
	}
	return h.Sum(nil)
}

// rootsOf returns what trusts the authorities and nothing else.
func rootsOf(authorities []*x509.Certificate) *x509.CertPool {
	roots := x509.NewCertPool()
	for _, a := range authorities {
		roots.AddCert(a)
	}
	return roots
}

// serverOnly proves the controller and not the router.
func serverOnly(authorities []*x509.Certificate, clock *Clock) *tls.Config {
	roots := rootsOf(authorities)
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
