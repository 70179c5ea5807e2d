package access

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/hashicorp/go-hclog"
	"golang.org/x/time/rate"

	"github.com/cakefleet/cakefleet/controller/identity"
)

// ErrIssuer: the identity provider can't be asked, so that nothing is known of
// its tokens. What wraps it says which and why.
var ErrIssuer = errors.New("identity provider can't be asked")

// OIDC says which tokens of an identity provider are let in, and as what.
type OIDC struct {
	Issuer    string // URL, as the tokens have it in "iss"; empty: no tokens are
	Audience  string // that "aud" must have
	NameClaim string // what callers are called by; empty, or not in a token: "sub"
	RoleClaim string // a text or a list of texts
	Roles     []OIDCRole
}

// OIDCRole is the role of those who have a value in the role claim.
type OIDCRole struct {
	Role  identity.OperatorRole
	Value string
}

// Claims that are looked at unless others are chosen.
const (
	DefaultNameClaim = "email"
	DefaultRoleClaim = "groups"
)

const (
	askTime    = 5 * time.Second  // for one question to the provider, and for one token
	clockSkew  = 30 * time.Second // that clocks may differ by
	mostJWT    = 12 << 10         // bytes of a token; the doors take headers of 16 KiB
	mostAnswer = 1 << 20          // bytes of an answer of the provider
	mostName   = 255              // characters, as "sub" has at most

	// Strangers' tokens name keys that the provider must be asked for: so often
	// at once, and then once a second.
	askBurst = 10

	firstRetry = time.Second // after a failed discovery, and twice as long after each
	lastRetry  = time.Minute
)

// algorithms have a public key, so that what is read of the provider can sign nothing.
var algorithms = []string{oidc.RS256, oidc.RS384, oidc.RS512, oidc.PS256, oidc.PS384, oidc.PS512, oidc.ES256, oidc.ES384, oidc.ES512, oidc.EdDSA}

// ParseOIDCRole reads ROLE=VALUE.
func ParseOIDCRole(text string) (OIDCRole, error) {
	word, value, ok := strings.Cut(text, "=")
	if !ok || value == "" {
		return OIDCRole{}, fmt.Errorf("%q: must be ROLE=VALUE, such as admin=netops", text)
	}
	role, err := identity.ParseOperatorRole(word)
	return OIDCRole{role, value}, err
}

// Validate returns an error that names what is missing or wrong.
func (o OIDC) Validate() error {
	if o.Issuer == "" {
		if o.Audience != "" || len(o.Roles) > 0 {
			return errors.New("oidc: the issuer is missing (--oidc-issuer URL)")
		}
		return nil
	}
	u, err := url.Parse(o.Issuer)
	switch {
	case err != nil:
		return fmt.Errorf("oidc: issuer: %w", err)
	case u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("oidc: issuer %q: must be a URL such as https://id.example.net/realms/isp", u.Redacted())
	case o.Audience == "":
		return errors.New("oidc: the audience is missing (--oidc-audience, the client id that the identity provider knows)")
	case len(o.Roles) == 0 || o.RoleClaim == "":
		return errors.New("oidc: nobody would have a role: say which with --oidc-role, such as --oidc-role admin=netops, and --oidc-role-claim")
	}
	if err := encrypted(u); err != nil {
		return fmt.Errorf("oidc: issuer: %w", err)
	}
	return nil
}

// encrypted refuses what others on the way could answer.
func encrypted(u *url.URL) error {
	a, err := netip.ParseAddr(u.Hostname())
	loopback := u.Hostname() == "localhost" || err == nil && a.IsLoopback()
	if u.Scheme == "https" || u.Scheme == "http" && loopback {
		return nil
	}
	return fmt.Errorf("%s: must be https (http only on this machine)", u.Redacted())
}

// provider is an identity provider whose tokens are let in.
type provider struct {
	config OIDC
	host   string
	client *http.Client
	logger hclog.Logger
	now    func() time.Time

	// mu is held while the provider is discovered: others wait for the same answer.
	mu     sync.Mutex
	keys   *oidc.RemoteKeySet // guarded by mu; nil: not discovered yet
	failed error              // guarded by mu; of the last discovery
	wait   time.Duration      // guarded by mu; until the next
	next   time.Time          // guarded by mu
}

// UseOIDC lets tokens of an identity provider in too, and must be called before
// Admit. The provider is asked only when the first token comes. A nil logger
// logs nothing.
func (c *Control) UseOIDC(o OIDC, logger hclog.Logger) error {
	if err := o.Validate(); err != nil || o.Issuer == "" {
		return err
	}
	u, err := url.Parse(o.Issuer)
	if err != nil {
		return err
	}
	if logger == nil {
		logger = hclog.NewNullLogger()
	}
	asker := &asker{http.DefaultTransport, rate.NewLimiter(1, askBurst)}
	c.oidc = &provider{config: o, host: u.Host, client: &http.Client{Transport: asker, Timeout: askTime}, logger: logger, now: func() time.Time { return c.now() }}
	return nil
}

// isJWT tells whether a bearer's text is no token of ours and may be a provider's.
func isJWT(text string) bool { return strings.Count(text, ".") == 2 }

