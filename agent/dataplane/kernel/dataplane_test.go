package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/agent/dataplane/internal/offload"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const (
	testMaxRate = 1_000_000_000
	testSpeed   = engine.BitsPerSecond(500_000_000) // of the fake's interfaces
)

func openFake(t *testing.T, k *fakeKernel, change func(*Config)) *Dataplane {
	t.Helper()
	c := Config{Interface: "eth0", MaxRate: testMaxRate}
	if change != nil {
		change(&c)
	}
	d, err := open(c, k)
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

func mustApply(t *testing.T, d *Dataplane, l plan.Link) dataplane.Effective {
	t.Helper()
	eff, err := d.Apply(context.Background(), l)
	if err != nil {
		t.Fatal(err)
	}
	return eff
}

// rejection returns the field and the reason of a refusal.
func rejection(t *testing.T, d *Dataplane, l plan.Link) *dataplane.RejectedError {
	t.Helper()
	_, err := d.Apply(context.Background(), l)
	var r *dataplane.RejectedError
	if !errors.As(err, &r) {
		t.Fatalf("error is %v, want a RejectedError", err)
	}
	return r
}

func TestContract(t *testing.T) {
	dataplanetest.Run(t, func(t *testing.T) dataplanetest.Subject {
		k := newFakeKernel(t)
		d, err := open(Config{Interface: "eth0", MaxRate: testMaxRate}, k)
		if err != nil {
			t.Fatal(err)
		}
		return dataplanetest.Subject{Dataplane: d, MaxRate: testMaxRate, Speed: testSpeed, Shaping: func() bool {
			eth0 := k.link("eth0")
			return eth0.root != nil || len(eth0.filters) > 0
		}}
	})
}

// TestSetup wants nothing but what the package comment says, and nothing left.
func TestSetup(t *testing.T) {
	k := newFakeKernel(t)
	before := k.String()
	d := openFake(t, k, nil)
	if got := k.String(); got != before {
		t.Errorf("open left something:\n%s", got)
	}
	mustApply(t, d, dataplanetest.Link())
	eth0, ifb := k.link("eth0"), k.link("cfifb1")
	if ifb == nil || !ifb.up || !ifb.noIPv6 || ifb.root.kind != "cake" || ifb.mtu != 1500 {
		t.Fatalf("ifb: %+v", ifb)
	}
	if eth0.root.kind != "cake" || eth0.ingress.kind != "clsact" {
		t.Fatalf("eth0: %v", k)
	}
	want := map[uint32]*fakeFilter{prefPlain: {kind: "matchall", target: ifb.index}}
	if diff := cmp.Diff(want, eth0.filters, cmp.AllowUnexported(fakeFilter{})); diff != "" {
		t.Error(diff)
	}
	if err := d.Clear(context.Background()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, k.String()); diff != "" {
		t.Errorf("clear left something:\n%s", diff)
	}
}

// TestSameAgain wants the same link to change nothing, also for an agent that
// has been started anew, and the options of another one to be changed in place.
func TestSameAgain(t *testing.T) {
	k := newFakeKernel(t)
	mustApply(t, openFake(t, k, nil), dataplanetest.Link())
	d := openFake(t, k, nil)
	k.before = func(m nlmsg.Message) error {
		if m.Type != unix.RTM_GETLINK && m.Type != unix.RTM_GETQDISC && m.Type != unix.RTM_GETTFILTER {
			t.Errorf("request of type %d", m.Type)
		}
		return nil
	}
	mustApply(t, d, dataplanetest.Link())
	changes := 0
	k.before = func(m nlmsg.Message) error {
		switch m.Type {
		case unix.RTM_GETLINK, unix.RTM_GETQDISC, unix.RTM_GETTFILTER:
			return nil
		case unix.RTM_NEWQDISC:
			if m.Flags&(unix.NLM_F_CREATE|unix.NLM_F_REPLACE) != 0 {
				t.Errorf("flags are %#x, want a change in place", m.Flags)
			}
			changes++
			return nil
		}
		t.Errorf("request of type %d", m.Type)
		return nil
	}
	l := dataplanetest.Link()
	l.Down.Rate, l.Up.Rate = l.Down.Rate/2, l.Up.Rate/2
	mustApply(t, d, l)
	if changes != 2 {
		t.Errorf("%d changes, want 2", changes)
	}
	k.before = nil
}

// odd has every option at a value that is not the default.
func odd() engine.Config {
	return engine.Config{
		Rate: 12_345_672, Tins: engine.Diffserv8, Flows: engine.DualSrcHost, AckFilter: engine.AckFilterAggressive, Framing: engine.PTM,
		NAT: true, Wash: true, Ingress: true, Overhead: -10, MPU: 64, MTU: 1514, RTT: 30 * time.Millisecond,
		Target: 1500 * time.Microsecond, MemoryLimit: 1 << 20, Fwmark: 0xff00,
	}
}

// TestFault081 changes to what is 0 on the wire: diffserv3, no filter, no ATM.
func TestFault081(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	l.Up = odd()
	mustApply(t, d, l)
	l.Up.Tins, l.Up.AckFilter, l.Up.Framing = engine.Diffserv3, engine.AckFilterOff, engine.NoATM
	if eff := mustApply(t, d, l); len(eff.Clamps) != 0 || eff.Link != l {
		t.Errorf("runs %+v, clamps %v", eff.Link.Up, eff.Clamps)
	}
}

// TestFault084 wants what tc can't reset to be reset: memory limit, MPU, mark.
func TestFault084(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	plain := l
	l.Up, l.Down = odd(), odd()
	mustApply(t, d, l)
	if eff := mustApply(t, d, plain); len(eff.Clamps) != 0 || eff.Link != plain {
		t.Errorf("runs %+v, clamps %v", eff.Link, eff.Clamps)
	}
}

// TestFault085 wants no overhead left behind, and raw back.
func TestFault085(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	l.Up.Raw, l.Up.Overhead = false, 44
	mustApply(t, d, l)
	if eff := mustApply(t, d, dataplanetest.Link()); !eff.Link.Up.Raw || eff.Link.Up.Overhead != 0 {
		t.Errorf("runs raw %v, overhead %d", eff.Link.Up.Raw, eff.Link.Up.Overhead)
	}
}

// TestFault087 wants to be told what the kernel lacks, and nothing left.
func TestFault087(t *testing.T) {
	for lack, want := range map[string]string{
		"cake": "no sch_cake", "ifb": "no ifb", "clsact ingress": "no ingress qdisc", "matchall u32": "no a filter", "mirred": "no a filter",
	} {
		k := newFakeKernel(t)
		for kind := range strings.FieldsSeq(lack) {
			k.lacks[kind] = true
		}
		before := k.String()
		_, err := open(Config{Interface: "eth0"}, k)
		if !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("without %s: %v, want %q", lack, err, want)
		}
		if got := k.String(); got != before {
			t.Errorf("without %s something is left:\n%s", lack, got)
		}
	}
}

