package door

import (
	"context"
	"crypto/tls"
	"errors"
	"testing"

	"github.com/cakefleet/cakefleet/internal/grpcwire"
)

// void is the TLS connection of a peer whose bytes come from elsewhere.
type void struct{ written int }

func (*void) Read([]byte) (int, error) { return 0, errAgain }

func (v *void) Write(p []byte) (int, error) {
	v.written += len(p)
	return len(p), nil
}

func (*void) CloseWrite() error { return nil }

func (*void) ConnectionState() tls.ConnectionState { return tls.ConnectionState{} }

// deaf is a session that takes everything.
type deaf struct{ closed int }

func (*deaf) Receive(m []byte) error {
	if len(m) == 1 {
		return errors.New("one byte")
	}
	return nil
}

func (*deaf) Writable() {}

func (d *deaf) Closed() { d.closed++ }

// FuzzPeer feeds a connection what a stranger may send, cut in two. Whatever it
// is, it must not panic, nor make the door hold or answer much more than it is.
func FuzzPeer(f *testing.F) {
	const method = "/s/m"
	hello := grpcwire.AppendSettings([]byte(grpcwire.Preface), grpcwire.Settings{NoPush: true})
	request := grpcwire.RequestBlock("https", "x", method)
	open := grpcwire.AppendHeaders(hello, 1, request, false)
	for _, b := range [][]byte{
		hello,
		open,
		grpcwire.AppendData(open, 1, []byte("message"), true),
		grpcwire.AppendReset(open, 1, grpcwire.Cancel),
		grpcwire.AppendWindowUpdate(open, 1, 1000),
		grpcwire.AppendPing(open, false, [8]byte{1}),
		grpcwire.AppendGoAway(open, 1, grpcwire.NoError, "bye"),
		grpcwire.AppendHeaders(open, 3, grpcwire.RequestBlock("https", "x", "/other"), true),
	} {
		f.Add(b, len(b)/2)
	}
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		session := &deaf{}
		opened := 0
		s := New(Config{TLS: &tls.Config{}, Method: method, Open: func(context.Context, *Stream) (Session, error) {
			opened++
			return session, nil
		}})
		out := &void{}
		c := newConn(s, out, &socket{fd: -1})
		w := newWorker()
		cut = min(max(cut, 0), len(b))
		err := c.take(w, b[:cut])
		if err == nil {
			err = c.take(w, b[cut:])
		}
		if e := (*grpcwire.Error)(nil); err != nil && !errors.As(err, &e) {
			t.Errorf("error %v is not one of the protocol", err)
		}
		if len(c.rest) > len(b) || out.written+len(w.out) > 64*len(b)+1024 {
			t.Errorf("%d bytes are kept and %d answered for %d", len(c.rest), out.written+len(w.out), len(b))
		}
		c.fail(err)
		if session.closed != opened {
			t.Errorf("%d sessions opened, %d closed", opened, session.closed)
		}
	})
}
