package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// revisionBump is how far revisions jump at a restore, so that no revision
// means one thing before and another thing after. It is more than a fleet
// writes after its last backup.
const revisionBump = 1_000_000_000

// lastRestore is the id of the one record of its kind.
const lastRestore = "last"

// Restored says that the store was made from a backup, or is older than what
// the routers know for another reason. What a router got at a revision after
// Revision and up to Until is not known here: it was forgotten.
type Restored struct {
	Revision plan.Revision // newest of the backup
	Until    plan.Revision // newest that may have been given out afterwards
	Time     time.Time     // of the restore
	Accepted bool          // whether routers may be moved back to what the backup has
	By       string        // who accepted
	Stored   plan.Revision // of the record itself
}

// Forgot tells whether what a router got at a revision is not known any more.
func (r Restored) Forgot(rev plan.Revision) bool { return rev > r.Revision && rev <= r.Until }

type restoredRecord struct {
	Schema   int           `json:"schema"`
	Revision plan.Revision `json:"revision"`
	Until    plan.Revision `json:"until"`
	Time     time.Time     `json:"time"`
	Accepted bool          `json:"accepted"`
	By       string        `json:"by,omitempty"`
}

func (r Restored) encode() []byte {
	return encode(restoredRecord{schema, r.Revision, r.Until, r.Time, r.Accepted, r.By})
}

func decodeRestored(value []byte, rev plan.Revision) (Restored, error) {
	var r restoredRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return Restored{}, err
	}
	return Restored{r.Revision, r.Until, r.Time, r.Accepted, r.By, rev}, nil
}

// Restored returns what is known of the last restore; ok is false if there was
// none.
func (s *State) Restored() (r Restored, ok bool) {
	r, ok = s.restores.byID[lastRestore]
	return r, ok
}

// Known returns which revisions the state knows.
func (s *State) Known() plan.Known {
	k := plan.Known{Revision: s.revision}
	if r, ok := s.Restored(); ok {
		k.Above, k.Until, k.Accepted = r.Revision, r.Until, r.Accepted
	}
	return k
}

// AcceptRestore lets all routers be moved back that run what the store does
// not know. until is the newest revision that any of them runs; it counts if no
// restore is on record.
func (s *Store) AcceptRestore(ctx context.Context, until plan.Revision, by string) (Restored, error) {
	for range attempts {
		var r Restored
		var was plan.Revision
		s.View(func(st *State) {
			var ok bool
			if r, ok = st.Restored(); !ok {
				r = Restored{Revision: st.Revision(), Time: stamp()}
			}
			was = r.Stored
		})
		r.Until = max(r.Until, until)
		r.Accepted, r.By = true, by
		rev, err := s.put(ctx, write{kind: KindRestore, id: lastRestore, value: r.encode(), expect: was})
		if errors.Is(err, ErrConflict) || errors.Is(err, ErrExists) {
			continue
		}
		r.Stored = rev
		return r, err
	}
	return Restored{}, fmt.Errorf("accept the restore: %w", errBusy)
}

// RestoreConfig says what Restore does.
type RestoreConfig struct {
	File    string       // the backup, or the database of an etcd that is stopped
	DataDir string       // of the controller
	Replace bool         // move an etcd that is there out of the way
	Logger  hclog.Logger // nil: none
}

// RestoreResult says what Restore did.
type RestoreResult struct {
	Revision plan.Revision // newest of the backup
	Checked  bool          // whether the backup had a checksum, which was right
	Moved    string        // where the etcd is that was there; empty if none was
}

