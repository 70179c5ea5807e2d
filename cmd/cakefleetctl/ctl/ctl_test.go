package ctl_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// result is what one command did.
type result struct {
	code           int
	stdout, stderr string
}

func run(t *testing.T, env map[string]string, args ...string) result {
	t.Helper()
	return runAt(t, noon, env, args...)
}

// runAt is run on a machine whose clock says something else.
func runAt(t *testing.T, now time.Time, env map[string]string, args ...string) result {
	t.Helper()
	var out, err bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	code := ctl.Run(ctx, ctl.Config{
		Version: "0.1.0", Args: args, Stdout: &out, Stderr: &err,
		Getenv: func(k string) string { return env[k] },
		Now:    func() time.Time { return now },
	})
	return result{code, out.String(), err.String()}
}

// timing is what differs from run to run.
var timing = regexp.MustCompile(`within [0-9.]+m?s`)

func (r result) text(args []string) string {
	b := fmt.Sprintf("$ cakefleetctl %s\n%s", strings.Join(args, " "), r.stdout)
	if r.stderr != "" {
		b += "--- standard error\n" + r.stderr
	}
	return timing.ReplaceAllString(b+fmt.Sprintf("--- exit status %d\n", r.code), "within TIME")
}

// settled makes the routers answer a change at the nth listing.
func settled(n int, how func(f *fleet, i int, r *pb.Router)) func(*fleet) {
	return func(f *fleet) {
		if f.polls != n {
			return
		}
		for i, r := range f.routers {
			how(f, i, r)
		}
	}
}

func all(s pb.SyncState) func(*fleet, int, *pb.Router) {
	return func(_ *fleet, _ int, r *pb.Router) { r.Session.Sync = s }
}

// measured makes the report one of the userspace data plane, on a router that
// measures the delay.
func measured(f *fleet) {
	r, err := wire.ToReport(f.report.Report)
	if err != nil {
		panic(err)
	}
	for i := range 1000 {
		r.Down.Tins[1].Sojourn.Observe(time.Duration(i) * 10 * time.Microsecond)
	}
	r.Probe = &plan.ProbeStats{Host: "gw.example.net", Address: "192.0.2.1"}
	for range 100 {
		r.Probe.Idle.Delay.Observe(12 * time.Millisecond)
		r.Probe.Down.Delay.Observe(14 * time.Millisecond)
	}
	r.Probe.Up.Delay.Observe(230 * time.Millisecond)
	r.Probe.Up.Lost, r.Probe.Both.Lost = 2, 1
	r.WAN = &plan.LinkState{Name: "pppoe-wan", Index: 9, Up: true, Carrier: true, Speed: 1e9, MTU: 1492, Comings: 3, CarrierLosses: 1}
	f.report.Report = wire.FromReport(&r)
}

// A viewer whose clock is wrong sees the same: ages are by the controller's.
func TestFleet046_ViewersClock(t *testing.T) {
	f := newFleet()
	f.clock = noon
	address, creds := f.serve(t)
	env := map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}
	for _, args := range [][]string{{"router", "list"}, {"router", "show", "home-2"}, {"stats", "home-1"}} {
		want := run(t, env, args...)
		if want.code != 0 || !strings.Contains(want.stdout, " ago") {
			t.Fatalf("%v: %+v", args, want)
		}
		for _, off := range []time.Duration{time.Hour, -time.Hour, 20 * 365 * 24 * time.Hour} {
			if got := runAt(t, noon.Add(off), env, args...); got != want {
				t.Errorf("%v by a clock that is %v ahead:\n%s", args, off, cmp.Diff(want.stdout, got.stdout))
			}
		}
	}
}

