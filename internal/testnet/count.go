package testnet

import (
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The rules of links are told apart by their user data. Kernels of routers may
// have no counters with names.
const (
	countTable = "testnet-count"
	countChain = "postrouting"
)

// CountSmall counts what leaves through a link in packets of at most maxBytes
// at the IP layer, such as acknowledgements. It counts behind everything that
// may hold packets back at the hooks.
func (n *Namespace) CountSmall(link string, maxBytes uint16) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	ifname := make([]byte, unix.IFNAMSIZ)
	copy(ifname, link)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: countTable})
	chain := c.AddChain(&nftables.Chain{
		Name: countChain, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityLast,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, UserData: []byte(link), Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname},
		&expr.Meta{Key: expr.MetaKeyLEN, Register: 1},
		// Registers are compared byte by byte.
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: binaryutil.BigEndian.PutUint32(uint32(maxBytes))},
		&expr.Counter{},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("count small packets on %s/%s: %w", n.Name, link, err)
	}
	return nil
}

// Small returns what CountSmall has counted.
func (n *Namespace) Small(link string) (packets, bytes uint64, err error) {
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns)))
	if err != nil {
		return 0, 0, fmt.Errorf("open nftables in %s: %w", n.Name, err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: countTable}
	rules, err := c.GetRules(table, &nftables.Chain{Table: table, Name: countChain})
	if err != nil {
		return 0, 0, fmt.Errorf("read counter of %s/%s: %w", n.Name, link, err)
	}
	for _, r := range rules {
		if counter, ok := r.Exprs[len(r.Exprs)-1].(*expr.Counter); ok && string(r.UserData) == link {
			return counter.Packets, counter.Bytes, nil
		}
	}
	return 0, 0, fmt.Errorf("read counter of %s/%s: there is none", n.Name, link)
}