// Restore makes the embedded etcd of a data directory from a backup. No
// controller may run on it. It is done as a whole or not at all. Routers that
// know more than the backup are not moved back until AcceptRestore.
func Restore(ctx context.Context, c RestoreConfig) (res RestoreResult, err error) {
	fail := func(err error) (RestoreResult, error) {
		return RestoreResult{}, fmt.Errorf("restore %s: %w", c.File, err)
	}
	dir, err := filepath.Abs(c.DataDir)
	if err != nil {
		return fail(err)
	}
	final := filepath.Join(dir, "etcd")
	lock, err := free(final)
	if err != nil {
		return fail(err)
	}
	if lock != nil {
		defer func() { _ = lock.Close() }() // a lock on what has moved is of no use to anybody
		if !c.Replace {
			return fail(fmt.Errorf("%s has data; with --replace it is moved out of the way, not deleted", final))
		}
	}
	if res.Checked, err = checkBackup(c.File); err != nil {
		return fail(err)
	}
	fresh := filepath.Join(dir, "restoring")
	if err := errors.Join(os.RemoveAll(fresh), os.MkdirAll(fresh, 0o700)); err != nil {
		return fail(err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(fresh)) }()
	if res.Revision, err = unpack(c, filepath.Join(fresh, "etcd"), !res.Checked); err != nil {
		return fail(err)
	}
	if err := mark(ctx, Config{DataDir: fresh, Logger: c.Logger}, res.Revision); err != nil {
		return fail(err)
	}
	if lock != nil {
		res.Moved = filepath.Join(dir, "etcd-until-"+time.Now().UTC().Format("20060102T150405Z"))
		if err := os.Rename(final, res.Moved); err != nil {
			return fail(err)
		}
	} else if err := os.RemoveAll(final); err != nil { // an empty one
		return fail(err)
	}
	if err := os.Rename(filepath.Join(fresh, "etcd"), final); err != nil {
		return fail(err)
	}
	return res, syncDir(dir)
}

// free takes the lock on a directory of etcd that has data; nil if it has none.
func free(dir string) (*os.File, error) {
	if _, err := os.Stat(filepath.Join(dir, "member")); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return lockDir(dir)
}

// checkBackup reads a file whole. checked is false if it has no checksum, as
// the database of a stopped etcd has not.
func checkBackup(file string) (checked bool, err error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	const block = 512
	switch {
	case !info.Mode().IsRegular():
		return false, errors.New("is not a file")
	case info.Size() < 2*block:
		return false, fmt.Errorf("is no backup: it has only %d bytes", info.Size())
	case info.Size()%block == 0:
		return false, nil
	case info.Size()%block != sha256.Size:
		return false, errors.New("is no backup, or not all of one")
	}
	h := sha256.New()
	if _, err := io.CopyN(h, f, info.Size()-sha256.Size); err != nil {
		return false, err
	}
	want, err := io.ReadAll(f)
	if err != nil {
		return false, err
	}
	if !bytes.Equal(h.Sum(nil), want) {
		return false, errors.New("is damaged: its checksum is another one")
	}
	return true, nil
}

// unpack makes a directory of etcd from a backup and returns the newest
// revision of that.
func unpack(c RestoreConfig, dir string, unchecked bool) (rev plan.Revision, err error) {
	defer func() {
		if p := recover(); p != nil { // bbolt's word for a file that is damaged
			err = fmt.Errorf("is damaged: %v", p)
		}
	}()
	m := snapshot.NewV3(zap.New(newCore(c.Logger)))
	st, err := m.Status(c.File)
	if err != nil {
		return 0, fmt.Errorf("is damaged, or not of an etcd: %w", err)
	}
	err = m.Restore(snapshot.RestoreConfig{
		SnapshotPath: c.File, SkipHashCheck: unchecked,
		Name: memberName, OutputDataDir: dir,
		PeerURLs: []string{memberPeer}, InitialCluster: memberName + "=" + memberPeer, InitialClusterToken: memberName,
		// Watches that begin before must list, and no old revision comes again.
		RevisionBump: revisionBump, MarkCompacted: true,
	})
	return plan.Revision(st.Revision), err
}

// mark writes down in a restored etcd what it has forgotten.
func mark(ctx context.Context, c Config, rev plan.Revision) (err error) {
	kv, err := startEmbedded(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kv.Close()) }()
	items, now, err := kv.List(ctx, Prefix)
	if err != nil {
		return err
	}
	if len(items) == 0 {
		return errors.New("has nothing of a fleet in it")
	}
	r := Restored{Revision: rev, Until: plan.Revision(now), Time: stamp()}
	_, err = kv.Txn(ctx, nil, []Op{{key(KindRestore, lastRestore), r.encode()}})
	return err
}

// syncDir makes renames in a directory last.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
