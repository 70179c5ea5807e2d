package api_test

import (
	"crypto/ed25519"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// device is a router on its way into a fleet.
type device struct {
	f    *fixture
	key  ed25519.PrivateKey
	conn *grpc.ClientConn // without a certificate
}

func (f *fixture) device() *device {
	f.t.Helper()
	return &device{f: f, key: newKey(f.t), conn: f.dial(f.agents, nil)}
}

func (d *device) fingerprint() string {
	d.f.t.Helper()
	k, err := identity.KeyOf(d.key.Public().(ed25519.PublicKey))
	if err != nil {
		d.f.t.Fatal(err)
	}
	return k.String()
}

func (d *device) enroll(token, serial string) (*pb.EnrollResponse, error) {
	return pb.NewEnrollmentServiceClient(d.conn).Enroll(d.f.t.Context(), &pb.EnrollRequest{
		Token: token, Csr: csr(d.f.t, d.key), Serial: serial, Model: "Archer C7\x1b[2J",
	})
}

// joins enrols and returns the certificate with its key.
func (d *device) joins(token, serial, want string) *tls.Certificate {
	d.f.t.Helper()
	resp, err := d.enroll(token, serial)
	if err != nil {
		d.f.t.Fatal(err)
	}
	if resp.GetRouterId() != want || len(resp.GetCertificate()) == 0 {
		d.f.t.Fatalf("enrolled as %q, want %q; waiting %v", resp.GetRouterId(), want, resp.GetWaiting())
	}
	return &tls.Certificate{Certificate: [][]byte{resp.GetCertificate()}, PrivateKey: d.key}
}

// session opens one as a boot and returns it with what ended it, if anything.
func (f *fixture) session(conn *grpc.ClientConn, id, boot string) (*agent, error) {
	f.t.Helper()
	a := f.stream(id, conn)
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: id, BootId: boot, Model: "model of " + boot}}})
	_, err := a.stream.Recv()
	return a, err
}

// A lost answer is asked for again, with the same token and key, as often as
// it takes; another key gets nothing for a token that is used.
func TestLostEnrollAnswer(t *testing.T) {
	kv, dir := storetest.NewKV(), t.TempDir()
	f, other := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval}), newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	token := f.createToken(f.dial(f.operators, f.operatorCert()), &pb.CreateTokenRequest{RouterId: "home-1", Labels: map[string]string{"site": "north"}}).GetSecret()
	d := f.device()
	first := d.joins(token, "SN1", "home-1")
	d.joins(token, "SN1", "home-1")
	d.conn = other.dial(other.agents, nil) // the next one may be at another controller
	d.joins(token, "SN1", "home-1")
	if _, err := f.device().enroll(token, "SN1"); status.Code(err) != codes.Unauthenticated {
		t.Errorf("another key: %v", err)
	}
	if _, err := f.session(f.dial(f.agents, first), "home-1", "b"); err != nil {
		t.Errorf("the first certificate: %v", err)
	}
	r := f.router(f.dial(f.operators, f.operatorCert()), "home-1")
	if r.GetLabels()["site"] != "north" || r.GetSerial() != "SN1" || r.GetFingerprint() != d.fingerprint() {
		t.Errorf("router %v", r)
	}
}

