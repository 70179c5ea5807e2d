package identity_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func token(t *testing.T, text string) identity.Token {
	t.Helper()
	tok, err := identity.ParseToken(text)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func enroll(t *testing.T, address, dir, text string, clock *identity.Clock) (*identity.Identity, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	e, err := identity.Begin(ctx, address, dir, token(t, text), clock)
	if err != nil {
		return nil, err
	}
	return session.Enroll(ctx, address, e)
}

func TestEnrolSaveLoad(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	dir := t.TempDir()
	clock := identity.NewClock(time.Time{})
	id, err := enroll(t, c.Address, dir, c.AddToken("r1"), clock)
	if err != nil {
		t.Fatal(err)
	}
	if err := id.Save(dir); err != nil {
		t.Fatal(err)
	}
	got, err := identity.Load(dir)
	if err != nil || got.RouterID != "r1" || !got.Key.Equal(id.Key) || !got.Leaf.Equal(id.Leaf) || !got.Authorities[0].Equal(c.Authority.Certificate) {
		t.Errorf("loaded %+v, %v", got, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("files %v, %v: want identity.pem alone", entries, err)
	}
	if info, err := entries[0].Info(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("identity.pem: mode %v, %v", info.Mode(), err)
	}
}

// The key stays the same until there is a certificate for it, so that an
// answer that was lost can be asked for again.
func TestKeyIsKeptWhileWaiting(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	dir := t.TempDir()
	clock := identity.NewClock(time.Time{})
	var requests []string
	for range 2 {
		e, err := identity.Begin(t.Context(), c.Address, dir, token(t, c.Authority.Token("x")), clock)
		if err != nil {
			t.Fatal(err)
		}
		requests = append(requests, string(e.Request))
	}
	if requests[0] != requests[1] { // Ed25519 is deterministic
		t.Error("two requests are for two keys")
	}
}

// A controller of another fleet, with a perfect certificate of its own
// authority, gets nothing: not even the token.
func TestWrongPinIsRefused(t *testing.T) {
	ours := sessiontest.NewAuthority(t, time.Now().Add(-time.Hour))
	theirs := sessiontest.Start(t, sessiontest.Config{})
	_, err := enroll(t, theirs.Address, t.TempDir(), ours.Token("secret"), identity.NewClock(time.Time{}))
	if err == nil || !strings.Contains(err.Error(), "authority that the router was told to trust") {
		t.Errorf("got %v", err)
	}
}

// A server that presents our authority's certificate and a certificate that
// the authority never signed is refused by the second handshake.
func TestAuthorityNextToForeignLeafIsRefused(t *testing.T) {
	ours := sessiontest.NewAuthority(t, time.Now().Add(-time.Hour))
	impostor := sessiontest.NewAuthority(t, time.Now().Add(-time.Hour))
	forged := impostor.Server(t, time.Now().Add(-time.Hour))
	forged.Certificate[1] = ours.Certificate.Raw
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{forged}, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	got := make(chan int, 100) // bytes that the impostor could read
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			n, _ := conn.Read(make([]byte, 1))
			got <- n
			_ = conn.Close()
		}
	}()
	_, err = enroll(t, l.Addr().String(), t.TempDir(), ours.Token("secret"), identity.NewClock(time.Time{}))
	if errClose := l.Close(); errClose != nil {
		t.Error(errClose)
	}
	<-done
	if err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("got %v", err)
	}
	close(got)
	for n := range got {
		if n > 0 {
			t.Error("the impostor got something to read")
		}
	}
}

func TestTokens(t *testing.T) {
	good := sessiontest.NewAuthority(t, time.Now()).Token("topsecret")
	if _, err := identity.ParseToken(" " + good + "\n"); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "cf1", good[:len(good)-1], "cf2" + good[3:], good + ".x", strings.Replace(good, ".", "", 1)} {
		_, err := identity.ParseToken(bad)
		if err == nil {
			t.Errorf("%q was accepted", bad)
		} else if strings.Contains(err.Error(), "topsecret") {
			t.Errorf("the error tells the secret: %v", err)
		}
	}
}

