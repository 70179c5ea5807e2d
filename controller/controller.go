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
	"golang.org/x/net/netutil"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/settle"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// stopTime is how long calls may go on after the end was asked for.
const stopTime = 5 * time.Second

// mostOperators is how many connections the operators' gRPC door has at once.
const mostOperators = 1000

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

	files, err := c.authorities(time.Now())
	if err != nil {
		return err
	}
	credentials, err := filepath.Abs(filepath.Join(c.config.DataDir, "operator.pem"))
	if err != nil {
		return fmt.Errorf("data directory: %w", err)
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

	var people net.Listener
	if c.config.ListenHTTP != "" {
		if people, err = net.Listen("tcp", c.config.ListenHTTP); err != nil {
			return fmt.Errorf("listen for HTTP: %w", err)
		}
		defer func() { _ = people.Close() }() // likewise
	}

	var admin net.Listener
	if c.config.ListenAdmin != "" {
		if admin, err = net.Listen("tcp", c.config.ListenAdmin); err != nil {
			return fmt.Errorf("listen for metrics: %w", err)
		}
		defer func() { _ = admin.Close() }() // likewise
	}

	var peers net.Listener
	if len(c.config.EtcdEndpoints) > 0 {
		if peers, err = net.Listen("tcp", c.config.ListenPeers); err != nil {
			return fmt.Errorf("listen for other controllers: %w", err)
		}
		defer func() { _ = peers.Close() }() // likewise
	}

	st, err := c.open(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	trust, err := files.claim(ctx, st)
	if err != nil {
		return err
	}
	// Not before it is sure that this start lets in who has the file.
	wrote, err := trust.Set().EnsureOperator(credentials, firstOperator, time.Now())
	if err != nil {
		return err
	}

	s, err := c.servers(st, trust, people, admin, peers)
	if err != nil {
		return err
	}
	st.OnChange(files.tell)
	s.follow = func(ctx context.Context) {
		files.follow(ctx, st, trust, func() { c.refresh(ctx, st, s, trust, credentials) })
	}
	if s.admin, err = firstAdmin(st, credentials, wrote); err != nil {
		return err
	}
	ready := Ready{Agents: agents.Addr(), Operators: operators.Addr(), Credentials: credentials, NewFile: wrote}
	if people != nil {
		ready.HTTP = people.Addr()
	}
	if admin != nil {
		ready.Admin = admin.Addr()
	}
	c.logger.Info("controller started", "agents", ready.Agents, "operators", ready.Operators, "http", ready.HTTP, "admin", ready.Admin)
	c.config.Ready(ready)
	err = s.run(ctx, st, agents, operators)
	c.logger.Info("controller stopped")
	return err
}

// refresh tells who has to know that the fleet's authorities have changed: the
// sessions, and the first operator's file.
func (c *Controller) refresh(ctx context.Context, st *store.Store, s *servers, trust *identity.Trust, credentials string) {
	s.sessions.WakeAll()
	_, err := trust.Set().RenewOperator(credentials, firstOperator, time.Now(), func(text []byte) error {
		let, err := adminWith(st, credentials, text, true)
		if err != nil {
			return err
		}
		return let(ctx)
	})
	if err != nil {
		c.logger.Error("the first operator's credentials are of the authority before", "file", credentials, "error", err)
	}
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

func (c *Controller) open(ctx context.Context) (*store.Store, error) {
	t, err := c.config.etcdTLS()
	if err != nil {
		return nil, err
	}
	return store.OpenEtcd(ctx, store.Config{
		DataDir:   c.config.DataDir,
		Endpoints: c.config.EtcdEndpoints,
		TLS:       t,
		Quota:     c.config.EtcdQuota,
		Between:   c.config.BetweenStore,

		AuditAge:     c.config.AuditAge,
		AuditEntries: c.config.AuditEntries,

		Logger: c.logger.Named("store"),
	})
}

// servers are the two doors and what has to end with them.
type servers struct {
	agents    *door.Server
	operators *grpc.Server
	sessions  *api.SessionService
	web       *webDoor
	elections *lead.Elections
	settler   *settle.Settler
	conductor *conduct.Conductor
	members   *lead.Members
	peers     peersDoor
	watched   *watched

	certificates func() []identity.Certificate // that it lives by
	follow       func(context.Context)         // keeps the authorities what the store has
	logger       hclog.Logger
	admin        func(context.Context) error // lets the first operator in
	history      *history.History            // nil: none is kept
}

func (c *Controller) servers(st *store.Store, trust *identity.Trust, people, admin, peers net.Listener) (*servers, error) {
	hub, table := fleet.NewHub(), telemetry.New(telemetry.Config{Interval: c.config.ReportInterval, Labels: c.config.RollupLabels, Most: c.config.RollupGroups})
	s := &servers{}
	sessions := api.NewSessionService(st, hub, table, api.SessionConfig{
		Interval: c.config.ReportInterval, MaxReports: c.config.MaxReports, MaxAge: c.config.MaxSessionAge, Rate: func() float64 { return s.agents.Rate() },
		Probe: plan.Probe{Host: c.config.ProbeHost, Interval: c.config.ProbeInterval}, Trust: trust,
	}, c.logger.Named("session"))
	st.OnChange(sessions.Changed)
	settler := settle.New(st, c.logger.Named("settle"))
	st.OnChange(settler.Changed)
	leases, err := st.Leases()
	if err != nil {
		return nil, err
	}

	agentsTLS, err := trust.AgentsDoor()
	if err != nil {
		return nil, err
	}
	operatorsTLS, err := trust.Door(func(s *identity.Set) (*tls.Config, error) { return s.OperatorsTLS() }, "h2")
	if err != nil {
		return nil, err
	}
	control := access.New(st)
	if err := control.UseOIDC(c.config.OIDC, c.logger.Named("oidc")); err != nil {
		return nil, err
	}
	address := c.config.ListenAgents
	if peers != nil {
		if address, err = c.advertise(peers.Addr()); err != nil {
			return nil, err
		}
	}
	self := lead.Member{ID: lead.NewID(), Address: address, Version: c.config.Version, Started: time.Now().UTC()}
	members := lead.NewMembers(leases, self, 0, c.logger.Named("members"))
	asks := peersDoor{listen: peers}
	others, err := asks.prepare(trust, members)
	if err != nil {
		return nil, err
	}
	conductor := conduct.New(st, hub, others, c.logger.Named("rollout"))
	st.OnChange(conductor.Changed)
	table.OnCount(conductor.Counted)
	calls := newCalls()
	*s = servers{
		members: members,
		agents: door.New(door.Config{
			TLS: agentsTLS, Method: api.SessionMethod, Open: sessions.OpenSession,
			Unary: calls.around(api.AgentsDoor(c.logger.Named("agents"))), Logger: c.logger.Named("agents"), Limits: c.config.AgentLimits,
		}),
		operators: grpc.NewServer(append(append(operatorsOptions(operatorsTLS), calls.options()...), api.OperatorsDoor(control, c.config.ViewerLabels, c.logger.Named("operators"))...)...),
		sessions:  sessions,
		elections: lead.New(leases, lead.Config{Name: self.ID, Logger: c.logger.Named("lead")}),
		settler:   settler,
		conductor: conductor,
		peers:     asks,
		logger:    c.logger,
	}
	if s.history, err = c.history(table); err != nil {
		return nil, err
	}
	past, err := c.past(s.history)
	if err != nil {
		return nil, err
	}
	enrollment := api.NewEnrollmentService(st, trust, c.logger.Named("enrollment"))
	api.RegisterAgents(s.agents, enrollment)
	services := api.Services{
		Plans:       api.NewPlanService(st),
		Subscribers: api.NewSubscriberService(st),
		Routers:     api.NewRouterService(st, hub),
		Telemetry:   api.NewTelemetryService(st, hub, table, past.source),
		Tokens:      api.NewTokenService(st, trust),
		Joins:       api.NewJoinService(st, enrollment),
		Schedules:   api.NewScheduleService(st),
		Admin:       api.NewAdminService(st, hub, members),
		Operators:   api.NewOperatorService(st, trust),
		Audit:       api.NewAuditService(st),
		Rollouts:    api.NewRolloutService(st, hub, conductor),
	}
	s.peers.open(services, sessions)
	// Both doors of operators have the same services.
	register := func(r grpc.ServiceRegistrar) {
		api.RegisterOperators(r, services)
	}
	register(s.operators)
	if s.web, err = c.web(people, control, trust, calls, past, register); err != nil {
		return nil, err
	}
	s.certificates = func() []identity.Certificate {
		all := trust.Set().Certificates()
		if c.config.HTTPCert != "" && people != nil {
			all = append(all, identity.HTTPSDoor(s.web.tls.Certificates[0].Leaf, c.config.HTTPCert))
		}
		return all
	}
	services.Admin.Trust(s.certificates)
	s.watched = c.watch(admin, st, s.operators, calls, newMetrics(c.config.Version, st, hub, s.agents, table, s.history))
	return s, nil
}

// history returns what keeps the history; nil if it is not wanted.
func (c *Controller) history(table *telemetry.Table) (*history.History, error) {
	h := c.config.History
	if h.Retention == 0 {
		return nil, nil
	}
	h.Dir, h.Table, h.Logger = history.Dir(c.config.DataDir), table, c.logger.Named("history")
	if h.Controller == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "controller"
		}
		_, port, _ := net.SplitHostPort(c.config.ListenAgents) // the configuration was checked
		h.Controller = net.JoinHostPort(host, port)            // the same after a restart
	}
	return history.New(h)
}

