package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// killedRows is enough for an import of several pieces.
const killedRows = 300

// importAll returns writes that change every subscriber that a generation of
// the fleet has, remove those that only the one before had, and add the rest:
// in each generation a tenth has other names.
func importAll(s *store.Store, rows, generation int) []store.SubscriberWrite {
	name := planOf(generation)
	wanted := map[string]bool{}
	var ws []store.SubscriberWrite
	s.View(func(st *store.State) {
		for i := range rows {
			id := fmt.Sprintf("s%06d", i)
			if i%10 == 0 {
				id += "-" + name
			}
			wanted[id] = true
			have, _ := st.Subscriber(id)
			sub := plan.Subscriber{ID: id, Plan: name, Labels: map[string]string{"is": name}}
			ws = append(ws, store.SubscriberWrite{Subscriber: sub, Expect: have.Revision})
		}
		for sub := range st.Subscribers("") {
			if !wanted[sub.ID] {
				ws = append(ws, store.SubscriberWrite{Subscriber: sub, Remove: true, Expect: sub.Revision})
			}
		}
	})
	return ws
}

func planOf(generation int) string { return fmt.Sprintf("plan%d", generation%2) }

// generation returns which generation all subscribers are of, or what is wrong.
func generation(st *store.State, rows int) (string, error) {
	name := ""
	n := 0
	for sub := range st.Subscribers("") {
		n++
		if name == "" {
			name = sub.Plan
		}
		if sub.Plan != name || sub.Labels["is"] != name || strings.Contains(sub.ID, "-") && !strings.HasSuffix(sub.ID, name) {
			return "", fmt.Errorf("subscriber %s has plan %s and labels %v, others have %s", sub.ID, sub.Plan, sub.Labels, name)
		}
	}
	if n != rows || st.CountSubscribers(name) != rows {
		return "", fmt.Errorf("%d subscribers, %d with plan %q, want %d", n, st.CountSubscribers(name), name, rows)
	}
	return name, nil
}

// killer is a KV that ends its process at one transaction.
type killer struct {
	store.KV
	at     int64 // number of the transaction, from 1
	before bool  // whether it ends before the transaction or after it
	txns   atomic.Int64
}

func (k *killer) Txn(ctx context.Context, compares []store.Compare, ops []store.Op) (store.TxnResult, error) {
	n := k.txns.Add(1)
	if n == k.at && k.before {
		die()
	}
	res, err := k.KV.Txn(ctx, compares, ops)
	if n == k.at && !k.before {
		die()
	}
	return res, err
}

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// envKill makes TestImportChild the process that is killed: directory, number
// of the transaction and "before" or "after".
const envKill = "CAKEFLEET_TEST_KILL"

// TestImportChild imports the second generation, and is killed at that.
func TestImportChild(t *testing.T) {
	words := strings.Split(os.Getenv(envKill), " ")
	if len(words) != 3 {
		t.Skip("is run by TestFleet067_ImportKilled")
	}
	at, err := strconv.Atoi(words[1])
	if err != nil {
		t.Fatal(err)
	}
	kv, err := store.OpenKV(t.Context(), store.Config{DataDir: words[0]})
	if err != nil {
		t.Fatal(err)
	}
	k := &killer{KV: kv, at: int64(at), before: words[2] == "before"}
	s := storetest.Start(t, k, store.Config{})
	if _, err := s.WriteSubscribers(t.Context(), importAll(s, killedRows, 1)); err != nil {
		t.Fatal(err)
	}
	until(t, "import is rolled forward", func() bool {
		items, _, err := kv.Get(t.Context(), store.Prefix+"import")
		return err == nil && len(items) == 0
	})
	fmt.Printf("transactions: %d\n", k.txns.Load())
}

