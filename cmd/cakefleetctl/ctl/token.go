package ctl

import (
	"errors"
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
	var router, subscriber, file, batch string
	var labels []string
	var ttl time.Duration
	var skip int
	c := &cobra.Command{
		Use:   "create --router ID [--subscriber ID] [--label KEY=VALUE]... [--ttl 24h] | create --file FILE [--ttl 24h] [--batch NAME] [--skip N]",
		Short: "Make a join token for one router, or for each in a file; it is shown once and can be used once",
		Long: `Make a join token for one router, or for each in a file; it is shown once and
can be used once.

FILE is CSV with a line of column names: router, which is needed, and subscriber;
every other column is a label. - is standard input. For each line there is one of
CSV, or with -o json one JSON object, as soon as the token is stored: router,
subscriber, id, expires and token. Lines that are wrong are listed at the end and
the others are taken. A run that is interrupted says how far it came, and how to
go on (--skip) or to take all back (token delete --batch).

  cakefleetctl token create --file routers.csv --ttl 720h >tokens.csv`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if ttl <= 0 {
				return fmt.Errorf("--ttl %v: must be positive", ttl)
			}
			if (router == "") == (file == "") {
				return errors.New("token create: either --router ID or --file FILE is needed")
			}
			if file != "" {
				if subscriber != "" || len(labels) > 0 {
					return errors.New("--file: the file says who is who; --subscriber and --label are for one router")
				}
				return a.tokensOf(c, file, batch, ttl, skip)
			}
			if batch != "" || skip != 0 {
				return errors.New("--batch and --skip are for --file")
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
	c.Flags().StringVar(&file, "file", "", "`file` with many routers, - for standard input")
	c.Flags().StringVar(&batch, "batch", "", "`name` of all tokens of the file, to take them back with; the time if left out")
	c.Flags().IntVar(&skip, "skip", 0, "how many `lines` after the first of the file are done already")
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
	var batch string
	c := &cobra.Command{
		Use:   "delete TOKEN | delete --batch NAME",
		Short: "Make a token useless, or all of a batch that are not used yet",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if (len(args) == 1) == (batch != "") {
				return errors.New("token delete: either TOKEN or --batch NAME is needed")
			}
			if batch != "" {
				return a.deleteBatch(c.Context(), batch)
			}
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
	c.Flags().StringVar(&batch, "batch", "", "`name` that token create --file has told")
	return c
}
