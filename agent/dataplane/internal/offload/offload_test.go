package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/internal/testnet"
)

// flowTable is the attributes of a flow table as the kernel sends them.
func flowTable(devices ...string) []byte {
	b := nlmsg.Builder{Order: nlmsg.Order{}}
	b.Str(flowTableTable, "fw4")
	b.Str(flowTableName, "ft")
	b.U32BE(flowTableUse, 2)
	b.U64BE(5, 7) // handle
	b.U32BE(flowTableFlags, flowHardware|2)
	b.Nest(nlmsg.Nested(flowTableHook), func() {
		b.U32BE(1, 0) // ingress
		b.U32BE(2, 0) // priority
		b.Nest(nlmsg.Nested(flowHookDevs), func() {
			for _, d := range devices {
				b.Str(flowDevName, d)
			}
		})
	})
	return b.Bytes
}

func TestParseFlowTable(t *testing.T) {
	want := Table{Table: "fw4", Name: "ft", Devices: []string{"lan1", "wan"}, Rules: 2, Hardware: true}
	if diff := cmp.Diff(want, parseFlowTable(flowTable("lan1", "wan"))); diff != "" {
		t.Error(diff)
	}
	whole := flowTable("lan1", "wan")
	for n := range whole { // cut anywhere, it is read without a fault
		parseFlowTable(whole[:n])
	}
}

