package simagent_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/controllertest"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// rig is a real controller and what operators see of it.
type rig struct {
	*controllertest.Running
	t   *testing.T
	tls *tls.Config
	ops *grpc.ClientConn
}

func newRig(t *testing.T) *rig {
	t.Helper()
	c := controllertest.Config(t.TempDir())
	c.ReportInterval = 100 * time.Millisecond
	r := &rig{Running: controllertest.Start(t, c), t: t}
	r.tls = r.TLS(t)
	r.tls.Certificates = nil
	r.ops = r.Operate(t)
	return r
}

func (r *rig) setPlan(rate engine.BitsPerSecond) {
	r.t.Helper()
	l := plan.DefaultLink()
	l.Down.Rate, l.Up.Rate = rate, rate/10
	_, err := pb.NewPlanServiceClient(r.ops).UpdatePlan(r.t.Context(), &pb.UpdatePlanRequest{Plan: &pb.Plan{Name: "gold", Link: wire.FromLink(&l)}, AllowMissing: true})
	if err != nil {
		r.t.Fatal(err)
	}
}

// join makes a router with a subscriber and returns its certificate.
func (r *rig) join(id string) tls.Certificate {
	r.t.Helper()
	ctx := r.t.Context()
	if _, err := pb.NewSubscriberServiceClient(r.ops).CreateSubscriber(ctx, &pb.CreateSubscriberRequest{Subscriber: &pb.Subscriber{Id: id, Plan: "gold"}}); err != nil {
		r.t.Fatal(err)
	}
	token, err := pb.NewTokenServiceClient(r.ops).CreateToken(ctx, &pb.CreateTokenRequest{RouterId: id, Subscriber: id})
	if err != nil {
		r.t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := pb.NewEnrollmentServiceClient(r.Dial(r.t, r.Agents)).Enroll(ctx, &pb.EnrollRequest{Token: token.GetSecret(), Csr: csr})
	if err != nil {
		r.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{resp.GetCertificate()}, PrivateKey: key}
}

func (r *rig) router(id string) *pb.Router {
	r.t.Helper()
	resp, err := pb.NewRouterServiceClient(r.ops).GetRouter(r.t.Context(), &pb.GetRouterRequest{Id: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetRouter()
}

func (r *rig) eventually(what string, holds func() bool) {
	r.t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%s: not within a minute", what)
		}
	}
}

// TestAgainstController plays agents on a real controller: they run what is
// desired, report, come back after the connection broke, lose an answer, and
// end a boost by themselves.
func TestAgainstController(t *testing.T) {
	r := newRig(t)
	r.setPlan(20e6)
	var lose atomic.Bool
	var lost, ended atomic.Int64
	fleet := &simagent.Fleet{TLS: r.tls, Version: "v1", Model: "simulated"}
	fleet.Address = func(*simagent.Agent) (string, net.Addr) {
		return r.Agents.String(), &net.TCPAddr{IP: net.IPv4(127, 0, 7, 1)}
	}
	fleet.Hooks = simagent.Hooks{
		Apply: func(_ *simagent.Agent, p simagent.Push) (plan.Status, bool) {
			if lose.Swap(false) {
				lost.Add(1)
				return plan.Status{}, false
			}
			return p.Applied(), true
		},
		Report: func(*simagent.Agent) *plan.Report { return &plan.Report{} },
		Ended:  func(*simagent.Agent, error, time.Duration) { ended.Add(1) },
	}
	plain := &simagent.Fleet{TLS: r.tls, Address: fleet.Address}
	agents := map[string]*simagent.Agent{"home-1": nil, "home-2": nil, "plain": nil}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for id := range agents {
		f := fleet
		if id == "plain" {
			f = plain
		}
		a := f.New(id, "boot-"+id, r.join(id))
		agents[id] = a
		running.Go(func() { a.Run(ctx) })
	}
	defer running.Wait()
	defer stop()
	inSync := func() bool {
		for id := range agents {
			if r.router(id).GetSession().GetSync() != pb.SyncState_SYNC_STATE_IN_SYNC {
				return false
			}
		}
		return true
	}
	r.eventually("all in sync", inSync)
	for id, a := range agents {
		rev, hash, effective := a.Runs()
		if d := r.router(id).GetDesired(); int64(rev) != d.GetRevision() || hash != d.GetHash() || effective != hash || !a.Connected() {
			t.Errorf("%s runs %d %s %s, desired %v", id, rev, hash, effective, d)
		}
	}
	r.setPlan(30e6)
	r.eventually("all in sync after a change", inSync)

	agents["home-1"].Break()
	r.eventually("home-1 came back", func() bool { return ended.Load() > 0 && agents["home-1"].Connected() && inSync() })

	lose.Store(true)
	r.setPlan(40e6)
	r.eventually("an answer is lost", func() bool { return lost.Load() == 1 })
	r.eventually("one is pending", func() bool { return !inSync() })
	r.eventually("it is asked for again", inSync)

	_, err := pb.NewSubscriberServiceClient(r.ops).StartBoost(ctx, &pb.StartBoostRequest{
		Id: "plain", Set: map[string]string{"down.rate": "300mbit"}, Duration: durationpb.New(3 * time.Second),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("the boost runs", func() bool {
		return r.router("plain").GetReported().GetEffective().GetDown().GetRateBps() == 300e6
	})
	r.eventually("the boost has ended", func() bool {
		return r.router("plain").GetReported().GetEffective().GetDown().GetRateBps() == 40e6 && inSync()
	})
	stats, err := pb.NewTelemetryServiceClient(r.ops).GetRouterStats(ctx, &pb.GetRouterStatsRequest{RouterId: "home-2"})
	if err != nil || stats.GetReport().GetSequence() < 2 || stats.GetReport().GetBootId() != "boot-home-2" {
		t.Errorf("report %v, %v", stats.GetReport(), err)
	}
}
