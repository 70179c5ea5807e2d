package store

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// KindOperator is a person or a program that may use the operators' doors.
const KindOperator Kind = "operator"

// ErrLastAdmin means that nobody could decide any more who may do what.
var ErrLastAdmin = errors.New("is the last admin who can come in")

// mostCredentials is how many tokens and certificates an operator may have.
const mostCredentials = 64

// Operator is who may use the operators' doors. Its slices must not be changed.
type Operator struct {
	Name        string
	Role        identity.OperatorRole
	Credentials []Credential
	Updated     time.Time
	Revision    plan.Revision
}

// Credential is what an operator comes in with, without its secret.
type Credential struct {
	ID      string
	Hash    [32]byte // of a token's secret, or of a certificate's public key
	Token   bool     // else a certificate
	Role    identity.OperatorRole
	Note    string
	Created time.Time
	Expires time.Time
}

// Opens tells whether it lets anybody in at a time.
func (c Credential) Opens(now time.Time) bool { return now.Before(c.Expires) }

// May returns the role that an operator has who comes in with c.
func (o Operator) May(c Credential) identity.OperatorRole {
	if c.Role != identity.NoRole && c.Role < o.Role {
		return c.Role
	}
	return o.Role
}

// rules tells whether the operator can come in as an admin.
func (o Operator) rules(now time.Time) bool {
	return slices.ContainsFunc(o.Credentials, func(c Credential) bool { return c.Opens(now) && o.May(c) == identity.Admin })
}

// Validate returns an error that names the field.
func (o Operator) Validate() error {
	if err := plan.ValidateName("operator", o.Name); err != nil {
		return err
	}
	if o.Role < identity.Viewer || o.Role > identity.Admin {
		return fmt.Errorf("operator %s: has no role", o.Name)
	}
	if n := len(o.Credentials); n > mostCredentials {
		return fmt.Errorf("operator %s: %d tokens and certificates, at most %d are allowed: revoke some", o.Name, n, mostCredentials)
	}
	for _, c := range o.Credentials {
		if len([]rune(c.Note)) > 100 {
			return fmt.Errorf("operator %s: note of %s: longer than 100 characters", o.Name, c.ID)
		}
	}
	return nil
}

type (
	operatorRecord struct {
		Schema      int                `json:"schema"`
		Role        string             `json:"role"`
		Credentials []credentialRecord `json:"credentials,omitempty"`
		Updated     time.Time          `json:"updated"`
	}
	credentialRecord struct {
		ID         string    `json:"id"`
		SecretHash string    `json:"secret_hash,omitempty"` // of a token
		Key        string    `json:"key,omitempty"`         // of a certificate
		Role       string    `json:"role,omitempty"`
		Note       string    `json:"note,omitempty"`
		Created    time.Time `json:"created"`
		Expires    time.Time `json:"expires"`
	}
)

func encodeOperator(o Operator) []byte {
	r := operatorRecord{Schema: schema, Role: o.Role.String(), Updated: o.Updated}
	for _, c := range o.Credentials {
		cr := credentialRecord{ID: c.ID, Note: c.Note, Created: c.Created, Expires: c.Expires}
		if c.Token {
			cr.SecretHash = hex.EncodeToString(c.Hash[:])
		} else {
			cr.Key = hex.EncodeToString(c.Hash[:])
		}
		if c.Role != identity.NoRole {
			cr.Role = c.Role.String()
		}
		r.Credentials = append(r.Credentials, cr)
	}
	return encode(r)
}

func decodeOperator(name string, value []byte, rev plan.Revision) (Operator, error) {
	var r operatorRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return Operator{}, err
	}
	o := Operator{Name: name, Updated: r.Updated, Revision: rev}
	var err error
	if o.Role, err = identity.ParseOperatorRole(r.Role); err != nil {
		return Operator{}, err
	}
	for _, cr := range r.Credentials {
		c := Credential{ID: cr.ID, Token: cr.SecretHash != "", Note: cr.Note, Created: cr.Created, Expires: cr.Expires}
		if err := decodeHash(c.Hash[:], cr.SecretHash+cr.Key); err != nil {
			return Operator{}, fmt.Errorf("credential %s: %w", cr.ID, err)
		}
		if cr.Role != "" {
			if c.Role, err = identity.ParseOperatorRole(cr.Role); err != nil {
				return Operator{}, fmt.Errorf("credential %s: %w", cr.ID, err)
			}
		}
		o.Credentials = append(o.Credentials, c)
	}
	return o, nil
}

// Operator returns an operator; ok is false if there is none of that name.
func (s *State) Operator(name string) (o Operator, ok bool) {
	o, ok = s.operators.byID[name]
	return o, ok
}

// Operators yields the operators whose name comes after a name, in order.
func (s *State) Operators(after string) func(func(Operator) bool) { return s.operators.after(after) }

