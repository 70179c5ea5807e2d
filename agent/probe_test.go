package agent_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// loopback is an interface that never changes.
type loopback struct{}

func (loopback) Device() dataplane.Device {
	return dataplane.Device{Name: "lo", Index: 1, MTU: 65536, Up: true, Comings: 3, CarrierLosses: 5}
}
func (loopback) Changed() <-chan struct{} { return nil }

// The controller says what is measured, and the router's own word goes before
// it; reports have what came of it, also as differences.
func TestProbe(t *testing.T) {
	testnet.Require(t)
	for _, c := range []struct{ name, asked, local, want string }{
		{"controller", "127.0.0.1", "", "127.0.0.1"},
		{"router", "127.0.0.1", "::1", "::1"},
		{"router says no", "127.0.0.1", plan.ProbeOff, ""},
		{"nobody", "", "", ""},
		{"router without controller's", "", "::1", "::1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var asked *pb.Probe
			if c.asked != "" {
				asked = &pb.Probe{Host: c.asked, Interval: durationpb.New(time.Second)}
			}
			ctl := sessiontest.Start(t, sessiontest.Config{Interval: 20 * time.Millisecond, Probe: asked})
			r := newRouter(t, ctl.Address, ctl.AddToken("r-1"))
			r.startWith(func(cfg *agent.Config, _ *dataplanetest.Fake) {
				cfg.Interface, cfg.Probe, cfg.ProbeInterval = loopback{}, c.local, time.Second
			})
			s := next(t, "session", ctl.Sessions)
			if c.want == "" {
				for range 10 {
					if p := next(t, "report", s.Reports).GetProbe(); p != nil {
						t.Fatalf("measured: %v", p)
					}
				}
				return
			}
			for end := time.Now().Add(patience); ; {
				m := next(t, "report", s.Reports)
				if w := m.GetWan(); w.GetName() != "lo" || w.GetComings() != 3 || w.GetCarrierLosses() != 5 {
					t.Fatalf("interface: %v", w)
				}
				p := m.GetProbe()
				if p != nil && p.GetHost() != c.want {
					t.Fatalf("measured: %v", p)
				}
				if len(p.GetIdle().GetDelay().GetCounts())+len(p.GetDown().GetDelay().GetCounts())+len(p.GetBoth().GetDelay().GetCounts())+
					len(p.GetUp().GetDelay().GetCounts())+len(p.GetLight().GetDelay().GetCounts()) > 0 {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("no echo was answered: %v", p)
				}
			}
		})
	}
}

// The host that a router measures the delay to says nothing, while traffic
// passes: the rates stay.
func TestFault111_SilentHost(t *testing.T) {
	testnet.Require(t)
	ctl := sessiontest.Start(t, sessiontest.Config{Interval: 20 * time.Millisecond})
	r := newRouter(t, ctl.Address, ctl.AddToken("r-1"))
	r.startWith(func(cfg *agent.Config, _ *dataplanetest.Fake) {
		cfg.Interface, cfg.Probe, cfg.ProbeInterval = loopback{}, "192.0.2.1", time.Second
	})
	s := next(t, "session", ctl.Sessions)
	l := link(20e6, 5e6)
	s.Push(desired(1, 1, &l))
	answer(t, s, 1)
	var first, last *pb.Report
	for end := time.Now().Add(patience); ; {
		last = next(t, "report", s.Reports)
		if first == nil && last.GetDown() != nil {
			first = last
		}
		p := last.GetProbe()
		silent := p.GetError() != "" || p.GetIdle().GetLost()+p.GetDown().GetLost()+p.GetUp().GetLost()+p.GetBoth().GetLost()+p.GetLight().GetLost() > 0
		if silent && first != nil && last.GetDown().GetSentPackets() > first.GetDown().GetSentPackets() {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("nothing was lost: %v", last)
		}
	}
	if n := len(r.plane.History()); n != 1 || !cmp.Equal(r.plane.Running(), &l) {
		t.Errorf("%d changes, running %v, want %v", n, r.plane.Running(), l)
	}
}
