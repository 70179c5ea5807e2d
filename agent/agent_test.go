package agent_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything may take before a test gives up; nothing waits
// that long when all is well.
const patience = time.Minute

// router is an agent under test with what it stands on.
type router struct {
	t     *testing.T
	cfg   agent.Config
	plane *dataplanetest.Fake
	stop  func() error
}

func newRouter(t *testing.T, address, token string) *router {
	t.Helper()
	r := &router{t: t}
	r.cfg = agent.Config{
		Controller:    address,
		StateDir:      t.TempDir(),
		Token:         func() (string, error) { return token, nil },
		Version:       "test",
		Model:         "box",
		Built:         time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		DataplaneName: func() string { return "fake" },
	}
	return r
}

// start runs the agent with a new data plane until the test ends or stop is
// called.
func (r *router) start() {
	r.t.Helper()
	r.plane = &dataplanetest.Fake{}
	r.startOn(r.plane)
}

func (r *router) startOn(plane *dataplanetest.Fake) {
	r.t.Helper()
	r.plane = plane
	r.cfg.Dataplane = plane
	r.run()
}

// startWith is start with a configuration that is changed before.
func (r *router) startWith(change func(*agent.Config, *dataplanetest.Fake)) {
	r.t.Helper()
	r.plane = &dataplanetest.Fake{}
	r.cfg.Dataplane = r.plane
	change(&r.cfg, r.plane)
	r.run()
}

func (r *router) run() {
	r.t.Helper()
	a, err := agent.New(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	var result error
	r.stop = func() error {
		if !stopped {
			cancel()
			result, stopped = <-done, true
		}
		return result
	}
	r.t.Cleanup(func() {
		if err := r.stop(); err != nil {
			r.t.Errorf("agent: %v", err)
		}
	})
}

func link(down, up engine.BitsPerSecond) plan.Link {
	l := plan.Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Rate, l.Up.Rate = down, up
	return l
}

func desired(revision int64, nonce uint64, l *plan.Link) *pb.Desired {
	d := plan.Desired{Revision: plan.Revision(revision), Link: l}
	if l != nil {
		d.Hash = l.Hash()
	}
	return wire.FromDesired(d, nonce)
}

func next[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("no %s came", what)
		panic("unreachable")
	}
}

// answer returns the status that answers nonce and forgets what came before.
func answer(t *testing.T, s *sessiontest.Session, nonce uint64) *pb.Status {
	t.Helper()
	for {
		if st := next(t, "status", s.Statuses); st.GetNonce() == nonce {
			return st
		}
	}
}

func TestEnrolApplyReportStop(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{Interval: 20 * time.Millisecond})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	s := next(t, "session", c.Sessions)
	if s.RouterID != "r1" || s.Hello.GetAppliedRevision() != 0 || s.Hello.GetModel() != "box" || s.Hello.GetDataplane() != "fake" {
		t.Errorf("router %q said %v", s.RouterID, s.Hello)
	}

	l := link(115e6, 12e6)
	s.Push(desired(7, 1, &l))
	st := answer(t, s, 1)
	if st.GetOutcome() != pb.Outcome_OUTCOME_APPLIED || st.GetAppliedRevision() != 7 || st.GetAppliedHash() != l.Hash() || st.GetEffectiveHash() != l.Hash() {
		t.Errorf("answer %v", st)
	}
	if diff := cmp.Diff(&l, r.plane.Running()); diff != "" {
		t.Errorf("running (-want +got):\n%s", diff)
	}
	var last *pb.Report
	for last.GetDown() == nil {
		last = next(t, "report", s.Reports)
	}
	if last.GetUp().GetSentPackets() == 0 || last.GetAgent().GetResidentBytes() == 0 || last.GetAgent().GetBatchSizeMilli() != 1500 || last.GetBootId() != s.Hello.GetBootId() {
		t.Errorf("report %v", last)
	}
	if again := next(t, "report", s.Reports); again.GetSequence() != last.GetSequence()+1 {
		t.Errorf("report %d came after %d", again.GetSequence(), last.GetSequence())
	}

	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if !r.plane.Closed() {
		t.Error("the data plane was left open")
	}
}