// TestFallBacks wants older ways to be taken where the newer ones are missing.
func TestFallBacks(t *testing.T) {
	k := newFakeKernel(t)
	for _, kind := range []string{"clsact", "matchall", "conntrack"} {
		k.lacks[kind] = true
	}
	before := k.String()
	d := openFake(t, k, nil)
	mustApply(t, d, dataplanetest.Link())
	eth0 := k.link("eth0")
	if eth0.ingress.kind != "ingress" || eth0.filters[prefPlain].kind != "u32" {
		t.Errorf("%v", k)
	}
	l := dataplanetest.Link()
	l.Up.NAT = true
	if r := rejection(t, d, l); r.Field != "up.nat" {
		t.Errorf("rejected %v", r)
	}
	if err := d.Clear(context.Background()); err != nil || k.String() != before {
		t.Errorf("%v:\n%v", err, k)
	}
}

// TestFault088 wants a set-up that does nothing to be noticed: download that
// does not go through the ifb.
func TestFault088(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	mustApply(t, d, dataplanetest.Link())
	eth0 := k.link("eth0")
	var st dataplane.Stats
	eth0.received, k.link("cfifb1").root.packets = 5000, 1
	if !d.Stats(&st) {
		t.Fatal("no statistics although packets pass")
	}
	eth0.received += 1001
	if d.Stats(&st) {
		t.Fatal("1001 packets passed by and nothing was noticed")
	}
	old := k.link("cfifb1").index
	mustApply(t, d, dataplanetest.Link()) // makes it anew
	if k.link("cfifb1").index == old {
		t.Error("the ifb is the old one")
	}
	eth0.received += 1001
	if d.Stats(&st) {
		t.Fatal("packets still pass by and nothing was noticed")
	}
	if _, err := d.Apply(context.Background(), dataplanetest.Link()); err == nil || !strings.Contains(err.Error(), "passes by") {
		t.Errorf("error is %v", err)
	}
	k.link("cfifb1").root.packets = 7
	if !d.Stats(&st) {
		t.Fatal("no statistics although packets pass")
	}
	mustApply(t, d, dataplanetest.Link())
}

