// The cakefleet-controller program runs one controller of a fleet.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller"
)

// gcPercent is GOGC unless the environment says something else: a quarter less
// memory for each session than at 100, for twice as many collections.
const gcPercent = 50

// version is set by the linker.
var version = "dev"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cakefleet-controller:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) > 0 && args[0] == "restore" {
		return restore(args[1:])
	}
	c := controller.DefaultConfig()
	var (
		endpoints, labels, level, seen string
		asJSON, onlyVersion            bool
	)
	f := flag.NewFlagSet("cakefleet-controller", flag.ContinueOnError)
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "`folder` for the fleet's authority and the embedded etcd")
	f.StringVar(&c.ListenAgents, "listen-agents", c.ListenAgents, "`address` that agents connect to")
	f.StringVar(&c.ListenOperators, "listen-operators", c.ListenOperators, "`address` that cakefleetctl connects to")
	f.StringVar(&c.ListenHTTP, "listen-http", c.ListenHTTP, "`address` of the HTTPS door for REST, Grafana and people; empty for none")
	f.StringVar(&c.ListenAdmin, "listen-admin", c.ListenAdmin, "`address` for metrics, health, profiles and gRPC reflection, without credentials; empty for none")
	f.StringVar(&c.HTTPCert, "http-cert", "", "PEM `file` with a certificate for the HTTPS door; without it the fleet's authority makes one")
	f.StringVar(&c.HTTPKey, "http-key", "", "PEM `file` with the key of that certificate")
	f.StringVar(&endpoints, "etcd-endpoints", "", "`URLs` of an etcd cluster, separated by commas; without it etcd runs inside")
	f.StringVar(&c.EtcdCACert, "etcd-cacert", "", "PEM `file` with the authority of the etcd cluster")
	f.StringVar(&c.EtcdCert, "etcd-cert", "", "PEM `file` with the certificate for the etcd cluster")
	f.StringVar(&c.EtcdKey, "etcd-key", "", "PEM `file` with the key of that certificate")
	f.StringVar(&c.ListenPeers, "listen-peers", c.ListenPeers, "`address` that other controllers ask this one at, with --etcd-endpoints")
	f.StringVar(&c.AdvertisePeers, "advertise-peers", "", "`address` of that door as others see it; without it the one from which etcd is reached")
	f.Func("etcd-quota", "`bytes` that the etcd inside may hold, such as 4GiB; without it 2GiB", func(s string) (err error) {
		c.EtcdQuota, err = parseSize(s)
		return err
	})
	f.StringVar(&c.CACert, "ca-cert", "", "PEM `file` with an authority for the fleet, the same for all of its controllers; without it one is made in the data folder")
	f.StringVar(&c.CAKey, "ca-key", "", "PEM `file` with the key of that authority")
	f.BoolVar(&c.ReplaceAuthority, "replace-authority", false, "make this controller's authority the fleet's in place of another one; every router has to join again")
	f.StringVar(&seen, "viewer-labels", strings.Join(c.ViewerLabels, ","), "`labels` of subscribers that viewers see, separated by commas; all others are hidden from them")
	oidcFlags(f, &c.OIDC)
	f.DurationVar(&c.AuditAge, "audit-age", c.AuditAge, "how `long` the audit log goes back")
	f.IntVar(&c.AuditEntries, "audit-entries", c.AuditEntries, "`number` of changes that the audit log has at most")
	f.DurationVar(&c.ReportInterval, "report-interval", c.ReportInterval, "`time` between two reports of an agent")
	f.Float64Var(&c.MaxReports, "max-reports", c.MaxReports, "reports a second of all agents together, above which each reports less often; 0: any `number`")
	f.DurationVar(&c.MaxSessionAge, "max-session-age", c.MaxSessionAge, "`time` after which an agent is asked to open another session, so that they spread over several controllers; 0: never")
	f.Float64Var(&c.AgentLimits.Rate, "admit-rate", 0, "agents that are let in each second at most, fewer while the CPU does not keep up with their handshakes; 0: 500 for each CPU (`number`)")
	f.IntVar(&c.AgentLimits.Connections, "max-agents", 0, "connections of agents at once; 0: 200000 (`number`)")
	f.StringVar(&labels, "rollup-labels", "", "`labels` of subscribers that telemetry is summed up by, separated by commas, beside plan, site, model and version")
	f.IntVar(&c.RollupGroups, "rollup-groups", c.RollupGroups, "`number` of values of each of them; what comes beyond is summed up together as \"other\" (0: 1000)")
	f.StringVar(&c.ProbeHost, "probe-host", "", "`host` of your own network to which every router measures the delay, idle and under load; a subscriber's label probe=HOST or probe=off goes before it (default none)")
	f.DurationVar(&c.ProbeInterval, "probe-interval", c.ProbeInterval, "`time` between two echoes of a router to that host, 1s to 1h")
	readRemotes := historyFlags(f, &c.History)
	f.StringVar(&c.QueryURL, "query-url", "", "`URL` of a server with the Prometheus HTTP API that is asked about the past instead, such as where --remote-write goes; up to where /api/v1 begins")
	f.StringVar(&level, "log-level", "info", "least `level` that is logged: trace, debug, info, warn, error")
	f.BoolVar(&asJSON, "log-json", false, "log as JSON lines")
	f.BoolVar(&onlyVersion, "version", false, "print the version and end")
	if done, err := parse(f, args); done || err != nil {
		return err
	}
	if onlyVersion {
		fmt.Println("cakefleet-controller", version)
		return nil
	}
	if f.NArg() > 0 {
		return fmt.Errorf("argument %q is not understood; see --help", f.Arg(0))
	}
	logLevel := hclog.LevelFromString(level)
	if logLevel == hclog.NoLevel {
		return fmt.Errorf("log level %q: must be trace, debug, info, warn or error", level)
	}
	c.EtcdEndpoints, c.RollupLabels, c.ViewerLabels = words(endpoints), words(labels), words(seen)
	if err := readRemotes(); err != nil {
		return err
	}
	c.Logger = hclog.New(&hclog.LoggerOptions{Name: "controller", Level: logLevel, JSONFormat: asJSON, Output: os.Stderr})
	c.Ready = welcome
	c.Version = version

	// Most of the memory is what very many sessions hold for days, and little of
	// it becomes garbage: at Go's default half of the process would be room for it.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	ctl, err := controller.New(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return ctl.Run(ctx)
}

