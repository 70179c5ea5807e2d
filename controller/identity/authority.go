package identity

import (
	"bytes"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// ServerName is the DNS name in the controller's certificate. Clients ask for
// it whatever address they dial.
const ServerName = "cakefleet-controller"

// Life spans.
const (
	RouterLife   = 90 * 24 * time.Hour
	OperatorLife = 2 * 365 * 24 * time.Hour

	authorityLife = 30 * 365 * 24 * time.Hour
	backdate      = 24 * time.Hour // tolerates clients whose clock is late by less
)

const (
	maxCSR   = 4096 // bytes; one for an Ed25519 key has about 200
	typeCert = "CERTIFICATE"
	typeKey  = "PRIVATE KEY"
)

// Authority signs every certificate of the fleet. It does not change after it
// was made, so that it may be used from any goroutine.
type Authority struct {
	cert  *x509.Certificate
	chain []*x509.Certificate // its issuers, the nearest first; empty if it stands for itself
	key   crypto.Signer
	pin   Pin
}

// Open returns the authority in the folder dir, made there if there is none:
// ca.key first and ca.pem last, so that a start that was cut short is completed
// by the next one with the same key.
func Open(dir string, now time.Time) (*Authority, error) {
	certFile, keyFile := authorityFiles(dir)
	if _, err := os.Stat(certFile); !errors.Is(err, fs.ErrNotExist) {
		return Load(certFile, keyFile, now)
	}
	var key crypto.Signer
	keys, err := loadKeys(keyFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if key, err = makeKey(keyFile); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	default:
		key = keys[0]
	}
	a, err := selfSigned(key, now)
	if err != nil {
		return nil, err
	}
	if err := writeFile(certFile, 0o644, a.CertificatePEM()); err != nil {
		return nil, err
	}
	return a, nil
}

// Load returns the authority whose certificate and key are in two PEM files.
// After the certificate there may be its issuers, each followed by its own, up
// to a root or not: the controller shows them too. Routers and operators trust
// the authority itself, so that nothing else of the root's is let in.
// The error says which file does not fit and why.
func Load(certFile, keyFile string, now time.Time) (*Authority, error) {
	raw, err := os.ReadFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("authority certificate: %w", err)
	}
	certs, err := parseChain(raw)
	if err != nil {
		return nil, fmt.Errorf("authority certificate %s: %w", certFile, err)
	}
	cert := certs[0]
	switch {
	case !cert.BasicConstraintsValid || !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return nil, fmt.Errorf("authority certificate %s: is not one that may sign others", certFile)
	case now.After(cert.NotAfter):
		return nil, fmt.Errorf("authority certificate %s: ended at %s, and with it every certificate of the fleet. Routers shape on. Move it and its key away (or give another one with --ca-cert and --ca-key), start with --replace-authority, "+
			"and let every router join again: cakefleetctl token create and router approve", certFile, cert.NotAfter.Format(time.RFC3339))
	}
	keys, err := loadKeys(keyFile)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(keys, func(key crypto.Signer) bool {
		pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
		return ok && pub.Equal(cert.PublicKey)
	})
	if i < 0 {
		return nil, fmt.Errorf("authority key %s: is not the key of %s", keyFile, certFile)
	}
	a := newAuthority(cert, keys[i])
	a.chain = certs[1:]
	return a, nil
}

// maxChain is the most certificates of an authority and its issuers.
const maxChain = 5

// parseChain reads certificates of which each is signed by the next.
func parseChain(text []byte) (certs []*x509.Certificate, err error) {
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		if block.Type != typeCert {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if n := len(certs); n > 0 {
			if err := certs[n-1].CheckSignatureFrom(c); err != nil {
				return nil, fmt.Errorf("certificate %d (%s) is not the issuer of the one before it: %w", n+1, c.Subject, err)
			}
		}
		if certs = append(certs, c); len(certs) > maxChain {
			return nil, fmt.Errorf("has more than %d certificates", maxChain)
		}
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("does not begin with a PEM block %q", typeCert)
	}
	return certs, nil
}

func newAuthority(cert *x509.Certificate, key crypto.Signer) *Authority {
	return &Authority{cert: cert, key: key, pin: sha256.Sum256(cert.RawSubjectPublicKeyInfo)}
}

func selfSigned(key crypto.Signer, now time.Time) (*Authority, error) {
	t := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "cakefleet authority", OrganizationalUnit: []string{"authority"}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(authorityLife),
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLen:            1, // so that it may vouch for the one whose place it takes
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	cert, err := sign(t, t, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	return newAuthority(cert, key), nil
}

// Pin returns what stands for the authority in join tokens.
func (a *Authority) Pin() Pin { return a.pin }

// Ends returns when the authority's certificate ends: with it every other one
// does. A controller does not replace it by itself.
func (a *Authority) Ends() time.Time { return a.cert.NotAfter }

// Ending returns an error if the authority has ended or does so soon, as
// Certificate.Ending says.
func (a *Authority) Ending(now time.Time) error { return a.Certificates()[0].Ending(now) }

// Certificate returns the authority's certificate in DER.
func (a *Authority) Certificate() []byte { return a.cert.Raw }

// CertificatePEM returns the authority's certificate as PEM.
func (a *Authority) CertificatePEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: typeCert, Bytes: a.cert.Raw})
}