// TestGone wants what somebody removed to be noticed and made again.
func TestGone(t *testing.T) {
	for name, harm := range map[string]func(k *fakeKernel){
		"ifb":          func(k *fakeKernel) { k.remove(k.link("cfifb1")) },
		"ifb down":     func(k *fakeKernel) { k.link("cfifb1").up = false },
		"cake of ifb":  func(k *fakeKernel) { k.link("cfifb1").root = nil },
		"upload":       func(k *fakeKernel) { k.link("eth0").root = nil },
		"ingress":      func(k *fakeKernel) { k.link("eth0").ingress = nil; clear(k.link("eth0").filters) },
		"options":      func(k *fakeKernel) { k.link("eth0").root.options[cakeWash] = []byte{1, 1, 1, 1} },
		"another ifb":  func(k *fakeKernel) { k.remove(k.link("cfifb1")); k.add("cfifb1", "ifb") },
		"another cake": func(k *fakeKernel) { k.link("eth0").root.kind = "cake_mq" },
	} {
		t.Run(name, func(t *testing.T) {
			k := newFakeKernel(t)
			d := openFake(t, k, nil)
			mustApply(t, d, dataplanetest.Link())
			want := len(k.links)
			harm(k)
			var st dataplane.Stats
			if d.Stats(&st) {
				t.Error("nothing was noticed")
			}
			if name == "another cake" {
				return // the handle is taken: that is for people
			}
			mustApply(t, d, dataplanetest.Link())
			if !d.Stats(&st) || len(k.links) != want {
				t.Errorf("it was not mended:\n%v", k)
			}
			if f := k.link("eth0").filters; len(f) != 1 || f[prefPlain].target != k.link("cfifb1").index {
				t.Errorf("filters: %v", k)
			}
		})
	}
}

// TestInterfaceComesBack goes through an interface that vanishes and comes back
// with another index.
func TestInterfaceComesBack(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	mustApply(t, d, dataplanetest.Link())
	k.remove(k.link("eth0"))
	var st dataplane.Stats
	if d.Stats(&st) {
		t.Error("statistics without an interface")
	}
	if _, err := d.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Errorf("error is %v", err)
	}
	eth0 := k.add("eth0", "")
	mustApply(t, d, dataplanetest.Link())
	if !d.Stats(&st) || k.link(ifbName(eth0.index)) == nil {
		t.Errorf("%v", k)
	}
	openFake(t, k, nil) // a start removes what an interface before has left
	if k.link("cfifb1") != nil {
		t.Errorf("the old ifb is still there:\n%v", k)
	}
	k.remove(k.link("eth0"))
	if err := d.Clear(context.Background()); err != nil || len(k.links) != 0 {
		t.Errorf("%v:\n%v", err, k)
	}
}

