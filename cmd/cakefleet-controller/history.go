package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/cakefleet/cakefleet/controller/history"
)

// historyFlags adds the flags of the history. What it returns is to be called
// when they have been read.
func historyFlags(f *flag.FlagSet, c *history.Config) (finish func() error) {
	var version int
	var tokenFile string
	f.DurationVar(&c.Retention, "history-retention", c.Retention, "`time` for which telemetry is kept in data-dir/history; 0: not at all")
	f.Func("history-size", "most `bytes` that it takes on disk, such as 20GB; the oldest goes first (default any)", func(s string) (err error) {
		c.Size, err = history.ParseSize(s)
		return err
	})
	f.IntVar(&c.Routers, "history-routers", c.Routers, "`number` of routers that have series of their own; 0: none has")
	f.StringVar(&c.Controller, "history-name", "", "`name` of this controller in the label \"controller\" (default host and port)")
	f.Func("remote-write", "`URL` of a cluster that all telemetry is sent to by remote-write; may be given again", func(s string) error {
		c.Remotes = append(c.Remotes, history.Remote{URL: s})
		return nil
	})
	f.IntVar(&version, "remote-write-version", 1, "`version` of the remote-write protocol: 1, which every cluster has, or 2, which has native histograms")
	f.StringVar(&tokenFile, "remote-write-token-file", "", "`file` with the bearer token for those clusters")
	return func() error {
		var token string
		if tokenFile != "" {
			b, err := os.ReadFile(tokenFile)
			if err != nil {
				return fmt.Errorf("remote write: %w", err)
			}
			token = strings.TrimSpace(string(b))
		}
		for i := range c.Remotes {
			c.Remotes[i].Version, c.Remotes[i].Token = version, token
		}
		return nil
	}
}
