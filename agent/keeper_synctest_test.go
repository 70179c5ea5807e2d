package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/agent/session"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
)

const day = 24 * time.Hour

// keeping is a keeper whose certificate began a time ago and lives 90 days.
func keeping(t *testing.T, ca *sessiontest.Authority, began time.Time) *keeper {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(Config{Controller: "c:1", StateDir: t.TempDir(), Dataplane: &dataplanetest.Fake{}})
	if err != nil {
		t.Fatal(err)
	}
	leaf := ca.Router(t, "r1", key.Public().(ed25519.PublicKey), began, 90*day)
	return newKeeper(a, &identity.Identity{RouterID: "r1", Key: key, Leaf: leaf, Authorities: []*x509.Certificate{ca.Certificate}})
}

// answer is what a controller would: a certificate for the request's key.
func answer(t *testing.T, ca *sessiontest.Authority, k *keeper, began time.Time) []byte {
	t.Helper()
	der, err := k.Request()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil || csr.CheckSignature() != nil {
		t.Fatalf("request: %v", err)
	}
	return ca.Router(t, "r1", csr.PublicKey.(ed25519.PublicKey), began, 90*day).Raw
}

// A fleet that joined on one day renews over nine, from the 36th to the 45th.
func TestRenewalIsSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := sessiontest.NewAuthority(t, time.Now().Add(-365*day))
		first, last := 90*day, time.Duration(0)
		for range 200 {
			wait := keeping(t, ca, time.Now()).Wait()
			if wait < 36*day-time.Second || wait > 45*day {
				t.Errorf("renewed after %v", wait)
			}
			first, last = min(first, wait), max(last, wait)
		}
		if last-first < 7*day {
			t.Errorf("all within %v", last-first)
		}
	})
}

// A renewal that goes wrong is tried again in an hour or two, and the router
// says so before the certificate ends; one that works is on flash, with the one
// before it.
func TestRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := sessiontest.NewAuthority(t, time.Now().Add(-365*day))
		k := keeping(t, ca, time.Now().Add(-80*day))
		if wait := k.Wait(); wait < 0 || wait > renewSoon {
			t.Errorf("overdue, and begins in %v", wait)
		}
		old := k.id.Load()
		if err := old.Save(k.agent.cfg.StateDir); err != nil {
			t.Fatal(err)
		}
		stranger := sessiontest.NewAuthority(t, time.Now().Add(-365*day))
		for what, c := range map[string]struct {
			cert []byte
			ca   *sessiontest.Authority
			err  error
		}{
			"no controller":     {nil, ca, errors.New("no route")},
			"rubbish":           {[]byte("x"), ca, nil},
			"foreign authority": {answer(t, stranger, k, time.Now()), stranger, nil},
			"older":             {answer(t, ca, k, time.Now().Add(-81*day)), ca, nil},
		} {
			k.Take(c.cert, [][]byte{c.ca.Certificate.Raw}, c.err)
			if wait := k.Wait(); wait < renewRetry-time.Second || wait > 2*renewRetry {
				t.Errorf("%s: tried again in %v", what, wait)
			}
			if got, err := identity.Load(k.agent.cfg.StateDir); err != nil || !got.Leaf.Equal(old.Leaf) || k.id.Load() != old {
				t.Errorf("%s: the identity is another one, %v", what, err)
			}
			if c := k.agent.certificate.Load(); c == nil || !c.Status || !strings.Contains(c.Message, "is not renewed") {
				t.Errorf("%s: condition %+v", what, c)
			}
		}
		k.Take(answer(t, ca, k, time.Now()), [][]byte{ca.Certificate.Raw}, nil)
		got, err := identity.Load(k.agent.cfg.StateDir)
		if err != nil || !got.Leaf.Equal(k.id.Load().Leaf) || got.Leaf.Equal(old.Leaf) || !got.Key.Equal(old.Key) {
			t.Errorf("the new one is not on flash: %v", err)
		}
		if wait := k.Wait(); wait < 36*day-time.Second || wait > 45*day {
			t.Errorf("the next one in %v", wait)
		}
		if c := k.agent.certificate.Load(); c.Status {
			t.Errorf("condition %+v", c)
		}
	})
}

