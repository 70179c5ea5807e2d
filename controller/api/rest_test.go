package api_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Whatever a viewer sends to the REST calls, there is an answer, no fault, and
// nothing is other than before.
func FuzzREST(f *testing.F) {
	for _, s := range []struct{ method, path, body string }{
		{"GET", "/v1/plans", ""},
		{"GET", "/v1/plans/gold", ""},
		{"PATCH", "/v1/plans/gold?allow_missing=true", `{"link":{"down":{"rate_bps":"1"}}}`},
		{"PUT", "/v1/subscribers/1", `{"plan":"gold"}`},
		{"DELETE", "/v1/subscribers/1", ""},
		{"POST", "/v1/subscribers:import?dry_run=1", "id,plan\n"},
		{"GET", "/v1/subscribers?page_size=-1&page_token=x", ""},
		{"POST", "/v1/tokens", `{"ttl":"-1s"}`},
		{"GET", "/v1/routers/a%2Fb/stats", ""},
		{"GET", "/v1//", ""},
		{"GET", "/v1/plans/%00", ""},
		{"GET", "/v1/routers/aa:bb:cc", ""},
		{"POST", "/v1/plans/gold/rollback", `{"to_revision":"99999999999999999999"}`},
	} {
		f.Add(s.method, s.path, s.body)
	}
	st := storetest.NewFake(f)
	if _, err := st.PutPlan(f.Context(), storetest.Plan("gold", 1, 1), 0); err != nil {
		f.Fatal(err)
	}
	if _, err := st.PutSubscriber(f.Context(), plan.Subscriber{ID: "1", Plan: "gold"}, 0); err != nil {
		f.Fatal(err)
	}
	var log logBuffer
	rest, err := api.NewREST(func(r grpc.ServiceRegistrar) {
		pb.RegisterPlanServiceServer(r, api.NewPlanService(st))
		pb.RegisterSubscriberServiceServer(r, api.NewSubscriberService(st))
		pb.RegisterRouterServiceServer(r, api.NewRouterService(st, fleet.NewHub()))
		pb.RegisterTokenServiceServer(r, api.NewTokenService(st, nil))
	}, api.InsideDoor(api.DefaultViewerLabels, hclog.New(&hclog.LoggerOptions{Output: &log}))...)
	if err != nil {
		f.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- rest.Serve() }()
	f.Cleanup(func() {
		if err := rest.Close(); err != nil {
			f.Error(err)
		}
		if err := <-done; err != nil {
			f.Error(err)
		}
	})
	before := st.Revision()
	f.Fuzz(func(t *testing.T, method, path, body string) {
		if _, err := url.ParseRequestURI(path); err != nil || !strings.HasPrefix(path, "/") {
			return // the server answers such by itself
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://x"+path, strings.NewReader(body))
		if err != nil {
			return
		}
		req = req.WithContext(identity.WithCaller(req.Context(), identity.Caller{Name: "noc", Role: identity.Viewer}))
		w := httptest.NewRecorder()
		if strings.HasPrefix(req.URL.Path, "/v1/subscribers:import") && method == http.MethodPost {
			rest.Import(w, req)
		} else {
			rest.ServeHTTP(w, req)
		}
		if w.Code >= 500 && w.Code != http.StatusNotImplemented {
			t.Errorf("%s %q: %d %s", method, path, w.Code, w.Body)
		}
		if strings.Contains(log.String(), "panic") {
			t.Fatalf("%s %q: %s", method, path, log.String())
		}
		if st.Revision() != before {
			t.Fatalf("%s %q by a viewer changed something", method, path)
		}
	})
}
