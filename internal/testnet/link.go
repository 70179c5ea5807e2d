package testnet

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Veth joins two namespaces (or twice the same) with a pair of links, both up.
func Veth(a *Namespace, aLink string, b *Namespace, bLink string) error {
	return VethQueues(a, aLink, b, bLink, 0)
}

// VethQueues is Veth whose first link has so many queues each way; with 0 it has
// the kernel's own number.
func VethQueues(a *Namespace, aLink string, b *Namespace, bLink string, queues int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aLink
	if queues > 0 {
		attrs.NumTxQueues, attrs.NumRxQueues = queues, queues
	}
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: bLink, PeerNamespace: netlink.NsFd(int(b.ns))}
	if err := a.nl.LinkAdd(pair); err != nil {
		return fmt.Errorf("make veth %s/%s to %s/%s: %w", a.Name, aLink, b.Name, bLink, err)
	}
	if err := a.Up(aLink); err != nil {
		return err
	}
	return b.Up(bLink)
}

// Bridge makes a bridge of links that exist, all up.
func (n *Namespace) Bridge(name string, ports ...string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := n.nl.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make bridge %s/%s: %w", n.Name, name, err)
	}
	for _, p := range ports {
		link, err := n.link(p)
		if err != nil {
			return err
		}
		if err := n.nl.LinkSetMaster(link, bridge); err != nil {
			return fmt.Errorf("put %s/%s into bridge %s: %w", n.Name, p, name, err)
		}
	}
	return n.Up(name)
}

// Up sets a link up.
func (n *Namespace) Up(link string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s/%s up: %w", n.Name, link, err)
	}
	return nil
}

// Down sets a link down.
func (n *Namespace) Down(link string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetDown(l); err != nil {
		return fmt.Errorf("set %s/%s down: %w", n.Name, link, err)
	}
	return nil
}

// Delete deletes a link, and with a veth its peer.
func (n *Namespace) Delete(link string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	if err := n.nl.LinkDel(l); err != nil {
		return fmt.Errorf("delete %s/%s: %w", n.Name, link, err)
	}
	return nil
}

// MTU sets a link's MTU.
func (n *Namespace) MTU(link string, mtu int) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("set the MTU of %s/%s: %w", n.Name, link, err)
	}
	return nil
}

// Rename gives a link, which must be down, another name.
func (n *Namespace) Rename(link, name string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	if err := n.nl.LinkSetName(l, name); err != nil {
		return fmt.Errorf("rename %s/%s to %s: %w", n.Name, link, name, err)
	}
	return nil
}

// Addr gives a link addresses, such as "192.0.2.1/24" or "2001:db8::1/64".
func (n *Namespace) Addr(link string, prefixes ...string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	for _, p := range prefixes {
		addr, err := netlink.ParseAddr(p)
		if err != nil {
			return fmt.Errorf("address of %s/%s: %w", n.Name, link, err)
		}
		if addr.IP.To4() == nil {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := n.nl.AddrAdd(l, addr); err != nil {
			return fmt.Errorf("give %s/%s the address %s: %w", n.Name, link, p, err)
		}
	}
	return nil
}

// Route sends a destination, such as "10.1.0.0/16", "0.0.0.0/0" or "::/0",
// through a gateway.
func (n *Namespace) Route(dst, via string) error {
	_, ipNet, err := net.ParseCIDR(dst)
	if err != nil {
		return fmt.Errorf("route in %s: %w", n.Name, err)
	}
	gw := net.ParseIP(via)
	if gw == nil {
		return fmt.Errorf("route in %s: gateway %q is no address", n.Name, via)
	}
	if err := n.nl.RouteAdd(&netlink.Route{Dst: ipNet, Gw: gw}); err != nil {
		return fmt.Errorf("route %s via %s in %s: %w", dst, via, n.Name, err)
	}
	return nil
}

// FIFO makes what leaves a link wait in one first-in first-out queue of
// limitBytes in front of a bottleneck of rate bits/s: a line without any
// queue management.
func (n *Namespace) FIFO(link string, rate uint64, limitBytes uint32) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	// The burst is what a token bucket lets pass at line rate: 1 ms worth, but
	// room for two full frames.
	bytesPerSecond := rate / 8
	burst := max(bytesPerSecond/1000, 2*1514)
	tbf := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       bytesPerSecond,
		Limit:      limitBytes,
		Buffer:     uint32(float64(burst) * netlink.TickInUsec() * 1e6 / float64(bytesPerSecond)),
	}
	if err := n.nl.QdiscReplace(tbf); err != nil {
		return fmt.Errorf("put a FIFO of %d bit/s on %s/%s: %w", rate, n.Name, link, err)
	}
	return nil
}

// NoFIFO takes the FIFO off a link.
func (n *Namespace) NoFIFO(link string) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	q := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		QdiscType:  "tbf",
	}
	if err := n.nl.QdiscDel(q); err != nil {
		return fmt.Errorf("take the FIFO off %s/%s: %w", n.Name, link, err)
	}
	return nil
}

