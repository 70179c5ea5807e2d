package query

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/storage"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/engine"
)

// here evaluates on the history of this controller.
type here struct {
	engine  *promql.Engine
	history *history.History
}

// Here returns the history of this controller as a source.
func Here(e *promql.Engine, h *history.History) Source { return here{e, h} }

// Range evaluates PromQL.
func (h here) Range(ctx context.Context, expr string, from, to time.Time, step time.Duration) (model.Matrix, error) {
	return evaluate(ctx, h.engine, h.history, expr, from, to, step)
}

// SojournBetween is that of the history.
func (h here) SojournBetween(ctx context.Context, by, direction, tin string, from, to time.Time) (map[string]*engine.Histogram, error) {
	return h.history.SojournBetween(ctx, by, direction, tin, from, to)
}

func evaluate(ctx context.Context, e *promql.Engine, from storage.Queryable, expr string, start, end time.Time, step time.Duration) (model.Matrix, error) {
	q, err := e.NewRangeQuery(ctx, from, nil, expr, start, end, step)
	if err != nil {
		return nil, err
	}
	defer q.Close()
	r := q.Exec(ctx)
	m, err := r.Matrix()
	if err != nil {
		return nil, err
	}
	all := make(model.Matrix, 0, len(m))
	for _, s := range m {
		out := &model.SampleStream{Metric: model.Metric{}}
		for name, value := range s.Metric.Map() {
			out.Metric[model.LabelName(name)] = model.LabelValue(value)
		}
		for _, p := range s.Floats {
			out.Values = append(out.Values, model.SamplePair{Timestamp: model.Time(p.T), Value: model.SampleValue(p.F)})
		}
		for _, p := range s.Histograms {
			out.Histograms = append(out.Histograms, model.SampleHistogramPair{Timestamp: model.Time(p.T), Histogram: sample(p.H)})
		}
		all = append(all, out)
	}
	return all, nil
}

// sample returns a histogram as the HTTP API gives it.
func sample(h *histogram.FloatHistogram) *model.SampleHistogram {
	out := &model.SampleHistogram{Count: model.FloatString(h.Count), Sum: model.FloatString(h.Sum)}
	for it := h.PositiveBucketIterator(); it.Next(); {
		b := it.At()
		out.Buckets = append(out.Buckets, &model.HistogramBucket{
			Lower: model.FloatString(math.Max(b.Lower, 0)), Upper: model.FloatString(b.Upper), Count: model.FloatString(b.Count),
		})
	}
	return out
}

// there asks a server that has the Prometheus HTTP API.
type there struct {
	api  promv1.API
	host string
}

// There returns a server that controllers write their history to as a source.
// base is its address up to where api/v1 begins; user information in it is sent
// along.
func There(base *url.URL, transport http.RoundTripper) (Source, error) {
	if transport == nil {
		transport = http.DefaultTransport
	}
	plain := *base
	if u := base.User; u != nil {
		plain.User = nil
		transport = withUser{u, transport}
	}
	c, err := api.NewClient(api.Config{Address: strings.TrimSuffix(plain.String(), "/"), RoundTripper: transport})
	if err != nil {
		return nil, fmt.Errorf("history at %s: %w", base.Redacted(), err)
	}
	return there{promv1.NewAPI(c), plain.Host}, nil
}

// Range evaluates PromQL.
func (t there) Range(ctx context.Context, expr string, from, to time.Time, step time.Duration) (model.Matrix, error) {
	v, _, _, err := t.api.QueryRange(ctx, expr, promv1.Range{Start: from, End: to, Step: step})
	if err != nil {
		return nil, fmt.Errorf("history at %s: %w", t.host, err)
	}
	m, ok := v.(model.Matrix)
	if !ok {
		return nil, fmt.Errorf("history at %s: answers with a %s, want a matrix", t.host, v.Type())
	}
	return m, nil
}

// withUser says who asks.
type withUser struct {
	user *url.Userinfo
	next http.RoundTripper
}

// RoundTrip sends one request.
func (w withUser) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	password, _ := w.user.Password() // none is an empty one
	r.SetBasicAuth(w.user.Username(), password)
	return w.next.RoundTrip(r)
}
