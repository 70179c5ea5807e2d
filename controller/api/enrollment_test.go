package api_test

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func csr(t *testing.T, key any) []byte {
	t.Helper()
	return request(t, key)
}

func request(t testing.TB, key any) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func newKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (f *fixture) enroll(conn *grpc.ClientConn, token string, csr []byte) (*pb.EnrollResponse, error) {
	return pb.NewEnrollmentServiceClient(conn).Enroll(f.t.Context(), &pb.EnrollRequest{Token: token, Csr: csr})
}

func (f *fixture) createToken(conn *grpc.ClientConn, req *pb.CreateTokenRequest) *pb.CreateTokenResponse {
	f.t.Helper()
	resp, err := pb.NewTokenServiceClient(conn).CreateToken(f.t.Context(), req)
	if err != nil {
		f.t.Fatal(err)
	}
	return resp
}

func TestEnroll(t *testing.T) {
	f := newFixture(t)
	ops, anon := f.dial(f.operators, f.operatorCert()), f.dial(f.agents, nil)
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	token := f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "sub-other"})
	if left := time.Until(token.GetToken().GetExpireTime().AsTime()); left < 23*time.Hour || left > 24*time.Hour {
		t.Errorf("token ends in %v", left)
	}

	// A request that can't be signed does not use the token up.
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.enroll(anon, token.GetSecret(), csr(t, p256)); status.Code(err) != codes.InvalidArgument {
		t.Errorf("P-256 key: %v", err)
	}

	key := newKey(t)
	resp, err := f.enroll(anon, token.GetSecret(), csr(t, key))
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetRouterId() != "home-1" || string(resp.GetCaCertificate()) != string(f.authority.Certificate()) {
		t.Errorf("answer for %q", resp.GetRouterId())
	}

	// The certificate opens the session, and the router serves the subscriber.
	a := f.stream("home-1", f.dial(f.agents, &tls.Certificate{Certificate: [][]byte{resp.GetCertificate()}, PrivateKey: key}))
	a.send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Hello{Hello: &pb.Hello{RouterId: "home-1", BootId: "b"}}})
	if _, err := a.stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if d := a.desired(); d.GetLink().GetDown().GetRateBps() != 20e6 {
		t.Errorf("desired %v", d)
	}

	// Once is once.
	if _, err := f.enroll(anon, token.GetSecret(), csr(t, newKey(t))); status.Code(err) != codes.Unauthenticated {
		t.Errorf("second use: %v", err)
	}

	// Neither the secret nor the certificate is logged, in any spelling.
	parsed, err := identity.ParseToken(token.GetSecret())
	if err != nil {
		t.Fatal(err)
	}
	log := f.log.String()
	if !strings.Contains(log, "router enrolled") || !strings.Contains(log, parsed.ID) {
		t.Error("the enrollment is not in the log")
	}
	for name, raw := range map[string][]byte{"secret": parsed.Secret[:], "certificate": resp.GetCertificate()[50:100]} {
		for _, spelling := range []string{string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw[:30]), base64.RawURLEncoding.EncodeToString(raw[:30])} {
			if strings.Contains(log, spelling) {
				t.Errorf("the %s is in the log", name)
			}
		}
	}
}

func TestEnrollRefuses(t *testing.T) {
	f, stranger := newFixture(t), newFixture(t)
	ops, anon := f.dial(f.operators, f.operatorCert()), f.dial(f.agents, nil)
	foreign := stranger.createToken(stranger.dial(stranger.operators, stranger.operatorCert()), &pb.CreateTokenRequest{RouterId: "home-1"})
	good := f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"})
	parsed, err := identity.ParseToken(good.GetSecret())
	if err != nil {
		t.Fatal(err)
	}
	wrong := parsed
	wrong.Secret[0] ^= 1
	deleted := f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"})
	if _, err := pb.NewTokenServiceClient(ops).DeleteToken(t.Context(), &pb.DeleteTokenRequest{Id: deleted.GetToken().GetId()}); err != nil {
		t.Fatal(err)
	}
	late, err := identity.NewToken(f.authority.Pin())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.store.PutToken(t.Context(), store.Token{ID: late.ID, Router: "home-1", SecretHash: late.Hash(), Expires: time.Now().Add(-time.Second)}); err != nil {
		t.Fatal(err)
	}
	request := csr(t, newKey(t))
	for name, token := range map[string]string{
		"junk": "hello", "of another fleet": foreign.GetSecret(), "another secret": wrong.Text(),
		"deleted": deleted.GetSecret(), "too old": late.Text(),
	} {
		if _, err := f.enroll(anon, token, request); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := f.enroll(anon, good.GetSecret(), nil); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no request: %v", err)
	}

	// Ten routers race with one token; one wins.
	var mu sync.Mutex
	var wg sync.WaitGroup
	won := 0
	for range 10 {
		wg.Go(func() {
			_, err := f.enroll(anon, good.GetSecret(), csr(t, newKey(t)))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won++
			} else if status.Code(err) != codes.Unauthenticated {
				t.Errorf("race: %v", err)
			}
		})
	}
	wg.Wait()
	if won != 1 {
		t.Errorf("%d uses of one token", won)
	}
}