func TestApproval(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	joins := pb.NewJoinServiceClient(ops)
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	d, stranger := f.device(), f.device()
	for range 2 { // polls don't count twice
		resp, err := d.enroll("", "SN7")
		if err != nil || resp.GetWaiting().GetFingerprint() != d.fingerprint() || len(resp.GetCertificate()) != 0 || resp.GetRouterId() != "" {
			t.Fatalf("%v, %v", resp, err)
		}
		if again := resp.GetWaiting().GetRetryAfter().AsDuration(); again < 30*time.Second || again > time.Minute {
			t.Errorf("ask again in %v", again)
		}
	}
	if _, err := stranger.enroll("", "no/serial"); err != nil {
		t.Fatal(err)
	}
	list, err := joins.ListPending(t.Context(), &pb.ListPendingRequest{})
	if err != nil || len(list.GetPending()) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	p := list.GetPending()[0]
	if p.GetFingerprint() != d.fingerprint() || p.GetSerial() != "SN7" || p.GetModel() != "Archer C7\uFFFD[2J" || p.GetAddress() == "" || p.GetSince() == nil || p.GetProvisioned() != nil {
		t.Errorf("pending %v", p)
	}
	if got := list.GetPending()[1].GetSerial(); got != "" {
		t.Errorf("a serial that is none: %q", got)
	}

	for name, c := range map[string]struct {
		req  *pb.ApproveRequest
		want codes.Code
	}{
		"no id":              {&pb.ApproveRequest{Fingerprint: d.fingerprint()}, codes.InvalidArgument},
		"short":              {&pb.ApproveRequest{Fingerprint: d.fingerprint()[:7], RouterId: "home-1"}, codes.InvalidArgument},
		"nobody":             {&pb.ApproveRequest{Fingerprint: "0123456789", RouterId: "home-1"}, codes.InvalidArgument},
		"unknown subscriber": {&pb.ApproveRequest{Fingerprint: d.fingerprint(), RouterId: "home-1", Subscriber: "nobody"}, codes.FailedPrecondition},
		"of another router":  {&pb.ApproveRequest{Fingerprint: d.fingerprint(), RouterId: "other"}, codes.AlreadyExists},
	} {
		if _, err := joins.Approve(t.Context(), c.req); status.Code(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
	resp, err := joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: d.fingerprint()[:8], RouterId: "home-1", Subscriber: "sub-other"})
	if err != nil || resp.GetSubscriber() != "sub-other" || resp.GetFingerprint() != d.fingerprint() {
		t.Fatalf("%v, %v", resp, err)
	}
	cert := d.joins("", "SN7", "home-1")
	if _, err := f.session(f.dial(f.agents, cert), "home-1", "b"); err != nil {
		t.Error(err)
	}

	if _, err := joins.Reject(t.Context(), &pb.RejectRequest{Fingerprint: stranger.fingerprint(), Reason: "not ours"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.enroll("", ""); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "not ours") {
		t.Errorf("rejected: %v", err)
	}
	if _, err := joins.Reject(t.Context(), &pb.RejectRequest{Fingerprint: d.fingerprint()}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("the key of a router can't be rejected: %v", err)
	}
	if list, err := joins.ListPending(t.Context(), &pb.ListPendingRequest{}); err != nil || len(list.GetPending()) != 0 {
		t.Errorf("still waiting: %v, %v", list, err)
	}
}

// TestFleet030 announces 1000 serials, and then they enrol: who proves the
// announced key joins at once, who has only the serial waits.
func TestFleet030_ProvisionedSerials(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	joins := pb.NewJoinServiceClient(ops)
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	first, thief := f.device(), f.device()
	req := &pb.ProvisionRequest{}
	for i := range 1000 {
		x := &pb.ProvisionedRouter{Serial: fmt.Sprintf("SN%04d", i), Subscriber: "sub-other", Labels: map[string]string{"batch": "7"}}
		switch i {
		case 1:
			x.Fingerprint = strings.ToUpper(first.fingerprint())
		case 2:
			x.Subscriber = "nobody"
		case 3:
			x.Fingerprint = "beef"
		}
		req.Routers = append(req.Routers, x)
	}
	resp, err := joins.Provision(t.Context(), req)
	if err != nil || len(resp.GetErrors()) != 1000 {
		t.Fatalf("%d answers, %v", len(resp.GetErrors()), err)
	}
	for i, text := range resp.GetErrors() {
		if (text != "") != (i == 2 || i == 3) {
			t.Errorf("%d: %q", i, text)
		}
	}
	if list, err := joins.ListProvisioned(t.Context(), &pb.ListProvisionedRequest{}); err != nil || len(list.GetRouters()) != 998 {
		t.Errorf("%d announced, %v", len(list.GetRouters()), err)
	}

	// Whoever guesses the serial gets nothing by it.
	if resp, err := thief.enroll("", "SN0001"); err != nil || resp.GetWaiting() == nil {
		t.Errorf("another key: %v, %v", resp, err)
	}
	if _, err := joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: thief.fingerprint()}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("another key was approved by mistake: %v", err)
	}
	first.joins("", "SN0001", "sn0001")
	r := f.router(ops, "sn0001")
	if r.GetSubscriber() != "sub-other" || r.GetLabels()["batch"] != "7" || r.GetSerial() != "SN0001" {
		t.Errorf("router %v", r)
	}
	if resp, err := thief.enroll("", "SN0001"); err != nil || resp.GetWaiting() == nil {
		t.Errorf("another key, later: %v, %v", resp, err)
	}
	if list, err := joins.ListPending(t.Context(), &pb.ListPendingRequest{}); err != nil || list.GetPending()[0].GetKnownRouterId() != "sn0001" {
		t.Errorf("%v, %v", list, err)
	}

	// A serial alone is one word to approve.
	second := f.device()
	if resp, err := second.enroll("", "SN0500"); err != nil || resp.GetWaiting() == nil {
		t.Fatalf("%v, %v", resp, err)
	}
	list, err := joins.ListPending(t.Context(), &pb.ListPendingRequest{})
	if err != nil || list.GetPending()[1].GetProvisioned().GetSubscriber() != "sub-other" {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: second.fingerprint()}); err != nil {
		t.Fatal(err)
	}
	second.joins("", "SN0500", "sn0500")
	if _, err := joins.Unprovision(t.Context(), &pb.UnprovisionRequest{Serial: "SN0500"}); status.Code(err) != codes.NotFound {
		t.Errorf("used announcement: %v", err)
	}
}