// An interface under another name is somebody else's: nothing of ours stays on
// it, and it is shaped again when it has its name back.
func TestRenamed(t *testing.T) {
	for name, leave := range map[string]func(*Dataplane) error{
		"apply": func(d *Dataplane) error {
			if _, err := d.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrNoDevice) {
				return fmt.Errorf("apply: %w", err)
			}
			return nil
		},
		"clear": func(d *Dataplane) error { return d.Clear(context.Background()) },
		"lost":  func(d *Dataplane) error { return errors.Join(d.Lost(), d.Lost()) },
	} {
		k := newFakeKernel(t)
		before := k.String()
		d := openFake(t, k, nil)
		mustApply(t, d, dataplanetest.Link())
		eth0 := k.link("eth0")
		eth0.name = "lan9"
		if err := leave(d); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var st dataplane.Stats
		if d.Stats(&st) {
			t.Errorf("%s: statistics of an interface that has another name", name)
		}
		eth0.name = "eth0"
		if diff := cmp.Diff(before, k.String()); diff != "" {
			t.Errorf("%s: on the renamed interface is left:\n%s", name, diff)
		}
		mustApply(t, d, dataplanetest.Link())
		if !d.Stats(&st) {
			t.Error("not shaped under its name")
		}
		// Another one gets the name while the first has another.
		eth0.name = "lan9"
		k.add("eth0", "")
		mustApply(t, d, dataplanetest.Link())
		if !d.Stats(&st) || eth0.root != nil || len(eth0.filters) != 0 || eth0.ingress != nil {
			t.Errorf("%s: %v", name, k)
		}
		// And once more, with Close the next to look.
		k.link("eth0").name = "lan8"
		eth0.name = "eth0"
		if err := d.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, l := range k.links {
			if l.root != nil || len(l.filters) != 0 || l.kind == "ifb" {
				t.Errorf("%s: left after Close:\n%v", name, k)
			}
		}
	}
}

// A new MTU of the interface changes nothing but what depends on it; nothing is
// made anew.
func TestMTUChange(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	mustApply(t, d, l)
	ifb := k.link("cfifb1").index
	root := k.link("eth0").root
	k.link("eth0").mtu = 1400
	var st dataplane.Stats
	if !d.Stats(&st) {
		t.Error("not shaped after a change of the MTU")
	}
	mustApply(t, d, l)
	if k.link("cfifb1").index != ifb || k.link("eth0").root != root {
		t.Errorf("made anew:\n%v", k)
	}
}

// TestFault091 wants an interface to have a name, and ours to fit.
func TestFault091(t *testing.T) {
	if _, err := open(Config{}, newFakeKernel(t)); err == nil || !strings.Contains(err.Error(), "no name") {
		t.Errorf("error is %v", err)
	}
	if n := ifbName(1<<32 - 1); len(n) > 15 {
		t.Errorf("%s does not fit", n)
	}
}

// TestFault092 has two interfaces with overheads of their own.
func TestFault092(t *testing.T) {
	k := newFakeKernel(t)
	k.add("eth1", "")
	a, b := openFake(t, k, nil), openFake(t, k, func(c *Config) { c.Interface = "eth1" })
	l := dataplanetest.Link()
	l.Up.Raw, l.Up.Overhead = false, 44
	mustApply(t, a, l)
	mustApply(t, b, dataplanetest.Link())
	for name, want := range map[string]int16{"eth0": 44, "eth1": 0} {
		q, _ := decodeQdisc(native(), k.link(name).root.message(1, ourHandle, parentRoot, "cake", 0, 0))
		if c, _ := decodeOptions(q.options.Attrs()); c.Overhead != want {
			t.Errorf("%s has overhead %d, want %d", name, c.Overhead, want)
		}
	}
	if err := a.Clear(context.Background()); err != nil {
		t.Fatal(err)
	}
	var st dataplane.Stats
	if !b.Stats(&st) {
		t.Errorf("clearing eth0 hurt eth1:\n%v", k)
	}
}

// TestFault096 leaves a direction alone that has no rate.
func TestFault096(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	l.Down.Rate = 0
	mustApply(t, d, l)
	if eth0 := k.link("eth0"); eth0.ingress != nil || len(k.links) != 1 || eth0.root == nil {
		t.Errorf("%v", k)
	}
	mustApply(t, d, dataplanetest.Link())
	mustApply(t, d, l)
	if eth0 := k.link("eth0"); eth0.ingress != nil || len(k.links) != 1 || eth0.root == nil {
		t.Errorf("after a change: %v", k)
	}
}

