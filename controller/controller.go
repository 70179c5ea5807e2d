// Package controller is the central part of a fleet: it keeps what operators
// ask for, tells every router what to run, and knows what each of them does.
// This package builds the parts and owns their lifetimes.
package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
)

// stopTime is how long calls may go on after the end was asked for.
const stopTime = 5 * time.Second

// firstOperator is the name in the credentials that the first start makes.
const firstOperator = "admin"

// Controller is one controller of a fleet.
type Controller struct {
	config Config
	logger hclog.Logger
}

// New returns a controller that does nothing before Run. The error names what
// is wrong in the configuration.
func New(c Config) (*Controller, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Ready == nil {
		c.Ready = func(Ready) {}
	}
	return &Controller{config: c, logger: c.Logger}, nil
}

// Run runs the controller until ctx ends, and returns nil then.
func (c *Controller) Run(ctx context.Context) (err error) {
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()

	authority, err := c.authority(time.Now())
	if err != nil {
		return err
	}
	credentials, err := filepath.Abs(filepath.Join(c.config.DataDir, "operator.pem"))
	if err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	wrote, err := authority.EnsureOperator(credentials, firstOperator, time.Now())
	if err != nil {
		return err
	}

	// Both ports before etcd, which takes its time to start: a port in use is
	// what goes wrong most often.
	agents, err := net.Listen("tcp", c.config.ListenAgents)
	if err != nil {
		return fmt.Errorf("listen for agents: %w", err)
	}
	defer func() { _ = agents.Close() }() // the server that it is given to has done so already
	operators, err := net.Listen("tcp", c.config.ListenOperators)
	if err != nil {
		return fmt.Errorf("listen for operators: %w", err)
	}
	defer func() { _ = operators.Close() }() // likewise

	st, err := c.open(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()

	s, err := c.servers(st, authority)
	if err != nil {
		return err
	}
	c.logger.Info("controller started", "agents", agents.Addr(), "operators", operators.Addr())
	c.config.Ready(Ready{Agents: agents.Addr(), Operators: operators.Addr(), Credentials: credentials, NewFile: wrote})
	err = s.run(ctx, st, agents, operators)
	c.logger.Info("controller stopped")
	return err
}

// lock makes the data directory ours as long as the process lives.
func (c *Controller) lock() (unlock func() error, err error) {
	dir := c.config.DataDir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: can't be written: %w", dir, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close() // the lock says what is wrong
		return nil, fmt.Errorf("data directory %s: another controller uses it: %w", dir, err)
	}
	return f.Close, nil
}

func (c *Controller) authority(now time.Time) (*identity.Authority, error) {
	if c.config.CACert != "" {
		return identity.Load(c.config.CACert, c.config.CAKey, now)
	}
	return identity.Open(c.config.DataDir, now)
}

func (c *Controller) open(ctx context.Context) (*store.Store, error) {
	t, err := c.config.etcdTLS()
	if err != nil {
		return nil, err
	}
	return store.OpenEtcd(ctx, store.Config{
		DataDir:   c.config.DataDir,
		Endpoints: c.config.EtcdEndpoints,
		TLS:       t,
		Logger:    c.logger.Named("store"),
	})
}

// servers are the two doors and what has to end with them.
type servers struct {
	agents, operators *grpc.Server
	sessions          *api.SessionService
}

func (c *Controller) servers(st *store.Store, authority *identity.Authority) (*servers, error) {
	hub, table := fleet.NewHub(), telemetry.New(c.config.ReportInterval)
	sessions := api.NewSessionService(st, hub, table, c.config.ReportInterval, c.logger.Named("session"))
	st.OnChange(sessions.Changed)

	agentsTLS, err := authority.AgentsTLS()
	if err != nil {
		return nil, err
	}
	operatorsTLS, err := authority.OperatorsTLS()
	if err != nil {
		return nil, err
	}
	s := &servers{
		agents:    grpc.NewServer(append(agentsOptions(agentsTLS), api.AgentsDoor(c.logger.Named("agents"))...)...),
		operators: grpc.NewServer(append(operatorsOptions(operatorsTLS), api.OperatorsDoor(c.logger.Named("operators"))...)...),
		sessions:  sessions,
	}
	api.RegisterAgents(s.agents, sessions, api.NewEnrollmentService(st, authority, c.logger.Named("enrollment")))
	api.RegisterOperators(s.operators, api.NewPlanService(st), api.NewSubscriberService(st),
		api.NewRouterService(st, hub), api.NewTelemetryService(st, hub, table), api.NewTokenService(st, authority.Pin()))
	return s, nil
}

// agentsOptions are for 100 000 connections with one calm stream each: no read
// buffer, windows that don't grow, and small messages. All write buffers are in
// use at once when a plan is changed that everybody has; a push fits in this
// size, and the usual one would hold 64 kB each until the second collection.
func agentsOptions(t *tls.Config) []grpc.ServerOption {
	const window = 64 << 10 // the least that HTTP/2 allows gRPC to set
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(t)),
		grpc.ReadBufferSize(0),
		grpc.WriteBufferSize(2 << 10),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.MaxConcurrentStreams(4),
		grpc.MaxRecvMsgSize(64 << 10),
		grpc.MaxHeaderListSize(8 << 10),
		grpc.ConnectionTimeout(30 * time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

func operatorsOptions(t *tls.Config) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(credentials.NewTLS(t)),
		grpc.ConnectionTimeout(30 * time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

// run serves until ctx ends or a part fails. The store outlives the doors, so
// that a write which is under way can end.
func (s *servers) run(ctx context.Context, st *store.Store, agents, operators net.Listener) error {
	keep, stopStore := context.WithCancel(context.WithoutCancel(ctx))
	defer stopStore()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return st.Run(keep) })
	g.Go(func() error { return served("agents", s.agents.Serve(agents)) })
	g.Go(func() error { return served("operators", s.operators.Serve(operators)) })
	g.Go(func() error {
		<-ctx.Done()
		s.stop()
		stopStore()
		return nil
	})
	return g.Wait()
}

func served(who string, err error) error {
	if err == nil || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return fmt.Errorf("serve %s: %w", who, err)
}

// stop ends the sessions and lets calls end, but not for longer than stopTime.
func (s *servers) stop() {
	s.sessions.Stop()
	hard := time.AfterFunc(stopTime, func() {
		s.agents.Stop()
		s.operators.Stop()
	})
	defer hard.Stop()
	var g errgroup.Group
	for _, server := range []*grpc.Server{s.agents, s.operators} {
		g.Go(func() error {
			server.GracefulStop()
			return nil
		})
	}
	_ = g.Wait() // no error comes from them
	s.sessions.Wait()
}
