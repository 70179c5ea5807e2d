package controller

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/url"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
)

// peersDoor is where other controllers ask this one, and what asks them. A
// controller with its etcd inside is alone and has none.
type peersDoor struct {
	listen net.Listener
	server *grpc.Server
	tls    *tls.Config
	asks   *api.Peers
}

// prepare makes what asks others, and says what conducts rollouts whom to ask.
func (d *peersDoor) prepare(trust *identity.Trust, members *lead.Members) (conduct.Others, error) {
	if d.listen == nil {
		return conduct.Alone{}, nil
	}
	id, since := members.Self().ID, members.Self().Started
	door, err := trust.Door(func(s *identity.Set) (*tls.Config, error) {
		door, _, err := s.PeersTLS(id, since)
		return door, err
	}, "h2")
	if err != nil {
		return nil, err
	}
	caller, err := trust.Caller(func(s *identity.Set) (*tls.Config, error) { return s.PeerTLS(id, since) })
	if err != nil {
		return nil, err
	}
	d.tls, d.asks = door, api.NewPeers(members, caller)
	return d.asks, nil
}

// advertise returns where other controllers reach this one: what was said, or
// the address of this machine from which etcd is reached.
func (c *Controller) advertise(listen net.Addr) (string, error) {
	if c.config.AdvertisePeers != "" {
		return c.config.AdvertisePeers, nil
	}
	host, port, err := net.SplitHostPort(listen.String())
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
		return listen.String(), nil
	}
	u, err := url.Parse(c.config.EtcdEndpoints[0])
	if err != nil || u.Host == "" {
		return net.JoinHostPort("127.0.0.1", port), nil // etcd is a socket of this machine
	}
	// Nothing is sent: the system only says which way it would go.
	conn, err := net.Dial("udp", u.Host)
	if err != nil {
		return "", fmt.Errorf("which address do other controllers reach this one at? say --advertise-peers HOST:PORT: %w", err)
	}
	defer func() { _ = conn.Close() }() // nothing was sent
	host, _, err = net.SplitHostPort(conn.LocalAddr().String())
	return net.JoinHostPort(host, port), err
}

// open makes the door, unless there is none.
func (d *peersDoor) open(s api.Services, sessions *api.SessionService) {
	if d.listen == nil {
		return
	}
	s.Routers.Ask(d.asks)
	s.Admin.Ask(d.asks)
	s.Telemetry.Ask(d.asks)
	s.Rollouts.Ask(d.asks)
	sessions.Ask(d.asks)
	d.server = grpc.NewServer(append(api.PeersDoor(), grpc.Creds(credentials.NewTLS(d.tls)), grpc.MaxRecvMsgSize(64<<20))...)
	api.RegisterPeers(d.server, api.NewPeerService(s.Routers, s.Admin, s.Telemetry, s.Rollouts))
}

// serve answers until ctx ends.
func (d *peersDoor) serve(ctx context.Context) error {
	if d.listen == nil {
		return nil
	}
	stop := context.AfterFunc(ctx, d.server.Stop)
	defer stop()
	err := served("other controllers", d.server.Serve(d.listen))
	_ = d.asks.Close() // whoever asks is gone
	return err
}
