package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"

	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/promapi"
	"github.com/cakefleet/cakefleet/controller/web"
)

// webDoor is the HTTPS door and the REST calls behind it.
type webDoor struct {
	mux    *web.Mux
	rest   *api.REST
	tls    *tls.Config
	listen net.Listener // nil: the door is not wanted
}

// web returns the HTTPS door. register registers the services of operators.
func (c *Controller) web(l net.Listener, control *access.Control, trust *identity.Trust, calls *calls, past past, register func(grpc.ServiceRegistrar)) (*webDoor, error) {
	logger := c.logger.Named("web")
	rest, err := api.NewREST(register, append(append(operatorsLimits(), calls.options()...), api.InsideDoor(c.config.ViewerLabels, logger)...)...)
	if err != nil {
		return nil, err
	}
	d := &webDoor{mux: web.New(control, logger), rest: rest, listen: l}
	if d.tls, err = c.webTLS(trust); err != nil {
		return nil, errors.Join(err, rest.Close())
	}
	openAPI, err := api.ServeOpenAPI(c.config.Version)
	if err != nil {
		return nil, errors.Join(err, rest.Close())
	}
	// /v1/ is the REST calls, each of which says who may do it.
	d.mux.Handle("/v1/", identity.Viewer, rest)
	d.mux.HandleUpload(api.ImportPattern, identity.Viewer, api.MostUpload, http.HandlerFunc(rest.Import))
	if past.prometheus != nil {
		d.mux.Handle(promapi.Prefix+"/", identity.Viewer, past.prometheus)
	}
	d.mux.Handle("GET /openapi.json", identity.NoRole, openAPI)
	return d, nil
}

// webTLS returns what the HTTPS door shows: the certificate that the operator
// has given, or one of the fleet's authority.
func (c *Controller) webTLS(trust *identity.Trust) (*tls.Config, error) {
	names := []string{"localhost", "127.0.0.1", "::1"}
	if host, err := os.Hostname(); err == nil && host != "localhost" {
		names = append(names, host)
	}
	if host, _, err := net.SplitHostPort(c.config.ListenHTTP); err == nil && host != "" {
		names = append(names, host)
	}
	own := func(s *identity.Set) (*tls.Config, error) { return s.OperatorsTLS(names...) }
	if c.config.HTTPCert == "" {
		return trust.Door(own, "h2", "http/1.1")
	}
	pair, err := tls.LoadX509KeyPair(c.config.HTTPCert, c.config.HTTPKey)
	if err != nil {
		return nil, fmt.Errorf("certificate for HTTP: %w", err)
	}
	return trust.Door(func(s *identity.Set) (*tls.Config, error) {
		t, err := own(s)
		if err != nil {
			return nil, err
		}
		t.Certificates = []tls.Certificate{pair}
		t.CurvePreferences = nil // a browser may know more, and a certificate of another authority another curve
		return t, nil
	}, "h2", "http/1.1")
}

// serve answers until ctx ends, and ends the REST calls after those who use
// them.
func (d *webDoor) serve(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, d.rest.Close()) }()
	if d.listen == nil {
		<-ctx.Done()
		return nil
	}
	return d.mux.Serve(ctx, d.listen, d.tls, stopTime)
}
