package netns

import (
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

// logger writes to the test's log.
func logger(t testing.TB) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Output: writer{t}, Level: hclog.Debug})
}

type writer struct{ t testing.TB }

func (w writer) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}
