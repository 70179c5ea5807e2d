package controller

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/rollup"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Config says where the controller keeps its state and where it listens.
type Config struct {
	DataDir         string // made if it doesn't exist
	ListenAgents    string // host:port of the agents' door
	ListenOperators string // host:port of the operators' door
	ListenHTTP      string // host:port of the HTTPS door; empty: none
	ListenAdmin     string // host:port of the door for metrics, health and profiles; empty: none
	HTTPCert        string // PEM files of the HTTPS door's certificate; both empty: one of the fleet's authority
	HTTPKey         string
	Version         string // of this program

	ViewerLabels []string // labels of subscribers that viewers see; the others are personal

	OIDC access.OIDC // whose tokens operators may come with; without an issuer nobody's

	AuditAge     time.Duration // how long the audit log goes back
	AuditEntries int           // that it has at most

	EtcdEndpoints  []string // of an etcd cluster; empty: etcd runs inside
	EtcdCACert     string   // PEM files for TLS to the endpoints; all empty: none
	EtcdCert       string
	EtcdKey        string
	ListenPeers    string // host:port of the door for other controllers; not looked at if etcd runs inside
	AdvertisePeers string // host:port at which they reach it; empty: by the way to etcd
	EtcdQuota      int64  // bytes that the embedded etcd may hold; 0: 2 GiB

	// BetweenStore is for tests, as Between of store.Config.
	BetweenStore func(store.Leaser) store.Leaser

	CACert string // PEM files of an authority that exists; both empty: one of our own in DataDir
	CAKey  string
	// ReplaceAuthority makes this controller's authority the fleet's although the
	// store is of a fleet with another one. Every router has to join again.
	ReplaceAuthority bool

	ReportInterval time.Duration // between two reports of an agent
	MaxReports     float64       // of all agents a second, above which each reports less often; 0: any
	MaxSessionAge  time.Duration // after which agents are asked to open another session; 0: never
	AgentLimits    door.Limits   // zero fields: as door.DefaultLimits has it
	RollupLabels   []string      // labels of subscribers that telemetry is summed up by, beside plan, site, model and version
	RollupGroups   int           // values of each of them; what comes beyond is summed up together. 0: 1000
	// ProbeHost is what routers measure the delay to unless their subscriber has
	// the label plan.ProbeLabel; empty: nothing.
	ProbeHost     string
	ProbeInterval time.Duration // between two echoes

	Logger hclog.Logger // nil: none

	History  history.Config // what of it operators choose; without retention nothing is kept
	QueryURL string         // of a server that has the Prometheus HTTP API, which is asked instead; empty: none

	// Ready is called once when both doors are open, and holds them up until it
	// returns; nil: not called.
	Ready func(Ready)
}

// Ready tells where the controller is to be reached.
type Ready struct {
	Agents      net.Addr
	Operators   net.Addr
	HTTP        net.Addr // nil: there is none
	Admin       net.Addr // nil: there is none
	Credentials string   // file with the credentials of the first operator
	NewFile     bool     // whether this start wrote it
}

// DefaultConfig returns what the controller does without being told.
func DefaultConfig() Config {
	return Config{
		DataDir:         "/var/lib/cakefleet",
		ListenAgents:    ":8443",
		ListenOperators: "127.0.0.1:8444",
		ListenHTTP:      "127.0.0.1:8445",
		ListenAdmin:     "127.0.0.1:8446",
		ListenPeers:     ":8447",
		ReportInterval:  10 * time.Second,
		ProbeInterval:   10 * time.Second,
		History:         history.Config{Retention: history.DefaultRetention, Routers: history.DefaultRouters},
		MaxReports:      5000,
		MaxSessionAge:   12 * time.Hour,
		ViewerLabels:    api.DefaultViewerLabels,
		OIDC:            access.OIDC{NameClaim: access.DefaultNameClaim, RoleClaim: access.DefaultRoleClaim},
		AuditAge:        365 * 24 * time.Hour,
		AuditEntries:    100_000,
	}
}

// Bounds of times.
const (
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour

	minAge = time.Minute

	// Of the embedded etcd, bytes: below there is no room for a fleet, above
	// etcd gets slow.
	minQuota = 16 << 20
	maxQuota = 8 << 30
)

