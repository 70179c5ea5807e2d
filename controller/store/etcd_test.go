package store_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestEmbeddedEtcd(t *testing.T) {
	storetest.Suite(t, func(t *testing.T, onChange ...func(store.Change)) *store.Store {
		return openEtcd(t, store.Config{}, onChange...)
	})
}

// A cluster is reached through its endpoints; here it is the client socket of
// an embedded etcd.
func TestEtcdAtEndpoints(t *testing.T) {
	storetest.Suite(t, func(t *testing.T, onChange ...func(store.Change)) *store.Store {
		_, socket := startEtcd(t)
		return openEtcd(t, store.Config{Endpoints: []string{socket}}, onChange...)
	})
}

// startEtcd returns the endpoint of a running embedded etcd, and its store.
func startEtcd(t *testing.T) (s *store.Store, endpoint string) {
	t.Helper()
	dir := shortDir(t)
	s = openEtcd(t, store.Config{DataDir: dir})
	return s, "unix://" + filepath.Join(dir, "etcd", "client.sock")
}

// shortDir returns a directory with room for the name of a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	t.Setenv("TMPDIR", "/tmp")
	return t.TempDir()
}

// openEtcd returns a running store. Without endpoints and directory it is on
// an embedded etcd of its own.
func openEtcd(t *testing.T, c store.Config, onChange ...func(store.Change)) *store.Store {
	t.Helper()
	s, err := store.OpenEtcd(t.Context(), configure(t, c))
	if err != nil {
		t.Fatal(err)
	}
	storetest.Run(t, s, onChange...)
	return s
}

func configure(t *testing.T, c store.Config) store.Config {
	if c.DataDir == "" && len(c.Endpoints) == 0 {
		c.DataDir = t.TempDir()
	}
	if c.Logger == nil {
		c.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: testWriter{t}})
	}
	return c
}

// testWriter writes log lines to the test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

// raw returns a client for what an operator does with etcdctl.
func raw(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// until waits for what another goroutine brings about.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func hasPlan(s *store.Store, name string) (ok bool) {
	s.View(func(st *store.State) { _, ok = st.Plan(name) })
	return ok
}

func TestRestart(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	p := storetest.Plan("gold", 115, 12)
	t.Run("first", func(t *testing.T) {
		s := openEtcd(t, store.Config{DataDir: dir})
		stored, err := s.PutPlan(ctx, p, 0)
		if err != nil {
			t.Fatal(err)
		}
		p = stored
		if _, err := store.OpenEtcd(ctx, store.Config{DataDir: dir}); err == nil || !strings.Contains(err.Error(), "another controller is running") {
			t.Errorf("a second store on the directory gives %v", err)
		}
	})
	s := openEtcd(t, store.Config{DataDir: dir})
	s.View(func(st *store.State) {
		got, _ := st.Plan("gold")
		if d := cmp.Diff(p, got); d != "" {
			t.Error(d)
		}
	})
}