// TestGolden runs commands against a small fleet; testdata/NAME.golden has what
// they print. -update writes it, to be read in review.
func TestGolden(t *testing.T) {
	mixed := func(f *fleet, i int, r *pb.Router) {
		r.Session.Sync = []pb.SyncState{pb.SyncState_SYNC_STATE_IN_SYNC, pb.SyncState_SYNC_STATE_REJECTED, pb.SyncState_SYNC_STATE_CLAMPED, pb.SyncState_SYNC_STATE_OFFLINE}[i]
	}
	for _, c := range []struct {
		name   string
		args   []string
		change func(*fleet)
	}{
		{"router-pin", []string{"router", "pin"}, nil},
		{"router-pending", []string{"router", "pending"}, nil},
		{"router-approve", []string{"router", "approve", "01234567", "--router", "home-9", "--subscriber", "10001"}, nil},
		{"router-approve-other", []string{"router", "approve", "01234567", "--router", "home-1"}, nil},
		{"router-reject", []string{"router", "reject", "01234567", "--reason", "not ours"}, nil},
		{"router-provision", []string{"router", "provision", "SN1", "--subscriber", "10001", "--label", "batch=7"}, nil},
		{"router-provisioned", []string{"router", "provisioned"}, nil},
		{"router-unprovision", []string{"router", "unprovision", "SN1"}, nil},
		{"router-revoke", []string{"router", "revoke", "home-1", "--reason", "stolen"}, nil},
		{"router-readmit", []string{"router", "readmit", "home-2"}, nil},
		{"router-readmit-not-revoked", []string{"router", "readmit", "home-1"}, nil},
		{"router-release", []string{"router", "release", "home-1"}, nil},
		{"router-show-revoked", []string{"router", "show", "home-1"}, func(f *fleet) {
			f.routers[0].Revocation = &pb.Revocation{Time: before(time.Hour), Operator: "admin", Reason: "stolen"}
			f.routers[0].Labels, f.routers[0].Serial, f.routers[0].Fingerprint = map[string]string{"site": "north", "batch": "7"}, "SN1", someKey
		}},
		{"router-show-quarantined", []string{"router", "show", "home-1"}, func(f *fleet) {
			f.routers[0].Quarantine = &pb.Quarantine{Time: before(time.Hour), Devices: []*pb.Device{
				{Address: "192.0.2.7:40312", BootId: "0011", Model: "Archer C7 v2"}, {Address: "198.51.100.9:999", BootId: "2233", Model: "Archer C7 v2"},
			}}
		}},
		{"router-show-boosted", []string{"router", "show", "home-1"}, func(f *fleet) {
			d, r := f.routers[0].Desired, f.routers[0].Reported
			d.EffectiveHash = d.GetHash()
			d.Hash = "0123456789abcdef0123456789abcdef"
			r.AppliedHash = d.GetHash()
			d.Fields = []*pb.OwnedField{{Field: "down.rate", Value: "115Mbit", Owner: "boost"}}
			d.Changes = before(-time.Hour)
		}},
		{"router-list-barred", []string{"router", "list"}, func(f *fleet) {
			f.routers[0].Quarantine, f.routers[1].Revocation = &pb.Quarantine{}, &pb.Revocation{}
		}},
		{"plan-set-new", []string{"plan", "set", "silver", "--down", "75mbit", "--up", "1.5mbit", "--options", "diffserv4 nat", "--down-options", "ingress"}, nil},
		{"plan-set-new-triple-isolate", []string{"plan", "set", "silver", "--down", "75mbit", "--up", "1.5mbit", "--options", "triple-isolate nonat", "--up-options", "hosts"}, nil},
		{"plan-set-new-without-rates", []string{"plan", "set", "silver", "--down", "75mbit"}, nil},
		{"plan-set-all-apply", []string{"plan", "set", "gold", "--down", "200mbit", "--up-options", "ack-filter"}, func(f *fleet) {
			f.settle = settled(2, all(pb.SyncState_SYNC_STATE_IN_SYNC))
		}},
		{"plan-set-some-refuse", []string{"plan", "set", "gold", "--down", "200mbit"}, func(f *fleet) { f.settle = settled(1, mixed) }},
		{"plan-set-no-answer", []string{"plan", "set", "gold", "--down", "200mbit", "--wait-timeout", "50ms"}, nil},
		{"plan-set-no-wait", []string{"plan", "set", "gold", "--down", "200mbit", "--wait=false"}, nil},
		{"plan-set-dry-run", []string{"plan", "set", "gold", "--down", "unlimited", "--dry-run"}, nil},
		{"plan-set-same", []string{"plan", "set", "gold", "--down", " 115 mbit "}, nil},
		{"plan-set-json", []string{"plan", "set", "gold", "--down", "116mbit", "--dry-run", "-o", "json"}, nil},
		{"plan-get", []string{"plan", "get", "gold"}, nil},
		{"plan-show", []string{"plan", "show", "gold"}, nil},
		{"plan-get-missing", []string{"plan", "get", "silver"}, nil},
		{"plan-list", []string{"plan", "list"}, nil},
		{"plan-list-empty", []string{"plan", "list"}, func(f *fleet) { f.plans = nil }},
		{"plan-delete", []string{"plan", "delete", "bronze"}, nil},
		{"plan-delete-in-use", []string{"plan", "delete", "gold"}, nil},
		{"plan-delete-in-schedule", []string{"plan", "delete", "night"}, nil},
		{"plan-delete-replace", []string{"plan", "delete", "gold", "--replace-with", "bronze"}, nil},
		{"subscriber-set", []string{"subscriber", "set", "10001", "--plan", "bronze", "--label", "site=south", "--label", "ap="}, nil},
		{"subscriber-set-new", []string{"subscriber", "set", "20001", "--plan", "gold"}, nil},
		{"subscriber-set-new-without-plan", []string{"subscriber", "set", "20001"}, nil},
		{"subscriber-get", []string{"subscriber", "get", "10001"}, nil},
		{"subscriber-list", []string{"subscriber", "list"}, nil},
		{"subscriber-delete", []string{"subscriber", "delete", "10001"}, nil},
		{"router-list", []string{"router", "list"}, nil},
		{"router-list-rejected", []string{"router", "list", "--state", "rejected"}, nil},
		{"router-show", []string{"router", "show", "home-1"}, nil},
		{"router-show-rejected", []string{"router", "show", "home-2"}, nil},
		{"router-show-clamped", []string{"router", "show", "home-3"}, nil},
		{"router-show-offline", []string{"router", "show", "home-4"}, nil},
		{"router-show-nobody", []string{"router", "show", "home-1"}, func(f *fleet) {
			f.routers[0] = &pb.Router{Id: "home-1", Revision: 5, Desired: &pb.DesiredState{Reason: "no subscriber"}, Session: &pb.SessionState{Sync: pb.SyncState_SYNC_STATE_NONE}}
		}},
		{"router-set", []string{"router", "set", "home-1", "--subscriber", "10002"}, nil},
		{"router-set-nobody", []string{"router", "set", "home-1", "--subscriber", ""}, nil},
		{"router-set-wait", []string{"router", "set", "home-1", "--subscriber", "10002", "--wait"}, nil},
		{"router-delete", []string{"router", "delete", "home-1"}, nil},
		{"router-show-ahead", []string{"router", "show", "home-1"}, func(f *fleet) {
			f.routers[0].Session.Sync = pb.SyncState_SYNC_STATE_AHEAD
			f.routers[0].Reported.AppliedRevision = 140
		}},
		{"doctor", []string{"doctor"}, func(f *fleet) { f.admin.ahead = true }},
		{"doctor-repair", []string{"doctor", "--repair"}, func(f *fleet) { f.admin.full = true }},
		{"doctor-accept-restore", []string{"doctor", "--accept-restore"}, func(f *fleet) { f.admin.ahead = true }},
		{"token-create", []string{"token", "create", "--router", "home-9", "--subscriber", "10001"}, nil},
		{"token-list", []string{"token", "list"}, nil},
		{"token-delete", []string{"token", "delete", "abcdefghij"}, nil},
		{"override-set", []string{"override", "set", "10001", "--up", "20mbit", "--set", "down.tins=besteffort"}, nil},
		{"override-clear", []string{"override", "clear", "10001", "up.rate"}, nil},
		{"boost", []string{"boost", "10001", "--down", "300mbit", "--for", "2h"}, nil},
		{"boost-end", []string{"boost", "10001", "--end"}, nil},
		{"suspend-without-policy", []string{"suspend", "10001"}, nil},
		{"suspend", []string{"suspend", "10001", "--policy", "tarpit"}, nil},
		{"resume", []string{"resume", "10001"}, nil},
		{"subscriber-get-layers", []string{"subscriber", "get", "10001"}, func(f *fleet) {
			f.subscribers[0].Layers = &pb.Layers{
				Billing: map[string]string{"down.rate": "90Mbit"}, Override: map[string]string{"up.rate": "20Mbit", "up.tins": "besteffort"},
				Boost: map[string]string{"down.rate": "300Mbit"}, BoostEnd: before(-time.Hour), Suspension: "slow", BillingSuspension: "tarpit",
			}
		}},
		{"router-show-layers", []string{"router", "show", "home-1"}, func(f *fleet) {
			f.routers[0].Desired.Fields = []*pb.OwnedField{{Field: "down.rate", Value: "300Mbit", Owner: "boost"}, {Field: "up.rate", Value: "30Mbit", Owner: "schedule", Schedule: "evening"}, {Field: "up.tins", Value: "besteffort", Owner: "override"}}
			f.routers[0].Desired.Changes = before(-time.Hour)
		}},
		{"schedule-set", []string{"schedule", "set", "evening", "--plan", "gold", "--down", "200mbit", "--window", "mon-fri 18:00-23:00", "--zone", "Europe/Berlin"}, nil},
		{"schedule-set-dry-run", []string{"schedule", "set", "evening", "--label", "site=north", "--to-plan", "night", "--window", "mon-fri 18:00-23:00", "--zone", "Europe/Berlin", "--dry-run"}, nil},
		{"schedule-set-again", []string{"schedule", "set", "nights", "--plan", "gold", "--up", "1mbit", "--start", "2027-01-01 02:00", "--zone", "UTC"}, nil},
		{"schedule-show", []string{"schedule", "show", "nights"}, nil},
		{"schedule-show-missing", []string{"schedule", "show", "none"}, nil},
		{"schedule-list", []string{"schedule", "list"}, nil},
		{"schedule-list-empty", []string{"schedule", "list"}, func(f *fleet) { f.schedules.none = true }},
		{"schedule-pause", []string{"schedule", "pause", "nights"}, nil},
		{"schedule-resume", []string{"schedule", "resume", "nights"}, nil},
		{"schedule-delete", []string{"schedule", "delete", "nights"}, nil},
		{"rollout-start", []string{"rollout", "start", "--plan", "gold", "--to", "rev 7", "--gate", "p99_sojourn < 1.2x control", "--gate", "nack < 1%", "--on-failure", "rollback", "--approval"}, nil},
		{"rollout-start-file", []string{"rollout", "start", "-f", "testdata/rollout.yaml", "--dry-run"}, nil},
		{"rollout-start-refused", []string{"rollout", "start", "x", "--site", "north", "--set", "up.wash=true"}, func(f *fleet) { f.rollouts.bad = true }},
		{"rollout-list", []string{"rollout", "list"}, nil},
		{"rollout-list-empty", []string{"rollout", "list"}, func(f *fleet) { f.rollouts.none = true }},
		{"rollout-show", []string{"rollout", "show", "faster"}, nil},
		{"rollout-watch", []string{"rollout", "watch", "faster", "--every", "100ms"}, nil},
		{"rollout-watch-rolled-back", []string{"rollout", "watch", "faster", "--every", "100ms"}, func(f *fleet) { f.rollouts.bad = true }},
		{"rollout-routers", []string{"rollout", "routers", "faster", "--state", "rejected"}, nil},
		{"rollout-pause", []string{"rollout", "pause", "faster"}, nil},
		{"rollout-rollback", []string{"rollout", "rollback", "faster"}, nil},
		{"rollout-approve-refused", []string{"rollout", "approve", "faster"}, nil},
		{"rollout-history", []string{"rollout", "history"}, nil},
		{"rollout-history-one", []string{"rollout", "history", "faster"}, nil},
		{"plan-history", []string{"plan", "history", "gold"}, nil},
		{"plan-diff", []string{"plan", "diff", "gold@7", "gold@9"}, nil},
		{"plan-diff-json", []string{"plan", "diff", "gold@7", "gold@9", "-o", "json"}, nil},
		{"plan-diff-unknown", []string{"plan", "diff", "gold@7", "gold@8"}, nil},
		{"plan-rollback", []string{"plan", "rollback", "gold", "--to", "7"}, nil},
		{"plan-rollback-dry-run", []string{"plan", "rollback", "gold", "--to", "7", "--dry-run"}, nil},
		{"plan-rollback-unknown", []string{"plan", "rollback", "gold", "--to", "8"}, nil},
		{"stats", []string{"stats", "home-1"}, nil},
		{"stats-measured", []string{"stats", "home-1"}, measured},
		{"stats-missing-interface", []string{"stats", "home-1"}, func(f *fleet) {
			measured(f)
			f.report.Report.Wan = &pb.LinkState{Name: "pppoe-wan", Comings: 1}
			f.report.Report.Probe = &pb.ProbeStats{Host: "gw.example.net", Error: "look up gw.example.net: no such host"}
		}},
		{"stats-silent", []string{"stats", "home-4"}, nil},
		{"stats-by-plan", []string{"stats", "--by", "plan"}, nil},
		{"stats-window", []string{"stats", "--by", "site", "--last", "24h", "--histogram"}, nil},
		{"stats-window-json", []string{"stats", "--by", "site", "--group", "north", "--last", "24h", "-o", "json"}, nil},
		{"stats-window-direction", []string{"stats", "--by", "site", "--last", "24h", "--direction", "up"}, nil},
		{"stats-steps", []string{"stats", "--by", "site", "--last", "1h", "--step", "10m"}, nil},
		{"stats-csv", []string{"stats", "--by", "site", "--last", "1h", "--step", "30m", "--csv"}, nil},
		{"stats-around", []string{"stats", "--by", "site", "--around", "11:00"}, nil},
		{"stats-probe", []string{"stats", "--by", "site", "--last", "24h", "--probe", "--histogram"}, nil},
		{"stats-probe-steps", []string{"stats", "--by", "site", "--last", "1h", "--step", "10m", "--probe"}, nil},
		{"stats-probe-csv", []string{"stats", "--by", "site", "--last", "1h", "--step", "30m", "--probe", "--csv"}, nil},
		{"stats-probe-around", []string{"stats", "--by", "site", "--around", "11:00", "--probe"}, nil},
		{"stats-probe-nothing", []string{"stats", "--by", "model", "--last", "1h", "--probe"}, nil},
		{"stats-window-nothing", []string{"stats", "--by", "model", "--last", "1h"}, nil},
		{"top", []string{"top"}, nil},
		{"top-sites", []string{"top", "sites", "--by", "saturation"}, nil},
		{"top-csv", []string{"top", "--csv"}, nil},
		{"top-nobody", []string{"top", "--site", "nowhere"}, nil},
		{"explain", []string{"explain", "home-1"}, nil},
		{"explain-json", []string{"explain", "home-1", "-o", "json"}, nil},
		{"explain-missing", []string{"explain", "home-9"}, nil},
		{"router-live", []string{"router", "live", "home-1"}, measured},
		{"router-live-silent", []string{"router", "live", "home-4"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFleet()
			if c.change != nil {
				c.change(f)
			}
			address, creds := f.serve(t)
			got := run(t, map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}, c.args...).text(c.args)
			golden(t, c.name, got)
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// What makes no sense is refused before any controller is asked, with what to
// do about it.
func TestRefusedWithoutController(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"override", "set", "1"}, 2, "say what to set"},
		{[]string{"override", "set", "1", "--down", "0"}, 2, "--down: rate \"0\": zero, say unlimited"},
		{[]string{"override", "set", "1", "--set", "up.speed=1"}, 2, "field \"up.speed\" is unknown"},
		{[]string{"override", "clear", "1", "rate"}, 2, "field \"rate\" is unknown"},
		{[]string{"boost", "1", "--down", "1gbit"}, 2, "say for how long"},
		{[]string{"boost", "1", "--for", "1h"}, 2, "say what to set"},
		{[]string{"suspend", "1", "--policy", "Slow"}, 2, "--policy: plan name \"Slow\""},
		{[]string{"plan", "rollback", "g"}, 2, "say which revision"},
		{[]string{"schedule", "set", "e", "--down", "1mbit"}, 2, "say whom it is for"},
		{[]string{"rollout", "start", "--down", "1mbit"}, 2, "say which routers"},
		{[]string{"rollout", "start", "--plan", "g"}, 2, "say what to change"},
		{[]string{"rollout", "start", "--plan", "g", "--to", "seven"}, 2, "--to \"seven\": must be a revision"},
		{[]string{"rollout", "start", "--plan", "g", "--to", "7", "--up", "1mbit"}, 2, "don't go together"},
		{[]string{"rollout", "start", "--plan", "g", "--to", "7", "--start", "2027-01-01 00:00"}, 2, "say in which time zone"},
		{[]string{"rollout", "start", "-f", "/nonexistent.yaml"}, 1, "/nonexistent.yaml"},
		{[]string{"rollout", "start", "-f", "testdata/rollout-unknown.yaml"}, 1, `rollout-unknown.yaml: soakk: unknown field "soakk"`},
		{[]string{"rollout", "start", "-f", "testdata/rollout-wrong.yaml"}, 1, "rollout-wrong.yaml: waves: "},
		{[]string{"rollout", "watch", "x", "--every", "1ms"}, 2, "--every 1ms"},
		{[]string{"schedule", "set", "e", "--plan", "g", "--subscriber", "1", "--down", "1mbit"}, 2, "say whom it is for"},
		{[]string{"schedule", "set", "e", "--label", "site"}, 2, "--label \"site\": must be NAME=VALUE"},
		{[]string{"schedule", "set", "e", "--plan", "g"}, 2, "say what to change"},
		{[]string{"schedule", "set", "e", "--plan", "g", "--to-plan", "h", "--up", "1mbit"}, 2, "make two schedules"},
		{[]string{"schedule", "set", "e", "--plan", "g", "--up", "1mbit"}, 2, "say in which time zone"},
		{[]string{"schedule", "set", "e", "--plan", "g", "--up", "1mbit", "--zone", "UTC"}, 2, "say when"},
		{[]string{"subscriber", "import", "x.csv", "--mass-change", "0"}, 2, "--mass-change 0"},
		{[]string{"plan", "set", "g", "--down", "0", "--up", "1mbit"}, 2, "--down: rate \"0\": zero, say unlimited"},
		{[]string{"plan", "set", "g", "--down", "-5mbit", "--up", "1mbit"}, 2, "--down: rate \"-5mbit\":"},
		{[]string{"plan", "set", "g", "--down", "NaN", "--up", "1mbit"}, 2, "--down: rate \"NaN\":"},
		{[]string{"plan", "set", "g", "--down", "1,5", "--up", "1mbit"}, 2, "--down: rate \"1,5\":"},
		{[]string{"plan", "set", "g", "--down", "100.1gbit", "--up", "1mbit"}, 2, "above 100gbit"},
		{[]string{"plan", "set", "g", "--up", "5"}, 2, "--up: rate \"5\": unit missing"},
		{[]string{"plan", "set", "g", "--options", "diffserv5"}, 2, "--options:"},
		{[]string{"plan", "set", "g", "--up-options", "overhead x"}, 2, "--up-options:"},
		{[]string{"plan", "set", "g", "--down", ""}, 2, "--down: is empty"},
		{[]string{"plan", "set", "g", "--down", "1 5mbit"}, 2, "must be one number and its unit"},
		{[]string{"plan", "set", "g", "--down", "1 5 mbit"}, 2, "must be one number and its unit"},
		{[]string{"plan", "set", "g", "--down", "100Mbps"}, 2, "bps is bytes to tc and bits to most people"},
		{[]string{"plan", "set", "g", "--down", "1mbit", "--up", "1mbit", "--options", "bandwidth 2mbit"}, 2, "--down and a rate in the options"},
		{[]string{"plan", "set", "g", "--up", "1mbit", "--up-options", "unlimited"}, 2, "--up and a rate in the options"},
		{[]string{"plan", "delete", "g", "--replace-with", " "}, 2, "--replace-with: is empty"},
		{[]string{"subscriber", "set", "1", "--plan", ""}, 2, "--plan: is empty"},
		{[]string{"router", "list", "--plan", ""}, 2, "--plan: is empty"},
		{[]string{"plan", "set", "Gold"}, 2, "plan name \"Gold\""},
		{[]string{"plan", "set"}, 2, "cakefleetctl plan set: 0 arguments are given, need NAME"},
		{[]string{"plan"}, 2, "cakefleetctl plan what?"},
		{[]string{"plan", "sett"}, 2, "sett"},
		{[]string{"frobnicate"}, 2, "frobnicate"},
		{[]string{"plan", "list", "--frobnicate"}, 2, "--frobnicate"},
		{[]string{"plan", "list", "-o", "xml"}, 2, "--output \"xml\": must be table or json"},
		{[]string{"plan", "list", "--controller", "nowhere"}, 2, "--controller \"nowhere\": must be HOST:PORT"},
		{[]string{"subscriber", "set", "a b", "--plan", "gold"}, 2, "subscriber id \"a b\""},
		{[]string{"router", "list", "--state", "angry"}, 2, "--state \"angry\""},
		{[]string{"router", "set", "r"}, 2, "subscriber"},
		{[]string{"token", "create"}, 2, "router"},
		{[]string{"token", "create", "--router", "r", "--ttl", "-1h"}, 2, "--ttl -1h0m0s"},
		{[]string{"stats"}, 2, "say one router, or --by GROUP"},
		{[]string{"stats", "home-1", "--by", "plan"}, 2, "say one router, or --by GROUP"},
		{[]string{"stats", "home-1", "--last", "1h"}, 2, "flags about the past are for groups"},
		{[]string{"stats", "--by", "plan", "--last", "-1h"}, 2, "--last -1h0m0s"},
		{[]string{"stats", "--by", "plan", "--from", "yesterday"}, 2, "--from \"yesterday\": must be a time such as"},
		{[]string{"stats", "--by", "plan", "--from", "2026-11-30T11:00", "--to", "2026-11-30T10:00"}, 2, "before it begins"},
		{[]string{"stats", "--by", "plan", "--around", "2027-01-01"}, 2, "is not in the past"},
		{[]string{"stats", "--by", "plan", "--around", "11:00", "--csv"}, 2, "around csv"},
		{[]string{"stats", "--by", "plan", "--probe", "--tins"}, 2, "probe tins"},
		{[]string{"stats", "--by", "plan", "--direction", "left"}, 2, "must be down or up"},
		{[]string{"top", "--by", "luck"}, 2, "--by \"luck\": must be delay, drops or saturation"},
		{[]string{"top", "-n", "0"}, 2, "-n 0: must be 1 to 1000"},
		{[]string{"explain"}, 2, "need ROUTER"},
		{[]string{"router", "live"}, 2, "need ROUTER"},
		{[]string{"cake"}, 2, "arg"},
		{[]string{"cake", "bandwidth 100mbit diffserv9"}, 1, "diffserv9"},
		{[]string{"subscriber", "import", "/nonexistent.csv"}, 1, "/nonexistent.csv"},
		{[]string{"plan", "list", "--credentials", "/nonexistent.pem"}, 1, "no credentials at /nonexistent.pem: a controller writes operator.pem to its data directory"},
	} {
		got := run(t, map[string]string{"HOME": "/nonexistent"}, c.args...)
		if got.code != c.code || !strings.Contains(got.stderr, c.want) || got.stdout != "" {
			t.Errorf("%v: status %d, %q, %q; want status %d and %q", c.args, got.code, got.stdout, got.stderr, c.code, c.want)
		}
	}
}