// parse reads flags. One that is wrong is told alone, as all the others would hide
// it; done is true if help was all that was asked for, and is printed.
func parse(f *flag.FlagSet, args []string) (done bool, err error) {
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	err = f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Printf("Usage of %s:\n", f.Name())
		f.SetOutput(os.Stdout)
		f.PrintDefaults()
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%w; see %s --help", err, f.Name())
	}
	return false, nil
}

// words returns what stands between commas.
func words(list string) (all []string) {
	for w := range strings.SplitSeq(list, ",") {
		if w = strings.TrimSpace(w); w != "" {
			all = append(all, w)
		}
	}
	return all
}

// welcome says what to do next when the fleet is new.
func welcome(r controller.Ready) {
	fmt.Printf("cakefleet-controller %s: agents connect to %s, operators to %s\n", version, r.Agents, r.Operators)
	if !r.NewFile {
		return
	}
	fmt.Printf(`
Your credentials are in %[1]s. Keep them like a password:
who has them rules the fleet. Copy them to where you work, and then:

  export CAKEFLEET_CREDENTIALS=%[1]s CAKEFLEET_CONTROLLER=%[2]s
  cakefleetctl plan set gold --down 115mbit --up 12mbit
  cakefleetctl subscriber set 4711 --plan gold
  cakefleetctl token create --router home-1 --subscriber 4711

The last one prints what the first router needs to join.
`, r.Credentials, r.Operators)
}
