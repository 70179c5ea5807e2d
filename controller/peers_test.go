package controller

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// The door of other controllers is for controllers alone.
func TestPeersDoorRefusesOthers(t *testing.T) {
	authority, err := identity.Open(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	kv := storetest.NewKV()
	members := lead.NewMembers(kv, lead.Member{ID: "core-1", Started: time.Now()}, 0, nil)
	s := storetest.NewFake(t)
	hub := fleet.NewHub()
	d := peersDoor{listen: listen}
	others, err := d.prepare(identity.NewTrust(authority.Set()), members)
	if err != nil {
		t.Fatal(err)
	}
	table := telemetry.New(telemetry.Config{})
	d.open(api.Services{
		Routers: api.NewRouterService(s, hub), Admin: api.NewAdminService(s, hub, members),
		Telemetry: api.NewTelemetryService(s, hub, table, nil),
		Rollouts:  api.NewRolloutService(s, hub, conduct.New(s, hub, others, hclog.NewNullLogger())),
	}, api.NewSessionService(s, hub, table, api.SessionConfig{}, hclog.NewNullLogger()))
	done := make(chan error, 1)
	go func() { done <- d.serve(t.Context()) }()
	t.Cleanup(func() {
		d.server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	_, caller, err := authority.PeersTLS("core-2", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	router, err := authority.SignRouter(pub, "home-1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pem, err := authority.Operator("ann", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	operator, err := tls.X509KeyPair(pem, pem)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		certs []tls.Certificate
		want  string // in the error; empty: none
	}{
		{"controller", caller.Certificates, ""},
		{"router", []tls.Certificate{{Certificate: [][]byte{router}, PrivateKey: key}}, "not for a router"},
		{"operator", []tls.Certificate{operator}, "not for a operator"},
		{"nobody", nil, "Unavailable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := caller.Clone()
			config.Certificates = c.certs
			conn, err := grpc.NewClient(listen.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(config)))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			_, err = pb.NewPeerServiceClient(conn).GetSessions(t.Context(), &pb.GetSessionsRequest{})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