// A process with an embedded etcd is killed before and after each transaction
// of an import. What the next process shows, at first and from then on, is the
// old fleet or the new one, and never anything between; and from the commit on
// it is the new one.
func TestFleet067_ImportKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes; run without -short")
	}
	t.Setenv("TMPDIR", "/tmp")
	base := t.TempDir()
	t.Run("old fleet", func(t *testing.T) {
		s := openEtcd(t, store.Config{DataDir: base})
		put(t, s, planOf(0))
		put(t, s, planOf(1))
		if n, err := s.WriteSubscribers(t.Context(), importAll(s, killedRows, 0)); err != nil || n != killedRows {
			t.Fatalf("%d written: %v", n, err)
		}
		until(t, "import is rolled forward", func() bool { return !strings.Contains(rawKeys(t, base), store.Prefix+"import") })
	})
	committed := false
	for at := 1; ; at++ {
		for _, when := range []string{"before", "after"} {
			dir := filepath.Join(t.TempDir(), "data")
			if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
				t.Fatal(err)
			}
			killed, out := child(t, dir, at, when)
			if !killed {
				// The whole import has fewer transactions.
				if want := fmt.Sprintf("transactions: %d", at-1); !strings.Contains(out, want) {
					t.Fatalf("child was not killed at transaction %d, but: %s", at, out)
				}
				if !committed || at < 6 {
					t.Errorf("%d transactions, committed: %t; there was too little to kill", at-1, committed)
				}
				return
			}
			name := fmt.Sprintf("%s transaction %d", when, at)
			t.Run(name, func(t *testing.T) {
				is := survives(t, dir)
				if committed && is != planOf(1) {
					t.Errorf("the old fleet is back, though the import was committed before")
				}
				committed = committed || is == planOf(1)
			})
		}
	}
}

// child runs the import in a process that is killed.
func child(t *testing.T, dir string, at int, when string) (killed bool, out string) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestImportChild$", "-test.v")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s", envKill, dir, at, when))
	b, err := c.CombinedOutput()
	if err == nil {
		return false, string(b)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !exit.Sys().(syscall.WaitStatus).Signaled() {
		t.Fatalf("child: %v\n%s", err, b)
	}
	return true, string(b)
}

// survives returns which fleet a directory has after a kill, and checks that it
// is whole, stays so, and that the next import goes through.
func survives(t *testing.T, dir string) string {
	t.Helper()
	s, err := store.OpenEtcd(t.Context(), store.Config{DataDir: dir, Logger: hclog.NewNullLogger()})
	if err != nil {
		t.Fatal(err)
	}
	is := whole(t, s)
	var mixed atomic.Pointer[string]
	storetest.Run(t, s, func(store.Change) {
		s.View(func(st *store.State) {
			if _, err := generation(st, killedRows); err != nil {
				text := err.Error()
				mixed.Store(&text)
			}
		})
	})
	// Waits for an import that is being rolled forward, and changes nothing.
	id := "s000001"
	var sub plan.Subscriber
	s.View(func(st *store.State) { sub, _ = st.Subscriber(id) })
	if _, err := s.PutSubscriber(t.Context(), sub, sub.Revision); err != nil {
		t.Errorf("write after the kill: %v", err)
	}
	if got := whole(t, s); got != is {
		t.Errorf("fleet is %s, was %s", got, is)
	}
	next := 1
	if is == planOf(1) {
		next = 0
	}
	if _, err := s.WriteSubscribers(t.Context(), importAll(s, killedRows, next)); err != nil {
		t.Errorf("next import: %v", err)
	}
	if got := whole(t, s); got != planOf(next) {
		t.Errorf("fleet is %s after an import of %s", got, planOf(next))
	}
	if text := mixed.Load(); text != nil {
		t.Errorf("a reader saw a mixture: %s", *text)
	}
	return is
}

func whole(t *testing.T, s *store.Store) (is string) {
	t.Helper()
	s.View(func(st *store.State) {
		var err error
		if is, err = generation(st, killedRows); err != nil {
			t.Error(err)
		}
	})
	return is
}

// rawKeys returns all keys that etcd has in a data directory in use.
func rawKeys(t *testing.T, dir string) string {
	t.Helper()
	resp, err := raw(t, "unix://"+filepath.Join(dir, "etcd", "client.sock")).Get(t.Context(), "/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, kv := range resp.Kvs {
		b.Write(kv.Key)
		b.WriteByte('\n')
	}
	return b.String()
}