// Masquerade hides what leaves a link behind the link's own addresses: source
// NAT for IPv4 and, only if v6 is true, for IPv6.
func (n *Namespace) Masquerade(link string, v6 bool) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	families := []nftables.TableFamily{nftables.TableFamilyIPv4}
	if v6 {
		families = append(families, nftables.TableFamilyIPv6)
	}
	ifname := make([]byte, unix.IFNAMSIZ)
	copy(ifname, link)
	for _, f := range families {
		table := c.AddTable(&nftables.Table{Family: f, Name: "testnet-nat"})
		chain := c.AddChain(&nftables.Chain{
			Name: "postrouting", Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname},
			&expr.Masq{},
		}})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("masquerade %s/%s: %w", n.Name, link, err)
	}
	return nil
}

// MarkConnections gives every connection a mark, as a classifier does that
// remembers what it has found out.
func (n *Namespace) MarkConnections(mark uint32) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "testnet-mark"})
	for name, hook := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting, "output": nftables.ChainHookOutput} {
		chain := c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityMangle,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint32(nil, mark)},
			&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
		}})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("mark connections in %s: %w", n.Name, err)
	}
	return nil
}

// FlowTable makes a flow table of links, as a firewall with flow offload does.
// Nothing is put there before UseFlowTable.
func (n *Namespace) FlowTable(table, name string, links ...string) error {
	return n.makeFlowTable(table, name, 0, links)
}

// HardwareFlowTable is FlowTable for what links do by themselves. The kernel
// refuses it for links that can't.
func (n *Namespace) HardwareFlowTable(table, name string, links ...string) error {
	return n.makeFlowTable(table, name, nftables.FlowtableFlagsHWOffload, links)
}

func (n *Namespace) makeFlowTable(table, name string, flags nftables.FlowtableFlags, links []string) error {
	return n.flowTable(table, name, func(c *nftables.Conn, t *nftables.Table) {
		c.AddFlowtable(&nftables.Flowtable{
			Table: t, Name: name, Devices: links, Flags: flags,
			Hooknum: nftables.FlowtableHookIngress, Priority: nftables.FlowtablePriorityFilter,
		})
	})
}

// UseFlowTable adds a rule that puts forwarded connections into a flow table.
func (n *Namespace) UseFlowTable(table, name string) error {
	return n.flowTable(table, name, func(c *nftables.Conn, t *nftables.Table) {
		chain := c.AddChain(&nftables.Chain{
			Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
		})
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
			&expr.FlowOffload{Name: name}, // which does nothing to what is neither TCP nor UDP
		}})
	})
}

func (n *Namespace) flowTable(table, name string, change func(*nftables.Conn, *nftables.Table)) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	change(c, c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: table}))
	if err := c.Flush(); err != nil {
		return fmt.Errorf("flow table %s in %s: %w", name, n.Name, err)
	}
	return nil
}

// VLAN makes a VLAN of a link.
func (n *Namespace) VLAN(link, name string, id int) error {
	l, err := n.link(link)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, l.Attrs().Index
	if err := n.nl.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: id}); err != nil {
		return fmt.Errorf("add VLAN %s/%s: %w", n.Name, name, err)
	}
	return n.Up(name)
}

// Rules returns how many rules the chains of a name have, in the tables of a
// name taken together.
func (n *Namespace) Rules(table, chain string) (int, error) {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return 0, fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return 0, fmt.Errorf("list chains in %s: %w", n.Name, err)
	}
	count := 0
	for _, ch := range chains {
		if ch.Table.Name != table || ch.Name != chain {
			continue
		}
		rules, err := c.GetRules(ch.Table, ch)
		if err != nil {
			return 0, fmt.Errorf("list rules in %s: %w", n.Name, err)
		}
		count += len(rules)
	}
	return count, nil
}

// DeleteTables deletes the nftables tables whose name begins with prefix.
func (n *Namespace) DeleteTables(prefix string) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	tables, err := c.ListTables()
	if err != nil {
		return fmt.Errorf("list tables in %s: %w", n.Name, err)
	}
	for _, t := range tables {
		if strings.HasPrefix(t.Name, prefix) {
			c.DelTable(t)
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("delete tables in %s: %w", n.Name, err)
	}
	return nil
}

// Counters returns the packets and bytes that a link has received and sent.
func (n *Namespace) Counters(link string) (rxPackets, rxBytes, txPackets, txBytes uint64, err error) {
	l, err := n.link(link)
	if err != nil {
		return 0, 0, 0, 0, err
	}
	s := l.Attrs().Statistics
	if s == nil {
		return 0, 0, 0, 0, fmt.Errorf("link %s/%s has no counters", n.Name, link)
	}
	return s.RxPackets, s.RxBytes, s.TxPackets, s.TxBytes, nil
}

func (n *Namespace) link(name string) (netlink.Link, error) {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("link %s/%s: %w", n.Name, name, err)
	}
	return l, nil
}

// Tables returns the nftables tables of the namespace, such as "ip nat".
func (n *Namespace) Tables() ([]string, error) {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return nil, fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	tables, err := c.ListTables()
	if err != nil {
		return nil, fmt.Errorf("list tables in %s: %w", n.Name, err)
	}
	families := map[nftables.TableFamily]string{
		nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyINet: "inet",
		nftables.TableFamilyBridge: "bridge", nftables.TableFamilyNetdev: "netdev", nftables.TableFamilyARP: "arp",
	}
	var names []string
	for _, t := range tables {
		names = append(names, families[t.Family]+" "+t.Name)
	}
	return names, nil
}
