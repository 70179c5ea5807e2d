// Package access decides who may come through the operators' doors, and as
// what. It is the same for gRPC and HTTP, and asks the store each time, so that
// what is revoked opens nothing any more.
package access

import (
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
)

// Why a caller is not let in.
var (
	// ErrNoCredentials: neither a certificate nor a token.
	ErrNoCredentials = errors.New("who are you? show an operator's certificate, or an operator's token as \"Authorization: Bearer\"")
	// ErrRefused: credentials that open nothing here. What wraps it says which.
	ErrRefused = errors.New("refused")
	// ErrTooFast: one operator calls more than its share.
	ErrTooFast = fmt.Errorf("more than %d calls a second: wait a second, and send many subscribers in one file", callRate)
	// ErrThrottled: too many refused credentials came from there.
	ErrThrottled = errors.New("too many refused logins from your address: wait a minute, or use a certificate")
)

// errToken is said of every token that opens nothing: a stranger learns nothing
// about which operators and tokens there are.
var errToken = refused("operator token: unknown, revoked or ended")

// Credentials are what a caller shows.
type Credentials struct {
	TLS           *tls.ConnectionState // verified against the fleet's authority; nil: none
	Authorization string               // as in the HTTP header; empty: none
	Address       string               // host of the other end
}

// Control knows the operators.
type Control struct {
	store    *store.Store
	throttle *throttle
	pace     pace
	oidc     *provider // nil: there is none
	now      func() time.Time
}

// New returns a Control for the operators in s.
func New(s *store.Store) *Control {
	return &Control{store: s, throttle: newThrottle(), now: time.Now}
}

// Admit returns who shows these credentials. A token counts before a
// certificate, because somebody has chosen to show it. Errors:
// ErrNoCredentials, ErrRefused, ErrThrottled, ErrTooFast, ErrIssuer.
func (c *Control) Admit(cred Credentials) (identity.Caller, error) {
	who, err := c.recognise(cred)
	if err == nil && !c.pace.allows(who.Name, c.now()) {
		return identity.Caller{}, ErrTooFast
	}
	return who, err
}

func (c *Control) recognise(cred Credentials) (identity.Caller, error) {
	if cred.Authorization != "" {
		return c.admitToken(cred)
	}
	if cred.TLS == nil {
		return identity.Caller{}, ErrNoCredentials
	}
	p, err := identity.PeerOf(*cred.TLS)
	switch {
	case errors.Is(err, identity.ErrNoCertificate):
		return identity.Caller{}, ErrNoCredentials
	case err != nil:
		return identity.Caller{}, refused(err.Error())
	case p.Role != identity.RoleOperator:
		return identity.Caller{}, refused("this door is for certificates of an operator, not of a " + p.Role.String())
	}
	o, found, ok := c.find(p.Name, func(x store.Credential) bool { return !x.Token && x.Hash == [32]byte(p.Key) })
	if !ok {
		return identity.Caller{}, refused(fmt.Sprintf("operator %s: this certificate is revoked or was never known here", p.Name))
	}
	return identity.Caller{Name: o.Name, Role: o.May(found), Via: "certificate", Address: cred.Address}, nil
}

// find returns an operator and the credential that fits, if it opens anything.
func (c *Control) find(name string, fits func(store.Credential) bool) (o store.Operator, found store.Credential, ok bool) {
	c.store.View(func(st *store.State) { o, ok = st.Operator(name) })
	if !ok {
		return o, found, false
	}
	for _, x := range o.Credentials {
		if fits(x) && x.Opens(c.now()) {
			return o, x, true
		}
	}
	return o, found, false
}

func (c *Control) admitToken(cred Credentials) (identity.Caller, error) {
	now := c.now()
	if !c.throttle.allows(cred.Address, now) {
		return identity.Caller{}, ErrThrottled
	}
	if scheme, text, _ := strings.Cut(cred.Authorization, " "); c.oidc != nil && strings.EqualFold(scheme, "Bearer") && isJWT(text) {
		who, err := c.oidc.admit(strings.TrimSpace(text))
		if errors.Is(err, ErrRefused) {
			c.throttle.failed(cred.Address, now)
		}
		who.Address = cred.Address
		return who, err
	}
	t, err := parseAuthorization(cred.Authorization)
	if err != nil {
		c.throttle.failed(cred.Address, now)
		return identity.Caller{}, refused(err.Error())
	}
	hash := t.Hash()
	o, found, ok := c.find(t.Name, func(x store.Credential) bool {
		return x.Token && x.ID == t.ID && subtle.ConstantTimeCompare(x.Hash[:], hash[:]) == 1
	})
	if !ok {
		c.throttle.failed(cred.Address, now)
		return identity.Caller{}, errToken
	}
	return identity.Caller{Name: o.Name, Role: o.May(found), Via: "token " + found.ID, Address: cred.Address}, nil
}

// parseAuthorization reads "Bearer TOKEN", and "Basic" with any name and the
// token as the password, which is what programs can be told that know no other.
// Its errors have nothing of the text.
func parseAuthorization(text string) (identity.OperatorToken, error) {
	scheme, rest, _ := strings.Cut(text, " ")
	switch {
	case strings.EqualFold(scheme, "Bearer"):
		return identity.ParseOperatorToken(rest)
	case strings.EqualFold(scheme, "Basic") && len(rest) < 2048:
		raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(rest))
		_, password, ok := strings.Cut(string(raw), ":")
		if err == nil && ok {
			return identity.ParseOperatorToken(password)
		}
	}
	return identity.OperatorToken{}, errors.New(`authorization: must be "Bearer" and an operator's token, or "Basic" with the token as the password`)
}

// refusal is ErrRefused with its reason.
type refusal string

func refused(why string) error { return refusal(why) }

// Error returns the reason.
func (r refusal) Error() string { return string(r) }

// Is makes it an ErrRefused.
func (r refusal) Is(target error) bool { return target == ErrRefused }
