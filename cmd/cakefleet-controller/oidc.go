package main

import (
	"flag"

	"github.com/cakefleet/cakefleet/controller/access"
)

// oidcFlags adds the flags of the identity provider.
func oidcFlags(f *flag.FlagSet, o *access.OIDC) {
	f.StringVar(&o.Issuer, "oidc-issuer", "", "`URL` of an OpenID Connect identity provider whose tokens operators may come with, as Bearer, until they end (default none)")
	f.StringVar(&o.Audience, "oidc-audience", "", "`client` id that its tokens must be for")
	f.StringVar(&o.NameClaim, "oidc-name-claim", o.NameClaim, "`claim` with the operator's name; \"sub\" where it is missing, or an email address that is not verified")
	f.StringVar(&o.RoleClaim, "oidc-role-claim", o.RoleClaim, "`claim` whose values say what somebody may do")
	f.Func("oidc-role", "`ROLE=VALUE` gives those with the value a role, such as admin=netops; may be given again, and the highest role counts", func(s string) error {
		r, err := access.ParseOIDCRole(s)
		if err == nil {
			o.Roles = append(o.Roles, r)
		}
		return err
	})
}
