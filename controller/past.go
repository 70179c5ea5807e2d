package controller

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/promapi"
	"github.com/cakefleet/cakefleet/controller/query"
)

// past is what answers questions about the past. Both are nil if nothing does.
type past struct {
	source     query.Source
	prometheus http.Handler
}

// past returns what answers: the history of this controller, or a server that
// all controllers write theirs to.
func (c *Controller) past(h *history.History) (p past, err error) {
	if c.config.QueryURL != "" {
		base, err := queryURL(c.config.QueryURL)
		if err != nil {
			return p, err
		}
		p.prometheus = promapi.Forward(base, history.Metrics(), nil)
		p.source, err = query.There(base, nil)
		return p, err
	}
	if h == nil {
		return past{}, nil
	}
	// What a query does wrong is told to who asks.
	logger := slog.New(slog.NewTextHandler(c.logger.Named("query").StandardWriter(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn}), &slog.HandlerOptions{Level: slog.LevelError}))
	engine := promapi.NewEngine(0, 0, logger, nil)
	p.source = query.Here(engine, h)
	p.prometheus = promapi.New(promapi.Config{Data: h, Engine: engine, Metrics: history.Metrics(), Version: c.config.Version, Logger: logger})
	return p, nil
}

// queryURL reads the address of a server. Its errors don't show a password.
func queryURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, errors.New("query URL: can't be read as one")
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.RawQuery != "", u.Fragment != "":
		return nil, fmt.Errorf("query URL %q: must be http://HOST or https://HOST, with the path up to where /api/v1 begins", u.Redacted())
	default:
		return u, nil
	}
}
