// Package etcdtest runs one member of an etcd cluster, for tests that kill,
// stop and cut off members: each in a process of its own.
package etcdtest

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// The ports of every member, on an address of its own.
const (
	ClientPort = 2379
	PeerPort   = 2380
)

// Member is one member of a cluster.
type Member struct {
	Dir     string            // of its data
	Name    string            // one of Cluster
	Cluster map[string]string // IP address by name
}

// Endpoint returns where clients reach the member at an IP address.
func Endpoint(ip string) string { return fmt.Sprintf("http://%s:%d", ip, ClientPort) }

// Run runs the member until ctx ends. It finds a new leader within a second.
func (m Member) Run(ctx context.Context) error {
	cfg := embed.NewConfig()
	at := func(ip string, port int) url.URL {
		return url.URL{Scheme: "http", Host: fmt.Sprintf("%s:%d", ip, port)}
	}
	ip := m.Cluster[m.Name]
	cfg.Name, cfg.Dir = m.Name, m.Dir
	cfg.ListenClientUrls = []url.URL{at(ip, ClientPort)}
	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	cfg.ListenPeerUrls = []url.URL{at(ip, PeerPort)}
	cfg.AdvertisePeerUrls = cfg.ListenPeerUrls
	var all []string
	for name, ip := range m.Cluster {
		peer := at(ip, PeerPort)
		all = append(all, name+"="+peer.String())
	}
	cfg.InitialCluster = strings.Join(all, ",")
	cfg.TickMs, cfg.ElectionMs = 50, 500
	cfg.UnsafeNoFsync = true // processes die in these tests, machines don't
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("etcd member %s: %w", m.Name, err)
	}
	defer e.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.Err():
		return fmt.Errorf("etcd member %s: %w", m.Name, err)
	}
}
