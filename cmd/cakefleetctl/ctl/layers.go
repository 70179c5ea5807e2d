package ctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// settingFlags say what to set, field by field.
type settingFlags struct {
	down, up string
	fields   []string
}

func (s *settingFlags) add(f *pflag.FlagSet) {
	f.StringVar(&s.down, "down", "", "`rate` to the subscriber, such as 300mbit")
	f.StringVar(&s.up, "up", "", "`rate` from the subscriber, such as 30mbit")
	f.StringArrayVar(&s.fields, "set", nil, "any other `field=value`, such as up.tins=diffserv4; may be repeated")
}

// words returns what is set, checked.
func (s *settingFlags) words() (map[string]string, error) {
	words := map[string]string{}
	for name, value := range map[string]string{"down.rate": s.down, "up.rate": s.up} {
		if value == "" {
			continue
		}
		// As strictly as plan set reads it.
		rate, err := parseRate(value)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", strings.TrimSuffix(name, ".rate"), err)
		}
		words[name] = exact(rate)
	}
	for _, f := range s.fields {
		name, value, ok := strings.Cut(f, "=")
		if !ok {
			return nil, fmt.Errorf("--set %q: must be FIELD=VALUE", f)
		}
		words[name] = value
	}
	_, err := plan.ParseSettings(words)
	return words, err
}

// edited is the answer of every call that changes a layer.
type edited interface {
	proto.Message
	GetSubscriber() *pb.Subscriber
	GetChanged() bool
}

// tellEdit tells what a layer became and waits for the routers.
func (a *app) tellEdit(ctx context.Context, wait waitFlags, began time.Time, resp edited, did string) error {
	s := resp.GetSubscriber()
	switch {
	case a.output == "json":
		if err := a.printJSON(resp); err != nil {
			return err
		}
	case !resp.GetChanged():
		fmt.Fprintf(a.cfg.Stdout, "subscriber %s: nothing changes, it is so already (revision %d)\n", s.GetId(), s.GetRevision())
	default:
		fmt.Fprintf(a.cfg.Stdout, "subscriber %s %s: revision %d, %s affected\n", s.GetId(), did, s.GetRevision(), count(len(s.GetRouters()), "router"))
	}
	if !resp.GetChanged() || len(s.GetRouters()) == 0 {
		return nil
	}
	return a.await(ctx, wait, began, target{revision: s.GetRevision(), routers: uint32(len(s.GetRouters())), list: a.theseRouters(s.GetRouters())})
}

func (a *app) overrideCommand() *cobra.Command {
	return group("override", "Set single fields of one subscriber, above plan and billing", a.overrideSet(), a.overrideClear())
}

func (a *app) overrideSet() *cobra.Command {
	var flags settingFlags
	var wait waitFlags
	c := &cobra.Command{
		Use:   "set SUBSCRIBER [--down RATE] [--up RATE] [--set FIELD=VALUE]...",
		Short: "Set fields of one subscriber; all others go on following its plan",
		Long: `Set fields of one subscriber. They stay whatever plan and billing say, until
they are cleared; all other fields go on following the plan.

  cakefleetctl override set 10001 --up 20mbit --set down.tins=diffserv4`,
		Args:              exactly("SUBSCRIBER"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			words, err := flags.words()
			if err == nil && len(words) == 0 {
				err = errors.New("say what to set: --down, --up or --set")
			}
			if err != nil {
				return err
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.subscribers.SetOverride, &pb.SetOverrideRequest{Id: args[0], Set: words})
			if err != nil {
				return err
			}
			return a.tellEdit(c.Context(), wait, began, resp, "overridden")
		},
	}
	flags.add(c.Flags())
	wait.add(c.Flags(), false)
	return c
}

func (a *app) overrideClear() *cobra.Command {
	var wait waitFlags
	c := &cobra.Command{
		Use:   "clear SUBSCRIBER [FIELD]...",
		Short: "Take back an override, or single fields of it",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return exactly("SUBSCRIBER")(c, args)
			}
			return nil
		},
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			for _, name := range args[1:] {
				if _, err := plan.Mask(name); err != nil {
					return err
				}
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.subscribers.SetOverride, &pb.SetOverrideRequest{Id: args[0], Clear: args[1:], ClearAll: len(args) == 1})
			if err != nil {
				return err
			}
			return a.tellEdit(c.Context(), wait, began, resp, "changed")
		},
	}
	wait.add(c.Flags(), false)
	return c
}

