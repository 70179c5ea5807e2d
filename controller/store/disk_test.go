package store_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// When the disk is full, etcd dies; the store's Run ends with a sentence that
// says so. With space all is there that was confirmed.
func TestDiskIsFull(t *testing.T) {
	dir := t.TempDir()
	// etcd sets aside 64 MB for its log and, beside its work, as much for the
	// next piece of it: with less, the start fails or not, as it happens.
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=160m"); err != nil {
		t.Skipf("a small disk needs root: %v", err)
	}
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	s, err := store.OpenEtcd(t.Context(), store.Config{DataDir: dir})
	must(t, err)
	ran := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { ran <- s.Run(ctx) }()
	put(t, s, "gold")
	ballast := filepath.Join(dir, "ballast")
	for size := 1 << 20; size >= 4096; size /= 2 {
		f, err := os.OpenFile(ballast, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		must(t, err)
		for err == nil {
			_, err = f.Write(make([]byte, size))
		}
		must(t, f.Close())
	}
	confirmed := 0
	label := strings.Repeat("x", 200)
	writes, stop := context.WithTimeout(t.Context(), 5*time.Minute)
	defer stop()
	go func() {
		err := <-ran
		ran <- err
		stop()
	}()
	for i := 0; writes.Err() == nil; i++ {
		sub := plan.Subscriber{ID: fmt.Sprintf("s%07d", i), Plan: "gold", Labels: map[string]string{"a": label, "b": label, "c": label, "d": label}}
		if _, err := s.PutSubscriber(writes, sub, 0); err != nil {
			break
		}
		confirmed++
	}
	err = <-ran
	if err == nil || !strings.Contains(err.Error(), "is full") || !strings.Contains(err.Error(), dir) {
		t.Fatalf("run ended with %v, after %d writes", err, confirmed)
	}
	t.Logf("after %d writes: %v", confirmed, err)
	must(t, s.Close())

	// The dead server of this process keeps its locks: go on with a copy.
	if err := startOn(t, dir); err == nil {
		t.Error("started beside a dead server")
	}
	room := t.TempDir()
	must(t, os.CopyFS(filepath.Join(room, "etcd", "member"), os.DirFS(filepath.Join(dir, "etcd", "member"))))
	after := openEtcd(t, store.Config{DataDir: room})
	if _, subs, _ := count(after); subs < confirmed {
		t.Errorf("%d subscribers of %d that were confirmed", subs, confirmed)
	}
}

func count(s *store.Store) (plans, subscribers, routers int) {
	s.View(func(st *store.State) { plans, subscribers, routers = st.Len() })
	return plans, subscribers, routers
}
