// The cakefleet-controller program runs one controller of a fleet.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller"
)

// version is set by the linker.
var version = "dev"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cakefleet-controller:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	c := controller.DefaultConfig()
	var (
		endpoints, level    string
		asJSON, onlyVersion bool
	)
	f := flag.NewFlagSet("cakefleet-controller", flag.ExitOnError)
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "`folder` for the fleet's authority and the embedded etcd")
	f.StringVar(&c.ListenAgents, "listen-agents", c.ListenAgents, "`address` that agents connect to")
	f.StringVar(&c.ListenOperators, "listen-operators", c.ListenOperators, "`address` that cakefleetctl connects to")
	f.StringVar(&endpoints, "etcd-endpoints", "", "`URLs` of an etcd cluster, separated by commas; without it etcd runs inside")
	f.StringVar(&c.EtcdCACert, "etcd-cacert", "", "PEM `file` with the authority of the etcd cluster")
	f.StringVar(&c.EtcdCert, "etcd-cert", "", "PEM `file` with the certificate for the etcd cluster")
	f.StringVar(&c.EtcdKey, "etcd-key", "", "PEM `file` with the key of that certificate")
	f.StringVar(&c.CACert, "ca-cert", "", "PEM `file` with an authority for the fleet; without it one is made in the data folder")
	f.StringVar(&c.CAKey, "ca-key", "", "PEM `file` with the key of that authority")
	f.DurationVar(&c.ReportInterval, "report-interval", c.ReportInterval, "`time` between two reports of an agent")
	f.StringVar(&level, "log-level", "info", "least `level` that is logged: trace, debug, info, warn, error")
	f.BoolVar(&asJSON, "log-json", false, "log as JSON lines")
	f.BoolVar(&onlyVersion, "version", false, "print the version and end")
	if err := f.Parse(args); err != nil {
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
	for e := range strings.SplitSeq(endpoints, ",") {
		if e = strings.TrimSpace(e); e != "" {
			c.EtcdEndpoints = append(c.EtcdEndpoints, e)
		}
	}
	c.Logger = hclog.New(&hclog.LoggerOptions{Name: "controller", Level: logLevel, JSONFormat: asJSON, Output: os.Stderr})
	c.Ready = welcome

	ctl, err := controller.New(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return ctl.Run(ctx)
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
