package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// banned packages must not get into the agent: a router has 16 MB of flash and
// 128 MB of memory. A pattern that ends in /... stands for the package and all
// below it.
var banned = []struct{ pattern, reason string }{
	{"github.com/cakefleet/cakefleet/controller/...", "agent and controller meet in internal/plan and proto only"},
	{"go.etcd.io/...", "the store is the controller's"},
	{"github.com/prometheus/...", "metrics are the controller's; the agent reports on its session"},
	{"text/template", "keeps every exported method alive through reflection: 2.6 MB"},
	{"html/template", "as text/template"},
	{"golang.org/x/net/trace", "brings html/template; the tag grpcnotrace leaves it out"},
	{"github.com/spf13/...", "flag is enough for a dozen flags"},
	{"github.com/grpc-ecosystem/...", "REST is the controller's"},
	{"net/http/pprof", "opens a door nobody asked for, and brings text/template"},
	{"expvar", "opens a door nobody asked for"},
	{"testing", "test code in a program"},
	{"google.golang.org/grpc/reflection/...", "the agent serves nothing"},
	{"google.golang.org/genproto/googleapis/api/...", "descriptors of services that the agent doesn't talk to"},
	{"log/syslog", "procd and systemd take what is written to standard error"},
	{"database/sql", "state is one small file"},
	{"plugin", "needs cgo"},
	{"runtime/cgo", "the router's binary is static"},
}

// TestFault118_StartsNoProcess wants no child that could stay: the agent can't
// start one.
func TestFault118_StartsNoProcess(t *testing.T) {
	for _, dep := range dependencies(t) {
		if dep == "os/exec" {
			t.Error("os/exec is in the agent")
		}
	}
}

func TestDependencies(t *testing.T) {
	for _, dep := range dependencies(t) {
		for _, b := range banned {
			prefix, tree := strings.CutSuffix(b.pattern, "/...")
			if dep == prefix || tree && strings.HasPrefix(dep, prefix+"/") {
				t.Errorf("%s is in the agent: %s", dep, b.reason)
			}
		}
	}
}

// dependencies are the packages that are in the agent.
func dependencies(t *testing.T) []string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-tags", "grpcnotrace,osusergo,netgo", ".")
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 50 {
		t.Fatalf("only %d packages are listed: %v", len(deps), deps)
	}
	return deps
}