// admit returns who shows a token, without the address. Errors: ErrRefused,
// which have nothing of the token but claims that the provider has signed, and
// ErrIssuer.
func (p *provider) admit(text string) (identity.Caller, error) {
	if len(text) > mostJWT {
		return identity.Caller{}, refused(fmt.Sprintf("token of the identity provider: longer than %d bytes", mostJWT))
	}
	keys, err := p.discovered()
	if err != nil {
		return identity.Caller{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	seen := &seenKeys{keys: keys}
	token, err := oidc.NewVerifier(p.config.Issuer, seen, &oidc.Config{
		ClientID: p.config.Audience, SupportedSigningAlgs: algorithms, Now: func() time.Time { return p.now().Add(-clockSkew) },
	}).Verify(ctx, text)
	if err != nil {
		return identity.Caller{}, p.why(err, seen)
	}
	var claims map[string]any
	if err := token.Claims(&claims); err != nil {
		return identity.Caller{}, p.refused("its claims can't be read")
	}
	// The library lets tokens in five minutes early.
	if from, ok := claims["nbf"].(float64); ok && from > float64(p.now().Add(clockSkew).Unix()) {
		return identity.Caller{}, p.refused("it is not valid yet: is the clock right?")
	}
	who := identity.Caller{Name: p.name(claims), Role: p.role(claims), Via: "oidc " + p.host}
	switch {
	case who.Name == "":
		return identity.Caller{}, p.refused(fmt.Sprintf("neither %q nor \"sub\" in it is a name of up to %d printable ASCII characters", p.config.NameClaim, mostName))
	case who.Role == identity.NoRole:
		return identity.Caller{}, p.refused(fmt.Sprintf("%s has nothing in %q that is a role here", who.Name, p.config.RoleClaim))
	}
	return who, nil
}

// name returns what a caller is called; empty if there is nothing fit for logs.
func (p *provider) name(claims map[string]any) string {
	for _, claim := range []string{p.config.NameClaim, "sub"} {
		if v := claims["email_verified"]; claim == "email" && (v == false || v == "false") {
			continue // anybody may have said so
		}
		name, _ := claims[claim].(string)
		odd := strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r > '~' })
		if name = strings.TrimSpace(name); name != "" && len(name) <= mostName && !odd {
			return name
		}
	}
	return ""
}

// role returns the highest role that the claim gives.
func (p *provider) role(claims map[string]any) (highest identity.OperatorRole) {
	values, ok := claims[p.config.RoleClaim].([]any)
	if !ok {
		values = []any{claims[p.config.RoleClaim]}
	}
	for _, r := range p.config.Roles {
		if slices.Contains(values, any(r.Value)) {
			highest = max(highest, r.Role)
		}
	}
	return highest
}

func (p *provider) refused(why string) error {
	return refused("token of " + p.config.Issuer + ": " + why)
}

func (p *provider) away(cause error) error {
	return fmt.Errorf("%w: %s: %w; operators' certificates and own tokens still open", ErrIssuer, p.config.Issuer, cause)
}

// why returns what is told of a token that did not verify.
func (p *provider) why(err error, seen *seenKeys) error {
	var ended *oidc.TokenExpiredError
	var unasked *url.Error
	switch {
	case errors.As(seen.err, &unasked), errors.Is(seen.err, context.DeadlineExceeded):
		return p.away(seen.err)
	case seen.err != nil:
		return p.refused("it is not signed by a key of the identity provider")
	case !seen.asked: // the text may be anything
		return p.refused("must be a JWT that is signed with one of " + strings.Join(algorithms, ", "))
	case errors.As(err, &ended):
		return p.refused("it ended at " + ended.Expiry.UTC().Format(time.RFC3339))
	default: // the claims are the provider's
		return p.refused(strings.TrimPrefix(err.Error(), "oidc: "))
	}
}

// discovered returns the keys of the provider, which it asks for if nobody has
// yet and the last failure is not too young.
func (p *provider) discovered() (*oidc.RemoteKeySet, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keys != nil {
		return p.keys, nil
	}
	if p.now().Before(p.next) {
		return nil, p.failed
	}
	ctx := oidc.ClientContext(context.Background(), p.client) // which has a timeout
	found, err := oidc.NewProvider(ctx, p.config.Issuer)
	var document struct {
		Keys string `json:"jwks_uri"`
	}
	if err == nil {
		err = found.Claims(&document)
	}
	if err == nil && document.Keys == "" {
		err = errors.New("its discovery document has no jwks_uri")
	}
	if err != nil {
		p.wait = min(max(2*p.wait, firstRetry), lastRetry)
		p.next, p.failed = p.now().Add(p.wait), p.away(err)
		p.logger.Warn("identity provider can't be asked", "issuer", p.config.Issuer, "wait", p.wait, "error", err)
		return nil, p.failed
	}
	p.logger.Info("identity provider is known", "issuer", p.config.Issuer)
	p.keys, p.failed = oidc.NewRemoteKeySet(ctx, document.Keys), nil
	return p.keys, nil
}

// seenKeys tells what came of one token's signature, which the library's errors
// do not.
type seenKeys struct {
	keys  oidc.KeySet
	asked bool
	err   error
}

// VerifySignature returns the payload of a token.
func (s *seenKeys) VerifySignature(ctx context.Context, jwt string) (payload []byte, err error) {
	s.asked = true
	payload, s.err = s.keys.VerifySignature(ctx, jwt)
	return payload, s.err
}

// asker sends what the provider is asked: encrypted wherever it is sent on to,
// not too often, and without trust in the size of answers.
type asker struct {
	next  http.RoundTripper
	limit *rate.Limiter
}

// RoundTrip asks.
func (a *asker) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := encrypted(r.URL); err != nil {
		return nil, err
	}
	if !a.limit.Allow() {
		return nil, errors.New("it was asked too often: wait a few seconds")
	}
	resp, err := a.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return nil, errors.Join(errors.New("it answers "+resp.Status), resp.Body.Close())
	}
	resp.Body = http.MaxBytesReader(nil, resp.Body, mostAnswer)
	return resp, nil
}
