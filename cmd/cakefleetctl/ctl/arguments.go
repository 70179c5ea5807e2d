package ctl

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// exactly wants these arguments and says so.
func exactly(names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return fmt.Errorf("%s: %d arguments are given, need %s; see %s --help", c.CommandPath(), len(args), strings.Join(names, " "), c.CommandPath())
		}
		return nil
	}
}

// noArgs wants none, and says whether a command or something else was taken for
// one, what comes near it, and where to look.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if !c.HasAvailableSubCommands() {
		return fmt.Errorf("%s: takes no argument, but %q is given; see %s --help", c.CommandPath(), args[0], c.CommandPath())
	}
	if c.SuggestionsMinimumDistance <= 0 {
		c.SuggestionsMinimumDistance = 2 // cobra's own default, which it sets too late for us
	}
	near := ""
	if names := c.SuggestionsFor(args[0]); len(names) > 0 {
		near = ", did you mean " + strings.Join(names, " or ")
	}
	return fmt.Errorf("%s: unknown command %q%s; see %s --help", c.CommandPath(), args[0], near, c.CommandPath())
}

// badFlag adds to what is wrong with a flag whose it is, and says in the words of
// this program what Go says in its own.
func badFlag(c *cobra.Command, err error) error {
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		if wants := valueWanted(e); wants != "" {
			err = fmt.Errorf("--%s: %q is no %s", e.GetFlag().Name, e.GetValue(), wants)
		}
	}
	return fmt.Errorf("%w; see %s --help", err, c.CommandPath())
}

// valueWanted says what a flag's value has to be; empty if the flag says so itself.
func valueWanted(e *pflag.InvalidValueError) string {
	switch kind := e.GetFlag().Value.Type(); kind {
	case "duration":
		return "time such as 90s, 30m or 12h"
	case "bool":
		return "true or false"
	case "int", "int32", "int64", "uint", "uint16", "uint32", "uint64", "float64":
		what := "number"
		if strings.HasPrefix(kind, "uint") {
			what = "number from 0 on"
		}
		if errors.Is(e, strconv.ErrRange) {
			what += " of the size that is possible here"
		}
		return what
	default:
		return ""
	}
}

// completionTimeout is how long a shell may wait for names.
const completionTimeout = 2 * time.Second

// complete offers names for the first argument.
func (a *app) complete(names func(context.Context, *app) ([]string, error)) cobra.CompletionFunc {
	offer := a.completeFlag(names)
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return offer(c, args, word)
	}
}

// completeFlag offers names for a flag's value. Without a controller it offers
// nothing.
func (a *app) completeFlag(names func(context.Context, *app) ([]string, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(c.Context(), completionTimeout)
		defer cancel()
		got, err := names(ctx, a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return got, cobra.ShellCompDirectiveNoFileComp
	}
}

// Shells get one page of names: nobody reads more.

func planNames(ctx context.Context, a *app) ([]string, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := conn.plans.ListPlans(ctx, &pb.ListPlansRequest{})
	var names []string
	for _, p := range resp.GetPlans() {
		names = append(names, p.GetName())
	}
	return names, err
}

func routerIDs(ctx context.Context, a *app) ([]string, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := conn.routers.ListRouters(ctx, &pb.ListRoutersRequest{})
	var ids []string
	for _, r := range resp.GetRouters() {
		ids = append(ids, r.GetId())
	}
	return ids, err
}

func subscriberIDs(ctx context.Context, a *app) ([]string, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := conn.subscribers.ListSubscribers(ctx, &pb.ListSubscribersRequest{})
	var ids []string
	for _, s := range resp.GetSubscribers() {
		ids = append(ids, s.GetId())
	}
	return ids, err
}
