package traffic_test

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/test/traffic"
)

func TestMain(m *testing.M) {
	if traffic.IsChild() {
		os.Exit(traffic.ChildMain())
	}
	os.Exit(m.Run())
}

// TestLoopback runs flows and probes between two processes on loopback, over
// IPv4 and IPv6.
func TestLoopback(t *testing.T) {
	rec := traffic.NewRecord()
	server, port := serve(t, rec)
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	v4 := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	v6 := netip.AddrPortFrom(netip.IPv6Loopback(), port)
	begin := time.Now()
	client, err := traffic.Start((*exec.Cmd).Start, traffic.Spec{
		Flows:  []traffic.Flow{{Name: "down4", Server: v4}, {Name: "up6", Up: true, Server: v6}},
		Probes: []traffic.Probe{{Name: "ping4", Server: v4, Interval: 10 * time.Millisecond}},
		Nice:   1,
	}, rec)
	if err != nil {
		t.Fatal(err)
	}
	// Real packets take real time: wait for what has to arrive.
	waitFor(t, "both flows and ten probes", func() bool {
		now := time.Now()
		l := rec.Latency(begin, now, "ping4")
		return rec.Goodput(begin, now, "down4") > 0 && rec.Goodput(begin, now, "up6") > 0 && l.Sent-l.Lost >= 10
	})
	end := time.Now()
	if l := rec.Latency(begin, end, "ping4"); l.Median <= 0 || l.Median > l.P99 || l.P99 > l.Max {
		t.Errorf("latency: %+v", l)
	}
	if errs := rec.Errors(); len(errs) > 0 {
		t.Errorf("errors while it ran: %v", errs)
	}
	if err := client.Stop(); err != nil {
		t.Error(err)
	}
	if err := client.Stop(); err != nil {
		t.Errorf("stopped twice: %v", err)
	}
}

// serve starts a server on a port that nobody has, below those that the kernel
// gives to anybody.
func serve(t *testing.T, rec *traffic.Record) (server *traffic.Process, port uint16) {
	t.Helper()
	for try := 1; ; try++ {
		port = uint16(10_000 + rand.IntN(20_000))
		server, err := traffic.Start((*exec.Cmd).Start, traffic.Spec{Serve: port}, rec)
		if err == nil {
			return server, port
		}
		if try == 20 || !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
	}
}

// TestBroken wants a flow to nowhere to be told.
func TestBroken(t *testing.T) {
	rec := traffic.NewRecord()
	nowhere := netip.MustParseAddrPort("127.0.0.1:1")
	p, err := traffic.Start((*exec.Cmd).Start, traffic.Spec{Flows: []traffic.Flow{{Name: "lost", Server: nowhere}}}, rec)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the error", func() bool { return len(rec.Errors()) == 1 })
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
}

func TestStartFails(t *testing.T) {
	bad := traffic.Spec{Probes: []traffic.Probe{{Name: "p", Interval: time.Second}}} // no server
	if _, err := traffic.Start((*exec.Cmd).Start, bad, traffic.NewRecord()); err == nil {
		t.Error("a process that can't do what it is asked for was started")
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
