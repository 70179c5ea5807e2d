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
	var out, err bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	code := ctl.Run(ctx, ctl.Config{
		Version: "0.1.0", Args: args, Stdout: &out, Stderr: &err,
		Getenv: func(k string) string { return env[k] },
		Now:    func() time.Time { return noon },
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
		{"plan-get-missing", []string{"plan", "get", "silver"}, nil},
		{"plan-list", []string{"plan", "list"}, nil},
		{"plan-list-empty", []string{"plan", "list"}, func(f *fleet) { f.plans = nil }},
		{"plan-delete", []string{"plan", "delete", "bronze"}, nil},
		{"plan-delete-in-use", []string{"plan", "delete", "gold"}, nil},
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
			f.routers[0].Desired.Fields = []*pb.OwnedField{{Field: "down.rate", Value: "300Mbit", Owner: "boost"}, {Field: "up.tins", Value: "besteffort", Owner: "override"}}
			f.routers[0].Desired.Changes = before(-time.Hour)
		}},
		{"plan-history", []string{"plan", "history", "gold"}, nil},
		{"plan-diff", []string{"plan", "diff", "gold@7", "gold@9"}, nil},
		{"plan-diff-json", []string{"plan", "diff", "gold@7", "gold@9", "-o", "json"}, nil},
		{"plan-diff-unknown", []string{"plan", "diff", "gold@7", "gold@8"}, nil},
		{"plan-rollback", []string{"plan", "rollback", "gold", "--to", "7"}, nil},
		{"plan-rollback-dry-run", []string{"plan", "rollback", "gold", "--to", "7", "--dry-run"}, nil},
		{"plan-rollback-unknown", []string{"plan", "rollback", "gold", "--to", "8"}, nil},
		{"stats", []string{"stats", "home-1"}, nil},
		{"stats-silent", []string{"stats", "home-4"}, nil},
		{"stats-by-plan", []string{"stats", "--by", "plan"}, nil},
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
		{[]string{"override", "set", "1", "--down", "0"}, 2, "down.rate: rate \"0\": zero, say unlimited"},
		{[]string{"override", "set", "1", "--set", "up.speed=1"}, 2, "field \"up.speed\" is unknown"},
		{[]string{"override", "clear", "1", "rate"}, 2, "field \"rate\" is unknown"},
		{[]string{"boost", "1", "--down", "1gbit"}, 2, "say for how long"},
		{[]string{"boost", "1", "--for", "1h"}, 2, "say what to set"},
		{[]string{"suspend", "1", "--policy", "Slow"}, 2, "--policy: plan name \"Slow\""},
		{[]string{"plan", "rollback", "g"}, 2, "say which revision"},
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
		{[]string{"stats"}, 2, "say one router, or --by plan"},
		{[]string{"stats", "--by", "moon"}, 2, "--by \"moon\": must be plan"},
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
