// Command build makes cakefleet-agent for routers:
//
//	go run ./deploy/router/build --out bin/router [mips mipsle mips64 mips64le arm arm64 amd64]
//
// Each is a static binary OUT/cakefleet-agent-ARCH. Those for MIPS get a mended
// copy of Go's runtime, see overlay.go.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// tags leave out what a router has no use for: cgo's resolver and user
// look-up, and gRPC's trace pages (2.6 MB with the templates they bring).
const tags = "grpcnotrace,osusergo,netgo"

const agentPackage = module + "/cmd/cakefleet-agent"

// architectures are GOARCH values with what else the compiler is told.
var architectures = map[string][]string{
	"mips":     {"GOMIPS=softfloat"},
	"mipsle":   {"GOMIPS=softfloat"},
	"mips64":   {"GOMIPS64=softfloat"},
	"mips64le": {"GOMIPS64=softfloat"},
	"arm":      {"GOARM=5"}, // any ARM since 2000, no floating-point unit needed
	"arm64":    nil,
	"amd64":    nil,
}

// small are packages that are compiled without inlining: what runs once for a
// connection, a report or a change, and never for a packet. It saves 7 % of
// the binary. Nothing belongs here that package engine or a packet loop
// calls: a package without inlining can't be inlined into others either.
var small = []string{
	"google.golang.org/...", "github.com/golang/...", "github.com/hashicorp/...", "golang.org/x/net/...", "vendor/...",
	"bufio", "bytes", "compress/...", "context", "flag", "fmt", "hash/...", "html/...", "log/...", "mime/...",
	"math/big", "math/rand/...", "net", "net/http/...", "net/textproto", "net/url", "os/...", "path/...", "reflect/...", "sort", "strconv", "strings", "unicode/...",
	"encoding/asn1", "encoding/base64", "encoding/hex", "encoding/json/...", "encoding/pem",
	"crypto/aes", "crypto/des", "crypto/dsa", "crypto/ecdh", "crypto/hmac", "crypto/hpke", "crypto/rc4", "crypto/ecdsa", "crypto/ed25519", "crypto/elliptic", "crypto/rsa", "crypto/tls/...", "crypto/x509/...",
	"crypto/internal/fips140/ecdsa", "crypto/internal/fips140/rsa", "crypto/internal/fips140/tls12", "crypto/internal/fips140/tls13", "crypto/internal/fips140/bigmod", "crypto/internal/fips140/drbg", "crypto/internal/fips140/hkdf", "crypto/internal/fips140/mlkem", "crypto/internal/entropy/...",
	"crypto/internal/fips140/nistec/...", // a handshake has X25519 and Ed25519
	module + "/agent", module + "/agent/ending", module + "/agent/identity", module + "/agent/outbox", module + "/agent/probe", module + "/agent/session", module + "/agent/sqm", module + "/agent/state",
	module + "/agent/dataplane/auto", module + "/agent/dataplane/kernel", module + "/agent/dataplane/wan",
	module + "/internal/...", module + "/proto/...", module + "/cmd/...",
}

// operators are files of the protocol that only operators speak, and what maps
// them. A program with a package has all of its descriptors, so that the agent
// would carry some 200 messages of which it never sees one: 5 % of it. It is
// built as if they were not there.
var operators = []string{
	"internal/wire/resources.go",
	"proto/cakefleet/v1/admin", "proto/cakefleet/v1/audit", "proto/cakefleet/v1/join", "proto/cakefleet/v1/operator",
	"proto/cakefleet/v1/peer", "proto/cakefleet/v1/plan", "proto/cakefleet/v1/rollout", "proto/cakefleet/v1/router",
	"proto/cakefleet/v1/schedule", "proto/cakefleet/v1/subscriber", "proto/cakefleet/v1/telemetry",
}

// smaller returns what makes the agent smaller, as writeOverlay takes it. New
// files go to dir.
func smaller(goroot, dir string) (map[string]string, error) {
	root, err := output("go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return nil, err
	}
	files, err := absent(root)
	if err != nil {
		return nil, err
	}
	regexps, err := filepath.Glob(filepath.Join(goroot, "src", "regexp", "*.go"))
	if err != nil {
		return nil, err
	}
	replaced := map[string]string{}
	for _, path := range append(files, regexps...) {
		replaced[path] = "" // as go build understands it
	}
	source := filepath.Join(goroot, "src", "regexp", "regexp.go")
	if _, there := replaced[source]; !there {
		return nil, fmt.Errorf("%s is not there: package regexp can't be left out of the agent, see noRegexp in deploy/router/build/main.go", source)
	}
	replaced[source] = filepath.Join(dir, "regexp.go")
	return replaced, os.WriteFile(replaced[source], []byte(noRegexp), 0o644)
}