// TestConcern wants each direction that passes to be told, and no other.
func TestConcern(t *testing.T) {
	both := Table{Name: "both", Devices: []string{"lan", "eth1"}, Rules: 1}
	unused := Table{Name: "unused", Devices: []string{"wan", "eth1"}}
	empty := Table{Name: "empty", Rules: 1}
	lan := Table{Name: "lan", Devices: []string{"lan"}, Rules: 1}
	target := Table{Table: "iptables", Rules: 1}
	const upload = " (upload)"
	for _, c := range []struct {
		name, iface, below string
		ppp                bool
		tables             []Table
		want               string
	}{
		{"none", "eth1", "", false, nil, ""},
		{"no rule puts flows there", "wan", "", false, []Table{unused, empty}, ""},
		{"packets for the interface arrive on another", "wan", "", false, []Table{lan}, "lan" + upload},
		{"the interface", "eth1", "", false, []Table{both}, "both"},
		{"its VLAN", "eth1.7", "eth1", false, []Table{lan, both}, "lan" + upload + ", both"},
		{"a session on it", "pppoe-wan", "", true, []Table{unused, both}, "both"},
		{"the target has every interface", "wan", "", false, []Table{target}, "iptables"},
	} {
		var got []string
		for _, f := range concern(c.tables, c.iface, c.below, c.ppp) {
			name := f.Name
			if name == "" {
				name = f.Table
			}
			if !f.down() {
				name += upload
			}
			got = append(got, name)
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestWords wants to be told what passes which data plane, and what to do.
func TestWords(t *testing.T) {
	upload := Table{Table: "fw4", Name: "ft", Rules: 1}
	both := Table{Table: "fw4", Name: "ft", Devices: []string{"wan"}, Rules: 1}
	hard := Table{Table: "fw4", Name: "hw", Devices: []string{"wan"}, Rules: 1, Hardware: true}
	target := Table{Table: "iptables", Rules: 1}
	for _, c := range []struct {
		name          string
		tables        []Table
		marks         bool
		hooks, qdiscs string // all of the words, in order; empty: nothing is said
	}{
		{"nothing", nil, true, "", ""},
		{"software", []Table{both}, false, "flow offload is on (flow table ft of table fw4): established connections pass|turn off flow_offloading |=0)|kernel data plane", ""},
		{"upload only", []Table{upload}, false, "upload of established connections passes", ""},
		{"software with marks", []Table{both}, true, "flow table ft", "are shaped|no firewall mark|leave out fwmark"},
		{"hardware", []Table{upload, both, hard}, false, "hardware flow offload is on (flow table hw", "hardware flow offload is on (flow table hw|pass the shaper by|turn off flow_offloading_hw|software flow offload may stay"},
		{"target", []Table{target}, false, "(target FLOWOFFLOAD of iptables): established connections pass", ""},
	} {
		for got, want := range map[string]string{PastHooks(c.tables): c.hooks, PastQdiscs(c.tables, c.marks): c.qdiscs} {
			if want == "" && got != "" {
				t.Errorf("%s: %q", c.name, got)
			}
			for words := range strings.SplitSeq(want, "|") {
				_, after, ok := strings.Cut(got, words)
				if !ok {
					t.Errorf("%s: %q, want %q", c.name, got, want)
				}
				got = after
			}
		}
	}
}

// rule is a rule of iptables as the kernel gives it, with one match.
func rule(f *xtables, target string, data uint32) []byte {
	b := make([]byte, f.next+100)
	binary.NativeEndian.PutUint16(b[f.target:], uint16(len(b)))
	b = binary.NativeEndian.AppendUint16(b, targetHeader+4)
	name := make([]byte, targetNameLen+1) // and the revision
	copy(name, target)
	b = append(b, name...)
	b = binary.NativeEndian.AppendUint32(b, data)
	binary.NativeEndian.PutUint16(b[f.next:], uint16(len(b)))
	return b
}

func TestFindTarget(t *testing.T) {
	for _, f := range []*xtables{&xtables4, &xtables6} {
		other, soft, hard := rule(f, "ACCEPT", hardware), rule(f, targetName, 2), rule(f, targetName, hardware)
		if got, want := f.find(append(append([]byte{}, other...), soft...)), (Table{Table: f.program, Rules: 1}); !cmp.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", f.program, got, want)
		}
		all := append(append(append([]byte{}, soft...), other...), hard...)
		if got, want := f.find(all), (Table{Table: f.program, Rules: 2, Hardware: true}); !cmp.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", f.program, got, want)
		}
		for n := range all { // cut anywhere, it is read without a fault
			f.find(all[:n])
		}
		binary.NativeEndian.PutUint16(all[f.next:], 0) // a rule of no length must not hang us
		f.find(all)
		if got := f.find(other); got.Rules != 0 {
			t.Errorf("%s: %+v of another target", f.program, got)
		}
	}
}

// TestKernelRules wants the kernel's rules to be laid out as find reads them: it
// has a table filter of three chains that accept, and an error at the end.
func TestKernelRules(t *testing.T) {
	testnet.Require(t)
	n := testnet.Make(t, "rules")
	err := n.Do(func() error {
		k, err := openKernel("wan")
		if err != nil {
			return err
		}
		for _, f := range []*xtables{&xtables4, &xtables6} {
			fd := k.ip4
			if f.level == unix.SOL_IPV6 {
				fd = k.ip6
			}
			b, err := f.entries(fd)
			if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.ENOENT) {
				t.Logf("this kernel has no table %s of %s", filterTable, f.program)
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", f.program, err)
				continue
			}
			targets := []string{}
			for len(b) > 0 {
				target, next := binary.NativeEndian.Uint16(b[f.target:]), binary.NativeEndian.Uint16(b[f.next:])
				targets = append(targets, cString(b[target+2:target+2+targetNameLen]))
				b = b[next:]
			}
			if diff := cmp.Diff([]string{"", "", "", "ERROR"}, targets); diff != "" {
				t.Errorf("%s: %s", f.program, diff)
			}
		}
		return k.close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestTarget has all of iptables' files and rules but the target itself, which
// only OpenWrt's kernels have.
func TestTarget(t *testing.T) {
	testnet.Require(t)
	n := testnet.Make(t, "target")
	err := n.Do(func() error {
		k, err := openKernel("wan")
		if err != nil {
			return err
		}
		dir := t.TempDir()
		k.targets, k.name = dir+"/%s_targets", dir+"/%s_names"
		for name, text := range map[string]string{"ip_targets": "ERROR\n" + targetName + "\n", "ip_names": "nat\n"} {
			if err := os.WriteFile(dir+"/"+name, []byte(text), 0o644); err != nil {
				return err
			}
		}
		if got, err := k.tables(); err != nil || len(got) != 0 {
			t.Errorf("%+v, error %v", got, err)
		}
		// The table filter must not have come from our asking.
		if b, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); err == nil && strings.Contains(string(b), filterTable) {
			t.Error("looking has made a table")
		}
		if err := os.WriteFile(dir+"/ip_names", []byte(filterTable+"\n"), 0o644); err != nil {
			return err
		}
		if got, err := k.tables(); err != nil && !errors.Is(err, unix.ENOPROTOOPT) || len(got) != 0 {
			t.Errorf("%+v, error %v", got, err)
		}
		return k.close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestFlowTables wants the kernel's flow tables found as they come and go into
// use.
func TestFlowTables(t *testing.T) {
	testnet.Require(t)
	near, far := testnet.Make(t, "near"), testnet.Make(t, "far")
	if err := testnet.Veth(near, "wan", far, "eth0"); err != nil {
		t.Fatal(err)
	}
	var w *Watch
	if err := near.Do(func() (err error) { w, err = Open("wan"); return err }); err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	look := func(want string) {
		t.Helper()
		got, err := w.Look(true, false)
		if err != nil {
			t.Fatal(err)
		}
		if why := PastHooks(got); want == "" && why != "" || !strings.Contains(why, want) {
			t.Errorf("%q, want %q", why, want)
		}
	}
	look("")
	if err := near.FlowTable("fw4", "ft", "wan"); err != nil {
		testnet.Skip(t, fmt.Sprintf("this kernel has no flow tables: %v", err))
	}
	look("")
	if err := near.UseFlowTable("fw4", "ft"); err != nil {
		t.Fatal(err)
	}
	look("flow table ft of table fw4): established connections pass")
	if err := near.DeleteTables("fw4"); err != nil {
		t.Fatal(err)
	}
	look("")
	// A veth has no hardware: the kernel refuses, and nothing must be told, or it
	// takes the flag and does it in software.
	if err := near.HardwareFlowTable("fw4", "hw", "wan"); err != nil {
		t.Logf("this kernel makes no hardware flow table of a veth: %v", err)
		look("")
		return
	}
	if err := near.UseFlowTable("fw4", "hw"); err != nil {
		t.Fatal(err)
	}
	look("hardware flow offload is on (flow table hw of table fw4)")
}

func TestBelow(t *testing.T) {
	testnet.Require(t)
	near, far := testnet.Make(t, "near"), testnet.Make(t, "far")
	if err := testnet.Veth(near, "wan", far, "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := near.VLAN("wan", "wan.7", 7); err != nil {
		testnet.Skip(t, fmt.Sprintf("this kernel has no VLANs: %v", err))
	}
	for iface, want := range map[string]string{"wan.7": "wan", "wan": "", "nosuch": ""} {
		err := near.Do(func() error {
			k, err := openKernel(iface)
			if err != nil {
				return err
			}
			if below := k.below(); below != want {
				t.Errorf("%s is a VLAN of %q, want %q", iface, below, want)
			}
			return k.close()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// counting is a source that counts.
type counting struct {
	asked int
	err   error
}

func (c *counting) tables() ([]Table, error) {
	c.asked++
	return []Table{{Name: "ft", Devices: []string{"wan"}, Rules: 1}}, c.err
}
func (c *counting) below() string { return "" }
func (c *counting) close() error  { return nil }

// TestLook wants the kernel asked at most once a minute, and what was known kept
// where it can't answer.
func TestLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := new(counting)
		w := &Watch{iface: "wan", source: c}
		look := func(now bool, asked int) {
			t.Helper()
			got, err := w.Look(now, false)
			if !errors.Is(err, c.err) || len(got) != 1 || c.asked != asked {
				t.Errorf("%d tables, error %v, asked %d times, want %d", len(got), err, c.asked, asked)
			}
		}
		look(false, 1)
		look(false, 1)
		look(true, 2)
		time.Sleep(every)
		look(false, 3)
		c.err = unix.ENOBUFS
		time.Sleep(every)
		look(false, 4)
		if err := errors.Join(w.Close(), w.Close()); err != nil {
			t.Error(err)
		}
		if _, err := w.Look(true, false); !errors.Is(err, os.ErrClosed) {
			t.Errorf("error is %v", err)
		}
	})
}

func TestRefusal(t *testing.T) {
	for errno, told := range map[unix.Errno]bool{0: false, unix.EINVAL: false, unix.EOPNOTSUPP: false, unix.EPERM: true, unix.ENOMEM: true} {
		code := -int32(errno)
		if err := refusal((*[4]byte)(unsafe.Pointer(&code))[:]); (err != nil) != told {
			t.Errorf("%v: %v", errno, err)
		}
	}
}
