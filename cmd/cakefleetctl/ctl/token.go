package ctl

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) tokenCommand() *cobra.Command {
	return group("token", "Make join tokens, with which routers get their certificates",
		a.tokenCreate(), a.tokenList(), a.tokenDelete())
}

func (a *app) tokenCreate() *cobra.Command {
	var router, subscriber string
	var labels []string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "create --router ID [--subscriber ID] [--label KEY=VALUE]... [--ttl 24h]",
		Short: "Make a join token for one router; it is shown once and can be used once",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if ttl <= 0 {
				return fmt.Errorf("--ttl %v: must be positive", ttl)
			}
			labelled, err := parseLabels(labels)
			if err != nil {
				return err
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.tokens.CreateToken, &pb.CreateTokenRequest{RouterId: router, Subscriber: subscriber, Labels: labelled, Ttl: durationpb.New(ttl)})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintln(a.cfg.Stdout, resp.GetSecret())
			a.note("for router %s, once, until %s. On the router: cakefleet-agent --token with the line above", resp.GetToken().GetRouterId(), when(resp.GetToken().GetExpireTime()))
			return nil
		},
	}
	c.Flags().StringVar(&router, "router", "", "`id` that the router gets")
	c.Flags().StringVar(&subscriber, "subscriber", "", "`subscriber` that it will serve")
	c.Flags().StringArrayVar(&labels, "label", nil, "free `key=value` of the router, such as batch=7; may be repeated")
	c.Flags().DurationVar(&ttl, "ttl", 24*time.Hour, "how `long` it can be used, at most 720h")
	must(c.MarkFlagRequired("router"))
	must(c.RegisterFlagCompletionFunc("subscriber", a.completeFlag(subscriberIDs)))
	return c
}

func (a *app) tokenList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show tokens that can still be used",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			var all []*pb.Token
			for req := (&pb.ListTokensRequest{}); ; {
				resp, err := call(c.Context(), a, conn.tokens.ListTokens, req)
				if err != nil {
					return err
				}
				all = append(all, resp.GetTokens()...)
				if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListTokensResponse{Tokens: all})
			}
			t := a.table("TOKEN", "ROUTER", "SUBSCRIBER", "ENDS")
			for _, m := range all {
				t.row(m.GetId(), m.GetRouterId(), m.GetSubscriber(), a.ago(m.GetExpireTime()))
			}
			return t.end(a, "no tokens")
		},
	}
}

func (a *app) tokenDelete() *cobra.Command {
	return &cobra.Command{
		Use:   "delete TOKEN",
		Short: "Make a token useless",
		Args:  exactly("TOKEN"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.tokens.DeleteToken, &pb.DeleteTokenRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "token %s deleted\n", args[0])
			return nil
		},
	}
}
