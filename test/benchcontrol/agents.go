package main

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"math/rand/v2"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
)

// keyOf returns the key of a router, the same in every process.
func keyOf(id string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(id))
	return ed25519.NewKeyFromSeed(seed[:])
}

// agentsChild plays agents.
func agentsChild(args []string) error {
	f := flag.NewFlagSet("agents", flag.ExitOnError)
	dir := f.String("dir", "", "")
	address := f.String("address", "", "")
	from := f.Int("from", 0, "")
	count := f.Int("count", 0, "")
	source := f.Int("source", 1, "")
	if err := f.Parse(args); err != nil {
		return err
	}
	authority, err := identity.Load(filepath.Join(*dir, "ca.pem"), filepath.Join(*dir, "ca.key"), time.Now())
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.CertificatePEM())
	var t tally
	var reporting atomic.Bool
	reporting.Store(true)
	fleet := &simagent.Fleet{
		TLS:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}},
		Version: "v1.0.0", Model: "TP-Link Archer C7 v2", ReportEvery: 15 * time.Second,
	}
	local := &net.TCPAddr{IP: net.IPv4(127, 0, byte(*source>>8), byte(*source))}
	fleet.Address = func(*simagent.Agent) (string, net.Addr) { return *address, local }
	reported := make([]atomic.Uint32, *count)
	index := map[*simagent.Agent]int{}
	fleet.Hooks = simagent.Hooks{
		Began:    func(*simagent.Agent) { t.add(func(a *answer) { a.Connected++ }) },
		Answered: func(*simagent.Agent) { t.answered() },
		Report: func(a *simagent.Agent) *plan.Report {
			if !reporting.Load() {
				return nil
			}
			if reported[index[a]].Add(1) == 2 {
				t.add(func(a *answer) { a.Reported++ })
			}
			return report()
		},
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	agents := make([]*simagent.Agent, *count)
	for i := range agents {
		id := routerID(*from + i)
		key := keyOf(id)
		der, err := authority.SignRouter(key.Public().(ed25519.PublicKey), id, time.Now())
		if err != nil {
			return err
		}
		agents[i] = fleet.New(id, "4b0a9ad8-7f7c-4f0e-8c43-2f1d4bb0a001", tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key})
		index[agents[i]] = i
	}
	start := func(some []*simagent.Agent) {
		for _, a := range some {
			go a.Run(ctx) // the process ends with them
		}
	}
	half := *count / 2
	return t.serve(func(word string) {
		switch word {
		case "half":
			start(agents[:half])
		case "rest":
			start(agents[half:])
		case "quiet":
			reporting.Store(false)
		case "break":
			t.add(func(a *answer) { a.Connected = 0 })
			for _, a := range agents {
				a.Break()
			}
		}
	})
}

// report is one of a home with four tins and a few days of traffic.
func report() *plan.Report {
	direction := func(rate engine.BitsPerSecond) *engine.Stats {
		s := &engine.Stats{Config: engine.DefaultConfig(), NumTins: 4, MemoryUsed: 1 << 20, MemoryLimit: 4 << 20}
		s.Config.Rate = rate
		for i := range s.Tins[:s.NumTins] {
			tin := &s.Tins[i]
			tin.Threshold, tin.Target, tin.Interval = rate/engine.BitsPerSecond(i+1), 5*time.Millisecond, 100*time.Millisecond
			tin.Packets, tin.Bytes, tin.Drops, tin.Marks = rand.Uint64N(1<<30), rand.Uint64N(1<<40), rand.Uint64N(1<<16), rand.Uint64N(1<<16)
			for b := range 30 {
				tin.Sojourn[20+b] = rand.Uint64N(1 << 20)
			}
			s.SentBytes += tin.Bytes
			s.SentPackets += tin.Packets
		}
		return s
	}
	return &plan.Report{Down: direction(115e6), Up: direction(12e6), Agent: plan.AgentStats{ResidentBytes: 11 << 20}}
}