// fleet.md 54: unlimited and nothing at all are answers like any other.
func TestFleet054_UnlimitedAndClear(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.cfg.MaxRate = 50e6
	r.start()
	s := next(t, "session", c.Sessions)
	unlimited := link(0, 0)
	s.Push(desired(1, 1, &unlimited))
	if st := answer(t, s, 1); st.GetOutcome() != pb.Outcome_OUTCOME_APPLIED {
		t.Errorf("unlimited: %v", st)
	}
	s.Push(desired(2, 2, nil))
	st := answer(t, s, 2)
	if st.GetOutcome() != pb.Outcome_OUTCOME_APPLIED || st.GetEffective() != nil || st.GetAppliedRevision() != 2 || st.GetEffectiveHash() != "" {
		t.Errorf("nothing: %v", st)
	}
	if r.plane.Running() != nil || r.plane.Clears() != 1 {
		t.Errorf("running %v after %d clears", r.plane.Running(), r.plane.Clears())
	}
}

func TestFleet050_RejectionsKeepWhatRuns(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.cfg.MaxRate = 100e6
	r.start()
	s := next(t, "session", c.Sessions)
	good := link(90e6, 10e6)
	s.Push(desired(1, 1, &good))
	answer(t, s, 1)

	r.plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
		if l.Down.Rate == 66e6 {
			return dataplane.Effective{}, &dataplane.RejectedError{Field: "down.rate", Reason: "unlucky"}
		}
		return dataplane.Effective{Link: l}, nil
	})
	fast, unlucky, bad := link(115e6, 12e6), link(66e6, 1e6), link(10e6, 1e6)
	bad.Down.MTU = 1
	unknown := desired(5, 5, &good)
	unknown.Link.Down.Tins = 99
	for _, c := range []struct {
		push *pb.Desired
		want string
	}{
		{desired(2, 2, &fast), "down.rate: 115Mbit is above the 100Mbit that this router can shape (--max-rate)"},
		{desired(3, 3, &unlucky), "down.rate: unlucky"},
		{desired(4, 4, &bad), "mtu 1"},
		{unknown, "tins: value 99 is unknown"},
	} {
		s.Push(c.push)
		st := answer(t, s, c.push.GetNonce())
		if st.GetOutcome() != pb.Outcome_OUTCOME_REJECTED || !strings.Contains(st.GetError(), c.want) {
			t.Errorf("revision %d: outcome %v, error %q, want %q", c.push.GetRevision(), st.GetOutcome(), st.GetError(), c.want)
		}
		if st.GetAppliedRevision() != 1 || st.GetEffectiveHash() != good.Hash() || !cmp.Equal(r.plane.Running(), &good) {
			t.Errorf("revision %d: applied %d, effective %s, running %v", c.push.GetRevision(), st.GetAppliedRevision(), st.GetEffectiveHash(), r.plane.Running())
		}
	}
}

func TestClampedIsAnAnswerOfItsOwn(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	plane := &dataplanetest.Fake{}
	plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
		l.Down.MemoryLimit = 4 << 20
		return dataplane.Effective{Link: l, Clamps: []plan.Clamp{{Field: "down.memory_limit", Desired: "64Mb", Effective: "4Mb", Reason: "the router has 128 MB"}}}, nil
	})
	r.startOn(plane)
	s := next(t, "session", c.Sessions)
	l := link(20e6, 5e6)
	s.Push(desired(1, 1, &l))
	st := answer(t, s, 1)
	if st.GetOutcome() != pb.Outcome_OUTCOME_CLAMPED || len(st.GetClamps()) != 1 || st.GetClamps()[0].GetEffective() != "4Mb" || st.GetEffectiveHash() == l.Hash() || st.GetAppliedHash() != l.Hash() {
		t.Errorf("answer %v", st)
	}
}

// A router with a saved state shapes without a controller, and names it when
// there is one.
func TestLastKnownGoodBeforeAnyController(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	l := link(20e6, 5e6)
	s := next(t, "session", c.Sessions)
	s.Push(desired(9, 1, &l))
	answer(t, s, 1)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	c.Stop()

	r.start()
	for began := time.Now(); r.plane.Running() == nil; time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatal("nothing runs without a controller")
		}
	}
	if diff := cmp.Diff(&l, r.plane.Running()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	// The same authority and address come back.
	c2 := sessiontest.Start(t, sessiontest.Config{Authority: c.Authority, Address: c.Address})
	s = next(t, "session", c2.Sessions)
	if s.Hello.GetAppliedRevision() != 9 || s.Hello.GetAppliedHash() != l.Hash() || s.Hello.GetEffectiveHash() != l.Hash() {
		t.Errorf("hello %v", s.Hello)
	}
	if c2.Enrolled() != 0 {
		t.Error("it enrolled a second time")
	}
	if n := len(r.plane.History()); n != 1 {
		t.Errorf("the saved state was applied %d times", n)
	}
}

