package homes

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/traffic"
)

// servePort is where the server of the internet answers.
const servePort = 5001

// Priorities. All of these are machines of their own in truth, but share the
// cores of this one: hosts must not take the routers' CPU, and a probe must
// wait for nobody.
const (
	bulkNice   = 0
	routerNice = -10
	probeNice  = -15
)

// congestion is what most hosts use, whatever this machine prefers.
const congestion = "cubic"

// Load is the traffic of homes.
type Load struct {
	Record *traffic.Record

	net   *Network
	procs []*traffic.Process
}

// NewLoad starts the server, so that hosts can begin.
func NewLoad(net *Network) (*Load, error) {
	l := &Load{Record: traffic.NewRecord(), net: net}
	// Flows and echoes come from two processes: an echo must not wait for bulk.
	for _, s := range []traffic.Spec{{Serve: servePort, Nice: bulkNice, Congestion: congestion}, {Serve: servePort + 1, Nice: probeNice}} {
		if err := l.start(net.Server, s); err != nil {
			return nil, errors.Join(err, l.Stop())
		}
	}
	return l, nil
}

func (l *Load) start(ns *testnet.Namespace, spec traffic.Spec) error {
	begin := func(cmd *exec.Cmd) error { return ns.Start(cmd) }
	p, err := traffic.Start(begin, spec, l.Record)
	if err != nil {
		return fmt.Errorf("%s: %w", ns.Name, err)
	}
	l.procs = append(l.procs, p)
	return nil
}

// Bulk starts n TCP flows down and n up from one host of a home. They take
// turns with the server's addresses, Server4 and Server6. It returns the names
// of the flows.
func (l *Load) Bulk(home, host, n int, servers ...netip.Addr) (down, up []string, err error) {
	h := l.net.Homes[home]
	spec := traffic.Spec{Nice: bulkNice, Congestion: congestion}
	for i := range n {
		server := netip.AddrPortFrom(servers[i%len(servers)], servePort)
		d := fmt.Sprintf("%s-%c-down-%d", h.Name, 'a'+host, i)
		u := fmt.Sprintf("%s-%c-up-%d", h.Name, 'a'+host, i)
		down, up = append(down, d), append(up, u)
		spec.Flows = append(spec.Flows, traffic.Flow{Name: d, Server: server}, traffic.Flow{Name: u, Up: true, Server: server})
	}
	return down, up, l.start(h.Hosts[host], spec)
}

// Ping starts a probe over IPv4 and one over IPv6 from one host of a home, and
// returns their names.
func (l *Load) Ping(home, host int, interval time.Duration) ([]string, error) {
	h := l.net.Homes[home]
	v4 := fmt.Sprintf("%s-%c-ping4", h.Name, 'a'+host)
	v6 := fmt.Sprintf("%s-%c-ping6", h.Name, 'a'+host)
	return []string{v4, v6}, l.start(h.Hosts[host], traffic.Spec{
		Nice: probeNice,
		Probes: []traffic.Probe{
			{Name: v4, Server: netip.AddrPortFrom(Server4, servePort+1), Interval: interval},
			{Name: v6, Server: netip.AddrPortFrom(Server6, servePort+1), Interval: interval},
		},
	})
}

// Stop ends all traffic.
func (l *Load) Stop() error {
	var errs []error
	for _, p := range slices.Backward(l.procs) { // the server last, so that no flow breaks
		errs = append(errs, p.Stop())
	}
	l.procs = nil
	return errors.Join(errs...)
}
