package api_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// What a client wrote and a REST call would leave unread is refused, and
// nothing is changed.
func TestRESTRefusesWhatItWouldNotRead(t *testing.T) {
	st := storetest.NewFake(t)
	first, err := st.PutPlan(t.Context(), storetest.Plan("gold", 1, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	rest, err := api.NewREST(func(r grpc.ServiceRegistrar) {
		pb.RegisterPlanServiceServer(r, api.NewPlanService(st))
		pb.RegisterSubscriberServiceServer(r, api.NewSubscriberService(st))
	}, api.InsideDoor(api.DefaultViewerLabels, hclog.NewNullLogger())...)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- rest.Serve() }()
	t.Cleanup(func() {
		if err := rest.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		name, method, path, body, says string
		code                           int
	}{
		{"misspelt dry run", "PATCH", "/v1/plans/gold?dryrun=true", `{"link":{"down":{"rate_bps":"2000000"}}}`, "dryrun", 400},
		{"misspelt in part", "GET", "/v1/plans?page_size.x=1", "", "page_size.x", 400},
		{"query beside a whole body", "POST", "/v1/plans/gold/rollback?dry_run=true", `{"to_revision":"1"}`, "dry_run", 400},
		{"two values", "PUT", "/v1/subscribers/1?allow_missing=true", `{"plan":"gold"}{"plan":"silver"}`, "follows", 400},
		{"text behind", "PUT", "/v1/subscribers/1?allow_missing=true", `{"plan":"gold"} x`, "follows", 400},
		{"text behind a whole body", "POST", "/v1/plans/gold/rollback", `{"to_revision":"1"}}`, "follows", 400},
		{"as it should be", "GET", "/v1/plans?page_size=1", "", "gold", 200},
		{"JSON's name", "GET", "/v1/plans?pageSize=1", "", "gold", 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := httptest.NewRequestWithContext(t.Context(), c.method, "http://x"+c.path, strings.NewReader(c.body))
			req = req.WithContext(identity.WithCaller(req.Context(), identity.Caller{Name: "ada", Role: identity.Admin}))
			w := httptest.NewRecorder()
			rest.ServeHTTP(w, req)
			if w.Code != c.code || !strings.Contains(w.Body.String(), c.says) {
				t.Errorf("%s %s: %d %s, want %d with %q", c.method, c.path, w.Code, w.Body, c.code, c.says)
			}
			if got := st.Revision(); got != first.Revision {
				t.Errorf("revision %d, want %d as before", got, first.Revision)
			}
		})
	}
}