// TestFault097 stops with one direction.
func TestFault097(t *testing.T) {
	for _, down := range []bool{false, true} {
		k := newFakeKernel(t)
		before := k.String()
		d := openFake(t, k, nil)
		l := dataplanetest.Link()
		if down {
			l.Up.Rate = 0
		} else {
			l.Down.Rate = 0
		}
		mustApply(t, d, l)
		if err := d.Close(); err != nil || k.String() != before {
			t.Errorf("%v:\n%v", err, k)
		}
	}
}

// TestFault104 wants overhead to count once: a size table on the qdisc goes.
func TestFault104(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	mustApply(t, d, dataplanetest.Link())
	k.link("eth0").root.stab = true
	mustApply(t, d, dataplanetest.Link())
	if k.link("eth0").root.stab {
		t.Error("the size table is still there")
	}
}

// TestFault106 changes every option of an instance that is there.
func TestFault106(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	mustApply(t, d, l)
	l.Up, l.Down = odd(), odd()
	if eff := mustApply(t, d, l); len(eff.Clamps) != 0 || eff.Link != l {
		t.Errorf("runs %+v, clamps %v", eff.Link, eff.Clamps)
	}
	if f := k.link("eth0").filters; len(f) != 1 || f[prefMark].marks != "connmark" {
		t.Errorf("marks are not restored on arrival:\n%v", k)
	}
}

// TestMarks takes the action that there is for marks of connections, and goes
// back to it when what comes after it fails.
func TestMarks(t *testing.T) {
	for _, c := range []struct {
		name  string
		lacks []string
		want  string
	}{
		{"both", nil, "matchall connmark"},
		{"no connmark", []string{"connmark"}, "matchall ctinfo"},
		{"no matchall, no connmark", []string{"matchall", "connmark"}, "u32 ctinfo"},
		{"neither", []string{"connmark", "ctinfo"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newFakeKernel(t)
			for _, what := range c.lacks {
				k.lacks[what] = true
			}
			d := openFake(t, k, nil)
			l := dataplanetest.Link()
			l.Down.Fwmark = 0xff
			if c.want == "" {
				if r := rejection(t, d, l); r.Field != "down.fwmark" || !r.Unsupported || !strings.Contains(r.Reason, "kmod-sched-ctinfo") {
					t.Errorf("rejected %v", r)
				}
				return
			}
			mustApply(t, d, l)
			marks := func() string {
				f := k.link("eth0").filters[prefMark]
				if f == nil || len(k.link("eth0").filters) != 1 {
					return "none"
				}
				return f.kind + " " + f.marks
			}
			if got := marks(); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
			plain := l
			plain.Down.Fwmark = 0
			k.before = func(m nlmsg.Message) error { // the upload comes last
				if q, ok := decodeQdisc(native(), m); ok && q.index == k.link("eth0").index {
					return unix.ENOMEM
				}
				return nil
			}
			plain.Up.Rate *= 2
			if _, err := d.Apply(context.Background(), plain); !errors.Is(err, unix.ENOMEM) {
				t.Errorf("error is %v", err)
			}
			k.before = nil
			if got := marks(); got != c.want {
				t.Errorf("after a change that failed %q, want %q", got, c.want)
			}
		})
	}
}

// bypassed is an offload.Watch without a kernel.
type bypassed struct {
	tables []offload.Table
	closed bool
}

func (b *bypassed) Look(bool, bool) ([]offload.Table, error) { return b.tables, nil }
func (b *bypassed) Close() error                             { b.closed = true; return nil }

