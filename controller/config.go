package controller

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Config says where the controller keeps its state and where it listens.
type Config struct {
	DataDir         string // made if it doesn't exist
	ListenAgents    string // host:port of the agents' door
	ListenOperators string // host:port of the operators' door

	EtcdEndpoints []string // of an etcd cluster; empty: etcd runs inside
	EtcdCACert    string   // PEM files for TLS to the endpoints; all empty: none
	EtcdCert      string
	EtcdKey       string

	CACert string // PEM files of an authority that exists; both empty: one of our own in DataDir
	CAKey  string

	ReportInterval time.Duration // between two reports of an agent
	Logger         hclog.Logger  // nil: none

	// Ready is called once when both doors are open, and holds them up until it
	// returns; nil: not called.
	Ready func(Ready)
}

// Ready tells where the controller is to be reached.
type Ready struct {
	Agents      net.Addr
	Operators   net.Addr
	Credentials string // file with the credentials of the first operator
	NewFile     bool   // whether this start wrote it
}

// DefaultConfig returns what the controller does without being told.
func DefaultConfig() Config {
	return Config{
		DataDir:         "/var/lib/cakefleet",
		ListenAgents:    ":8443",
		ListenOperators: "127.0.0.1:8444",
		ReportInterval:  10 * time.Second,
	}
}

// Bounds of ReportInterval.
const (
	minInterval = 100 * time.Millisecond
	maxInterval = time.Hour
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
	case c.ReportInterval < minInterval || c.ReportInterval > maxInterval:
		return fmt.Errorf("report interval %v: must be %v to %v", c.ReportInterval, minInterval, maxInterval)
	}
	for _, door := range []struct{ name, address string }{{"agents", c.ListenAgents}, {"operators", c.ListenOperators}} {
		if _, _, err := net.SplitHostPort(door.address); err != nil {
			return fmt.Errorf("address for %s %q: %w", door.name, door.address, err)
		}
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
