// Package homes builds a small provider on one machine: a core with a server
// of the internet and the provider's own network behind it, and homes, each
// with a router and two LAN hosts. Every machine is a network namespace. On
// it runs the fleet, as the real programs; test/e2e and the demo share it.
//
//	server ──┐             ┌── wan [router 1] br-lan ──┬── host a
//	         ├── [core] ───┤   ...                     └── host b
//	noc ─────┘             └── wan [router n] br-lan ...
//
// IPv4 is masqueraded by each router, and all homes use the same private
// addresses; IPv6 is routed. Host b uses ECN, host a does not.
package homes

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// HostsPerHome are the LAN hosts, which are called a and b.
const HostsPerHome = 2

// Where the server and the controller are.
var (
	Server4 = netip.MustParseAddr("203.0.113.2")
	Server6 = netip.MustParseAddr("2001:db8:f::2")
	Noc4    = netip.MustParseAddr("198.51.100.2")
)

// Network is the provider's network. Whoever builds it closes it.
type Network struct {
	Server *testnet.Namespace // a server somewhere in the internet
	Core   *testnet.Namespace // forwards between all others
	Noc    *testnet.Namespace // where the provider's controller runs
	Homes  []*Home

	all []*testnet.Namespace
}

// Home is one subscriber's.
type Home struct {
	Name   string // such as "home-1"
	Router *testnet.Namespace
	Hosts  [HostsPerHome]*testnet.Namespace

	net  *Network
	line line
}

// line are the addresses of the line to a home.
type line struct{ core4, wan4, core6, wan6, lan6 string }

// Interfaces of a router.
const (
	WAN = "wan"
	lan = "br-lan"
)

// Build builds the network with n homes. Its namespaces begin with prefix.
func Build(prefix string, n int) (*Network, error) {
	w := &Network{}
	if err := w.build(prefix, n); err != nil {
		return nil, errors.Join(fmt.Errorf("build network: %w", err), w.Close())
	}
	return w, nil
}

func (w *Network) build(prefix string, n int) (err error) {
	if w.Core, err = w.namespace(prefix + "core"); err != nil {
		return err
	}
	if w.Server, err = w.namespace(prefix + "server"); err != nil {
		return err
	}
	if w.Noc, err = w.namespace(prefix + "noc"); err != nil {
		return err
	}
	err = inOrder(
		w.Core.Forward,
		func() error { return testnet.Veth(w.Core, "server", w.Server, "eth0") },
		func() error { return w.Core.Addr("server", "203.0.113.1/24", "2001:db8:f::1/64") },
		func() error { return w.Server.Addr("eth0", Server4.String()+"/24", Server6.String()+"/64") },
		func() error { return w.Server.Route("0.0.0.0/0", "203.0.113.1") },
		func() error { return w.Server.Route("::/0", "2001:db8:f::1") },
		func() error { return testnet.Veth(w.Core, "noc", w.Noc, "eth0") },
		func() error { return w.Core.Addr("noc", "198.51.100.1/24") },
		func() error { return w.Noc.Addr("eth0", Noc4.String()+"/24") },
		func() error { return w.Noc.Route("0.0.0.0/0", "198.51.100.1") },
		// One packet is one frame on the wire, as it is on a line.
		func() error { return w.Server.Offload("eth0", false) },
		func() error { return forgetful(w.Server) },
	)
	if err != nil {
		return err
	}
	for k := 1; k <= n; k++ {
		if err := w.addHome(prefix, k); err != nil {
			return err
		}
	}
	return nil
}

