package traffic

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// A flow begins with one line from the client: "up NAME" or "down NAME".
const (
	wordUp   = "up "
	wordDown = "down "
)

const bufferBytes = 64 << 10

func serve(ctx context.Context, spec Spec, c *counters) error {
	addr := fmt.Sprintf(":%d", spec.Serve)
	lc := net.ListenConfig{Control: congestion(spec.Congestion)} // accepted connections inherit it
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	u, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", addr)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed at the end of the process only
			}
			go serveFlow(conn, c)
		}
	}()
	go echo(u)
	return nil
}

// congestion returns what sets the congestion control of a TCP socket before
// it is used, nil for the system's.
func congestion(name string) func(_, _ string, c syscall.RawConn) error {
	if name == "" {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if ctrl := c.Control(func(fd uintptr) {
			err = syscall.SetsockoptString(int(fd), syscall.IPPROTO_TCP, syscall.TCP_CONGESTION, name)
		}); ctrl != nil {
			return ctrl
		}
		if err != nil {
			return fmt.Errorf("use congestion control %s: %w", name, err)
		}
		return nil
	}
}

func serveFlow(conn net.Conn, c *counters) {
	defer conn.Close()
	// Nothing follows the line of a down flow, and of an up flow everything
	// that does is counted, also what the reader holds already.
	r := bufio.NewReaderSize(conn, bufferBytes)
	line, err := r.ReadString('\n')
	if err != nil {
		return
	}
	if name, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), wordUp); ok {
		_ = count(r, c.flow(name)) // the client tells how a flow ends
		return
	}
	_ = send(conn)
}

func echo(u net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		n, from, err := u.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = u.WriteTo(buf[:n], from) // one that is lost is the probe's news
		}
	}
}

func runFlow(ctx context.Context, f Flow, control string, c *counters) {
	conn, err := (&net.Dialer{Timeout: time.Minute, Control: congestion(control)}).DialContext(ctx, "tcp", f.Server.String())
	if err != nil {
		c.broke(f.Name, err)
		return
	}
	defer conn.Close()
	word := wordDown
	if f.Up {
		word = wordUp
	}
	if _, err := io.WriteString(conn, word+f.Name+"\n"); err != nil {
		c.broke(f.Name, err)
		return
	}
	if f.Up {
		err = send(conn)
	} else {
		err = count(conn, c.flow(f.Name))
	}
	c.broke(f.Name, err)
}

// send writes until that fails.
func send(w io.Writer) error {
	buf := make([]byte, bufferBytes)
	for {
		if _, err := w.Write(buf); err != nil {
			return err
		}
	}
}

// count reads until that fails.
func count(r io.Reader, n *atomic.Uint64) error {
	buf := make([]byte, bufferBytes)
	for {
		k, err := r.Read(buf)
		n.Add(uint64(k))
		if err != nil {
			return err
		}
	}
}

// probeBytes are the payload of a probe: its number and when it was sent.
const probeBytes = 16

func startProbe(ctx context.Context, p Probe, c *counters) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp", p.Server.String())
	if err != nil {
		return fmt.Errorf("probe %s: %w", p.Name, err)
	}
	go func() {
		every := time.NewTicker(p.Interval)
		defer every.Stop()
		var buf [probeBytes]byte
		for seq := uint64(1); ; seq++ {
			now := time.Now().UnixNano()
			binary.BigEndian.PutUint64(buf[:], seq)
			binary.BigEndian.PutUint64(buf[8:], uint64(now))
			// One that the kernel refuses counts as sent and lost.
			c.addSent(packet{Probe: p.Name, Seq: seq, At: now})
			_, _ = conn.Write(buf[:])
			select {
			case <-every.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() {
		var buf [probeBytes]byte
		for {
			n, err := conn.Read(buf[:])
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return
			}
			if err != nil || n != probeBytes { // refused while the server is away
				continue
			}
			at := int64(binary.BigEndian.Uint64(buf[8:]))
			c.addEchoed(packet{Probe: p.Name, Seq: binary.BigEndian.Uint64(buf[:]), At: at, RTT: time.Now().UnixNano() - at})
		}
	}()
	return nil
}