// What is stored is what an operator can read with etcdctl, and stays as it
// is from version to version.
func TestLayout(t *testing.T) {
	ctx := t.Context()
	s, endpoint := startEtcd(t)
	put(t, s, "gold")
	if _, err := s.PutSubscriber(ctx, plan.Subscriber{ID: "4711", Plan: "gold", Labels: map[string]string{"site": "north"}}, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutRouter(ctx, plan.Router{ID: "r1", Subscriber: "4711"}, 0); err != nil {
		t.Fatal(err)
	}
	tok := store.Token{ID: "t1", Router: "r2", SecretHash: sha256.Sum256([]byte("x")), Expires: time.Unix(1e9, 0).UTC()}
	if err := s.PutToken(ctx, tok); err != nil {
		t.Fatal(err)
	}
	resp, err := raw(t, endpoint).Get(ctx, "/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, kv := range resp.Kvs {
		value := string(kv.Value)
		if strings.HasPrefix(string(kv.Key), "/cakefleet/audit/v1/") {
			continue // TestAuditOfEtcd
		}
		if strings.HasPrefix(string(kv.Key), "/cakefleet/v1/history/plans/gold/") {
			kv.Key = []byte("/cakefleet/v1/history/plans/gold/...")
			value = ""
		}
		if i := strings.Index(value, `,"updated":`); i >= 0 {
			value = value[:i] + "}"
		}
		got[string(kv.Key)] = value
	}
	want := map[string]string{
		"/cakefleet/v1/plans/gold": `{"schema":1,` +
			`"down":{"rate_bps":10000000,"tins":"diffserv3","flows":"triple-isolate","ack_filter":"no-ack-filter","framing":"noatm","nat":false,"wash":true,"ingress":true,"autorate_ingress":false,"split_gso":false,"raw":true,"overhead":0,"mpu":0,"mtu":1514,"rtt_us":100000,"target_us":5000,"memory_limit":0,"fwmark":0},` +
			`"up":{"rate_bps":1000000,"tins":"diffserv4","flows":"dual-srchost","ack_filter":"ack-filter-aggressive","framing":"ptm","nat":true,"wash":false,"ingress":false,"autorate_ingress":false,"split_gso":true,"raw":false,"overhead":-4,"mpu":64,"mtu":1514,"rtt_us":50000,"target_us":2500,"memory_limit":0,"fwmark":255}}`,
		"/cakefleet/v1/subscribers/4711":       `{"schema":1,"plan":"gold","labels":{"site":"north"}}`,
		"/cakefleet/v1/routers/r1":             `{"schema":1,"subscriber":"4711"}`,
		"/cakefleet/v1/tokens/t1":              `{"schema":1,"router":"r2","secret_hash":"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881","expires":"2001-09-09T01:46:40Z"}`,
		"/cakefleet/v1/refs/plans/gold":        "4711",
		"/cakefleet/v1/refs/subscribers/4711":  "r1",
		"/cakefleet/v1/history/plans/gold/...": "",
		"/cakefleet/v1/refs/changed":           "4711",
		"/cakefleet/v1/refs/served":            "r1",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// put stores a plan of 10/1 Mbit/s.
func put(t *testing.T, s *store.Store, name string) plan.Plan {
	t.Helper()
	p, err := s.PutPlan(t.Context(), storetest.Plan(name, 10, 1), store.Any)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Keys of others in the same etcd move its revision on, which no event under
// the prefix tells.
func TestForeignKeys(t *testing.T) {
	ctx := t.Context()
	s, endpoint := startEtcd(t)
	p := put(t, s, "gold")
	outside := raw(t, endpoint)
	for i := range 5 {
		if _, err := outside.Put(ctx, "/somebody/else", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []store.Config{{Endpoints: []string{endpoint}}, {}} {
		other := s
		if len(c.Endpoints) > 0 {
			other = openEtcd(t, c)
		}
		if _, err := other.PutPlan(ctx, p, p.Revision+1); !errors.Is(err, store.ErrConflict) {
			t.Errorf("got %v, want a conflict", err)
		}
	}
	if _, err := s.PutPlan(ctx, p, p.Revision); err != nil {
		t.Error(err)
	}
}

// Two controllers on one etcd: each sees the other's writes, and of two that
// write the same, one is told.
func TestTwoControllers(t *testing.T) {
	ctx := t.Context()
	a, endpoint := startEtcd(t)
	b := openEtcd(t, store.Config{Endpoints: []string{endpoint}})
	p := put(t, a, "gold")
	until(t, "b sees the plan of a", func() bool { return hasPlan(b, "gold") })
	var won atomic.Int32
	var wg sync.WaitGroup
	for _, s := range []*store.Store{a, b, a, b} {
		wg.Go(func() {
			switch _, err := s.PutPlan(ctx, p, p.Revision); {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, store.ErrConflict):
				t.Errorf("got %v, want a conflict", err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d of 4 writers succeeded", won.Load())
	}
	tok := store.Token{ID: "t1", Router: "r1", SecretHash: sha256.Sum256([]byte("x")), Expires: time.Now().Add(time.Hour)}
	if err := a.PutToken(ctx, tok); err != nil {
		t.Fatal(err)
	}
	won.Store(0)
	for _, s := range []*store.Store{a, b, a, b} {
		wg.Go(func() {
			switch _, err := s.UseToken(ctx, "t1", tok.SecretHash, plan.Key{1}, "", time.Now()); {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, store.ErrToken):
				t.Errorf("got %v, want a refused token", err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d of 4 uses of one token succeeded", won.Load())
	}
}

// A deletion at the very revision that is compacted can get lost on the way to
// a watch that catches up (etcd-io/etcd#18089). Here the watch can't catch up
// at all, because everything since it stopped is compacted.
func TestFleet065_DeletedAtCompaction(t *testing.T) {
	ctx := t.Context()
	a, endpoint := startEtcd(t)
	put(t, a, "gold")
	put(t, a, "iron")
	var deleted []string
	b, err := store.OpenEtcd(ctx, configure(t, store.Config{Endpoints: []string{endpoint}}))
	if err != nil {
		t.Fatal(err)
	}
	// b has read everything and does not watch yet.
	if _, err := a.DeletePlan(ctx, "gold", "", store.Any); err != nil {
		t.Fatal(err)
	}
	if _, err := raw(t, endpoint).Compact(ctx, int64(a.Revision()), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if !hasPlan(b, "gold") {
		t.Fatal("b knows of the deletion before it watches")
	}
	told := make(chan struct{})
	storetest.Run(t, b, func(c store.Change) {
		if c.Deleted {
			deleted = append(deleted, c.ID)
			close(told)
		}
	})
	<-told
	if hasPlan(b, "gold") || !hasPlan(b, "iron") || len(deleted) != 1 || deleted[0] != "gold" {
		t.Errorf("gold is there: %t, iron is there: %t, told %v", hasPlan(b, "gold"), hasPlan(b, "iron"), deleted)
	}
	put(t, a, "steel")
	until(t, "b watches again", func() bool { return hasPlan(b, "steel") })
}

// When etcd is full, writes say so, and what is known can still be read and
// deleted.
func TestStoreIsFull(t *testing.T) {
	ctx := t.Context()
	s := openEtcd(t, store.Config{Quota: 1 << 20, Logger: hclog.NewNullLogger()})
	put(t, s, "gold")
	label := strings.Repeat("x", 256)
	var err error
	for i := 0; err == nil && i < 2000; i++ {
		ws := make([]store.SubscriberWrite, 100)
		for j := range ws {
			ws[j].Subscriber = plan.Subscriber{ID: fmt.Sprintf("%d-%d", i, j), Plan: "gold", Labels: map[string]string{"a": label, "b": label}}
		}
		_, err = s.WriteSubscribers(ctx, ws)
	}
	if !errors.Is(err, store.ErrFull) {
		t.Fatalf("got %v, want that the store is full", err)
	}
	if err := s.DeleteSubscriber(ctx, "0-0", store.Any); err != nil {
		t.Errorf("delete: %v", err)
	}
}

// etcd's own log is passed on two levels quieter: from start to end an
// operator sees only what needs an operator.
func TestEtcdIsQuiet(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	t.Run("life", func(t *testing.T) {
		s := openEtcd(t, store.Config{
			DataDir: t.TempDir(),
			Logger:  hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: &log, Mutex: &mu}),
		})
		put(t, s, "gold")
	})
	mu.Lock()
	defer mu.Unlock()
	if log.Len() > 0 {
		t.Errorf("said: %s", log.String())
	}
}