// TestBypass wants to be told what goes past cake: hardware flow offload, and
// with software flow offload the marks.
func TestBypass(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	w := &bypassed{}
	d.watch = w
	soft := offload.Table{Table: "fw4", Name: "ft", Devices: []string{"eth0"}, Rules: 1}
	hard := soft
	hard.Hardware = true
	plain, marked, down := dataplanetest.Link(), dataplanetest.Link(), dataplanetest.Link()
	marked.Up.Fwmark = 0xff
	down.Up = engine.DefaultConfig()
	down.Up.Fwmark = 0xff // is left alone
	want := func(words string) {
		t.Helper()
		if got := d.Bypass(); words == "" && got != "" || !strings.Contains(got, words) {
			t.Errorf("%q, want %q", got, words)
		}
	}
	w.tables = []offload.Table{hard}
	want("") // nothing is shaped
	mustApply(t, d, plain)
	want("flow_offloading_hw")
	w.tables = []offload.Table{soft}
	want("")
	mustApply(t, d, marked)
	want("no firewall mark")
	mustApply(t, d, down)
	want("")
	if err := d.Close(); err != nil || !w.closed {
		t.Errorf("closed %v: %v", w.closed, err)
	}
	want("")
}

// TestFault117 wants no stray ifb0 and ifb1 when our request loads the module,
// and those that were there to stay.
func TestFault117(t *testing.T) {
	k := newFakeKernel(t)
	k.add("ifb1", "ifb")
	k.module = []string{"ifb0"}
	before := k.String()
	openFake(t, k, nil)
	if diff := cmp.Diff(before, k.String()); diff != "" {
		t.Error(diff)
	}
}

// TestFault132 falls back from cake_mq to cake, with nothing half-made.
func TestFault132(t *testing.T) {
	l := dataplanetest.Link()
	k := newFakeKernel(t)
	k.link("eth0").txQueues = 4
	d := openFake(t, k, nil)
	mustApply(t, d, l)
	if kind := k.link("eth0").root.kind; kind != "cake" {
		t.Errorf("it is %s", kind)
	}

	k = newFakeKernel(t)
	delete(k.lacks, "cake_mq")
	k.link("eth0").txQueues = 4
	before := k.String()
	d = openFake(t, k, nil)
	mustApply(t, d, l)
	root := k.link("eth0").root
	if root.kind != "cake_mq" || k.link("cfifb1").root.kind != "cake" {
		t.Errorf("%v", k)
	}
	root.queues = []uint32{1, 2, 3, 1<<32 - 1}
	var st dataplane.Stats
	for range 2 {
		if !d.Stats(&st) || st.Up.SentPackets != 1<<32+5 || st.Up.Tins[2].Packets != 1<<32+5 {
			t.Errorf("the queues sent %d packets", st.Up.SentPackets)
		}
	}
	l.Up.Autorate = true
	mustApply(t, d, l) // which cake_mq does not have
	if kind := k.link("eth0").root.kind; kind != "cake" {
		t.Errorf("with autorate-ingress it is %s", kind)
	}
	if err := d.Clear(context.Background()); err != nil || k.String() != before {
		t.Errorf("%v:\n%v", err, k)
	}
}

// TestFault134 wants what a newer kernel has to be called unknown.
func TestFault134(t *testing.T) {
	b := nlmsg.Builder{Order: native()}
	appendOptions(&b, engine.DefaultConfig(), true)
	b.U32(cakeTins, 5) // the number of cake3 here
	b.U32(cakeFlows, 300)
	b.U32(19, 7)
	c, unknown := decodeOptions(nlmsg.Attrs{Order: native(), Bytes: b.Bytes})
	if !strings.HasPrefix(c.Tins.String(), "unknown") || !strings.HasPrefix(c.Flows.String(), "unknown") {
		t.Errorf("tins %v, flows %v", c.Tins, c.Flows)
	}
	if !slices.Equal(unknown, []string{"option 19"}) {
		t.Errorf("unknown: %v", unknown)
	}
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	l.Up.Tins = engine.Cake3
	if r := rejection(t, d, l); r.Field != "up.tins" {
		t.Errorf("cake3: %v", r)
	}
}

// TestFault135 wants the sign of the overhead to survive.
func TestFault135(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	l := dataplanetest.Link()
	l.Up.Raw, l.Up.Overhead = false, -10
	if eff := mustApply(t, d, l); eff.Link.Up.Overhead != -10 || len(eff.Clamps) != 0 {
		t.Errorf("runs %d, clamps %v", eff.Link.Up.Overhead, eff.Clamps)
	}
}

