package controller_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// The end of the fleet's authority is among the problems a month before.
func TestStatusWarnsOfAuthority(t *testing.T) {
	now := time.Now()
	fresh, err := identity.Open(t.TempDir(), now)
	if err != nil {
		t.Fatal(err)
	}
	for name, left := range map[string]time.Duration{"fresh": fresh.Ends().Sub(now), "ending": 20 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if _, err := identity.Open(dir, now.Add(left-fresh.Ends().Sub(now))); err != nil {
				t.Fatal(err)
			}
			resp, err := pb.NewAdminServiceClient(start(t, dir).Operate(t)).GetStatus(t.Context(), &pb.GetStatusRequest{})
			if err != nil {
				t.Fatal(err)
			}
			warned := slices.ContainsFunc(resp.GetProblems(), func(p string) bool { return strings.Contains(p, "the fleet's authority ends in") })
			if warned != (name == "ending") {
				t.Errorf("problems: %q", resp.GetProblems())
			}
		})
	}
}
