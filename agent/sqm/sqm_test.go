package sqm

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/engine"
)

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestListings(t *testing.T) {
	for _, name := range []string{"layer_cake", "two"} {
		queues, err := Parse(read(t, name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(read(t, name+".want"), string(AppendText(nil, queues))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestFields wants every setting to arrive where it belongs.
func TestFields(t *testing.T) {
	queues, err := Parse(read(t, "layer_cake"))
	if err != nil {
		t.Fatal(err)
	}
	want := engine.Config{
		Rate: 85_000_000, Tins: engine.Diffserv4, Flows: engine.DualDstHost, NAT: true, Wash: true, Ingress: true,
		SplitGSO: true, Overhead: 44, MPU: 84, MTU: 1514, RTT: 100 * time.Millisecond, Target: 5 * time.Millisecond,
	}
	if diff := cmp.Diff(want, queues[0].Link.Down); diff != "" {
		t.Error(diff)
	}
	if err := queues[0].Link.Validate(); err != nil {
		t.Error(err)
	}
}

// TestCommandsWork reads back the words that are printed for the operator.
func TestCommandsWork(t *testing.T) {
	for _, name := range []string{"layer_cake", "two"} {
		queues, err := Parse(read(t, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range queues {
			for _, c := range []engine.Config{q.Link.Down, q.Link.Up} {
				got, err := engine.ParseKeywords(engine.DefaultConfig(), "bandwidth "+c.Rate.String()+" "+options(c))
				if err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff(c, got); diff != "" {
					t.Errorf("%s: %s", q.Interface, diff)
				}
			}
		}
	}
}

func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "no queue",
		"config queue":                       "line 1: the queue has no interface",
		"config queue a\n option upload -1":  `line 2: upload "-1": must be kilobits per second, at most 100000000`,
		"config queue a\n option upload 1e3": `line 2: upload "1e3"`,
		"config queue a\n option download 99999999999999999999": "line 2: download",
		"config queue a\n option overhead 300":                  `line 2: overhead "300": must be -64 to 256`,
		"config queue a\n option enabled maybe":                 "line 2: enabled",
		"config queue a\n option linklayer tin":                 "line 2: linklayer",
		"config queue a\n option upload":                        "line 2: ",
		"option a b":                                            "line 1: option a is in no section",
		"config queue a\n option upload '1":                     "line 2: a quote ' without its end",
		"config queue a\n option upload \\":                     "line 2: a backslash at the end",
		"config queue a\n option enabled 1\nconfig queue b\n option enabled 1\n option interface a": "line 3: interface a has a queue already, in line 1",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error is %v, want %q", text, err, want)
		}
	}
}

// TestCommon reads configurations of the kinds that people publish.
func TestCommon(t *testing.T) {
	const (
		ethernet = "linklayer ethernet\noverhead 44\ntcMPU 84\n"
		plain    = " nowash no-ack-filter split-gso rtt 100ms "
		line     = "noatm overhead 44 mpu 84"
	)
	for _, c := range []struct {
		name, script, down, up, more string
		wantDown, wantUp             string // behind the bandwidth
		note                         string // empty: none
	}{
		{
			"PPPoE by host", "layer_cake.qos", "ingress nat dual-dsthost", "nat dual-srchost", ethernet,
			"diffserv3 dual-dsthost nat nowash ingress no-ack-filter split-gso rtt 100ms " + line, "diffserv3 dual-srchost nat" + plain + line, "",
		},
		{
			"one tin, use_mq of new versions", "piece_of_cake.qos", "", "ack-filter", ethernet + "use_mq 0\n",
			"besteffort triple-isolate nat" + plain + line, "besteffort triple-isolate nat nowash ack-filter split-gso rtt 100ms " + line, "leave out nat on upload",
		},
		{
			"accounting in the options", "layer_cake.qos", "diffserv4 rtt 60ms", "diffserv4 rtt 60ms mpu 64 noatm overhead 18", "linklayer none\n",
			"diffserv4 triple-isolate nat nowash no-ack-filter split-gso rtt 60ms raw overhead 0", "diffserv4 triple-isolate nat nowash no-ack-filter split-gso rtt 60ms noatm overhead 18 mpu 64", "",
		},
		{
			"cable", "layer_cake.qos", "docsis", "docsis ack-filter", "",
			"diffserv3 triple-isolate nat" + plain + "noatm overhead 18 mpu 64", "diffserv3 triple-isolate nat nowash ack-filter split-gso rtt 100ms noatm overhead 18 mpu 64", "",
		},
		{
			"memory", "layer_cake.qos", "memlimit 4Mb rtt 50000", "memlimit 33554432 metro", ethernet,
			"diffserv3 triple-isolate nat nowash no-ack-filter split-gso rtt 50ms " + line + " memlimit 4Mb", "diffserv3 triple-isolate nat nowash no-ack-filter split-gso rtt 10ms " + line + " memlimit 32Mb", "",
		},
		{
			"DSL", "layer_cake.qos", "pppoe-ptm ether-vlan", "bridged-llcsnap", "",
			"diffserv3 triple-isolate nat" + plain + "ptm overhead 34", "diffserv3 triple-isolate nat" + plain + "atm overhead 32", "",
		},
		{
			"somebody's script for cake", "layer_cake_ct.qos", "diffserv4 dual-dsthost", "diffserv4 fwmark 0xff", ethernet,
			"diffserv4 dual-dsthost nat" + plain + line, "diffserv4 triple-isolate nat" + plain + line + " fwmark 0xff", "not one of sqm-scripts' own",
		},
		{
			"HTB", "simple.qos", "ecn", "", ethernet,
			"diffserv3 triple-isolate nat" + plain + line, "diffserv3 triple-isolate nat" + plain + line, `iqdisc_opts "ecn" are not options of cake`,
		},
		{
			"a word of long ago", "layer_cake.qos", "nat", "diffserv-llt", ethernet,
			"diffserv3 triple-isolate nat" + plain + line, "diffserv3 triple-isolate nat" + plain + line, `"diffserv-llt": unknown`,
		},
		{
			"options left empty", "layer_cake.qos", "", "", "linklayer ethernet\noverhead ''\ntcMPU ''\nitarget ''\nilimit ''\n",
			"diffserv3 triple-isolate nat" + plain + "noatm overhead 0", "diffserv3 triple-isolate nat" + plain + "noatm overhead 0", "",
		},
		{
			"somebody's option", "layer_cake.qos", "", "", ethernet + "autorate 1\n",
			"diffserv3 triple-isolate nat" + plain + line, "diffserv3 triple-isolate nat" + plain + line, `autorate "1" has no counterpart`,
		},
	} {
		text := "\ufeffconfig queue 'wan'\n"
		for line := range strings.Lines("enabled 1\ninterface pppoe-wan\ndownload 50000\nupload 20000\nqdisc cake\nsquash_dscp 0\nsquash_ingress 0\n" +
			"script " + c.script + "\niqdisc_opts '" + c.down + "'\neqdisc_opts '" + c.up + "'\n" + c.more) {
			text += "\toption " + line
		}
		queues, err := Parse(text)
		if err != nil || len(queues) != 1 {
			t.Errorf("%s: %d queues, error %v", c.name, len(queues), err)
			continue
		}
		q := queues[0]
		if diff := cmp.Diff([]string{"bandwidth 50Mbit " + c.wantDown, "bandwidth 20Mbit " + c.wantUp}, []string{q.Link.Down.Keywords(), q.Link.Up.Keywords()}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
		notes := strings.Join(q.Notes, "\n")
		if c.note == "" && notes != "" || !strings.Contains(notes, c.note) {
			t.Errorf("%s: notes %q, want %q", c.name, notes, c.note)
		}
	}
}

func TestSplit(t *testing.T) {
	for line, want := range map[string][]string{
		"":                                nil,
		" \t# option a b":                 nil,
		"option a b#c":                    {"option", "a", "b#c"},
		`option 'a b' "c'd" e\ f`:         {"option", "a b", "c'd", "e f"},
		`option a ''`:                     {"option", "a", ""},
		`option a 'x'"y"z # end`:          {"option", "a", "xyz"},
		"option a 'b'\r":                  {"option", "a", "b"},
		`option a "say \"x\" \\ 'y'" `:    {"option", "a", `say "x" \ 'y'`},
		`option a 'no \n escape in here'`: {"option", "a", `no \n escape in here`},
	} {
		got, err := splitUCI(line)
		if err != nil {
			t.Errorf("%q: %v", line, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q: %s", line, diff)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"layer_cake", "two"} {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Fuzz(func(t *testing.T, text string) {
		queues, err := Parse(text)
		if err != nil {
			return
		}
		for _, q := range queues {
			if err := q.Link.Validate(); err != nil {
				t.Error(err)
			}
		}
		AppendText(nil, queues)
	})
}
