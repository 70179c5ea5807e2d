// Package ctl is the operator's command line. What a command prints to
// standard output is its result; progress and what went wrong go to standard
// error. The exit status is 0 if it was done, 1 if it was refused or did not
// work out, 2 if the command line made no sense.
package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit statuses.
const (
	ExitOK     = 0
	ExitFailed = 1
	ExitUsage  = 2
)

// Defaults of the connection.
const (
	defaultController  = "127.0.0.1:8444"
	defaultCredentials = "~/.config/cakefleet/operator.pem"

	envController  = "CAKEFLEET_CONTROLLER"
	envCredentials = "CAKEFLEET_CREDENTIALS"
	envToken       = "CAKEFLEET_TOKEN"
)

// Config is the world that a command runs in.
type Config struct {
	Version        string
	Args           []string // without the program's name
	Stdout, Stderr io.Writer
	Getenv         func(string) string
	Now            func() time.Time // nil: time.Now
}

// Run runs one command and returns its exit status.
func Run(ctx context.Context, cfg Config) int {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	a := &app{cfg: cfg}
	root := a.root()
	root.SetArgs(append([]string{}, cfg.Args...)) // nil would mean the process's own
	root.SetOut(cfg.Stdout)
	root.SetErr(cfg.Stderr)
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" { // cobra's own, which takes any word for a question
			c.Args, c.RunE = noArgs, group("completion", "").RunE
		}
	}
	err := root.ExecuteContext(ctx)
	if err = errors.Join(err, a.close()); err == nil {
		return ExitOK
	}
	if failed, ok := errors.AsType[failure](err); ok {
		if failed.err != nil {
			fmt.Fprintln(cfg.Stderr, "cakefleetctl:", failed.err)
		}
		return ExitFailed
	}
	fmt.Fprintln(cfg.Stderr, "cakefleetctl:", err)
	return ExitUsage
}

// failure is an error after the command line was understood. One without a
// cause was told already.
type failure struct{ err error }

// Error returns the cause.
func (f failure) Error() string {
	if f.err == nil {
		return "not done"
	}
	return f.err.Error()
}

// Unwrap returns the cause.
func (f failure) Unwrap() error { return f.err }

// app is one run of the program.
type app struct {
	cfg         Config
	controller  string
	credentials string
	token       string
	output      string
	conn        *connection  // nil until a command needs one
	off         atomic.Int64 // ns that the controller's clock is ahead of this machine's
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cakefleetctl",
		Short: "Set plans, subscribers and routers of a fleet, and see how they feel",
		Long: `Set plans, subscribers and routers of a fleet, and see how they feel.

A plan has rates and shaping options, a subscriber has a plan, a router serves
a subscriber. Changing a plan changes every router that it reaches:

  cakefleetctl plan set gold --down 115mbit --up 12mbit --options diffserv4
  cakefleetctl subscriber set 10001 --plan gold
  cakefleetctl token create --router home-1 --subscriber 10001
  cakefleetctl router show home-1
  cakefleetctl stats home-1`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			if err := filled(c.Flags()); err != nil {
				return err
			}
			if a.output != "table" && a.output != "json" {
				return fmt.Errorf("--output %q: must be table or json", a.output)
			}
			return nil
		},
	}
	root.SetFlagErrorFunc(badFlag)
	root.CompletionOptions.HiddenDefaultCmd = false
	f := root.PersistentFlags()
	f.StringVar(&a.controller, "controller", a.env(envController, defaultController), "`host:port` of the controller's door for operators (also "+envController+")")
	f.StringVar(&a.credentials, "credentials", a.env(envCredentials, defaultCredentials), "`file` with your certificate and key, such as operator.pem of the controller's data directory (also "+envCredentials+")")
	// Not its default: help shows that, and a token is secret.
	f.StringVar(&a.token, "token", "", "operator's `token` to come in with instead of a certificate; better set "+envToken+", which other users of this machine can't read")
	f.StringVarP(&a.output, "output", "o", "table", "how to print: table or json")
	must(root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp)))
	root.AddCommand(
		a.planCommand(),
		a.subscriberCommand(),
		a.routerCommand(),
		a.tokenCommand(),
		a.overrideCommand(),
		a.boostCommand(),
		a.suspendCommand(),
		a.resumeCommand(),
		a.scheduleCommand(),
		a.rolloutCommand(),
		a.statsCommand(),
		a.topCommand(),
		a.explainCommand(),
		a.cakeCommand(),
		a.doctorCommand(),
		a.backupCommand(),
		a.operatorCommand(),
		a.caCommand(),
		a.whoamiCommand(),
		a.auditCommand(),
		a.undoCommand(),
		a.versionCommand(),
	)
	return root
}

// mayBeEmpty marks a flag for which an empty text means something.
const mayBeEmpty = "may-be-empty"

// filled refuses flags that are given without a text: they would count as not
// given, and a script whose variable is empty would seem to have worked.
func filled(flags *pflag.FlagSet) error {
	var errs []error
	flags.Visit(func(f *pflag.Flag) {
		if _, may := f.Annotations[mayBeEmpty]; !may && f.Value.Type() == "string" && strings.TrimSpace(f.Value.String()) == "" {
			errs = append(errs, fmt.Errorf("--%s: is empty", f.Name))
		}
	})
	return errors.Join(errs...)
}

// group is a command that only has others below it.
func group(use, short string, below ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return fmt.Errorf("%s what? see %s --help", c.CommandPath(), c.CommandPath())
		},
	}
	for _, b := range below {
		// Whoever has learned one of these words tries it everywhere.
		switch b.Name() {
		case "get":
			b.Aliases = append(b.Aliases, "show")
		case "show":
			b.Aliases = append(b.Aliases, "get")
		}
	}
	c.AddCommand(below...)
	return c
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.output == "json" {
				return a.printJSONText(fmt.Appendf(nil, `{"version":%q}`, a.cfg.Version))
			}
			fmt.Fprintln(a.cfg.Stdout, "cakefleetctl", a.cfg.Version)
			return nil
		},
	}
}

func (a *app) env(name, otherwise string) string {
	if a.cfg.Getenv != nil {
		if v := a.cfg.Getenv(name); v != "" {
			return v
		}
	}
	return otherwise
}

// note tells something that is not the result.
func (a *app) note(format string, args ...any) {
	fmt.Fprintf(a.cfg.Stderr, format+"\n", args...)
}

// must is for what can only be wrong in the program itself.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
