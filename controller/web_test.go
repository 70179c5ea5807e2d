package controller_test

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller"
	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/access/accesstest"
	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// client speaks to the HTTPS door by its address, with certificates.
func (r *running) client(certs ...tls.Certificate) *http.Client {
	r.t.Helper()
	c := r.TLS(r.t)
	c.ServerName, c.Certificates = "", certs
	tr := &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: true}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// admin is a client with the credentials of the first start.
func (r *running) admin() *http.Client {
	r.t.Helper()
	return r.client(r.TLS(r.t).Certificates...)
}

// rest makes a call and returns the code and the answer. Headers come in pairs.
func (r *running) rest(c *http.Client, method, path, body string, headers ...string) (int, map[string]any) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, fmt.Sprintf("https://%s%s", r.HTTP, path), strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		r.t.Fatalf("%s %s: %d, not JSON: %q", method, path, resp.StatusCode, b)
	}
	return resp.StatusCode, m
}

func TestREST(t *testing.T) {
	r := start(t, t.TempDir())
	admin, stranger := r.admin(), r.client()
	const link = `{"down": {"rate_bps": "115000000"}, "up": {"rate_bps": "12000000"}}`
	for _, c := range []struct {
		name, method, path, body string
		client                   *http.Client
		headers                  []string
		code                     int
		says                     string // part of the answer
	}{
		{name: "no credentials", method: "GET", path: "/v1/plans", client: stranger, code: 401, says: "who are you?"},
		{
			name: "a caller made up in headers", method: "GET", path: "/v1/plans", client: stranger, code: 401,
			headers: []string{"Grpc-Metadata-Cakefleet-Caller", `{"Name":"eve","Role":3}`, "Cakefleet-Caller", `{"Name":"eve","Role":3}`},
		},
		{name: "description", method: "GET", path: "/openapi.json", client: stranger, code: 200, says: "/v1/subscribers:import"},
		{name: "empty list", method: "GET", path: "/v1/plans", client: admin, code: 200, says: `"plans":[]`},
		{name: "half a plan", method: "POST", path: "/v1/plans", body: `{"name": "gold", "link": ` + link + `}`, client: admin, code: 400, says: "tins"},
		{name: "create", method: "PATCH", path: "/v1/plans/gold?allow_missing=true", body: `{"link": ` + link + `}`, client: admin, code: 200, says: `"author":"admin"`},
		{
			name: "two callers in headers", method: "PATCH", path: "/v1/plans/eve?allow_missing=true", body: `{"link": ` + link + `}`, client: admin, code: 200,
			headers: []string{"Grpc-Metadata-Cakefleet-Caller", `{"Name":"eve","Role":3}`}, says: `"author":"admin"`,
		},
		{name: "overtaken", method: "PATCH", path: "/v1/plans/gold", body: `{"revision": "1", "link": ` + link + `}`, client: admin, code: 409, says: "revision 1 expected"},
		{name: "change one field", method: "PATCH", path: "/v1/plans/gold", body: `{"link": {"down": {"rate_bps": "200000000"}}}`, client: admin, code: 200, says: `"rate_bps":"12000000"`},
		{name: "name and all", method: "PATCH", path: "/v1/plans/gold", body: `{"name": "gold", "revision": "0", "link": {"up": {"rate_bps": "13000000"}}}`, client: admin, code: 200, says: `"rate_bps":"13000000"`},
		{name: "unknown field", method: "PATCH", path: "/v1/plans/gold", body: `{"lnk": {}}`, client: admin, code: 400, says: "lnk"},
		{name: "not JSON", method: "POST", path: "/v1/plans", body: `{`, client: admin, code: 400},
		{name: "unknown plan", method: "GET", path: "/v1/plans/no", client: admin, code: 404, says: "plan no"},
		{name: "billing pushes one", method: "PUT", path: "/v1/subscribers/10:01?allow_missing=true", body: `{"plan": "gold"}`, client: admin, code: 200, says: `"changed":true`},
		{name: "again", method: "PUT", path: "/v1/subscribers/10:01?allow_missing=true", body: `{"plan": "gold"}`, client: admin, code: 200, says: `"changed":false`},
		{name: "billing pushes a file", method: "POST", path: "/v1/subscribers:import", body: "id,plan\n10:01,gold\n10002,gold\n", client: admin, code: 200, says: `"applied":true`},
		{name: "a file with a bad line", method: "POST", path: "/v1/subscribers:import", body: "id,plan\n10003,no\n", client: admin, code: 200, says: `"line":2`},
		{name: "unknown option", method: "POST", path: "/v1/subscribers:import?dryrun=1", body: "id,plan\n", client: admin, code: 400, says: "dryrun"},
		{name: "import by a stranger", method: "POST", path: "/v1/subscribers:import", body: "id,plan\n", client: stranger, code: 401},
		{name: "suspend", method: "POST", path: "/v1/subscribers/10002/suspension", body: `{"policy": "gold"}`, client: admin, code: 200, says: `"suspension":"gold"`},
		{name: "resume", method: "DELETE", path: "/v1/subscribers/10002/suspension", client: admin, code: 200, says: `"changed":true`},
		{name: "token", method: "POST", path: "/v1/tokens", body: `{"router_id": "home-1", "ttl": "3600s"}`, client: admin, code: 200, says: `"secret":"cf1.`},
		{name: "no such call", method: "GET", path: "/v1/nonsense", client: admin, code: 404},
		{name: "no such page", method: "GET", path: "/nonsense", client: admin, code: 404, says: "/openapi.json"},
		{name: "a body that never ends", method: "POST", path: "/v1/plans", body: strings.Repeat(" ", 2<<20), client: admin, code: 400, says: "too large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, m := r.rest(c.client, c.method, c.path, c.body, c.headers...)
			var text strings.Builder
			e := json.NewEncoder(&text)
			e.SetEscapeHTML(false)
			if err := e.Encode(m); err != nil {
				t.Fatal(err)
			}
			if code != c.code || !strings.Contains(text.String(), c.says) {
				t.Errorf("code %d, want %d and %q in\n%s", code, c.code, c.says, text.String())
			}
		})
	}
}

