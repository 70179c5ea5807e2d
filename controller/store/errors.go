package store

import (
	"errors"
	"fmt"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// The kinds of error that callers tell apart with errors.Is. All but
// ErrUnavailable and ErrFull mean that nothing was stored.
var (
	ErrInvalid     = errors.New("invalid")
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("exists already")
	ErrConflict    = errors.New("changed by somebody else")
	ErrInUse       = errors.New("in use")
	ErrDangling    = errors.New("refers to something that does not exist")
	ErrToken       = errors.New("token is unknown, used or too old")
	ErrRevoked     = errors.New("was revoked")
	ErrUnavailable = errors.New("store is not reachable")                                                                     // a write may have happened or not
	ErrFull        = errors.New("store is full: nothing new can be written until cakefleetctl doctor --repair has made room") // a write may have happened or not
	ErrClosed      = errors.New("store is closed")
)

// Kind says what a record is. It is the word that operators see and, with an
// s, the part of the key.
type Kind string

// The kinds of record.
const (
	KindPlan       Kind = "plan"
	KindSubscriber Kind = "subscriber"
	KindRouter     Kind = "router"
	KindToken      Kind = "token"
	KindSchedule   Kind = "schedule"
	KindRollout    Kind = "rollout"
	KindPlace      Kind = "place" // of the targets of a rollout
	KindRestore    Kind = "restore"
	KindSerial     Kind = "serial"
	KindRevocation Kind = "revocation"
)

// Error is an error about one record. Is and As see through it to Err.
type Error struct {
	Kind Kind
	ID   string
	Err  error // one of the sentinels

	Want    plan.Revision // ErrConflict: what the caller expected
	Have    plan.Revision // ErrConflict, ErrExists: what is stored
	Updated time.Time     // ErrConflict, ErrExists: when it was stored
	Ref     Kind          // ErrInUse: kind of the users; ErrDangling: kind of the target
	RefID   string        // ErrInUse: one of the users; ErrDangling: the target
	Count   int           // ErrInUse: number of users
	Cause   error         // ErrInvalid: what is wrong
}

// Error returns a sentence for the operator.
func (e *Error) Error() string {
	switch {
	case errors.Is(e.Err, ErrInvalid):
		return e.Cause.Error()
	case errors.Is(e.Err, ErrConflict):
		return fmt.Sprintf("%s %s: revision %d expected, but %d is stored since %s", e.Kind, e.ID, e.Want, e.Have, e.Updated.UTC().Format(time.RFC3339))
	case errors.Is(e.Err, ErrExists):
		return fmt.Sprintf("%s %s: exists already, with revision %d", e.Kind, e.ID, e.Have)
	case errors.Is(e.Err, ErrInUse):
		s := "s"
		if e.Count == 1 {
			s = ""
		}
		return fmt.Sprintf("%s %s: in use by %d %s%s, such as %s", e.Kind, e.ID, e.Count, e.Ref, s, e.RefID)
	case errors.Is(e.Err, ErrDangling):
		return fmt.Sprintf("%s %s: %s %s does not exist", e.Kind, e.ID, e.Ref, e.RefID)
	default:
		return fmt.Sprintf("%s %s: %v", e.Kind, e.ID, e.Err)
	}
}

// Unwrap returns the sentinel.
func (e *Error) Unwrap() error { return e.Err }

func notFound(k Kind, id string) error { return &Error{Kind: k, ID: id, Err: ErrNotFound} }

func invalid(k Kind, id string, cause error) error {
	return &Error{Kind: k, ID: id, Err: ErrInvalid, Cause: cause}
}
