package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/state"
	"github.com/cakefleet/cakefleet/deploy/lab/row"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// ifbName is what sqm-scripts calls the interface that shapes the download.
const ifbName = "ifb4" + wanName

const (
	agentPath = "/bin/cakefleet-agent"
	agentLog  = "/tmp/agent.log"
	agentDir  = "/tmp/state"
)

// shape puts the shaper on the WAN link. What it returns is the agent's
// process, if that is what shapes.
func shape(o row.Order) (*exec.Cmd, error) {
	var err error
	switch o.Shaper {
	case row.None:
	case row.FIFO:
		// A modem's buffers: 100 ms down and, as the customer had them, 230 ms up.
		err = bothWays(func(dev string, rate uint64, up bool) error {
			held := rate / 8 / 10
			if up {
				held = rate / 8 * 230 / 1000
			}
			return fifo(dev, rate, uint32(held))
		}, o)
	case row.HTB:
		err = bothWays(func(dev string, rate uint64, up bool) error {
			if up {
				return errors.Join(markPackets(), htbTiers(dev, rate))
			}
			return htbOne(dev, rate)
		}, o)
	case row.Cake:
		err = bothWays(func(dev string, rate uint64, up bool) error {
			words := o.DownWords
			if up {
				words = o.UpWords
			}
			return cake(dev, rate, words)
		}, o)
	case row.Userspace, row.Kernel:
		return startAgent(o)
	default:
		err = fmt.Errorf("no such shaper: %q", o.Shaper)
	}
	if err != nil {
		return nil, fmt.Errorf("set up %s: %w", o.Shaper, err)
	}
	return nil, nil
}

// startAgent starts the router's agent with a state that it ran before, and
// waits until it shapes.
func startAgent(o row.Order) (*exec.Cmd, error) {
	link := plan.Link{}
	for _, d := range []struct {
		config *engine.Config
		rate   uint64
		words  string
	}{{&link.Down, o.DownRate, o.DownWords}, {&link.Up, o.UpRate, o.UpWords}} {
		c, err := engine.ParseKeywords(engine.DefaultConfig(), d.words)
		if err != nil {
			return nil, err
		}
		c.Rate = engine.BitsPerSecond(d.rate)
		*d.config = c
	}
	if err := os.MkdirAll(agentDir, 0o755); err != nil {
		return nil, err
	}
	store, _, _, err := state.Open(agentDir)
	if err != nil && !errors.Is(err, state.ErrNone) {
		return nil, err
	}
	if err := store.Save(state.State{Desired: plan.Desired{Revision: 1, Hash: link.Hash(), Link: &link}, Saved: time.Now()}); err != nil {
		return nil, err
	}
	log, err := os.Create(agentLog)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	address := gateway4 // where nobody answers
	if o.Kind == "idle" {
		address = controllerAddress
		if err := introduce(agentDir); err != nil {
			return nil, fmt.Errorf("give the agent an identity: %w", err)
		}
	}
	cmd := exec.Command(agentPath, "--controller", address, "--interface", wanName, "--state-dir", agentDir, "--dataplane", string(o.Shaper))
	cmd.Env = append(os.Environ(), o.AgentEnv...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start agent: %w", err)
	}
	for range 100 {
		time.Sleep(100 * time.Millisecond)
		running := alive(cmd) // before its last words are read
		b, err := os.ReadFile(log.Name())
		if err != nil {
			return nil, err
		}
		if strings.Contains(string(b), "state runs") {
			return cmd, nil
		}
		if !running {
			return nil, errors.Join(fmt.Errorf("agent ended: %s", b), cmd.Wait())
		}
		if strings.Contains(string(b), "[ERROR]") {
			return nil, fmt.Errorf("agent does not shape: %s", b)
		}
	}
	b, _ := os.ReadFile(log.Name())
	return nil, fmt.Errorf("agent does not shape after 10 s: %s", b)
}

func alive(cmd *exec.Cmd) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// bothWays shapes what leaves on the WAN interface for the upload, and an ifb
// that everything arriving there is sent through for the download.
func bothWays(set func(dev string, rate uint64, up bool) error, o row.Order) error {
	if err := set(wanName, o.UpRate, true); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = ifbName
	ifb := &netlink.Ifb{LinkAttrs: attrs}
	if err := netlink.LinkAdd(ifb); err != nil {
		return fmt.Errorf("add %s: %w", ifbName, err)
	}
	if err := set(ifbName, o.DownRate, false); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(ifb); err != nil {
		return err
	}
	wan, err := netlink.LinkByName(wanName)
	if err != nil {
		return err
	}
	ingress := netlink.MakeHandle(0xffff, 0)
	if err := netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: wan.Attrs().Index, Parent: netlink.HANDLE_INGRESS, Handle: ingress,
	}}); err != nil {
		return fmt.Errorf("add ingress: %w", err)
	}
	if err := netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: wan.Attrs().Index, Parent: ingress, Priority: 10, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1),
		Actions:     []netlink.Action{netlink.NewMirredAction(ifb.Attrs().Index)},
	}); err != nil {
		return fmt.Errorf("redirect to %s: %w", ifbName, err)
	}
	return nil
}

func index(dev string) (int, error) {
	l, err := netlink.LinkByName(dev)
	if err != nil {
		return 0, fmt.Errorf("interface %s: %w", dev, err)
	}
	return l.Attrs().Index, nil
}

