package kernel

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// These tests need a kernel with sch_cake and skip on one without. Compiled
// with go test -c they run in the lab:
//
//	GOOS=linux GOARCH=mips GOMIPS=softfloat CGO_ENABLED=0 go test -c -o kernel.test ./agent/dataplane/kernel
//	run.sh -i none -t -e CAKEFLEET_REQUIRE_CAKE=1 kernel.test -test.v
//
// With CAKEFLEET_REQUIRE_CAKE set they fail where they would skip. With
// CAKEFLEET_RECORD set they print what they get from the kernel, which is where
// testdata comes from.

// home is a router's WAN interface wan with something behind it.
type home struct {
	router, isp *testnet.Namespace
}

func newHome(t *testing.T) home {
	testnet.Require(t)
	h := home{testnet.Make(t, "router"), testnet.Make(t, "isp")}
	for _, err := range []error{
		testnet.Veth(h.router, "wan", h.isp, "line"),
		h.router.Addr("wan", "192.0.2.2/24"),
		h.isp.Addr("line", "192.0.2.1/24"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func (h home) open(t *testing.T, c Config) *Dataplane {
	t.Helper()
	c.Interface, c.MaxRate = "wan", testMaxRate
	var d *Dataplane
	err := h.router.Do(func() (err error) {
		d, err = Open(c)
		return err
	})
	if errors.Is(err, dataplane.ErrUnsupported) {
		if os.Getenv("CAKEFLEET_REQUIRE_CAKE") != "" {
			t.Fatal(err)
		}
		t.Skip("skipped: ", err)
	}
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

// tc runs tc(8) in the router.
func (h home) tc(t *testing.T, args ...string) string {
	t.Helper()
	path, err := exec.LookPath("tc")
	if err != nil {
		t.Skip("skipped: no tc(8) here")
	}
	cmd := exec.Command(path, args...)
	var out, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := h.router.Run(cmd); err != nil {
		t.Fatalf("tc %v: %v: %s", args, err, stderr.String())
	}
	return out.String()
}

// send makes packets go through wan, both ways.
func (h home) send(t *testing.T, packets int) {
	t.Helper()
	var router, isp net.PacketConn
	listen := func(n *testnet.Namespace, addr string, c *net.PacketConn) {
		err := n.Do(func() (err error) {
			*c, err = net.ListenPacket("udp4", addr)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	listen(h.router, "192.0.2.2:5000", &router)
	listen(h.isp, "192.0.2.1:5000", &isp)
	defer router.Close()
	defer isp.Close()
	go echo(isp)
	buf := make([]byte, 1000)
	for i := range packets {
		if err := router.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := router.WriteTo(buf[:100+i%900], isp.LocalAddr()); err != nil {
			t.Fatal(err)
		}
		if _, _, err := router.ReadFrom(buf); err != nil {
			t.Fatal(err)
		}
	}
}

func echo(c net.PacketConn) {
	buf := make([]byte, 2000)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = c.WriteTo(buf[:n], from)
	}
}

// TestKernelUnsupported wants a kernel without sch_cake to be told apart, and
// nothing left by the rehearsal.
func TestKernelUnsupported(t *testing.T) {
	h := newHome(t)
	var d *Dataplane
	err := h.router.Do(func() (err error) {
		d, err = Open(Config{Interface: "wan"})
		return err
	})
	links := func() string {
		var names []string
		err := h.router.Do(func() error {
			ifs, err := net.Interfaces()
			for _, i := range ifs {
				names = append(names, i.Name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(names, " ")
	}
	if got := links(); got != "lo wan" {
		t.Errorf("interfaces: %s", got)
	}
	if err == nil {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		return
	}
	if !errors.Is(err, dataplane.ErrUnsupported) {
		t.Error(err)
	}
	t.Log(err)
}

func TestKernelContract(t *testing.T) {
	dataplanetest.Run(t, func(t *testing.T) dataplanetest.Subject {
		h := newHome(t)
		d := h.open(t, Config{})
		return dataplanetest.Subject{Dataplane: d, MaxRate: testMaxRate, Shaping: func() bool {
			return strings.Contains(h.tc(t, "qdisc", "show"), "qdisc cake ")
		}}
	})
}

// TestKernelEverything sets every option both ways, and wants tc to show the
// same words and the same numbers as we do.
func TestKernelEverything(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	l := dataplanetest.Link()
	for _, c := range []engine.Config{l.Up, odd(), l.Down, engine.DefaultConfig()} {
		if c.Rate == 0 {
			c.Wash = true // so that it is not left alone
		}
		for tins := engine.Diffserv3; tins <= engine.Precedence; tins++ {
			c.Tins = tins
			l.Down, l.Up = c, c
			if eff := mustApply(t, d, l); len(eff.Clamps) != 0 || eff.Link != l {
				t.Errorf("runs %+v, clamps %v", eff.Link, eff.Clamps)
			}
			h.send(t, 30)
			h.compare(t, d)
		}
	}
	var st dataplane.Stats
	if !d.Stats(&st) || st.Up.SentPackets < 4*5*30 || st.Down.SentPackets < 4*5*30 {
		t.Errorf("%d packets up, %d down", st.Up.SentPackets, st.Down.SentPackets)
	}
}

// compare wants the listings of tc(8) and ours to be the same to the byte.
func (h home) compare(t *testing.T, d *Dataplane) {
	t.Helper()
	for _, up := range []bool{true, false} {
		var before, after nlmsg.Message
		var text, json string
		// What changes while tc looks can't be compared.
		for try := 0; ; try++ {
			before = h.root(t, d, up)
			dev := "wan"
			if !up {
				dev = h.ifb(t, d)
			}
			text = h.tc(t, "-s", "qdisc", "show", "dev", dev, "root")
			json = h.tc(t, "-j", "-s", "qdisc", "show", "dev", dev, "root")
			after = h.root(t, d, up)
			if bytes.Equal(before.Body, after.Body) {
				break
			}
			if try == 50 {
				t.Fatal("it does not come to rest")
			}
		}
		ours, ourJSON := listing(decode(t, after))
		if text != ours {
			t.Errorf("text (-tc +ours):\n%s", cmp.Diff(text, ours))
		}
		if json != ourJSON {
			t.Errorf("json (-tc +ours):\n%s", cmp.Diff(json, ourJSON))
		}
		if os.Getenv("CAKEFLEET_RECORD") != "" {
			fmt.Printf("RECORD %s\n%s\n%s%sEND\n", strings.ReplaceAll(t.Name(), "/", "_"), hex.EncodeToString(after.Body), text, json)
		}
	}
}

func decode(t *testing.T, m nlmsg.Message) qdisc {
	t.Helper()
	q, ok := decodeQdisc(native(), m)
	if !ok {
		t.Fatalf("not a qdisc: %x", m.Body)
	}
	return q
}

func (h home) ifb(t *testing.T, d *Dataplane) string {
	t.Helper()
	w, err := d.look()
	if err != nil {
		t.Fatal(err)
	}
	return w.ifb.name
}

// root is the message about the root qdisc of one direction.
func (h home) root(t *testing.T, d *Dataplane, up bool) nlmsg.Message {
	t.Helper()
	w, err := d.look()
	if err != nil {
		t.Fatal(err)
	}
	all, err := d.conn.do(allQdiscs())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		index := w.wan.index
		if !up {
			index = w.ifb.index
		}
		if q, ok := decodeQdisc(native(), m); ok && q.index == index && q.parent == parentRoot {
			return m
		}
	}
	t.Fatal("no root qdisc")
	return nlmsg.Message{}
}

// TestKernelKilled leaves everything as a killed agent does, and wants the next
// one to go on without a gap and to remove it all.
func TestKernelKilled(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	mustApply(t, d, dataplanetest.Link())
	h.send(t, 20)
	next := h.open(t, Config{})
	mustApply(t, next, dataplanetest.Link())
	var st dataplane.Stats
	if !next.Stats(&st) || st.Up.SentPackets < 20 || st.Down.SentPackets < 20 {
		t.Errorf("%d packets up, %d down", st.Up.SentPackets, st.Down.SentPackets)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	if got := h.tc(t, "qdisc", "show"); strings.Contains(got, "cake") || strings.Contains(got, "ffff:") {
		t.Errorf("left:\n%s", got)
	}
}

// TestKernelFault083 wants attributes of the wrong length to be refused, which
// is why every one of ours has the right one.
func TestKernelFault083(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	mustApply(t, d, dataplanetest.Link())
	w, err := d.look()
	if err != nil {
		t.Fatal(err)
	}
	req := request(unix.RTM_NEWQDISC, ack, func(b *nlmsg.Builder) {
		tcmsg(b, w.wan.index, ourHandle, parentRoot, 0)
		b.Str(tcaKind, "cake")
		b.Nest(tcaOptions, func() { b.Attr(cakeSplitGSO, []byte{1, 0}) })
	})
	if err := d.request("change", req); err == nil {
		t.Log("this kernel does not check the length of split-gso")
	}
	var st dataplane.Stats
	if !d.Stats(&st) {
		t.Error("the options have changed")
	}
}

// TestKernelFault088 wants download to go through the ifb, both with matchall
// and with marks.
func TestKernelFault088(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	l := dataplanetest.Link()
	for _, mark := range []uint32{0, 0xff, 0} {
		l.Down.Fwmark = mark
		mustApply(t, d, l)
		var before, after dataplane.Stats
		d.Stats(&before)
		h.send(t, 50)
		if !d.Stats(&after) || after.Down.SentPackets < before.Down.SentPackets+50 {
			t.Errorf("mark %#x: %d packets, then %d", mark, before.Down.SentPackets, after.Down.SentPackets)
		}
	}
}

// TestKernelFault104 puts a size table on our cake and wants it gone.
func TestKernelFault104(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	mustApply(t, d, dataplanetest.Link())
	h.tc(t, "qdisc", "change", "dev", "wan", "root", "handle", "ca4e:", "stab", "overhead", "40", "linklayer", "atm", "cake")
	w, err := d.look()
	if err != nil || !w.root.stab {
		t.Fatalf("no size table: %v", err)
	}
	mustApply(t, d, dataplanetest.Link())
	if w, err = d.look(); err != nil || w.root.stab {
		t.Errorf("the size table is still there: %v", err)
	}
}

// TestKernelTakeover replaces qdiscs of every kind that can be put back, and
// compares what tc shows before and after.
func TestKernelTakeover(t *testing.T) {
	for _, args := range []string{
		"fq_codel limit 1234 target 7ms ecn", "fq_codel flows 64 memory_limit 4Mb noecn", "pfifo limit 77", "bfifo limit 77777",
		"codel target 9ms ce_threshold 3ms", "fq limit 5000 flow_limit 50", "cake bandwidth 17mbit overhead 18 mpu 64 besteffort",
	} {
		t.Run(args, func(t *testing.T) {
			h := newHome(t)
			d := h.open(t, Config{Takeover: true})
			h.tc(t, append(strings.Fields("qdisc add dev wan root handle 7:"), strings.Fields(args)...)...)
			before := h.tc(t, "qdisc", "show", "dev", "wan")
			mustApply(t, d, dataplanetest.Link())
			if got := h.tc(t, "qdisc", "show", "dev", "wan"); !strings.Contains(got, "cake ca4e:") {
				t.Errorf("not replaced:\n%s", got)
			}
			if err := d.Clear(context.Background()); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(before, h.tc(t, "qdisc", "show", "dev", "wan")); diff != "" {
				t.Error(diff)
			}
		})
	}
	for _, args := range []string{"htb default 1", "sfq perturb 10", "stab overhead 10 pfifo"} {
		t.Run("not "+args, func(t *testing.T) {
			h := newHome(t)
			d := h.open(t, Config{Takeover: true})
			h.tc(t, append(strings.Fields("qdisc add dev wan root handle 7:"), strings.Fields(args)...)...)
			rejection(t, d, dataplanetest.Link())
			if got := h.tc(t, "qdisc", "show"); !strings.Contains(got, " 7: dev wan root") || strings.Contains(got, "cake") {
				t.Errorf("there is\n%s", got)
			}
		})
	}
}
