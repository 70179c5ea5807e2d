package identity

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Pin is the SHA-256 of an authority's SubjectPublicKeyInfo. A router that has
// it knows the controller from the first connection on.
type Pin [sha256.Size]byte

// Equal compares in constant time.
func (p Pin) Equal(q Pin) bool { return subtle.ConstantTimeCompare(p[:], q[:]) == 1 }

// Token is a join token: cf1.<id>.<secret>.<pin>. Its String and GoString leave
// the secret out, so that it can't get into a log by accident.
type Token struct {
	ID     string // tokenID characters; names the token in the store and in logs
	Secret [32]byte
	Pin    Pin
}

const (
	tokenVersion = "cf1"
	tokenID      = 10 // characters of base32, 50 bits
)

// errToken is all that is said of a text that isn't a token, as the text may
// have most of a secret in it.
var errToken = errors.New(`join token: must be "cf1.", the id, the secret and the pin, as "token create" printed it`)

// NewToken returns a random token of the authority with this pin.
func NewToken(pin Pin) (Token, error) {
	var raw [tokenID]byte
	t := Token{Pin: pin}
	if _, err := rand.Read(raw[:]); err != nil {
		return Token{}, fmt.Errorf("join token: %w", err)
	}
	if _, err := rand.Read(t.Secret[:]); err != nil {
		return Token{}, fmt.Errorf("join token: %w", err)
	}
	t.ID = strings.ToLower(base32.StdEncoding.EncodeToString(raw[:]))[:tokenID]
	return t, nil
}

// ParseToken returns the token that text is. Its errors have nothing of the
// text.
func ParseToken(text string) (Token, error) {
	parts := strings.Split(strings.TrimSpace(text), ".")
	if len(parts) != 4 || parts[0] != tokenVersion || len(parts[1]) != tokenID {
		return Token{}, errToken
	}
	t := Token{ID: parts[1]}
	for _, c := range t.ID {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return Token{}, errToken
		}
	}
	for i, dst := range [][]byte{t.Secret[:], t.Pin[:]} {
		raw, err := base64.RawURLEncoding.Strict().DecodeString(parts[2+i])
		if err != nil || len(raw) != len(dst) {
			return Token{}, errToken
		}
		copy(dst, raw)
	}
	return t, nil
}

// Text returns the token as the router must present it.
func (t Token) Text() string {
	enc := base64.RawURLEncoding
	return strings.Join([]string{tokenVersion, t.ID, enc.EncodeToString(t.Secret[:]), enc.EncodeToString(t.Pin[:])}, ".")
}

// Hash returns what is stored of the secret.
func (t Token) Hash() [sha256.Size]byte { return sha256.Sum256(t.Secret[:]) }

// String returns the token without its secret.
func (t Token) String() string { return tokenVersion + "." + t.ID }

// GoString returns the token without its secret.
func (t Token) GoString() string { return t.String() }
