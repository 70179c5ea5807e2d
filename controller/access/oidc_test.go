package access

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/access/accesstest"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

// oidcNow is what time it is in the tests, for tokens and for the controller.
var oidcNow = time.Unix(1_900_000_000, 0)

func oidcControl(t *testing.T, issuer string) (*Control, *time.Time, *bytes.Buffer) {
	t.Helper()
	c, now, logged := New(storetest.NewFake(t)), oidcNow, &bytes.Buffer{}
	c.now = func() time.Time { return now }
	err := c.UseOIDC(OIDC{Issuer: issuer, Audience: "cakefleet", NameClaim: DefaultNameClaim, RoleClaim: DefaultRoleClaim, Roles: []OIDCRole{
		{identity.Viewer, "support"}, {identity.Admin, "netops"}, {identity.Operator, "field"}, {identity.Operator, "support-2"},
	}}, hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: logged}))
	if err != nil {
		t.Fatal(err)
	}
	return c, &now, logged
}

// claims returns those of a good token, with some changed; nil takes one away.
func claims(issuer string, change map[string]any) map[string]any {
	all := map[string]any{
		"iss": issuer, "aud": "cakefleet", "sub": "u-1", "email": "ada@isp.example", "groups": []string{"all", "field"},
		"iat": oidcNow.Unix(), "exp": oidcNow.Add(5 * time.Minute).Unix(),
	}
	maps.Copy(all, change)
	maps.DeleteFunc(all, func(_ string, v any) bool { return v == nil })
	return all
}

func TestOIDCTokens(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	key := issuer.Rotate("1")
	c, _, logged := oidcControl(t, issuer.URL)
	at := func(d time.Duration) int64 { return oidcNow.Add(d).Unix() }
	type m = map[string]any
	for name, x := range map[string]struct {
		change m
		who    string // name and role
		says   string // of a refusal
	}{
		"operator":                 {nil, "ada@isp.example operator", ""},
		"viewer, one text":         {m{"groups": "support"}, "ada@isp.example viewer", ""},
		"admin, the highest":       {m{"groups": []string{"support", "netops", "field"}}, "ada@isp.example admin", ""},
		"one of several audiences": {m{"aud": []string{"other", "cakefleet"}}, "ada@isp.example operator", ""},
		"no email":                 {m{"email": nil}, "u-1 operator", ""},
		"verified email":           {m{"email_verified": true}, "ada@isp.example operator", ""},
		"unverified email":         {m{"email_verified": false}, "u-1 operator", ""},
		"unverified email, text":   {m{"email_verified": "false"}, "u-1 operator", ""},
		"odd email":                {m{"email": "a\nb"}, "u-1 operator", ""},
		"ended within the skew":    {m{"exp": at(-29 * time.Second)}, "ada@isp.example operator", ""},
		"begins within the skew":   {m{"nbf": at(29 * time.Second)}, "ada@isp.example operator", ""},

		"no name":             {m{"email": nil, "sub": nil}, "", `neither "email" nor "sub"`},
		"wrong audience":      {m{"aud": "grafana"}, "", `expected audience "cakefleet" got ["grafana"]`},
		"no audience":         {m{"aud": nil}, "", "expected audience"},
		"wrong issuer":        {m{"iss": "https://id.example.com"}, "", "issued by a different provider"},
		"ended":               {m{"exp": at(-31 * time.Second)}, "", "it ended at 2030-03-17T17:46:09Z"},
		"never ends":          {m{"exp": nil}, "", "it ended at"},
		"not valid yet":       {m{"nbf": at(31 * time.Second)}, "", "not valid yet"},
		"not for a long time": {m{"nbf": at(time.Hour)}, "", "before the nbf"},
		"no role claim":       {m{"groups": nil}, "", `ada@isp.example has nothing in "groups" that is a role here`},
		"no role":             {m{"groups": []string{"Netops", "netops "}}, "", "that is a role here"},
		"odd role":            {m{"groups": m{"netops": true}}, "", "that is a role here"},
		"odd roles":           {m{"groups": []any{m{"a": 1}, 3, nil}}, "", "that is a role here"},
	} {
		text := key.Token(claims(issuer.URL, x.change))
		who, err := c.Admit(Credentials{Authorization: "Bearer " + text, Address: "192.0.2.1"})
		if x.says != "" {
			if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), x.says) || who.Role != identity.NoRole {
				t.Errorf("%s: %+v, %v; want %q", name, who, err, x.says)
			}
			continue
		}
		if want := "oidc " + strings.TrimPrefix(issuer.URL, "http://"); err != nil || who.Name+" "+who.Role.String() != x.who || who.Via != want || who.Address != "192.0.2.1" {
			t.Errorf("%s: %+v, %v; want %s by %s", name, who, err, x.who, want)
		}
	}
	if n := issuer.Asks.Load(); n != 2 {
		t.Errorf("the provider was asked %d times, want once for what it is and once for its keys", n)
	}
	if strings.Contains(logged.String(), "eyJ") {
		t.Errorf("a token is in the log:\n%s", logged)
	}
}