func TestCakeAndVersion(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"cake", "bandwidth 100mbit diffserv4 nat"}, "bandwidth 100Mbit diffserv4 triple-isolate nat nowash no-ack-filter split-gso rtt 100ms raw overhead 0\n"},
		{[]string{"cake", "bandwidth", "100mbit", "-o", "json"}, "{\n  \"options\": \"bandwidth 100Mbit diffserv3 triple-isolate nonat nowash no-ack-filter split-gso rtt 100ms raw overhead 0\"\n}\n"},
		{[]string{"version"}, "cakefleetctl 0.1.0\n"},
		{[]string{"version", "-o", "json"}, "{\n  \"version\": \"0.1.0\"\n}\n"},
	} {
		if got := run(t, nil, c.args...); got.code != 0 || got.stdout != c.want || got.stderr != "" {
			t.Errorf("%v: %+v, want %q", c.args, got, c.want)
		}
	}
}

func TestControllerThatIsNotThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got := run(t, nil, "plan", "list", "--controller", address, "--credentials", newAuthority(t).credentials(t))
	if got.code != 1 || !strings.Contains(got.stderr, "controller "+address+" can't be reached") || !strings.Contains(got.stderr, "--controller HOST:PORT") || !strings.Contains(got.stderr, "connection refused") {
		t.Errorf("%+v", got)
	}
}

