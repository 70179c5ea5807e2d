// Package monitor is the door for whoever runs the controller itself: metrics
// for Prometheus, health for orchestrators, profiles, and gRPC's health,
// reflection and channelz. There are no credentials, so that it listens on the
// loopback unless somebody says otherwise.
package monitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
)

const (
	mostConnections = 64
	mostHeader      = 16 << 10 // bytes
	headerTime      = 10 * time.Second
	idleTime        = 2 * time.Minute

	// liveTime is how long the controller may take to show that it lives.
	liveTime = 5 * time.Second
)

// Config is what the monitor watches.
type Config struct {
	// Live returns an error if the process does no good any more and should be
	// started again. It may block; that counts as an error.
	Live func() error
	// Ready returns an error while calls should go elsewhere.
	Ready func() error
	// Services are those that gRPC reflection tells of.
	Services reflection.ServiceInfoProvider
	Logger   hclog.Logger // nil: none
}

// Monitor is the door and what is behind it.
type Monitor struct {
	config   Config
	registry *prometheus.Registry
	grpc     *grpc.Server
	health   *health.Server
	mux      *http.ServeMux
}

// New returns a monitor that nobody can reach before Serve.
func New(c Config) *Monitor {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	m := &Monitor{
		config: c, registry: prometheus.NewPedanticRegistry(), grpc: grpc.NewServer(grpc.MaxRecvMsgSize(64 << 10)),
		health: health.NewServer(), mux: http.NewServeMux(),
	}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	m.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	grpc_health_v1.RegisterHealthServer(m.grpc, m.health)
	options := reflection.ServerOptions{Services: c.Services}
	reflectionv1.RegisterServerReflectionServer(m.grpc, reflection.NewServerV1(options))
	reflectionv1alpha.RegisterServerReflectionServer(m.grpc, reflection.NewServer(options))
	channelz.RegisterChannelzServiceToServer(m.grpc)

	m.mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorLog: c.Logger.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn}), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: 4, Timeout: 30 * time.Second,
	}))
	m.mux.HandleFunc("GET /healthz", m.serveLive)
	m.mux.HandleFunc("GET /readyz", m.serveReady)
	m.mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	m.mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	m.mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	m.mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	m.mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return m
}

// Registerer is where metrics are registered.
func (m *Monitor) Registerer() prometheus.Registerer { return m.registry }

// SetServing says in gRPC's health whether calls are served.
func (m *Monitor) SetServing(yes bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if yes {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	m.health.SetServingStatus("", status)
}

// ServeHTTP answers gRPC and HTTP on the same port.
func (m *Monitor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		m.grpc.ServeHTTP(w, r)
		return
	}
	m.mux.ServeHTTP(w, r)
}

// serveLive answers 200 while the controller does its work.
func (m *Monitor) serveLive(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), liveTime)
	defer cancel()
	live := make(chan error, 1) // nobody waits for it after liveTime
	go func() { live <- m.config.Live() }()
	select {
	case err := <-live:
		tell(w, err)
	case <-ctx.Done():
		tell(w, fmt.Errorf("no answer within %v", liveTime))
	}
}

// serveReady answers 200 while calls are welcome.
func (m *Monitor) serveReady(w http.ResponseWriter, _ *http.Request) { tell(w, m.config.Ready()) }

func tell(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	answer := map[string]string{"status": "ok"}
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		answer = map[string]string{"status": "unavailable", "reason": err.Error()}
	}
	_ = json.NewEncoder(w).Encode(answer) // a client that has gone needs no answer
}

// Serve answers what comes in at l until ctx ends.
func (m *Monitor) Serve(ctx context.Context, l net.Listener) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	var h http.Handler = m
	if loopback(l.Addr().String()) {
		h = onlyLocal(m)
	} else {
		m.config.Logger.Warn("metrics and profiles can be read by everybody who reaches this address", "address", l.Addr())
	}
	s := &http.Server{
		Handler: h, Protocols: protocols, MaxHeaderBytes: mostHeader, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime,
		ErrorLog: m.config.Logger.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
	}
	// Watches and profiles would go on for long: nobody waits for them.
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	defer m.grpc.Stop()
	defer m.health.Shutdown()
	err := s.Serve(netutil.LimitListener(l, mostConnections))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// loopback tells whether only this machine reaches an address.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// onlyLocal refuses what a browser asks here on behalf of a page from elsewhere
// whose name was made to mean this machine.
func onlyLocal(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !loopback(r.Host) {
			http.Error(w, "ask for localhost or 127.0.0.1", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
