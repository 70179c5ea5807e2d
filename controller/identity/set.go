package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Source knows the authorities that the fleet has now: an Authority, which is
// the only one for ever, or a Trust.
type Source interface {
	// Set returns them; what is returned does not change.
	Set() *Set
}

// Set is the authorities that a fleet trusts: one, or two while one takes the
// place of the other. It does not change after it was made.
type Set struct {
	shows *Authority // its certificates are on the doors
	signs *Authority // it signs what is new; the same, or the one that is to come
	cross []byte     // the certificate of shows by signs in DER; nil: they are the same
	moved bool       // whether the fleet ever had another authority
}

// NewSet returns the authorities of a fleet. next is to take the place of now;
// nil if none is. moved tells whether the fleet ever had more than one.
//
// While there are two the doors show the certificate of the old one: everybody
// trusts it, also who was away. They show it once more as signed by the new one,
// so that whoever was told of the new one alone may come in already.
func NewSet(now, next *Authority, moved bool) (*Set, error) {
	if next == nil {
		return &Set{shows: now, signs: now, moved: moved}, nil
	}
	t := *now.cert
	cross, err := sign(&x509.Certificate{
		Subject: t.Subject, RawSubject: t.RawSubject, SubjectKeyId: t.SubjectKeyId,
		NotBefore: later(t.NotBefore, next.cert.NotBefore), NotAfter: earlier(t.NotAfter, next.cert.NotAfter),
		BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign,
	}, next.cert, now.cert.PublicKey, next.key)
	if err != nil {
		return nil, fmt.Errorf("authority: sign the one before: %w", err)
	}
	return &Set{shows: now, signs: next, cross: cross.Raw, moved: true}, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// Set returns the authority as the only one.
func (a *Authority) Set() *Set { return &Set{shows: a, signs: a} }

// All returns the authorities, the oldest first.
func (s *Set) All() []*Authority {
	if s.cross == nil {
		return []*Authority{s.shows}
	}
	return []*Authority{s.shows, s.signs}
}

// Shows returns the one whose certificates are on the doors.
func (s *Set) Shows() *Authority { return s.shows }

// Signs returns the one that signs what is new: who joins or comes in later
// knows the fleet by its pin.
func (s *Set) Signs() *Authority { return s.signs }

// Moved tells whether the fleet ever had another authority, so that routers are
// asked which they trust.
func (s *Set) Moved() bool { return s.moved }

// Has tells whether the pin is of one of them.
func (s *Set) Has(p Pin) bool {
	return slices.ContainsFunc(s.All(), func(a *Authority) bool { return a.pin.Equal(p) })
}

// ByPin returns the one that a pin names, the one that is shown if none does.
func (s *Set) ByPin(p Pin) *Authority {
	if s.signs.pin.Equal(p) {
		return s.signs
	}
	return s.shows
}

// Issuer returns the one that has signed the certificate of a client, the one
// that is shown if that is not known.
func (s *Set) Issuer(state tls.ConnectionState) *Authority {
	if len(state.VerifiedChains) == 0 || len(state.VerifiedChains[0]) < 2 {
		return s.shows
	}
	return s.ByPin(sha256.Sum256(state.VerifiedChains[0][1].RawSubjectPublicKeyInfo))
}

// ID names the set in the protocol and in the store: SHA-256 of the pins,
// sorted.
func (s *Set) ID() [sha256.Size]byte {
	var pins []byte
	all := s.All()
	slices.SortFunc(all, func(a, b *Authority) int { return slices.Compare(a.pin[:], b.pin[:]) })
	for _, a := range all {
		pins = append(pins, a.pin[:]...)
	}
	return sha256.Sum256(pins)
}

// Raw returns the certificates of all in DER, the oldest first.
func (s *Set) Raw() (all [][]byte) {
	for _, a := range s.All() {
		all = append(all, a.cert.Raw)
	}
	return all
}

// PEM returns the certificates of all.
func (s *Set) PEM() (text []byte) {
	for _, a := range s.All() {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: typeCert, Bytes: a.cert.Raw})...)
	}
	return text
}

