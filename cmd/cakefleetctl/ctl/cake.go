package ctl

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cakefleet/cakefleet/engine"
)

func (a *app) cakeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cake 'OPTIONS'",
		Short: "Say what tc would show of CAKE options, or what is wrong with them",
		Long: `Say in one line what tc qdisc show would show of CAKE options, or what is wrong
with them. Nothing is changed and no controller is asked.

  cakefleetctl cake 'bandwidth 100mbit diffserv4 nat'

Words: ` + engine.KeywordSyntax,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := engine.ParseKeywords(engine.DefaultConfig(), strings.Join(args, " "))
			if err == nil {
				err = c.Validate()
			}
			if err != nil {
				return failure{err}
			}
			if a.output == "json" {
				return a.printJSONText(fmt.Appendf(nil, `{"options":%q}`, c.Keywords()))
			}
			fmt.Fprintln(a.cfg.Stdout, strings.TrimSpace(c.Keywords()))
			return nil
		},
	}
}
