package promapi_test

import (
	"context"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/promapi"
)

const (
	drops   = "cakefleet_drops_total"
	sojourn = "cakefleet_sojourn_seconds"
)

var metrics = []history.Metric{
	{Name: drops, Type: "counter", Help: "Packets dropped."},
	{Name: sojourn, Type: "histogram", Help: "Time in the queue."},
}

// server answers from an hour of a counter of 10 a minute and a histogram.
func server(t *testing.T, end time.Time) *httptest.Server {
	t.Helper()
	db, err := tsdb.Open(t.TempDir(), nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	ctx := context.Background()
	app := db.Appender(ctx)
	for i := range 61 {
		at := end.Add(time.Duration(i-60) * time.Minute).UnixMilli()
		for _, plan := range []string{"gold", "silver"} {
			if _, err := app.Append(0, labels.FromStrings("__name__", drops, "plan", plan), at, float64(10*i)); err != nil {
				t.Fatal(err)
			}
		}
		h := &histogram.Histogram{
			Schema: 3, Count: uint64(8 * i), Sum: float64(8*i) * 0.01,
			PositiveSpans:   []histogram.Span{{Offset: -53, Length: 1}}, // the bucket that 10 ms is in
			PositiveBuckets: []int64{int64(8 * i)},
		}
		if _, err := app.AppendHistogram(0, labels.FromStrings("__name__", sojourn, "plan", "gold"), at, h, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := app.Commit(); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(promapi.New(promapi.Config{
		Data: db, Engine: promapi.NewEngine(0, 0, nil, nil), Metrics: metrics, Version: "1.2.3",
	}))
	t.Cleanup(s.Close)
	return s
}

// clientOf is what Grafana and others use, too.
func clientOf(t *testing.T, address string) promv1.API {
	t.Helper()
	c, err := api.NewClient(api.Config{Address: address})
	if err != nil {
		t.Fatal(err)
	}
	return promv1.NewAPI(c)
}

func TestClientsOfPrometheusWork(t *testing.T) {
	end := time.Now().Truncate(time.Minute)
	direct := server(t, end)
	base, err := url.Parse(direct.URL)
	if err != nil {
		t.Fatal(err)
	}
	through := httptest.NewServer(promapi.Forward(base, metrics, nil))
	t.Cleanup(through.Close)
	for name, address := range map[string]string{"here": direct.URL, "elsewhere": through.URL} {
		t.Run(name, func(t *testing.T) { asClient(t, clientOf(t, address), end) })
	}
}

func asClient(t *testing.T, c promv1.API, end time.Time) {
	ctx := t.Context()
	got, _, _, err := c.Query(ctx, `sum by (plan) (increase(cakefleet_drops_total[30m]))`, end)
	if err != nil {
		t.Fatal(err)
	}
	vector, ok := got.(model.Vector)
	if !ok || len(vector) != 2 || math.Abs(float64(vector[0].Value)-300) > 1 {
		t.Errorf("increase in 30 minutes is %v, want 300 of each of 2 plans", got)
	}
	got, _, _, err = c.Query(ctx, `histogram_quantile(0.99, sum(rate(cakefleet_sojourn_seconds[30m])))`, end)
	if err != nil {
		t.Fatal(err)
	}
	vector, ok = got.(model.Vector)
	if !ok || len(vector) != 1 || math.Abs(float64(vector[0].Value)/0.01-1) > 0.125 {
		t.Errorf("99 %% is %v, want 10 ms within 12.5 %%", got)
	}
	got, _, _, err = c.QueryRange(ctx, drops, promv1.Range{Start: end.Add(-time.Hour), End: end, Step: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := got.(model.Matrix); !ok || len(m) != 2 || len(m[0].Values) != 61 {
		t.Errorf("range is %v, want 61 values of each of 2 plans", got)
	}
	series, _, _, err := c.Series(ctx, []string{drops}, end.Add(-time.Hour), end)
	if err != nil || len(series) != 2 {
		t.Errorf("series are %v (%v), want 2", series, err)
	}
	plans, _, _, err := c.LabelValues(ctx, "plan", nil, end.Add(-time.Hour), end)
	if err != nil || len(plans) != 2 || plans[0] != "gold" {
		t.Errorf("plans are %v (%v), want gold and silver", plans, err)
	}
	meta, err := c.Metadata(ctx, sojourn, "")
	if err != nil || len(meta) != 1 || meta[sojourn][0].Unit != "seconds" {
		t.Errorf("metadata is %v (%v), want that of %s", meta, err, sojourn)
	}
	if r, err := c.Rules(ctx, nil); err != nil || len(r.Groups) != 0 {
		t.Errorf("rules are %v (%v), want none", r, err)
	}
	if _, _, _, err := c.Query(ctx, `sum(`, end); err == nil || !strings.Contains(err.Error(), "parse error") {
		t.Errorf("error of half an expression is %v, want the parse error", err)
	}
	if _, err := c.Config(ctx); err == nil {
		t.Error("the configuration can be read")
	}
}

func TestOnlyQuestionsAreAnswered(t *testing.T) {
	t.Parallel()
	s := server(t, time.Now())
	for _, path := range []string{
		"/admin/tsdb/delete_series", "/write", "/read", "/otlp/v1/metrics", "/status/flags", "/status/tsdb",
		"/status/config", "/targets", "/label/a/b/values", "/label//values", "/query/..", "", "/", "/openapi.yaml", "/features",
		"/search/metric_names", "/notifications", "/status/walreplay", "/query_cost",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut} {
			r, err := http.NewRequestWithContext(t.Context(), method, s.URL+"/api/v1"+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			if answer.StatusCode != http.StatusNotFound {
				t.Errorf("%s %q: %s, want 404", method, path, answer.Status)
			}
		}
	}
}

// Credentials that somebody shows to a controller are none of the business of
// the server that it asks.
func TestForwardKeepsCredentials(t *testing.T) {
	t.Parallel()
	var seen http.Header
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.Header
		if r.URL.Path != "/select/0/prometheus/api/v1/query" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		_, _ = io.WriteString(w, `{"status":"success","data":{"resultType":"vector","result":[]}}`)
	}))
	base, err := url.Parse(strings.Replace(elsewhere.URL, "http://", "http://fleet:secret@", 1) + "/select/0/prometheus")
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(promapi.Forward(base, metrics, nil))
	t.Cleanup(s.Close)
	ask := func() (*http.Response, string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/api/v1/query?query=up", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer of-an-operator")
		r.Header.Set("Cookie", "a=b")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer, string(text)
	}
	if answer, text := ask(); answer.StatusCode != http.StatusOK {
		t.Errorf("%s %s", answer.Status, text)
	}
	if user, password, ok := (&http.Request{Header: seen}).BasicAuth(); !ok || user != "fleet" || password != "secret" || seen.Get("Cookie") != "" {
		t.Errorf("the server elsewhere saw %v", seen)
	}
	elsewhere.Close()
	if answer, text := ask(); answer.StatusCode != http.StatusBadGateway || strings.Contains(text, "secret") || !strings.Contains(text, base.Host) {
		t.Errorf("with nobody there: %s %s, want who is not there and no password", answer.Status, text)
	}
}

// promtool is what people have at hand.
func TestPromtoolAsks(t *testing.T) {
	t.Parallel()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("skipped: promtool is not here (Debian: prometheus)")
	}
	s := server(t, time.Now())
	out, err := exec.CommandContext(t.Context(), promtool, "query", "instant", s.URL, `count(cakefleet_drops_total)`).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "=> 2 @") {
		t.Errorf("promtool says %s (%v), want 2", out, err)
	}
}
