package state

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func example(rate engine.BitsPerSecond) State {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = rate, rate/10
	return State{
		Desired: plan.Desired{Revision: plan.Revision(rate), Hash: l.Hash(), Link: &l},
		Saved:   time.Unix(1_800_000_000, 0),
	}
}

func TestSaveAndOpen(t *testing.T) {
	dir := t.TempDir()
	s, _, details, err := Open(dir)
	if !errors.Is(err, ErrNone) || details != nil {
		t.Fatalf("empty directory: got error %v, details %v", err, details)
	}
	for _, want := range []State{example(10e6), example(20e6), example(30e6), {Desired: plan.Desired{Revision: 4}, Saved: time.Unix(1, 0)}} {
		if err := s.Save(want); err != nil {
			t.Fatal(err)
		}
		var got State
		if s, got, details, err = Open(dir); err != nil || details != nil {
			t.Fatalf("open: error %v, details %v", err, details)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	info, err := os.Stat(filepath.Join(dir, "state-a"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("state-a: %v, %v", info.Mode(), err)
	}
}

// Whatever byte of the newest file is cut off or flipped, the older one is
// read, and the damage is told.
func TestDamagedNewestMeansOlder(t *testing.T) {
	dir := t.TempDir()
	s, _, _, _ := Open(dir)
	older, newest := example(10e6), example(20e6)
	for _, st := range []State{older, newest} {
		if err := s.Save(st); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "state-b")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, got, details, err := Open(dir)
		if err != nil || !cmp.Equal(got, older) {
			t.Fatalf("%s: error %v, got %+v", what, err, got)
		}
		if details == nil {
			t.Fatalf("%s: the damage is not told", what)
		}
	}
	for n := range good {
		check(fmt.Sprintf("cut after %d bytes", n), good[:n])
		flipped := append([]byte(nil), good...)
		flipped[n] ^= 0x10
		check(fmt.Sprintf("byte %d flipped", n), flipped)
	}
}

func FuzzDecode(f *testing.F) {
	good, err := encode(example(10e6), 3)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, generation, err := decode(b)
		if err != nil {
			return
		}
		again, err := encode(st, generation)
		if err != nil {
			t.Fatalf("decoded but not encoded: %v", err)
		}
		if st2, g2, err := decode(again); err != nil || g2 != generation || !cmp.Equal(st, st2) {
			t.Fatalf("not the same after a round trip: %v", err)
		}
	})
}

// A power cut at any operation and any byte leaves the state of before or the
// new one, and Save having returned means the new one.
func TestPowerCut(t *testing.T) {
	states := []State{example(10e6), example(20e6), example(30e6)}
	for budget := 0; ; budget++ {
		disk := &powerCut{left: budget, volatile: map[string][]byte{}, durable: map[string][]byte{}}
		saved := -1 // index of the last state whose Save returned nil
		tried := -1
		s, _, _, _ := open("d", disk)
		for i, st := range states {
			tried = i
			if err := s.Save(st); err != nil {
				break
			}
			saved = i
		}
		// What the disk has after the cut: only what was forced to it, or
		// everything that was written by chance.
		for _, after := range []map[string][]byte{disk.durable, disk.volatile} {
			_, got, _, err := open("d", &powerCut{left: 1 << 30, volatile: after, durable: after})
			ok := saved < 0 && errors.Is(err, ErrNone)
			for _, i := range []int{saved, tried} {
				ok = ok || i >= 0 && err == nil && cmp.Equal(got, states[i])
			}
			if !ok {
				t.Fatalf("cut after %d steps, saved %d, tried %d: got %+v, error %v", budget, saved, tried, got.Desired.Revision, err)
			}
		}
		if saved == len(states)-1 {
			if budget < 3*100 {
				t.Fatalf("all was saved within %d steps: the cut does not cut", budget)
			}
			return
		}
	}
}

var errPower = errors.New("no power")

// powerCut is a disk whose power fails after a number of steps: a byte written
// or an operation done. durable has what was forced to it, with the entries of
// its one directory; volatile has what programs see.
type powerCut struct {
	left              int
	volatile, durable map[string][]byte
}

func (p *powerCut) step() bool { p.left--; return p.left >= 0 }

func (p *powerCut) read(path string) ([]byte, error) {
	b, ok := p.volatile[path]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return b, nil
}

func (p *powerCut) writeSync(path string, b []byte, _ fs.FileMode) error {
	p.volatile[path] = nil
	for i := range b {
		if !p.step() {
			return errPower
		}
		p.volatile[path] = b[:i+1]
	}
	if !p.step() {
		return errPower
	}
	return nil // the content is forced; its directory entry is not
}

func (p *powerCut) rename(from, to string) error {
	if !p.step() {
		return errPower
	}
	p.volatile[to] = p.volatile[from]
	delete(p.volatile, from)
	return nil
}

func (p *powerCut) remove(path string) error {
	if !p.step() {
		return errPower
	}
	delete(p.volatile, path)
	return nil
}

func (p *powerCut) syncDir(string) error {
	if !p.step() {
		return errPower
	}
	p.durable = maps.Clone(p.volatile)
	return nil
}

func TestFullFlashKeepsTheOldState(t *testing.T) {
	dir := t.TempDir()
	s, _, _, _ := Open(dir)
	if err := s.Save(example(10e6)); err != nil {
		t.Fatal(err)
	}
	s.fs = fullDisk{}
	if err := s.Save(example(20e6)); !errors.Is(err, errFull) {
		t.Fatalf("got %v, want %v", err, errFull)
	}
	s.fs = osFiles{}
	if err := s.Save(example(30e6)); err != nil {
		t.Fatal(err)
	}
	if _, got, _, err := Open(dir); err != nil || got.Desired.Revision != 30e6 {
		t.Errorf("got revision %d, %v", got.Desired.Revision, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("%d files are there, %v; want the two generations", len(entries), err)
	}
}

var errFull = errors.New("disk is full")

type fullDisk struct{ osFiles }

func (fullDisk) writeSync(path string, b []byte, mode fs.FileMode) error {
	return errors.Join(osFiles{}.writeSync(path, b[:len(b)/2], mode), errFull)
}

// A second agent in one directory is kept out, and what it is told says what to
// do. Locking writes nothing to flash.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	first, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(dir); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), dir) {
		t.Errorf("the second: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	again, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	if files, err := os.ReadDir(dir); len(files) != 0 || err != nil {
		t.Errorf("left are %v, %v", files, err)
	}
}