func TestCredentialsOfAnotherFleet(t *testing.T) {
	address, _ := newFleet().serve(t)
	got := run(t, nil, "plan", "list", "--controller", address, "--credentials", newAuthority(t).credentials(t))
	if got.code != 1 || !strings.Contains(got.stderr, "not of the same fleet") {
		t.Errorf("%+v", got)
	}
}

func TestImport(t *testing.T) {
	f := newFleet()
	address, creds := f.serve(t)
	env := map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}
	file := filepath.Join(t.TempDir(), "s.csv")
	csv := "id,plan\n" + strings.Repeat("10001,gold\n", 20000) // several chunks
	if err := os.WriteFile(file, []byte(csv), 0o600); err != nil {
		t.Fatal(err)
	}
	f.importing = &pb.ImportSubscribersResponse{
		Added: 1, Changed: 1, Removed: 1, Unchanged: 7, Applied: true,
		Changes: []*pb.ImportChange{
			{Kind: pb.ImportChange_KIND_ADDED, Id: "20001", After: "plan gold"},
			{Kind: pb.ImportChange_KIND_CHANGED, Id: "10001", Before: "plan gold", After: "plan bronze"},
			{Kind: pb.ImportChange_KIND_REMOVED, Id: "10002", Before: "plan gold"},
		},
	}
	got := run(t, env, "subscriber", "import", file, "--remove-missing")
	want := "+ 20001  plan gold\n~ 10001  plan gold -> plan bronze\n- 10002  plan gold\n1 added, 1 changed, 1 removed, 7 unchanged: stored\n"
	if got.code != 0 || got.stdout != want {
		t.Errorf("%+v, want %q", got, want)
	}
	if string(f.csv) != csv || !f.imported.RemoveMissing || f.imported.DryRun {
		t.Errorf("the controller got %d bytes, %+v", len(f.csv), f.imported)
	}

	f.importing.Applied = false
	if got := run(t, env, "subscriber", "import", file, "--dry-run"); got.code != 0 || !strings.HasSuffix(got.stdout, "nothing is stored (dry run)\n") || !f.imported.DryRun {
		t.Errorf("dry run: %+v", got)
	}

	f.importing = &pb.ImportSubscribersResponse{Changed: 90, Unchanged: 10, Held: "90 of 100 subscribers would be changed"}
	got = run(t, env, "subscriber", "import", file, "--mass-change", "30", "--keep-going")
	if want := "HELD, nothing is stored: 90 of 100 subscribers would be changed; if it is meant, say --allow-mass-change\n"; got.code != 1 || !strings.HasSuffix(got.stdout, want) {
		t.Errorf("held import: %+v", got)
	}
	if f.imported.MassChangePercent != 30 || !f.imported.KeepGoing || f.imported.AllowMassChange {
		t.Errorf("the controller got %+v", f.imported)
	}
	f.importing = &pb.ImportSubscribersResponse{Added: 2, Applied: true, Errors: []*pb.ImportError{{Line: 3, Message: "line has 2 columns, the first line has 3"}}}
	got = run(t, env, "subscriber", "import", file, "--keep-going", "--allow-mass-change")
	if want := "1 bad line left out\nand 2 more changes\n2 added, 0 changed, 0 removed, 0 unchanged: stored\n"; got.code != 1 || !strings.HasSuffix(got.stdout, want) || !f.imported.AllowMassChange {
		t.Errorf("import past bad lines: %+v", got)
	}
	f.importing = &pb.ImportSubscribersResponse{Errors: []*pb.ImportError{{Line: 3, Column: "plan", Message: "plan \"goldd\" does not exist"}, {Line: 9, Message: "2 fields, need 3"}}}
	got = run(t, env, "subscriber", "import", file)
	want = file + ":3: plan: plan \"goldd\" does not exist\n" + file + ":9: 2 fields, need 3\n2 bad lines; nothing is stored\n"
	if got.code != 1 || got.stdout != want {
		t.Errorf("bad lines: %+v, want %q", got, want)
	}

	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := run(t, env, "subscriber", "import", file, "--dry-run"); len(f.csv) != 0 || f.imported == nil || !f.imported.DryRun {
		t.Errorf("empty file: %+v, the controller got %+v", got, f.imported)
	}
}

