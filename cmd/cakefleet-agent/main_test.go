package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// asMain makes the test binary the program itself.
const asMain = "CAKEFLEET_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func program(t *testing.T, path string, args ...string) (cmd *exec.Cmd, said *bytes.Buffer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	t.Cleanup(cancel)
	cmd = exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), asMain+"=1")
	said = &bytes.Buffer{}
	cmd.Stderr = said
	return cmd, said
}

// running is an agent that was started.
type running struct {
	t    *testing.T
	cmd  *exec.Cmd
	log  *os.File
	said []byte // and not looked at yet
}

// startAgent starts an agent that is stopped at the test's end, and has to end well.
func startAgent(t *testing.T, ns *testnet.Namespace, args ...string) *running {
	t.Helper()
	cmd, _ := program(t, os.Args[0], args...)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = w
	if err := errors.Join(ns.Start(cmd), w.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait(), r.Close()); err != nil {
			t.Error(err)
		}
	})
	return &running{t: t, cmd: cmd, log: r}
}

// says waits until the agent logs some words.
func (r *running) says(words string) {
	r.t.Helper()
	b := make([]byte, 4096)
	for !bytes.Contains(r.said, []byte(words)) {
		n, err := r.log.Read(b)
		if err != nil {
			r.t.Fatalf("it does not say %q: %v\n%s", words, err, r.said)
		}
		r.said = append(r.said, b[:n]...)
	}
	_, r.said, _ = bytes.Cut(r.said, []byte(words))
}

// A hangup with a new configuration starts anew on the same interface and state,
// which the one before has let go; one with a broken configuration says so.
func TestHangup(t *testing.T) {
	testnet.Require(t)
	ns := testnet.Make(t, "alone")
	if err := testnet.Veth(ns, "wan", ns, "end"); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config")
	write := func(text string) {
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("max-rate 100mbit\n")
	a := startAgent(t, ns, "--controller", "127.0.0.1:1", "--interface", "wan", "--state-dir", t.TempDir(), "--dataplane", "userspace", "--config", config)
	hangup := func(says ...string) {
		t.Helper()
		if err := a.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		for _, words := range says {
			a.says(words)
		}
	}
	a.says("no saved state")
	hangup("configuration has not changed")
	write("max-rate fast\n")
	hangup("configuration is not taken over", "max-rate")
	write("max-rate 200mbit\n")
	hangup("configuration has changed: starting anew", "agent starts", "no saved state")
}

// Without root it ends with a sentence that says what it takes.
func TestWithoutRoot(t *testing.T) {
	testnet.Require(t)
	ns := testnet.Make(t, "alone")
	if err := testnet.Veth(ns, "wan", ns, "end"); err != nil {
		t.Fatal(err)
	}
	// Where anybody may run it.
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agent")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, plane := range []string{"auto", "kernel", "userspace"} {
		cmd, said := program(t, path, "--controller", "127.0.0.1:1", "--interface", "wan", "--state-dir", filepath.Join(dir, "state"), "--dataplane", plane)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		err := ns.Run(cmd)
		var ended *exec.ExitError
		if !errors.As(err, &ended) || ended.ExitCode() != exitFailed || !strings.Contains(said.String(), "the agent needs root, or CAP_NET_ADMIN to shape") {
			t.Errorf("%s: %v\n%s", plane, err, said)
		}
	}
}

// A second agent on the interface, or in the state directory, ends with a
// sentence that says why; the first goes on.
func TestSecondAgent(t *testing.T) {
	testnet.Require(t)
	ns := testnet.Make(t, "alone")
	if err := errors.Join(testnet.Veth(ns, "wan", ns, "end"), testnet.Veth(ns, "wan2", ns, "end2")); err != nil {
		t.Fatal(err)
	}
	state := t.TempDir()
	args := func(iface, dir string) []string {
		return []string{"--controller", "127.0.0.1:1", "--interface", iface, "--state-dir", dir, "--dataplane", "userspace"}
	}
	// It says so when both locks are its own.
	startAgent(t, ns, args("wan", state)...).says("no saved state")
	for _, c := range []struct {
		name, want string
		args       []string
	}{
		{"interface", "interface wan: another cakefleet-agent shapes it: stop that one first", args("wan", t.TempDir())},
		{"state", "state directory " + state + ": another cakefleet-agent uses it", args("wan2", state)},
	} {
		cmd, said := program(t, os.Args[0], c.args...)
		err := ns.Run(cmd)
		var ended *exec.ExitError
		if !errors.As(err, &ended) || ended.ExitCode() != exitFailed || !strings.Contains(said.String(), c.want) {
			t.Errorf("%s: %v\n%s", c.name, err, said)
		}
	}
}

// One wrong thing on the command line is told as one line, with where to look.
// A join token that is none ends a router that has nothing else, and only that.
func TestMistyped(t *testing.T) {
	good := []string{"--controller", "127.0.0.1:1", "--interface", "lo", "--state-dir", t.TempDir()}
	for want, c := range map[string]struct {
		args []string
		code int
	}{
		"cakefleet-agent: flag provided but not defined: -bogus; see cakefleet-agent --help\n":       {append(good[:6:6], "--bogus"), exitUsage},
		"cakefleet-agent: invalid value \"fast\" for flag -max-rate: ":                               {append(good[:6:6], "--max-rate", "fast"), exitUsage},
		"join token can't be used: must be cf1.ID.SECRET.PIN as cakefleetctl token create prints it": {append(good[:6:6], "--token", "rubbish"), exitFailed},
		"join token can't be used: its last part is not a SHA-256 pin; is the token cut off?":        {append(good[:6:6], "--token", "cf1.a.b.c"), exitFailed},
	} {
		cmd, said := program(t, os.Args[0], c.args...)
		_ = cmd.Run() // the status says it
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(said.String(), want) || strings.Count(said.String(), "\n") != 1 {
			t.Errorf("%v: status %d, want %d and one line with %q:\n%s", c.args, code, c.code, want, said)
		}
	}
	cmd, said := program(t, os.Args[0], "--help")
	if err := cmd.Run(); err != nil || !strings.Contains(said.String(), "-max-rate rate") || !strings.HasPrefix(said.String(), "cakefleet-agent shapes a router's WAN link") {
		t.Errorf("help: %v\n%s", err, said)
	}
	// What is damaged is no reason to leave a home unshaped.
	o := options{token: "rubbish", stateDir: t.TempDir()}
	if err := o.checkToken(); err == nil {
		t.Error("a router without anything waits for ever")
	}
	if err := os.WriteFile(filepath.Join(o.stateDir, "identity.pem"), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := o.checkToken(); err != nil {
		t.Errorf("with an identity, damaged or not: %v", err)
	}
}
