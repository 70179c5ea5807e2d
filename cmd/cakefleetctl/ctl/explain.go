package ctl

import (
	"fmt"

	"github.com/spf13/cobra"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// causeWords are the causes as a headline.
var causeWords = map[string]string{
	"offline":     "OFFLINE",
	"not-shaped":  "NOT SHAPED",
	"not-applied": "NOT AS DESIRED",
	"cable":       "CABLE",
	"cpu-bound":   "ROUTER TOO SLOW",
	"plan-full":   "PLAN FULL",
	"upstream":    "UPSTREAM",
	"home":        "IN THE HOME, OR FAR AWAY",
	"unknown":     "NOT KNOWN YET",
}

func (a *app) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain ROUTER",
		Short: "Say why a line is slow: plan full, home, upstream, offline, or the router itself",
		Long: `Say why a line is slow, from the last 15 minutes: what the first cause is, what
shows it, and what changed lately. Whether the way behind the router is slow can
only be told where a delay is measured; see cakefleetctl stats --help.`,
		Args:              exactly("ROUTER"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.telemetry.ExplainRouter, &pb.ExplainRouterRequest{RouterId: args[0]})
			if err != nil {
				return err
			}
			a.silent(resp.GetSilentControllers())
			if a.output == "json" {
				return a.printJSON(resp)
			}
			out := a.cfg.Stdout
			for i, f := range resp.GetFindings() {
				if i > 0 {
					fmt.Fprintln(out)
				}
				word := causeWords[f.GetCause()]
				if word == "" {
					word = f.GetCause() // of a newer controller
				}
				fmt.Fprintf(out, "%s\n%s\n", word, f.GetSentence())
				width := 0
				for _, g := range f.GetFigures() {
					width = max(width, len([]rune(g.GetName())))
				}
				for _, g := range f.GetFigures() {
					fmt.Fprintf(out, "  %-*s  %s\n", width, g.GetName(), g.GetValue())
				}
			}
			if len(resp.GetChanges()) > 0 {
				fmt.Fprintln(out, "\nchanged lately")
				for _, ch := range resp.GetChanges() {
					fmt.Fprintf(out, "  %-12s %s\n", a.ago(ch.GetTime()), ch.GetWhat())
				}
			}
			return nil
		},
	}
}
