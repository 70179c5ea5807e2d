package main

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/engine"
)

// Attributes of linux/pkt_sched.h.
const (
	cakeBaseRate64 = 2
	cakeDiffserv   = 3
	cakeATM        = 4
	cakeFlowMode   = 5
	cakeOverhead   = 6
	cakeRTT        = 7
	cakeNAT        = 11
	cakeRaw        = 12
	cakeWash       = 13
	cakeIngress    = 15
	cakeAckFilter  = 16
	cakeSplitGSO   = 17
)

// cake puts sch_cake on an interface, set by the keywords that tc takes. It is
// done here by hand, so that what the agent does is compared with something
// else than itself.
func cake(dev string, rate uint64, words string) error {
	c, err := engine.ParseKeywords(engine.DefaultConfig(), words)
	if err != nil {
		return err
	}
	i, err := index(dev)
	if err != nil {
		return err
	}
	diffserv := map[engine.TinMode]uint32{engine.Diffserv3: 0, engine.Diffserv4: 1, engine.Diffserv8: 2, engine.BestEffort: 3, engine.Precedence: 4}
	flag := func(b bool) uint32 {
		if b {
			return 1
		}
		return 0
	}
	req := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(i), Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("cake")))
	o := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	o.AddRtAttr(cakeBaseRate64, nl.Uint64Attr(rate/8))
	for _, a := range []struct {
		attr  int
		value uint32
	}{
		{cakeDiffserv, diffserv[c.Tins]},
		{cakeFlowMode, uint32(c.Flows)},
		{cakeRTT, uint32(c.RTT.Microseconds())},
		{cakeNAT, flag(c.NAT)},
		{cakeWash, flag(c.Wash)},
		{cakeIngress, flag(c.Ingress)},
		{cakeAckFilter, uint32(c.AckFilter)},
		{cakeSplitGSO, flag(c.SplitGSO)},
	} {
		o.AddRtAttr(a.attr, nl.Uint32Attr(a.value))
	}
	if c.Raw {
		o.AddRtAttr(cakeRaw, nl.Uint32Attr(0))
	} else {
		o.AddRtAttr(cakeOverhead, nl.Uint32Attr(uint32(int32(c.Overhead))))
		o.AddRtAttr(cakeATM, nl.Uint32Attr(uint32(c.Framing)))
	}
	req.AddData(o)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("add cake: %w", err)
	}
	return nil
}
