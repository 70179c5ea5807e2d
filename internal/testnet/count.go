package testnet

import (
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const countTable = "testnet-count"

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
		Name: "postrouting", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityLast,
	})
	c.AddObj(&nftables.NamedObj{Table: table, Name: link, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname},
		&expr.Meta{Key: expr.MetaKeyLEN, Register: 1},
		// Registers are compared byte by byte.
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: binaryutil.BigEndian.PutUint32(uint32(maxBytes))},
		&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: link},
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
	obj, err := c.GetObject(&nftables.NamedObj{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: countTable},
		Name:  link, Type: nftables.ObjTypeCounter,
	})
	if err != nil {
		return 0, 0, fmt.Errorf("read counter of %s/%s: %w", n.Name, link, err)
	}
	if o, ok := obj.(*nftables.NamedObj); ok {
		if counter, ok := o.Obj.(*expr.Counter); ok {
			return counter.Packets, counter.Bytes, nil
		}
	}
	return 0, 0, fmt.Errorf("read counter of %s/%s: it is a %T", n.Name, link, obj)
}
