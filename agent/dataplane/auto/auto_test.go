package auto_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/auto"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second error
		want          string
	}{
		{"both", nil, nil, "kernel"},
		{"unsupported", dataplane.ErrUnsupported, nil, "userspace"},
		{"broken", errors.New("no memory"), nil, "userspace"},
		{"none", dataplane.ErrUnsupported, errors.New("no queue"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			opened := 0
			open := func(err error) func() (dataplane.Dataplane, error) {
				return func() (dataplane.Dataplane, error) {
					if err != nil {
						return nil, err
					}
					opened++
					return new(dataplanetest.Fake), nil
				}
			}
			d, err := auto.Open([]auto.Candidate{{"kernel", open(c.first)}, {"userspace", open(c.second)}}, hclog.NewNullLogger())
			if (d != nil) != (err == nil) || (err == nil) != (c.want != "") || d != nil && d.Name() != c.want {
				t.Errorf("got %v, %v", d, err)
			}
			if err == nil && opened != 1 {
				t.Errorf("%d were opened", opened)
			}
			if c.want == "" && (!errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), "userspace: no queue")) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

// two has a kernel whose cake can't do cake3, and userspace that can.
type two struct {
	*auto.Plane
	t                 *testing.T
	kernel, userspace *dataplanetest.Fake
	tried             int   // links that the kernel was asked to run
	broken            error // of the kernel; nil: it works
	noUserspace       error // why it does not open
}

func newTwo(t *testing.T) *two {
	s := &two{t: t, kernel: new(dataplanetest.Fake), userspace: new(dataplanetest.Fake)}
	s.kernel.OnApply(func(l plan.Link) (dataplane.Effective, error) {
		s.tried++
		switch {
		case s.broken != nil:
			return dataplane.Effective{}, s.broken
		case l.Down.Tins == engine.Cake3:
			return dataplane.Effective{}, &dataplane.RejectedError{Field: "down.tins", Reason: "no cake3", Unsupported: true}
		case l.Down.Rate > 1e9:
			return dataplane.Effective{}, &dataplane.RejectedError{Field: "down.rate", Reason: "too fast"}
		}
		return dataplane.Effective{Link: l}, nil
	})
	var err error
	s.Plane, err = auto.Open([]auto.Candidate{
		{"kernel", func() (dataplane.Dataplane, error) { return s.kernel, nil }},
		{"userspace", func() (dataplane.Dataplane, error) { return s.userspace, s.noUserspace }},
	}, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func cake3() plan.Link {
	l := dataplanetest.Link()
	l.Down.Tins = engine.Cake3
	return l
}

// runs wants one of the two to shape, and the other not.
func (s *two) runs(what, name string, l *plan.Link) {
	s.t.Helper()
	for _, c := range []struct {
		name string
		d    *dataplanetest.Fake
	}{{"kernel", s.kernel}, {"userspace", s.userspace}} {
		got := c.d.Running()
		if c.name != name && got != nil || c.name == name && (got == nil || *got != *l) {
			s.t.Errorf("%s: %s runs %+v", what, c.name, got)
		}
	}
	var st dataplane.Stats
	if ok := s.Stats(&st); ok != (name != "") || ok && st.Down.Config != l.Down {
		s.t.Errorf("%s: statistics are of %+v", what, st.Down.Config)
	}
	if name != "" && s.Name() != name {
		s.t.Errorf("%s: %s is said to shape", what, s.Name())
	}
}

func (s *two) apply(what string, l plan.Link, name string) {
	s.t.Helper()
	if _, err := s.Apply(context.Background(), l); err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
	s.runs(what, name, &l)
}

// A kernel that has sch_cake and later can't run a link leaves it to userspace,
// and takes over again with the next link that it can run.
func TestLaterRefused(t *testing.T) {
	s := newTwo(t)
	s.apply("at first", dataplanetest.Link(), "kernel")
	s.apply("cake3", cake3(), "userspace")
	tried := s.tried
	s.apply("cake3 again", cake3(), "userspace")
	if s.tried != tried {
		t.Error("the kernel is asked again for what it can't")
	}
	faster := cake3()
	faster.Down.Rate *= 2
	s.apply("another cake3", faster, "userspace")
	s.apply("back", dataplanetest.Link(), "kernel")
	if err := s.Clear(t.Context()); err != nil {
		t.Error(err)
	}
	s.runs("cleared", "", nil)
	s.apply("again", cake3(), "userspace")
	if err := s.Close(); err != nil || !s.kernel.Closed() || !s.userspace.Closed() {
		t.Errorf("close: %v", err)
	}
}

// What nobody runs leaves what runs.
func TestNobodyRunsIt(t *testing.T) {
	s := newTwo(t)
	s.noUserspace = errors.New("no queue")
	l := dataplanetest.Link()
	s.apply("at first", l, "kernel")
	_, err := s.Apply(t.Context(), cake3())
	var rejected *dataplane.RejectedError
	if !errors.As(err, &rejected) || rejected.Field != "down.tins" || !strings.Contains(err.Error(), "userspace: no queue") {
		t.Errorf("cake3: %v", err)
	}
	s.runs("cake3", "kernel", &l)
	fast := l
	fast.Down.Rate = 2e9
	if _, err := s.Apply(t.Context(), fast); !errors.As(err, &rejected) || rejected.Field != "down.rate" {
		t.Errorf("too fast: %v", err)
	}
	s.runs("too fast", "kernel", &l)
}

// A kernel that breaks is tried again, not given up; once userspace runs it is
// userspace that stays.
func TestBroken(t *testing.T) {
	s := newTwo(t)
	s.broken = errors.New("out of memory")
	if _, err := s.Apply(t.Context(), dataplanetest.Link()); !errors.Is(err, s.broken) {
		t.Errorf("broken: %v", err)
	}
	s.broken = nil
	s.apply("mended", dataplanetest.Link(), "kernel")
	s.apply("cake3", cake3(), "userspace")
	s.broken = errors.New("out of memory")
	s.apply("broken again", dataplanetest.Link(), "userspace")
	s.broken = dataplane.ErrNoDevice
	if _, err := s.Apply(t.Context(), cake3()); err != nil {
		t.Errorf("known to be refused: %v", err)
	}
	l := dataplanetest.Link()
	l.Up.Rate *= 2
	if _, err := s.Apply(t.Context(), l); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Errorf("no interface: %v", err)
	}
}

// A kernel without what any shaping needs says so late, as one does that probes
// well and can't load a module then.
func TestLateUnsupported(t *testing.T) {
	s := newTwo(t)
	s.broken = errors.Join(dataplane.ErrUnsupported, errors.New("module not found"))
	s.apply("late", dataplanetest.Link(), "userspace")
}

// bypassed is a data plane that something goes past.
type bypassed struct{ dataplanetest.Fake }

func (b *bypassed) Bypass() string { return "packets go past it" }

// TestBypass wants to be told what goes past the data plane that runs, and not
// what would go past another.
func TestBypass(t *testing.T) {
	p, err := auto.Open([]auto.Candidate{{"userspace", func() (dataplane.Dataplane, error) { return new(bypassed), nil }}}, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Bypass(); got != "" {
		t.Errorf("%q although nothing runs", got)
	}
	if _, err := p.Apply(t.Context(), dataplanetest.Link()); err != nil {
		t.Fatal(err)
	}
	if got := p.Bypass(); got != "packets go past it" {
		t.Errorf("%q", got)
	}
	s := newTwo(t)
	s.apply("one that does not know", dataplanetest.Link(), "kernel")
	if got := s.Bypass(); got != "" {
		t.Errorf("%q", got)
	}
}
