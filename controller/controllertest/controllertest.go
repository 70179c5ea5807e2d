// Package controllertest runs whole controllers in tests, with etcd and all.
package controllertest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/cakefleet/cakefleet/controller"
	"github.com/cakefleet/cakefleet/controller/identity"
)

// Config returns the configuration of a controller on a data directory, with the
// doors of agents and operators on free ports of the loopback and no others.
func Config(dir string) controller.Config {
	c := controller.DefaultConfig()
	c.DataDir, c.ListenAgents, c.ListenOperators, c.ListenHTTP, c.ListenAdmin = dir, "127.0.0.1:0", "127.0.0.1:0", "", ""
	return c
}

// Running is a controller that serves.
type Running struct {
	controller.Ready
	// Stop ends it, and returns the error with which it ended. It may be called
	// again, for the same error.
	Stop func() error
}

// Run runs a controller until it is stopped, and returns when it serves, or why it
// does not.
func Run(c controller.Config) (*Running, error) {
	ready, done := make(chan controller.Ready, 1), make(chan error, 1)
	c.Ready = func(r controller.Ready) { ready <- r }
	ctl, err := controller.New(c)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { done <- ctl.Run(ctx) }()
	stop := sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	select {
	case r := <-ready:
		return &Running{r, stop}, nil
	case err := <-done:
		cancel()
		return nil, fmt.Errorf("run: %w", err)
	}
}

// Start is Run until the test ends.
func Start(t testing.TB, c controller.Config) *Running {
	t.Helper()
	r, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Stop(); err != nil {
			t.Errorf("controller: %v", err)
		}
	})
	return r
}

// TLS returns how the operator for whom the first start wrote credentials
// connects.
func (r *Running) TLS(t testing.TB) *tls.Config {
	t.Helper()
	text, err := os.ReadFile(r.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	operator, err := tls.X509KeyPair(text, text)
	if err != nil {
		t.Fatal(err)
	}
	authority := x509.NewCertPool() // the last certificate of the file
	authority.AppendCertsFromPEM(text[bytes.LastIndex(text, []byte("-----BEGIN CERTIFICATE")):])
	return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: identity.ServerName, RootCAs: authority, Certificates: []tls.Certificate{operator}}
}

// Dial connects to a door, as the given certificate or as a stranger, until the
// test ends.
func (r *Running) Dial(t testing.TB, door net.Addr, certs ...tls.Certificate) *grpc.ClientConn {
	t.Helper()
	c := r.TLS(t)
	c.Certificates = certs
	conn, err := grpc.NewClient("passthrough:///"+door.String(), grpc.WithTransportCredentials(credentials.NewTLS(c)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Operate connects the operator.
func (r *Running) Operate(t testing.TB) *grpc.ClientConn {
	t.Helper()
	return r.Dial(t, r.Operators, r.TLS(t).Certificates...)
}
