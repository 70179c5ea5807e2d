package identity_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
)

// visitor is a router that keeps what it needs to resume.
type visitor struct {
	config *tls.Config
}

func newVisitor(t testing.TB, by *identity.Authority, made time.Time, roots ...*identity.Authority) *visitor {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := by.SignRouter(pub, "home-1", made)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	for _, r := range roots {
		pool.AppendCertsFromPEM(r.CertificatePEM())
	}
	return &visitor{&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: identity.ServerName, RootCAs: pool, NextProtos: []string{"h2"},
		CurvePreferences:   []tls.CurveID{tls.X25519},
		ClientSessionCache: tls.NewLRUClientSessionCache(1),
		Certificates:       []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}}
}

// visit makes one connection, and says who the server takes the visitor for and
// whether the certificates were left out.
func (v *visitor) visit(door *tls.Config) (who identity.Peer, resumed bool, err error) {
	s, c, err := connected()
	if err != nil {
		return who, false, err
	}
	done := make(chan error, 1)
	go func() {
		conn := tls.Client(c, v.config)
		_, err := conn.Read(make([]byte, 1)) // which takes the ticket in
		done <- errors.Join(err, c.Close())
	}()
	conn := tls.Server(s, door)
	if err = conn.Handshake(); err == nil {
		_, err = conn.Write([]byte("x"))
	}
	state := conn.ConnectionState()
	if err = errors.Join(err, <-done, s.Close()); err != nil {
		return who, false, err
	}
	who, err = identity.PeerOf(state)
	return who, state.DidResume, err
}

// connected returns two ends of a connection that has room for what is written.
func connected() (server, client net.Conn, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = l.Close() }() // both ends are there
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	server, err = l.Accept()
	return server, client, err
}

func agentsDoor(t testing.TB, s *identity.Set) (*identity.Trust, *tls.Config) {
	t.Helper()
	trust := identity.NewTrust(s)
	door, err := trust.AgentsDoor()
	if err != nil {
		t.Fatal(err)
	}
	return trust, door
}

// A router resumes at every controller of the fleet, is known by its key there,
// and does not after what its ticket stands for has ended.
func TestTickets(t *testing.T) {
	a, b, _ := twoAuthorities(t)
	expect := func(what string, v *visitor, door *tls.Config, want bool) {
		t.Helper()
		who, resumed, err := v.visit(door)
		if err != nil || who.Name != "home-1" || who.Key == [32]byte{} || resumed != want {
			t.Errorf("%s: %+v, resumed %t, want %t, %v", what, who, resumed, want, err)
		}
	}
	v := newVisitor(t, a, time.Now(), a, b)
	trust, one := agentsDoor(t, a.Set())
	_, two := agentsDoor(t, a.Set())
	expect("first", v, one, false)
	expect("again", v, one, true)
	expect("at another controller", v, two, true)

	// The other doors of a controller, and other fleets, don't know the ticket.
	operators, err := trust.Door(func(s *identity.Set) (*tls.Config, error) { return s.OperatorsTLS() }, "h2")
	if err != nil {
		t.Fatal(err)
	}
	expect("at another door", v, operators, false)
	expect("first", v, one, false) // the ticket was of the other door

	// A day later it is still good, two days later it is not.
	day := 24 * time.Hour
	for _, c := range []struct {
		later time.Duration
		want  bool
	}{{day, true}, {3 * day, false}} {
		expect("before", v, one, mustResume(t, v, one))
		if err := trust.RenewTickets(time.Now().Add(c.later)); err != nil {
			t.Fatal(err)
		}
		expect("later", v, one, c.want)
		if err := trust.RenewTickets(time.Now()); err != nil {
			t.Fatal(err)
		}
	}

	// No ticket outlives a change of authorities, also not for who is let in.
	mustResume(t, v, one)
	if err := trust.Use(mustSet(t, a, b)); err != nil {
		t.Fatal(err)
	}
	expect("with two authorities", v, one, false)
	expect("again", v, one, true)
	if err := trust.Use(mustSet(t, b, nil)); err != nil {
		t.Fatal(err)
	}
	if who, resumed, err := v.visit(one); err == nil {
		t.Errorf("a ticket opens the door after its authority was retired: %+v, resumed %t", who, resumed)
	}
}

// mustResume visits until there is a ticket, and returns true.
func mustResume(t *testing.T, v *visitor, door *tls.Config) bool {
	t.Helper()
	for range 2 {
		if _, resumed, err := v.visit(door); err == nil && resumed {
			return true
		}
	}
	t.Error("it does not resume")
	return false
}

// A ticket ends with the certificate in it.
func TestTicketEndsWithCertificate(t *testing.T) {
	a, _, _ := twoAuthorities(t)
	_, door := agentsDoor(t, a.Set())
	inner, err := door.GetConfigForClient(nil)
	if err != nil {
		t.Fatal(err)
	}
	v := newVisitor(t, a, time.Now(), a)
	mustResume(t, v, door)
	inner.Time = func() time.Time { return time.Now().Add(identity.RouterLife + time.Hour) }
	if who, resumed, err := v.visit(inner); err == nil {
		t.Errorf("a ticket opens the door after its certificate has ended: %+v, resumed %t", who, resumed)
	}
}

// BenchmarkHandshake says what a handshake costs the controller: CPU time of the
// server's side, microseconds.
func BenchmarkHandshake(b *testing.B) {
	a, err := identity.Open(b.TempDir(), time.Now())
	if err != nil {
		b.Fatal(err)
	}
	_, door := agentsDoor(b, a.Set())
	for _, c := range []struct {
		name  string
		cache tls.ClientSessionCache
	}{{"whole", nil}, {"resumed", tls.NewLRUClientSessionCache(1)}} {
		b.Run(c.name, func(b *testing.B) {
			v := newVisitor(b, a, time.Now(), a)
			v.config.ClientSessionCache = c.cache
			if _, _, err := v.visit(door); err != nil {
				b.Fatal(err)
			}
			runtime.LockOSThread() // visit is the server's side
			defer runtime.UnlockOSThread()
			before := threadTime(b)
			n := 0
			for b.Loop() {
				if _, resumed, err := v.visit(door); err != nil || resumed != (c.cache != nil) {
					b.Fatalf("resumed %t, %v", resumed, err)
				}
				n++
			}
			b.ReportMetric(float64((threadTime(b)-before).Microseconds())/float64(n), "server-us/op")
		})
	}
}

func threadTime(b *testing.B) time.Duration {
	b.Helper()
	const thread = 1 // RUSAGE_THREAD
	var u syscall.Rusage
	if err := syscall.Getrusage(thread, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