func TestOIDCSignatures(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	old := issuer.Rotate("1")
	c, _, _ := oidcControl(t, issuer.URL)
	good := old.Token(claims(issuer.URL, nil))
	part := strings.Split(good, ".")
	enc := base64.RawURLEncoding.EncodeToString
	shared, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: bytes.Repeat([]byte{1}, 32)}, (&jose.SignerOptions{}).WithHeader("kid", "1"))
	if err != nil {
		t.Fatal(err)
	}
	hs256, err := jwt.Signed(shared).Claims(claims(issuer.URL, nil)).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	unknown, _ := accesstest.NewKey(t, "2")
	same, _ := accesstest.NewKey(t, "1")
	admin := enc([]byte(`{"iss":"` + issuer.URL + `","aud":"cakefleet","sub":"x","groups":"netops","exp":1900000100}`))
	for name, x := range map[string]struct{ text, says string }{
		"unknown key":            {unknown.Token(claims(issuer.URL, nil)), "not signed by a key"},
		"other key of that name": {same.Token(claims(issuer.URL, nil)), "not signed by a key"},
		"other claims":           {part[0] + "." + admin + "." + part[2], "not signed by a key"},
		"none":                   {enc([]byte(`{"alg":"none"}`)) + "." + admin + ".", "must be a JWT"},
		"HS256":                  {hs256, "must be a JWT"},
		"no signature":           {part[0] + "." + part[1] + ".", "not signed by a key"},
		"dots":                   {"..", "must be a JWT"},
		"long":                   {strings.Repeat("a", mostJWT) + "..", "longer than"},
		"in a password":          {good, "must be \"cfo1.\""},
	} {
		auth := "Bearer " + x.text
		if name == "in a password" {
			auth = "Basic " + base64.StdEncoding.EncodeToString([]byte("a:"+x.text))
		}
		_, err := c.Admit(Credentials{Authorization: auth, Address: "192.0.2.1"})
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: %v, want %q", name, err, x.says)
		} else if len(x.text) > 2 && strings.Contains(err.Error(), x.text) {
			t.Errorf("%s: the answer repeats the token", name)
		}
	}
	if _, err := c.Admit(Credentials{Authorization: "bearer " + good}); err != nil {
		t.Errorf("good: %v", err)
	}
	rotated := issuer.Rotate("3").Token(claims(issuer.URL, nil))
	if _, err := c.Admit(Credentials{Authorization: "Bearer " + rotated}); err != nil {
		t.Errorf("rotated key: %v", err)
	}
	if _, err := c.Admit(Credentials{Authorization: "Bearer " + good}); !errors.Is(err, ErrRefused) {
		t.Errorf("key that is gone: %v", err)
	}
}