// A controller that goes away changes nothing but the session.
func TestControllerRestart(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	l := link(20e6, 5e6)
	s := next(t, "session", c.Sessions)
	s.Push(desired(9, 1, &l))
	answer(t, s, 1)
	c.Stop()
	next(t, "end of the session", s.Done())
	if !cmp.Equal(r.plane.Running(), &l) {
		t.Errorf("running %v", r.plane.Running())
	}
	c2 := sessiontest.Start(t, sessiontest.Config{Authority: c.Authority, Address: c.Address})
	s = next(t, "session", c2.Sessions)
	if s.Hello.GetAppliedRevision() != 9 {
		t.Errorf("hello %v", s.Hello)
	}
	faster := link(30e6, 5e6)
	s.Push(desired(10, 1, &faster)) // nonces start anew
	if st := answer(t, s, 1); st.GetAppliedRevision() != 10 || !cmp.Equal(r.plane.Running(), &faster) {
		t.Errorf("answer %v", st)
	}
}

// fleet.md 74: the controller stops reading; reports are skipped, pushes work.
func TestStalledController(t *testing.T) {
	stall := make(chan struct{})
	c := sessiontest.Start(t, sessiontest.Config{Interval: time.Microsecond, Stall: stall})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	s := next(t, "session", c.Sessions)
	for i := range 100 {
		l := link(engine.BitsPerSecond(i+1)*1e6, 1e6)
		s.Push(desired(int64(i+1), uint64(i+1), &l))
	}
	want := link(100e6, 1e6)
	for began := time.Now(); !cmp.Equal(r.plane.Running(), &want); time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("running %v", r.plane.Running())
		}
	}
	close(stall)
	if st := answer(t, s, 100); st.GetAppliedRevision() != 100 {
		t.Errorf("answer %v", st)
	}
}

// The broken data plane is tried again by itself, and the answer comes when it
// is true.
func TestBrokenDataplaneIsRetried(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	plane := &dataplanetest.Fake{}
	tries := 0
	plane.OnApply(func(l plan.Link) (dataplane.Effective, error) {
		if tries++; tries < 2 {
			return dataplane.Effective{}, errors.New("interface ppp0: no such device")
		}
		return dataplane.Effective{Link: l}, nil
	})
	r.startOn(plane)
	s := next(t, "session", c.Sessions)
	l := link(20e6, 5e6)
	s.Push(desired(1, 1, &l))
	sawDegraded := false
	for {
		st := next(t, "status", s.Statuses)
		for _, cond := range st.GetConditions() {
			if cond.GetType() == "Degraded" && cond.GetStatus() {
				sawDegraded = true
				if st.GetOutcome() != pb.Outcome_OUTCOME_UNSPECIFIED || !strings.Contains(cond.GetMessage(), "no such device") {
					t.Errorf("while broken: %v", st)
				}
			}
		}
		if st.GetNonce() == 1 {
			if st.GetOutcome() != pb.Outcome_OUTCOME_APPLIED || !sawDegraded {
				t.Errorf("answer %v, degraded before: %t", st, sawDegraded)
			}
			return
		}
	}
}

// The probe of a change on trial reaches a controller that knows nothing of it.
func TestConfirmedByProbe(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	s := next(t, "session", c.Sessions)
	l := link(20e6, 5e6)
	d := desired(1, 1, &l)
	d.ConfirmWithin = durationpb.New(patience)
	s.Push(d)
	confirming := map[bool]bool{}
	for !confirming[true] || !confirming[false] {
		st := next(t, "status", s.Statuses)
		if st.GetAppliedRevision() != 1 {
			continue
		}
		for _, cond := range st.GetConditions() {
			if cond.GetType() == "Confirming" {
				confirming[cond.GetStatus()] = true
			}
		}
	}
}

// fleet.md 56: a token that was used long ago stays in the configuration; the
// certificate wins and nothing is deleted.
func TestFleet056_CertificateWinsOverToken(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	next(t, "session", c.Sessions)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r.start() // with the same token, which is used
	next(t, "session", c.Sessions)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r.cfg.Token = func() (string, error) { return "rubbish", nil }
	r.start()
	if s := next(t, "session", c.Sessions); s.RouterID != "r1" || c.Enrolled() != 1 {
		t.Errorf("router %s after %d enrolments", s.RouterID, c.Enrolled())
	}
}

