package ctl

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) caCommand() *cobra.Command {
	return group("ca", "See the fleet's authority and put another one in its place, without a visit to any router",
		a.caShow(), a.caRotate(), a.caRetire())
}

func (a *app) caShow() *cobra.Command {
	var unconfirmed bool
	c := &cobra.Command{
		Use:   "show [--unconfirmed]",
		Short: "Show the authorities that the fleet trusts, and how far routers know them",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			if unconfirmed {
				return a.printUnconfirmed(c, conn)
			}
			resp, err := call(c.Context(), a, conn.joins.GetAuthority, &pb.GetAuthorityRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			return a.printAuthorities(resp)
		},
	}
	c.Flags().BoolVar(&unconfirmed, "unconfirmed", false, "list the routers that have not stored the authorities yet")
	return c
}

func (a *app) printAuthorities(resp *pb.GetAuthorityResponse) error {
	t := a.table("PIN", "SINCE", "ENDS", "IS FOR")
	for _, x := range resp.GetAuthorities() {
		since, does := "the beginning", "everything"
		if x.GetSince() != nil {
			since = a.ago(x.GetSince())
		}
		switch {
		case x.GetShows() && !x.GetSigns():
			does = "the controllers' certificates, until it is retired"
		case x.GetSigns() && !x.GetShows():
			does = "new certificates, tokens and pins"
		}
		t.row(x.GetPin(), since, x.GetExpireTime().AsTime().Format("2006-01-02"), does)
	}
	if err := t.end(a, ""); err != nil {
		return err
	}
	out := a.cfg.Stdout
	n, missing := resp.GetRouters(), resp.GetUnconfirmed()
	fmt.Fprintln(out)
	switch {
	case len(resp.GetAuthorities()) > 1 && missing == 0:
		fmt.Fprintf(out, "all of %s know both: cakefleetctl ca retire ends the older one\n", count(int(n), "router"))
	case len(resp.GetAuthorities()) > 1:
		fmt.Fprintf(out, "%d of %s know both; the others learn of the new one when they are connected (cakefleetctl ca show --unconfirmed)\n", n-missing, count(int(n), "router"))
	case missing > 0:
		fmt.Fprintf(out, "%d of %s still trust one that is retired too; they forget it when they are connected\n", missing, count(int(n), "router"))
	default:
		fmt.Fprintf(out, "%s\n", count(int(n), "router"))
	}
	for _, x := range resp.GetEndingCredentials() {
		fmt.Fprintf(out, "operator's %s opens nothing when the older one is retired: make another token or certificate\n", x)
	}
	if resp.GetWarning() != "" {
		a.note("warning: %s", resp.GetWarning())
	}
	return nil
}

func (a *app) printUnconfirmed(c *cobra.Command, conn *connection) error {
	all := &pb.ListUnconfirmedResponse{}
	for req := (&pb.ListUnconfirmedRequest{}); ; {
		resp, err := call(c.Context(), a, conn.joins.ListUnconfirmed, req)
		if err != nil {
			return err
		}
		all.RouterIds = append(all.RouterIds, resp.GetRouterIds()...)
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	if a.output == "json" {
		return a.printJSON(all)
	}
	t := a.table("ROUTER")
	for _, id := range all.GetRouterIds() {
		t.row(id)
	}
	return t.end(a, "all routers know the fleet's authorities")
}

func (a *app) caRotate() *cobra.Command {
	return &cobra.Command{
		Use:   "rotate",
		Short: "Make another authority beside the fleet's; nothing is refused by it",
		Long: `Make another authority beside the fleet's; nothing is refused by it.

From then on the other one signs new certificates, and join tokens, pins and
credentials name it. Routers that are connected store both and get certificates
of the new one; those that are away learn of it when they are back. When ca show
says that all know both, ca retire ends the older one.

All controllers must have a version that knows this command. Tokens and
credentials of operators, join tokens and pins that are older than this are of no
use after ca retire: ca show names the operators'.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.RotateAuthority, &pb.RotateAuthorityRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "authority %s is made and signs from now on; cakefleetctl ca show tells when the older one can be retired\n", resp.GetAuthority().GetPin())
			return nil
		},
	}
}

func (a *app) caRetire() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "retire [--force]",
		Short: "End the trust in the older authority, when all routers know the new one",
		Long: `End the trust in the older authority. It is refused while routers have not
confirmed that they have stored the new one. With --force they don't count; each
of them has to join again then, with a join token or the new pin.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.RetireAuthority, &pb.RetireAuthorityRequest{Force: force})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "authority %s is retired; %s is the fleet's\n", resp.GetRetiredPin(), resp.GetAuthority().GetPin())
			if n := resp.GetUnconfirmed(); n > 0 {
				return failure{errors.New(count(int(n), "router") + " had not confirmed it and may have to join again: cakefleetctl router list")}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&force, "force", false, "also if routers have not confirmed the new one, which have to join again then")
	return c
}
