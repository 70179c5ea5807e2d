package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"
)

// Sizes of the messages of all peers: what a desired state and its answer take
// in our protocol, bytes.
const (
	desiredSize = 240
	statusSize  = 300
)

// natsConn speaks enough of the protocol of NATS: text lines and payloads.
type natsConn struct {
	net.Conn
	in *bufio.Reader
}

func dialNATS(d *net.Dialer, address string) (*natsConn, error) {
	raw, err := d.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	c := &natsConn{raw, bufio.NewReaderSize(raw, 1<<10)}
	if _, err := c.in.ReadBytes('\n'); err != nil { // INFO
		return nil, err
	}
	_, err = io.WriteString(c, "CONNECT {\"verbose\":false,\"pedantic\":false}\r\n")
	return c, err
}

// message returns the next message that was delivered.
func (c *natsConn) message() ([]byte, error) {
	for {
		line, err := c.in.ReadBytes('\n')
		if err != nil {
			return nil, err
		}
		switch {
		case bytes.HasPrefix(line, []byte("MSG ")):
			f := bytes.Fields(line)
			size, err := strconv.Atoi(string(f[len(f)-1]))
			if err != nil {
				return nil, err
			}
			p := make([]byte, size+2)
			if _, err := io.ReadFull(c.in, p); err != nil {
				return nil, err
			}
			return p[:size], nil
		case bytes.HasPrefix(line, []byte("PING")):
			if _, err := io.WriteString(c, "PONG\r\n"); err != nil {
				return nil, err
			}
		case bytes.HasPrefix(line, []byte("PONG")):
			return nil, nil
		case bytes.HasPrefix(line, []byte("-ERR")):
			return nil, fmt.Errorf("nats: %s", bytes.TrimSpace(line))
		}
	}
}

func publication(subject string, size int) []byte {
	b := fmt.Appendf(nil, "PUB %s %d\r\n", subject, size)
	b = append(b, make([]byte, size)...)
	return append(b, "\r\n"...)
}

// natsChild plays agents that subscribe to a subject each and answer.
func natsChild(args []string) error {
	f := flag.NewFlagSet("nats", flag.ExitOnError)
	address := f.String("address", "", "")
	from := f.Int("from", 0, "")
	count := f.Int("count", 0, "")
	source := f.Int("source", 1, "")
	if err := f.Parse(args); err != nil {
		return err
	}
	var t tally
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(*source))}}
	ack := publication("ack", statusSize)
	go func() {
		for i := range *count {
			c, err := dialNATS(dialer, *address)
			if err != nil {
				fmt.Println(err)
				return
			}
			if _, err := fmt.Fprintf(c, "SUB desired.%s 1\r\nPING\r\n", routerID(*from+i)); err != nil {
				return
			}
			if _, err := c.message(); err != nil { // PONG
				return
			}
			t.add(func(a *answer) { a.Connected++ })
			go func() {
				for {
					m, err := c.message()
					if err != nil {
						return
					}
					if m == nil {
						continue
					}
					if _, err := c.Write(ack); err != nil {
						return
					}
					t.answered()
				}
			}()
		}
	}()
	return t.serve(nil)
}

// benchNATS does the same job with NATS: a subject for each agent, and a
// subject on which all answers come to whom has sent.
func benchNATS(ctx context.Context, o options) (p pushed, err error) {
	binary, err := exec.LookPath("nats-server")
	if err != nil {
		return p, fmt.Errorf("%w: install Debian's nats-server, or run with -peers=false", err)
	}
	address, err := freeAddress()
	if err != nil {
		return p, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return p, err
	}
	var pids []int
	var all crowd
	defer func() { all.stop() }()
	from, count := o.groups()
	var publishers []*natsConn
	// As many servers as there are controllers, for the same limit.
	for i := range from {
		if i > 0 {
			if address, err = freeAddress(); err != nil {
				return p, err
			}
			if _, port, err = net.SplitHostPort(address); err != nil {
				return p, err
			}
		}
		cmd := command(ctx, binary, "-a", "127.0.0.1", "-p", port, "-l", filepath.Join(o.dir, "nats.log"))
		if err := cmd.Start(); err != nil {
			return p, err
		}
		defer func() {
			_ = cmd.Process.Kill() // it keeps nothing
			_ = cmd.Wait()         // likewise
		}()
		pids = append(pids, cmd.Process.Pid)
		var pub *natsConn
		for range 100 {
			if pub, err = dialNATS(&net.Dialer{}, address); err == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if err != nil {
			return p, err
		}
		publishers = append(publishers, pub)
	}
	empty, err := used(pids...)
	if err != nil {
		return p, err
	}
	var acks atomic.Int64
	for i, pub := range publishers {
		if _, err := io.WriteString(pub, "SUB ack 1\r\n"); err != nil {
			return p, err
		}
		go func() { // until the server ends
			for {
				m, err := pub.message()
				if err != nil {
					return
				}
				if m != nil {
					acks.Add(1)
				}
			}
		}()
		kid, err := startChild(ctx, "nats", "--address", pub.RemoteAddr().String(),
			"--from", strconv.Itoa(from[i]), "--count", strconv.Itoa(count[i]), "--source", strconv.Itoa(1+i))
		if err != nil {
			return p, err
		}
		all = append(all, kid)
	}
	if err := all.until(ctx, "all subscribed", 5*time.Minute, func(a answer) bool { return a.Connected >= o.n }); err != nil {
		return p, err
	}
	total := int64(0)
	p, err = rounds(ctx, o, all, pids, func(int) error {
		total += int64(o.n)
		for i, pub := range publishers {
			w := bufio.NewWriterSize(pub, 64<<10)
			for k := range count[i] {
				if _, err := w.Write(publication("desired."+routerID(from[i]+k), desiredSize)); err != nil {
					return err
				}
			}
			if err := w.Flush(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return p, err
	}
	if acks.Load() != total {
		return p, fmt.Errorf("%d answers came, want %d", acks.Load(), total)
	}
	u, err := used(pids...)
	p.memory = float64(u.resident-empty.resident) / float64(o.n)
	return p, err
}

// freeAddress returns an address of the loopback that nobody listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