// A router whose token is refused shapes nothing, says why, and enrols when
// there is a good one.
func TestTokenThatComesLater(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, "")
	tokens := make(chan string, 10)
	tokens <- ""
	tokens <- c.Authority.Token("unknown")
	tokens <- c.AddToken("r1")
	r.cfg.Token = func() (string, error) { return <-tokens, nil }
	var log lockedBuffer
	r.cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	r.start()
	next(t, "session", c.Sessions)
	for _, want := range []string{"no certificate and no join token: make one with cakefleetctl token create", "token is unknown, used or too old (Unauthenticated)"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q:\n%s", want, log.String())
		}
	}
	if strings.Contains(log.String(), "secret-of") {
		t.Error("the log has the secret of a token")
	}
}

// A router whose identity is damaged on flash, both generations of it, says
// where and what to do, shapes on with what it has stored, and joins again when
// it gets a token.
func TestDamagedIdentity(t *testing.T) {
	c := sessiontest.Start(t, sessiontest.Config{})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	r.start()
	l := link(20e6, 5e6)
	s := next(t, "session", c.Sessions)
	s.Push(desired(9, 1, &l))
	answer(t, s, 1)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.cfg.StateDir, "identity.pem")
	for _, file := range []string{path, filepath.Join(r.cfg.StateDir, "identity.old.pem")} {
		if err := os.WriteFile(file, []byte("-----BEGIN CERTIFICATE-----\ntorn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	token := ""
	r.cfg.Token = func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		return token, nil
	}
	var log lockedBuffer
	r.cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	r.start()
	for began := time.Now(); !cmp.Equal(r.plane.Running(), &l) || !strings.Contains(log.String(), path+": is damaged: has 0 of 2 certificates and no key"); time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("running %v; the log is\n%s", r.plane.Running(), log.String())
		}
	}
	if !strings.Contains(log.String(), "what ran last is shaped on, and the router needs a join token") {
		t.Errorf("the log does not say what to do:\n%s", log.String())
	}
	mu.Lock()
	token = c.AddToken("r1")
	mu.Unlock()
	if s := next(t, "session", c.Sessions); s.RouterID != "r1" || s.Hello.GetAppliedRevision() != 9 {
		t.Errorf("hello %v", s.Hello)
	}
	if n := len(r.plane.History()); n != 1 {
		t.Errorf("applied %d times, want 1", n)
	}
	if n := strings.Count(log.String(), "is damaged"); n != 1 {
		t.Errorf("told %d times:\n%s", n, log.String())
	}
}

func TestStateDirectoryIsMade(t *testing.T) {
	r := newRouter(t, "127.0.0.1:1", "")
	r.cfg.StateDir += "/missing"
	r.cfg.Dataplane = &dataplanetest.Fake{}
	a, err := agent.New(r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Run(ctx); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(r.cfg.StateDir); err != nil || info.Mode() != os.ModeDir|0o700 {
		t.Errorf("got %v, %v", info, err)
	}
}

// A path of which more is missing is where no flash is mounted.
func TestStateDirectoryIsMissing(t *testing.T) {
	r := newRouter(t, "127.0.0.1:1", "")
	r.cfg.StateDir += "/missing/state"
	plane := &dataplanetest.Fake{}
	r.cfg.Dataplane = plane
	a, err := agent.New(r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "state directory") || !plane.Closed() {
		t.Errorf("got %v, data plane closed: %t", err, plane.Closed())
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestBootsInThePast starts a router whose clock is thirty years behind, as that
// of one without a battery is: it joins, shapes, has sessions, also after another
// boot in the past, and says that its clock is wrong.
func TestBootsInThePast(t *testing.T) {
	now := func() time.Time { return time.Now().AddDate(30, 0, 0) }
	c := sessiontest.Start(t, sessiontest.Config{Began: now().Add(-time.Hour), Now: now, Clock: now})
	r := newRouter(t, c.Address, c.AddToken("r1"))
	for boot := range 2 {
		r.start()
		s := next(t, "session", c.Sessions)
		l := link(20e6, 5e6)
		s.Push(desired(int64(1+boot), 1, &l))
		st := answer(t, s, 1)
		if st.GetOutcome() != pb.Outcome_OUTCOME_APPLIED {
			t.Errorf("boot %d: %v", boot, st)
		}
		told := false
		for _, cond := range st.GetConditions() {
			told = told || cond.GetType() == "ClockOK" && !cond.GetStatus() && cond.GetMessage() != ""
		}
		if !told {
			t.Errorf("boot %d: it does not say that its clock is wrong: %v", boot, st.GetConditions())
		}
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
	}
	if n := c.Enrolled(); n != 1 {
		t.Errorf("it joined %d times", n)
	}
}
