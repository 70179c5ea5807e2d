package api_test

import (
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// measured returns what the next message, which must be settings, asks to be
// measured.
func (a *agent) measured() plan.Probe {
	a.t.Helper()
	m, err := a.stream.Recv()
	if err != nil {
		a.t.Fatal(err)
	}
	if m.GetSettings().GetReportInterval().AsDuration() != interval {
		a.t.Fatalf("received %v, want settings", m)
	}
	return wire.ToProbe(m.GetSettings().GetProbe())
}

func (f *fixture) label(router, value string) {
	f.t.Helper()
	sub := plan.Subscriber{ID: "sub-" + router, Plan: "gold"}
	if value != "" {
		sub.Labels = map[string]string{plan.ProbeLabel: value}
	}
	if _, err := f.store.PutSubscriber(f.t.Context(), sub, store.Any); err != nil {
		f.t.Fatal(err)
	}
}

// What is measured is the fleet's host, unless the subscriber's label says
// otherwise; a change of the label reaches a session, once.
func TestProbe(t *testing.T) {
	f := newFixtureThat(t, api.SessionConfig{Interval: interval, Probe: plan.Probe{Host: "192.0.2.1", Interval: 20 * time.Second}})
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	a := f.stream("home-1", f.dial(f.agents, f.routerCert("home-1")))
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
	if p := a.measured(); p != (plan.Probe{Host: "192.0.2.1", Interval: 20 * time.Second}) {
		t.Errorf("at first: %+v", p)
	}
	a.apply(a.desired())
	for _, c := range []struct {
		label string
		want  plan.Probe
	}{
		{"2001:db8::1", plan.Probe{Host: "2001:db8::1", Interval: 20 * time.Second}},
		{plan.ProbeOff, plan.Probe{}},
		{"", plan.Probe{Host: "192.0.2.1", Interval: 20 * time.Second}},
	} {
		f.label("home-1", c.label)
		if p := a.measured(); p != c.want {
			t.Errorf("label %q: %+v", c.label, p)
		}
	}
	f.setPlan("gold", 30e6)
	a.desired() // and no settings
}

// Nothing is measured that nobody asked for.
func TestProbeIsOffByDefault(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	a := f.stream("home-1", f.dial(f.agents, f.routerCert("home-1")))
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
	if p := a.measured(); p != (plan.Probe{}) {
		t.Errorf("at first: %+v", p)
	}
	a.apply(a.desired())
	f.label("home-1", "198.51.100.7")
	if p := a.measured(); p.Host != "198.51.100.7" {
		t.Errorf("with a label: %+v", p)
	}
}
