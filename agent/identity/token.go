package identity

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Token is a join token, which is good for one certificate.
type Token struct {
	Text string            // as it is presented
	Pin  [sha256.Size]byte // of the fleet authority's public key
}

// ParseToken reads cf1.<id>.<secret>.<pin>. The error never has the secret.
func ParseToken(text string) (Token, error) {
	text = strings.TrimSpace(text)
	parts := strings.Split(text, ".")
	if len(parts) != 4 || parts[0] != "cf1" {
		return Token{}, fmt.Errorf("join token %w: must be cf1.ID.SECRET.PIN as cakefleetctl token create prints it", ErrToken)
	}
	pin, err := base64.RawURLEncoding.DecodeString(parts[3])
	if err != nil || len(pin) != sha256.Size {
		return Token{}, fmt.Errorf("join token %w: its last part is not a SHA-256 pin; is the token cut off?", ErrToken)
	}
	return Token{Text: text, Pin: [sha256.Size]byte(pin)}, nil
}

// ErrToken means that a join token, or a pin, is not one, so that trying it
// again is of no use.
var ErrToken = errors.New("can't be used")

// ParsePin reads the pin of an authority, as cakefleetctl router pending and
// the end of every join token have it. It stands for a token that proves
// nothing: the router then waits for an operator.
func ParsePin(text string) (Token, error) {
	pin, err := base64.RawURLEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil || len(pin) != sha256.Size {
		return Token{}, fmt.Errorf("authority pin %.60q %w: must be 43 characters as cakefleetctl router pin prints them", text, ErrToken)
	}
	return Token{Pin: [sha256.Size]byte(pin)}, nil
}

// pinOf is the SHA-256 of a certificate's public key.
func pinOf(c *x509.Certificate) [sha256.Size]byte {
	return sha256.Sum256(c.RawSubjectPublicKeyInfo)
}

// findAuthority returns the one certificate of chain that the pin names.
func findAuthority(chain []*x509.Certificate, pin [sha256.Size]byte) (*x509.Certificate, error) {
	for _, c := range chain {
		if c.IsCA && pinOf(c) == pin {
			return c, nil
		}
	}
	return nil, fmt.Errorf("none of the %d certificates that the controller presents is of the authority that the router was told to trust: wrong controller, or a join token or pin of another fleet", len(chain))
}
