package store_test

import (
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

func TestFake(t *testing.T) {
	storetest.Suite(t, func(t *testing.T, onChange ...func(store.Change)) *store.Store {
		return storetest.NewFake(t, onChange...)
	})
}

func TestEmbeddedEtcd(t *testing.T) {
	storetest.Suite(t, func(t *testing.T, onChange ...func(store.Change)) *store.Store {
		return openEtcd(t, store.Config{}, onChange...)
	})
}

// openEtcd returns a running store on an embedded etcd that nobody else uses.
func openEtcd(t *testing.T, c store.Config, onChange ...func(store.Change)) *store.Store {
	t.Helper()
	if c.DataDir == "" {
		c.DataDir = t.TempDir()
	}
	c.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: testWriter{t}})
	s, err := store.OpenEtcd(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	storetest.Run(t, s, onChange...)
	return s
}

// testWriter writes log lines to the test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}