// TestFleet028 wipes a router: with its new key it waits, is known by its
// serial, and takes its old place when an operator says so.
func TestFleet028_WipedRouterComesBack(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	joins := pb.NewJoinServiceClient(ops)
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	old := f.device()
	cert := old.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-other"}).GetSecret(), "AABBCC", "home-1")
	wiped := f.device()
	if _, err := wiped.enroll("", "AABBCC"); err != nil {
		t.Fatal(err)
	}
	list, err := joins.ListPending(t.Context(), &pb.ListPendingRequest{})
	if err != nil || list.GetPending()[0].GetKnownRouterId() != "home-1" {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: wiped.fingerprint(), RouterId: "home-1"}); status.Code(err) != codes.AlreadyExists {
		t.Errorf("without replace: %v", err)
	}
	if _, err := joins.Approve(t.Context(), &pb.ApproveRequest{Fingerprint: wiped.fingerprint(), RouterId: "home-1", Replace: true}); err != nil {
		t.Fatal(err)
	}
	wiped.joins("", "AABBCC", "home-1")
	if r := f.router(ops, "home-1"); r.GetSubscriber() != "sub-other" || r.GetFingerprint() != wiped.fingerprint() {
		t.Errorf("router %v", r)
	}
	if _, err := f.session(f.dial(f.agents, cert), "home-1", "b"); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the old key: %v", err)
	}
}

// TestFleet037 removes a router that is away; it comes back later, is refused
// and logged, and can join again.
func TestFleet037_DeletedRouterComesBack(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	d := f.device()
	cert := d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"}).GetSecret(), "", "home-1")
	if _, err := pb.NewRouterServiceClient(ops).DeleteRouter(t.Context(), &pb.DeleteRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	_, err := f.session(f.dial(f.agents, cert), "home-1", "b")
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "removed from the fleet") {
		t.Errorf("session: %v", err)
	}
	if !strings.Contains(f.log.String(), "refused a router: router=home-1") {
		t.Error("the refusal is not in the log")
	}
	// Its key alone brings nothing back; it waits for an operator.
	if resp, err := d.enroll("", ""); err != nil || resp.GetWaiting() == nil {
		t.Errorf("by its key: %v, %v", resp, err)
	}
	d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"}).GetSecret(), "", "home-1")
}