// Request is who proved a key with a signing request.
type Request struct {
	Public ed25519.PublicKey
	Key    plan.Key
}

// ParseRequest returns the key of a signing request (PKCS #10 in DER). It must
// be Ed25519 and must have signed the request. Nothing else of the request
// counts: what the identity is, the controller knows.
//
// A request that is seen by others is of no use to them: the certificate that
// it brings is worth nothing without the key.
func ParseRequest(csr []byte) (Request, error) {
	if len(csr) > maxCSR {
		return Request{}, fmt.Errorf("signing request: %d bytes, at most %d are allowed", len(csr), maxCSR)
	}
	req, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return Request{}, fmt.Errorf("signing request: %w", err)
	}
	pub, ok := req.PublicKey.(ed25519.PublicKey)
	if !ok {
		return Request{}, fmt.Errorf("signing request: the key is %s, must be Ed25519", req.PublicKeyAlgorithm)
	}
	if err := req.CheckSignature(); err != nil {
		return Request{}, fmt.Errorf("signing request: %w", err)
	}
	k, err := KeyOf(pub)
	return Request{Public: pub, Key: k}, err
}

// SignRouter returns in DER a certificate for the router id and its key.
func (a *Authority) SignRouter(pub ed25519.PublicKey, id string, now time.Time) ([]byte, error) {
	cert, err := a.client(Peer{Role: RoleRouter, Name: id}, pub, RouterLife, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of router %s: %w", id, err)
	}
	return cert.Raw, nil
}

// Server returns a certificate and key for the controller's doors, with the
// authority's certificate in the chain. The key is never stored.
func (a *Authority) Server() (tls.Certificate, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("server key: %w", err)
	}
	cert, err := sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: ServerName, OrganizationalUnit: []string{"controller"}},
		NotBefore:   a.cert.NotBefore,
		NotAfter:    a.cert.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{ServerName},
	}, a.cert, pub, a.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("server certificate: %w", err)
	}
	return tls.Certificate{Certificate: a.shown(cert), PrivateKey: key, Leaf: cert}, nil
}

// shown returns what a door shows with its certificate: that, the authority and
// its issuers.
func (a *Authority) shown(cert *x509.Certificate) [][]byte {
	all := [][]byte{cert.Raw, a.cert.Raw}
	for _, c := range a.chain {
		all = append(all, c.Raw)
	}
	return all
}

// Operator returns credentials for an operator as one PEM text: certificate,
// private key, and the certificates of the authorities.
func (s *Set) Operator(name string, now time.Time) ([]byte, error) {
	a := s.signs
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("operator key: %w", err)
	}
	cert, err := a.client(Peer{Role: RoleOperator, Name: name}, pub, OperatorLife, now)
	if err != nil {
		return nil, fmt.Errorf("certificate of operator %s: %w", name, err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("operator key: %w", err)
	}
	var b bytes.Buffer
	for _, block := range []*pem.Block{
		{Type: typeCert, Bytes: cert.Raw},
		{Type: typeKey, Bytes: pkcs8},
	} {
		if err := pem.Encode(&b, block); err != nil {
			return nil, fmt.Errorf("operator credentials: %w", err)
		}
	}
	b.Write(s.PEM())
	return b.Bytes(), nil
}

// Operator returns credentials as Set's.
func (a *Authority) Operator(name string, now time.Time) ([]byte, error) {
	return a.Set().Operator(name, now)
}

// EnsureOperator writes credentials of the operator name to file unless it has
// some from the authority that signs now, with all authorities, that are not past
// half of their life. It returns whether it wrote.
func (s *Set) EnsureOperator(file, name string, now time.Time) (wrote bool, err error) {
	return s.RenewOperator(file, name, now, func([]byte) error { return nil })
}

// RenewOperator is EnsureOperator that calls let with the credentials before it
// writes them: who reads the file is let in.
func (s *Set) RenewOperator(file, name string, now time.Time, let func(text []byte) error) (wrote bool, err error) {
	raw, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("operator credentials: %w", err)
	}
	if block, _ := pem.Decode(raw); block != nil {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err == nil && cert.CheckSignatureFrom(s.signs.cert) == nil && cert.NotAfter.Sub(now) > OperatorLife/2 && bytes.HasSuffix(raw, s.PEM()) {
			return false, nil
		}
	}
	text, err := s.Operator(name, now)
	if err != nil {
		return false, err
	}
	if err := let(text); err != nil {
		return false, err
	}
	return true, writeFile(file, 0o600, text)
}

// EnsureOperator is Set's.
func (a *Authority) EnsureOperator(file, name string, now time.Time) (wrote bool, err error) {
	return a.Set().EnsureOperator(file, name, now)
}

func (a *Authority) client(p Peer, pub ed25519.PublicKey, life time.Duration, now time.Time) (*x509.Certificate, error) {
	end := now.Add(life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	return sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: p.Name, OrganizationalUnit: []string{p.Role.String()}},
		NotBefore:   a.cert.NotBefore,
		NotAfter:    end,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{p.URI()},
	}, a.cert, pub, a.key)
}

// sign completes the template t with a random serial number.
func sign(t, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	t.SerialNumber = serial
	der, err := x509.CreateCertificate(rand.Reader, t, parent, pub, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
