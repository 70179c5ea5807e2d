package store

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// KindCA is the fleet's authorities; there is one record, of the id FleetCA.
// KindTrust is which authorities a router has confirmed, by the router's id.
const (
	KindCA    Kind = "ca"
	KindTrust Kind = "trust"
)

// FleetCA is the id of the record of the authorities.
const FleetCA = "fleet"

// CA is the fleet's authorities once there was more than one. Its slices must
// not be changed.
type CA struct {
	Current  CAEntry
	Next     CAEntry // that is to take its place; without a pin: none
	Updated  time.Time
	Revision plan.Revision
}

// CAEntry is one authority. Its key is sealed with that of another one, so that
// the store alone gives nobody a key.
type CAEntry struct {
	Pin      string    `json:"pin"`
	Cert     []byte    `json:"cert,omitempty"`       // DER; none: it is in files
	Key      []byte    `json:"sealed_key,omitempty"` // none: it is in files
	SealedBy string    `json:"sealed_by,omitempty"`  // pin
	Since    time.Time `json:"since,omitzero"`
}

type (
	caRecord struct {
		Schema  int       `json:"schema"`
		Current CAEntry   `json:"current"`
		Next    *CAEntry  `json:"next,omitempty"`
		Updated time.Time `json:"updated"`
	}
	trustRecord struct {
		Schema      int       `json:"schema"`
		Authorities string    `json:"authorities"`
		Updated     time.Time `json:"updated"`
	}
)

// trust is what a router has confirmed.
type trust struct {
	set      [32]byte
	revision plan.Revision
}

// CA returns the fleet's authorities; ok is false if there was never more than
// one.
func (s *State) CA() (c CA, ok bool) {
	c, ok = s.cas.byID[FleetCA]
	return c, ok
}

// Trusts tells whether a router has confirmed a set of authorities.
func (s *State) Trusts(router string, set [32]byte) bool {
	t, ok := s.trusts.byID[router]
	return ok && t.set == set
}

// PutCA stores the authorities and makes the current one the one that
// ClaimAuthority compares with, in one transaction. expect is the revision that
// the stored record must have; 0 for none. Errors: ErrConflict, ErrExists,
// ErrNotFound.
func (s *Store) PutCA(ctx context.Context, c CA, expect plan.Revision) (CA, error) {
	c.Updated = stamp()
	r := caRecord{Schema: schema, Current: c.Current, Updated: c.Updated}
	if c.Next.Pin != "" {
		r.Next = &c.Next
	}
	claim := Op{authorityKey, encode(authorityRecord{Pin: c.Current.Pin, Since: c.Updated})}
	var err error
	c.Revision, err = s.put(ctx, write{kind: KindCA, id: FleetCA, value: encode(r), expect: expect, more: []Op{claim}})
	return c, err
}

// Confirm stores that a router trusts a set of authorities, if that is news.
func (s *Store) Confirm(ctx context.Context, router string, set [32]byte) error {
	if err := plan.ValidateName("router", router); err != nil {
		return invalid(KindTrust, router, err)
	}
	known := false
	s.View(func(st *State) { known = st.Trusts(router, set) })
	if known {
		return nil
	}
	value := encode(trustRecord{Schema: schema, Authorities: hex.EncodeToString(set[:]), Updated: stamp()})
	_, err := s.put(ctx, write{kind: KindTrust, id: router, value: value, expect: Any})
	return err
}

func decodeCA(value []byte, rev plan.Revision) (CA, error) {
	var r caRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return CA{}, err
	}
	c := CA{Current: r.Current, Updated: r.Updated, Revision: rev}
	if r.Next != nil {
		c.Next = *r.Next
	}
	if c.Current.Pin == "" {
		return CA{}, errors.New("the current authority is missing")
	}
	return c, nil
}

func decodeTrust(value []byte, rev plan.Revision) (trust, error) {
	var r trustRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return trust{}, err
	}
	t := trust{revision: rev}
	if err := decodeHash(t.set[:], r.Authorities); err != nil {
		return trust{}, fmt.Errorf("authorities: %w", err)
	}
	return t, nil
}
