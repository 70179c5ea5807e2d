package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/test/homes"
)

// ctl runs cakefleetctl, and with loud prints the command and what it says.
func (s *show) ctl(ctx context.Context, loud bool, args ...string) (string, error) {
	if !loud {
		return s.fleet.Ctl(ctx, nil, args...)
	}
	quoted := slices.Clone(args)
	for i, a := range quoted {
		if strings.Contains(a, " ") {
			quoted[i] = "'" + a + "'"
		}
	}
	say("   $ cakefleetctl %s", strings.Join(quoted, " "))
	out, err := s.fleet.Ctl(ctx, indented{}, args...)
	fmt.Fprint(indented{}, out)
	return out, err
}

// indented writes lines to standard output, a little to the right.
type indented struct{}

func (indented) Write(p []byte) (int, error) {
	for l := range strings.Lines(string(p)) {
		fmt.Print("   ", l)
	}
	return len(p), nil
}

func (s *show) awaitRouters(ctx context.Context, fits func(homes.RouterState) bool) error {
	return s.await(ctx, func(ctx context.Context) error { return s.fleet.Await(ctx, fits) })
}

// await gives what should take a second much longer, and then gives up.
func (s *show) await(ctx context.Context, wait func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("waited in vain"))
	defer cancel()
	return wait(ctx)
}
