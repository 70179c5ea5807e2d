package identity

import (
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"time"
)

// sealInfo says what the derived key is for.
const sealInfo = "cakefleet: key of the next authority"

// sealer returns what seals with the authority's key: whoever has it is a
// controller of the fleet, and can make any certificate anyhow.
func (a *Authority) sealer() (cipher.AEAD, error) {
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	key, err := hkdf.Key(sha256.New, der, nil, sealInfo, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// Seal returns the key of another authority as it may be kept in the store. Only
// who has the key of a can open it.
func (a *Authority) Seal(other *Authority) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(other.key)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	aead, err := a.sealer()
	if err != nil {
		return nil, err
	}
	return aead.Seal(nil, nil, der, other.cert.Raw), nil
}

// Unseal returns the authority with a certificate, in DER, and the key that
// Seal of a has sealed.
func (a *Authority) Unseal(cert, sealed []byte) (*Authority, error) {
	c, err := x509.ParseCertificate(cert)
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	aead, err := a.sealer()
	if err != nil {
		return nil, err
	}
	der, err := aead.Open(nil, nil, sealed, c.Raw)
	if err != nil {
		return nil, errSeal
	}
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, errSeal
	}
	signer, ok := key.(crypto.Signer)
	if pub, can := c.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !can || !pub.Equal(signer.Public()) {
		return nil, errSeal
	}
	return newAuthority(c, signer), nil
}

// Adopt makes a the authority in the folder dir, whatever there was. Between any
// two of its writes Open finds a whole authority there: the key file has both
// keys while the certificate changes.
func (a *Authority) Adopt(dir string, now time.Time) error {
	certFile, keyFile := authorityFiles(dir)
	mine, err := keyPEM(a.key)
	if err != nil {
		return err
	}
	if before, err := Load(certFile, keyFile, now); err == nil {
		if before.pin == a.pin {
			return nil
		}
		theirs, err := keyPEM(before.key)
		if err != nil {
			return err
		}
		if err := writeFile(keyFile, 0o600, append(append([]byte{}, mine...), theirs...)); err != nil {
			return err
		}
	} else if err := writeFile(keyFile, 0o600, mine); err != nil {
		return err
	}
	if err := writeFile(certFile, 0o644, a.CertificatePEM()); err != nil {
		return err
	}
	return writeFile(keyFile, 0o600, mine)
}
