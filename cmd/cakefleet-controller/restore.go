package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller"
)

// restore makes the store of a controller that does not run from a backup.
func restore(args []string) error {
	c := controller.RestoreConfig{DataDir: controller.DefaultConfig().DataDir}
	f := flag.NewFlagSet("cakefleet-controller restore", flag.ContinueOnError)
	f.StringVar(&c.File, "from", "", "`file` that cakefleetctl backup has written")
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "`folder` of the controller, which must not run")
	f.BoolVar(&c.Replace, "replace", false, "move a store that is there out of the way")
	if done, err := parse(f, args); done || err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("argument %q is not understood; see restore --help", f.Arg(0))
	}
	c.Logger = hclog.New(&hclog.LoggerOptions{Name: "controller", Level: hclog.Warn, Output: os.Stderr})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	done, err := controller.Restore(ctx, c)
	for _, line := range done {
		fmt.Println(line)
	}
	return err
}

// parseSize reads a number of bytes, with or without a unit.
func parseSize(text string) (int64, error) {
	digits, shift := strings.TrimSuffix(text, "B"), 0
	for unit, s := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30} {
		if d, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = d, s
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
	if err != nil || n <= 0 || n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%q: must be a number of bytes such as 500MiB or 4GiB", text)
	}
	return n << shift, nil
}
