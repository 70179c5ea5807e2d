package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// The router's interfaces.
const lanName, wanName = "lan", "wan"

// stations are the two hosts that ping, in namespaces of their own.
type stations struct{ pinger, echoer *testnet.Namespace }

// setUpNetwork makes this machine a home router with the settings that OpenWrt
// has, and two hosts beside it.
func setUpNetwork(gro bool) (*stations, error) {
	if err := setUpRouter(gro); err != nil {
		return nil, err
	}
	s := &stations{}
	var err error
	if s.pinger, err = station("pinger", pingerMAC, []string{pinger4 + "/24", pinger6 + "/64"}, lanRouter4, lanRouter6, lanMAC); err != nil {
		return nil, err
	}
	if s.echoer, err = station("echoer", echoerMAC, []string{echoer4 + "/24", echoer6 + "/64"}, wanRouter4, wanRouter6, wanMAC); err != nil {
		return nil, err
	}
	root, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return s, errors.Join(waitForCarrier(root, lanName), waitForCarrier(root, wanName))
}

func setUpRouter(gro bool) error {
	if err := sysctls(map[string]string{
		"net/ipv6/conf/all/accept_dad":               "0",
		"net/ipv6/conf/default/accept_dad":           "0",
		"net/ipv4/ip_forward":                        "1",
		"net/ipv6/conf/all/forwarding":               "1",
		"net/netfilter/nf_conntrack_acct":            "1",
		"net/netfilter/nf_conntrack_checksum":        "0",
		"net/netfilter/nf_conntrack_tcp_be_liberal":  "1", // nobody listens to acknowledgements here
		"net/ipv4/conf/all/send_redirects":           "0",
		"net/ipv4/conf/default/send_redirects":       "0",
		"net/ipv6/conf/default/router_solicitations": "0",
	}); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	lan, err := card(lanMAC, lanName)
	if err != nil {
		return err
	}
	wan, err := card(wanMAC, wanName)
	if err != nil {
		return err
	}
	for _, l := range []string{lanName, wanName} {
		if err := setGRO(l, gro); err != nil {
			return err
		}
	}
	var errs []error
	addrs := func(l netlink.Link, prefixes ...string) {
		for _, p := range prefixes {
			a, err := netlink.ParseAddr(p)
			if err == nil {
				err = netlink.AddrAdd(l, a)
			}
			errs = append(errs, err)
		}
		errs = append(errs, netlink.LinkSetUp(l))
	}
	addrs(lan, lanRouter4+"/24", lanRouter6+"/64")
	addrs(wan, wanRouter4+"/24", wanRouter6+"/64")
	neighbour := func(l netlink.Link, ip string, m mac) {
		errs = append(errs, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: net.ParseIP(ip), HardwareAddr: m[:],
		}))
	}
	for i := range numHosts {
		neighbour(lan, host4(i).String(), hostMAC(i))
		neighbour(lan, host6(i).String(), hostMAC(i))
	}
	neighbour(lan, pinger4, pingerMAC)
	neighbour(lan, pinger6, pingerMAC)
	neighbour(wan, echoer4, echoerMAC)
	neighbour(wan, echoer6, echoerMAC)
	neighbour(wan, gateway4, gatewayMAC)
	neighbour(wan, gateway6, gatewayMAC)
	for _, gw := range []string{gateway4, gateway6} {
		errs = append(errs, netlink.RouteAdd(&netlink.Route{LinkIndex: wan.Attrs().Index, Gw: net.ParseIP(gw)}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("set up the router: %w", err)
	}
	return firewall()
}

// firewall makes what every packet goes through on a home router: connection
// tracking, a forward chain that lets known connections pass first, and source
// NAT for IPv4.
func firewall() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	accept := nftables.ChainPolicyAccept
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		t := c.AddTable(&nftables.Table{Family: family, Name: "fw"})
		forward := c.AddChain(&nftables.Chain{
			Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &accept,
		})
		c.AddRule(&nftables.Rule{Table: t, Chain: forward, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED), Xor: native32(0)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native32(0)},
			&expr.Verdict{Kind: expr.VerdictAccept},
		}})
		if family == nftables.TableFamilyIPv6 {
			continue
		}
		post := c.AddChain(&nftables.Chain{
			Name: "postrouting", Table: t, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname(wanName)},
			&expr.Masq{},
		}})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("make firewall: %w", err)
	}
	return nil
}

// station makes a host: a card in a namespace, with the router as its gateway.
func station(name string, m mac, prefixes []string, gw4, gw6 string, gwMAC mac) (*testnet.Namespace, error) {
	n, err := testnet.New(name)
	if err != nil {
		return nil, err
	}
	l, err := card(m, name)
	if err != nil {
		return nil, err
	}
	h, err := netns.GetFromName(name)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if err := netlink.LinkSetNsFd(l, int(h)); err != nil {
		return nil, fmt.Errorf("move a card to %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(h, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer nl.Close()
	if err := errors.Join(n.Addr(name, prefixes...), n.Up(name)); err != nil {
		return nil, err
	}
	if l, err = nl.LinkByName(name); err != nil {
		return nil, err
	}
	for _, gw := range []string{gw4, gw6} {
		err = errors.Join(err,
			nl.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(gw), HardwareAddr: gwMAC[:]}),
			nl.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(gw)}))
	}
	if err != nil {
		return nil, fmt.Errorf("set up %s: %w", name, err)
	}
	return n, waitForCarrier(nl, name)
}

// card finds the interface with a hardware address and names it.
func card(m mac, name string) (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if l.Attrs().HardwareAddr.String() != net.HardwareAddr(m[:]).String() {
			continue
		}
		if l.Attrs().Name != name {
			if err := netlink.LinkSetName(l, name); err != nil {
				return nil, fmt.Errorf("name interface %s: %w", name, err)
			}
		}
		return netlink.LinkByName(name)
	}
	return nil, fmt.Errorf("no network card has address %s", net.HardwareAddr(m[:]))
}

// waitForCarrier waits until a card has found its link, which takes the driver
// two seconds.
func waitForCarrier(nl *netlink.Handle, name string) error {
	for range 100 {
		l, err := nl.LinkByName(name)
		if err != nil {
			return err
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("interface %s: no carrier after 10 s", name)
}

// sysctls sets values below /proc/sys.
func sysctls(values map[string]string) error {
	var errs []error
	for k, v := range values {
		errs = append(errs, os.WriteFile(filepath.Join("/proc/sys", k), []byte(v), 0))
	}
	return errors.Join(errs...)
}

func setGRO(link string, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	v := struct{ cmd, data uint32 }{cmd: unix.ETHTOOL_SGRO}
	if on {
		v.data = 1
	}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [24 - unsafe.Sizeof(uintptr(0))]byte
	}{data: unsafe.Pointer(&v)}
	copy(req.name[:unix.IFNAMSIZ-1], link)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return fmt.Errorf("set GRO of %s: %w", link, errno)
	}
	return nil
}

func ifname(s string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, s)
	return b
}
