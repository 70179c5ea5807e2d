package identity

import (
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// authorityFiles returns where an authority is in a folder.
func authorityFiles(dir string) (certFile, keyFile string) {
	return filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")
}

// loadKeys returns the keys in a file: one, or two after Adopt was cut short.
func loadKeys(file string) (keys []crypto.Signer, err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	for {
		var block *pem.Block
		if block, raw = pem.Decode(raw); block == nil || block.Type != typeKey {
			break
		}
		key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("authority key %s: %w", file, err)
		}
		signer, ok := key.(crypto.Signer)
		if !ok {
			return nil, fmt.Errorf("authority key %s: a key of type %T can't sign", file, key)
		}
		keys = append(keys, signer)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("authority key %s: does not begin with a PEM block %q (PKCS #8)", file, typeKey)
	}
	return keys, nil
}

func makeKey(file string) (crypto.Signer, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	text, err := keyPEM(key)
	if err != nil {
		return nil, err
	}
	if err := writeFile(file, 0o600, text); err != nil {
		return nil, err
	}
	return key, nil
}

func keyPEM(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("authority key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: typeKey, Bytes: der}), nil
}

// writeFile replaces file so that, whenever the power fails, either the old or
// the new content is there, and nobody else could ever read a secret one.
func writeFile(file string, mode fs.FileMode, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", file, errors.Join(err, os.Remove(f.Name())))
		}
	}()
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), file); err != nil {
		return err
	}
	return syncDir(filepath.Dir(file))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