// TestTakeover replaces somebody's qdisc only when allowed, and puts it back,
// after a crash too.
func TestTakeover(t *testing.T) {
	setUp := func(t *testing.T, kind string) (*fakeKernel, string) {
		k := newFakeKernel(t)
		eth0 := k.link("eth0")
		listed := nlmsg.Builder{Order: native()}
		listed.U32(1, 6999) // a target of 7 ms
		listed.U32(2, 1234)
		eth0.root = &fakeQdisc{handle: 0x10000, kind: kind, raw: listed.Bytes}
		eth0.ingress = &fakeQdisc{handle: handleIngress, kind: "ingress"}
		eth0.filters[10] = &fakeFilter{kind: "matchall", target: eth0.index}
		return k, k.String()
	}
	t.Run("not allowed", func(t *testing.T) {
		k, before := setUp(t, "fq_codel")
		d := openFake(t, k, nil)
		if r := rejection(t, d, dataplanetest.Link()); r.Field != "up" || !strings.Contains(r.Reason, "fq_codel 1: on eth0 is somebody else's") {
			t.Errorf("rejected: %v", r)
		}
		if diff := cmp.Diff(before, k.String()); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("not possible", func(t *testing.T) {
		k, before := setUp(t, "htb")
		d := openFake(t, k, func(c *Config) { c.Takeover = true })
		if r := rejection(t, d, dataplanetest.Link()); !strings.Contains(r.Reason, "htb 1: on eth0 can't be taken over") {
			t.Errorf("rejected: %v", r)
		}
		if diff := cmp.Diff(before, k.String()); diff != "" {
			t.Error(diff)
		}
	})
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprintf("crash %v", crash), func(t *testing.T) {
			k, before := setUp(t, "fq_codel")
			dir := t.TempDir()
			allow := func(c *Config) { c.Takeover, c.RunDir = true, dir }
			d, err := open(Config{Interface: "eth0", Takeover: true, RunDir: dir}, k)
			if err != nil {
				t.Fatal(err)
			}
			mustApply(t, d, dataplanetest.Link())
			if k.link("eth0").root.kind != "cake" || len(k.link("eth0").filters) != 2 {
				t.Errorf("%v", k)
			}
			if crash {
				d = openFake(t, k, allow)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(before, k.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestFault115_Failures lets every single request of a change fail, and wants all to be
// as before.
func TestFault115_Failures(t *testing.T) {
	bare := func(*testing.T, *Dataplane) {}
	shaped := func(t *testing.T, d *Dataplane) { mustApply(t, d, dataplanetest.Link()) }
	other := plan.Link{Down: odd(), Up: odd()}
	for name, c := range map[string]struct {
		before func(*testing.T, *Dataplane)
		link   plan.Link
	}{
		"start":  {bare, dataplanetest.Link()},
		"odd":    {bare, other},
		"change": {shaped, other},
	} {
		t.Run(name, func(t *testing.T) {
			for at := 1; ; at++ {
				k := newFakeKernel(t)
				d := openFake(t, k, nil)
				c.before(t, d)
				before := k.String()
				n := 0
				k.before = func(m nlmsg.Message) error {
					if n++; n == at {
						return refuse(unix.ENOMEM, "")
					}
					return nil
				}
				_, err := d.Apply(context.Background(), c.link)
				k.before = nil
				if n < at {
					if err != nil {
						t.Error(err)
					}
					if at < 10 {
						t.Errorf("only %d requests", at)
					}
					return
				}
				if err == nil {
					if k.link("cfifb1").noIPv6 {
						t.Errorf("request %d failed and nobody noticed", at)
					}
					continue // the one that may fail
				}
				if diff := cmp.Diff(before, k.String()); diff != "" {
					t.Errorf("request %d failed and left:\n%s", at, diff)
				}
			}
		})
	}
}

// TestKilled ends the agent before every single request of start, change and
// stop. The next one must go on from there, or leave nothing.
func TestKilled(t *testing.T) {
	other := plan.Link{Down: odd(), Up: odd()}
	one := dataplanetest.Link()
	one.Down.Rate = 0
	for name, act := range map[string]func(*Dataplane) error{
		"apply":  func(d *Dataplane) error { _, err := d.Apply(context.Background(), other); return err },
		"one":    func(d *Dataplane) error { _, err := d.Apply(context.Background(), one); return err },
		"clear":  func(d *Dataplane) error { return d.Clear(context.Background()) },
		"close":  func(d *Dataplane) error { return d.Close() },
		"starts": nil,
	} {
		t.Run(name, func(t *testing.T) {
			for at := 1; ; at++ {
				k := newFakeKernel(t)
				before := k.String()
				n := 0
				die := func(m nlmsg.Message) error {
					if n++; n >= at {
						return errKilled
					}
					return nil
				}
				if act == nil {
					k.before = die
					if d, err := open(Config{Interface: "eth0"}, k); err == nil {
						_, _ = d.Apply(context.Background(), other)
					}
				} else {
					d, err := open(Config{Interface: "eth0"}, k)
					if err != nil {
						t.Fatal(err)
					}
					mustApply(t, d, dataplanetest.Link())
					k.before = die
					_ = act(d)
				}
				k.before = nil
				if f := k.link("eth0").filters; len(f) > 0 {
					for _, f := range f {
						if l := k.links[f.target]; l == nil || !l.up {
							t.Errorf("killed at %d: the customer is offline:\n%v", at, k)
						}
					}
				}
				half := k.String()
				if at%2 == 0 {
					next := openFake(t, k, nil)
					mustApply(t, next, other)
					var st dataplane.Stats
					if !next.Stats(&st) {
						t.Errorf("killed at %d: the next one does not shape; it found:\n%s", at, half)
					}
				}
				next := openFake(t, k, nil)
				if err := next.Close(); err != nil {
					t.Errorf("killed at %d: %v", at, err)
				}
				if diff := cmp.Diff(before, k.String()); diff != "" {
					t.Errorf("killed at %d: the next one left:\n%s", at, diff)
				}
				if n < at {
					return
				}
			}
		})
	}
}

// TestOthersIngress leaves the filters of others and their qdisc alone.
func TestOthersIngress(t *testing.T) {
	for _, kind := range []string{"clsact", "ingress"} {
		k := newFakeKernel(t)
		eth0 := k.link("eth0")
		eth0.ingress = &fakeQdisc{handle: handleIngress, kind: kind}
		eth0.filters[10] = &fakeFilter{kind: "matchall", target: eth0.index}
		before := k.String()
		d := openFake(t, k, nil)
		mustApply(t, d, dataplanetest.Link())
		if err := d.Clear(context.Background()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, k.String()); diff != "" {
			t.Error(diff)
		}

		// What hangs on our qdisc meanwhile stays, too.
		eth0.ingress, eth0.filters = nil, map[uint32]*fakeFilter{}
		mustApply(t, d, dataplanetest.Link())
		eth0.filters[10] = &fakeFilter{kind: "matchall", target: eth0.index}
		if err := d.Clear(context.Background()); err != nil || len(eth0.filters) != 1 || eth0.ingress == nil {
			t.Errorf("%v:\n%v", err, k)
		}
	}
}

// TestCountersWrap lets 32-bit counters go round, and begin anew.
func TestCountersWrap(t *testing.T) {
	k := newFakeKernel(t)
	d := openFake(t, k, nil)
	mustApply(t, d, dataplanetest.Link())
	root := k.link("eth0").root
	var st dataplane.Stats
	for _, c := range []struct {
		packets uint32
		bytes   uint64
		want    uint64
	}{
		{1<<32 - 2, 1000, 1<<32 - 2},
		{5, 2000, 1<<32 + 5},
		{4, 3000, 2<<32 + 4},
		{4, 3000, 2<<32 + 4},
		{1, 10, 1}, // made anew
	} {
		root.packets, root.bytes = c.packets, c.bytes
		if !d.Stats(&st) {
			t.Fatal("no statistics")
		}
		if st.Up.SentPackets != c.want || st.Up.Tins[0].Packets != c.want || st.Up.SentBytes != c.bytes {
			t.Errorf("%d packets, tin %d, want %d", st.Up.SentPackets, st.Up.Tins[0].Packets, c.want)
		}
	}
}