func operatorsOptions(t *tls.Config) []grpc.ServerOption {
	return append(operatorsLimits(),
		grpc.Creds(credentials.NewTLS(t)),
		grpc.ConnectionTimeout(10*time.Second),
		grpc.MaxConcurrentStreams(64),
		grpc.MaxHeaderListSize(16<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)
}

// operatorsLimits are for calls of operators, whatever door they come through.
func operatorsLimits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(1 << 20), // files come in pieces
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
	if err := s.admin(ctx); err != nil && ctx.Err() == nil {
		// Who was known before still is; a full store must not keep agents out.
		s.logger.Error("let the first operator in", "operator", firstOperator, "error", err)
	}
	g.Go(func() error { return served("metrics", s.watched.serve(keep)) })
	g.Go(func() error { return s.sessions.Run(ctx) })
	g.Go(func() error { return s.members.Run(ctx) })
	g.Go(func() error { return s.peers.serve(ctx) })
	g.Go(func() error { return s.elections.Run(ctx, settle.Work, s.settler.Run) })
	if s.history != nil {
		g.Go(func() error { return s.history.Run(keep) }) // the last step is written when no report comes any more
	}
	g.Go(func() error {
		s.follow(ctx)
		return nil
	})
	g.Go(func() error {
		watchCertificates(ctx, s.certificates, s.logger)
		return nil
	})
	g.Go(func() error { return s.elections.Run(ctx, conduct.Work, s.conductor.Run) })
	g.Go(func() error { return served("agents", s.agents.Serve(agents)) })
	g.Go(func() error {
		return served("operators", s.operators.Serve(netutil.LimitListener(operators, mostOperators)))
	})
	g.Go(func() error { return served("rest", s.web.rest.Serve()) })
	g.Go(func() error { return served("HTTP", s.web.serve(ctx)) })
	s.watched.opened()
	g.Go(func() error {
		<-ctx.Done()
		s.watched.closing()
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
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	defer context.AfterFunc(ctx, s.operators.Stop)()
	var g errgroup.Group
	g.Go(func() error {
		s.agents.Drain(ctx)
		s.agents.Stop()
		return nil
	})
	g.Go(func() error {
		s.operators.GracefulStop()
		return nil
	})
	_ = g.Wait() // no error comes from them
	s.sessions.Wait()
}
