package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
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

func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), asMain+"=1")
	return cmd
}

func TestStartAndStop(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "data")
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		first  bool
	}{
		{"first start", syscall.SIGTERM, true},
		{"second start", syscall.SIGINT, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := program(t, "--data-dir", dir, "--listen-agents", "127.0.0.1:0", "--listen-operators", "127.0.0.1:0", "--listen-http", "127.0.0.1:0", "--listen-admin", "127.0.0.1:0")
			var logged bytes.Buffer
			cmd.Stderr = &logged
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var said strings.Builder
			for in := bufio.NewScanner(stdout); in.Scan(); {
				said.WriteString(in.Text() + "\n")
				if strings.Contains(in.Text(), "agents connect to") {
					if err := cmd.Process.Signal(c.signal); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("ended with %v:\n%s", err, logged.String())
			}
			credentials := filepath.Join(dir, "operator.pem")
			if told := strings.Contains(said.String(), credentials) && strings.Contains(said.String(), "token create"); told != c.first {
				t.Errorf("said:\n%s", said.String())
			}
			if strings.Contains(said.String()+logged.String(), "PRIVATE KEY") {
				t.Error("a key was printed")
			}
		})
	}
}

func TestRefusesArguments(t *testing.T) {
	for want, args := range map[string][]string{
		`argument "x" is not understood`: {"x"},
		`log level "loud"`:               {"--log-level", "loud"},
		"cakefleet-controller: flag provided but not defined: -insecure; see cakefleet-controller --help\n":        {"--insecure"},
		"cakefleet-controller: invalid value \"x\" for flag -audit-entries: parse error; see cakefleet-controller": {"--audit-entries", "x"},
		"not defined: -bogus; see cakefleet-controller restore --help\n":                                           {"restore", "--bogus"},
		"report interval 1ns":                                      {"--report-interval", "1ns"},
		"oidc: the audience is missing (--oidc-audience":           {"--oidc-issuer", "https://id.example.net"},
		"for flag -oidc-role: \"admin\": must be ROLE=VALUE, such": {"--oidc-role", "admin"},
	} {
		out, err := program(t, args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) || strings.Count(string(out), "\n") != 1 {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
	out, err := program(t, "--version").Output()
	if err != nil || !strings.HasPrefix(string(out), "cakefleet-controller ") {
		t.Errorf("version: %v, %q", err, out)
	}
}