// Somebody else changes the plan between the look and the change.
// A file of serials with a line of each fault: the others are announced.
func TestProvisionFile(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		code int
		want string   // in what is printed
		rows []string // serial/router/subscriber/labels
	}{
		"comma":                {"serial,router,subscriber,site\nSN1,home-1,10001,north\nSN2,,,\n", 0, "2 routers announced", []string{"SN1/home-1/10001/1", "SN2///0"}},
		"semicolon, BOM, CRLF": {"\ufeffSubscriber;SERIAL\r\n10001; SN1\r\n", 0, "1 router announced", []string{"SN1//10001/0"}},
		"bad lines":            {"serial,subscriber\nSN1,nobody\nSN2\nSN3,10001\nSN3,10002\n", 1, "line 2: serial SN1: subscriber nobody", []string{"SN3//10001/0"}},
		"no serial":            {"router,subscriber\nhome-1,10001\n", 1, "no column is named serial", nil},
		"twice":                {"serial,serial\nx,y\n", 1, "two columns are named serial", nil},
		"empty":                {"", 1, "is empty", nil},
		"quote":                {"serial\n\"SN1\n", 1, "line 2", nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet()
			address, credentials := f.serve(t)
			path := filepath.Join(t.TempDir(), "serials.csv")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			r := run(t, nil, "--controller", address, "--credentials", credentials, "router", "provision", "--file", path)
			if r.code != c.code || !strings.Contains(r.stdout+r.stderr, c.want) {
				t.Errorf("%+v", r)
			}
			var rows []string
			for _, x := range f.announced {
				rows = append(rows, fmt.Sprintf("%s/%s/%s/%d", x.Serial, x.RouterId, x.Subscriber, len(x.Labels)))
			}
			if d := cmp.Diff(c.rows, rows); d != "" {
				t.Errorf("announced (-want +got):\n%s", d)
			}
		})
	}
}