// pool returns what is trusted.
func (s *Set) pool() *x509.CertPool {
	p := x509.NewCertPool()
	for _, a := range s.All() {
		p.AddCert(a.cert)
	}
	return p
}

// complete adds to a certificate of the set's doors who is in between.
func (s *Set) complete(c tls.Certificate) tls.Certificate {
	if s.cross != nil {
		c.Certificate = append(slices.Clip(c.Certificate), s.cross, s.signs.cert.Raw)
	}
	return c
}

// Certificates returns those that a controller lives by, as Authority's.
func (s *Set) Certificates() []Certificate {
	all := s.shows.Certificates()
	if s.cross != nil {
		next := s.signs.Certificates()[0]
		next.Purpose = "authority to come"
		all = append(all, next)
	}
	return all
}

// NewAuthority returns another authority, which may sign certificates of other
// authorities: it vouches for the one whose place it takes.
func NewAuthority(now time.Time) (*Authority, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	return selfSigned(key, now)
}

// Trust is the authorities of a running controller, and the doors that have to
// follow when they change.
type Trust struct {
	set atomic.Pointer[Set]

	mu    sync.Mutex // held by who changes set
	doors []*doorTLS // guarded by mu
}

// doorTLS is what a door does at each handshake.
type doorTLS struct {
	name   string // empty: it is for calls
	secret []byte // of its tickets; empty: they are good at all controllers
	make   func(*Set) (*tls.Config, error)
	now    atomic.Pointer[tls.Config]
}

// NewTrust returns a Trust that begins with a set.
func NewTrust(s *Set) *Trust {
	t := &Trust{}
	t.set.Store(s)
	return t
}

// Set returns the authorities now.
func (t *Trust) Set() *Set { return t.set.Load() }

// Use makes all handshakes from now on those of a set. After an error nothing
// has changed.
func (t *Trust) Use(s *Set) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	made := make([]*tls.Config, len(t.doors))
	for i, d := range t.doors {
		var err error
		if made[i], err = d.make(s); err != nil {
			return err
		}
	}
	t.set.Store(s)
	for i, d := range t.doors {
		d.now.Store(made[i])
	}
	return nil
}

// AgentsDoor returns what the agents' door needs: the configuration of the newest
// set at each handshake. Its session tickets are good at all controllers.
func (t *Trust) AgentsDoor() (*tls.Config, error) {
	return t.door("agents", nil, (*Set).AgentsTLS, "h2")
}

// Door returns what a door needs whose configuration, for a set, is made by
// make: that of the newest set at each handshake. Its session tickets are good at
// this controller. protos are what is spoken there.
func (t *Trust) Door(make func(*Set) (*tls.Config, error), protos ...string) (*tls.Config, error) {
	return t.door("own", ownSecret(), make, protos...)
}

func (t *Trust) door(name string, secret []byte, make func(*Set) (*tls.Config, error), protos ...string) (*tls.Config, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := &doorTLS{name: name, secret: secret}
	d.make = func(s *Set) (*tls.Config, error) {
		c, err := make(s)
		if err != nil {
			return nil, err
		}
		c.NextProtos = protos
		return c, d.useTickets(c, s, time.Now())
	}
	first, err := d.make(t.Set())
	if err != nil {
		return nil, err
	}
	d.now.Store(first)
	t.doors = append(t.doors, d)
	c := first.Clone()
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return d.now.Load(), nil }
	return c, nil
}

// Caller returns what a client needs whose configuration is made by make: a
// function that has that of the newest set.
func (t *Trust) Caller(make func(*Set) (*tls.Config, error)) (func() *tls.Config, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := &doorTLS{make: make}
	first, err := make(t.Set())
	if err != nil {
		return nil, err
	}
	d.now.Store(first)
	t.doors = append(t.doors, d)
	return d.now.Load, nil
}

// errSeal is all that is said of a sealed key that can't be opened.
var errSeal = errors.New("the sealed key of the authority can't be opened with the key of the one before: was it changed in the store?")
