// Package web is the HTTPS door for people and programs: who comes in, as what,
// and how much of the controller one of them may take. What is behind the door
// is mounted with Handle.
package web

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/net/netutil"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/identity"
)

// Limits of the door.
const (
	mostConnections = 1000
	mostHeader      = 16 << 10 // bytes
	mostBody        = 1 << 20  // bytes, of what Handle mounts
	handshakeTime   = 10 * time.Second
	readTime        = 30 * time.Second // for a body that Handle allows
	uploadTime      = 10 * time.Minute // for one that HandleUpload allows
	writeTime       = 5 * time.Minute
	idleTime        = 2 * time.Minute
)

// Mux is the door and what is behind it.
type Mux struct {
	control *access.Control
	logger  hclog.Logger
	mux     *http.ServeMux
}

// New returns a door that opens nothing before something is mounted. A nil
// logger logs nothing.
func New(control *access.Control, logger hclog.Logger) *Mux {
	if logger == nil {
		logger = hclog.NewNullLogger()
	}
	return &Mux{control: control, logger: logger, mux: http.NewServeMux()}
}

// Handle mounts h under a pattern as http.ServeMux has them, for callers whose
// role is at least min. NoRole lets everybody in, also without credentials. h
// finds who calls with identity.CallerFrom; the credentials themselves are gone.
func (m *Mux) Handle(pattern string, min identity.OperatorRole, h http.Handler) {
	m.mux.Handle(pattern, &entrance{m, min, mostBody, readTime, h})
}

// HandleUpload is Handle for bodies of up to most bytes, which may take their
// time.
func (m *Mux) HandleUpload(pattern string, min identity.OperatorRole, most int64, h http.Handler) {
	m.mux.Handle(pattern, &entrance{m, min, most, uploadTime, h})
}

// ServeHTTP answers one request.
func (m *Mux) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	if _, pattern := m.mux.Handler(r); pattern == "" {
		Error(w, http.StatusNotFound, fmt.Errorf("there is nothing at %s; see /openapi.json", r.URL.Path))
		return
	}
	m.mux.ServeHTTP(w, r)
}

// Serve answers what comes in at l until ctx ends, and lets what is under way
// end for up to grace.
func (m *Mux) Serve(ctx context.Context, l net.Listener, t *tls.Config, grace time.Duration) error {
	s := &http.Server{
		Handler:           m,
		TLSConfig:         t,
		MaxHeaderBytes:    mostHeader,
		ReadHeaderTimeout: handshakeTime,
		IdleTimeout:       idleTime,
		ErrorLog:          m.logger.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 32, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10},
	}
	done := make(chan error, 1) // what Shutdown has to say
	stop := context.AfterFunc(ctx, func() {
		hard, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		err := s.Shutdown(hard)
		if errors.Is(err, context.DeadlineExceeded) {
			err = s.Close()
		}
		done <- err
	})
	err := s.ServeTLS(netutil.LimitListener(l, mostConnections), "", "")
	if !stop() {
		if failed := <-done; failed != nil {
			return fmt.Errorf("stop: %w", failed)
		}
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Error answers with a code and what is wrong, as the REST calls do.
func Error(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// A client that has gone needs no answer.
	_ = json.NewEncoder(w).Encode(map[string]any{"code": grpcCode(code), "message": err.Error(), "details": []any{}})
}

// grpcCode returns the number of the gRPC code that a REST call would have
// beside an HTTP code.
func grpcCode(code int) int {
	switch code {
	case http.StatusUnauthorized:
		return 16
	case http.StatusForbidden:
		return 7
	case http.StatusNotFound:
		return 5
	case http.StatusTooManyRequests:
		return 8
	case http.StatusServiceUnavailable:
		return 14
	case http.StatusInternalServerError:
		return 13
	default:
		return 3 // INVALID_ARGUMENT
	}
}

// entrance is what stands before one handler.
type entrance struct {
	*Mux
	min  identity.OperatorRole
	most int64
	time time.Duration
	next http.Handler
}

// ServeHTTP lets a request in or not.
func (e *entrance) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	seen := &statusWriter{ResponseWriter: w}
	var who identity.Caller
	defer func() {
		p := recover()
		if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // a panic's value, compared as net/http does
			e.logger.Error("call panicked", "method", r.Pattern, "operator", who.Name, "panic", p, "stack", string(debug.Stack()))
			if seen.code == 0 {
				Error(seen, http.StatusInternalServerError, errors.New("internal error; the controller's log has more"))
			}
		}
		e.logger.Debug("call", "method", r.Pattern, "operator", who.Name, "address", who.Address, "code", seen.code, "took", time.Since(began))
		if p == http.ErrAbortHandler { //nolint:errorlint // likewise
			panic(p)
		}
	}()
	// Deadlines that the connection can't have leave those of the server.
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(began.Add(e.time))
	_ = c.SetWriteDeadline(began.Add(e.time + writeTime))
	r.Body = http.MaxBytesReader(w, r.Body, e.most)

	who, err := e.admit(r)
	switch {
	case errors.Is(err, access.ErrNoCredentials):
		// Not a challenge that makes browsers ask for a password.
		seen.Header().Set("WWW-Authenticate", `Bearer realm="cakefleet"`)
		Error(seen, http.StatusUnauthorized, err)
		return
	case errors.Is(err, access.ErrTooFast):
		seen.Header().Set("Retry-After", "1")
		Error(seen, http.StatusTooManyRequests, err)
		return
	case errors.Is(err, access.ErrThrottled):
		seen.Header().Set("Retry-After", "60")
		Error(seen, http.StatusTooManyRequests, err)
		return
	case errors.Is(err, access.ErrIssuer):
		Error(seen, http.StatusServiceUnavailable, err)
		return
	case err != nil:
		Error(seen, http.StatusForbidden, err)
		return
	case who.Role < e.min:
		Error(seen, http.StatusForbidden, fmt.Errorf("%s is %s here; this is for an %s", who.Name, who.Role, e.min))
		return
	}
	r = r.WithContext(identity.WithCaller(r.Context(), who))
	r.Header.Del("Authorization")
	e.next.ServeHTTP(seen, r)
}

func (e *entrance) admit(r *http.Request) (identity.Caller, error) {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	who, err := e.control.Admit(access.Credentials{TLS: r.TLS, Authorization: r.Header.Get("Authorization"), Address: host})
	if e.min == identity.NoRole && errors.Is(err, access.ErrNoCredentials) {
		return identity.Caller{Address: host}, nil
	}
	return who, err
}

// statusWriter remembers the code of the answer.
type statusWriter struct {
	http.ResponseWriter
	code int
}

// WriteHeader sends the code.
func (w *statusWriter) WriteHeader(code int) {
	if w.code == 0 {
		w.code = code
	}
	w.ResponseWriter.WriteHeader(code)
}

// Write sends what was not sent yet of the header, and b.
func (w *statusWriter) Write(b []byte) (int, error) {
	if w.code == 0 {
		w.code = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap gives http.ResponseController what it needs.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush is for handlers that ask for it without a controller.
func (w *statusWriter) Flush() {
	// One that can't be flushed sends when it is full.
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}
