package controller_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/channelz/grpc_channelz_v1"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/cakefleet/cakefleet/controller"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// ask gets a page of the admin door.
func (r *running) ask(path string, headers ...string) (int, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, fmt.Sprintf("http://%s%s", r.Admin, path), http.NoBody)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Host = headers[i+1]
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestAdminDoor(t *testing.T) {
	r := start(t, t.TempDir())
	op := r.Operate(t)
	if _, err := pb.NewPlanServiceClient(op).ListPlans(t.Context(), &pb.ListPlansRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := pb.NewEnrollmentServiceClient(r.Dial(r.t, r.Agents)).Enroll(t.Context(), &pb.EnrollRequest{Token: "no token"}); err == nil {
		t.Fatal("no token enrols")
	}
	code, text := r.ask("/metrics")
	if code != 200 {
		t.Fatalf("%d %s", code, text)
	}
	for _, want := range []string{
		`cakefleet_build_info{version=""} 1`, "cakefleet_sessions 0", "cakefleet_pushes_total 0", `cakefleet_push_answers_total{outcome="rejected"} 0`,
		`cakefleet_records{kind="plan"} 0`, "cakefleet_store_revision ", "cakefleet_etcd_size_bytes{", "cakefleet_etcd_full 0", `cakefleet_reports_total{result="taken"} 0`,
		"cakefleet_agent_starts_total 0", `cakefleet_counter_resets_total{reason="wrapped"} 0`, "cakefleet_handovers_total 0", "cakefleet_router_clock_faults_total 0",
		"cakefleet_rollup_overflow_total 0", "cakefleet_history_up ", `cakefleet_history_steps_total{result="missed"} 0`, "cakefleet_history_series ",
		"cakefleet_history_routers_without_series 0", `cakefleet_unserved{kind="subscriber"} 0`, `cakefleet_unserved{kind="router"} 0`,
		`grpc_server_handled_total{grpc_code="OK",grpc_method="ListPlans",grpc_service="cakefleet.v1.PlanService",grpc_type="unary"} 1`,
		`grpc_method="Enroll"`, `grpc_server_handling_seconds_bucket{`, "go_goroutines ", "process_resident_memory_bytes ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %q", want)
		}
	}
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/debug/pprof/": 200, "/debug/pprof/goroutine?debug=1": 200, "/": 404} {
		if code, text := r.ask(path); code != want {
			t.Errorf("%s: %d %s", path, code, text)
		}
	}
	// A page from elsewhere whose name means this machine reads nothing.
	if code, text := r.ask("/metrics", "Host", "evil.example"); code != 403 {
		t.Errorf("by another name: %d %.80s", code, text)
	}

	conn, err := grpc.NewClient(r.Admin.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	health, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || health.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", health, err)
	}
	stream, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if resp, err := stream.Recv(); err != nil || !strings.Contains(resp.String(), "cakefleet.v1.PlanService") {
		t.Errorf("reflection: %v, %v", resp, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
	if resp, err := grpc_channelz_v1.NewChannelzClient(conn).GetServers(t.Context(), &grpc_channelz_v1.GetServersRequest{}); err != nil || len(resp.GetServer()) == 0 {
		t.Errorf("channelz: %v, %v", resp, err)
	}
	// Neither is at the operators' door.
	if _, err := grpc_channelz_v1.NewChannelzClient(op).GetServers(t.Context(), &grpc_channelz_v1.GetServersRequest{}); err == nil {
		t.Error("channelz at the operators' door")
	}
}

// A door that is not wanted is not there.
func TestWithoutAdminDoor(t *testing.T) {
	r := start(t, t.TempDir(), func(c *controller.Config) { c.ListenAdmin = "" })
	if r.Admin != nil {
		t.Errorf("admin door at %v", r.Admin)
	}
}
