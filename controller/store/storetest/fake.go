package storetest

import (
	"context"
	"testing"

	"github.com/cakefleet/cakefleet/controller/store"
)

// NewFake returns a running store on a KV in memory. onChange are registered
// before it runs. It ends with the test.
func NewFake(t testing.TB, onChange ...func(store.Change)) *store.Store {
	t.Helper()
	return Start(t, NewKV(), store.Config{}, onChange...)
}

// Start returns a running store on kv. It ends with the test.
func Start(t testing.TB, kv store.KV, c store.Config, onChange ...func(store.Change)) *store.Store {
	t.Helper()
	s, err := store.New(t.Context(), kv, c)
	if err != nil {
		t.Fatal(err)
	}
	Run(t, s, onChange...)
	return s
}

// Run runs a store until the test ends, and closes it.
func Run(t testing.TB, s *store.Store, onChange ...func(store.Change)) {
	t.Helper()
	for _, fn := range onChange {
		s.OnChange(fn)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1) // the goroutine never waits for the cleanup
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}