// CreateOperator stores a new operator. Errors: ErrInvalid, ErrExists.
func (s *Store) CreateOperator(ctx context.Context, o Operator) (Operator, error) {
	if err := o.Validate(); err != nil {
		return Operator{}, invalid(KindOperator, o.Name, err)
	}
	o.Updated = stamp()
	var err error
	o.Revision, err = s.put(ctx, write{kind: KindOperator, id: o.Name, value: encodeOperator(o), expect: 0})
	return o, err
}

// ChangeOperator stores what change makes of an operator; expect is the
// revision that the stored one must have, or Any. Errors: ErrInvalid,
// ErrNotFound, ErrConflict, ErrLastAdmin, and those of change.
func (s *Store) ChangeOperator(ctx context.Context, name string, expect plan.Revision, change func(*Operator) error) (Operator, error) {
	for range attempts {
		var o Operator
		var exists bool
		s.View(func(st *State) { o, exists = st.Operator(name) })
		switch {
		case !exists:
			return Operator{}, notFound(KindOperator, name)
		case expect != Any && expect != o.Revision:
			return Operator{}, &Error{Kind: KindOperator, ID: name, Err: ErrConflict, Want: expect, Have: o.Revision, Updated: o.Updated}
		}
		before := o
		o.Credentials = slices.Clone(o.Credentials)
		if err := change(&o); err != nil {
			return Operator{}, err
		}
		if err := o.Validate(); err != nil {
			return Operator{}, invalid(KindOperator, name, err)
		}
		o.Updated = stamp()
		rev, err := s.putOperator(ctx, before, o, encodeOperator(o))
		if errors.Is(err, ErrConflict) && expect == Any {
			continue
		}
		o.Revision = rev
		return o, err
	}
	return Operator{}, fmt.Errorf("write operator %s: %w", name, errBusy)
}

// DeleteOperator removes an operator. Errors: ErrNotFound, ErrLastAdmin.
func (s *Store) DeleteOperator(ctx context.Context, name string) error {
	for range attempts {
		var o Operator
		var exists bool
		s.View(func(st *State) { o, exists = st.Operator(name) })
		if !exists {
			return notFound(KindOperator, name)
		}
		_, err := s.putOperator(ctx, o, Operator{Name: name}, nil)
		if !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return fmt.Errorf("delete operator %s: %w", name, errBusy)
}

// putOperator stores value in place of an operator, and compares that there is
// still an admin afterwards: if o isn't one, another is, unchanged.
func (s *Store) putOperator(ctx context.Context, before, o Operator, value []byte) (plan.Revision, error) {
	t := txn{}
	now := time.Now()
	if before.rules(now) && !o.rules(now) {
		var other Operator
		s.View(func(st *State) {
			for x := range st.Operators("") {
				if x.Name != o.Name && x.rules(now) {
					other = x
					return
				}
			}
		})
		if other.Name == "" {
			return 0, &Error{Kind: KindOperator, ID: o.Name, Err: ErrLastAdmin}
		}
		t.guards = []Compare{{key(KindOperator, other.Name), Equal, int64(other.Revision)}}
		t.compares = slices.Clone(t.guards)
	}
	t.add(write{kind: KindOperator, id: o.Name, value: value, expect: before.Revision})
	return s.commit(ctx, &t)
}

// EnsureAdmin lets a certificate's key in as the admin of a name: if there are
// no operators at all, or if renew says that the certificate was made just now
// by who has the authority's key.
func (s *Store) EnsureAdmin(ctx context.Context, name string, c Credential, renew bool) error {
	for range attempts {
		var o Operator
		var exists, others bool
		s.View(func(st *State) {
			o, exists = st.Operator(name)
			others = len(st.operators.byID) > 0
		})
		if others && !renew || slices.ContainsFunc(o.Credentials, func(x Credential) bool { return x.Hash == c.Hash }) && o.Role == identity.Admin {
			return nil
		}
		next := Operator{Name: name, Role: identity.Admin, Updated: stamp()}
		for _, x := range o.Credentials {
			if x.Opens(time.Now()) && x.Hash != c.Hash {
				next.Credentials = append(next.Credentials, x)
			}
		}
		if n := len(next.Credentials); n >= mostCredentials {
			next.Credentials = next.Credentials[n-mostCredentials+1:]
		}
		next.Credentials = append(slices.Clip(next.Credentials), c)
		expect := plan.Revision(0)
		if exists {
			expect = o.Revision
		}
		_, err := s.put(ctx, write{kind: KindOperator, id: name, value: encodeOperator(next), expect: expect})
		if errors.Is(err, ErrConflict) || errors.Is(err, ErrExists) || errors.Is(err, ErrNotFound) {
			continue // another controller starts as well
		}
		return err
	}
	return fmt.Errorf("write operator %s: %w", name, errBusy)
}