// A door that is not wanted is not there, and says so to nobody.
func TestWithoutHTTP(t *testing.T) {
	r := start(t, t.TempDir(), func(c *controller.Config) { c.ListenHTTP = "" })
	if r.HTTP != nil {
		t.Errorf("HTTP door at %v", r.HTTP)
	}
}

// token makes a token of a new operator.
func (r *running) token(name, role string) string {
	r.t.Helper()
	admin := r.admin()
	if code, m := r.rest(admin, "POST", "/v1/operators", fmt.Sprintf(`{"name": %q, "role": %q}`, name, role)); code != 200 {
		r.t.Fatalf("operator: %v", m)
	}
	code, m := r.rest(admin, "POST", "/v1/operators/"+name+"/tokens", `{"ttl": "3600s"}`)
	if code != 200 {
		r.t.Fatalf("token: %v", m)
	}
	return m["secret"].(string)
}

// Tokens open the HTTPS door, to what their operator may, until they are
// revoked, which is at once.
func TestRESTTokens(t *testing.T) {
	r := start(t, t.TempDir())
	viewer := r.token("noc", "OPERATOR_ROLE_VIEWER")
	c, admin := r.client(), r.admin()
	if code, m := r.rest(admin, "PATCH", "/v1/plans/gold?allow_missing=true", `{"link": {"down": {"rate_bps": "1000000"}}}`); code != 200 {
		t.Fatal(m)
	}
	if code, m := r.rest(admin, "PUT", "/v1/subscribers/1?allow_missing=true", `{"plan": "gold", "labels": {"site": "north", "name": "Ada Lovelace"}}`); code != 200 {
		t.Fatal(m)
	}
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("anybody:"+viewer))
	for _, auth := range []string{"Bearer " + viewer, "bearer " + viewer, basic} {
		code, m := r.rest(c, "GET", "/v1/subscribers/1", "", "Authorization", auth)
		labels := fmt.Sprint(m)
		if code != 200 || !strings.Contains(labels, "north") || strings.Contains(labels, "Lovelace") || !strings.Contains(labels, "(hidden)") {
			t.Errorf("%.10s: %d %s", auth, code, labels)
		}
	}
	if code, m := r.rest(c, "DELETE", "/v1/subscribers/1", "", "Authorization", "Bearer "+viewer); code != 403 || !strings.Contains(fmt.Sprint(m), "noc is viewer here") {
		t.Errorf("a viewer deletes: %d %v", code, m)
	}
	if code, m := r.rest(c, "POST", "/v1/subscribers:import", "id,plan\n", "Authorization", "Bearer "+viewer); code != 403 {
		t.Errorf("a viewer imports: %d %v", code, m)
	}
	// A certificate doesn't help a wrong token.
	if code, _ := r.rest(admin, "GET", "/v1/plans", "", "Authorization", "Bearer x"); code != 403 {
		t.Errorf("wrong token with a certificate: %d", code)
	}
	if code, m := r.rest(admin, "DELETE", "/v1/operators/noc", ""); code != 200 {
		t.Fatal(m)
	}
	if code, m := r.rest(c, "GET", "/v1/plans", "", "Authorization", "Bearer "+viewer); code != 403 || !strings.Contains(fmt.Sprint(m), "unknown, revoked or ended") {
		t.Errorf("after it was deleted: %d %v", code, m)
	}
	// Everything is in the log, with where it came from.
	code, m := r.rest(admin, "GET", "/v1/audit?what=subscriber/1", "")
	if text := fmt.Sprint(m); code != 200 || !strings.Contains(text, "UpdateSubscriber") || !strings.Contains(text, "127.0.0.1") || !strings.Contains(text, "who:admin") {
		t.Errorf("%d %s", code, text)
	}
}

