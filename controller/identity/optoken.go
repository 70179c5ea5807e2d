package identity

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// OperatorToken is what an operator or its program shows instead of a
// certificate: cfo1.<name>.<id>.<secret>.<pin>. The pin lets a client know the
// controller without any file. String and GoString leave the secret out.
type OperatorToken struct {
	Name   string // of the operator
	ID     string // tokenID characters; names the token among those of the operator
	Secret [32]byte
	Pin    Pin
}

const operatorTokenVersion = "cfo1"

// mostOperatorToken is longer than any token.
const mostOperatorToken = 512

// errOperatorToken is all that is said of a text that isn't a token, as the
// text may have most of a secret in it.
var errOperatorToken = errors.New(`operator token: must be "cfo1.", the operator, the id, the secret and the pin, as "operator token" printed it`)

// NewOperatorToken returns a random token of an operator.
func NewOperatorToken(name string, pin Pin) (OperatorToken, error) {
	join, err := NewToken(pin) // for its id and secret
	if err != nil {
		return OperatorToken{}, fmt.Errorf("operator token: %w", err)
	}
	t := OperatorToken{Name: name, ID: join.ID, Pin: pin}
	if _, err := rand.Read(t.Secret[:]); err != nil {
		return OperatorToken{}, fmt.Errorf("operator token: %w", err)
	}
	return t, nil
}

// ParseOperatorToken returns the token that text is. Its errors have nothing of
// the text.
func ParseOperatorToken(text string) (OperatorToken, error) {
	if len(text) > mostOperatorToken {
		return OperatorToken{}, errOperatorToken
	}
	parts := strings.Split(strings.TrimSpace(text), ".")
	n := len(parts)
	if n < 5 || parts[0] != operatorTokenVersion || len(parts[n-3]) != tokenID {
		return OperatorToken{}, errOperatorToken
	}
	t := OperatorToken{Name: strings.Join(parts[1:n-3], "."), ID: parts[n-3]}
	if plan.ValidateName("operator", t.Name) != nil {
		return OperatorToken{}, errOperatorToken
	}
	for _, c := range t.ID {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return OperatorToken{}, errOperatorToken
		}
	}
	for i, dst := range [][]byte{t.Secret[:], t.Pin[:]} {
		raw, err := base64.RawURLEncoding.Strict().DecodeString(parts[n-2+i])
		if err != nil || len(raw) != len(dst) {
			return OperatorToken{}, errOperatorToken
		}
		copy(dst, raw)
	}
	return t, nil
}

// Text returns the token as it must be shown.
func (t OperatorToken) Text() string {
	enc := base64.RawURLEncoding
	return strings.Join([]string{operatorTokenVersion, t.Name, t.ID, enc.EncodeToString(t.Secret[:]), enc.EncodeToString(t.Pin[:])}, ".")
}

// Hash returns what is stored of the secret.
func (t OperatorToken) Hash() [sha256.Size]byte { return sha256.Sum256(t.Secret[:]) }

// String returns the token without its secret.
func (t OperatorToken) String() string {
	return operatorTokenVersion + "." + t.Name + "." + t.ID
}

// GoString returns the token without its secret.
func (t OperatorToken) GoString() string { return t.String() }