func (w *Network) addHome(prefix string, k int) (err error) {
	h := &Home{Name: fmt.Sprintf("home-%d", k), net: w}
	w.Homes = append(w.Homes, h)
	if h.Router, err = w.namespace(prefix + h.Name); err != nil {
		return err
	}
	h.line = line{
		core4: fmt.Sprintf("192.0.2.%d", 4*k+1), wan4: fmt.Sprintf("192.0.2.%d", 4*k+2),
		core6: fmt.Sprintf("2001:db8:0:%x::1", k), wan6: fmt.Sprintf("2001:db8:0:%x::2", k),
		lan6: fmt.Sprintf("2001:db8:%x:1::", 0x100+k),
	}
	lan6 := h.line.lan6
	err = inOrder(
		h.Router.Forward,
		h.Plug,
		func() error { return h.Router.Masquerade(WAN, false) },
	)
	if err != nil {
		return err
	}
	var ports []string
	for i := range h.Hosts {
		letter := string(rune('a' + i))
		if h.Hosts[i], err = w.namespace(prefix + h.Name + "-" + letter); err != nil {
			return err
		}
		port := "lan-" + letter
		ports = append(ports, port)
		if err := testnet.Veth(h.Router, port, h.Hosts[i], "eth0"); err != nil {
			return err
		}
	}
	if err := h.Router.Bridge(lan, ports...); err != nil {
		return err
	}
	if err := h.Router.Addr(lan, "192.168.1.1/24", lan6+"1/64"); err != nil {
		return err
	}
	if err := inOrder(
		func() error { return h.Router.CountSmall(WAN, smallBytes) },
		func() error { return h.Router.CountSmall(lan, smallBytes) },
		// Some hosts use ECN, some don't.
		func() error { return h.Hosts[1].Sysctl("net/ipv4/tcp_ecn", "1") },
	); err != nil {
		return err
	}
	for i, host := range h.Hosts {
		err := inOrder(
			func() error {
				return host.Addr("eth0", fmt.Sprintf("192.168.1.%d/24", 11+i), fmt.Sprintf("%s%d/64", lan6, 11+i))
			},
			func() error { return host.Route("0.0.0.0/0", "192.168.1.1") },
			func() error { return host.Route("::/0", lan6+"1") },
			func() error { return host.Offload("eth0", false) },
			func() error { return forgetful(host) },
		)
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *Network) namespace(name string) (*testnet.Namespace, error) {
	n, err := testnet.New(name)
	if err != nil {
		return nil, err
	}
	w.all = append(w.all, n)
	return n, nil
}

// Close ends every process in the network and removes it.
func (w *Network) Close() error {
	var errs []error
	for _, n := range w.all {
		errs = append(errs, killInside(n.Name), n.Close())
	}
	return errors.Join(errs...)
}

// Limit makes the line to a home what a line is without any queue management:
// a bottleneck in each direction, bits/s, with one first-in first-out queue
// that takes `buffer` to drain.
func (h *Home) Limit(down, up uint64, buffer time.Duration) error {
	bytes := func(rate uint64) uint32 { return uint32(float64(rate) / 8 * buffer.Seconds()) }
	return errors.Join(
		h.net.Core.FIFO(h.Name, down, bytes(down)),
		h.Router.FIFO(WAN, up, bytes(up)))
}

// Open takes the bottlenecks away.
func (h *Home) Open() error {
	return errors.Join(h.net.Core.NoFIFO(h.Name), h.Router.NoFIFO(WAN))
}

// Plug makes the line, with another index each time.
func (h *Home) Plug() error {
	l, core := h.line, h.net.Core
	return inOrder(
		func() error { return testnet.Veth(core, h.Name, h.Router, WAN) },
		func() error { return core.Addr(h.Name, l.core4+"/30", l.core6+"/64") },
		func() error { return h.Router.Addr(WAN, l.wan4+"/30") },
		func() error { return h.route(WAN) },
		func() error { return core.Route(l.lan6+"/64", l.wan6) },
		func() error { return h.Router.Offload(WAN, false) },
	)
}

// route gives the router's end of the line what is lost while that is down.
func (h *Home) route(link string) error {
	return inOrder(
		func() error { return h.Router.Addr(link, h.line.wan6+"/64") },
		func() error { return h.Router.Route("0.0.0.0/0", h.line.core4) },
		func() error { return h.Router.Route("::/0", h.line.core6) },
	)
}

// Unplug takes the line away.
func (h *Home) Unplug() error { return h.Router.Delete(WAN) }

// Rename gives the router's end of the line another name. Under another than WAN
// there is no masquerading, so that hosts have IPv6 only.
func (h *Home) Rename(from, to string) error {
	return inOrder(
		func() error { return h.Router.Down(from) },
		func() error { return h.Router.Rename(from, to) },
		func() error { return h.Router.Up(to) },
		func() error { return h.route(to) },
	)
}

func inOrder(acts ...func() error) error {
	for _, act := range acts {
		if err := act(); err != nil {
			return err
		}
	}
	return nil
}

// forgetful makes TCP start every connection as if it were the first: a path
// that was faster a moment ago, while a line was open, would have it overshoot
// for many seconds, and what is measured would be the past.
func forgetful(n *testnet.Namespace) error { return n.Sysctl("net/ipv4/tcp_no_metrics_save", "1") }