// A router without a battery: in a bubble it is the year 2000, its certificate
// is from October 2026 and the controller's from November.
func TestNoClock(t *testing.T) {
	october, november := time.Date(2026, 10, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	synctest.Test(t, func(t *testing.T) {
		authority := sessiontest.NewAuthority(t, october.AddDate(-1, 0, 0))
		foreign := sessiontest.NewAuthority(t, october.AddDate(-1, 0, 0))
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		id := &identity.Identity{RouterID: "r1", Key: key, Authorities: []*x509.Certificate{authority.Certificate}, Leaf: authority.Router(t, "r1", pub, october, 90*24*time.Hour)}
		clock := identity.NewClock(id.Leaf.NotBefore)
		if clock.Wrong() == "" || !id.Valid(clock.Now()) {
			t.Errorf("wrong %q, now %v", clock.Wrong(), clock.Now())
		}

		err = handshake(id.TLS(clock), foreign.Server(t, november))
		if err == nil || id.LearnTime(err, clock) || !clock.Now().Equal(october) {
			t.Errorf("a foreign fleet taught the time: %v, now %v", err, clock.Now())
		}
		if err = handshake(id.TLS(clock), authority.Server(t, november)); err == nil {
			t.Fatal("a certificate from the future was accepted")
		}
		if !id.LearnTime(err, clock) || !clock.Now().Equal(november) {
			t.Errorf("nothing was learnt of %v: now %v", err, clock.Now())
		}
		if err := handshake(id.TLS(clock), authority.Server(t, november)); err != nil {
			t.Errorf("after learning: %v", err)
		}
		// Time that was learnt never goes back, and one that has ended stays so.
		err = handshake(id.TLS(clock), authority.Server(t, november.AddDate(-2, 0, 0)))
		if err == nil || id.LearnTime(err, clock) || !clock.Now().Equal(november) {
			t.Errorf("an ended certificate: %v, now %v", err, clock.Now())
		}
	})
}

// A router whose clock is years ahead comes in all the same, and says so; one
// whose clock is kept right refuses a certificate that has ended, and so does
// one that knows by other means that it has.
func TestClockAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // it is 2000 here
		now := time.Date(1990, 11, 30, 0, 0, 0, 0, time.UTC)
		issued := now.AddDate(0, -2, 0)
		authority := sessiontest.NewAuthority(t, issued.AddDate(-1, 0, 0))
		foreign := sessiontest.NewAuthority(t, issued.AddDate(-1, 0, 0))
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		id := &identity.Identity{RouterID: "r1", Key: key, Authorities: []*x509.Certificate{authority.Certificate}, Leaf: authority.Router(t, "r1", pub, issued.AddDate(0, 1, 0), 90*24*time.Hour)}
		server := authority.Server(t, issued)
		fresh := func(floor time.Time, synced bool) *identity.Clock {
			c := identity.NewClock(floor)
			c.SetSynced(synced)
			return c
		}
		refused := func(what string, clock *identity.Clock, by tls.Certificate) {
			t.Helper()
			err := handshake(id.TLS(clock), by)
			if err == nil || id.LearnTime(err, clock) || !clock.Now().Equal(time.Now()) {
				t.Errorf("%s: %v, now %v", what, err, clock.Now())
			}
		}
		refused("a clock that is kept right", fresh(id.Leaf.NotBefore, true), server)
		refused("ended by what is known", fresh(issued.AddDate(1, 0, 1), false), server)
		refused("another fleet's", fresh(id.Leaf.NotBefore, false), foreign.Server(t, issued))

		clock := fresh(id.Leaf.NotBefore, false)
		if known := clock.Known(); !known.Equal(id.Leaf.NotBefore) {
			t.Errorf("known to have passed is %v", known)
		}
		err = handshake(id.TLS(clock), server)
		if err == nil || !id.LearnTime(err, clock) || clock.Wrong() == "" || !clock.Now().Equal(id.Leaf.NotBefore) {
			t.Fatalf("nothing was learnt of %v: %q, now %v", err, clock.Wrong(), clock.Now())
		}
		if err := handshake(id.TLS(clock), server); err != nil {
			t.Errorf("after learning: %v", err)
		}
		if !id.Valid(clock.Best()) {
			t.Error("the router's own certificate is taken for one that has ended")
		}
		clock.Compare(now)
		if want := "the router's clock is 3319 days ahead of the controller's"; clock.Wrong() != want {
			t.Errorf("wrong is %q, want %q", clock.Wrong(), want)
		}
		time.Sleep(time.Hour)
		if want := now.Add(time.Hour); !clock.Now().Equal(want) || !clock.Known().Equal(want) {
			t.Errorf("an hour later: now %v, known %v", clock.Now(), clock.Known())
		}
		// The certificate does end: time goes on.
		time.Sleep(365 * 24 * time.Hour)
		if err := handshake(id.TLS(clock), server); err == nil || id.LearnTime(err, clock) {
			t.Errorf("a certificate that has ended: %v", err)
		}
		// Set right, the clock has its credit back.
		clock.SetSynced(true)
		if !clock.Now().Equal(time.Now()) {
			t.Errorf("set right: now %v", clock.Now())
		}
	})
}

