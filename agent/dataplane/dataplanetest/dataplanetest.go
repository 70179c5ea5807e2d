// Package dataplanetest has the tests that every data plane must pass, and a
// data plane that only remembers, for tests of what stands above one.
package dataplanetest

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Subject is a data plane under test.
type Subject struct {
	dataplane.Dataplane
	// MaxRate is the rate above which it must refuse.
	MaxRate engine.BitsPerSecond
	// Speed is that of the interface, above which it must refuse, too; 0: it has
	// none, or one above MaxRate.
	Speed engine.BitsPerSecond
	// Shaping tells whether packets are shaped now, seen from outside.
	Shaping func() bool
}

// Run runs the suite; open makes a fresh subject, which the suite closes.
func Run(t *testing.T, open func(t *testing.T) Subject) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Subject)
	}{
		{"ApplyThenChange", testApplyThenChange},
		{"Rejected", testRejected},
		{"Clear", testClear},
		{"Unlimited", testUnlimited},
		{"Close", testClose},
		{"Concurrent", testConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := open(t)
			c.test(t, s)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if s.Shaping() {
				t.Error("it still shapes after Close")
			}
		})
	}
}

// Link is one that every router can run.
func Link() plan.Link {
	c := engine.DefaultConfig()
	c.Tins = engine.Diffserv4
	l := plan.Link{Down: c, Up: c}
	l.Down.Rate, l.Up.Rate = 20_000_000, 5_000_000
	return l
}

func apply(t *testing.T, s Subject, l plan.Link) {
	t.Helper()
	eff, err := s.Apply(context.Background(), l)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(l, eff.Link); diff != "" && len(eff.Clamps) == 0 {
		t.Errorf("effective differs from desired and nothing was clamped:\n%s", diff)
	}
	wantRuns(t, s, eff.Link)
}

// wantRuns wants the statistics to be those of l.
func wantRuns(t *testing.T, s Subject, l plan.Link) {
	t.Helper()
	var st dataplane.Stats
	if !s.Stats(&st) {
		t.Fatal("no statistics")
	}
	if diff := cmp.Diff(l, plan.Link{Down: st.Down.Config, Up: st.Up.Config}); diff != "" {
		t.Errorf("statistics are of another link:\n%s", diff)
	}
	if shapes := l.Down.Rate != 0 || l.Up.Rate != 0; s.Shaping() != shapes {
		t.Errorf("shaping is %v, want %v", s.Shaping(), shapes)
	}
}

func testApplyThenChange(t *testing.T, s Subject) {
	var st dataplane.Stats
	if s.Stats(&st) {
		t.Error("statistics before the first Apply")
	}
	if s.Shaping() {
		t.Error("it shapes before the first Apply")
	}
	l := Link()
	apply(t, s, l)
	apply(t, s, l) // the same again
	l.Down.Rate /= 2
	apply(t, s, l)
	l.Up.Tins, l.Up.Flows, l.Up.Wash = engine.BestEffort, engine.DualSrcHost, true
	l.Down.AckFilter, l.Down.Overhead, l.Down.Raw = engine.AckFilterNormal, 18, false
	apply(t, s, l)
	l = Link()
	apply(t, s, l)
}

func testRejected(t *testing.T, s Subject) {
	l := Link()
	apply(t, s, l)
	type rejection struct {
		field  string
		change func(*plan.Link)
		reason string // has this in it
	}
	cases := []rejection{
		{"down.rate", func(l *plan.Link) { l.Down.Rate = s.MaxRate + 1 }, s.MaxRate.String()},
		{"up.rate", func(l *plan.Link) { l.Up.Rate = s.MaxRate + 1 }, s.MaxRate.String()},
		{"up", func(l *plan.Link) { l.Up.MPU = 10_000 }, ""},
		{"down", func(l *plan.Link) { l.Down.RTT = 0 }, ""},
	}
	if s.Speed != 0 {
		cases = append(cases,
			rejection{"down.rate", func(l *plan.Link) { l.Down.Rate = s.Speed + 1 }, "speed of"},
			rejection{"up.rate", func(l *plan.Link) { l.Up.Rate = s.Speed + 1 }, "speed of"})
	}
	for _, c := range cases {
		bad := Link()
		c.change(&bad)
		_, err := s.Apply(context.Background(), bad)
		var rejected *dataplane.RejectedError
		if !errors.As(err, &rejected) {
			t.Errorf("%s: error is %v, want a RejectedError", c.field, err)
			continue
		}
		if rejected.Field != c.field || rejected.Reason == "" || !strings.Contains(rejected.Reason, c.reason) {
			t.Errorf("rejected %q because %q, want field %q and a reason with %q", rejected.Field, rejected.Reason, c.field, c.reason)
		}
		if errors.Is(err, dataplane.ErrUnsupported) {
			t.Errorf("%s: %v: another data plane would refuse it, too", c.field, err)
		}
		wantRuns(t, s, l)
	}
}

func testClear(t *testing.T, s Subject) {
	if err := s.Clear(context.Background()); err != nil {
		t.Errorf("clear before the first Apply: %v", err)
	}
	for range 2 {
		apply(t, s, Link())
		for range 2 {
			if err := s.Clear(context.Background()); err != nil {
				t.Error(err)
			}
			var st dataplane.Stats
			if s.Stats(&st) {
				t.Error("statistics after Clear")
			}
			if s.Shaping() {
				t.Error("it shapes after Clear")
			}
		}
	}
}

func testUnlimited(t *testing.T, s Subject) {
	l := Link()
	l.Down.Rate = 0
	apply(t, s, l) // one direction only
	l.Up.Rate = 0
	apply(t, s, l)
	apply(t, s, Link())
}

func testClose(t *testing.T, s Subject) {
	apply(t, s, Link())
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Apply(context.Background(), Link()); err == nil {
		t.Error("Apply after Close gives no error")
	}
	var st dataplane.Stats
	if s.Stats(&st) {
		t.Error("statistics after Close")
	}
}

func testConcurrent(t *testing.T, s Subject) {
	apply(t, s, Link())
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			var st dataplane.Stats
			for range 20 {
				l := Link()
				l.Down.Rate = engine.BitsPerSecond(1+i) * 1_000_000
				if _, err := s.Apply(context.Background(), l); err != nil {
					t.Error(err)
				}
				if !s.Stats(&st) {
					t.Error("no statistics")
				}
			}
		})
	}
	wg.Wait()
}
