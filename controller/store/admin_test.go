package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// fillEtcd writes until etcd is full.
func fillEtcd(t *testing.T, s *store.Store) {
	t.Helper()
	label := strings.Repeat("x", 256)
	var err error
	for i := 0; err == nil && i < 2000; i++ {
		ws := make([]store.SubscriberWrite, 40)
		for j := range ws {
			// The same ones over and over: what fills etcd is their history.
			ws[j].Subscriber = plan.Subscriber{ID: fmt.Sprint(j), Plan: "gold", Labels: map[string]string{"a": label, "b": label}}
			s.View(func(st *store.State) {
				have, _ := st.Subscriber(ws[j].Subscriber.ID)
				ws[j].Expect = have.Revision
			})
		}
		_, err = s.WriteSubscribers(t.Context(), ws)
	}
	if !errors.Is(err, store.ErrFull) {
		t.Fatalf("got %v, want that the store is full", err)
	}
}

// When etcd is full, what is known can be read, it says how it is, and a repair
// makes room without anybody deleting anything.
func TestFleet069_RepairWhenFull(t *testing.T) {
	ctx := t.Context()
	s := openEtcd(t, store.Config{Quota: 4 << 20, Logger: hclog.NewNullLogger()})
	put(t, s, "gold")
	fillEtcd(t, s)
	st, err := s.EtcdStatus(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Members) != 1 || !st.Full() || !st.Embedded || st.Free <= 0 || st.Members[0].Quota != 4<<20 || !st.Members[0].Leader {
		t.Errorf("status is %+v", st)
	}
	if _, err := s.PutPlan(ctx, storetest.Plan("iron", 1, 1), 0); !errors.Is(err, store.ErrFull) || !strings.Contains(err.Error(), "doctor --repair") {
		t.Errorf("a write while full gives %v", err)
	}
	if !hasPlan(s, "gold") {
		t.Error("what is known can't be read")
	}
	// The way out is to delete; the audit log is told as soon as it takes anything.
	removed := ""
	s.View(func(st *store.State) {
		for sub := range st.Subscribers("") {
			removed = sub.ID
			break
		}
	})
	if err := s.DeleteSubscriber(by(t, "alice", "DeleteSubscriber"), removed, store.Any); err != nil {
		t.Errorf("delete while full: %v", err)
	}
	if got := entries(t, s); len(got) != 0 && got[0].Actor.Name == "alice" {
		t.Errorf("a full store has taken %+v", got[0])
	}
	var steps []string
	if err := s.RepairEtcd(ctx, func(step string) { steps = append(steps, step) }); err != nil {
		t.Fatalf("%v, after %q", err, steps)
	}
	if len(steps) != 3 {
		t.Errorf("steps are %q", steps)
	}
	after, err := s.EtcdStatus(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if after.Full() || after.Members[0].Size >= st.Members[0].Size/2 {
		t.Errorf("repaired from %+v to %+v", st, after)
	}
	put(t, s, "iron")
	s.View(func(st *store.State) {
		if _, subs, _ := st.Len(); subs != 39 {
			t.Errorf("%d subscribers after the repair, of 39", subs)
		}
	})
	told := slices.ContainsFunc(entries(t, s), func(e store.AuditEntry) bool {
		return e.Actor.Name == "alice" && e.Removed == 1 && e.Changes[0].ID == removed && e.Changes[0].New == nil
	})
	if !told {
		t.Errorf("the audit log is not told of what was deleted while the store was full: %+v", entries(t, s))
	}
}

// A controller whose watch begins below what was compacted meanwhile lists,
// and has lost nothing of what was changed, made or deleted.
func TestCompactedWatch(t *testing.T) {
	ctx := t.Context()
	a, endpoint := startEtcd(t)
	changed := put(t, a, "changed")
	put(t, a, "deleted")
	cut := &cutKV{}
	kv, err := store.OpenKV(ctx, store.Config{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	cut.KV = kv
	b := storetest.Start(t, cut, store.Config{})
	put(t, a, "before")
	until(t, "b watches", func() bool { return hasPlan(b, "before") })
	cut.set(true)
	changed.Link.Down.Rate = 77e6
	if _, err := a.PutPlan(ctx, changed, changed.Revision); err != nil {
		t.Fatal(err)
	}
	if _, err := a.DeletePlan(ctx, "deleted", "", store.Any); err != nil {
		t.Fatal(err)
	}
	put(t, a, "made")
	if _, err := raw(t, endpoint).Compact(ctx, int64(a.Revision()), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if hasPlan(b, "made") {
		t.Fatal("b is not cut off")
	}
	cut.set(false)
	until(t, "b has all", func() bool { return hasPlan(b, "made") })
	b.View(func(st *store.State) {
		p, _ := st.Plan("changed")
		if _, there := st.Plan("deleted"); there || p.Link.Down.Rate != 77e6 {
			t.Errorf("deleted is there: %t; changed has %v", there, p.Link.Down.Rate)
		}
	})
	put(t, a, "after")
	until(t, "b watches again", func() bool { return hasPlan(b, "after") })
}

// cutKV is a KV whose watches end while it is cut off.
type cutKV struct {
	store.KV
	mu   sync.Mutex
	cut  bool
	ends []context.CancelCauseFunc
}

func (c *cutKV) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	for _, end := range c.ends {
		end(store.ErrUnavailable)
	}
	c.ends = nil
}

func (c *cutKV) Watch(ctx context.Context, prefix string, after int64, seen func(store.Batch)) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	c.mu.Lock()
	if c.cut {
		c.mu.Unlock()
		return store.ErrUnavailable
	}
	c.ends = append(c.ends, end)
	c.mu.Unlock()
	return c.KV.Watch(ctx, prefix, after, seen)
}

// Endpoints that don't answer are named, with the reason, again and again until
// the end is asked for.
func TestEndpointsAreNamed(t *testing.T) {
	// One that refuses, and one that says nothing.
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mute.Close() }()
	var log bytes.Buffer
	var mu sync.Mutex
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := store.OpenEtcd(ctx, store.Config{
			Endpoints: []string{"http://127.0.0.1:1", "http://" + mute.Addr().String()},
			Logger:    hclog.New(&hclog.LoggerOptions{Level: hclog.Warn, Output: &log, Mutex: &mu}),
		})
		done <- err
	}()
	said := func() string {
		mu.Lock()
		defer mu.Unlock()
		return log.String()
	}
	until(t, "both are named, twice", func() bool { return strings.Count(said(), mute.Addr().String()) >= 2 })
	for _, want := range []string{"127.0.0.1:1", "refused", "no answer within", "try again"} {
		if !strings.Contains(said(), want) {
			t.Errorf("nothing about %q in\n%s", want, said())
		}
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("does not end when asked")
	}
}

