package main

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// What the engine and the packet loops import keeps its inlining, but for what
// they use to configure, to print and to fail.
func TestPacketsMeetNothingSmall(t *testing.T) {
	seldom := []string{
		"bytes", "context", "encoding/json", "fmt", "os", "strconv", "strings",
		"github.com/hashicorp/go-hclog", module + "/internal/plan",
	}
	out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`,
		module+"/engine", module+"/agent/dataplane/userspace", module+"/agent/dataplane/nfqueue").Output()
	if err != nil {
		t.Fatal(err)
	}
	imports := strings.Fields(string(out))
	if !slices.Contains(imports, "encoding/binary") || !slices.Contains(imports, module+"/engine") {
		t.Fatalf("the imports are %v", imports)
	}
	for _, pkg := range append(imports, module+"/engine", module+"/agent/dataplane/userspace", "runtime", "internal/runtime/syscall/linux", "syscall") {
		for _, pattern := range small {
			tree, whole := strings.CutSuffix(pattern, "/...")
			if (pkg == tree || whole && strings.HasPrefix(pkg, tree+"/")) && !slices.Contains(seldom, pkg) {
				t.Errorf("%s is compiled without inlining because of %s", pkg, pattern)
			}
		}
	}
}

// The agent is built with a package regexp that matches nothing, so nothing of it
// may use one but what can do without.
func TestNothingUsesRegexp(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-tags", tags, "-f", `{{.ImportPath}} {{join .Imports " "}}`, agentPackage)
	cmd.Env = append(cmd.Environ(), "GOOS=linux", "GOARCH=mips", "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var users []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); slices.Contains(f[1:], "regexp") {
			users = append(users, f[0])
		}
	}
	slices.Sort(users)
	if known := slices.Sorted(maps.Keys(regexpUsers)); !slices.Equal(users, known) {
		t.Errorf("regexp is imported by %v, noRegexp is made for %v", users, known)
	}
}
