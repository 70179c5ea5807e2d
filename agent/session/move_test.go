package session

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
)

// An agent that is asked to move has a connection for its next session before
// it leaves the one it has, and goes without waiting.
func TestMove(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{Interval: time.Minute})
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := c.Authority.Router(t, "home-1", pub, time.Now().Add(-time.Hour), 24*time.Hour)
	roots := x509.NewCertPool()
	roots.AddCert(c.Authority.Certificate)
	var nowhere atomic.Bool // whoever answers is not the controller
	delivered := make(chan Push, 1)
	s := New(Config{
		Address: c.Address,
		TLS: &tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: "cakefleet-controller", RootCAs: roots,
			Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
			VerifyConnection: func(tls.ConnectionState) error {
				if nowhere.Load() {
					return errors.New("a stranger")
				}
				return nil
			},
		},
		Jitter:  seeded(t),
		Hello:   Hello{RouterID: "home-1", BootID: "b", Dataplane: func() string { return "" }},
		Outbox:  outbox.New(),
		Status:  func() plan.Status { return plan.Status{} },
		Report:  func() *plan.Report { return &plan.Report{} },
		Deliver: func(p Push) { delivered <- p },
		Reached: func(time.Time) {},
	})
	var prepared []bool
	s.open = func(ctx context.Context) (time.Duration, error) {
		prepared = append(prepared, s.next != nil)
		return s.connect(ctx)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	first := <-c.Sessions
	first.Move(20 * time.Second)
	second := <-c.Sessions
	<-first.Done()
	select {
	case <-second.Done():
		t.Error("the second session ended, too")
	default:
	}
	// One that can't be followed: it stays.
	nowhere.Store(true)
	second.Move(time.Second)
	second.Move(time.Second)
	second.Push(wire.FromDesired(plan.Desired{Revision: 1}, 1))
	select {
	case <-delivered: // both are behind it
	case <-second.Done():
		t.Error("the agent left for nowhere")
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if len(prepared) != 2 || prepared[0] || !prepared[1] {
		t.Errorf("connections were there before their sessions: %t", prepared)
	}
}
