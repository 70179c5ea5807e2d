package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

func TestHighest(t *testing.T) {
	for n := 1; n < 30; n++ {
		for place := range n * (n + 1) {
			first, limit := place%n, place/n-1
			asked := map[int]bool{}
			got, err := highest(n, first, func(i int) (bool, error) {
				if asked[i] {
					t.Errorf("n=%d limit=%d: %d is asked twice", n, limit, i)
				}
				asked[i] = true
				return i <= limit, nil
			})
			if err != nil || got != limit || len(asked) > 10 {
				t.Errorf("n=%d from %d: got %d after %d tries, error %v; want %d", n, first, got, len(asked), err, limit)
			}
		}
	}
	if _, err := highest(3, 1, func(int) (bool, error) { return true, io.EOF }); !errors.Is(err, io.EOF) {
		t.Errorf("got %v", err)
	}
}

// result is of a link that delivers and a CPU that is idle, per cent.
func result(down, up, idle float64) *row.Result {
	count := func(mbit float64) row.Count {
		return row.Count{Packets: uint64(mbit * 100), Bytes: uint64(mbit * 1e6 / 8)}
	}
	return &row.Result{
		Window: time.Second, Soak: time.Duration(idle * 1e7),
		DownOffered: count(126.5), UpOffered: count(13.2), DownDelivered: count(down), UpDelivered: count(up),
	}
}

func TestHeld(t *testing.T) {
	o, free, down := order(row.Cake), order(row.None), order(row.Cake)
	down.UpFlows = 0
	for _, c := range []struct {
		order    row.Order
		down, up float64
		want     bool
	}{
		{o, 115, 12, true},
		{o, 109.3, 11.41, true},
		{o, 109.2, 12, false},
		{o, 115, 11.39, false},
		{free, 115, 12, false}, // nothing shapes: what is offered has to come through
		{free, 126, 13.1, true},
		{down, 115, 4, true}, // acknowledgements only
		{down, 109, 4, false},
	} {
		if got := held(&c.order, result(c.down, c.up, 10)); got != c.want {
			t.Errorf("%s %g/%g: got %v", c.order.Shaper, c.down, c.up, got)
		}
	}
}

func TestJudge(t *testing.T) {
	make1 := func(s row.Shaper, mips int, r *row.Result) *line {
		return &line{name: shaperNames[s], mips: mips, order: order(s), result: r}
	}
	cake, userspace := result(115, 12, 40), result(115, 12, 6)
	kept := []*line{make1(row.Cake, 500, cake), make1(row.Kernel, 500, result(115, 12, 38.5)), make1(row.Userspace, 500, userspace)}
	idle := func(rss uint64, cpu time.Duration) *line {
		o := order(row.Userspace)
		o.Kind = "idle"
		return &line{name: "agent userspace idle", mips: 500, order: o, result: &row.Result{Window: time.Minute, AgentRSS: rss, Agent: cpu, AgentSwitches: 120, Reports: 6}}
	}
	kept = append(kept, idle(14_000_000, 599*time.Millisecond))
	var out strings.Builder
	if err := judge(&out, kept); err != nil || strings.Count(out.String(), "kept") != 8 {
		t.Errorf("error %v, said:\n%s", err, out.String())
	}
	restless, alone := idle(10_000_000, 0), idle(10_000_000, 0)
	restless.result.AgentSwitches = 121
	alone.result.Reports = 4
	slow := result(115, 12, 30)
	slow.Ping99 = 26 * time.Millisecond
	for name, missed := range map[string][]*line{
		"dear kernel": {make1(row.Cake, 250, cake), make1(row.Kernel, 250, result(115, 12, 37))},
		"no idle":     {make1(row.Userspace, 500, result(115, 12, 4.9))},
		"not held":    {make1(row.Userspace, 500, result(100, 12, 30))},
		"late":        {make1(row.Userspace, 500, slow)},
		"fat":         {idle(14_000_001, 0)},
		"awake":       {idle(10_000_000, 600*time.Millisecond)},
		"woken":       {restless},
		"alone":       {alone},
		"restless":    {{name: "runtime monitor", mips: 500, order: row.Order{Kind: "monitor"}, result: &row.Result{MonitorWakes: [2]float64{15000, 14000}}}},
	} {
		if err := judge(io.Discard, missed); !errors.Is(err, errMissed) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// TestRest boots a machine and wants an agent without traffic to rest.
func TestRest(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: it takes minutes")
	}
	kernel := os.Getenv("CAKEFLEET_LAB_KERNEL")
	if kernel == "" {
		t.Skip("skipped: CAKEFLEET_LAB_KERNEL names no kernel for the lab's machines")
	}
	if _, err := exec.LookPath(qemuProgram); err != nil {
		t.Skip("skipped: " + qemuProgram + " is not installed")
	}
	t.Chdir("../..") // programs are built as "make lab" does
	for _, kind := range []string{"userspace", "kernel"} {
		t.Run(kind, func(t *testing.T) {
			o := options{only: "^agent " + kind + " idle", out: t.TempDir(), kernel: kernel, jobs: 1}
			if err := run(t.Context(), o); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestOutput prints what a failed boot and a good one look like.
func TestOutput(t *testing.T) {
	ls := []*line{
		{name: "cake", mips: 500, order: order(row.Cake), result: result(115, 12, 40)},
		{name: "fifo", mips: 500, order: order(row.FIFO), err: errors.New("the machine gave no result")},
	}
	var table, chart strings.Builder
	for _, l := range ls {
		printLine(&table, l)
	}
	for _, want := range []string{"126.5/13.2", "115.0/12.0", "60.0", "fifo", "no result"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, table.String())
		}
	}
	if err := writeChart(&chart, ls); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for d := xml.NewDecoder(strings.NewReader(chart.String())); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if c, ok := token.(xml.CharData); ok {
			texts = append(texts, string(c))
		}
	}
	all := strings.Join(texts, "")
	if !strings.Contains(all, "cake, 500 MIPS") || strings.Contains(all, "fifo") {
		t.Errorf("texts of the picture: %q", all)
	}
}

// TestWatch reads a console as a machine writes it.
func TestWatch(t *testing.T) {
	m := &machine{}
	var log bytes.Buffer
	r, failure, ended := m.watch(strings.NewReader("[ 0.0] Linux\r\nLAB-SYM 80100000 start\r\nLAB-RESULT {\"Window\":5}\r\nLAB-END\r\n"), &log)
	if failure != "" || !ended || r == nil || r.Window != 5 {
		t.Errorf("result %v, failure %q, ended %v", r, failure, ended)
	}
	if d := cmp.Diff([]string{"80100000 start"}, m.symbols); d != "" {
		t.Error(d)
	}
	_, failure, ended = m.watch(strings.NewReader("LAB-FAIL no card\nof this name\nLAB-END\n"), &log)
	if failure != "no card\nof this name" || !ended {
		t.Errorf("failure %q, ended %v", failure, ended)
	}
}

func TestShift(t *testing.T) {
	for mips, want := range map[int]int{1000: 0, 500: 1, 250: 2, 125: 3} {
		if got, err := shift(mips); err != nil || got != want {
			t.Errorf("%d MIPS: got %d, error %v", mips, got, err)
		}
	}
	if _, err := shift(300); err == nil {
		t.Error("300 MIPS are taken")
	}
}