func TestTokens(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	tokens := pb.NewTokenServiceClient(ops)
	for name, c := range map[string]struct {
		req  *pb.CreateTokenRequest
		want codes.Code
	}{
		"no router":          {&pb.CreateTokenRequest{}, codes.InvalidArgument},
		"bad router":         {&pb.CreateTokenRequest{RouterId: "Home 1"}, codes.InvalidArgument},
		"unknown subscriber": {&pb.CreateTokenRequest{RouterId: "home-1", Subscriber: "nobody"}, codes.FailedPrecondition},
		"too long":           {&pb.CreateTokenRequest{RouterId: "home-1", Ttl: durationpb.New(31 * 24 * time.Hour)}, codes.InvalidArgument},
		"negative":           {&pb.CreateTokenRequest{RouterId: "home-1", Ttl: durationpb.New(-time.Hour)}, codes.InvalidArgument},
		"not a duration":     {&pb.CreateTokenRequest{RouterId: "home-1", Ttl: &durationpb.Duration{Nanos: 2e9}}, codes.InvalidArgument},
	} {
		if _, err := tokens.CreateToken(t.Context(), c.req); status.Code(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}

	old, err := identity.NewToken(f.authority.Pin())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.store.PutToken(t.Context(), store.Token{ID: old.ID, Router: "home-0", SecretHash: old.Hash(), Expires: time.Now().Add(-time.Second)}); err != nil {
		t.Fatal(err)
	}
	list := func() (routers []string) {
		token := ""
		for {
			resp, err := tokens.ListTokens(t.Context(), &pb.ListTokensRequest{PageSize: 2, PageToken: token})
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range resp.GetTokens() {
				routers = append(routers, m.GetRouterId())
			}
			if token = resp.GetNextPageToken(); token == "" {
				return routers
			}
		}
	}
	if got := list(); len(got) != 0 {
		t.Errorf("a token that is too old is listed: %v", got)
	}
	for range 5 {
		f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1", Ttl: durationpb.New(time.Hour)})
	}
	if got := list(); len(got) != 5 {
		t.Errorf("listed %v", got)
	}
	var kept bool
	f.store.View(func(st *store.State) { _, kept = st.Token(old.ID) })
	if kept {
		t.Error("a token that is too old is kept for ever")
	}
}

func TestCreateTokens(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	f.setPlan("gold", 20e6)
	f.setRouter("other", "gold")
	tokens := pb.NewTokenServiceClient(ops)
	for name, req := range map[string]*pb.CreateTokensRequest{
		"none":     {},
		"too many": {Tokens: make([]*pb.CreateTokenRequest, 1001)},
		"batch":    {Tokens: []*pb.CreateTokenRequest{{RouterId: "home-1"}}, Batch: "a b"},
	} {
		if _, err := tokens.CreateTokens(t.Context(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Each is answered for itself.
	req := &pb.CreateTokensRequest{Batch: "b", Tokens: []*pb.CreateTokenRequest{
		{RouterId: "Home 1"}, {RouterId: "home-2", Subscriber: "nobody"}, {RouterId: "home-3", Ttl: durationpb.New(-time.Hour)},
	}}
	for i := range 200 {
		req.Tokens = append(req.Tokens, &pb.CreateTokenRequest{RouterId: fmt.Sprintf("many-%d", i), Subscriber: "sub-other", Labels: map[string]string{"site": "north"}})
	}
	resp, err := tokens.CreateTokens(t.Context(), req)
	if err != nil || resp.GetStopped() != "" || len(resp.GetTokens()) != len(req.Tokens) {
		t.Fatalf("%d answers, stopped %q, %v", len(resp.GetTokens()), resp.GetStopped(), err)
	}
	for i, x := range resp.GetTokens() {
		if bad := i < 3; bad != (x.GetError() != "") || bad != (x.GetSecret() == "") || !bad && x.GetToken().GetRouterId() != req.Tokens[i].RouterId {
			t.Errorf("%d: %v", i, x)
		}
	}
	last := resp.GetTokens()[202].GetSecret()
	if r, err := f.enroll(f.dial(f.agents, nil), last, request(t, newKey(t))); err != nil || r.GetRouterId() != "many-199" {
		t.Errorf("the last token gives %q, %v", r.GetRouterId(), err)
	}

	// A batch goes, and nothing else does.
	f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"})
	deleted := 0
	for del := (&pb.DeleteTokensRequest{Batch: "b"}); ; {
		resp, err := tokens.DeleteTokens(t.Context(), del)
		if err != nil {
			t.Fatal(err)
		}
		deleted += int(resp.GetDeleted())
		if del.PageToken = resp.GetNextPageToken(); del.PageToken == "" {
			break
		}
	}
	list, err := tokens.ListTokens(t.Context(), &pb.ListTokensRequest{})
	if err != nil || deleted != 199 || len(list.GetTokens()) != 1 {
		t.Errorf("%d deleted, %d left, %v", deleted, len(list.GetTokens()), err)
	}
}

// However many tokens there are, those that are too old are found in rounds.
func TestSweepGoesRound(t *testing.T) {
	f := newFixture(t)
	ops := f.dial(f.operators, f.operatorCert())
	var all []store.Token
	for i := range 1000 {
		x := store.Token{ID: fmt.Sprintf("t%04d", i), Router: "home-0", SecretHash: [32]byte{1}, Expires: time.Now().Add(time.Hour)}
		if i%100 == 99 {
			x.Expires = time.Now().Add(-time.Hour)
		}
		all = append(all, x)
	}
	if _, err := f.store.PutTokens(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	// 64 are looked at for each new one.
	for range 1000/64 + 2 {
		f.createToken(ops, &pb.CreateTokenRequest{RouterId: "home-1"})
	}
	f.store.View(func(st *store.State) {
		for x := range st.Tokens("") {
			if !time.Now().Before(x.Expires) {
				t.Errorf("token %s is too old and still there", x.ID)
			}
		}
	})
}
