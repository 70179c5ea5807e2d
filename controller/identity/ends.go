package identity

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// Certificate is one that a controller lives by, and what its end means.
type Certificate struct {
	Purpose string // "authority", "issuer of the authority", "agents' and operators' doors" or "HTTPS door"
	Subject string
	Begins  time.Time
	Ends    time.Time

	then string // what is so after its end, and what to do
}

// Certificates returns the authority's, those of its issuers and that of the
// doors, in this order.
func (a *Authority) Certificates() []Certificate {
	all := []Certificate{certificate("authority", a.cert,
		"no router, operator or controller of the fleet is trusted then; put another one in its place before: cakefleetctl ca rotate, and ca retire when all routers know it")}
	for _, c := range a.chain {
		all = append(all, certificate("issuer of the authority", c,
			"routers and operators go on, as they trust the authority itself; who verifies up to this issuer refuses the fleet then; have it renewed"))
	}
	doors := certificate("agents' and operators' doors", a.cert, "it ends with the authority, which makes another one at every start of a controller")
	doors.Subject = ServerName
	return append(all, doors)
}

// HTTPSDoor returns a certificate that was given for the HTTPS door, which is
// in a file.
func HTTPSDoor(leaf *x509.Certificate, file string) Certificate {
	return certificate("HTTPS door", leaf, "browsers and programs refuse the controller then; put a newer one in "+file+" and start the controller again")
}

func certificate(purpose string, c *x509.Certificate, then string) Certificate {
	return Certificate{Purpose: purpose, Subject: c.Subject.String(), Begins: c.NotBefore, Ends: c.NotAfter, then: then}
}

// When the end of a certificate is warned of, unless it lives so short that it
// would be always.
const (
	endingSoon = 30 * 24 * time.Hour
	endingNow  = 7 * 24 * time.Hour
	endingLast = 24 * time.Hour
)

// ErrEnding means that a certificate must be replaced now.
var ErrEnding = errors.New("must be replaced now")

// Ending returns an error with what is so then and what to do if the
// certificate has ended or does so soon: in a month, or in a quarter of its life
// if that is less. It is ErrEnding if there is a week or less left.
func (c Certificate) Ending(now time.Time) error {
	left, at := c.Ends.Sub(now), c.Ends.UTC().Format(time.RFC3339)
	name := fmt.Sprintf("the certificate of the %s (%s)", c.Purpose, c.Subject)
	if c.Purpose == "authority" {
		name = "the fleet's authority"
	}
	soon := min(endingSoon, c.Ends.Sub(c.Begins)/4)
	switch {
	case left <= 0:
		return fmt.Errorf("%s %w: it ended at %s: %s", name, ErrEnding, at, c.then)
	case left <= min(endingLast, soon):
		return fmt.Errorf("%s %w: it ends in less than %d hours, at %s: %s", name, ErrEnding, int(left.Hours())+1, at, c.then)
	case left <= min(endingNow, soon):
		return fmt.Errorf("%s %w: it ends in %s, at %s: %s", name, ErrEnding, days(left), at, c.then)
	case left <= soon:
		return fmt.Errorf("%s ends in %s, at %s: %s", name, days(left), at, c.then)
	}
	return nil
}

func days(d time.Duration) string {
	if d < 48*time.Hour {
		return fmt.Sprintf("%d hours", d/time.Hour)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}