// startOn tries to start a store on a directory and returns what it says.
func startOn(t *testing.T, dir string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := store.OpenEtcd(ctx, store.Config{DataDir: dir})
	if err == nil {
		_ = s.Close()
	}
	return err
}

// Data that can't be used is no panic, no silence and no waiting for ever, but
// a sentence with what to do.
func TestBrokenData(t *testing.T) {
	whole := t.TempDir()
	t.Run("make", func(t *testing.T) { put(t, openEtcd(t, store.Config{DataDir: whole}), "gold") })
	logs := func(dir string) string { return filepath.Join(dir, "etcd", "member", "wal") }
	db := func(dir string) string { return filepath.Join(dir, "etcd", "member", "snap", "db") }
	for _, c := range []struct {
		name    string
		harm    func(t *testing.T, dir string)
		mention []string
	}{
		{"log is gone", func(t *testing.T, dir string) { must(t, os.RemoveAll(logs(dir))) }, []string{"its log in", "is gone", "restore --from"}},
		{"log is empty", func(t *testing.T, dir string) {
			must(t, os.RemoveAll(logs(dir)))
			must(t, os.Mkdir(logs(dir), 0o700))
		}, []string{"its log in", "is gone"}},
		{"database is cut", func(t *testing.T, dir string) { must(t, os.Truncate(db(dir), 5000)) }, []string{"damaged", "restore --from"}},
		{"database is noise", func(t *testing.T, dir string) {
			must(t, os.WriteFile(db(dir), bytes.Repeat([]byte("noise"), 20000), 0o600))
		}, []string{"damaged", "restore --from"}},
		{"log is noise", func(t *testing.T, dir string) {
			files, err := filepath.Glob(filepath.Join(logs(dir), "*.wal"))
			must(t, err)
			must(t, os.WriteFile(files[0], bytes.Repeat([]byte("noise"), 20000), 0o600))
		}, []string{"damaged", "restore --from"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.CopyFS(dir, os.DirFS(whole)))
			c.harm(t, dir)
			err := startOn(t, dir)
			if err == nil {
				t.Fatal("started")
			}
			t.Log(err)
			for _, want := range append(c.mention, dir) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("nothing about %q in %v", want, err)
				}
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// backup writes a backup of s to a new file in dir.
func backup(t *testing.T, s *store.Store, dir string) string {
	t.Helper()
	r, size, err := s.Snapshot(t.Context())
	must(t, err)
	b, err := io.ReadAll(r)
	must(t, err)
	must(t, r.Close())
	if int64(len(b)) < size/2 {
		t.Errorf("backup has %d bytes, about %d were said", len(b), size)
	}
	file := filepath.Join(dir, "backup")
	must(t, os.WriteFile(file, b, 0o600))
	return file
}

func TestRestore(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	away := t.TempDir()
	var file string
	var then, lost plan.Revision
	t.Run("before", func(t *testing.T) {
		s := openEtcd(t, store.Config{DataDir: dir})
		put(t, s, "gold")
		then = s.Revision()
		file = backup(t, s, away)
		lost = put(t, s, "lost").Revision
		if _, err := store.Restore(ctx, store.RestoreConfig{File: file, DataDir: dir, Replace: true}); err == nil || !strings.Contains(err.Error(), "another controller is running") {
			t.Errorf("restored under a running controller: %v", err)
		}
	})
	if _, err := store.Restore(ctx, store.RestoreConfig{File: file, DataDir: dir}); err == nil || !strings.Contains(err.Error(), "--replace") {
		t.Errorf("restored over data: %v", err)
	}
	res, err := store.Restore(ctx, store.RestoreConfig{File: file, DataDir: dir, Replace: true})
	must(t, err)
	if res.Revision != then || !res.Checked || res.Moved == "" {
		t.Errorf("result %+v, backup of revision %d", res, then)
	}
	if _, err := os.Stat(filepath.Join(res.Moved, "member", "snap", "db")); err != nil {
		t.Errorf("the old data: %v", err)
	}
	s := openEtcd(t, store.Config{DataDir: dir})
	if !hasPlan(s, "gold") || hasPlan(s, "lost") {
		t.Errorf("gold is there: %t, lost is there: %t", hasPlan(s, "gold"), hasPlan(s, "lost"))
	}
	p := put(t, s, "new")
	var r store.Restored
	s.View(func(st *store.State) { r, _ = st.Restored() })
	if r.Accepted || r.Revision != then || !r.Forgot(lost) || r.Forgot(then) || r.Forgot(p.Revision) {
		t.Errorf("restored %+v; backup %d, lost %d, new %d", r, then, lost, p.Revision)
	}
	r, err = s.AcceptRestore(ctx, 0, "ann")
	must(t, err)
	s.View(func(st *store.State) {
		if got, _ := st.Restored(); got != r || !got.Accepted || got.By != "ann" || !got.Forgot(lost) {
			t.Errorf("accepted %+v, stored %+v", r, got)
		}
	})
}

// The database alone, without a checksum, can be restored, for when the log is
// gone.
func TestRestoreDatabase(t *testing.T) {
	dir := t.TempDir()
	t.Run("before", func(t *testing.T) { put(t, openEtcd(t, store.Config{DataDir: dir}), "gold") })
	member := filepath.Join(dir, "etcd", "member")
	must(t, os.RemoveAll(filepath.Join(member, "wal")))
	res, err := store.Restore(t.Context(), store.RestoreConfig{File: filepath.Join(member, "snap", "db"), DataDir: dir, Replace: true})
	must(t, err)
	if res.Checked {
		t.Error("a database has no checksum")
	}
	if !hasPlan(openEtcd(t, store.Config{DataDir: dir}), "gold") {
		t.Error("plan is gone")
	}
}

// What is no backup, or not a whole one, changes nothing.
func TestRestoreRefuses(t *testing.T) {
	var good string
	t.Run("make", func(t *testing.T) {
		s := openEtcd(t, store.Config{})
		put(t, s, "gold")
		file := backup(t, s, t.TempDir())
		b, err := os.ReadFile(file)
		must(t, err)
		good = string(b)
	})
	flipped := []byte(good)
	flipped[len(flipped)/2] ^= 1
	for name, text := range map[string]string{
		"empty": "", "text": "hello", "cut": good[:len(good)-4096], "cut oddly": good[:len(good)-1000],
		"flipped": string(flipped), "noise": strings.Repeat("noise!!!", 1024),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(t.TempDir(), "backup")
			must(t, os.WriteFile(file, []byte(text), 0o600))
			_, err := store.Restore(t.Context(), store.RestoreConfig{File: file, DataDir: dir})
			if err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("got %v", err)
			}
			t.Log(err)
			left, err := os.ReadDir(dir)
			must(t, err)
			if len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