func (c Config) validate() error {
	switch {
	case c.DataDir == "":
		return errors.New("data directory is missing")
	case (c.CACert == "") != (c.CAKey == ""):
		return errors.New("authority: certificate and key must be given together")
	case (c.EtcdCert == "") != (c.EtcdKey == ""):
		return errors.New("etcd: certificate and key must be given together")
	case len(c.EtcdEndpoints) == 0 && (c.EtcdCACert != "" || c.EtcdCert != ""):
		return errors.New("etcd: certificates are for endpoints, and none is given")
	case c.EtcdQuota != 0 && (c.EtcdQuota < minQuota || c.EtcdQuota > maxQuota):
		return fmt.Errorf("etcd: quota of %d bytes: must be %d to %d", c.EtcdQuota, minQuota, int64(maxQuota))
	case c.EtcdQuota != 0 && len(c.EtcdEndpoints) > 0:
		return errors.New("etcd: the quota is of the etcd inside; that of a cluster is its own --quota-backend-bytes")
	case (c.HTTPCert == "") != (c.HTTPKey == ""):
		return errors.New("certificate for HTTP: certificate and key must be given together")
	case c.ProbeInterval < time.Second || c.ProbeInterval > time.Hour:
		return fmt.Errorf("probe interval %v: must be 1s to 1h", c.ProbeInterval)
	case c.MaxReports < 0:
		return fmt.Errorf("reports per second %g: must not be negative", c.MaxReports)
	case c.MaxSessionAge < 0 || c.MaxSessionAge > 0 && c.MaxSessionAge < minAge:
		return fmt.Errorf("session age %v: must be 0 or at least %v", c.MaxSessionAge, minAge)
	case c.AgentLimits.Rate < 0 || c.AgentLimits.Connections < 0:
		return errors.New("limits of agents: must not be negative")
	case c.AuditAge < time.Hour:
		return fmt.Errorf("audit age %v: must be an hour or more", c.AuditAge)
	case c.AuditEntries < 100:
		return fmt.Errorf("audit entries %d: must be 100 or more", c.AuditEntries)
	case c.ReportInterval < minInterval || c.ReportInterval > maxInterval:
		return fmt.Errorf("report interval %v: must be %v to %v", c.ReportInterval, minInterval, maxInterval)
	}
	if err := c.validateRollups(); err != nil {
		return err
	}
	if err := c.OIDC.Validate(); err != nil {
		return err
	}
	for _, door := range []struct{ name, address string }{{"agents", c.ListenAgents}, {"operators", c.ListenOperators}, {"HTTP", c.ListenHTTP}, {"metrics", c.ListenAdmin}, {"other controllers", c.ListenPeers}} {
		if door.address == "" && (door.name == "HTTP" || door.name == "metrics") {
			continue
		}
		if _, _, err := net.SplitHostPort(door.address); err != nil {
			return fmt.Errorf("address for %s %q: %w", door.name, door.address, err)
		}
	}
	return nil
}

func (c Config) validateRollups() error {
	for _, name := range c.RollupLabels {
		if err := plan.ValidateLabel(name, ""); err != nil {
			return fmt.Errorf("roll-ups: %w", err)
		}
		if slices.Contains([]string{rollup.ByAll, rollup.ByPlan, rollup.BySite, rollup.ByModel, rollup.ByVersion}, name) {
			return fmt.Errorf("roll-ups: label %s is summed up by already", name)
		}
	}
	if c.History.Retention != 0 {
		if _, err := history.New(c.History); err != nil {
			return err
		}
	}
	if c.QueryURL != "" {
		if _, err := queryURL(c.QueryURL); err != nil {
			return err
		}
	}
	if c.RollupGroups < 0 {
		return fmt.Errorf("roll-ups: %d groups: must not be negative", c.RollupGroups)
	}
	return nil
}

// etcdTLS returns how to speak to the endpoints; nil without TLS.
func (c Config) etcdTLS() (*tls.Config, error) {
	if c.EtcdCACert == "" && c.EtcdCert == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.EtcdCACert != "" {
		text, err := os.ReadFile(c.EtcdCACert)
		if err != nil {
			return nil, fmt.Errorf("etcd authority: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("etcd authority %s: has no PEM certificate", c.EtcdCACert)
		}
	}
	if c.EtcdCert != "" {
		pair, err := tls.LoadX509KeyPair(c.EtcdCert, c.EtcdKey)
		if err != nil {
			return nil, fmt.Errorf("etcd certificate: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}