// A router whose own clock stands in 2000 (the bubble's) renews by the
// controller's clock.
func TestRenewalWithoutClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		there := time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
		k := keeping(t, sessiontest.NewAuthority(t, there.Add(-365*day)), there)
		if wait := k.Wait(); wait < 365*day {
			t.Errorf("before the controller was heard: %v", wait)
		}
		k.agent.clock.Compare(there)
		if wait := k.Wait(); wait < 36*day-time.Second || wait > 45*day {
			t.Errorf("in %v", wait)
		}
		time.Sleep(46 * day)
		if wait := k.Wait(); wait < 0 || wait > renewSoon {
			t.Errorf("46 days later: in %v", wait)
		}
	})
}

// Waits of who has no identity: what the controller says, and not every second
// for what somebody has to mend.
func TestEnrolPause(t *testing.T) {
	a := &Agent{}
	for _, c := range []struct {
		err        error
		least, top time.Duration
	}{
		{errors.New("no route"), 2 * time.Second, 4 * time.Second},
		{&session.WaitingError{After: 40 * time.Second}, 40 * time.Second, 40 * time.Second},
		{&session.WaitingError{}, firstEnrolWait, firstEnrolWait},
		{&session.WaitingError{After: 1000 * time.Hour}, time.Hour, time.Hour},
		{&session.EnrollError{Err: errors.New("too many"), After: 90 * time.Second}, 90 * time.Second, 90 * time.Second},
		{parseError(t), maxEnrolWait, maxEnrolWait},
	} {
		if got := a.enrolPause(4*time.Second, c.err); got < c.least || got > c.top {
			t.Errorf("%v: %v, want %v to %v", c.err, got, c.least, c.top)
		}
	}
}

func parseError(t *testing.T) error {
	t.Helper()
	_, err := identity.ParseToken("cf1.rubbish")
	if err == nil || !errors.Is(err, identity.ErrToken) {
		t.Fatalf("got %v", err)
	}
	return err
}

// A session renews over the connection that it has, and goes on.
func TestRenewalOverLiveSession(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{Interval: time.Hour})
	k := keeping(t, c.Authority, time.Now().Add(-80*day))
	k.agent.cfg.Controller = c.Address
	k.renewAt = time.Now() // which is chosen at random else
	old := k.id.Load()
	begin := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- session.New(session.Config{
				Address: c.Address, TLS: identity.TLS(k.agent.clock, []*x509.Certificate{c.Authority.Certificate}, k.id.Load),
				Hello:  session.Hello{RouterID: "r1", BootID: "b", Dataplane: func() string { return "fake" }},
				Outbox: k.agent.outbox, Status: k.agent.runner.current, Report: k.agent.report.next, Deliver: k.agent.runner.deliver,
				Reached: func(time.Time) {}, Renewal: k,
			}).Run(ctx)
		}()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	stop := begin()
	s := <-c.Sessions
	for end := time.Now().Add(30 * time.Second); k.id.Load() == old; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not renewed")
		}
	}
	select {
	case <-s.Done():
		t.Error("the session ended")
	default:
	}
	stop()
	// The next one, without a session of TLS to resume, has the new certificate.
	stop = begin()
	s = <-c.Sessions
	if got := s.Certificate(); !got.Equal(k.id.Load().Leaf) {
		t.Errorf("the next session has a certificate until %v", got.NotAfter)
	}
	stop()
	if n := c.Renewed(); n != 1 {
		t.Errorf("renewed %d times", n)
	}
}

// A controller says that a certificate has ended in an alert of TLS.
func TestExpiredIsUnderstood(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	k := keeping(t, c.Authority, time.Now().Add(-100*day))
	k.agent.cfg.Controller = c.Address
	ctx, cancel := context.WithCancel(t.Context())
	said := make(chan error, 1000)
	err := session.New(session.Config{
		Address: c.Address, TLS: identity.TLS(k.agent.clock, []*x509.Certificate{c.Authority.Certificate}, k.id.Load),
		Hello:  session.Hello{RouterID: "r1", BootID: "b", Dataplane: func() string { return "fake" }},
		Outbox: k.agent.outbox, Status: k.agent.runner.current, Report: k.agent.report.next, Deliver: k.agent.runner.deliver,
		Reached: func(time.Time) {},
		Ended: func(_ context.Context, err error) bool {
			said <- err
			if session.Expired(err) {
				cancel()
			}
			return session.Expired(err) || len(said) > 20
		},
	}).Run(ctx)
	cancel()
	if err != nil {
		t.Error(err)
	}
	var last error
	for len(said) > 0 {
		last = <-said
	}
	if !session.Expired(last) {
		t.Errorf("not understood: %v", last)
	}
}
