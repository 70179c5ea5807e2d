package wan

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// fakeWatch is an interface that is as the test says.
type fakeWatch struct {
	device dataplane.Device
	closed bool
}

func (w *fakeWatch) Device() dataplane.Device { return w.device }
func (w *fakeWatch) Changed() <-chan struct{} { return nil }
func (w *fakeWatch) close() error             { w.closed = true; return nil }

// subject is a Plane whose data planes are fakes.
type subject struct {
	*Plane
	watch  *fakeWatch
	opened []*dataplanetest.Fake
	fail   error // of the next Open
}

func newSubject(t *testing.T, d dataplane.Device) *subject {
	t.Helper()
	s := &subject{watch: &fakeWatch{device: d}}
	var err error
	s.Plane, err = open(Config{Interface: d.Name, Open: func() (dataplane.Dataplane, string, error) {
		if s.fail != nil {
			return nil, "", s.fail
		}
		s.opened = append(s.opened, &dataplanetest.Fake{})
		return s.opened[len(s.opened)-1], "fake", nil
	}}, s.watch)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *subject) apply(t *testing.T) {
	t.Helper()
	if _, err := s.Apply(context.Background(), dataplanetest.Link()); err != nil {
		t.Fatal(err)
	}
}

var eth = dataplane.Device{Name: "wan", Index: 7, MTU: 1500, Type: 1, Up: true}

func TestComesLater(t *testing.T) {
	s := newSubject(t, dataplane.Device{Name: "wan"})
	var st dataplane.Stats
	if s.Name() != "" || s.Stats(&st) || s.Health() != nil {
		t.Error("something is open without an interface")
	}
	if err := s.Clear(context.Background()); err != nil {
		t.Errorf("Clear without an interface: %v", err)
	}
	if _, err := s.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Errorf("Apply without an interface: %v", err)
	}
	s.watch.device = eth
	s.apply(t)
	if s.Name() != "fake" || !s.Stats(&st) {
		t.Error("nothing is shaped after the interface came")
	}
}

func TestFollows(t *testing.T) {
	s := newSubject(t, eth)
	s.apply(t)
	s.apply(t)
	s.watch.device.Up = false
	s.apply(t)
	if len(s.opened) != 1 {
		t.Errorf("opened %d times for one interface", len(s.opened))
	}
	var st dataplane.Stats
	for i, change := range []func(*dataplane.Device){
		func(d *dataplane.Device) { d.Index = 9 },
		func(d *dataplane.Device) { d.MTU = 1492 },
		func(d *dataplane.Device) { d.Type = 512 },
	} {
		change(&s.watch.device)
		if s.Stats(&st) {
			t.Errorf("change %d: statistics of the interface before it", i)
		}
		s.apply(t)
		if len(s.opened) != i+2 || !s.opened[i].Closed() || s.opened[i+1].Running() == nil {
			t.Fatalf("change %d: %d are open, the one before closed: %v", i, len(s.opened), s.opened[i].Closed())
		}
	}

	// Gone, it is left as it is: what comes under the name meets it at once.
	s.watch.device.Index = 0
	if _, err := s.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, dataplane.ErrNoDevice) {
		t.Errorf("Apply without an interface: %v", err)
	}
	last := s.opened[len(s.opened)-1]
	if last.Closed() || s.Stats(&st) {
		t.Errorf("gone: closed %v, or statistics", last.Closed())
	}
	if err := s.Close(); err != nil || !last.Closed() || !s.watch.closed {
		t.Errorf("Close: %v, data plane closed: %v, watch closed: %v", err, last.Closed(), s.watch.closed)
	}
	if _, err := s.Apply(context.Background(), dataplanetest.Link()); err == nil {
		t.Error("Apply after Close gives no error")
	}
}

// One that has given up is replaced; one that only fails is not.
func TestReplacesWhatEnded(t *testing.T) {
	s := newSubject(t, eth)
	result := io.ErrUnexpectedEOF
	s.opened[0].OnApply(func(plan.Link) (dataplane.Effective, error) { return dataplane.Effective{}, result })
	for _, result = range []error{io.ErrUnexpectedEOF, dataplane.ErrEnded} {
		if _, err := s.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, result) {
			t.Errorf("got %v, want %v", err, result)
		}
		if ended := errors.Is(result, dataplane.ErrEnded); s.opened[0].Closed() != ended {
			t.Errorf("%v: closed is %v", result, s.opened[0].Closed())
		}
	}
	s.fail = io.ErrNoProgress
	if _, err := s.Apply(context.Background(), dataplanetest.Link()); !errors.Is(err, s.fail) {
		t.Errorf("got %v, want %v", err, s.fail)
	}
	s.fail = nil
	s.apply(t)
	if len(s.opened) != 2 {
		t.Errorf("opened %d times, want 2", len(s.opened))
	}
}

// An interface without any data plane is an error at the start, while the
// one that starts the agent looks.
func TestOpenFails(t *testing.T) {
	w := &fakeWatch{device: eth}
	_, err := open(Config{Interface: "wan", Open: func() (dataplane.Dataplane, string, error) {
		return nil, "", dataplane.ErrUnsupported
	}}, w)
	if !errors.Is(err, dataplane.ErrUnsupported) || !w.closed {
		t.Errorf("error %v, watch closed: %v", err, w.closed)
	}
}
