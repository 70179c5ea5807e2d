package identity

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"time"
)

// Session tickets let a client that comes back leave the certificates out, also
// at another controller. Their keys are derived from the key of the authority that
// signs, so that all controllers have the same ones and none is stored: who has
// that key can make any certificate anyhow. A key is good for a day, and two more
// for reading. The names of the authorities and of the door are in it: no ticket
// outlives a change of authorities, or opens another door.
//
// A ticket has the client's certificate, and the handshake refuses it when that
// has ended. Whether its key is revoked is asked at every session and call, as it
// is after a whole handshake. Each handshake has an exchange of its own, so that
// who gets a ticket key later can't read what was said.

// ticketLife is how long a key makes tickets.
const ticketLife = 24 * time.Hour

// ticketKeys returns the keys at a time, that for new tickets first. secret is
// another one for doors whose tickets are for this controller alone; empty: for
// all.
func (s *Set) ticketKeys(door string, secret []byte, now time.Time) ([][32]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(s.signs.key)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	id := s.ID()
	salt := append(id[:], secret...)
	day := now.Unix() / int64(ticketLife/time.Second)
	var keys [][32]byte
	// Tomorrow's is for controllers whose clock is ahead.
	for _, d := range []int64{day, day - 1, day + 1} {
		info := binary.BigEndian.AppendUint64([]byte("cakefleet: session tickets: "+door+": "), uint64(d))
		key, err := hkdf.Key(sha256.New, der, salt, string(info), 32)
		if err != nil {
			return nil, fmt.Errorf("ticket key: %w", err)
		}
		keys = append(keys, [32]byte(key))
	}
	return keys, nil
}

// useTickets gives a door's configuration the keys of a time.
func (d *doorTLS) useTickets(c *tls.Config, s *Set, now time.Time) error {
	keys, err := s.ticketKeys(d.name, d.secret, now)
	if err != nil {
		return err
	}
	c.SetSessionTicketKeys(keys)
	return nil
}

// RenewTickets gives all doors the ticket keys of a time. It is to be called
// several times a day.
func (t *Trust) RenewTickets(now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.doors {
		if d.name == "" {
			continue // it is for calls
		}
		if err := d.useTickets(d.now.Load(), t.Set(), now); err != nil {
			return err
		}
	}
	return nil
}

// ownSecret returns what keeps a door's tickets to this process.
func ownSecret() []byte {
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never returns an error
	return secret
}
