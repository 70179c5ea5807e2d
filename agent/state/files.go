package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// files is what is needed of a file system; tests cut its power.
type files interface {
	read(path string) ([]byte, error)
	// writeSync makes the file with the content and forces it to the disk.
	writeSync(path string, b []byte, mode fs.FileMode) error
	rename(from, to string) error
	remove(path string) error
	// syncDir forces the directory's entries to the disk.
	syncDir(dir string) error
}

// WriteFile makes name in dir have the content b, or leaves it as it was,
// whatever happens to the power.
func WriteFile(dir, name string, b []byte) error {
	return replaceFile(osFiles{}, dir, name, b)
}

func replaceFile(f files, dir, name string, b []byte) error {
	path := filepath.Join(dir, name)
	temp := path + ".new"
	if err := f.writeSync(temp, b, 0o600); err != nil {
		// A full flash must not be kept full by what did not fit.
		if _, named := errors.AsType[*fs.PathError](err); !named {
			err = fmt.Errorf("write %s: %w", temp, err)
		}
		return errors.Join(err, ignoreMissing(f.remove(temp)))
	}
	if err := f.rename(temp, path); err != nil {
		return err
	}
	return f.syncDir(dir)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

type osFiles struct{}

func (osFiles) read(path string) ([]byte, error) { return os.ReadFile(path) }
func (osFiles) rename(from, to string) error     { return os.Rename(from, to) }
func (osFiles) remove(path string) error         { return os.Remove(path) }

func (osFiles) writeSync(path string, b []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (osFiles) syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