func TestConcurrentChange(t *testing.T) {
	f := newFleet()
	address, creds := f.serve(t)
	env := map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}
	// The stored revision moves on while the command holds the one it read.
	stale := proto.Clone(f.plans[1]).(*pb.Plan)
	stale.Revision--
	stale.Link.Down = wire.FromShaping(link(1e6, 1e6).Down)
	f.stale = stale
	got := run(t, env, "plan", "set", "gold", "--down", "300mbit")
	if got.code != 1 || !strings.Contains(got.stderr, "somebody else changed it in the meantime") {
		t.Errorf("%+v", got)
	}
}

func TestCompletion(t *testing.T) {
	address, creds := newFleet().serve(t)
	env := map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": creds}
	if got := run(t, env, "__complete", "router", "show", ""); !strings.Contains(got.stdout, "home-2\n") {
		t.Errorf("routers: %+v", got)
	}
	if got := run(t, env, "__complete", "subscriber", "set", "1", "--plan", ""); !strings.Contains(got.stdout, "bronze\n") {
		t.Errorf("plans: %+v", got)
	}
	if got := run(t, nil, "completion", "bash"); got.code != 0 || !strings.Contains(got.stdout, "cakefleetctl") {
		t.Errorf("script: %d, %d bytes", got.code, len(got.stdout))
	}
}

func TestGroupsAndHelp(t *testing.T) {
	if got := run(t, nil); got.code != 0 || !strings.Contains(got.stdout, "Available Commands") {
		t.Errorf("no arguments: %+v", got)
	}
	if got := run(t, nil, "plan", "set", "--help"); got.code != 0 || !strings.Contains(got.stdout, "115mbit") {
		t.Errorf("help: %+v", got)
	}
}