// noRegexp stands for package regexp, 2 % of the agent. It has no more than its
// users need, see regexpUsers, and matches nothing.
const noRegexp = `package regexp

type Regexp struct{}

func MustCompile(string) *Regexp { return new(Regexp) }

func (*Regexp) Find([]byte) []byte                 { return nil }
func (*Regexp) FindStringIndex(string) []int       { return nil }
func (*Regexp) FindStringSubmatch(string) []string { return nil }
func (*Regexp) MatchString(string) bool            { return false }
`

// regexpUsers are the packages of the agent that import regexp, and what each does
// without a match. No other may.
var regexpUsers = map[string]string{
	"google.golang.org/grpc/internal/binarylog":         "refuses what GRPC_BINARY_LOG_FILTER says, with a warning; no router has it",
	"google.golang.org/protobuf/internal/encoding/json": "leaves what it can't read out of the error; the agent reads no such JSON",
	"github.com/hashicorp/go-hclog":                     "excludes no lines, and keeps a time that another logger has put before one",
}

// absent returns the files of operators in the module's directory.
func absent(dir string) ([]string, error) {
	var files []string
	for _, name := range operators {
		these := []string{name}
		if filepath.Ext(name) == "" {
			these = []string{name + ".pb.go", name + "_grpc.pb.go"}
		}
		for _, f := range these {
			path := filepath.Join(dir, f)
			if _, err := os.Stat(path); err != nil {
				return nil, fmt.Errorf("the agent is built without it: %w", err)
			}
			files = append(files, path)
		}
	}
	return files, nil
}

const module = "github.com/cakefleet/cakefleet"

func main() {
	out := flag.String("out", "bin/router", "`directory` for the binaries")
	version := flag.String("version", "devel", "`version` to report")
	pkg := flag.String("package", agentPackage, "`package` to build, for the lab's programs")
	mend := flag.Bool("mend", true, "mend Go's runtime; the lab shows what is without")
	flag.Parse()
	archs := flag.Args()
	if len(archs) == 0 {
		archs = []string{"mips", "mipsle", "mips64", "mips64le", "arm", "arm64", "amd64"}
	}
	if err := run(*out, *version, *pkg, *mend, archs); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

func run(out, version, pkg string, mend bool, archs []string) (err error) {
	for _, arch := range archs {
		if _, ok := architectures[arch]; !ok {
			return fmt.Errorf("architecture %q: not one that the agent is built for", arch)
		}
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp("", "cakefleet-build-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	goroot, err := output("go", "env", "GOROOT")
	if err != nil {
		return err
	}
	var replaced map[string]string
	if pkg == agentPackage {
		if replaced, err = smaller(goroot, temp); err != nil {
			return err
		}
	}
	if !mend {
		goroot = ""
	}
	for _, arch := range archs {
		overlay, err := writeOverlay(goroot, temp, arch, replaced)
		if err != nil {
			return err
		}
		path := filepath.Join(out, filepath.Base(pkg)+"-"+arch)
		if err := build(path, version, pkg, arch, overlay); err != nil {
			return err
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		fmt.Printf("%s %d bytes\n", path, info.Size())
	}
	return nil
}

func build(path, version, pkg, arch, overlay string) error {
	args := []string{
		"build", "-trimpath", "-tags", tags,
		"-ldflags", fmt.Sprintf("-s -w -X main.version=%s -X main.built=%d", version, buildTime().Unix()),
		"-o", path,
	}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	for _, pkg := range small {
		args = append(args, "-gcflags="+pkg+"=-l")
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Env = slices.Concat(os.Environ(), []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + arch}, architectures[arch])
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build for %s: %w", arch, err)
	}
	return nil
}

// buildTime is a time that has passed when the agent runs: that of the newest
// commit, so that the same source gives the same binary. Without a repository
// it is now.
func buildTime() time.Time {
	out, err := exec.Command("git", "log", "-1", "--format=%cI").Output()
	if err == nil {
		if t, err := time.Parse(time.RFC3339, strings.TrimSpace(string(out))); err == nil {
			return t
		}
	}
	return time.Now()
}

// output returns what a command prints.
func output(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// writeOverlay writes the description that go build takes of files that are
// replaced: those of Go that are mended for a machine, unless goroot is empty,
// and others. An empty path means that there are none.
func writeOverlay(goroot, dir, arch string, others map[string]string) (string, error) {
	replace := maps.Clone(others)
	if replace == nil {
		replace = map[string]string{}
	}
	for _, f := range faults {
		if goroot == "" || !slices.Contains(f.archs, arch) {
			continue
		}
		source := filepath.Join(goroot, "src", "runtime", f.file)
		b, err := os.ReadFile(source)
		if err != nil {
			return "", err
		}
		text, err := mend(string(b), f)
		if err != nil {
			return "", fmt.Errorf("%s: %w", source, err)
		}
		replace[source] = filepath.Join(dir, arch+"-"+f.file)
		if err := os.WriteFile(replace[source], []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	if len(replace) == 0 {
		return "", nil
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, arch+".json")
	return path, os.WriteFile(path, b, 0o644)
}