// Tokens of an identity provider open every door of operators, and the log says
// whose they were; while the provider is away, and at its start, all others do.
func TestOIDC(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	issuer.Down.Store(true)
	key := issuer.Rotate("1")
	var logging sync.Mutex
	var logged bytes.Buffer
	r := start(t, t.TempDir(), func(c *controller.Config) {
		c.OIDC.Issuer, c.OIDC.Audience = issuer.URL, "cakefleet"
		c.OIDC.Roles = []access.OIDCRole{{Role: identity.Operator, Value: "netops"}, {Role: identity.Viewer, Value: "support"}}
		c.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: &logged, Mutex: &logging})
	})
	token := func(group string) string {
		return key.Token(map[string]any{"iss": issuer.URL, "aud": "cakefleet", "sub": "1", "email": "ada@isp.example", "groups": []string{group}, "exp": time.Now().Add(time.Hour).Unix()})
	}
	operator, viewer := token("netops"), token("support")
	own, c := r.token("noc", "OPERATOR_ROLE_VIEWER"), r.client()
	if code, m := r.rest(c, "GET", "/v1/plans", "", "Authorization", "Bearer "+operator); code != 503 || !strings.Contains(fmt.Sprint(m), issuer.URL) {
		t.Errorf("provider away: %d %v", code, m)
	}
	if code, m := r.rest(c, "GET", "/v1/plans", "", "Authorization", "Bearer "+own); code != 200 {
		t.Errorf("own token, provider away: %d %v", code, m)
	}
	issuer.Down.Store(false)
	code := 0
	for deadline := time.Now().Add(time.Minute); code != 200 && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		code, _ = r.rest(c, "GET", "/v1/plans", "", "Authorization", "Bearer "+operator)
	}
	if code != 200 {
		t.Errorf("provider back: %d", code)
	}
	if code, m := r.rest(c, "PATCH", "/v1/plans/gold?allow_missing=true", `{"link": {"down": {"rate_bps": "1000000"}}}`, "Authorization", "Bearer "+operator); code != 200 {
		t.Errorf("operator: %d %v", code, m)
	}
	if code, m := r.rest(c, "DELETE", "/v1/plans/gold", "", "Authorization", "Bearer "+viewer); code != 403 || !strings.Contains(fmt.Sprint(m), "ada@isp.example is viewer here") {
		t.Errorf("viewer: %d %v", code, m)
	}
	if code, m := r.rest(c, "GET", "/api/v1/query?query=1", "", "Authorization", "Bearer "+viewer); code != 200 {
		t.Errorf("Prometheus API: %d %v", code, m)
	}
	via := "oidc " + strings.TrimPrefix(issuer.URL, "http://")
	if code, m := r.rest(r.admin(), "GET", "/v1/audit?what=plan/gold", ""); code != 200 || !strings.Contains(fmt.Sprint(m), "via:"+via) || !strings.Contains(fmt.Sprint(m), "who:ada@isp.example") {
		t.Errorf("audit: %d %v", code, m)
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+viewer)
	who, err := pb.NewOperatorServiceClient(r.Dial(t, r.Operators)).WhoAmI(ctx, &pb.WhoAmIRequest{})
	if err != nil || who.GetName() != "ada@isp.example" || who.GetRole() != pb.OperatorRole_OPERATOR_ROLE_VIEWER || who.GetVia() != via {
		t.Errorf("gRPC: %v, %v", who, err)
	}
	logging.Lock()
	defer logging.Unlock()
	if text := logged.String(); strings.Contains(text, "eyJ") || !strings.Contains(text, "identity provider is known") {
		t.Errorf("log:\n%s", text)
	}
}