// handshake does one over a pipe, as a client and a server that knows no
// router, and returns the client's error.
func handshake(client *tls.Config, server tls.Certificate) error {
	a, b := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := tls.Server(b, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{server}, SessionTicketsDisabled: true})
		_ = s.Handshake()
		_, _ = s.Read(make([]byte, 1))
		_ = b.Close()
	}()
	err := tls.Client(a, client).Handshake()
	_ = a.Close()
	<-done
	return err
}

func TestLoadRefusesWhatDoesNotFit(t *testing.T) {
	dir := t.TempDir()
	if _, err := identity.Load(dir); !errors.Is(err, identity.ErrNone) {
		t.Errorf("nothing there: %v", err)
	}
	path := filepath.Join(dir, "identity.pem")
	if err := os.WriteFile(path, []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.Load(dir); err == nil || errors.Is(err, identity.ErrNone) {
		t.Errorf("rubbish: %v", err)
	}
	a := sessiontest.NewAuthority(t, time.Now().Add(-time.Hour))
	pub, _, _ := ed25519.GenerateKey(rand.Reader)
	_, other, _ := ed25519.GenerateKey(rand.Reader)
	mixed := &identity.Identity{RouterID: "r", Key: other, Authorities: []*x509.Certificate{a.Certificate}, Leaf: a.Router(t, "r", pub, time.Now(), time.Hour)}
	if err := mixed.Save(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.Load(dir); err == nil || !strings.Contains(err.Error(), "not for this router's key") {
		t.Errorf("another key: %v", err)
	}
}

// A clock that is years off either way is told, and it is no matter how long
// ago the controller said what the time is.
func TestClockOfTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := identity.NewClock(time.Time{})
		if w := c.Wrong(); w != "" {
			t.Errorf("nothing was said: %q", w)
		}
		for _, x := range []struct {
			theirs time.Duration // ahead of ours
			want   string
		}{
			{0, ""},
			{identity.MaxSkew - time.Second, ""},
			{-identity.MaxSkew + time.Second, ""},
			{7 * time.Minute, "7 minutes behind"},
			{3 * 365 * 24 * time.Hour, "1095 days behind"},
			{-5 * time.Hour, "5 hours ahead"},
			{-10 * 365 * 24 * time.Hour, "3650 days ahead"},
		} {
			c.Compare(time.Now().Add(x.theirs))
			for range 2 {
				if got := c.Wrong(); x.want == "" && got != "" || !strings.Contains(got, x.want) {
					t.Errorf("%v: got %q, want %q", x.theirs, got, x.want)
				}
				time.Sleep(48 * time.Hour)
			}
		}
	})
}

func FuzzParseToken(f *testing.F) {
	f.Add("cf1.0123456789.secret." + strings.Repeat("A", 43))
	f.Add("cf1...")
	f.Add(strings.Repeat("A", 43))
	f.Fuzz(func(t *testing.T, text string) {
		if tok, err := identity.ParseToken(text); err == nil && tok.Text != strings.TrimSpace(text) {
			t.Errorf("%q is presented as %q", text, tok.Text)
		} else if err != nil && !errors.Is(err, identity.ErrToken) {
			t.Errorf("%q: %v", text, err)
		}
		if tok, err := identity.ParsePin(text); err == nil && tok.Text != "" {
			t.Errorf("a pin proves something: %q", tok.Text)
		} else if err != nil && !errors.Is(err, identity.ErrToken) {
			t.Errorf("%q: %v", text, err)
		}
	})
}