// Readers on the controller that imports and on another one see one fleet or
// the other while imports go on, and what is staged is gone in the end.
func TestImportIsSeenWhole(t *testing.T) {
	rows := 3000
	dir := shortDir(t)
	endpoint := "unix://" + filepath.Join(dir, "etcd", "client.sock")
	a := openEtcd(t, store.Config{DataDir: dir})
	put(t, a, planOf(0))
	put(t, a, planOf(1))
	if _, err := a.WriteSubscribers(t.Context(), importAll(a, rows, 0)); err != nil {
		t.Fatal(err)
	}
	b := openEtcd(t, store.Config{Endpoints: []string{endpoint}})
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan map[string]int, 2)
	for _, s := range []*store.Store{a, b} {
		go func() {
			fleets := map[string]int{}
			for ctx.Err() == nil {
				s.View(func(st *store.State) {
					is, err := generation(st, rows)
					if err != nil {
						is = err.Error()
					}
					fleets[is]++
				})
				time.Sleep(time.Millisecond)
			}
			seen <- fleets
		}()
	}
	for g := 1; g <= 4; g++ {
		from := []*store.Store{a, b}[g%2]
		for {
			_, err := from.WriteSubscribers(t.Context(), importAll(from, rows, g))
			if err == nil {
				break
			}
			if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrNotFound) && !errors.Is(err, store.ErrExists) {
				t.Fatal(err)
			}
		}
	}
	until(t, "everything is rolled forward", func() bool { return !strings.Contains(rawKeys(t, dir), store.Prefix+"import") })
	cancel()
	for range 2 {
		fleets := <-seen
		if len(fleets) != 2 || fleets[planOf(0)] == 0 || fleets[planOf(1)] == 0 {
			t.Errorf("seen: %v, want both fleets and nothing else", fleets)
		}
	}
}

// An import that overlaps another write of the same subscriber does nothing,
// and one whose plan goes away meanwhile neither.
func TestImportIsAllOrNothing(t *testing.T) {
	s := storetest.NewFake(t)
	put(t, s, "plan0")
	put(t, s, "plan1")
	if _, err := s.WriteSubscribers(t.Context(), importAll(s, 500, 0)); err != nil {
		t.Fatal(err)
	}
	writes := importAll(s, 500, 1)
	if _, err := s.PutRouter(t.Context(), plan.Router{ID: "r1", Subscriber: "s000010-plan0"}, 0); err != nil {
		t.Fatal(err)
	}
	n, err := s.WriteSubscribers(t.Context(), writes)
	var e *store.Error
	if n != 0 || !errors.Is(err, store.ErrInUse) || !errors.As(err, &e) || e.ID != "s000010-plan0" {
		t.Errorf("%d written: %v, want that s000010-plan0 is in use", n, err)
	}
	if err := s.DeleteRouter(t.Context(), "r1", store.Any); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutSubscriber(t.Context(), plan.Subscriber{ID: "s000499", Plan: "plan0", Labels: map[string]string{"is": "plan0"}}, store.Any); err != nil {
		t.Fatal(err)
	}
	n, err = s.WriteSubscribers(t.Context(), writes)
	if n != 0 || !errors.Is(err, store.ErrConflict) || !errors.As(err, &e) || e.ID != "s000499" {
		t.Errorf("%d written: %v, want a conflict of s000499", n, err)
	}
	if _, err := s.DeletePlan(t.Context(), "plan1", "", store.Any); err != nil {
		t.Fatal(err)
	}
	n, err = s.WriteSubscribers(t.Context(), importAll(s, 500, 1))
	if n != 0 || !errors.Is(err, store.ErrDangling) {
		t.Errorf("%d written: %v, want that the plan is missing", n, err)
	}
	s.View(func(st *store.State) {
		if is, err := generation(st, 500); is != "plan0" {
			t.Errorf("fleet is %q: %v", is, err)
		}
	})
}