func TestRenew(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	d := f.device()
	cert := d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-other"}).GetSecret(), "", "home-1")
	conn := f.dial(f.agents, cert)
	renew := func(conn *grpc.ClientConn, key ed25519.PrivateKey) (*pb.RenewResponse, error) {
		return pb.NewEnrollmentServiceClient(conn).Renew(t.Context(), &pb.RenewRequest{Csr: csr(t, key)})
	}
	// Over the connection that the session has.
	session, err := f.session(conn, "home-1", "b")
	if err != nil {
		t.Fatal(err)
	}
	resp, err := renew(conn, d.key)
	if err != nil || string(resp.GetCertificate()) == string(cert.Certificate[0]) {
		t.Fatalf("renewed: %v", err)
	}
	session.desired()
	if _, err := f.session(f.dial(f.agents, &tls.Certificate{Certificate: [][]byte{resp.GetCertificate()}, PrivateKey: d.key}), "home-1", "b"); err != nil {
		t.Errorf("with the new certificate: %v", err)
	}
	for name, c := range map[string]struct {
		conn *grpc.ClientConn
		key  ed25519.PrivateKey
		want codes.Code
	}{
		"without certificate": {d.conn, d.key, codes.Unauthenticated},
		"another key":         {conn, newKey(t), codes.InvalidArgument},
		"operator":            {f.dial(f.agents, f.operatorCert()), d.key, codes.PermissionDenied},
	} {
		if _, err := renew(c.conn, c.key); status.Code(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := pb.NewEnrollmentServiceClient(conn).Renew(t.Context(), &pb.RenewRequest{Csr: []byte("x")}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no request: %v", err)
	}
	if _, err := pb.NewRouterServiceClient(ops).RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := renew(conn, d.key); status.Code(err) != codes.PermissionDenied {
		t.Errorf("revoked: %v", err)
	}
}

// A revocation ends the session at whatever controller it is, and nothing that
// the key can do brings it back: no session, no token, not even the removal of
// the router. The readmission does.
func TestRevoke(t *testing.T) {
	kv, dir := storetest.NewKV(), t.TempDir()
	f, other := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval}), newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	ops := f.dial(f.operators, f.operatorCert())
	routers := pb.NewRouterServiceClient(ops)
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	d := f.device()
	cert := d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-other"}).GetSecret(), "", "home-1")
	live, err := other.session(other.dial(other.agents, cert), "home-1", "b")
	if err != nil {
		t.Fatal(err)
	}
	live.desired()
	resp, err := routers.RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1", Reason: "stolen"})
	if err != nil || resp.GetRouter().GetRevocation().GetOperator() != "admin" || resp.GetRouter().GetRevocation().GetReason() != "stolen" {
		t.Fatalf("%v, %v", resp, err)
	}
	if got := live.ends(); got != codes.PermissionDenied {
		t.Errorf("the live session ends with %v", got)
	}
	refused := func(when string, err error) {
		t.Helper()
		if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "stolen") {
			t.Errorf("%s: %v", when, err)
		}
	}
	for _, at := range []*fixture{f, other} {
		_, err := at.session(at.dial(at.agents, cert), "home-1", "b")
		refused("session", err)
	}
	_, err = d.enroll("", "")
	refused("by its key", err)
	_, err = d.enroll(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-2"}).GetSecret(), "")
	refused("by a token", err)
	if r := f.router(ops, "home-1"); r.GetRevocation().GetReason() != "stolen" {
		t.Errorf("shown as %v", r)
	}

	if _, err := routers.ReadmitRouter(t.Context(), &pb.ReadmitRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := routers.ReadmitRouter(t.Context(), &pb.ReadmitRouterRequest{Id: "home-1"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("twice: %v", err)
	}
	if _, err := f.session(f.dial(f.agents, cert), "home-1", "b"); err != nil {
		t.Errorf("readmitted: %v", err)
	}

	if _, err := routers.RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1", Reason: "stolen"}); err != nil {
		t.Fatal(err)
	}
	if _, err := routers.DeleteRouter(t.Context(), &pb.DeleteRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	_, err = d.enroll("", "")
	refused("removed", err)
	// The same box with a new key is another matter.
	f.device().joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"}).GetSecret(), "", "home-1")
	if r := f.router(ops, "home-1"); r.GetRevocation() != nil {
		t.Errorf("the new key is %v", r)
	}
	if _, err := routers.ReadmitRouter(t.Context(), &pb.ReadmitRouterRequest{Fingerprint: d.fingerprint()}); err != nil {
		t.Error(err)
	}
	for name, req := range map[string]*pb.RevokeRouterRequest{
		"unprintable": {Id: "home-1", Reason: "\x1b[2J"}, "long": {Id: "home-1", Reason: strings.Repeat("x", 300)},
	} {
		if _, err := routers.RevokeRouter(t.Context(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFleet048 runs two devices with one key on real sessions. They replace
// each other twice and are then refused, both, without end: nothing flaps.
func TestFleet048_ClonesAreQuarantined(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	d := f.device()
	cert := d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-other"}).GetSecret(), "", "home-1")
	one, two := f.dial(f.agents, cert), f.dial(f.agents, cert)
	var live *agent
	for i, c := range []struct {
		conn *grpc.ClientConn
		boot string
	}{{one, "a"}, {two, "b"}, {one, "a"}} {
		next, err := f.session(c.conn, "home-1", c.boot)
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		if live != nil {
			if got := live.ends(); got != codes.Aborted {
				t.Errorf("%d: the one before ends with %v", i, got)
			}
		}
		live = next
	}
	last, _ := f.session(two, "home-1", "b")
	for name, a := range map[string]*agent{"the newer": last, "the older": live} {
		if got := a.ends(); got != codes.FailedPrecondition && (a != live || got != codes.Aborted) {
			t.Errorf("%s ends with %v", name, got)
		}
	}
	r := f.router(ops, "home-1")
	if devices := r.GetQuarantine().GetDevices(); len(devices) != 2 || devices[0].GetBootId() != "a" || devices[1].GetBootId() != "b" ||
		devices[0].GetAddress() == "" || devices[1].GetModel() != "model of b" || r.GetSession().GetConnected() {
		t.Errorf("shown as %v", r)
	}
	for _, c := range []*grpc.ClientConn{one, two} {
		if _, err := f.session(c, "home-1", "a"); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "two devices") {
			t.Errorf("in quarantine: %v", err)
		}
	}
	if list, err := pb.NewRouterServiceClient(ops).ListRouters(t.Context(), &pb.ListRoutersRequest{}); err != nil || list.GetRouters()[0].GetQuarantine() == nil {
		t.Errorf("list: %v, %v", list, err)
	}

	routers := pb.NewRouterServiceClient(ops)
	if _, err := routers.ReleaseRouter(t.Context(), &pb.ReleaseRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := routers.ReleaseRouter(t.Context(), &pb.ReleaseRouterRequest{Id: "home-1"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("twice: %v", err)
	}
	back, err := f.session(one, "home-1", "a")
	if err != nil {
		t.Fatal(err)
	}
	back.desired()
}

// A year of a router that reconnects, with the same boot from ever other
// addresses, and restarts every night, is no clone.
func TestReconnectsAreNoClone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setKeyOnly("home-1")
		var open []*fakeStream
		for i := range 365 * 4 {
			s := f.fakeStream("home-1")
			open = append(open, s)
			s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: fmt.Sprintf("boot %d", i/4)}}})
			if m := <-s.out; m.GetSettings() == nil {
				t.Fatalf("%d: %v", i, m)
			}
			if i%2 == 0 { // half of the old streams are half open and never end by themselves
				s.End(nil)
			}
			time.Sleep(6 * time.Hour)
		}
		f.store.View(func(st *store.State) {
			if r, _ := st.Router("home-1"); r.Quarantine != nil {
				t.Errorf("in quarantine: %+v", r.Quarantine)
			}
		})
		for _, s := range open {
			s.End(nil)
		}
		sessions.Wait()
	})
}

