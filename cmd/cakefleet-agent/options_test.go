package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
)

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := write("good", "# router\ncontroller isp.example\ninterface pppoe-wan # WAN\n\nmax-rate 300mbit\nlog-json\nprobe 2001:db8::1\nprobe-interval 30s\nrouter-model Archer C7 v2\n")
	o, err := parseOptions([]string{"--config", good, "--interface", "eth0"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if o.controller != "isp.example:8443" || o.iface != "eth0" || o.maxRate != 300e6 || !o.logJSON || o.routerModel != "Archer C7 v2" || o.probe != "2001:db8::1" || o.probeInterval != 30*time.Second || o.stateDir != "/etc/cakefleet" {
		t.Errorf("got %+v", o)
	}

	ok := []string{"--controller", "[2001:db8::1]:99", "--interface", "eth0"}
	if o, err := parseOptions(ok, io.Discard); err != nil || o.controller != "[2001:db8::1]:99" {
		t.Errorf("got %+v, %v", o, err)
	}
	for want, args := range map[string][]string{
		"--controller HOST:PORT":        {"--interface", "eth0"},
		"--interface NAME":              {"--controller", "a"},
		"no interface has such a name":  {"--controller", "a", "--interface", "a/b"},
		"ip link lists them":            {"--controller", "a", "--interface", "sixteen-letters-"},
		"give one of them":              append(ok[:4:4], "--token", "a", "--token-file", "b"),
		"must be trace":                 append(ok[:4:4], "--log-level", "loud"),
		"must be auto":                  append(ok[:4:4], "--dataplane", "magic"),
		"flags only":                    append(ok[:4:4], "extra"),
		"max-rate":                      append(ok[:4:4], "--max-rate", "0"),
		"no such file":                  append(ok[:4:4], "--config", filepath.Join(dir, "missing")),
		"--probe-interval 1ms: must":    append(ok[:4:4], "--probe-interval", "1ms"),
		`line 2: "frobnicate" is not a`: append(ok[:4:4], "--config", write("unknown", "\nfrobnicate 1\n")),
		"line 1: max-rate:":             append(ok[:4:4], "--config", write("bad", "max-rate fast\n")),
		"line 1: token needs a value":   append(ok[:4:4], "--config", write("empty", "token\n")),
		`"config" is not a setting`:     append(ok[:4:4], "--config", write("loop", "config x\n")),
	} {
		if _, err := parseOptions(args, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want %q", args, err, want)
		}
	}
}

func TestTokenFileMayComeLater(t *testing.T) {
	o := options{tokenFile: filepath.Join(t.TempDir(), "token")}
	if _, err := o.joinToken(); err == nil || !strings.Contains(err.Error(), "token") {
		t.Errorf("missing: %v", err)
	}
	if err := os.WriteFile(o.tokenFile, []byte("cf1.a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := o.joinToken(); err != nil || got != "cf1.a" {
		t.Errorf("got %q, %v", got, err)
	}
}

// What is printed once is printed again: the key is kept.
func TestPrintKey(t *testing.T) {
	o := options{stateDir: filepath.Join(t.TempDir(), "state"), serialNumber: "ab:cd 1"}
	var first, second strings.Builder
	if err := printKey(&first, o); err != nil {
		t.Fatal(err)
	}
	if err := printKey(&second, o); err != nil || second.String() != first.String() {
		t.Errorf("%v: %q, then %q", err, first.String(), second.String())
	}
	if serial, key, ok := strings.Cut(first.String(), " "); !ok || serial != "ABCD-1" || len(key) != 65 {
		t.Errorf("printed %q", first.String())
	}
	if o, err := parseOptions([]string{"--print-key", "--state-dir", "x"}, io.Discard); err != nil || !o.printKey {
		t.Errorf("no controller is needed: %v", err)
	}
}

// A hangup with a changed file starts anew, with a broken one changes nothing.
func TestReload(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	args := []string{"--config", path, "--interface", "wan"}
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("controller a\n")
	o, err := parseOptions(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	log := hclog.NewNullLogger()
	if reload(&o, args, log) {
		t.Error("the same file is taken for a change")
	}
	write("controler b\n")
	if reload(&o, args, log) || o.controller != "a:8443" {
		t.Errorf("a broken file was taken over: %+v", o)
	}
	write("controller b\n")
	if !reload(&o, args, log) || o.controller != "b:8443" {
		t.Errorf("a changed file was not taken over: %+v", o)
	}

	done, hangup := make(chan error, 1), make(chan os.Signal, 2)
	hangup <- os.Interrupt // ignored: nothing has changed
	hangup <- os.Interrupt
	asked := 0
	err = follow(done, hangup, func() bool { asked++; return asked == 2 }, func() { done <- io.EOF })
	if !errors.Is(err, io.EOF) || asked != 2 {
		t.Errorf("ended with %v after %d hangups", err, asked)
	}
}
