// Package state keeps an agent's last known good state on flash, so that a
// router shapes before it has seen a controller. Two generations are kept: a
// write replaces the older one, so that whatever a power cut leaves of it, the
// newer one of before is still there.
package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// ErrNone means that no generation can be read: there was none, or both are
// damaged.
var ErrNone = errors.New("no saved state")

// State is what a router ran last and found good.
type State struct {
	Desired plan.Desired
	Saved   time.Time // by the router's own clock, which may have been wrong
}

// A file is, all numbers big-endian:
//
//	magic 4 | generation 8 | saved, Unix seconds 8 | length 4 | payload | SHA-256 of all before 32
const (
	magic      = "CFS1"
	headerSize = 4 + 8 + 8 + 4
	maxPayload = 64 << 10 // far above any link; a length beyond it is damage
)

// Store is a directory with the two generations. One goroutine at a time may
// use it.
type Store struct {
	dir    string
	fs     files
	newest uint64 // generation of the newest good file; 0 if none
	next   string // the file that the next Save replaces
}

// Open returns the store in dir and what it has. The error is ErrNone, with a
// store that can be saved to, if it has nothing that can be read; details tell
// of damage that was found.
func Open(dir string) (s *Store, st State, details error, err error) {
	return open(dir, osFiles{})
}

func open(dir string, f files) (*Store, State, error, error) {
	s := &Store{dir: dir, fs: f, next: "state-a"}
	var newest State
	var details error
	for _, name := range []string{"state-a", "state-b"} {
		st, generation, err := s.read(name)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				if _, named := errors.AsType[*fs.PathError](err); !named {
					err = fmt.Errorf("%s: %w", filepath.Join(dir, name), err)
				}
				details = errors.Join(details, err)
			}
			continue
		}
		if generation > s.newest {
			newest, s.newest, s.next = st, generation, other(name)
		}
	}
	if s.newest == 0 {
		return s, State{}, details, ErrNone
	}
	return s, newest, details, nil
}

// Save makes st the newest generation. When it returns nil, st survives a power
// cut; when it returns an error, what was saved before does.
func (s *Store) Save(st State) error {
	b, err := encode(st, s.newest+1)
	if err != nil {
		return fmt.Errorf("save state: %w", err)
	}
	if err := replaceFile(s.fs, s.dir, s.next, b); err != nil {
		return fmt.Errorf("save state: %w", err)
	}
	s.newest++
	s.next = other(s.next)
	return nil
}

func (s *Store) read(name string) (State, uint64, error) {
	b, err := s.fs.read(filepath.Join(s.dir, name))
	if err != nil {
		return State{}, 0, err
	}
	return decode(b)
}

func other(name string) string {
	if name == "state-a" {
		return "state-b"
	}
	return "state-a"
}

func encode(st State, generation uint64) ([]byte, error) {
	payload, err := wire.EncodeDesired(st.Desired)
	if err != nil {
		return nil, err
	}
	if len(payload) > maxPayload {
		return nil, fmt.Errorf("%d bytes, at most %d are allowed", len(payload), maxPayload)
	}
	b := []byte(magic)
	b = binary.BigEndian.AppendUint64(b, generation)
	b = binary.BigEndian.AppendUint64(b, uint64(st.Saved.Unix()))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, payload...)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

func decode(b []byte) (State, uint64, error) {
	if len(b) < headerSize+sha256.Size || string(b[:4]) != magic {
		return State{}, 0, errors.New("not a state file, or torn")
	}
	generation := binary.BigEndian.Uint64(b[4:])
	saved := time.Unix(int64(binary.BigEndian.Uint64(b[12:])), 0)
	length := binary.BigEndian.Uint32(b[20:])
	if length > maxPayload || len(b) != headerSize+int(length)+sha256.Size {
		return State{}, 0, errors.New("length does not fit: torn")
	}
	end := headerSize + int(length)
	if sum := sha256.Sum256(b[:end]); !bytes.Equal(sum[:], b[end:]) {
		return State{}, 0, errors.New("checksum does not fit: damaged")
	}
	if generation == 0 {
		return State{}, 0, errors.New("generation is 0")
	}
	d, err := wire.DecodeDesired(b[headerSize:end])
	if err != nil {
		return State{}, 0, err
	}
	if d.Link != nil {
		if err := d.Link.Validate(); err != nil {
			return State{}, 0, err
		}
	}
	return State{Desired: d, Saved: saved}, generation, nil
}

// Generation returns how often this store was written in its whole life.
func (s *Store) Generation() uint64 { return s.newest }
