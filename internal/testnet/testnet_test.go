package testnet_test

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// TestRouter builds a host, a router that masquerades and a far end, and sends
// a line through, over IPv4 and IPv6.
func TestRouter(t *testing.T) {
	testnet.Require(t)
	host, router, far := testnet.Make(t, "host"), testnet.Make(t, "router"), testnet.Make(t, "far")
	for _, err := range []error{
		testnet.Veth(host, "eth0", router, "lan0"),
		router.Bridge("br-lan", "lan0"),
		testnet.Veth(router, "wan", far, "eth0"),
		host.Addr("eth0", "10.9.1.2/24", "fd00:1::2/64"),
		router.Addr("br-lan", "10.9.1.1/24", "fd00:1::1/64"),
		router.Addr("wan", "192.0.2.1/24", "2001:db8::1/64"),
		far.Addr("eth0", "192.0.2.2/24", "2001:db8::2/64"),
		router.Forward(),
		router.Masquerade("wan", false),
		host.Route("0.0.0.0/0", "10.9.1.1"),
		host.Route("::/0", "fd00:1::1"),
		far.Route("fd00:1::/64", "2001:db8::1"),
		router.FIFO("wan", 100_000_000, 100_000),
		host.Offload("eth0", false),
		router.CountSmall("wan", 100),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ listen, wantPeer string }{
		{"192.0.2.2:0", "192.0.2.1"},     // behind NAT
		{"[2001:db8::2]:0", "fd00:1::2"}, // routed
	} {
		var l net.Listener
		if err := far.Do(func() (err error) { l, err = net.Listen("tcp", c.listen); return err }); err != nil {
			t.Fatal(err)
		}
		peer := make(chan string, 1)
		go func() {
			defer l.Close()
			conn, err := l.Accept()
			if err != nil {
				peer <- err.Error()
				return
			}
			defer conn.Close()
			_, _ = io.Copy(io.Discard, conn) // until the far end closes
			h, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
			peer <- h
		}()
		err := host.Do(func() error {
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				return err
			}
			_, err = conn.Write([]byte("hello\n"))
			return errors.Join(err, conn.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := <-peer; got != c.wantPeer {
			t.Errorf("%s: peer is %s, want %s", c.listen, got, c.wantPeer)
		}
	}
	if _, _, tx, _, err := router.Counters("wan"); err != nil || tx == 0 {
		t.Errorf("counters of wan: %d packets sent, error %v", tx, err)
	}
	// Each connection is a handshake, one short line and its end.
	if packets, bytes, err := router.Small("wan"); err != nil || packets < 8 || bytes < packets*40 || bytes > packets*100 {
		t.Errorf("small packets on wan: %d with %d bytes, error %v", packets, bytes, err)
	}
	if err := router.NoFIFO("wan"); err != nil {
		t.Error(err)
	}
	if err := router.Down("wan"); err != nil {
		t.Error(err)
	}
	if err := host.Delete("eth0"); err != nil {
		t.Error(err)
	}
}

func TestStart(t *testing.T) {
	testnet.Require(t)
	n := testnet.Make(t, "proc")
	cmd := exec.Command("readlink", "/proc/self/ns/net")
	var out strings.Builder
	cmd.Stdout = &out
	if err := n.Run(cmd); err != nil {
		t.Fatal(err)
	}
	var want string
	if err := n.Do(func() (err error) { want, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(out.String()); got != want {
		t.Errorf("the process ran in %s, want %s", got, want)
	}
	if here, err := os.Readlink("/proc/self/ns/net"); err != nil || here == want {
		t.Errorf("the test itself is in %s (%v), want another namespace", here, err)
	}
}

func TestRemoveLeftovers(t *testing.T) {
	testnet.Require(t)
	const name = "cfleft-a"
	if _, err := testnet.New(name); err != nil {
		t.Fatal(err)
	}
	if _, err := testnet.New(name); !errors.Is(err, os.ErrExist) {
		t.Errorf("second namespace of one name: error %v, want %v", err, os.ErrExist)
	}
	got, err := testnet.RemoveLeftovers("cfleft-")
	if err != nil || len(got) != 1 || got[0] != name {
		t.Errorf("removed %v, error %v; want [%s]", got, err, name)
	}
	if _, err := testnet.Open(name); err == nil {
		t.Error("the namespace is still there")
	}
}