// setKeyOnly stores a router without a subscriber.
func (f *fixture) setKeyOnly(id string) {
	f.t.Helper()
	_, key := f.key(id)
	if _, err := f.store.PutRouter(f.t.Context(), plan.Router{ID: id, Key: key}, store.Any); err != nil {
		f.t.Fatal(err)
	}
}

// Whatever a router does on its way into the fleet and out of it: no secret, no
// certificate and no signing request gets into the log, at the most talkative
// level and in no spelling.
func TestNothingSecretIsLogged(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	token := f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"}).GetSecret()
	parsed, err := identity.ParseToken(token)
	if err != nil {
		t.Fatal(err)
	}
	d := f.device()
	cert := d.joins(token, "SN", "home-1")
	d.joins(token, "SN", "home-1")
	stranger := f.device()
	_, _ = stranger.enroll(token, "SN")     // used
	_, _ = stranger.enroll(token[:60], "")  // cut off
	_, _ = stranger.enroll(token+"x", "SN") // another pin
	_, _ = stranger.enroll("", "SN2")
	conn := f.dial(f.agents, cert)
	renewed, err := pb.NewEnrollmentServiceClient(conn).Renew(t.Context(), &pb.RenewRequest{Csr: csr(t, d.key)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.session(conn, "home-1", "b"); err != nil {
		t.Fatal(err)
	}
	if _, err := pb.NewRouterServiceClient(ops).RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1", Reason: "why"}); err != nil {
		t.Fatal(err)
	}
	_, _ = f.session(conn, "home-1", "b")
	_, _ = d.enroll("", "SN")
	log := f.log.String()
	if strings.Count(log, "router enrolled") != 2 || !strings.Contains(log, "a revoked key asked") {
		t.Errorf("the log has not what happened:\n%s", log)
	}
	for name, raw := range map[string][]byte{
		"secret": parsed.Secret[:], "certificate": cert.Certificate[0][60:120], "renewed": renewed.GetCertificate()[60:120],
		"key": d.key.Seed(), "request": csr(t, d.key)[20:60],
	} {
		for _, spelling := range []string{
			string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw[:30]), base64.RawURLEncoding.EncodeToString(raw[:30]),
			fmt.Sprintf("%v", raw[:8]), fmt.Sprintf("%q", raw)[1:20],
		} {
			if strings.Contains(log, spelling) {
				t.Errorf("the %s is in the log", name)
			}
		}
	}
}

