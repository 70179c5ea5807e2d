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
	"regexp"
	"slices"
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

// These tests need a kernel with sch_cake and skip on one without; test/machine
// runs them on several:
//
//	go run ./test/machine --kernel mips ./agent/dataplane/kernel
//
// With CAKEFLEET_REQUIRE_CAKE set they fail where they would skip. With
// CAKEFLEET_RECORD set they print what they get from the kernel, which is where
// testdata comes from.

// home is a router's WAN interface wan with something behind it.
type home struct {
	router, isp *testnet.Namespace
	options     map[uint32][]byte // of stand-ins, see openAny
	queues      int               // of wan, each way; as only newer kernels give an interface several by themselves, one unless said
}

func newHome(t testing.TB) home { return newHomeWith(t, 1) }

func newHomeWith(t testing.TB, queues int) home {
	testnet.Require(t)
	h := home{testnet.Make(t, "router"), testnet.Make(t, "isp"), map[uint32][]byte{}, queues}
	h.connect(t)
	return h
}

func (h home) connect(t testing.TB) {
	t.Helper()
	for _, do := range []func() error{
		func() error { return testnet.VethQueues(h.router, "wan", h.isp, "line", h.queues) },
		func() error { return h.router.Addr("wan", "192.0.2.2/24") },
		func() error { return h.isp.Addr("line", "192.0.2.1/24") },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
}

// open opens a data plane on wan. It skips the test without sch_cake.
func (h home) open(t testing.TB, c Config) *Dataplane {
	t.Helper()
	d, err := h.tryOpen(t, c)
	if errors.Is(err, dataplane.ErrUnsupported) {
		if os.Getenv("CAKEFLEET_REQUIRE_CAKE") != "" {
			t.Fatal(err)
		}
		t.Skip("skipped: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (h home) tryOpen(t testing.TB, c Config) (*Dataplane, error) {
	t.Helper()
	c.Interface, c.MaxRate = "wan", testMaxRate
	var d *Dataplane
	err := h.router.Do(func() (err error) {
		d, err = Open(c)
		return err
	})
	if err == nil {
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return d, err
}

// openAny is open that puts a stand-in for cake where the kernel has none:
// ifb, ingress, redirect and all the rest are real then, too.
func (h home) openAny(t *testing.T) *Dataplane {
	t.Helper()
	d, err := h.tryOpen(t, Config{})
	if !errors.Is(err, dataplane.ErrUnsupported) || os.Getenv("CAKEFLEET_REQUIRE_CAKE") != "" {
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	var sock *socket
	err = h.router.Do(func() (err error) {
		sock, err = dial()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	d, err = open(Config{Interface: "wan", MaxRate: testMaxRate}, &standIn{conn: sock, options: h.options})
	if errors.Is(err, dataplane.ErrUnsupported) {
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

// standIn has the kernel make a pfifo where it is asked for a cake, and lists
// that as a cake with the options that were given.
type standIn struct {
	conn
	options map[uint32][]byte // by interface
}

func (s *standIn) do(req []byte) ([]nlmsg.Message, error) {
	o := native()
	m, _, _ := nlmsg.Next(o, req)
	if m.Type == unix.RTM_NEWQDISC {
		attrs := nlmsg.Attrs{Order: o, Bytes: m.Body[tcmsgLen:]}
		if kind, _ := attrs.Find(tcaKind); kind.Str() == "cake" {
			options, _ := attrs.Find(tcaOptions)
			s.options[o.Uint32(m.Body[4:])] = bytes.Clone(options.Bytes)
			req = request(m.Type, m.Flags, func(b *nlmsg.Builder) {
				b.Raw(m.Body[:tcmsgLen]...)
				b.Str(tcaKind, "pfifo")
			})
		}
	}
	answers, err := s.conn.do(req)
	for i := range answers {
		q, ok := decodeQdisc(o, answers[i])
		if !ok || q.handle != ourHandle {
			continue
		}
		b := nlmsg.Builder{Order: o}
		b.Raw(answers[i].Body[:tcmsgLen]...)
		b.Str(tcaKind, "cake")
		b.Attr(tcaOptions, s.options[q.index])
		b.Attr(tcaStats2, q.stats.Bytes)
		answers[i].Body = b.Bytes
	}
	return answers, err
}

// ourQdiscs counts qdiscs with our handle, ingress qdiscs, and interfaces that
// are ours, in the router.
func (h home) ourQdiscs(t *testing.T) (cakes, ingress, ifbs int) {
	t.Helper()
	var sock *socket
	err := h.router.Do(func() (err error) {
		sock, err = dial()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sock.close()
	qdiscs, err := sock.do(allQdiscs())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range qdiscs {
		q, _ := decodeQdisc(native(), m)
		switch q.handle {
		case ourHandle:
			cakes++
		case handleIngress:
			ingress++
		}
	}
	links, err := sock.do(allLinks())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range links {
		if l, _ := decodeLink(m); l.kind == "ifb" {
			ifbs++
		}
	}
	return cakes, ingress, ifbs
}

func (h home) wantNothing(t *testing.T) {
	t.Helper()
	if cakes, ingress, ifbs := h.ourQdiscs(t); cakes+ingress+ifbs != 0 {
		t.Errorf("left: %d cakes, %d ingress qdiscs, %d ifbs", cakes, ingress, ifbs)
	}
}

func (h home) wantAll(t *testing.T) {
	t.Helper()
	if cakes, ingress, ifbs := h.ourQdiscs(t); cakes != 2 || ingress != 1 || ifbs != 1 {
		t.Errorf("%d cakes, %d ingress qdiscs, %d ifbs", cakes, ingress, ifbs)
	}
}

// tc runs tc(8) in the router.
func (h home) tc(t *testing.T, args ...string) string {
	t.Helper()
	out, err := h.tryTC(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// addRoot puts a qdisc of somebody else's on wan. It skips the test where the
// kernel has none of the kind.
func (h home) addRoot(t *testing.T, args string) {
	t.Helper()
	_, err := h.tryTC(t, append(strings.Fields("qdisc add dev wan root handle 7:"), strings.Fields(args)...)...)
	if err != nil && (strings.Contains(err.Error(), "No such file or directory") || strings.Contains(err.Error(), "kind is unknown")) {
		t.Skip("skipped: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (h home) tryTC(t *testing.T, args ...string) (string, error) {
	t.Helper()
	path, err := exec.LookPath("tc")
	if err != nil {
		t.Skip("skipped: no tc(8) here")
	}
	cmd := exec.Command(path, args...)
	var out, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := h.router.Run(cmd); err != nil {
		return "", fmt.Errorf("tc %v: %w: %s", args, err, stderr.String())
	}
	return out.String(), nil
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
		if err := router.SetDeadline(time.Now().Add(time.Minute)); err != nil {
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
	before := links() // some kernels put tunnels into every namespace
	var d *Dataplane
	err := h.router.Do(func() (err error) {
		d, err = Open(Config{Interface: "wan"})
		return err
	})
	if got := links(); got != before {
		t.Errorf("interfaces: %s, before: %s", got, before)
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
		d := h.openAny(t)
		return dataplanetest.Subject{Dataplane: d, MaxRate: testMaxRate, Shaping: func() bool {
			cakes, _, _ := h.ourQdiscs(t)
			return cakes > 0
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
	if _, err := exec.LookPath("tc"); err != nil {
		t.Log("not compared: no tc(8) here")
		return
	}
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
		if diff := cmp.Diff(olderText(text), ours); diff != "" {
			t.Errorf("text (-tc +ours):\n%s", diff)
		}
		if diff := cmp.Diff(olderText(json), ourJSON); diff != "" {
			t.Errorf("json (-tc +ours):\n%s", diff)
		}
		if os.Getenv("CAKEFLEET_RECORD") != "" {
			fmt.Printf("RECORD %s\n%s\n%s%sEND\n", strings.ReplaceAll(t.Name(), "/", "_"), hex.EncodeToString(after.Body), text, json)
		}
	}
}

// newer is what tc(8) shows of a kernel with cake_mq: how many queues share the
// rate.
var newer = regexp.MustCompile(`(?m)^ active queues: .*\n|"active_queues":\d+,`)

// olderText is a listing as tc(8) showed it before, and we do.
func olderText(text string) string { return newer.ReplaceAllString(text, "") }

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

// TestFault046_KernelMQ puts cake_mq on an interface with several queues, and wants them
// to be one shaper for us: with the options that were asked for, and counters
// that are those that the kernel sums up itself.
func TestFault046_KernelMQ(t *testing.T) {
	h := newHomeWith(t, 4)
	d := h.open(t, Config{})
	l := dataplanetest.Link()
	mustApply(t, d, l)
	if root := decode(t, h.root(t, d, true)); root.kind != "cake_mq" {
		t.Skipf("skipped: this kernel has no cake_mq: it puts %s on several queues", root.kind)
	}
	for _, c := range []engine.Config{l.Up, odd(), l.Up} {
		for tins := engine.Diffserv3; tins <= engine.Precedence; tins++ {
			c.Tins = tins
			l.Up = c
			if eff := mustApply(t, d, l); len(eff.Clamps) != 0 || eff.Link != l {
				t.Errorf("runs %+v, clamps %v", eff.Link, eff.Clamps)
			}
			for range 32 {
				h.flood(t, h.router, "192.0.2.1:6000", 5)
			}
			h.compareMQ(t, d)
		}
	}
	var st dataplane.Stats
	if !d.Stats(&st) || st.Up.SentPackets < 3*5*32 { // of five times as many some are refused before they get here
		t.Errorf("%d packets", st.Up.SentPackets)
	}
	l.Up.Autorate = true // which cake_mq does not have
	mustApply(t, d, l)
	if root := decode(t, h.root(t, d, true)); root.kind != "cake" {
		t.Errorf("autorate-ingress is run by %s", root.kind)
	}
	if err := d.Clear(context.Background()); err != nil {
		t.Error(err)
	}
	h.wantNothing(t)
}

// compareMQ wants our sums to be the kernel's, and tc to show of each queue what
// we read.
func (h home) compareMQ(t *testing.T, d *Dataplane) {
	t.Helper()
	var before, after []nlmsg.Message
	var text, json string
	var st dataplane.Stats
	for end := time.Now().Add(time.Minute); ; {
		before = h.onWAN(t, d)
		text = h.tc(t, "-s", "qdisc", "show", "dev", "wan")
		json = h.tc(t, "-j", "-s", "qdisc", "show", "dev", "wan")
		ok := d.Stats(&st)
		after = h.onWAN(t, d)
		if ok && slices.EqualFunc(before, after, func(a, b nlmsg.Message) bool { return bytes.Equal(a.Body, b.Body) }) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it does not come to rest")
		}
	}
	var sum engine.Stats
	queues, busy := 0, 0
	for _, m := range after {
		q := decode(t, m)
		if q.kind == "cake" {
			queues++
			if packets(&q) > 0 {
				busy++
			}
		} else if q.parent == parentRoot {
			decodeStats(q.stats, &sum)
		}
	}
	if queues != h.queues || busy < 2 {
		t.Errorf("%d queues, and packets in %d of them", queues, busy)
	}
	type counts struct{ packets, bytes, drops, overlimits, backlog uint64 }
	of := func(s *engine.Stats) counts {
		return counts{s.SentPackets, s.SentBytes, s.Drops, s.Overlimits, s.Backlog}
	}
	if got, want := of(&st.Up), of(&sum); got != want {
		t.Errorf("sums are %+v, the kernel's %+v", got, want)
	}
	if os.Getenv("CAKEFLEET_RECORD") != "" {
		fmt.Printf("RECORD %s\n", t.Name())
		for _, m := range after {
			fmt.Println(hex.EncodeToString(m.Body))
		}
		fmt.Printf("%s%sEND\n", text, json)
	}
}

// onWAN are the messages about the qdiscs of wan that packets leave by.
func (h home) onWAN(t *testing.T, d *Dataplane) []nlmsg.Message {
	t.Helper()
	w, err := d.look()
	if err != nil {
		t.Fatal(err)
	}
	all, err := d.conn.do(allQdiscs())
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(m nlmsg.Message) bool {
		q, ok := decodeQdisc(native(), m)
		return !ok || q.index != w.wan.index || q.parent == parentIngress
	})
}

// TestKernelKilled leaves everything as a killed agent does, and wants the next
// one to go on without a gap and to remove it all.
func TestKernelKilled(t *testing.T) {
	h := newHome(t)
	mustApply(t, h.openAny(t), dataplanetest.Link())
	h.wantAll(t)
	h.send(t, 20)
	next := h.openAny(t)
	mustApply(t, next, dataplanetest.Link())
	var st dataplane.Stats
	if !next.Stats(&st) || st.Up.SentPackets < 20 || st.Down.SentPackets < 20 {
		t.Errorf("%d packets up, %d down", st.Up.SentPackets, st.Down.SentPackets)
	}
	h.wantAll(t)
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	h.wantNothing(t)
}

// TestKernelOneDirection wants a direction without a rate to be left alone.
func TestKernelOneDirection(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	for _, down := range []bool{true, false, true} {
		l := dataplanetest.Link()
		want := [3]int{1, 0, 0}
		if down {
			l.Up.Rate, want = 0, [3]int{1, 1, 1}
		} else {
			l.Down.Rate = 0
		}
		mustApply(t, d, l)
		cakes, ingress, ifbs := h.ourQdiscs(t)
		if got := [3]int{cakes, ingress, ifbs}; got != want {
			t.Errorf("%v, want %v", got, want)
		}
		h.send(t, 5)
	}
	if err := d.Clear(context.Background()); err != nil {
		t.Error(err)
	}
	h.wantNothing(t)
}

// TestKernelInterfaceComesBack takes the line away and brings it back.
func TestKernelInterfaceComesBack(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	mustApply(t, d, dataplanetest.Link())
	if err := h.router.Delete("wan"); err != nil {
		t.Fatal(err)
	}
	var st dataplane.Stats
	if d.Stats(&st) {
		t.Error("statistics without an interface")
	}
	if _, err := d.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Errorf("error is %v", err)
	}
	h.connect(t)
	mustApply(t, d, dataplanetest.Link())
	if _, _, ifbs := h.ourQdiscs(t); ifbs != 1 {
		t.Errorf("%d ifbs, want one", ifbs)
	}
	h.send(t, 5)
	if err := h.router.Delete("wan"); err != nil {
		t.Fatal(err)
	}
	if err := d.Clear(context.Background()); err != nil {
		t.Error(err)
	}
	h.wantNothing(t)
}

// TestKernelDeadRedirect removes the ifb from under the redirect, which drops
// everything that arrives, and wants that to be noticed and mended.
func TestKernelDeadRedirect(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	mustApply(t, d, dataplanetest.Link())
	w, err := d.look()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.router.Delete(w.ifb.name); err != nil {
		t.Fatal(err)
	}
	var st dataplane.Stats
	if d.Stats(&st) {
		t.Error("nothing was noticed")
	}
	mustApply(t, d, dataplanetest.Link())
	h.send(t, 5)
	h.wantAll(t)
}

// TestKernelOthersIngress leaves the filter of somebody else alone.
func TestKernelOthersIngress(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	h.tc(t, strings.Fields("qdisc add dev wan handle ffff: ingress")...)
	h.tc(t, strings.Fields("filter add dev wan parent ffff: protocol ip pref 10 u32 match ip dst 198.51.100.1/32 flowid 1:1")...)
	// The kernel shows with every filter the parent that was named last.
	show := func() string {
		return strings.ReplaceAll(h.tc(t, "filter", "show", "dev", "wan", "ingress"), "parent ffff: ", "")
	}
	before := show()
	mustApply(t, d, dataplanetest.Link())
	h.send(t, 5)
	if err := d.Clear(context.Background()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, show()); diff != "" || !strings.Contains(before, "pref 10") {
		t.Errorf("filters differ: %s", diff)
	}
}

// TestKernelFault117 wants our ifb to have no address.
func TestKernelFault117(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	mustApply(t, d, dataplanetest.Link())
	err := h.router.Do(func() error {
		ifs, err := net.Interfaces()
		for _, i := range ifs {
			addrs, _ := i.Addrs()
			if strings.HasPrefix(i.Name, ifbPrefix) && len(addrs) > 0 {
				t.Errorf("%s has %v", i.Name, addrs)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestKernelLoad overloads cake and wants the listings to be those of tc with
// drops, marks, backlog and delays in them.
func TestKernelLoad(t *testing.T) {
	h := newHome(t)
	d := h.open(t, Config{})
	l := dataplanetest.Link()
	l.Up.Rate, l.Up.MemoryLimit = 1_000_000, 30_000
	l.Down.Rate = 8_000
	mustApply(t, d, l)
	var st dataplane.Stats
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !d.Stats(&st) || !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("no %s: %+v", what, st.Up)
			}
		}
	}
	h.flood(t, h.router, "192.0.2.1:6000", 500) // more than there is room for
	await("drops", func() bool { return st.Up.Drops > 0 })
	l.Up.MemoryLimit = 0
	mustApply(t, d, l)
	h.flood(t, h.router, "192.0.2.1:6000", 200) // a queue of 1.6 s
	await("marks", func() bool { return st.Up.Tins[1].Marks > 0 })
	await("end of the queue", func() bool { return st.Up.Qlen == 0 })
	h.flood(t, h.isp, "192.0.2.2:6000", 20) // they stay: one packet takes a second
	h.compare(t, d)
	if !d.Stats(&st) || st.Down.Backlog == 0 || st.Down.Qlen == 0 {
		t.Errorf("backlog %d, %d packets", st.Down.Backlog, st.Down.Qlen)
	}
}

// BenchmarkKernelStats is what one look at the counters costs. In the lab,
// with run.sh -i 1, a nanosecond is half an instruction.
func BenchmarkKernelStats(b *testing.B) {
	h := newHome(b)
	d := h.open(b, Config{})
	if _, err := d.Apply(context.Background(), dataplanetest.Link()); err != nil {
		b.Fatal(err)
	}
	var st dataplane.Stats
	b.ReportAllocs()
	for b.Loop() {
		if !d.Stats(&st) {
			b.Fatal("no statistics")
		}
	}
}

// BenchmarkKernelApply is what it costs to find that nothing has changed.
func BenchmarkKernelApply(b *testing.B) {
	h := newHome(b)
	d := h.open(b, Config{})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Apply(context.Background(), dataplanetest.Link()); err != nil {
			b.Fatal(err)
		}
	}
}

// flood sends packets that may be marked, faster than they can leave.
func (h home) flood(t *testing.T, from *testnet.Namespace, to string, packets int) {
	t.Helper()
	err := from.Do(func() error {
		c, err := net.Dial("udp4", to)
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return err
		}
		const ect0 = 2
		var optErr error
		if err := raw.Control(func(fd uintptr) { optErr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, ect0) }); err != nil || optErr != nil {
			return errors.Join(err, optErr)
		}
		buf := make([]byte, 1000)
		for range packets {
			_, _ = c.Write(buf) // refused where nobody listens
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
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
	d := h.openAny(t)
	l := dataplanetest.Link()
	for _, mark := range []uint32{0, 0xff, 0} {
		l.Down.Fwmark = mark
		_, err := d.Apply(context.Background(), l)
		if r := new(dataplane.RejectedError); errors.As(err, &r) && r.Field == "down.fwmark" && os.Getenv("CAKEFLEET_REQUIRE_CAKE") == "" {
			t.Log(err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
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
			h.addRoot(t, args)
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
			h.addRoot(t, args)
			if r := rejection(t, d, dataplanetest.Link()); r.Field != "up" {
				t.Errorf("rejected %s", r.Field)
			}
			if got := h.tc(t, "qdisc", "show"); !strings.Contains(got, " 7: dev wan root") || strings.Contains(got, "cake") {
				t.Errorf("there is\n%s", got)
			}
		})
	}
}

// TestKernelFlowOffload has the kernel forward a connection by a flow table, past
// netfilter's hooks, and wants cake to see every packet of it both ways.
func TestKernelFlowOffload(t *testing.T) {
	h := newHome(t)
	d := h.openAny(t)
	host := testnet.Make(t, "host")
	err := errors.Join(
		testnet.Veth(host, "eth0", h.router, "lan"),
		host.Addr("eth0", "10.1.0.2/24"), h.router.Addr("lan", "10.1.0.1/24"), h.router.Forward(),
		host.Route("0.0.0.0/0", "10.1.0.1"), h.isp.Route("10.1.0.0/24", "192.0.2.2"),
	)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.router.FlowTable("fw4", "ft", "lan", "wan"), h.router.UseFlowTable("fw4", "ft")); err != nil {
		testnet.Skip(t, fmt.Sprintf("this kernel has no flow tables: %v", err))
	}
	if err := h.router.CountSmall("wan", 1500); err != nil { // all, at the hook behind ours
		t.Fatal(err)
	}
	if err := h.router.MarkConnections(1); err != nil { // a flow table takes only what conntrack knows
		t.Fatal(err)
	}
	mustApply(t, d, dataplanetest.Link())
	var client, server net.PacketConn
	listen := func(n *testnet.Namespace, addr string) (c net.PacketConn) {
		t.Helper()
		if err := n.Do(func() (err error) { c, err = net.ListenPacket("udp4", addr); return err }); err != nil {
			t.Fatal(err)
		}
		return c
	}
	client, server = listen(host, "10.1.0.2:5000"), listen(h.isp, "192.0.2.1:5000")
	defer client.Close()
	defer server.Close()
	go echo(server)
	buf := make([]byte, 1000)
	exchange := func(n int) {
		t.Helper()
		for range n {
			if err := client.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := client.WriteTo(buf, server.LocalAddr()); err != nil {
				t.Fatal(err)
			}
			if _, _, err := client.ReadFrom(buf); err != nil {
				t.Fatal(err)
			}
		}
	}
	exchange(20) // by then the flow table has it
	var before, after dataplane.Stats
	if !d.Stats(&before) {
		t.Fatal("no statistics")
	}
	hooked, _, err := h.router.Small("wan")
	if err != nil {
		t.Fatal(err)
	}
	const packets = 200
	exchange(packets)
	still, _, err := h.router.Small("wan")
	if err != nil {
		t.Fatal(err)
	}
	if !d.Stats(&after) {
		t.Fatal("no statistics")
	}
	up, down := after.Up.SentPackets-before.Up.SentPackets, after.Down.SentPackets-before.Down.SentPackets
	t.Logf("of %d packets each way the hooks saw %d, cake %d up and %d down", packets, still-hooked, up, down)
	if still-hooked > packets/10 {
		t.Errorf("the hooks saw %d of %d packets: the flow table does not work here", still-hooked, packets)
	}
	if up < packets || down < packets {
		t.Errorf("cake saw %d packets up and %d down of %d", up, down, packets)
	}
	if why := d.Bypass(); why != "" {
		t.Errorf("told: %q", why)
	}
}