// fleet.md §4 item 24: a malformed bearer header panics nothing, twenty bad
// logins are throttled, and certificates still come in.
func TestFleet024_Logins(t *testing.T) {
	r := start(t, t.TempDir())
	good := r.token("noc", "OPERATOR_ROLE_VIEWER")
	c := r.client()
	bad := []string{"Bearer", "Bearer ", "Basic", "Basic !!!", "Digest x", "Bearer cfo1.noc.aaaaaaaaaa.x.y", strings.Repeat("a", 4000), "ÿ\t", "Basic " + base64.StdEncoding.EncodeToString([]byte("nocolon"))}
	refused, throttled := 0, 0
	for i := range 30 {
		code, _ := r.rest(c, "GET", "/v1/plans", "", "Authorization", bad[i%len(bad)])
		switch code {
		case 403:
			refused++
		case 429:
			throttled++
		default:
			t.Errorf("%q: %d", bad[i%len(bad)], code)
		}
	}
	if refused < 19 || refused > 25 || throttled == 0 {
		t.Errorf("%d refused and %d throttled, want about 20 and the rest", refused, throttled)
	}
	if code, _ := r.rest(c, "GET", "/v1/plans", "", "Authorization", "Bearer "+good); code != 429 {
		t.Errorf("a good token from there: %d, want to wait as well", code)
	}
	if code, m := r.rest(r.admin(), "GET", "/v1/plans", ""); code != 200 {
		t.Errorf("a certificate from there: %d %v", code, m)
	}
}

// fleet.md §4 item 9: a file gets the same verdict at every door.
func TestFleet009_SameVerdictAtEveryDoor(t *testing.T) {
	r := start(t, t.TempDir())
	admin := r.admin()
	if code, m := r.rest(admin, "PATCH", "/v1/plans/gold?allow_missing=true", `{"link": {"down": {"rate_bps": "1000000"}}}`); code != 200 {
		t.Fatal(m)
	}
	for _, file := range []string{
		"id,plan\n 1 , gold\n2,gold\n2,gold\n3,no\n", "id;plan\r\n1;gold\r\n", "\xef\xbb\xbfid,plan\n1,gold\n", "plan\ngold\n", "", `[{"id": "1", "plan": "gold"}]`, "id,plan,down\n1,gold,0\n",
	} {
		stream, err := pb.NewSubscriberServiceClient(r.Operate(t)).ImportSubscribers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&pb.ImportSubscribersRequest{Chunk: []byte(file), DryRun: true}); err != nil {
			t.Fatal(err)
		}
		byGRPC, err := stream.CloseAndRecv()
		if err != nil {
			t.Fatal(err)
		}
		code, m := r.rest(admin, "POST", "/v1/subscribers:import?dry_run=true", file)
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		byREST := &pb.ImportSubscribersResponse{}
		if err := protojson.Unmarshal(text, byREST); err != nil || code != 200 || !proto.Equal(byGRPC, byREST) {
			t.Errorf("%q: %d, %v\n%v\n%v", file, code, err, byGRPC, byREST)
		}
	}
}
