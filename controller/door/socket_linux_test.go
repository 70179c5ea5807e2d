package door

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
)

// TestSocketEnd has a peer that is gone before the poller looks, so that what it
// said and its end are one event.
func TestSocketEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s := newSocket(conn)
	if err := s.detach(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	buffer := make([]byte, 64)
	for _, word := range []string{"hello", "again"} {
		if _, err := io.WriteString(peer, word); err != nil {
			t.Fatal(err)
		}
		p, err := newPoller()
		if err != nil {
			t.Fatal(err)
		}
		last := word == "again"
		if last {
			if err := peer.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.add(s.fd); err != nil {
			t.Fatal(err)
		}
		err = p.wait(func(_ int, ends bool) {
			// That it can be written is an event, too.
			if n, _, err := syscall.Recvfrom(s.fd, buffer, syscall.MSG_PEEK); last != ends || err != nil || n < len(word) {
				return
			}
			if ends {
				s.ends()
			}
			p.stop()
		})
		if err := errors.Join(err, p.close()); err != nil {
			t.Fatal(err)
		}
		if err := s.event(); err != nil {
			t.Fatal(err)
		}
		if n, err := s.Read(buffer); err != nil || string(buffer[:n]) != word {
			t.Fatalf("read %q, %v, want %q", buffer[:n], err, word)
		}
		want := error(errAgain)
		if last {
			want = io.EOF
		}
		if _, err := s.Read(buffer); !errors.Is(err, want) {
			t.Fatalf("after %q: %v, want %v", word, err, want)
		}
	}
}