// A provider that is away closes nothing else, is asked again with growing pauses
// by one caller at a time, and what it didn't say is held against nobody.
func TestOIDCIssuerAway(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	issuer.Down.Store(true)
	key := issuer.Rotate("1")
	c, now, logged := oidcControl(t, issuer.URL)
	admit := func(text string) error {
		_, err := c.Admit(Credentials{Authorization: "Bearer " + text, Address: "192.0.2.1"})
		return err
	}
	good := key.Token(claims(issuer.URL, nil))
	var wg sync.WaitGroup
	for range 2 * burst {
		wg.Go(func() {
			if err := admit(good); !errors.Is(err, ErrIssuer) || !strings.Contains(err.Error(), issuer.URL+": ") || !strings.Contains(err.Error(), "it answers 503") {
				t.Errorf("away: %v", err)
			}
		})
	}
	wg.Wait()
	if n := issuer.Asks.Load(); n != 1 {
		t.Errorf("asked %d times at once", n)
	}
	*now = now.Add(firstRetry)
	if err := admit(good); !errors.Is(err, ErrIssuer) || issuer.Asks.Load() != 2 {
		t.Errorf("%v, asked %d times", err, issuer.Asks.Load())
	}
	issuer.Down.Store(false)
	*now = now.Add(2*firstRetry - time.Millisecond)
	if err := admit(good); !errors.Is(err, ErrIssuer) || issuer.Asks.Load() != 2 {
		t.Errorf("before its time: %v, asked %d times", err, issuer.Asks.Load())
	}
	*now = now.Add(time.Millisecond)
	if err := admit(good); err != nil {
		t.Errorf("back: %v", err)
	}
	// Known keys need no provider; unknown ones can't be told from wrong ones.
	issuer.Down.Store(true)
	if err := admit(good); err != nil {
		t.Errorf("known key, away: %v", err)
	}
	unknown, _ := accesstest.NewKey(t, "2")
	if err := admit(unknown.Token(claims(issuer.URL, nil))); !errors.Is(err, ErrIssuer) {
		t.Errorf("unknown key, away: %v", err)
	}
	if strings.Contains(logged.String(), "eyJ") || strings.Count(logged.String(), "WARN") != 2 {
		t.Errorf("logged:\n%s", logged)
	}
}

// Strangers make the provider no more work than it is bounded to, and wait as
// after other refused logins.
func TestOIDCStrangers(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	good := issuer.Rotate("1").Token(claims(issuer.URL, nil))
	c, _, _ := oidcControl(t, issuer.URL)
	if _, err := c.Admit(Credentials{Authorization: "Bearer " + good}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	unknown, _ := accesstest.NewKey(t, "2")
	bad := unknown.Token(claims(issuer.URL, nil))
	for i := range 10 * askBurst {
		if _, err := c.Admit(Credentials{Authorization: "Bearer " + bad, Address: fmt.Sprintf("192.0.2.%d", i)}); err == nil {
			t.Fatal("let in")
		}
	}
	if n, most := issuer.Asks.Load(), askBurst+int64(time.Since(began).Seconds())+1; n > most {
		t.Errorf("asked %d times, want at most %d", n, most)
	}
	if _, err := c.Admit(Credentials{Authorization: "Bearer " + good}); err != nil {
		t.Errorf("a known key then: %v", err)
	}
	var err error
	for range burst + 1 {
		_, err = c.Admit(Credentials{Authorization: "Bearer a.b.c", Address: "198.51.100.1"})
	}
	if !errors.Is(err, ErrThrottled) {
		t.Errorf("after %d refused ones: %v", burst, err)
	}
}

func TestOIDCValidate(t *testing.T) {
	full := OIDC{Issuer: "https://id.example.net/isp", Audience: "cakefleet", RoleClaim: "groups", Roles: []OIDCRole{{identity.Admin, "netops"}}}
	for want, change := range map[string]func(*OIDC){
		"":                             func(*OIDC) {},
		"issuer is missing":            func(o *OIDC) { o.Issuer = "" },
		"audience is missing":          func(o *OIDC) { o.Audience = "" },
		"nobody would have a role":     func(o *OIDC) { o.Roles = nil },
		"http://id.isp: must be https": func(o *OIDC) { o.Issuer = "http://id.isp" },
		`"id.example.net": must be a`:  func(o *OIDC) { o.Issuer = "id.example.net" },
		"https://a:xxxxx@b":            func(o *OIDC) { o.Issuer = "https://a:secret@b" },
		"ftp://x: must be https":       func(o *OIDC) { o.Issuer = "ftp://x" },
		"missing protocol":             func(o *OIDC) { o.Issuer = ":" },
	} {
		o := full
		change(&o)
		if err := o.Validate(); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, o := range []OIDC{{}, {NameClaim: "email", RoleClaim: "groups"}} {
		if err := o.Validate(); err != nil {
			t.Errorf("without an issuer: %v", err)
		}
	}
	for _, u := range []string{"http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"} {
		o := full
		o.Issuer = u
		if err := o.Validate(); err != nil {
			t.Error(err)
		}
	}
	for text, ok := range map[string]bool{"admin=netops": true, "viewer=a=b": true, "root=x": false, "admin": false, "admin=": false} {
		if _, err := ParseOIDCRole(text); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}