// fifo is a token bucket with one queue of so many bytes.
func fifo(dev string, rate uint64, bytes uint32) error {
	i, err := index(dev)
	if err != nil {
		return err
	}
	const burst = 8 << 10
	return netlink.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: i, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate / 8, Limit: bytes, Buffer: netlink.Xmittime(rate/8, burst),
	})
}

// htb makes the root and the class that all share.
func htb(i int, rate uint64, defaultClass uint32) error {
	root := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: i, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT})
	root.Defcls = defaultClass
	if err := netlink.QdiscAdd(root); err != nil {
		return fmt.Errorf("add htb: %w", err)
	}
	return htbClass(i, 0, 1, rate, rate, 0)
}

// htbClass adds 1:minor below 1:parent, with the burst of 1 ms that
// sqm-scripts gives.
func htbClass(i int, parent, minor uint16, rate, ceil uint64, prio uint32) error {
	burst := max(uint32(rate/8/1000), 1600)
	c := netlink.NewHtbClass(
		netlink.ClassAttrs{LinkIndex: i, Parent: netlink.MakeHandle(1, parent), Handle: netlink.MakeHandle(1, minor)},
		netlink.HtbClassAttrs{Rate: rate, Ceil: ceil, Buffer: burst, Cbuffer: burst, Quantum: 1500, Prio: prio})
	if err := netlink.ClassAdd(c); err != nil {
		return fmt.Errorf("add class 1:%d: %w", minor, err)
	}
	return nil
}

// fqCodel is the leaf below 1:parent.
func fqCodel(i int, parent, handle uint16, target time.Duration, ecn uint32) error {
	q := netlink.NewFqCodel(netlink.QdiscAttrs{LinkIndex: i, Handle: netlink.MakeHandle(handle, 0), Parent: netlink.MakeHandle(1, parent)})
	q.Limit, q.Flows, q.ECN = 1001, 1024, ecn
	q.Target, q.Interval = uint32(target.Microseconds()), 100_000
	q.Quantum = 300
	if err := netlink.QdiscAdd(q); err != nil {
		return fmt.Errorf("add fq_codel below 1:%d: %w", parent, err)
	}
	return nil
}

// htbOne is simple.qos' download: one class, ECN.
func htbOne(dev string, rate uint64) error {
	i, err := index(dev)
	if err != nil {
		return err
	}
	if err := htb(i, rate, 0x10); err != nil {
		return err
	}
	if err := htbClass(i, 1, 0x10, rate, rate, 0); err != nil {
		return err
	}
	return fqCodel(i, 0x10, 0x110, 5*time.Millisecond, 1)
}

// htbTiers is simple.qos' upload: three tiers by firewall mark.
func htbTiers(dev string, rate uint64) error {
	i, err := index(dev)
	if err != nil {
		return err
	}
	if err := htb(i, rate, 0x12); err != nil {
		return err
	}
	for _, c := range []struct {
		minor      uint16
		rate, ceil uint64
		prio       uint32
	}{
		{0x11, 128_000, rate / 3, 1},
		{0x12, rate / 6, rate - 16_000, 2},
		{0x13, rate / 6, rate - 16_000, 3},
	} {
		if err := errors.Join(
			htbClass(i, 1, c.minor, c.rate, c.ceil, c.prio),
			fqCodel(i, c.minor, 0x100+c.minor, 5*time.Millisecond, 0),
		); err != nil {
			return err
		}
	}
	prio := uint16(1)
	for _, proto := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
		for mark := uint32(1); mark <= 3; mark++ {
			if err := netlink.FilterAdd(&netlink.FwFilter{
				FilterAttrs: netlink.FilterAttrs{LinkIndex: i, Parent: netlink.MakeHandle(1, 0), Priority: prio, Protocol: proto, Handle: mark},
				ClassId:     netlink.MakeHandle(1, uint16(0x10+mark)),
				Mask:        0xff,
			}); err != nil {
				return fmt.Errorf("add filter for mark %d: %w", mark, err)
			}
			prio++
		}
	}
	return nil
}

// markPackets is simple.qos' table of what is urgent and what is background:
// one jump by interface and six looks at the DSCP.
func markPackets() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		t := c.AddTable(&nftables.Table{Family: family, Name: "sqm"})
		post := c.AddChain(&nftables.Chain{Name: "postrouting", Table: t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityMangle})
		mark := c.AddChain(&nftables.Chain{Name: "qos-mark", Table: t})
		c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname(wanName)},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native32(0xff), Xor: native32(0)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native32(0)},
			&expr.Verdict{Kind: expr.VerdictGoto, Chain: "qos-mark"},
		}})
		set := func(value uint32, match ...expr.Any) {
			c.AddRule(&nftables.Rule{Table: t, Chain: mark, Exprs: append(match,
				&expr.Immediate{Register: 1, Data: native32(value)},
				&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1})})
		}
		set(2)
		for _, d := range []struct{ dscp, mark uint32 }{{8, 3}, {48, 1}, {46, 1}, {36, 1}, {4, 1}} {
			var match []expr.Any
			if family == nftables.TableFamilyIPv4 {
				match = []expr.Any{
					&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 1, Len: 1},
					&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0xfc}, Xor: []byte{0}},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(d.dscp << 2)}},
				}
			} else {
				match = []expr.Any{
					&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 2},
					&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0x0f, 0xc0}, Xor: []byte{0, 0}},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(d.dscp >> 2), byte(d.dscp << 6)}},
				}
			}
			set(d.mark, match...)
		}
	}
	return c.Flush()
}