func (a *app) boostCommand() *cobra.Command {
	var flags settingFlags
	var wait waitFlags
	var d time.Duration
	var end bool
	c := &cobra.Command{
		Use:   "boost SUBSCRIBER --for TIME [--down RATE] [--up RATE] [--set FIELD=VALUE]... | --end",
		Short: "Set fields of one subscriber for a time",
		Long: `Set fields of one subscriber for a time. The boost ends by itself, on the router,
also if no controller can be reached then.

  cakefleetctl boost 10001 --down 300mbit --for 2h`,
		Args:              exactly("SUBSCRIBER"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			words, err := flags.words()
			switch {
			case err != nil:
				return err
			case end && (len(words) > 0 || d != 0):
				return errors.New("--end goes without anything to set")
			case !end && len(words) == 0:
				return errors.New("say what to set: --down, --up or --set")
			case !end && d <= 0:
				return errors.New("say for how long, such as --for 2h")
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			if end {
				resp, err := call(c.Context(), a, conn.subscribers.EndBoost, &pb.EndBoostRequest{Id: args[0]})
				if err != nil {
					return err
				}
				return a.tellEdit(c.Context(), wait, began, resp, "not boosted any more")
			}
			resp, err := call(c.Context(), a, conn.subscribers.StartBoost, &pb.StartBoostRequest{Id: args[0], Set: words, Duration: durationpb.New(d)})
			if err != nil {
				return err
			}
			until := resp.GetSubscriber().GetLayers().GetBoostEnd().AsTime().Format(time.RFC3339)
			return a.tellEdit(c.Context(), wait, began, resp, "boosted until "+until)
		},
	}
	flags.add(c.Flags())
	c.Flags().DurationVar(&d, "for", 0, "how `long`, such as 90m or 2h")
	c.Flags().BoolVar(&end, "end", false, "end the boost that there is")
	wait.add(c.Flags(), false)
	return c
}

func (a *app) suspendCommand() *cobra.Command {
	var policy string
	var wait waitFlags
	c := &cobra.Command{
		Use:   "suspend SUBSCRIBER [--policy PLAN]",
		Short: "Give a subscriber the rates of a policy until it is resumed",
		Long: `Give a subscriber the rates of a policy until it is resumed. A policy is a plan:

  cakefleetctl plan set slow --down 1mbit --up 512kbit
  cakefleetctl suspend 10001`,
		Args:              exactly("SUBSCRIBER"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			if err := plan.ValidateName("plan", policy); err != nil {
				return fmt.Errorf("--policy: %w", err)
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.subscribers.SuspendSubscriber, &pb.SuspendSubscriberRequest{Id: args[0], Policy: policy})
			if isCode(err, codes.FailedPrecondition) {
				return failure{errors.Join(err, fmt.Errorf("make the policy first: cakefleetctl plan set %s --down 1mbit --up 512kbit", policy))}
			}
			if err != nil {
				return err
			}
			return a.tellEdit(c.Context(), wait, began, resp, "suspended with policy "+policy)
		},
	}
	c.Flags().StringVar(&policy, "policy", "slow", "`plan` whose rates apply")
	must(c.RegisterFlagCompletionFunc("policy", a.completeFlag(planNames)))
	wait.add(c.Flags(), false)
	return c
}

func (a *app) resumeCommand() *cobra.Command {
	var wait waitFlags
	c := &cobra.Command{
		Use:               "resume SUBSCRIBER",
		Short:             "End a subscriber's suspension",
		Args:              exactly("SUBSCRIBER"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.subscribers.ResumeSubscriber, &pb.ResumeSubscriberRequest{Id: args[0]})
			if err != nil {
				return err
			}
			did := "resumed"
			if p := resp.GetSubscriber().GetLayers().GetBillingSuspension(); p != "" {
				did += ", but billing suspends it with policy " + p
			}
			return a.tellEdit(c.Context(), wait, began, resp, did)
		},
	}
	wait.add(c.Flags(), false)
	return c
}

// layerRows adds what changes the plan of a subscriber to a table of it.
func (a *app) layerRows(l *pb.Layers, row func(...string)) {
	words := func(name string, m map[string]string, more string) {
		var parts []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			parts = append(parts, k+" "+m[k])
		}
		if len(parts) > 0 {
			row(name, strings.Join(parts, ", ")+more)
		}
	}
	words("billing", l.GetBilling(), "")
	words("override", l.GetOverride(), "")
	if end := l.GetBoostEnd(); end != nil && a.now().Before(end.AsTime()) {
		words("boost", l.GetBoost(), " until "+end.AsTime().Format(time.RFC3339))
	}
	if p := l.GetSuspension(); p != "" {
		row("suspended", "with policy "+p)
	}
	if p := l.GetBillingSuspension(); p != "" {
		row("suspended", "by billing with policy "+p)
	}
}
