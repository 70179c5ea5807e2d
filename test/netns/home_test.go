// Package netns tests one data plane on real packets: two LAN hosts behind a
// router with NAT, and a far end.
package netns

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/cakefleet/cakefleet/agent/dataplane/userspace"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/test/traffic"
)

func TestMain(m *testing.M) {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	if agentChild() {
		return
	}
	os.Exit(m.Run())
}

const port = 5001

var (
	far4 = netip.MustParseAddrPort("198.51.100.2:5001")
	far6 = netip.MustParseAddrPort("[2001:db8:ff::2]:5001")
	lan  = netip.MustParseAddrPort("10.9.1.1:5001") // the router itself
)

// home is a router with two hosts and the world behind its link "wan".
type home struct {
	router, far *testnet.Namespace
	hosts       [2]*testnet.Namespace
}

func newHome(t testing.TB) *home {
	t.Helper()
	testnet.Require(t)
	h := &home{
		router: testnet.Make(t, "router"), far: testnet.Make(t, "far"),
		hosts: [2]*testnet.Namespace{testnet.Make(t, "host1"), testnet.Make(t, "host2")},
	}
	err := errors.Join(
		testnet.Veth(h.hosts[0], "eth0", h.router, "lan1"),
		testnet.Veth(h.hosts[1], "eth0", h.router, "lan2"),
		h.router.Bridge("br-lan", "lan1", "lan2"),
		testnet.Veth(h.router, "wan", h.far, "eth0"),
		h.router.Forward(),
		h.router.Addr("br-lan", "10.9.1.1/24", "fd00:1::1/64"),
		h.router.Addr("wan", "198.51.100.1/24", "2001:db8:ff::1/64"),
		h.far.Addr("eth0", "198.51.100.2/24", "2001:db8:ff::2/64"),
		h.far.Route("fd00:1::/64", "2001:db8:ff::1"),
		h.router.Masquerade("wan", false),
	)
	for i, a := range [2][2]string{{"10.9.1.11/24", "fd00:1::11/64"}, {"10.9.1.12/24", "fd00:1::12/64"}} {
		err = errors.Join(err,
			h.hosts[i].Addr("eth0", a[0], a[1]),
			h.hosts[i].Route("0.0.0.0/0", "10.9.1.1"),
			h.hosts[i].Route("::/0", "fd00:1::1"))
	}
	for _, n := range []*testnet.Namespace{h.hosts[0], h.hosts[1], h.far} {
		err = errors.Join(err, n.Sysctl("net/ipv4/tcp_ecn", "1"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// open opens a data plane on the router's wan.
func (h *home) open(t testing.TB) *userspace.Dataplane {
	t.Helper()
	var d *userspace.Dataplane
	err := h.router.Do(func() (err error) {
		d, err = userspace.Open(userspace.Config{Interface: "wan", Logger: logger(t), Seed: 1})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// start starts one end of the traffic in a namespace.
func start(t testing.TB, n *testnet.Namespace, spec traffic.Spec, rec *traffic.Record) *traffic.Process {
	t.Helper()
	spec.Nice = -10 // what stands for other machines must not wait for this one
	p, err := traffic.Start(func(c *exec.Cmd) error { return n.Start(c) }, spec, rec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func stop(t testing.TB, p *traffic.Process) {
	t.Helper()
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
}

// link is diffserv4 with an ACK filter for upload: the acknowledgements of
// 115 Mbit/s would fill a good part of 12.
func link(down, up engine.BitsPerSecond) plan.Link {
	c := engine.DefaultConfig()
	c.Tins = engine.Diffserv4
	l := plan.Link{Down: c, Up: c}
	l.Down.Rate, l.Up.Rate = down, up
	l.Up.AckFilter = engine.AckFilterNormal
	return l
}

func apply(t testing.TB, d *userspace.Dataplane, l plan.Link) {
	t.Helper()
	got, err := d.Apply(context.Background(), l)
	if err != nil {
		t.Fatal(err)
	}
	if got.Link != l {
		t.Fatalf("effective is %+v, want %+v", got.Link, l)
	}
}
