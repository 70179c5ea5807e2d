// Package promapi answers the Prometheus HTTP API from what the controller keeps
// of the fleet's history, so that Grafana, promtool and every other client of
// Prometheus work with a controller as they are.
//
// There are query, query_range, query_exemplars (always empty), series, labels,
// label values, metadata, format_query, parse_query, rules and alerts (always
// empty) and status/buildinfo. What tells about the storage or changes it
// (admin, write, read, config, flags, targets) is not there.
package promapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/common/route"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/storage"
	v1 "github.com/prometheus/prometheus/web/api/v1"

	"github.com/cakefleet/cakefleet/controller/history"
)

// Prefix is below which the API is to be mounted.
const Prefix = "/api/v1"

// Bounds of one query.
const (
	DefaultTimeout = 2 * time.Minute
	DefaultSamples = 50_000_000 // in memory at once; Prometheus' own default
)

// Config says what the API answers from.
type Config struct {
	Data    storage.SampleAndChunkQueryable
	Engine  *promql.Engine
	Metrics []history.Metric
	Version string // of the controller
	Logger  *slog.Logger
}

// NewEngine returns an engine for queries. Zero bounds mean the defaults. A nil
// registerer counts nothing.
func NewEngine(timeout time.Duration, samples int, logger *slog.Logger, reg prometheus.Registerer) *promql.Engine {
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	if samples == 0 {
		samples = DefaultSamples
	}
	return promql.NewEngine(promql.EngineOpts{
		Logger: logger, Reg: reg,
		Timeout: timeout, MaxSamples: samples,
		LookbackDelta:    5 * time.Minute,
		EnableAtModifier: true, EnableNegativeOffset: true,
	})
}

// reads are the paths that are answered, without Prefix; label values are apart.
var reads = map[string]bool{
	"/query": true, "/query_range": true, "/query_exemplars": true,
	"/series": true, "/labels": true, "/metadata": true,
	"/format_query": true, "/parse_query": true,
	"/rules": true, "/alerts": true, "/status/buildinfo": true,
}

// answered reports whether a path below Prefix is one of the API's.
func answered(path string) bool {
	if name, ok := strings.CutPrefix(path, "/label/"); ok {
		label, ok := strings.CutSuffix(name, "/values")
		return ok && label != "" && !strings.Contains(label, "/")
	}
	return reads[path]
}

// New returns the API, to be mounted at Prefix.
func New(c Config) http.Handler {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	api := v1.NewAPI(
		c.Engine,
		c.Data,
		nil, // nothing can be appended
		none{},
		nil, nil, nil, // scrape pools, targets and alert managers: there are none, nor paths for them
		func() config.Config { return config.DefaultConfig },
		nil,
		v1.GlobalURLOptions{},
		func(f http.HandlerFunc) http.HandlerFunc { return f },
		nil, "", false, false, 0, // nothing about the storage, no search
		c.Logger,
		func(context.Context) v1.RulesRetriever { return none{} },
		0, 0, 0, // no remote read
		false,
		nil, // no other origin may read with a browser's credentials
		nil,
		&v1.PrometheusVersion{Version: c.Version, GoVersion: runtime.Version()},
		nil, nil, nil, nil, nil,
		false, nil,
		false, false, false,
		5*time.Minute,
		false, false,
		nil, nil,
		v1.OpenAPIOptions{},
		nil,
		false,
		DefaultTimeout,
	)
	r := route.New()
	api.Register(r)
	return only(http.StripPrefix(Prefix, withMetadata(c.Metrics, r)))
}

// Forward returns the API as a server elsewhere answers it that the controllers
// write their history to, such as a cluster of Mimir or VictoriaMetrics. base is
// its address up to where api/v1 begins; user information in it is sent along.
func Forward(base *url.URL, metrics []history.Metric, transport http.RoundTripper) http.Handler {
	p := &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			// Whoever asks has shown who they are to this controller; the server
			// there knows the controller and not them.
			r.Out.Header.Del("Authorization")
			r.Out.Header.Del("Cookie")
			r.SetURL(base)
			if u := base.User; u != nil {
				password, _ := u.Password() // none is an empty one
				r.Out.SetBasicAuth(u.Username(), password)
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			fail(w, http.StatusBadGateway, "unavailable", fmt.Errorf("history at %s: %w", base.Redacted(), err))
		},
	}
	return only(withMetadata(metrics, p))
}

// only lets through what is answered.
func only(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, ok := strings.CutPrefix(r.URL.Path, Prefix)
		if !ok || !answered(path) {
			fail(w, http.StatusNotFound, "not_found", fmt.Errorf("%s: not a part of the Prometheus API that a controller has", r.URL.Path))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// withMetadata answers what metrics there are. Prometheus takes that from the
// targets that it scrapes; here it is the list that the code writes by.
func withMetadata(metrics []history.Metric, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metadata" && r.URL.Path != Prefix+"/metadata" {
			next.ServeHTTP(w, r)
			return
		}
		limit := -1
		if s := r.FormValue("limit"); s != "" {
			n, err := strconv.Atoi(s)
			if err != nil {
				fail(w, http.StatusBadRequest, "bad_data", errors.New("limit must be a number"))
				return
			}
			limit = n
		}
		data := map[string][]metadata.Metadata{}
		name := r.FormValue("metric")
		for _, m := range metrics {
			if limit >= 0 && len(data) >= limit {
				break
			}
			if name == "" || name == m.Name {
				data[m.Name] = []metadata.Metadata{{Type: model.MetricType(m.Type), Help: m.Help, Unit: m.Unit()}}
			}
		}
		answer(w, http.StatusOK, map[string]any{"status": "success", "data": data})
	})
}

// fail answers as Prometheus does, so that its clients show the sentence.
func fail(w http.ResponseWriter, code int, kind string, err error) {
	answer(w, code, map[string]string{"status": "error", "errorType": kind, "error": err.Error()})
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// A client that has gone needs no answer.
	_ = json.NewEncoder(w).Encode(body)
}

// none has no exemplars and no rules: the fleet's history has none of either.
type none struct{}

// ExemplarQuerier returns one that finds nothing.
func (none) ExemplarQuerier(context.Context) (storage.ExemplarQuerier, error) { return none{}, nil }

// Select finds nothing.
func (none) Select(_, _ int64, _ ...[]*labels.Matcher) ([]exemplar.QueryResult, error) {
	return nil, nil
}

// RuleGroups returns none.
func (none) RuleGroups() []*rules.Group { return nil }

// AlertingRules returns none.
func (none) AlertingRules() []*rules.AlertingRule { return nil }