// TestFleet061 refuses 100 000 hellos and enrolments of strangers and of
// routers that are not wanted. What is left of them in memory has bounds.
func TestFleet061_RefusalsLeaveMemoryFlat(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	d := f.device()
	cert := d.joins(f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"}).GetSecret(), "", "home-1")
	if _, err := pb.NewRouterServiceClient(ops).RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-1"}); err != nil {
		t.Fatal(err)
	}
	f.setKeyOnly("home-2")
	if _, err := pb.NewRouterServiceClient(ops).RevokeRouter(t.Context(), &pb.RevokeRouterRequest{Id: "home-2"}); err != nil {
		t.Fatal(err)
	}
	service := api.NewEnrollmentService(f.store, f.authority, hclog.NewNullLogger())
	requests := make([][]byte, 64)
	for i := range requests {
		requests[i] = csr(t, newKey(t))
	}
	// A connection may not say that much, and has its own tests: some come
	// through the door, the others from behind it.
	round := func(n int) {
		for range 20 {
			if _, err := f.session(f.dial(f.agents, cert), "home-1", "b"); status.Code(err) != codes.PermissionDenied {
				t.Errorf("hello: %v", err)
			}
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for range n / 4 {
					s := f.fakeStream("home-2")
					s.say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-2", BootId: "b"}}})
					if err := <-s.ended; status.Code(err) != codes.PermissionDenied {
						t.Errorf("hello: %v", err)
					}
				}
				for i := range n / 4 {
					req := &pb.EnrollRequest{Csr: requests[i%len(requests)], Serial: fmt.Sprint(i), Model: strings.Repeat("x", 1000)}
					if i%2 == 0 {
						req.Token = "cf1.aaaaaaaaaa.x.y"
					}
					if resp, _ := service.Enroll(t.Context(), req); len(resp.GetCertificate()) != 0 {
						t.Error("a stranger has a certificate")
					}
				}
			})
		}
		wg.Wait()
	}
	heap := func() uint64 {
		var m runtime.MemStats
		for range 3 {
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return m.HeapAlloc - uint64(len(f.log.String()))
	}
	round(4000) // fills what has bounds
	before := heap()
	total := 100_000
	if testing.Short() {
		total = 20_000
	}
	round(total)
	if after := heap(); after > before+2<<20 {
		t.Errorf("heap grew from %d to %d bytes by %d refusals", before, after, total)
	}
}

// FuzzEnroll is what a stranger can send to the one method that is open to all.
func FuzzEnroll(f *testing.F) {
	authority, err := identity.Open(f.TempDir(), time.Now())
	if err != nil {
		f.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		f.Fatal(err)
	}
	token, err := identity.NewToken(authority.Pin())
	if err != nil {
		f.Fatal(err)
	}
	for _, req := range []*pb.EnrollRequest{
		{}, {Token: token.Text(), Csr: request(f, key)}, {Csr: request(f, key), Serial: "SN", Model: "box"}, {Csr: request(f, key)[:50], Token: "cf1..."},
	} {
		raw, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	s := storetest.NewFake(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		req := &pb.EnrollRequest{}
		if proto.Unmarshal(raw, req) != nil {
			return
		}
		// Of each request anew, as the limits would hide the rest.
		service := api.NewEnrollmentService(s, authority, hclog.NewNullLogger())
		resp, err := service.Enroll(t.Context(), req)
		if len(resp.GetCertificate()) != 0 {
			t.Errorf("a stranger has a certificate")
		}
		if err == nil && resp.GetWaiting().GetFingerprint() == "" {
			t.Errorf("answer %v", resp)
		}
		switch status.Code(err) {
		case codes.OK, codes.InvalidArgument, codes.Unauthenticated:
		default:
			t.Errorf("got %v", err)
		}
	})
}
